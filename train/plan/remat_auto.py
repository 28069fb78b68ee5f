"""Settles `remat.policy=auto`: the config of the step with the least recomputation that fits the budget.

The search is memory/remat/remat_search.py; this module describes the program to it and compiles what it asks for.
"""

import dataclasses
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
from bytescope.memory.remat.remat_search import FULL, NONE, RematSearch
from bytescope.memory.seconds import ranking, rates, step_prediction
from bytescope.memory.units import human
from bytescope.model.remat.policies import AUTO, POLICIES
from bytescope.train.plan import advice
from bytescope.train.plan.block_description import describe_block, most_ranges
from bytescope.train.plan.config_grid import plan_keys
from bytescope.train.plan.run_peak import loop_overhead
from bytescope.train.program.checks import check_values
from bytescope.train.program.config_files import flatten, override
from bytescope.train.program.program import Program, build
from bytescope.train.user_errors import DoesNotFit

# Peaks of an unknown device, and of a CPU, whose measured rates would differ between processes: FLOP/s and bytes/s of a
# core or two. They are for ranking plans only.
NOMINAL = roofline.Figures({"fp32": 1e11}, 2e10, 2e10, dict.fromkeys(roofline.LINKS, 2e10), "nominal rates")


def figures_of(target: targets.Target) -> roofline.Figures:
    """What a target's devices reach, by which plans are ranked before they are compiled; the same in every process.

    A CPU's are those of --rates=FILE alone.
    """
    unknown = target.platform == "cpu" and not rates.chosen()
    return NOMINAL if unknown else ranking.large(target) or NOMINAL


def fixed_policies(moving: bool = False) -> dict[str, tuple[str, ...] | None]:
    """Policy -> the names that it keeps, None where names do not say it, for all policies but `full` and `none`.

    moving: those that move tensors to host memory, instead of those that do not.
    """
    rows = {name: row for name, row in POLICIES.items() if row and row.offloads == moving and name not in (FULL, NONE)}
    return {name: None if moving else row.names or None for name, row in rows.items()}


def with_keys(config: ConfigDict, keys: Mapping[str, str]) -> ConfigDict:
    """Returns a copy of the config with the values of `keys`, dotted key -> text."""
    out = ConfigDict(config.to_dict())
    for key, text in keys.items():
        override(out, key, text)
    return out


@dataclasses.dataclass
class Compiler:
    """Compiles plans for one config on some devices; called with plans, it returns their figures.

    Fields: `target`; `rates`: what its devices reach; `full`: the program that recomputes everything; `report`: that
    program's.
    """

    config: ConfigDict
    devices: Sequence[jax.Device]

    def __post_init__(self):
        self.target = targets.of(self.devices)
        self.rates = figures_of(self.target)
        self.full = self.program({"remat.policy": FULL})
        self.report = self._report(self.full)

    def program(self, keys: dict[str, str]) -> Program:
        """The program of the config with `keys`, dotted key -> text."""
        return build(with_keys(self.config, keys), self.devices)

    def _report(self, program: Program) -> ReportRecord:
        return report_of(program.compile_for_report(exact=True), target=self.target, loop=loop_overhead(program))

    def __call__(self, plans: Sequence[LayerPlan]) -> list[PlanFigures]:
        """The compiler's figures of each plan."""
        return [self._one(plan) for plan in plans]

    def _one(self, plan: LayerPlan) -> PlanFigures:
        keys = plan_keys(plan)
        try:
            full = keys["remat.policy"] == FULL and keys["remat.layers"] == "()"
            report = self.report if full else self._report(self.program(keys))
        except ValueError as error:  # the search leaves out a plan that cannot run
            return PlanFigures(status=" ".join(str(error).split()))
        recomputed = sum(report.work["recompute"]["flops"].values())
        return PlanFigures(report.allocated_bytes, report.host_bytes, sum(self._by_phase(report).values()), recomputed)

    def _by_phase(self, report: ReportRecord) -> Mapping[str, float]:
        """Phase -> seconds of one call: predicted from the schedule, by a roofline where nothing predicts them."""
        found = step_prediction.of(report.schedule, self.target) if self.rates is not NOMINAL else None
        return found.by_phase if found else roofline.seconds(report.work, self.rates).by_phase

    def problem(self) -> RematProblem:
        """The problem that the search solves."""
        config = self.config
        scanned = self.full if config.model.scan else self.program({"remat.policy": FULL, "model.scan": "true"})
        micro_steps = self.full.batch.accumulation if self.full.scanned else 1
        policies = {name: names for name, names in fixed_policies().items() if names is not None}
        moving = config.remat.auto_offload and self.target.platform != "cpu" and not self.full.stages
        return RematProblem.on_target(
            describe_block(scanned),
            self._by_phase(self.report),
            micro_steps,
            self.rates,
            self.target,
            cost=config.remat.cost,
            offload=moving,
            policies=policies,
            ranges=most_ranges(self.full),
        )


def settled_program(
    config: ConfigDict,
    devices: Sequence[jax.Device] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> Program:
    """The program of any config, also one with `remat.policy=auto`: settle, check, assemble.

    Its arguments are those of `settle`, and it raises what `settle` and `train.program.program.build` raise.
    """
    devices = jax.devices() if devices is None else list(devices)
    config, decided = settle(config, devices, tell, agree)
    return dataclasses.replace(build(config, devices), decided=decided)


def settle(
    config: ConfigDict,
    devices: Sequence[jax.Device],
    tell: Callable[[str], None] = lambda line: None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> tuple[ConfigDict, str]:
    """The config with `remat.policy=auto` replaced by a plan, and the plan in a line; without it the config and "".

    Processes that train together need the same program: each of them searches, with the budget of process 0, and takes
    the plan of process 0.

    Args:
      tell: called with a line for each program that is compiled.
      agree: a JSON value -> that of process 0; all processes call it, in the same order.

    Raises:
      DoesNotFit: no plan fits the budget.
      ValueError: a value that is in no table, a budget that is not a valid size, or a config that cannot run.
    """
    check_values(config)
    first = agree(config.remat.policy)
    if first != config.remat.policy:
        raise ValueError(
            f"remat.policy={config.remat.policy} differs from process 0, which has {first}: give all "
            "processes the same config"
        )
    if config.remat.policy != AUTO:
        return config, ""
    return _decide(config, devices, tell, agree)


def _decide(
    config: ConfigDict, devices: Sequence[jax.Device], tell: Callable[[str], None], agree: Callable[[Any], Any]
) -> tuple[ConfigDict, str]:
    """The config with a plan in the place of `auto`, and the plan in a line; raises as `settle` does."""
    if config.remat.granularity != "block":
        raise ValueError(
            f"remat.granularity={config.remat.granularity} with remat.policy=auto, which chooses what a "
            "whole block keeps; set remat.granularity=block"
        )
    for key in ("layers", "save", "offload"):
        if config.remat[key]:
            raise ValueError(
                f"remat.{key}={','.join(config.remat[key])} with remat.policy=auto, which chooses it: "
                "give one of the two"
            )
    compiler = Compiler(config, devices)
    overhead = compiler.report.predicted_bytes - compiler.report.allocated_bytes
    budget = budget_of(config.remat.budget, agree(compiler.target.limit_bytes - overhead), "remat.budget")

    def show(tried: CompiledPlan) -> None:
        compiled = tried.compiled
        figures = f"{human(compiled.allocated_bytes)} of {human(budget)}" if tried.ok else compiled.status
        tell(f"auto: {tried.plan}: {figures}")

    outcome = RematSearch(compiler.problem(), compiler, show).run(budget)
    best, found = outcome.best, None
    if best is not None:
        found = (
            plan_keys(best.plan),
            (
                f"auto: {best.plan}; {human(best.compiled.allocated_bytes)} of {human(budget)}, "
                f"{len(outcome.tried)} programs compiled"
            ),
        )
    found = agree(found)
    if found is None:
        assert outcome.tightest is not None  # a plan was compiled
        least = outcome.tightest.compiled.allocated_bytes
        full = dataclasses.replace(compiler.report, config=flatten(compiler.full.config))
        raise DoesNotFit(
            f"remat.policy=auto: the smallest plan ({outcome.tightest.plan}) takes {human(least)}, "
            f"{human(least - budget)} more than {human(budget)}: give a larger remat.budget, or a smaller "
            "batch.micro with more accumulation, or try bytescope fit",
            advice.lines(full, advice.open_levers(full), []),
        )
    keys, line = found
    return with_keys(config, keys), line
