"""Finds the least recomputation within a budget for a whole training step, by compiling the user's own step with each
policy.

`remat_planning` has the search for a loss that the caller gives. Here the loss is found inside the step
(remat/step_loss.py), so that the optimizer, the accumulation of gradients and the donation of the state are the user's.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.errors import ReportError
from bytescope.memory.program.compilation import is_traced, unwrapped_stage
from bytescope.memory.program.retarget import argument_shardings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.remat.layer_values import with_names
from bytescope.memory.remat.remat_problem import CompiledPlan, LayerPlan, RematProblem
from bytescope.memory.remat.remat_search import RematSearch
from bytescope.memory.remat.step_loss import StepLoss, remat_policy
from bytescope.memory.report.remat_plan import RematPlan
from bytescope.memory.report.remat_planning import Built, PolicyCompiler, make_plan, policy_name
from bytescope.memory.report.report_object import Report

# The example that the message for a step without layers shows.
WRAP = "wrap the block that repeats, as in block = jax.checkpoint(block)"


class StepCompiler(PolicyCompiler):
    """Compiles a training step once for each remat policy that a search proposes.

    Args:
        trace: traces the step and returns a `jax.stages.Traced`. Each call traces the step again.
        compile: traces the step again, compiles it, and returns its report and its compilation.
        only_names: whether layers may keep only values that have a name (`checkpoint_name`).

    Raises ReportError if the step differentiates nothing, if no layers are found in its loss, or if the step cannot be
    compiled.
    """

    def __init__(
        self,
        trace: Callable[[], Any],
        compile: Callable[[], tuple[ReportRecord, Compilation]],
        only_names: bool = False,
    ):
        self.optimizer = self._target = None
        self._compile, self._only_names = compile, only_names
        self._start(StepLoss.find(lambda: _traced_stage(trace()), argument_shardings))

    def _start(self, loss: Any, blocks: Any = ()) -> None:
        try:
            super()._start(loss, blocks)
        except ReportError as error:
            if str(error).startswith("no layers found"):
                raise ReportError(f"no layers found in the step: {WRAP}") from error
            raise

    def policy(self, plan: LayerPlan) -> Any:
        """Returns the remat policy for a plan: one of jax's own policies if the plan names it, `save_only_these_names`
        if all values of the plan have names, or else a policy that recognizes the values by their equations.
        """
        import jax

        kept = [self.values.values[label] for label in plan.ranges[0][0].save]
        if policy_name(plan) or not kept or not all(value.name for value in kept):
            return super().policy(plan)
        return jax.checkpoint_policies.save_only_these_names(*sorted({value.name for value in kept}))

    def problem(self) -> RematProblem:
        problem = super().problem()
        if not self._only_names:
            return problem
        names = {value.label for value in self.values.values.values() if value.name}
        return dataclasses.replace(problem, graph=with_names(problem.graph, names))

    def _build(self, policy: Any) -> Built:
        try:
            with remat_policy(self.layers, policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # jax warns at each compile of the step
                report, compilation = self._compile()
        except ReportError as error:
            if not self.built:
                raise
            raise RuntimeError(str(error)) from error  # the search goes on without this plan
        return Built(policy, Report.of(report), flops.count(compilation.jaxpr))


def _traced_stage(program: Any) -> Any:
    stage = unwrapped_stage(program)
    if not is_traced(stage):
        raise ReportError(
            "the program is lowered or compiled already, so its policies cannot be changed: return the step with its "
            "arguments, (step, (state, batch)), or jax.jit(step).trace(state, batch)"
        )
    return stage


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The result of a search for the least recomputation of a step.

    Fields:
        plan: the plan with the least recomputation that fits the budget; None if no plan fits.
        tightest: the compiled plan with the fewest bytes; None if nothing compiled.
        budget_bytes: the budget in bytes on one device.
        compiled: number of programs that were compiled.
    """

    plan: RematPlan | None
    tightest: CompiledPlan | None
    budget_bytes: int
    compiled: int


def plan_step(compiler: StepCompiler, budget: str | float | None, tell: Callable[[CompiledPlan], None]) -> StepPlan:
    """Searches for the values that the layers of a step keep for the backward pass, so that the step fits a budget with
    the least recomputation.

    Args:
        compiler: compiles the step.
        budget: bytes on one device, as a number or as text such as "72GiB"; None for all bytes that are available on a
            device of the target.
        tell: called with each plan after it was compiled.

    Raises ReportError if the budget is not a valid size.
    """
    size = compiler.budget(budget)
    search = RematSearch(compiler.problem(), compiler, tell)
    search.compile(search.fixed)
    outcome = search.run(size)
    plan = None if outcome.best is None else make_plan(compiler, search, outcome, size)
    return StepPlan(plan, outcome.tightest, size, len(search.tried))
