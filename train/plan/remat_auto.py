"""Replaces `remat.policy=auto` by the plan with the least recomputation whose step fits the memory budget.

The search is in memory/remat/remat_search.py. This module compiles the plans that the search asks for.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import roofline
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.remat.remat_problem import CompiledPlan, LayerPlan, PlanFigures, RematProblem
from bytescope.memory.remat.remat_search import FULL, RematSearch
from bytescope.memory.seconds import ranking, rates, step_prediction
from bytescope.memory.units import human, plural
from bytescope.model.remat.policies import AUTO
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan import advice
from bytescope.train.plan.block_description import describe_block, fixed_policies, max_ranges
from bytescope.train.plan.config_grid import plan_keys
from bytescope.train.plan.run_memory import loop_overhead
from bytescope.train.program.checks import check
from bytescope.train.program.config_files import flatten, override
from bytescope.train.program.program import Program, assemble, build
from bytescope.train.program.program_settings import Settings, read_settings
from bytescope.train.user_errors import DoesNotFit

# Nominal FLOP/s and bytes/s of one or two cores, used only to rank plans if the device is unknown or a CPU. Measured
# rates of a CPU would differ between processes.
NOMINAL = roofline.Figures({"fp32": 1e11}, 2e10, 2e10, dict.fromkeys(roofline.LINKS, 2e10), "nominal rates")


def figures_of(target: targets.Target) -> roofline.Figures:
    """Returns the FLOP/s and bytes/s of a target, with which the remat search orders plans (which tensors each layer
    saves) before it compiles them.

    The rates are the same in every process. For an unknown device, and for a CPU without `--rates=FILE`, they are the
    constants in NOMINAL.
    """
    unknown = target.platform == "cpu" and not rates.chosen()
    return NOMINAL if unknown else ranking.large(target) or NOMINAL


def with_keys(config: ConfigDict, keys: Mapping[str, str]) -> ConfigDict:
    """Returns a copy of the config in which the given keys are set.

    keys: dotted key -> text.
    """
    out = ConfigDict(config.to_dict())
    for key, text in keys.items():
        override(out, key, text)
    return out


@dataclasses.dataclass
class Compiler:
    """Compiles remat plans (which tensors each layer saves) of one config for given devices.

    A call with plans returns the bytes, seconds and FLOPs of their programs.

    Attributes:
        config: the config.
        devices: the devices to compile for.
        target: the same devices as a target, with their memory limit.
        rates: the FLOP/s and bytes/s of the devices.
        full: the program that recomputes every block.
    """

    config: ConfigDict
    devices: Sequence[jax.Device]
    target: targets.Target

    def __post_init__(self):
        self.rates = figures_of(self.target)
        self.full = self.program({"remat.policy": FULL})

    @functools.cached_property
    def report(self) -> ReportRecord:
        """The memory report of `full`. It is compiled when it is first needed."""
        return self._report(self.full)

    @property
    def overhead(self) -> int:
        """Bytes that the program `full` needs in the allocator's pool beside the bytes that XLA allocates for it."""
        return self.report.predicted_bytes - self.report.allocated_bytes

    def program(self, keys: Mapping[str, str]) -> Program:
        """Returns the program of the config after the given keys are set.

        keys: dotted key -> text.
        """
        return build(with_keys(self.config, keys), self.devices)

    def _report(self, program: Program) -> ReportRecord:
        compilation = program.compile_for_report(exact=True, pool_bytes=self.target.pool_bytes)
        return report_of(compilation, target=self.target, loop=loop_overhead(program))

    def __call__(self, plans: Sequence[LayerPlan]) -> list[PlanFigures]:
        """Compiles remat plans (which tensors each layer saves) one by one. Returns their bytes, predicted seconds and
        recomputed FLOPs."""
        return [self._figures(plan) for plan in plans]

    def _figures(self, plan: LayerPlan) -> PlanFigures:
        keys = plan_keys(plan)
        try:
            full = keys["remat.policy"] == FULL and keys["remat.layers"] == "()"
            report = self.report if full else self._report(self.program(keys))
        except ValueError as error:  # the search skips a plan that cannot run
            return PlanFigures(status=" ".join(str(error).split()))
        seconds = sum(self._predict_by_phase(report).values())
        recomputed = sum(report.work["recompute"]["flops"].values())
        return PlanFigures(report.allocated_bytes, report.host_bytes, seconds, recomputed)

    def _predict_by_phase(self, report: ReportRecord) -> Mapping[str, float]:
        """Predicts the seconds of each phase of one call of the step."""
        predicted = None
        if self.rates is not NOMINAL:
            predicted = step_prediction.predict(report.schedule, self.target)
        return (predicted or roofline.seconds(report.work, self.rates)).by_phase

    def problem(self) -> RematProblem:
        """Returns the input of the search for remat plans (which tensors each layer saves): the graph of a block, the
        rates, the memory budget, and the policies to try."""
        config = self.config
        scanned = self.full if config.model.scan else self.program({"remat.policy": FULL, "model.scan": "true"})
        micro_steps = self.full.batch.accumulation if self.full.scanned else 1
        policies = {name: names for name, names in fixed_policies().items() if names is not None}
        moving = config.remat.auto_offload and self.target.platform != "cpu" and not self.full.stages
        return RematProblem.on_target(
            describe_block(scanned),
            self._predict_by_phase(self.report),
            micro_steps,
            self.rates,
            self.target,
            cost=config.remat.cost,
            offload=moving,
            policies=policies,
            ranges=max_ranges(self.full),
        )


def settled_program(
    config: ConfigDict,
    devices: Sequence[jax.Device] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    agree: Callable[[Any], Any] = lambda value: value,
    target: targets.Target | None = None,
) -> Program:
    """Returns the training program of a config. `remat.policy=auto` is replaced by a plan (which tensors each layer
    saves) that fits the memory budget.

    Args:
        config: the config.
        devices: the devices to run on; None for all devices of the run.
        tell: called with a line of text for each program that is compiled.
        agree: takes a JSON value and returns the value that process 0 passed. All processes call it in the same order.
            The default is for one process.
        target: the devices as a target, with the memory that programs can use; None if it follows from the devices.

    Raises:
        DoesNotFit: no plan fits the memory budget.
        ValueError: the config cannot run on the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    settings, decided = settle(read_settings(config), devices, tell, agree, target)
    return assemble(check(settings, devices), decided)


def settle(
    settings: Settings,
    devices: Sequence[jax.Device],
    tell: Callable[[str], None] = lambda line: None,
    agree: Callable[[Any], Any] = lambda value: value,
    target: targets.Target | None = None,
) -> tuple[Settings, str]:
    """Replaces `remat.policy=auto` in the settings by a plan (which tensors each layer saves) that fits the memory
    budget.

    Returns the new settings and a line of text that describes the plan. With any other policy, returns the settings
    unchanged and "".

    Processes that train together need the same program. Each process searches with the budget of process 0 and uses the
    plan of process 0.

    Args:
        settings: the settings of the program.
        devices: the devices to run on.
        tell: called with a line of text for each program that is compiled.
        agree: takes a JSON value and returns the value that process 0 passed. All processes call it in the same order.
            The default is for one process.
        target: the devices as a target, with the memory that programs can use; None if it follows from the devices.

    Raises:
        DoesNotFit: no plan fits the memory budget.
        ValueError: the policy differs from the policy of process 0, or the config cannot run.
    """
    remat = settings.remat
    first = agree(remat.policy)
    if first != remat.policy:
        raise ValueError(
            f"remat.policy={remat.policy} differs from process 0, which has {first}: give all processes the same config"
        )
    if remat.policy != AUTO:
        return settings, ""
    if remat.granularity != "block":
        raise ValueError(
            f"remat.granularity={remat.granularity} cannot be combined with remat.policy=auto, which chooses the "
            "tensors that a whole block saves; set remat.granularity=block"
        )
    for key, names in (("layers", remat.layers), ("save", remat.save), ("offload", remat.offload)):
        if names:
            raise ValueError(
                f"remat.{key}={','.join(names)} cannot be combined with remat.policy=auto, which chooses "
                f"remat.{key}: give one of the two"
            )
    target = target or targets.from_devices(devices, TRAIN_FRACTION)
    keys, line = _search_plan(Compiler(settings.config, devices, target), remat.budget, tell, agree)
    return read_settings(with_keys(settings.config, keys)), line


def _search_plan(
    compiler: Compiler, budget_text: str, tell: Callable[[str], None], agree: Callable[[Any], Any]
) -> tuple[Mapping[str, str], str]:
    """Searches for the remat plan (which tensors each layer saves) of lowest cost. Returns the config keys of the plan
    that process 0 found, and a line of text that describes it.

    Args:
        compiler: compiles the plans.
        budget_text: the value of `remat.budget`.
        tell: called with a line of text for each program that is compiled.
        agree: takes a JSON value and returns the value that process 0 passed.

    Raises:
        DoesNotFit: no plan fits the memory budget.
    """
    budget = budget_of(budget_text, agree(compiler.target.limit_bytes - compiler.overhead), "remat.budget")

    def show(tried: CompiledPlan) -> None:
        compiled = tried.compiled
        figures = f"{human(compiled.allocated_bytes)} of {human(budget)}" if tried.ok else compiled.status
        tell(f"auto: {tried.plan}: {figures}")

    outcome = RematSearch(compiler.problem(), compiler, show).run(budget)
    best, chosen = outcome.best, None
    if best is not None:
        size = f"{human(best.compiled.allocated_bytes)} of {human(budget)}"
        chosen = plan_keys(best.plan), f"auto: {best.plan}; {size}, {plural(len(outcome.tried), 'program')} compiled"
    chosen = agree(chosen)
    if chosen is not None:
        keys, line = chosen
        return keys, line
    assert outcome.tightest is not None  # at least one plan was compiled
    smallest = outcome.tightest.compiled.allocated_bytes
    full = dataclasses.replace(compiler.report, config=flatten(compiler.full.config))
    raise DoesNotFit(
        f"remat.policy=auto: the smallest plan ({outcome.tightest.plan}) takes {human(smallest)}, "
        f"{human(smallest - budget)} more than the budget of {human(budget)}: give a larger remat.budget, or a "
        "smaller batch.micro with more accumulation, or try bytescope fit",
        advice.lines(full, advice.open_levers(full), []),
    )
