"""Shows the result of `bytescope fit` on the terminal and as an HTML page: the command to run, and all variants.

Both show the JSON of a fit (`train.plan.fit.fit_result`). The page is one HTML file that opens offline;
`static/fit.js` draws the picture of the search.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.commands.fit_program_view import large_parts
from bytescope.memory.compare.compare_columns import COST_AXES, PREDICTED_STEP, RECOMPUTED_SHARE, Record, command_column
from bytescope.memory.compare.compare_rows import PREDICTED
from bytescope.memory.compare.compare_text import as_fast
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import column_unit, human, plural
from bytescope.memory.view.console import put, safe
from bytescope.memory.view.elements import (
    HeaderFigure,
    PageTable,
    Section,
    command,
    facts,
    figure,
    limit_notes,
    parts,
    predictions,
    rates_notes,
    spread,
    title,
    versions,
    where,
)
from bytescope.memory.view.figures import count, percent, rounded, seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Prose
from bytescope.train.plan.fit.fit_progress import STAGES, describe_prediction

# Explains bounds in the table of meshes.
LOWER_BOUND_NOTE = (
    '"at least" and "at best": the mesh was compiled only with everything recomputed; the figure is how much slower it '
    "would be without any recomputation"
)
NOTES = (
    "Every variant is the trainer's own step, compiled for the target.",
    "Allocated: the bytes that the runtime allocates on one device, including arguments and packed temporaries.",
    "Recomputed: the FLOPs that jax.checkpoint executes again, divided by the model's FLOPs.",
    "Meshes are compared with everything recomputed. The search continues on meshes that could be faster than the best "
    "variant so far if nothing were recomputed.",
)


# ---- the tables -----------------------------------------------------------------------------------------------


def slower(row: Mapping[str, Any]) -> str:
    """Returns how much slower a mesh is than the chosen configuration, such as "12.0%", "at least 34.0%" or "a tie".

    Returns "" for the chosen mesh, and for a mesh that does not fit.

    row: an entry of the list `layouts` in the JSON result of `bytescope fit`.
    """
    if row["slower"] is None or not row["fits"]:
        return ""
    bounded = row["least_seconds"]
    if row["slower"] < TIE:
        return "a tie at best" if bounded else "a tie" if row["slower"] else ""
    return f"{'at least ' if bounded else ''}{row['slower']:.1%}"


def failed(row: Record) -> str:
    """Returns why no variant of a mesh fits, such as the bytes that are missing; "" if one fits.

    If the mesh cannot run at all, the text is "cannot run", and the full reason is printed below the table.

    row: an entry of the list `layouts` in the JSON result of `bytescope fit`.
    """
    if row["fits"]:
        return ""
    return row["verdict"] if row["predicted_seconds"] is not None else "cannot run"


def kind(step: Record) -> str:
    """Returns the CSS class that colours the verdict of a variant: "fits", "exceeds" (does not fit) or "tight" (cannot
    run).

    step: an entry of the list `walk` in the JSON result.
    """
    if step["fits"]:
        return "fits"
    return "tight" if step["allocated_bytes"] is None else "exceeds"


VERDICT = ColumnView("verdict", "verdict", "text", verdict=kind, rank=8)
ALLOCATED = ColumnView("allocated_bytes", "allocated", "bytes")
HOST = ColumnView("host_bytes", "host", "bytes", skip_zero=True)
# Predicted seconds of an update.
STEP = ColumnView("predicted_seconds", "step, predicted", "duration", short="update")
# Every variant of the search, in order. The page has this table; the terminal prints the variants during the search.
WALK_COLUMNS = (
    ColumnView("number", "#", "number"),
    ColumnView("stage", "stage", "text"),
    ColumnView("what", "what", "text", css="what"),
    ALLOCATED,
    HOST,
    PREDICTED_STEP,
    ColumnView("tokens_per_s", "tokens/s, predicted", "count", rank=2),
    RECOMPUTED_SHARE,
    VERDICT,
)
# The longest sequence and the largest micro-batch that fit at each rank of adapters.
REACH_COLUMNS = (
    ColumnView("rank", "rank", "number"),
    ColumnView("length", "tokens of a sequence", "count", short="length"),
    ColumnView("micro", "sequences at once", "number", short="at once"),
    ColumnView("base", "frozen weights in", "text", short="base"),
    ColumnView("policy", "recomputed", "text", short="remat"),
    ALLOCATED,
    HOST,
    STEP,
    ColumnView("tokens_per_s", "tokens/s, predicted", "count", short="tokens/s"),
    VERDICT,
)
# The best variant of each mesh.
LAYOUT_COLUMNS = (
    ColumnView("layout", "mesh"),
    ColumnView(
        "what",
        "its best variant",
        "text",
        read=lambda row: row["what"].removeprefix(f"{row['layout']}, "),
        only=PAGE,
        css="what",
    ),
    ALLOCATED,
    STEP,
    ColumnView("slower", "slower by", "number", read=slower),
    ColumnView("verdict", "verdict", "text", terminal=failed, verdict=kind),
)

# ---- the terminal -------------------------------------------------------------------------------------------------


def show(out: Mapping[str, Any], config: str, console: Console | None = None) -> None:
    """Prints the result of `bytescope fit` on the console, by default standard output.

    out: the JSON result of `bytescope fit` (keys: module train/plan/fit/fit_result.py).
    """
    put(render_text(out, config), console)


def render_text(out: Mapping[str, Any], config: str) -> RenderableType:
    """Renders the result of `bytescope fit` for the terminal: the chosen configuration with its flags, and tables.

    If nothing fits, renders the variant that is closest to fitting, and the bytes by which it exceeds the budget.

    out: the JSON result of `bytescope fit`.
    """
    effort = f"{plural(out['programs'], 'program')} compiled, {out['seconds']:.1f} s"
    stopped = f"; stopped early: {out['stopped']}" if out["stopped"] else ""
    if best := out["best"]:
        return _best_lines(best, out, config, f"{effort}{stopped}")
    certificate = out["certificate"]
    if certificate is None:
        return Prose(Text.assemble(("no variant compiled", "bold red"), f"; {effort}{stopped}"))
    return Group(_render_tightest(certificate, out, f"{effort}{stopped}"), *_render_reach(out))


def _render_tightest(certificate: Mapping[str, Any], out: Mapping[str, Any], effort: str) -> RenderableType:
    large = large_parts(certificate)
    missing = " and ".join(
        f"{human(certificate[key])} {where}"
        for key, where in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        if certificate[key]
    )
    return Group(
        Prose(Text.assemble(("does not fit: ", "bold red"), f"{missing} missing")),
        Prose(f"tightest: {certificate['what']}"),
        Prose(f"it takes {human(certificate['allocated_bytes'])} of {human(out['budget_bytes'])}: {large}"),
        Text("its flags:"),
        CopyCommand(certificate["flags"], style=""),
        Prose(effort),
    )


def _render_reach(out: Mapping[str, Any]) -> list[RenderableType]:
    rows = out.get("reach") or ()
    if not rows:
        return []
    table = TableView(REACH_COLUMNS, rows, emphasis=lambda row: "" if row["fits"] else "dim")
    title = "for each rank of adapters, the longest sequence and the largest micro-batch that fit"
    return [Text(title, style="bold"), terminal_table(table)]


def _describe_speed(best: Mapping[str, Any], out: Mapping[str, Any]) -> str:
    step, low, high = (best[key] for key in ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high"))
    if not step:
        return describe_prediction(step, low, high)
    tokens, devices = out["batch_tokens"], (out.get("target") or {}).get("n_devices", 1)
    slow, fast = (f"{tokens / seconds:,.0f}" if seconds else "?" for seconds in (high, low))
    each = f", {tokens / step / devices:,.0f} on each device" if devices > 1 else ""
    mfu = f", MFU {best['predicted_mfu']:.1%}" if best.get("predicted_mfu") else ""
    bound = best.get("least_seconds")
    lower_bound = f", at least {rounded(bound, 3)} s by the data sheet" if bound else ""
    return (
        f"{describe_prediction(step, low, high)} per update, {tokens / step:,.0f} tokens/s ({slow} to {fast}){each}"
        f"{mfu}{lower_bound}; {safe(best.get('rates') or '')}"
    )


def _best_lines(best: Mapping[str, Any], out: Mapping[str, Any], config: str, effort: str) -> RenderableType:
    measured = best.get("measured") or {}
    timed = f"{measured['tokens_per_s']:,.0f} tokens/s measured" if measured else _describe_speed(best, out)
    host = f", {human(best['host_bytes'])} on the host" if best["host_bytes"] else ""
    return Group(
        Prose(Text.assemble(("fits: ", "bold green"), safe(best["what"]))),
        *([Prose(text, "dim")] if (text := as_fast(out.get("ties", ()))) else []),
        Prose(
            f"{human(best['allocated_bytes'])} of {human(out['budget_bytes'])}{host}, "
            f"{best['recompute_flops_fraction']:.1%} of the model's FLOPs recomputed, {timed}; {effort}"
        ),
        Text("run it with:", style="bold"),
        CopyCommand(f"bytescope train {shlex.quote(config)} {best['flags']}".rstrip()),
        *_render_layouts(out),
        *_render_reach(out),
    )


def _render_layouts(out: Mapping[str, Any]) -> list[RenderableType]:
    rows = out.get("layouts") or ()
    if len(rows) < 2:
        return []
    table = TableView(LAYOUT_COLUMNS, rows, emphasis=lambda row: "" if row["fits"] else "dim")
    reasons = [
        Prose(f"{row['layout']}: {safe(row['verdict'])}", "dim") for row in rows if row["predicted_seconds"] is None
    ]
    return [
        Text("each mesh, compared with the choice", style="bold"),
        terminal_table(table),
        *reasons,
        *([Prose(LOWER_BOUND_NOTE, "dim")] if has_bounds(rows) else []),
    ]


def has_bounds(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the table of these meshes has a bound, which needs an explanation."""
    return any(" at best" in slower(row) or "at least" in slower(row) for row in rows)


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(out: Mapping[str, Any]) -> str:
    """Returns the HTML page with the result of `bytescope fit`.

    out: the JSON result of `bytescope fit` (keys: module train/plan/fit/fit_result.py).
    """
    config, target, best, ties = out["config"], out["target"], out["best"] or {}, as_fast(out["ties"])
    batch = {"batch": best.get("batch") or f"{out['batch_tokens']:,} tokens per update", "policy": best.get("policy")}
    notes = [*limit_notes(target, out["budget_bytes"]), *NOTES, *rates_notes([out])]
    if ties:
        notes.append(f"{ties[:1].upper()}{ties[1:]}.")
    layouts = out.get("layouts") or ()
    compared = page_table(TableView(LAYOUT_COLUMNS, layouts)) if best and len(layouts) > 1 else None
    run = command_column(lambda row: command(config, target, row["flags"], fits=row["fits"]))
    reach = page_table(TableView((*REACH_COLUMNS, run), out["reach"])) if out.get("reach") else None
    used = {step["stage"] for step in out["walk"]}
    return page(
        "fit",
        title(config, target, f"fit within {human(out['budget_bytes'])}"),
        page_data(out),
        heading=f"{config or 'A config'} within {human(out['budget_bytes'])}",
        where=where(target),
        facts=facts([batch], out["given"]),
        versions=versions(out["versions"]),
        verdict=_verdict(out),
        figures=_header_figures(out),
        stopped=out["stopped"],
        answer=_command_and_breakdown(out),
        walk=_variants_page_table(out),
        layouts=compared,
        at_least=LOWER_BOUND_NOTE if has_bounds(layouts) else "",
        reach=reach,
        notes=notes,
        stages=Section("Stages of the search", [(stage, why) for stage, why in STAGES.items() if stage in used]),
    )


def page_data(out: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the page's chart as JSON values: one point for each compiled variant that has predicted
    seconds, with its allocated bytes on one device.

    In a point, `number` is the row of the variant in the table, from 1, and `chosen` says whether the variant is the
    chosen one or, if nothing fits, the one that is closest to fitting. `budget` is in bytes, `unit` is the unit of the
    bytes axis as (name, number of bytes), `cost` describes the axis of seconds, and `stages` lists the stages of the
    search that have a point.
    """
    points = [
        {
            "number": number,
            "stage": step["stage"],
            "what": step["what"],
            "bytes": step["allocated_bytes"],
            "host": step["host_bytes"] or 0,
            "seconds": step["predicted_seconds"],
            "spread": spread(step),
            "recomputed": step["recompute_flops_fraction"],
            "fits": step["fits"],
            "verdict": step["verdict"],
            "chosen": _is_chosen(out, step),
        }
        for number, step in enumerate(out["walk"], 1)
        if step["allocated_bytes"] is not None and step["predicted_seconds"] is not None
    ]
    used = [point["stage"] for point in points]
    largest = max([out["budget_bytes"], *(point["bytes"] for point in points)])
    return {
        "points": points,
        "budget": out["budget_bytes"],
        "choice": "choice" if out["best"] else "tightest",
        "unit": column_unit(largest, 0.5),
        "cost": COST_AXES[PREDICTED]._asdict(),
        "stages": [stage for stage in STAGES if stage in used],
    }


def _is_chosen(out: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    keys = out["best"]["overrides"] if out["best"] else (out["certificate"] or {}).get("keys")
    return step["keys"] == keys


# ---- the answer -----------------------------------------------------------------------------------------------


def _verdict(out: Mapping[str, Any]) -> dict[str, str]:
    if out["best"]:
        return {"kind": "fits", "words": "✓ fits"}
    if out["certificate"]:
        return {"kind": "exceeds", "words": "✕ does not fit"}
    return {"kind": "unknown", "words": "? no variant compiled"}


def _header_figures(out: Mapping[str, Any]) -> list[HeaderFigure]:
    figures: list[HeaderFigure] = []
    if out["best"]:
        figures = _figures_of_best(out, out["best"])
    elif out["certificate"]:
        missing = out["certificate"]
        figures = [
            figure("missing", missing[key], place) if missing[key] else HeaderFigure("missing", "")
            for key, place in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        ]
    programs = f"{plural(out['programs'], 'program')} compiled, {len(out['walk'])} tried"
    search = HeaderFigure("search took", f"{out['seconds']:,.0f} s", programs)
    return [one for one in [*figures, search] if one.value]


def _figures_of_best(out: Mapping[str, Any], best: Mapping[str, Any]) -> list[HeaderFigure]:
    measured = best["measured"] or {}
    return [
        figure("allocated", best["allocated_bytes"], f"of {human(out['budget_bytes'])}"),
        figure("on the host", best["host_bytes"], "per device")
        if best["host_bytes"]
        else HeaderFigure("on the host", ""),
        HeaderFigure(
            "step, measured",
            seconds(measured.get("step_seconds")),
            f"{count(measured.get('tokens_per_s', 0))} tokens/s on this machine",
        ),
        *predictions({**best, "predicted_tokens_per_s": _tokens_per_s(out, best["predicted_seconds"])}),
        HeaderFigure("recomputed", percent(best["recompute_flops_fraction"]), "of the model's FLOPs"),
    ]


def _tokens_per_s(out: Mapping[str, Any], step: float | None) -> float | None:
    return out["batch_tokens"] / step if step else None


def _command_and_breakdown(out: Mapping[str, Any]) -> dict[str, Any] | None:
    # limit: the position of the budget on the bar, in percent.
    variant = out["best"] or out["certificate"]
    if not variant:
        return None
    budget, total = out["budget_bytes"], max(variant["allocated_bytes"], 1)
    scale, over = max(budget, total), total > budget
    room = f"{human(abs(total - budget))} {'too much' if over else 'left'}"
    return {
        "title": "Run it" if out["best"] else "Does not fit: the tightest variant",
        "what": variant["what"],
        "command": command(out["config"], out["target"], variant["flags"], fits=bool(out["best"])),
        "parts": parts(variant["breakdown"], total, scale),
        "over": over,
        "limit": 100 * budget / scale if over else None,
        "room": f"{human(total)} of {human(budget)}, {room}{_host(out, variant)}",
    }


def _host(out: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    if not variant["host_bytes"]:
        return ""
    budget = f" of {human(out['host_budget_bytes'])}" if out["host_budget_bytes"] else ""
    return f"; {human(variant['host_bytes'])}{budget} on the host"


# ---- the search -----------------------------------------------------------------------------------------------


def _variants_page_table(out: Mapping[str, Any]) -> PageTable:
    def run(step: Record) -> str:
        if step["allocated_bytes"] is None:
            return ""
        keys = shlex.join(f"--config.{key}={text}" for key, text in step["keys"].items())
        return command(out["config"], out["target"], out["given"], keys, fits=step["fits"])

    records = [
        {**step, "number": number, "tokens_per_s": _tokens_per_s(out, step["predicted_seconds"])}
        for number, step in enumerate(out["walk"], 1)
    ]
    return page_table(
        TableView(
            (*WALK_COLUMNS, command_column(run)),
            records,
            emphasis=lambda step: "winner" if out["best"] and _is_chosen(out, step) else "",
            hover=lambda step: " ".join(f"{key}={text}" for key, text in step["keys"].items()),
        )
    )
