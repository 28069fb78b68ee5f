"""`remat.policy=auto` settled: the config of the step with the least recomputation that fits the budget.

memory/remat/search.py searches; here are the program that it asks about and the compiles that it asks for.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from bytescope.memory.analyze import report_of
from bytescope.memory.costs import roofline
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.records import Report
from bytescope.memory.remat.block_graph import Block, block_of
from bytescope.memory.remat.ilp import Plan
from bytescope.memory.remat.problem import Compiled, Problem, Tried, problem_of
from bytescope.memory.remat.search import FULL, NONE, Search
from bytescope.memory.units import human
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import AUTO, POLICIES
from bytescope.train.checks import check_values
from bytescope.train.config import override
from bytescope.train.errors import DoesNotFit
from bytescope.train.parallel.axes import activation_axes
from bytescope.train.planning.run_peak import loop_overhead
from bytescope.train.program import Program, build

# Of a device that nothing is known of, and of a CPU, whose measured rates would differ from one process to the next:
# FLOP/s and bytes/s of a core or two. They order plans, no more.
NOMINAL = roofline.Figures({"fp32": 1e11}, 2e10, 2e10, dict.fromkeys(roofline.LINKS, 2e10), "nominal rates")
# What a kernel outside of the checkpoint keeps with its result (`model.block.CUTS`).
AROUND_KERNEL = ("q_rot", "k_rot", "v")


def figures_of(target: targets.Target) -> roofline.Figures:
    """The rates that plans for a target are judged by, the same in every process."""
    return NOMINAL if target.platform == "cpu" else roofline.figures(target) or NOMINAL


def describe_block(program: Program) -> Block:
    """The graph of one block of a `Program` of scanned layers."""
    def parts(name: str) -> int:
        dims = program.layout.split(activation_axes(NAMES[name][0]))
        return math.prod(program.mesh.shape[axis] for dim in dims for axis in dim)

    outside = program.kernel[0] == "cudnn"
    return block_of(program.trace_gradient(), parts, {"context": AROUND_KERNEL} if outside else {})


def fixed_policies(moving: bool = False) -> dict[str, tuple[str, ...] | None]:
    """Policy -> the names that it keeps, None where it is more than that; of those that move tensors to host memory,
    or of those that do not."""
    return {name: None if row.offloads or not row.names else row.names for name, row in POLICIES.items()
            if row and row.offloads == moving and name not in (FULL, NONE)}


def with_keys(config: ConfigDict, keys: dict[str, str]) -> ConfigDict:
    """A copy of the config with other values of some keys, as text."""
    out = ConfigDict(config.to_dict())
    for key, text in keys.items():
        override(out, key, text)
    return out


@dataclasses.dataclass
class Compiler:
    """Compiles plans for one config on some devices."""

    config: ConfigDict
    devices: Sequence[jax.Device]

    def __post_init__(self):
        self.target = targets.of(self.devices)
        self.rates = figures_of(self.target)
        self.full = self.program({"remat.policy": FULL})
        self.report = self._report(self.full)

    def program(self, keys: dict[str, str]) -> Program:
        """The program with these keys."""
        return build(with_keys(self.config, keys), self.devices)

    def _report(self, program: Program) -> Report:
        return report_of(program.compile_for_report(exact=True), target=self.target, loop=loop_overhead(program))

    def __call__(self, plans: Sequence[Plan]) -> list[Compiled]:
        """What the compiler says of each plan."""
        return [self._one(plan) for plan in plans]

    def _one(self, plan: Plan) -> Compiled:
        keys = plan.keys()
        try:
            full = keys["remat.policy"] == FULL and keys["remat.layers"] == "()"
            report = self.report if full else self._report(self.program(keys))
        except ValueError as error:  # a plan that cannot run is no plan
            return Compiled(status=" ".join(str(error).split()))
        again = sum(report.work["recompute"]["flops"].values())
        return Compiled(report.allocated_bytes, report.host_bytes, roofline.seconds(report.work, self.rates).total,
                        again)

    def problem(self) -> Problem:
        """What is to be decided."""
        config = self.config
        scanned = self.full if config.model.scan else self.program({"remat.policy": FULL, "model.scan": "true"})
        micro_steps = self.full.batch.accumulation if self.full.scanned else 1
        policies = {name: names for name, names in fixed_policies().items() if names is not None}
        return problem_of(describe_block(scanned), self.report.work, micro_steps, self.rates, self.target,
                          cost=config.remat.cost, offload=config.remat.auto_offload and self.target.platform != "cpu",
                          policies=policies)


def settled_program(config: ConfigDict, devices: Sequence[jax.Device] | None = None,
                    tell: Callable[[str], None] = lambda line: None,
                    agree: Callable[[Any], Any] = lambda value: value) -> Program:
    """The program of a config that may leave `remat.policy=auto` to be settled: settle, check, assemble.

    The arguments and errors are those of `settle` and `train.program.build`.
    """
    devices = jax.devices() if devices is None else list(devices)
    config, why = settle(config, devices, tell, agree)
    return dataclasses.replace(build(config, devices), decided=why)


def settle(config: ConfigDict, devices: Sequence[jax.Device], tell: Callable[[str], None] = lambda line: None,
           agree: Callable[[Any], Any] = lambda value: value) -> tuple[ConfigDict, str]:
    """The config with nothing left to decide, and in a line what was decided, "" where nothing was.

    With `remat.policy=auto` some programs are compiled on the way; `tell` is told each, in a line. Processes that
    train together compile one program: each searches, under the budget of the first of them, and takes its plan.
    `agree`: a JSON value -> that of the first process; all ask, in the same order.

    Raises:
      DoesNotFit: no plan fits the budget.
      ValueError: a value that is in no table, a budget that is not a valid size, or a config that cannot run.
    """
    check_values(config)
    if (first := agree(config.remat.policy)) != config.remat.policy:
        raise ValueError(f"remat.policy={config.remat.policy} differs from process 0, which has {first}: give all "
                         "processes the same config")
    return _decide(config, devices, tell, agree) if config.remat.policy == AUTO else (config, "")


def _decide(config: ConfigDict, devices: Sequence[jax.Device], tell: Callable[[str], None],
            agree: Callable[[Any], Any]) -> tuple[ConfigDict, str]:
    """The config with a plan in the place of `auto`, and the plan in a line."""
    if config.remat.granularity != "block":
        raise ValueError(f"remat.granularity={config.remat.granularity} with remat.policy=auto: it chooses for a block "
                         "as one checkpoint; set remat.granularity=block")
    for key in ("layers", "save", "offload"):
        if config.remat[key]:
            raise ValueError(f"remat.{key}={','.join(config.remat[key])} with remat.policy=auto, which chooses that: "
                             "give one of them")
    compiler = Compiler(config, devices)
    besides = compiler.report.predicted_bytes - compiler.report.allocated_bytes
    budget = budget_of(config.remat.budget, agree(compiler.target.limit_bytes - besides), "remat.budget")

    def show(tried: Tried) -> None:
        found = tried.compiled
        tell(f"auto: {tried.plan}: " + (f"{human(found.allocated_bytes)} of {human(budget)}" if tried.ok
                                        else found.status))

    search = Search(compiler.problem(), compiler, show)
    outcome = search.run(budget)
    best, found = outcome.best, None
    if best is not None:
        found = best.plan.keys(), (f"auto: {best.plan}; {human(best.compiled.allocated_bytes)} of {human(budget)}, "
                                   f"{len(outcome.tried)} programs compiled")
    found = agree(found)
    if found is None:
        least = outcome.tightest.compiled.allocated_bytes
        raise DoesNotFit(f"remat.policy=auto: the least that recomputation comes to is {human(least)} "
                         f"({outcome.tightest.plan}), {human(least - budget)} more than {human(budget)}: give a larger "
                         "remat.budget, a smaller batch.micro with more accumulation, or bytescope fit")
    keys, line = found
    return with_keys(config, keys), line
