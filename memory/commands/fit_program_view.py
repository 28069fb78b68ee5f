"""Shows the result of `bytescope fit MODULE:FUNCTION` on the terminal and as an HTML page.

Both show the JSON of the search (`memory/commands/fit_program.py`). The page shares its template and script with the
page of `bytescope fit` for configs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_columns import COST_AXES, RECOMPUTED_SHARE, Record
from bytescope.memory.compare.compare_rows import PREDICTED
from bytescope.memory.report.buffer_tables import line
from bytescope.memory.units import column_unit, flops, human, plural
from bytescope.memory.view.console import safe
from bytescope.memory.view.elements import (
    HeaderFigure,
    Section,
    figure,
    limit_notes,
    parts,
    rates_notes,
    spread,
    title,
    versions,
    where,
)
from bytescope.memory.view.figures import count, percent, rounded, seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Prose, unwrapped

# Stage of the search -> what the search tries in it.
STAGES = {
    "baseline": "the program without a change",
    "micro": "batches with everything recomputed",
    "remat": "the least recomputation that fits",
    "neighbour": "the best program with its layers unrolled",
}
NOTES = (
    "Every row is the program's own step, compiled for the target with another remat policy.",
    "Allocated: the bytes that the runtime allocates on one device, including arguments and packed temporaries.",
    "Recomputed: the FLOPs that jax.checkpoint executes again, divided by the other FLOPs of the step.",
)


def _kind(row: Record) -> str:
    if row["allocated_bytes"] is None:
        return "tight"
    return "fits" if row["fits"] else "exceeds"


WALK_COLUMNS = (
    ColumnView("number", "#", "number"),
    ColumnView("stage", "stage", "text"),
    ColumnView("what", "policy", "text", css="what"),
    ColumnView("allocated_bytes", "allocated", "bytes"),
    ColumnView("host_bytes", "host", "bytes", skip_zero=True),
    ColumnView("predicted_seconds", "step, predicted", "duration", note=spread),
    RECOMPUTED_SHARE,
    ColumnView("verdict", "verdict", "text", verdict=_kind, rank=8),
)
KEPT_COLUMNS = (
    ColumnView("label", "kept by every layer"),
    ColumnView("bytes", "all layers", "bytes"),
    ColumnView("type", "type", "text"),
    ColumnView("where", "where", "text", read=lambda row: line(row["where"])),
)


def render_text(out: Mapping[str, Any]) -> RenderableType:
    """Renders the result of `bytescope fit MODULE:FUNCTION` for the terminal: the policy with its figures and its code.
    If nothing fits, renders the smallest program and the bytes that are missing."""
    effort = f"{plural(out['programs'], 'program')} compiled, {out['seconds']:.1f} s"
    if out["stopped"]:
        effort += f"; stopped early: {out['stopped']}"
    best, certificate = out["best"], out["certificate"]
    if best is None and certificate is None:
        return Prose(Text.assemble(("no program compiled", "bold red"), f"; {effort}"))
    if best is None:
        return Group(
            Prose(Text.assemble(("does not fit: ", "bold red"), f"{human(certificate['missing_bytes'])} missing")),
            Prose(f"smallest: {safe(certificate['what'])}"),
            Prose(
                f"it takes {human(certificate['allocated_bytes'])} of {human(out['budget_bytes'])}: "
                f"{large_parts(certificate)}"
            ),
            Prose(effort),
        )
    kept = [terminal_table(TableView(KEPT_COLUMNS, best["kept"]))] if best["kept"] else []
    return Group(
        Prose(Text.assemble(("fits: ", "bold green"), safe(answer(out)))),
        Prose(f"{figures_of_best(out)}; {effort}"),
        *kept,
        *_run_with(out),
        *([Text("put into the source:", style="bold")] if best["code"] else []),
        *(unwrapped(Text(f"  {safe(line)}", style="bold green")) for line in best["code"]),
    )


def _run_with(out: Mapping[str, Any]) -> list[RenderableType]:
    if not out["best"].get("flags"):
        return []
    check = f"bytescope report {shlex.join((out['program'], out['target']['name']))} {out['best']['flags']}"
    return [
        Text("the trainer's keys:", style="bold"),
        CopyCommand(out["best"]["flags"]),
        Text("report on this program:", style="bold"),
        CopyCommand(check),
    ]


def answer(out: Mapping[str, Any]) -> str:
    """Returns the chosen policy in a few words."""
    best = out["best"]
    return best["what"] if best["code"] or best["keys"] else f"{best['what']}: no change of the policy is needed"


def figures_of_best(out: Mapping[str, Any]) -> str:
    """Returns the bytes, the recomputed FLOPs and the predicted seconds of the chosen program as one text."""
    best = out["best"]
    parts_of_text = [
        f"{human(best['allocated_bytes'])} of {human(out['budget_bytes'])}",
        f"{percent(best['recompute_flops_fraction'])} of the other FLOPs recomputed "
        f"({flops(best['recomputed_flops'])})",
    ]
    if best["predicted_seconds"] is not None:
        ends = within(best["predicted_seconds_low"], best["predicted_seconds_high"])
        parts_of_text.append(f"predicted {rounded(best['predicted_seconds'])} s ({ends}) per call of the step")
    if best["predicted_tokens_per_s"]:
        parts_of_text.append(f"{count(best['predicted_tokens_per_s'])} tokens/s")
    return ", ".join(parts_of_text)


def large_parts(row: Mapping[str, Any]) -> str:
    """Returns the parts of a program's memory that have more than 1 % of its bytes, largest first, such as "params 2.1
    GiB, ...". row: a row of the search with its `breakdown`."""
    sizes = sorted(row["breakdown"].items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {human(size)}" for name, size in sizes if size > row["allocated_bytes"] / 100)


# ---- the page --------------------------------------------------------------------------------------------------------


def render_page(out: Mapping[str, Any]) -> str:
    """Returns the HTML page with the result of `bytescope fit MODULE:FUNCTION`."""
    best, budget = out["best"], out["budget_bytes"]
    chosen = best or out["certificate"] or {"what": ""}
    records = [{**row, "number": number} for number, row in enumerate(out["walk"], 1)]
    table = TableView(WALK_COLUMNS, records, emphasis=lambda row: "winner" if row["what"] == chosen["what"] else "")
    verdict = {"kind": "unknown", "words": "? no program compiled"}
    if best:
        verdict = {"kind": "fits", "words": "✓ fits"}
    elif out["certificate"]:
        verdict = {"kind": "exceeds", "words": "✕ does not fit"}
    used = {row["stage"] for row in out["walk"]}
    return page(
        "fit",
        title(out["program"], out["target"], f"fit within {human(budget)}"),
        _page_data(out, chosen["what"]),
        heading=f"{out['program']} within {human(budget)}",
        where=where(out["target"]),
        facts=[f"{one['times']} x {one['name'] or 'layer'} {line(one['where'])}" for one in out["layers"]],
        versions=versions(out["versions"]),
        verdict=verdict,
        figures=_header_figures(out),
        stopped=out["stopped"],
        answer=_answer_card(out),
        walk=page_table(table),
        layouts=None,
        at_least="",
        reach=None,
        kept=page_table(TableView(KEPT_COLUMNS, best["kept"])) if best and best["kept"] else None,
        notes=[*limit_notes(out["target"], budget), *NOTES, *rates_notes([out])],
        stages=Section("Stages of the search", [(stage, why) for stage, why in STAGES.items() if stage in used]),
    )


def _page_data(out: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    points = []
    for number, row in enumerate(out["walk"], 1):
        if row["allocated_bytes"] is None or row["predicted_seconds"] is None:
            continue
        points.append(
            {
                "number": number,
                "stage": row["stage"],
                "what": row["what"],
                "bytes": row["allocated_bytes"],
                "host": row["host_bytes"] or 0,
                "seconds": row["predicted_seconds"],
                "spread": spread(row),
                "recomputed": row["recompute_flops_fraction"],
                "fits": row["fits"],
                "verdict": row["verdict"],
                "chosen": row["what"] == chosen,
            }
        )
    used = [point["stage"] for point in points]
    return {
        "points": points,
        "budget": out["budget_bytes"],
        "choice": "choice" if out["best"] else "smallest",
        "unit": column_unit(max([out["budget_bytes"], *(point["bytes"] for point in points)]), 0.5),
        "cost": COST_AXES[PREDICTED]._asdict(),
        "stages": [stage for stage in STAGES if stage in used],
    }


def _header_figures(out: Mapping[str, Any]) -> list[HeaderFigure]:
    best = out["best"]
    shown = []
    if best:
        shown = [
            figure("allocated", best["allocated_bytes"], f"of {human(out['budget_bytes'])}"),
            HeaderFigure("step, predicted", seconds(best["predicted_seconds"]), spread(best)),
            HeaderFigure("recomputed", percent(best["recompute_flops_fraction"]), "of the other FLOPs"),
        ]
    elif out["certificate"]:
        shown = [figure("missing", out["certificate"]["missing_bytes"], "on the device")]
    compiled = f"{plural(out['programs'], 'program')} compiled"
    shown.append(HeaderFigure("search took", f"{out['seconds']:,.0f} s", compiled))
    return [one for one in shown if one.value]


def _answer_card(out: Mapping[str, Any]) -> dict[str, Any] | None:
    row = out["best"] or out["certificate"]
    if not row:
        return None
    budget, total = out["budget_bytes"], max(row["allocated_bytes"], 1)
    scale, over = max(budget, total), total > budget
    room = f"{human(abs(total - budget))} {'too much' if over else 'left'}"
    return {
        "title": "The policy" if out["best"] else "Does not fit: the smallest program",
        "what": answer(out) if out["best"] else row["what"],
        "command": row.get("flags") or "\n".join(row.get("code", ())),
        "parts": parts(row["breakdown"], total, scale),
        "over": over,
        "limit": 100 * budget / scale if over else None,
        "room": f"{human(total)} of {human(budget)}, {room}",
    }
