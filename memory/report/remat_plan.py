"""`plan_remat`: the least recomputation under a budget for anyone's model, as a policy for its own `jax.checkpoint`.

    plan = memory.plan_remat(loss, (params, batch), target="h200", budget="72GiB")
    print(plan)
    block = jax.checkpoint(block, policy=plan.policy)      # or flax.linen.remat(Block, policy=plan.policy)

The loss is traced once. Its layers are found in the jaxpr (remat/layer_discovery.py), and what they can keep is read
from jax's own derivative (remat/layer_values.py). The search (remat/remat_search.py) compiles the gradient with a
policy for each plan that it tries, and with the policies of jax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bytescope.memory.devices import limits
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.layer_discovery import Layer
from bytescope.memory.remat.loss_gradient import Loss
from bytescope.memory.remat.recognition import RematPolicy, Value
from bytescope.memory.remat.remat_problem import CompiledPlan, SearchOutcome
from bytescope.memory.remat.remat_search import FULL, RematSearch
from bytescope.memory.report import remat_account
from bytescope.memory.report.remat_planning import BUILT_IN, PolicyCompiler, name_of, written
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import MOST, human


@dataclasses.dataclass(frozen=True)
class PolicyFigures:
    """What the compiler says of a policy: bytes allocated on one device, FLOPs recomputed in one step over all
    devices; `status`: "ok", or why there are none."""

    name: str
    allocated_bytes: int
    recomputed_flops: int
    status: str = "ok"


@dataclasses.dataclass(frozen=True, repr=False)
class RematPlan:
    """The values that a model's layers keep for their backward pass; shows its account at a prompt and in a notebook.

    Fields:
        policy: for `jax.checkpoint`: a RematPolicy, or one of `jax.checkpoint_policies` where that is best.
        name: of that one, "" for a RematPolicy.
        kept: what it keeps by choice, largest first; a layer's inputs are kept besides.
        allocated_bytes: what the gradient's program takes on one device, as compiled; at most budget_bytes.
        recomputed_flops, model_flops: of one step over all devices, what is recomputed, and all else.
        built_in: the figures of jax's own policies. compiled: how many programs were compiled.
        layers: what was planned for, as `remat.layers` has it.
        report: of the program under the plan. target: its name.
    """

    policy: Any
    name: str
    kept: tuple[Value, ...]
    allocated_bytes: int
    budget_bytes: int
    recomputed_flops: int
    model_flops: int
    built_in: tuple[PolicyFigures, ...]
    compiled: int
    layers: tuple[Layer, ...]
    target: str
    report: Report

    def apply(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The same loss with this policy in the checkpoints of its layers, without a change to its code; layers that
        have no checkpoint are put under one. To be differentiated, jitted or sharded as the loss itself.
        """

        @functools.wraps(loss)
        def planned(*args: Any, **kwargs: Any) -> Any:
            return Loss(loss, args, kwargs).under(self.layers, self.policy)(*args, **kwargs)

        return planned

    def check(self) -> None:
        """Raises ReportError unless the policy met all that it keeps in the traces so far: with another version of
        jax, other shapes or another block it would keep something else. A policy of jax's own needs no check."""
        if isinstance(self.policy, RematPolicy):
            self.policy.check()

    def __repr__(self) -> str:
        return remat_account.account(self)

    def _repr_html_(self) -> str:
        """Returns the HTML for a notebook: the figures, the kept values, and jax's own policies beside the plan."""
        return remat_account.html(self)


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
    """Decides what the layers of a model keep for their backward pass: the least recomputation within a budget.

    Layers are what the loss has under `jax.checkpoint` (flax.linen.remat, equinox.filter_checkpoint), in a scan or
    called one after the other; their present policy does not matter. The gradient by the first argument is compiled
    for the target with every plan that is tried.

    Args:
        loss: of (params, ...) to a scalar, or to (scalar, anything); plain or jitted.
        args: arrays, ShapeDtypeStructs, or pytrees of them; their shardings count.
        target: as in `memory.analyze`.
        budget: bytes on one device, as a number or "72GiB"; None: all that the target has available.
        optimizer: with `init` and `update`, such as optax's: its state and update are part of the program then.
        blocks: names of functions under `jax.checkpoint` that are planned for, where not all are layers.
        tell: called with a line for each program that is compiled.

    Raises ReportError where no layers are found, for a budget that is not a valid size, and where nothing fits it.
    """
    return plan_remats(loss, args, target, [budget], optimizer=optimizer, kwargs=kwargs, blocks=blocks, tell=tell)[0]


def plan_remats(
    loss: Callable[..., Any],
    args: Sequence[Any],
    target: Target | str | None = None,
    budgets: Sequence[str | float | None] = (None,),
    *,
    optimizer: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    blocks: Collection[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[RematPlan]:
    """`plan_remat` for several budgets at once, which share what is compiled; it raises what that raises."""
    for budget in budgets:
        limits.budget_of(written(budget), MOST, "budget")  # a mistake shows before anything is compiled
    compiler = PolicyCompiler(Loss(loss, args, kwargs or {}), target, optimizer, blocks)
    sizes = [compiler.budget(budget) for budget in budgets]

    def show(tried: CompiledPlan) -> None:
        name = name_of(tried.plan) or str(tried.plan)
        tell(f"{name}: {human(tried.compiled.allocated_bytes) if tried.ok else tried.compiled.status}")

    search = RematSearch(compiler.problem(), compiler, show)
    search.compile(search.fixed)
    return [plan_of(compiler, search, outcome, size) for outcome, size in zip(search.run_all(sizes), sizes)]


def plan_of(compiler: PolicyCompiler, search: RematSearch, outcome: SearchOutcome, budget: int) -> RematPlan:
    """What a search found for a budget. Raises ReportError where nothing fits it."""
    report = compiler.full.report
    if outcome.best is None:
        raise _nothing_fits(outcome, budget)
    best, name = outcome.best, name_of(outcome.best.plan)
    built, kept = compiler.built[name or str(best.plan)], best.plan.ranges[0][0].save
    figures = [search.tried[str(plan)] for plan in search.fixed]
    return RematPlan(
        policy=compiler.policy(best.plan) if name == FULL else built.policy,
        name=BUILT_IN.get(name, ""),
        kept=tuple(sorted((compiler.values.values[label] for label in kept), key=lambda value: -value.bytes)),
        allocated_bytes=best.compiled.allocated_bytes,
        budget_bytes=budget,
        recomputed_flops=built.counted.recomputed,
        model_flops=built.counted.total - built.counted.recomputed,
        built_in=tuple(
            PolicyFigures(
                BUILT_IN[name_of(tried.plan)],
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
        f"nothing fits {human(budget)}: with {BUILT_IN.get(name_of(plan), plan)} the step takes "
        f"{human(least)}, {human(least - budget)} more; give a larger budget or a smaller batch"
    )
