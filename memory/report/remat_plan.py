"""`RematPlan`: the values that a model's layers keep for their backward pass, with an account for terminal and
notebook.

    plan = memory.plan_remat(loss, (params, batch), target="h200", budget="72GiB")
    print(plan)
    block = jax.checkpoint(block, policy=plan.policy)      # or flax.linen.remat(Block, policy=plan.policy)

The account lists the kept values, their cost, and jax's own policies. `remat_planning` computes the plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.remat.layer_discovery import Layer
from bytescope.memory.remat.recognition import RematPolicy, Value
from bytescope.memory.remat.step_loss import Loss
from bytescope.memory.report.buffer_tables import line
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import flops, human
from bytescope.memory.view.console import columns, notebook_html, one_line, plain_text
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, path

USE = "jax.checkpoint(block, policy=plan.policy), or plan.apply(loss) without a change to the model"
_HOW = {
    "checkpoint": "under jax.checkpoint",
    "scan": "the body of a scan, to be put under jax.checkpoint",
    "call": "a jitted function, to be put under jax.checkpoint",
}


@dataclasses.dataclass(frozen=True)
class PolicyFigures:
    """The memory and recomputation of the program compiled under one of jax's remat policies.

    Fields:
        name: the name of the policy in `jax.checkpoint_policies`.
        allocated_bytes: bytes allocated on one device.
        recomputed_flops: FLOPs recomputed in one step, over all devices.
        status: "ok", or an error message if the policy could not be compiled.
    """

    name: str
    allocated_bytes: int
    recomputed_flops: int
    status: str = "ok"


@dataclasses.dataclass(frozen=True, repr=False)
class RematPlan:
    """The values that the layers of a model keep for the backward pass instead of recomputing them. At a prompt and in
    a notebook, the plan is shown as a table.

    Fields:
        policy: the value to pass to `jax.checkpoint` as `policy`. It is a RematPolicy, or one of
            `jax.checkpoint_policies` if that is best.
        name: the name in `jax.checkpoint_policies` if one of jax's own policies is best; "" for a RematPolicy.
        kept: the values that the policy keeps, largest first. The inputs of a layer are always kept and are not
            listed.
        allocated_bytes: bytes that the compiled gradient takes on one device, at most `budget_bytes`.
        budget_bytes: the budget in bytes on one device.
        recomputed_flops, model_flops: recomputed FLOPs, and all other FLOPs, of one step over all devices.
        built_in: bytes and recomputed FLOPs under each of jax's own policies, for comparison.
        compiled: number of programs that were compiled to find the plan.
        layers: the kinds of layers to which the plan applies.
        report: the memory report of the program under the plan.
        target: the target's name.
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
        """Returns the loss function with this plan's policy applied to its layers, so that its code need not change.

        Layers that are not under `jax.checkpoint` are put under it. The returned function can be differentiated,
        jitted and sharded like `loss`.
        """

        @functools.wraps(loss)
        def planned(*args: Any, **kwargs: Any) -> Any:
            return Loss(loss, args, kwargs).under(self.layers, self.policy)(*args, **kwargs)

        return planned

    def check(self) -> None:
        """Raises ReportError if a value that the policy should keep was missing in the programs traced with it so far.

        A value can be missing if jax was updated, or if the shapes or the code of the layer changed since the plan was
        made. If the policy is one of jax's own, the check always passes.
        """
        if isinstance(self.policy, RematPolicy):
            self.policy.check()

    def __repr__(self) -> str:
        """Returns the plan as text, as wide as the environment variable COLUMNS says (default: 100 columns)."""
        return plain_text(_account(self), columns())

    def _repr_html_(self) -> str:
        return notebook_html(_account(self))


# ---- the account --------------------------------------------------------------------------------------------


def _account(plan: RematPlan) -> RenderableType:
    head = Text.assemble(
        (f"remat plan on {plan.target}", "bold"),
        f"  {human(plan.allocated_bytes)} allocated of {human(plan.budget_bytes)}",
        f"  recomputes {_share_of_model(plan.recomputed_flops, plan)}",
    )
    kept: RenderableType = Prose("nothing is kept")
    if plan.name:  # one of jax's own policies
        kept = Prose(f"jax.checkpoint_policies.{plan.name} is best here")
    elif plan.kept:
        kept = FigureTable(label("kept by every layer"), figure("all layers"), label("type"), path("where"))
        for value in plan.kept:
            several = value.count // sum(plan.layers[kind].times for kind in value.kinds)
            name = f"{value.label} ({several} of them)" if several > 1 else value.label
            kept.add(name, human(value.bytes), value.type, line(value.where))
    return blocks(Group(head, *map(Prose, describe_layers(plan.layers))), kept, _policies(plan), Prose(USE))


def _policies(plan: RematPlan) -> RenderableType:
    table = FigureTable(label("policy"), figure("allocated"), figure("recomputed"), fixed("budget"))
    if not plan.name:
        recomputed = _share_of_model(plan.recomputed_flops, plan)
        table.add("this plan", human(plan.allocated_bytes), recomputed, "fits", style="bold")
    for row in plan.built_in:
        cells = [row.name, row.status]
        if row.status == "ok":
            fits = "fits" if row.allocated_bytes <= plan.budget_bytes else "exceeds"
            cells = [row.name, human(row.allocated_bytes), _share_of_model(row.recomputed_flops, plan), fits]
        table.add(*cells, style="bold" if row.name == plan.name else "")
    return table


def describe_layers(layers: Sequence[Layer]) -> list[str]:
    """Returns one line for each kind of layer: its number, its name, its source line, and how it is checkpointed."""
    return [
        f"{layer.times} x {one_line(layer.name) or 'layer'}"
        f"{f' at {line(layer.where)}' if layer.where else ''}, {_HOW[layer.how]}"
        for layer in layers
    ]


def _share_of_model(recomputed: int, plan: RematPlan) -> str:
    share = f" ({recomputed / plan.model_flops:.1%})" if recomputed and plan.model_flops else ""
    return flops(recomputed) + share
