"""Finds the least recomputation within a budget, as a policy for `jax.checkpoint`: for the loss of any model
(`plan_remat`), and for a whole training step (`StepCompiler`, which `bytescope fit` searches with).

The loss is traced once. Its layers are found in the jaxpr (remat/layer_discovery.py), and the values that they can
keep are read from jax's own derivative (remat/layer_values.py). The search (remat/remat_search.py) compiles the
gradient with a policy for each plan that it tries, and with jax's own policies.

Of a whole step, the loss is found inside the step (remat/step_loss.py), so that the optimizer, the accumulation of
gradients and the donation of the state are the user's. The user's own step is compiled with each policy.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops, roofline
from bytescope.memory.devices import limits
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.program.compilation import compiled_for, is_traced, unwrapped_stage
from bytescope.memory.program.retarget import argument_shardings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import LayerValues, find_values, with_names
from bytescope.memory.remat.recognition import RematPolicy, Value
from bytescope.memory.remat.remat_problem import (
    CompiledPlan,
    LayerPlan,
    PassSeconds,
    PlanFigures,
    RecomputeRates,
    RematProblem,
    SearchOutcome,
)
from bytescope.memory.remat.remat_search import FULL, NONE, RematSearch
from bytescope.memory.remat.step_loss import Loss, StepLoss, remat_policy
from bytescope.memory.report.remat_plan import PolicyFigures, RematPlan
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import MAX_BYTES, human

# The search's name of a policy of jax -> its name in `jax.checkpoint_policies`.
BUILT_IN = {
    FULL: "nothing_saveable",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims_saveable",
    "dots_saveable": "dots_saveable",
    NONE: "everything_saveable",
}
# The example that the message for a step without layers shows.
WRAP = "wrap the block that repeats, as in block = jax.checkpoint(block)"


def plan_remat(
    loss: Callable[..., Any],
    args: Sequence[Any],
    target: Target | str | None = None,
    budget: str | float | None = None,
    *,
    optimizer: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    blocks: Collection[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> RematPlan:
    """Finds the values to keep for the backward pass, so that the gradient fits a memory budget with the least
    recomputation.

    The layers of the model are the functions that the loss runs under `jax.checkpoint` (also flax.linen.remat and
    equinox.filter_checkpoint), the body of a scan, or equal functions called one after the other. Remat policies that
    the layers already have are ignored. The search compiles the gradient of the loss for the target, once for each
    plan that it tries, and runs nothing.

    Args:
        loss: function (params, ...) -> scalar or (scalar, auxiliary result), plain or jitted. It is differentiated by
            its first argument.
        args: arguments of the loss: arrays, ShapeDtypeStructs, or pytrees of either. Their shardings are used.
        target: the devices to compile for, as in `memory.analyze`.
        budget: bytes that the program may take on one device, as a number or as text such as "72GiB". None: all bytes
            that are available on a device of the target.
        optimizer: object with `init` and `update`, such as an optax optimizer. If it is given, the compiled program is
            a whole update, which includes the optimizer's state.
        kwargs: keyword arguments of the loss.
        blocks: names of the checkpointed functions that are layers; () if all of them are.
        tell: called with a line of text for each program that is compiled.

    Raises ReportError if no layers are found, the budget is not a valid size, or no plan fits the budget.
    """
    # An invalid budget is refused before anything is compiled.
    limits.budget_of(written(budget), MAX_BYTES, "budget")
    compiler = PolicyCompiler(Loss(loss, args, kwargs or {}), target, optimizer, blocks)
    size = compiler.budget(budget)

    def show(tried: CompiledPlan) -> None:
        name = policy_name(tried.plan) or str(tried.plan)
        tell(f"{name}: {human(tried.compiled.allocated_bytes) if tried.ok else tried.compiled.status}")

    search = RematSearch(compiler.problem(), compiler, show)
    search.compile(search.fixed)
    return make_plan(compiler, search, search.run(size), size)


def make_plan(compiler: PolicyCompiler, search: RematSearch, outcome: SearchOutcome, budget: int) -> RematPlan:
    """Converts the outcome of a search to the plan that a user gets. Raises ReportError if no plan fits the budget.

    Args:
        compiler: has compiled the programs of the search.
        search: the search, with the figures of jax's own policies.
        outcome: the result of the search for this budget.
        budget: the budget in bytes on one device.
    """
    report = compiler.full.report
    if outcome.best is None:
        raise _nothing_fits(outcome, budget)
    best, name = outcome.best, policy_name(outcome.best.plan)
    built = compiler.of_plan(best.plan)
    figures = [search.tried[str(plan)] for plan in search.fixed]
    return RematPlan(
        policy=compiler.policy(best.plan) if name == FULL else built.policy,
        name=BUILT_IN.get(name, ""),
        kept=compiler.kept(best.plan),
        allocated_bytes=best.compiled.allocated_bytes,
        budget_bytes=budget,
        recomputed_flops=built.counted.recomputed,
        model_flops=built.counted.total - built.counted.recomputed,
        built_in=tuple(
            PolicyFigures(
                BUILT_IN[policy_name(tried.plan)],
                tried.compiled.allocated_bytes,
                int(tried.compiled.flops),
                tried.compiled.status,
            )
            for tried in figures
        ),
        compiled=len(search.tried),
        layers=tuple(compiler.layers),
        target=report.target.get("name", ""),
        report=built.report,
    )


def _nothing_fits(outcome: SearchOutcome, budget: int) -> ReportError:
    if outcome.tightest is None:
        return ReportError(f"no plan could be compiled: {outcome.tried[0].compiled.status}")
    plan, least = outcome.tightest.plan, outcome.tightest.compiled.allocated_bytes
    return ReportError(
        f"nothing fits {human(budget)}: with {BUILT_IN.get(policy_name(plan), plan)} the step takes "
        f"{human(least)}, {human(least - budget)} more; give a larger budget or a smaller batch"
    )


# ---- compiling ----------------------------------------------------------------------------------------------


class PolicyCompiler:
    """Compiles a program (the gradient of a loss, or a whole update) once for each remat policy that a search
    proposes. `starting` is called with each plan before it is compiled.
    """

    def __init__(self, loss: Loss, target: Target | str | None, optimizer: Any, blocks: Collection[str]):
        self.loss, self.optimizer, self._target = loss, optimizer, target
        self._start(loss, blocks)

    def _start(self, loss: Loss | StepLoss, blocks: Collection[str] = ()) -> None:
        """Finds the layers of the loss and their values, and compiles the program that recomputes everything."""
        self.layers = find_layers(loss.jaxpr, loss.active, blocks)
        self.values: LayerValues = find_values(self.layers, loss.shards)
        self.built: dict[str, Built] = {}
        self.starting: Callable[[LayerPlan], None] = lambda plan: None
        # The program that recomputes everything gives the target, and shows whether a layer's operations are traced in
        # the same order in the program as alone.
        probe = RematPolicy(self.values.wanted(()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.full = self.built[FULL] = self._build(probe)
        if probe.lost:
            self.values = find_values(self.layers, loss.shards, ordered=False)

    def policy(self, plan: LayerPlan) -> Any:
        """Returns the remat policy for a plan, which is the choice of values that each layer keeps: one of jax's own
        policies if the plan names it, or else a policy that keeps the plan's values.
        """
        import jax

        name = policy_name(plan)
        if name:
            return getattr(jax.checkpoint_policies, BUILT_IN[name])
        return RematPolicy(self.values.wanted(plan.ranges[0][0].save))

    def _build(self, policy: Any) -> Built:
        traced = self.loss.step(self.layers, policy, self.optimizer)
        compilation, target = compiled_for(traced, target=self._target)
        return Built(policy, Report.of(report_of(compilation, target=target)), flops.count(traced.jaxpr))

    def of_plan(self, plan: LayerPlan) -> Built:
        """Returns the compiled program of a plan. The plan was compiled before."""
        return self.built[policy_name(plan) or str(plan)]

    def kept(self, plan: LayerPlan) -> tuple[Value, ...]:
        """Returns the values that every layer keeps, largest first."""
        return tuple(
            sorted((self.values.values[label] for label in plan.ranges[0][0].save), key=lambda value: -value.bytes)
        )

    def __call__(self, plans: Sequence[LayerPlan]) -> Iterator[PlanFigures]:
        """Compiles the program under each plan (a choice of the values that each layer keeps). Yields allocated bytes,
        host bytes and recomputed FLOPs of each as soon as it is compiled.
        """
        for plan in plans:
            yield self._one(plan)

    def _one(self, plan: LayerPlan) -> PlanFigures:
        name = policy_name(plan) or str(plan)
        if name not in self.built:
            self.starting(plan)
            try:
                self.built[name] = self._build(self.policy(plan))
            except ReportError:
                raise
            except (ValueError, RuntimeError) as error:  # the search skips a plan that does not compile
                return PlanFigures(status=" ".join(str(error).split()))
        built = self.built[name]
        if isinstance(built.policy, RematPolicy) and name != FULL:
            built.policy.check()
        report, predicted = built.report, built.report.prediction.get("seconds", 0.0)
        return PlanFigures(report.allocated_bytes, report.host_bytes, predicted, built.counted.recomputed)

    def budget(self, budget: str | float | None) -> int:
        """Returns the bytes that the compiled program may allocate: the budget, but at most the target's limit minus
        the memory that the runtime takes.
        """
        report = self.full.report
        if report.limit_bytes is None:
            raise ReportError('the memory size of the device is not known: give a target, such as target="h100"')
        limit = report.limit_bytes - (report.predicted_bytes - report.allocated_bytes)
        return limits.budget_of(written(budget), limit, "budget")

    def problem(self) -> RematProblem:
        """Returns the input of the search: the graph of one layer, and recomputed FLOPs as the cost to minimize."""
        rates = RecomputeRates(dict.fromkeys(roofline.UNITS, 1.0), 1.0)
        policies = {name: None for name in BUILT_IN if name not in (FULL, NONE)}
        return RematProblem(self.values.graph, rates, PassSeconds(), "flops", policies=policies)


@dataclasses.dataclass(frozen=True)
class Built:
    """One compiled program of a search.

    Fields:
        policy: the remat policy of the layers.
        report: the memory report of the program.
        counted: the FLOPs of the program.
    """

    policy: Any
    report: Report
    counted: flops.FlopCount

    @classmethod
    def of(cls, policy: Any, report: ReportRecord, compilation: Compilation) -> Built:
        """Returns a compiled program, with its FLOPs counted."""
        counted = flops.count(compilation.jaxpr) if compilation.jaxpr is not None else flops.FlopCount()
        return cls(policy, Report.of(report), counted)


def written(budget: str | float | None) -> str:
    """Returns a memory budget in the text form that `limits.budget_of` parses: a number of bytes as digits, text
    unchanged, and "" for None.
    """
    if budget is None:
        return ""
    return budget if isinstance(budget, str) else f"{budget:.0f}"


def policy_name(plan: LayerPlan) -> str:
    """Returns the name of the jax policy that a plan uses; "" if the plan lists the values to keep one by one."""
    return plan.ranges[0][0].policy


# ---- a whole training step ----------------------------------------------------------------------------------


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
        return Built.of(policy, report, compilation)


def _traced_stage(program: Any) -> Any:
    stage = unwrapped_stage(program)
    if not is_traced(stage):
        raise ReportError(
            "the program is lowered or compiled already, so its policies cannot be changed: return the step with its "
            "arguments, (step, (state, batch)), or jax.jit(step).trace(state, batch)"
        )
    return stage
