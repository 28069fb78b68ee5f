"""Shows `bytescope fit` for every subject: the search while it runs, and its result on the terminal and as a page.

The result is the JSON of `FitSearch.to_json`. A config also has tables of its own (`train.plan.fit.fit_tables`). The
page is one HTML file that opens offline; `static/fit.js` draws the picture of the search.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.compare.compare_columns import COST_AXES, PREDICTED_STEP, RECOMPUTED_SHARE, Record, command_column
from bytescope.memory.compare.compare_rows import PREDICTED
from bytescope.memory.compare.compare_text import as_fast
from bytescope.memory.compare.fit_search import Step
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.targets import Target
from bytescope.memory.report.buffer_tables import line
from bytescope.memory.units import column_unit, human, plural
from bytescope.memory.view.console import make_console, put, safe
from bytescope.memory.view.elements import (
    HeaderFigure,
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
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.progress_bar import ProgressBar
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, unwrapped, wrap

# Stage of the search -> what the search tries in it.
STAGES = {
    "baseline": "the program without a change; of a config, its smallest micro-batch without recomputation",
    "mesh": "each mesh with everything recomputed, to see which meshes fit and how fast each can become",
    "remat": "the least recomputation that fits",
    "micro": "batches with everything recomputed, as long as the next one is predicted to be faster",
    "squeeze": "smaller state and activations, because recomputation is not enough",
    "neighbour": "neighbours of the best: plans that save one more tensor, or unrolled layers",
    "compiler": "options of XLA that need less memory, for variants that exceed the budget by little",
}
NOTES = (
    "Every variant is the subject's own step, compiled for the target.",
    "Allocated: the bytes that the runtime allocates on one device, including arguments and packed temporaries.",
    "Recomputed: the FLOPs that jax.checkpoint executes again, divided by the model's FLOPs.",
)
# Width in terminal columns of the longest verdict, such as "fits, fastest so far".
_VERDICT = 20


class FitTable(NamedTuple):
    """A table below the result of a search.

    Fields:
        key: the id of the table on the page.
        title: the title.
        table: the rows and columns.
        note: an explanation, "" for none.
        reasons: further lines on the terminal.
    """

    key: str
    title: str
    table: TableView
    note: str = ""
    reasons: Sequence[str] = ()


def kind(row: Record) -> str:
    """Returns the CSS class that colours the verdict of a variant: "fits", "exceeds" (does not fit) or "tight" (cannot
    run)."""
    if row["fits"]:
        return "fits"
    return "tight" if row["allocated_bytes"] is None else "exceeds"


VERDICT = ColumnView("verdict", "verdict", "text", verdict=kind, rank=8)
ALLOCATED = ColumnView("allocated_bytes", "allocated", "bytes")
HOST = ColumnView("host_bytes", "host", "bytes", skip_zero=True)
# Every variant of the search, in order. The page has this table; the terminal prints the variants during the search.
WALK_COLUMNS = (
    ColumnView("number", "#", "number"),
    ColumnView("stage", "stage", "text"),
    ColumnView("what", "what", "text", css="what"),
    ALLOCATED,
    HOST,
    PREDICTED_STEP,
    ColumnView("predicted_tokens_per_s", "tokens/s, predicted", "count", rank=2),
    RECOMPUTED_SHARE,
    VERDICT,
)
KEPT_COLUMNS = (
    ColumnView("label", "kept by every layer"),
    ColumnView("bytes", "all layers", "bytes"),
    ColumnView("type", "type", "text"),
    ColumnView("where", "where", "text", read=lambda row: line(row["where"])),
)


# ---- the search while it runs --------------------------------------------------------------------------------------


class Lines:
    """Prints each variant that a search compiles on one line of the terminal, as soon as it is compiled.

    A description that is too long for the line is printed above it.

    bar: the progress bar, which is hidden while a line is printed; None for none.
    """

    def __init__(self, bar: ProgressBar | None = None, console: Console | None = None):
        self._bar, self._console = bar, console or make_console()
        self._stage, self._began = "", time.monotonic()

    def show_head(self, target: Target, budget: int, items: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Prints the target and the budget of the search. items: further facts. notes: lines below."""
        size = ", ".join(filter(None, (f"{human(budget)} per device", limit_share(target.to_json(), budget))))
        head = Items([f"on {target.name}", f"within {size};", *items], gap=1, title="fit")
        self._print(Group(head, *(Prose(note, "dim") for note in notes)))

    def show(self, step: Step) -> None:
        """Prints a compiled variant. If it is the first of a stage of the search, prints the stage's heading above
        it."""
        heading = []
        if step.stage != self._stage:
            self._stage = step.stage
            heading = [Prose(Text.assemble((step.stage, "bold"), (f"  {STAGES[step.stage]}", "dim")))]
        self._print(Group(*heading, Line(step, time.monotonic() - self._began)))

    def _print(self, lines: RenderableType) -> None:
        if self._bar is None:
            put(lines, self._console)
            return
        with self._bar.aside():
            put(lines, self._console)


class Line:
    """A line of the terminal that describes one compiled variant: its bytes, its predicted seconds, its recomputation
    and whether it fits.

    at: seconds from the start of the search.
    """

    def __init__(self, step: Step, at: float) -> None:
        self._step, self._head = step, f"{at:6.1f} s  "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        step, head = self._step, Text(self._head, style="dim")
        left = options.max_width - len(self._head)
        what, row = Text(safe(step.what)), step.to_json()
        if not step.ok:
            yield from _with_hanging_indent(
                head, [*wrap(what, left, console), *wrap(Text(safe(step.verdict), style="yellow"), left, console)]
            )
            return
        host = f" + {human(row['host_bytes'])} host" if row["host_bytes"] else ""
        figures = (
            f"{human(step.allocated):>11}{host}  {seconds(row['predicted_seconds']):>8}  "
            f"{percent(row['recompute_flops_fraction']):>7}  "
        )
        room = left - len(figures) - _VERDICT - 1
        if what.cell_len > room:  # long words are printed on lines of their own, above the figures
            lines, last = wrap(what, left, console), Text(" " * min(max(room, 0), 8))
        else:
            lines, last = [], Text.assemble(what, " " * (room - what.cell_len + 1))
        yield from _with_hanging_indent(head, [*lines, Text.assemble(last, figures, (step.verdict, _style(step)))])


def _with_hanging_indent(head: Text, lines: Sequence[Text]) -> list[Text]:
    return [
        unwrapped(Text.assemble(head if not number else " " * head.cell_len, line)) for number, line in enumerate(lines)
    ]


def _style(step: Step) -> str:
    if "fastest" in step.verdict or "thriftier" in step.verdict:
        return "bold green"
    return "green" if step.fits else "red"


def describe_prediction(row: Mapping[str, Any]) -> str:
    """Returns the text for the predicted seconds per update of a row, such as "predicted 0.721 s (0.65 to 0.81)"."""
    if row["predicted_seconds"] is None:
        return "no time is predicted"
    ends = within(row["predicted_seconds_low"], row["predicted_seconds_high"])
    return f"predicted {rounded(row['predicted_seconds'])} s ({ends})"


def show_measured(measurements: Sequence[tuple[Step, Mapping[str, Any]]], console: Console | None = None) -> None:
    """Prints the seconds per update and tokens/s of the fastest variants, which were run on this machine, beside their
    predictions.

    measurements: pairs (variant, measured values `step_seconds` and `tokens_per_s`).
    """
    lines = [
        Prose(
            f"{measured['step_seconds']:10.4g} s  {measured['tokens_per_s']:12,.0f} tokens/s  "
            f"({describe_prediction(step.to_json())})  {step.what}"
        )
        for step, measured in measurements
    ]
    put(Group(Text("measured on this machine", style="bold"), *lines), console)


# ---- the result on the terminal --------------------------------------------------------------------------------------


def render_text(out: Mapping[str, Any], tables: Sequence[FitTable] = ()) -> RenderableType:
    """Renders the result of a search for the terminal: the choice with its figures, what to run or to write into the
    source, and tables. If nothing fits, renders the variant nearest to the budget and the bytes that are missing.

    out: the JSON of the result. tables: further tables.
    """
    effort = f"{plural(out['programs'], 'program')} compiled, {out['seconds']:.1f} s"
    if out["stopped"]:
        effort += f"; stopped early: {out['stopped']}"
    best, certificate = out["best"], out["certificate"]
    if best is None and certificate is None:
        return Prose(Text.assemble(("no variant compiled", "bold red"), f"; {effort}"))
    below = [part for table in tables for part in _render_table(table)]
    if best is None:
        return Group(*_render_tightest(certificate, out), Prose(effort), *below)
    measured = best.get("measured") or {}
    timed = f"{measured['tokens_per_s']:,.0f} tokens/s measured" if measured else _describe_speed(best, out)
    host = f", {human(best['host_bytes'])} on the host" if best["host_bytes"] else ""
    ties = as_fast(out["ties"])
    return Group(
        Prose(Text.assemble(("fits: ", "bold green"), safe(answer(out)))),
        *([Prose(ties, "dim")] if ties else []),
        Prose(
            f"{human(best['allocated_bytes'])} of {human(out['budget_bytes'])}{host}, "
            f"{percent(best['recompute_flops_fraction'])} of the model's FLOPs recomputed, {timed}; {effort}"
        ),
        *([terminal_table(TableView(KEPT_COLUMNS, best["kept"]))] if best.get("kept") else []),
        *_render_use(best, out),
        *below,
    )


def answer(out: Mapping[str, Any]) -> str:
    """Returns the chosen variant in a few words."""
    best = out["best"]
    changed = best["keys"] or best.get("code") or out.get("config")
    return best["what"] if changed else f"{best['what']}: no change of the policy is needed"


def _describe_speed(best: Mapping[str, Any], out: Mapping[str, Any]) -> str:
    tokens, devices = best["predicted_tokens_per_s"], out["target"].get("n_devices", 1)
    words = [f"{describe_prediction(best)} per update" if best["predicted_seconds"] else describe_prediction(best)]
    if tokens:
        slow, fast = (
            f"{tokens * best['predicted_seconds'] / end:,.0f}" if end else "?"
            for end in (best["predicted_seconds_high"], best["predicted_seconds_low"])
        )
        words.append(f"{count(tokens)} tokens/s ({slow} to {fast})")
        if devices > 1:
            words.append(f"{count(tokens / devices)} on each device")
    if best.get("predicted_mfu"):
        words.append(f"MFU {best['predicted_mfu']:.1%}")
    if best.get("least_seconds"):
        words.append(f"at least {rounded(best['least_seconds'], 3)} s by the data sheet")
    return f"{', '.join(words)}; {safe(out['rates'])}" if out["rates"] else ", ".join(words)


def _render_tightest(certificate: Mapping[str, Any], out: Mapping[str, Any]) -> list[RenderableType]:
    missing = " and ".join(
        f"{human(certificate[key])} {place}"
        for key, place in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        if certificate[key]
    )
    sizes = sorted(certificate["breakdown"].items(), key=lambda entry: -entry[1])
    large = ", ".join(f"{name} {human(size)}" for name, size in sizes if size > certificate["allocated_bytes"] / 100)
    lines: list[RenderableType] = [
        Prose(Text.assemble(("does not fit: ", "bold red"), f"{missing} missing")),
        Prose(f"tightest: {safe(certificate['what'])}"),
        Prose(f"it takes {human(certificate['allocated_bytes'])} of {human(out['budget_bytes'])}: {large}"),
    ]
    if certificate["flags"]:
        lines += [Text("its flags:"), CopyCommand(certificate["flags"], style="")]
    return lines


def _render_use(best: Mapping[str, Any], out: Mapping[str, Any]) -> list[RenderableType]:
    """Returns the command that runs the choice of a config, the keys of another trainer with the command that reports
    on them, or the lines of code for the source."""
    if out.get("config"):
        run = f"bytescope train {shlex.quote(out['config'])} {best['flags']}".rstrip()
        return [Text("run it with:", style="bold"), CopyCommand(run)]
    if best["flags"]:
        check = f"bytescope report {shlex.join((out['program'], out['target']['name']))} {best['flags']}"
        return [
            Text("the trainer's keys:", style="bold"),
            CopyCommand(best["flags"]),
            Text("report on this program:", style="bold"),
            CopyCommand(check),
        ]
    if not best["code"]:
        return []
    code = (unwrapped(Text(f"  {safe(line)}", style="bold green")) for line in best["code"])
    return [Text("put into the source:", style="bold"), *code]


def _render_table(table: FitTable) -> list[RenderableType]:
    notes = [*table.reasons, *([table.note] if table.note else [])]
    return [
        Text(table.title, style="bold"),
        terminal_table(table.table),
        *(Prose(safe(note), "dim") for note in notes),
    ]


# ---- the page --------------------------------------------------------------------------------------------------------


def render_page(out: Mapping[str, Any], tables: Sequence[FitTable] = ()) -> str:
    """Returns the HTML page with the result of a search.

    out: the JSON of the result. tables: further tables.
    """
    name, target, best, budget = out.get("config") or out["program"], out["target"], out["best"], out["budget_bytes"]
    about = [f"{one['times']} x {one['name'] or 'layer'} {line(one['where'])}" for one in out.get("layers", ())]
    if "batch_tokens" in out:
        chosen = best or {}
        batch = chosen.get("batch") or f"{out['batch_tokens']:,} tokens per update"
        about = facts([{"batch": batch, "policy": chosen.get("policy")}], out["given"])
    notes = [*limit_notes(target, budget), *NOTES, *rates_notes([out])]
    if ties := as_fast(out["ties"]):
        notes.append(f"{ties[:1].upper()}{ties[1:]}.")
    if best and best.get("kept"):
        note = "The bytes are those of all layers on one device. The other values are recomputed."
        tables = [
            FitTable("kept", "Values that every layer keeps", TableView(KEPT_COLUMNS, best["kept"]), note),
            *tables,
        ]
    used = {row["stage"] for row in out["walk"]}
    return page(
        "fit",
        title(name, target, f"fit within {human(budget)}"),
        page_data(out),
        heading=f"{name} within {human(budget)}",
        where=where(target),
        facts=about,
        versions=versions(out["versions"]),
        verdict=_verdict(out),
        figures=_header_figures(out),
        stopped=out["stopped"],
        answer=_answer_card(out),
        tables=[(table, page_table(table.table)) for table in tables],
        walk=page_table(_walk_table(out)),
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
            "stage": row["stage"],
            "what": row["what"],
            "bytes": row["allocated_bytes"],
            "host": row["host_bytes"] or 0,
            "seconds": row["predicted_seconds"],
            "spread": spread(row),
            "recomputed": row["recompute_flops_fraction"],
            "fits": row["fits"],
            "verdict": row["verdict"],
            "chosen": _is_chosen(out, row),
        }
        for number, row in enumerate(out["walk"], 1)
        if row["allocated_bytes"] is not None and row["predicted_seconds"] is not None
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


def _is_chosen(out: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    chosen = out["best"] or out["certificate"]
    return bool(chosen) and (row["what"], row["keys"]) == (chosen["what"], chosen["keys"])


def _verdict(out: Mapping[str, Any]) -> dict[str, str]:
    if out["best"]:
        return {"kind": "fits", "words": "✓ fits"}
    if out["certificate"]:
        return {"kind": "exceeds", "words": "✕ does not fit"}
    return {"kind": "unknown", "words": "? no variant compiled"}


def _header_figures(out: Mapping[str, Any]) -> list[HeaderFigure]:
    best, missing = out["best"], out["certificate"] or {}
    shown = [
        figure("missing", missing[key], place)
        for key, place in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        if missing.get(key)
    ]
    if best:
        measured = best.get("measured") or {}
        speed = f"{count(measured.get('tokens_per_s', 0))} tokens/s on this machine"
        shown = [
            figure("allocated", best["allocated_bytes"], f"of {human(out['budget_bytes'])}"),
            *([figure("on the host", best["host_bytes"], "per device")] if best["host_bytes"] else []),
            HeaderFigure("step, measured", seconds(measured.get("step_seconds")), speed),
            *predictions({"predicted_mfu": None, **best}),
            HeaderFigure("recomputed", percent(best["recompute_flops_fraction"]), "of the model's FLOPs"),
        ]
    programs = f"{plural(out['programs'], 'program')} compiled, {len(out['walk'])} tried"
    return [one for one in [*shown, HeaderFigure("search took", f"{out['seconds']:,.0f} s", programs)] if one.value]


def _answer_card(out: Mapping[str, Any]) -> dict[str, Any] | None:
    # limit: the position of the budget on the bar, in percent.
    best, config = out["best"], out.get("config")
    row = best or out["certificate"]
    if not row:
        return None
    budget, total = out["budget_bytes"], max(row["allocated_bytes"], 1)
    scale, over = max(budget, total), total > budget
    room = f"{human(abs(total - budget))} {'too much' if over else 'left'}"
    use = row["flags"] or "\n".join(row.get("code", ()))
    choice = "Run it" if config or row["flags"] else "The policy"
    if config:
        use = command(config, out["target"], row["flags"], fits=bool(best))
    return {
        "title": choice if best else "Does not fit: the tightest variant",
        "what": answer(out) if best else row["what"],
        "command": use,
        "parts": parts(row["breakdown"], total, scale),
        "over": over,
        "limit": 100 * budget / scale if over else None,
        "room": f"{human(total)} of {human(budget)}, {room}{_host(out, row)}",
    }


def _host(out: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if not row["host_bytes"]:
        return ""
    budget = f" of {human(out['host_budget_bytes'])}" if out["host_budget_bytes"] else ""
    return f"; {human(row['host_bytes'])}{budget} on the host"


def _walk_table(out: Mapping[str, Any]) -> TableView:
    def run(row: Record) -> str:
        if row["allocated_bytes"] is None or not out.get("config"):
            return ""
        keys = shlex.join(f"--config.{key}={text}" for key, text in row["keys"].items())
        return command(out["config"], out["target"], out["given"], keys, fits=row["fits"])

    return TableView(
        (*WALK_COLUMNS, command_column(run)),
        [{**row, "number": number} for number, row in enumerate(out["walk"], 1)],
        emphasis=lambda row: "winner" if out["best"] and _is_chosen(out, row) else "",
        hover=lambda row: " ".join(f"{key}={text}" for key, text in row["keys"].items()),
    )
