"""Where a step's time went, on one screen of a terminal, 100 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.profile.breakdown import PHASES, PICO, Spent
from bytescope.memory.profile.op_scopes import LOOPS
from bytescope.memory.text.report import PHASE_STYLE, WIDTH

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
# Components of less than this share of the total are one row; so many of the longest instructions are shown.
_SMALL, _LONGEST = 0.001, 10
_LEGEND = {"blocks": "blocks: reads and writes the stacks of the loop over layers",
           LOOPS: "loops: between the instructions of one", "copies": "copies: the compiler's own"}


def show(spent: Spent, console: Console | None = None, predicted: Mapping[str, Any] | None = None) -> None:
    """Prints the breakdown, to a console of 100 columns when none is given. `predicted`: see `beside`."""
    (console or Console(width=WIDTH)).print(render(spent, predicted))


def render(spent: Spent, predicted: Mapping[str, Any] | None = None) -> RenderableType:
    """Phases and components, the host, the longest instructions, and the roofline's prediction."""
    unit, scale = next(((name, size) for name, size in _UNITS if spent.wall * PICO / spent.updates >= size), _UNITS[-1])

    def shown(seconds: float) -> str:
        return f"{seconds / scale:.3f}" if seconds else ""

    parts = [_head(spent, unit), _cells(spent, shown), _legend(spent), Text(), _host(spent, shown), Text(),
             _longest(spent, shown)]
    return Group(*parts, *([Text("\n" + beside(spent, predicted))] if predicted else []))


def beside(spent: Spent, predicted: Mapping[str, Any]) -> str:
    """Predicted and measured seconds in one line; `predicted`: `costs.roofline.Prediction` of one call, as JSON."""
    total, measured = predicted["total"] * spent.calls, spent.measured
    aside = " without pauses" if spent.paused else ""  # evaluations and checkpoints: between updates
    return (f"roofline: predicted {total:.4g} s ({predicted['source']}), measured {measured:.4g} s{aside}, "
            f"{measured / total:.3g} x")


def _head(spent: Spent, unit: str) -> Text:
    many = f" and device, mean of {spent.devices} devices" if spent.devices > 1 else ""
    steps = f"update {spent.steps[0]}" if len(spent.steps) == 1 else (
        f"updates {spent.steps[0]}-{spent.steps[-1]}" if spent.steps else "the whole trace as one update")
    return Text.assemble(("where an update's time goes", "bold"), f": {spent.program}, {steps}, {unit} an update{many}")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column(Text(headings[0], style="bold not dim"), no_wrap=True, max_width=30, overflow="ellipsis")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    return table


def _cells(spent: Spent, shown: Callable[[float], str]) -> Table:
    """Components down, phases across; the phases and components each add up to busy, with idle to the total."""
    phases = [phase for phase in PHASES if any(found == phase for found, _ in spent.cells)]
    table = _table("device", *(Text(phase, style=PHASE_STYLE.get(phase, "")) for phase in phases), "all", "%")
    rows: dict[str, dict[str, int]] = {}
    for (phase, component), taken in spent.cells.items():
        rows.setdefault(component, {})[phase] = taken
    whole = spent.devices * spent.wall

    def add(name: str, row: Mapping[str, int], total: int, style: str = "") -> None:
        table.add_row(name, *(shown(spent.seconds(row.get(phase, 0))) for phase in phases),
                      shown(spent.seconds(total)), f"{total / whole:.1%}".rstrip("%"), style=style)

    small: dict[str, int] = {}
    for component, row in sorted(rows.items(), key=lambda item: -sum(item[1].values())):
        if sum(row.values()) >= _SMALL * whole:
            add(component, row, sum(row.values()))
        else:
            small = {phase: small.get(phase, 0) + row.get(phase, 0) for phase in phases}
    if small:
        add("smaller ones", small, sum(small.values()), "dim")
    sums = {phase: sum(row.get(phase, 0) for row in rows.values()) for phase in phases}
    add("busy", sums, spent.busy, "bold")
    add("idle", {}, spent.idle)
    add("total", {}, whole, "bold")
    return table


def _legend(spent: Spent) -> Text:
    found = {component for _, component in spent.cells}
    lines = ["; ".join(text for word, text in _LEGEND.items() if word in found)]
    lines += [f"{name} hidden behind compute: {spent.seconds(taken):.4g} s"
              for name, taken in spent.hidden.items() if taken]
    return Text("\n".join(line for line in lines if line), style="dim")


def _host(spent: Spent, shown: Callable[[float], str]) -> RenderableType:
    if not spent.host:
        return Text("no annotated work of the host in the trace", style="dim")
    table = _table("host", "all", "%", "device idle meanwhile", "times")
    for row in spent.host:
        table.add_row(row.name.replace("_", " "), shown(row.taken * PICO / spent.updates),
                      f"{row.taken / spent.wall:.1%}".rstrip("%"), shown(row.idle * PICO / spent.updates),
                      str(row.count or ""))
    return table


def _longest(spent: Spent, shown: Callable[[float], str]) -> Table:
    table = _table("longest instructions", "all", "%", "runs", "phase")
    table.expand = True  # the last column has what the others leave
    table.add_column("where", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for row in spent.instructions[:_LONGEST]:
        table.add_row(row.name, shown(spent.seconds(row.taken)),
                      f"{row.taken / (spent.devices * spent.wall):.1%}".rstrip("%"),
                      f"{row.count / (spent.devices * spent.updates):.3g}", row.place.phase,
                      Text(row.place.path or row.place.component))
    return table
