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
import os
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.hlo.sources import notebook_cell, short_place
from bytescope.memory.remat.layer_discovery import Layer
from bytescope.memory.remat.recognition import RematPolicy, Value
from bytescope.memory.remat.step_loss import Loss
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human
from bytescope.memory.view.console import columns, one_line, plain_text
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, path

# Column titles of both tables; FIGURES are the columns with numbers.
KEPT = ("kept by every layer", "all layers", "type", "where")
POLICIES = ("policy", "allocated", "recomputed", "budget")
FIGURES = ("all layers", "allocated", "recomputed")
THIS_PLAN = "this plan"
USE = "jax.checkpoint(block, policy=plan.policy), or plan.apply(loss) without a change to the model"
_SCALES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
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
        return _account_html(self)


# ---- the account --------------------------------------------------------------------------------------------


def _account(plan: RematPlan) -> RenderableType:
    title, *figures = _head(plan)
    head = Text.assemble((title, "bold"), "  ", "  ".join(figures))
    kept: RenderableType = Prose(_nothing_kept(plan))
    if rows := _kept_value_rows(plan):
        kept = FigureTable(label(KEPT[0]), figure(KEPT[1]), label(KEPT[2]), path(KEPT[3]))
        for row in rows:
            kept.add(*row)
    policies = FigureTable(label(POLICIES[0]), figure(POLICIES[1]), figure(POLICIES[2]), fixed(POLICIES[3]))
    for row in _policy_rows(plan):
        policies.add(*row, style="bold" if row[0] == (plan.name or THIS_PLAN) else "")
    return blocks(Group(head, *map(Prose, describe_layers(plan.layers))), kept, policies, Prose(USE))


def _account_html(plan: RematPlan) -> str:
    from bytescope.memory.view import notebook_piece
    from bytescope.memory.view.notebook_piece import cut

    title, *figures = _head(plan)
    return notebook_piece.render(
        "remat_plan",
        title=title,
        figures=" · ".join(figures),
        layers=[cut(layer, 300) for layer in describe_layers(plan.layers)],
        kept_heads=_with_figures(KEPT),
        kept=[[cut(cell) for cell in row] for row in _kept_value_rows(plan)],
        nothing_kept=_nothing_kept(plan),
        policy_heads=_with_figures(POLICIES),
        policies=[[cut(cell) for cell in row] for row in _policy_rows(plan)],
        chosen=plan.name or THIS_PLAN,
        use=USE,
    )


def _with_figures(titles: Sequence[str]) -> list[tuple[str, bool]]:
    return [(title, title in FIGURES) for title in titles]


def _head(plan: RematPlan) -> list[str]:
    return [
        f"remat plan on {plan.target}",
        f"{human(plan.allocated_bytes)} allocated of {human(plan.budget_bytes)}",
        f"recomputes {_format_flops(plan.recomputed_flops, plan)}",
    ]


def describe_layers(layers: Sequence[Layer]) -> list[str]:
    """Returns one line for each kind of layer: its number, its name, its source line, and how it is checkpointed."""
    return [
        f"{layer.times} x {one_line(layer.name) or 'layer'}"
        f"{f' at {relative_place(layer.where)}' if layer.where else ''}, {_HOW[layer.how]}"
        for layer in layers
    ]


def _nothing_kept(plan: RematPlan) -> str:
    return f"jax.checkpoint_policies.{plan.name} is best here" if plan.name else "nothing is kept"


def _kept_value_rows(plan: RematPlan) -> list[list[str]]:
    rows = []
    # A plan with a name is one of jax's own policies.
    for value in () if plan.name else plan.kept:
        several = value.count // sum(plan.layers[kind].times for kind in value.kinds)
        name = f"{value.label} ({several} of them)" if several > 1 else value.label
        rows.append([name, human(value.bytes), value.type, relative_place(value.where)])
    return rows


def _policy_rows(plan: RematPlan) -> list[list[str]]:
    rows = []
    if not plan.name:
        rows.append([THIS_PLAN, human(plan.allocated_bytes), _format_flops(plan.recomputed_flops, plan), "fits"])
    for row in plan.built_in:
        if row.status != "ok":
            rows.append([row.name, row.status])
            continue
        fits = "fits" if row.allocated_bytes <= plan.budget_bytes else "exceeds"
        rows.append([row.name, human(row.allocated_bytes), _format_flops(row.recomputed_flops, plan), fits])
    return rows


def _format_flops(flops: int, plan: RematPlan) -> str:
    return format_flops(flops) + (f" ({flops / plan.model_flops:.1%})" if flops and plan.model_flops else "")


def format_flops(flops: int) -> str:
    """Returns a number of FLOPs with three digits and a unit, such as "12.1 TFLOP"."""
    if not flops:
        return "0 FLOP"
    scale, unit = next(((scale, unit) for scale, unit in _SCALES if flops >= scale), (1, "FLOP"))
    return f"{flops / scale:.3g} {unit}"


def relative_place(where: str) -> str:
    """Returns the place "file:line" with a short file name: relative to the current folder or to the installed
    packages, or the cell of a notebook."""
    if notebook_cell(where.rpartition(":")[0]):
        return short_place(where)
    if "/site-packages/" in where:
        return where.rsplit("/site-packages/", 1)[1]
    short = os.path.relpath(where) if where else ""
    return where if short.startswith("..") else short
