"""The account of a remat plan on the terminal: what is kept, what that costs, and jax's own policies beside it."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.text.console import make_console, one_line, put
from bytescope.memory.text.layout import Prose, blocks
from bytescope.memory.text.table import FigureTable, figure, fixed, label, path
from bytescope.memory.units import human

if TYPE_CHECKING:
    from bytescope.memory.remat_plan.plan import RematPlan

_SCALES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
_HOW = {"checkpoint": "under jax.checkpoint", "scan": "the body of a scan, to be put under jax.checkpoint",
        "call": "a jitted function, to be put under jax.checkpoint"}


def account(plan: RematPlan) -> str:
    """The account as text, as wide as COLUMNS says, else 100 columns."""
    out = io.StringIO()
    put(render(plan), make_console(file=out))
    return out.getvalue().rstrip("\n")


def render(plan: RematPlan) -> RenderableType:
    """Head, kept values, policies."""
    head = Text.assemble((f"remat plan on {plan.target}", "bold"),
                         f"  {human(plan.allocated_bytes)} allocated of {human(plan.budget_bytes)}  ",
                         f"recomputes {_share(plan.recomputed_flops, plan)}")
    layers = [Prose(f"{layer.times} x {one_line(layer.name) or 'layer'}"
                    f"{f' at {_short(layer.where)}' if layer.where else ''}, {_HOW[layer.how]}")
              for layer in plan.layers]
    return blocks(Group(head, *layers), _kept(plan), _policies(plan),
                  Prose("jax.checkpoint(block, policy=plan.policy), or plan.apply(loss) without a change to the model"))


def _kept(plan: RematPlan) -> RenderableType:
    if plan.name or not plan.kept:
        return Prose(f"jax.checkpoint_policies.{plan.name} is best here" if plan.name else "nothing is kept")
    table = FigureTable(label("kept by every layer"), figure("all layers"), label("type"), path("where"))
    for value in plan.kept:
        several = value.count // sum(plan.layers[kind].times for kind in value.kinds)
        name = f"{value.label} ({several} of them)" if several > 1 else value.label
        table.add(name, human(value.bytes), value.type, _short(value.where))
    return table


def _policies(plan: RematPlan) -> RenderableType:
    table = FigureTable(label("policy"), figure("allocated"), figure("recomputed"), fixed("budget"))
    if not plan.name:
        table.add("this plan", human(plan.allocated_bytes), _share(plan.recomputed_flops, plan), "fits", style="bold")
    for row in plan.built_in:
        if row.status != "ok":
            table.add(row.name, row.status)
            continue
        fits = "fits" if row.allocated_bytes <= plan.budget_bytes else "exceeds"
        table.add(row.name, human(row.allocated_bytes), _share(row.recomputed_flops, plan), fits,
                  style="bold" if row.name == plan.name else "")
    return table


def _share(flops: int, plan: RematPlan) -> str:
    """FLOPs, and their share of the model's own."""
    if not flops:
        return "0 FLOP"
    scale, unit = next(((scale, unit) for scale, unit in _SCALES if flops >= scale), (1, "FLOP"))
    return f"{flops / scale:.3g} {unit}" + (f" ({flops / plan.model_flops:.1%})" if plan.model_flops else "")


def _short(where: str) -> str:
    """A place relative to the current directory, if it is below it; in an installed package, from the package on."""
    if "/site-packages/" in where:
        return where.rsplit("/site-packages/", 1)[1]
    short = os.path.relpath(where) if where else ""
    return where if short.startswith("..") else short
