"""A validation on the terminal and as a page: predicted against measured, scores, and what is not compared.

Both show the JSON of a validation (`validation_result.ValidationResult.to_json`). The terminal shows the scores, the
worst rows and the reasons; the page shows a mark for each run and every table. The page is one HTML file that opens
offline; `static/validation.js` draws its chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, put
from bytescope.memory.view.elements import HeaderFigure, versions
from bytescope.memory.view.figures import seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.train.plan.validation.cohorts import BYTES_WITHIN
from bytescope.train.plan.validation.validation_score import WITHIN

Record = Mapping[str, Any]

_WORST = 10
# Pairs below which a share of them says nothing.
_FEW = 5
NOTES = (
    "Each measured run is compiled as nearly alike as a config of ours can say it, and its compiled schedule is walked "
    "at the rates that the chip reaches.",
    "Pairs: of two runs that were measured more than 5 % apart (near: less than 1.5x), whether the faster one is "
    "predicted to be faster; a tie counts as half. Beside it what sorting by the tensor split alone gives. Models and "
    "numbers of GPUs are never pooled.",
    "Where the measured framework launches kernels more slowly than the device runs them, its launches are the "
    "prediction: a term that was read off runs of this very set. A compiled step of ours has no such floor; the "
    "device's own seconds are shown too.",
    "Bytes: what our program allocates over what was measured. A reserved maximum is an upper bound of what was "
    "needed.",
    "Over models, where they are pooled: runs that are one program of ours (measured twice, or told apart by nothing "
    "that a config of ours says) weigh one together.",
)
# Characters of a line under the heading.
_LINE = 160


# ---- the tables -----------------------------------------------------------------------------------------------


def between(least: float, most: float) -> str:
    """The ends of a spread of ratios: "0.97 to 2.00"."""
    return f"{least:.2f} to {most:.2f}"


def is_off(row: Record) -> str:
    """The verdict that colours a ratio outside of `WITHIN`."""
    return "" if WITHIN[0] <= row["ratio"] <= WITHIN[1] else "exceeds"


def ratio(key: str, title: str, **more: Any) -> ColumnView:
    """A column of ratios in two digits after the point."""
    return ColumnView(key, title, "ratio", digits=2, **more)


def cohort_columns(title: str) -> tuple[ColumnView, ...]:
    """The columns of the seconds of pooled rows. title: of the column that names them."""
    return (
        ColumnView("name", title, min_width=18),
        ColumnView("rows", "runs", "number", skip_zero=True),
        ColumnView("programs", "programs", "number", skip_zero=True),
        ColumnView("within", "within 15 %", "share"),
        ratio(
            "median", "predicted/measured", short="median", note=lambda cohort: between(cohort["least"], cohort["most"])
        ),
        ratio("least", "least", only=TERMINAL),
        ratio("most", "most", only=TERMINAL),
    )


COHORT_BYTES = (
    ColumnView("bytes_are", "measured", "text", only=TERMINAL),
    ColumnView("bytes_rows", "with bytes", "number", short="runs", skip_zero=True),
    ColumnView("bytes_programs", "programs with bytes", "number", short="programs", only=TERMINAL),
    ColumnView("bytes_below", "at or below", "share", only=TERMINAL),
    *(
        ColumnView(f"bytes {name}", f"bytes {name}", "share", short=name, path=f"bytes_within.{number}")
        for number, name in enumerate(BYTES_WITHIN)
    ),
    ratio(
        "bytes_median",
        "bytes, ours/measured",
        short="median",
        note=lambda cohort: between(cohort["bytes_least"], cohort["bytes_most"]),
    ),
    ratio("bytes_least", "least", only=TERMINAL),
    ratio("bytes_most", "most", only=TERMINAL),
)

# The scores of a model on a number of GPUs: one table of the page, four of the terminal.
GROUP = (ColumnView("name", "model"), ColumnView("gpus", "GPUs", "number"))
GROUP_SECONDS = (
    ColumnView("rows", "runs", "number"),
    ratio("least", "least", path="ratios.0", only=TERMINAL),
    ratio("low", "10 %", path="ratios.1", only=TERMINAL),
    ratio(
        "median",
        "predicted/measured",
        short="median",
        path="ratios.2",
        note=lambda group: between(group["ratios"][0], group["ratios"][4]),
    ),
    ratio("high", "90 %", path="ratios.3", only=TERMINAL),
    ratio("most", "most", path="ratios.4", only=TERMINAL),
    ColumnView("within", "within 15 %", "share"),
)
GROUP_FREE_OF_HOST = (
    ratio("free_median", "not bound by the host", short="free of host"),
    ColumnView(
        "free_rows",
        "runs",
        "number",
        read=lambda group: group["free_rows"] if group["free_median"] else None,
        only=TERMINAL,
    ),
)
GROUP_PAIRS = (
    ColumnView("count", "pairs", "number", path="pairs.count"),
    ColumnView("right", "right", "share", path="pairs.right"),
    ColumnView("by_tensor", "by tensor split", "share", short="by tensor", path="pairs.by_tensor"),
    ColumnView("near_count", "near pairs", "number", path="pairs.near_count", only=TERMINAL),
    ColumnView("near_right", "near pairs right", "share", short="right", path="pairs.near_right"),
    ColumnView("near_by_tensor", "by tensor split", "share", short="by tensor", path="pairs.near_by_tensor"),
)
GROUP_PAIRS_ACROSS = (
    ColumnView("across_count", "pairs across stages", "number", short="pairs", path="across.count"),
    ColumnView("across_right", "right", "share", path="across.right"),
    ColumnView("across_by_tensor", "by tensor", "share", path="across.by_tensor", only=TERMINAL),
    ColumnView("across_near_count", "near pairs", "number", path="across.near_count", only=TERMINAL),
    ColumnView("across_near_right", "right", "share", path="across.near_right", only=TERMINAL),
    ColumnView("across_near_by_tensor", "by tensor", "share", path="across.near_by_tensor", only=TERMINAL),
)
GROUP_RANKS = (
    ratio("spearman", "rank correlation", short="rank corr."),
    ratio("spearman_by_tensor", "by tensor split", short="by tensor"),
)
GROUP_BYTES = (
    ColumnView("bytes_rows", "runs with bytes", "number", short="runs", only=TERMINAL),
    ratio("bytes_median", "bytes, ours/measured", short="median"),
    ColumnView("bytes_below", "at or below", "share"),
)
GROUP_COLUMNS = (
    *GROUP,
    *GROUP_SECONDS,
    *GROUP_FREE_OF_HOST,
    *GROUP_PAIRS,
    *GROUP_PAIRS_ACROSS,
    *GROUP_RANKS,
    *GROUP_BYTES,
)

# A measured run beside its prediction; the terminal has those predicted worst.
ROW_COLUMNS = (
    ColumnView("model", "model", short="predicted worst"),
    ColumnView("gpus", "GPUs", "number"),
    ColumnView("setup", "setup", "value"),
    ColumnView("measured_seconds", "measured", "seconds", short="measured s"),
    ColumnView("predicted_seconds", "predicted", "seconds", short="predicted s"),
    ratio("ratio", "ratio", verdict=is_off),
    ColumnView("device_seconds", "device alone", "seconds", only=PAGE),
    ColumnView("allocated_bytes", "allocated", "bytes", short="alloc", skip_zero=True, rank=1),
    ColumnView("measured_bytes", "measured bytes", "bytes", short="measured", skip_zero=True, rank=1),
    ColumnView("bound_by", "bound by", "value"),
    ratio("bytes_ratio", "ratio of bytes", only=PAGE, rank=2),
    ColumnView("quality", "source", "text", hover=lambda row: row["source"], only=PAGE, rank=2),
    ColumnView("differs", "differs", "text", only=PAGE, rank=2),
)
UNSAID_COLUMNS = (
    ColumnView("reason", "why"),
    ColumnView("rows", "runs", "number", read=lambda group: len(group["rows"])),
    ColumnView("which", "which", "text", read=lambda group: ", ".join(named(group["rows"]))),
)


def named(rows: Sequence[Record]) -> list[str]:
    """The models of rows with their numbers of GPUs, each once."""
    return sorted({f"{row['model']} on {row['gpus']}" for row in rows})


def worst_first(rows: Sequence[Record]) -> list[Record]:
    """The rows whose prediction is furthest from what was measured first, by the logarithm of the ratio."""
    return sorted(rows, key=lambda row: -abs(math.log(row["ratio"])) if row["ratio"] else 0.0)


# ---- the terminal ---------------------------------------------------------------------------------------------


def show(found: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints a validation, to stdout when no console is given."""
    put(render_text(found), console)


def render_text(found: Mapping[str, Any]) -> RenderableType:
    """Head, scores over models where they are pooled, seconds and order by model and GPUs, bytes, the worst rows, rows
    that are known to differ, and what is not compared, with the reasons."""
    pooled = bool(found["cohorts"])
    return blocks(
        _head(found),
        _cohorts(found["cohorts"], "rows"),
        _cohorts(found["sources"], "source"),
        _cohort_bytes(found),
        _seconds(found) if found["groups"] else None,
        _order(found),
        _across(found),
        None if pooled else _bytes(found),
        _worst(found),
        _reasons(found) if pooled else _differing(found),
        _unsaid(found),
    )


def _head(found: Mapping[str, Any]) -> RenderableType:
    counts = (f"{found['set']}: {len(found['rows'])} measured runs", "bold")
    lines: list[RenderableType] = [Text.assemble(counts, f", {found['compiled']} compiled now")]
    if found["rates"]:
        lines.append(Prose(f"rates: {one_line(found['rates'])}", "dim"))
    for compiler, rows in found["elsewhere"]:
        lines.append(Prose(f"{rows} rows were compiled by another environment ({compiler})", "dim"))
    if found["left"]:
        lines.append(Prose(f"stopped: {len(found['left'])} rows left; run the same command to continue", "yellow"))
    return Group(*lines)


def _cohorts(cohorts: Sequence[Record], title: str) -> RenderableType | None:
    timed = [cohort for cohort in cohorts if cohort["rows"]]
    if not timed:
        return None
    words = Prose(
        "predicted seconds over measured ones, over all models; runs that are one program of ours weigh one together:"
    )
    heading = words if title == "rows" else Text("by source:")
    return Group(heading, terminal_table(TableView(cohort_columns(title), timed)))


def _cohort_bytes(found: Mapping[str, Any]) -> RenderableType | None:
    sized = [source for source in found["sources"] if source["bytes_rows"]]
    if not sized:
        return None
    name, *_ = cohort_columns("source")
    return Group(
        Prose("our allocated bytes over the measured ones, by source:"),
        terminal_table(TableView((name, *COHORT_BYTES), sized)),
        *_doubted(found),
    )


def _seconds(found: Mapping[str, Any]) -> RenderableType:
    hosts = any(row["host_bound"] for row in found["rows"])
    free = "; free of host: the median of runs that launches do not bind:" if hosts else ", by model and GPUs:"
    columns = (*GROUP, *GROUP_SECONDS, *(GROUP_FREE_OF_HOST if hosts else ()))
    return Group(
        Prose(f"predicted seconds over measured ones{free}"), terminal_table(TableView(columns, found["groups"]))
    )


def _order(found: Mapping[str, Any]) -> RenderableType | None:
    """Of groups with pairs; where models are pooled, of those with a few of them."""
    groups = [group for group in found["groups"] if group["pairs"]["count"] >= (_FEW if found["cohorts"] else 0)]
    if not groups:
        return None
    return Group(
        Prose(
            "order: pairs of runs that differ by more than 5 % (near: by less than 1.5x) and the share in "
            "the right order, of runs with as many stages, beside what sorting by the tensor split "
            "gives:"
        ),
        terminal_table(TableView((*GROUP, *GROUP_PAIRS, *GROUP_RANKS), groups)),
    )


def _across(found: Mapping[str, Any]) -> RenderableType | None:
    """The order of runs that differ in their stages."""
    groups = [group for group in found["groups"] if group["across"] and group["across"]["count"]]
    if not groups:
        return None
    return Group(
        Prose("order across numbers of stages, none among them:"),
        terminal_table(TableView((*GROUP, *GROUP_PAIRS_ACROSS), groups)),
    )


def _bytes(found: Mapping[str, Any]) -> RenderableType | None:
    groups = [group for group in found["groups"] if group["bytes_rows"]]
    if not groups:
        return None
    kinds = {row["bytes_are"] for row in found["rows"] if row["bytes_ratio"]} - {""}
    what = f" ({' or '.join(sorted(kinds))})" if kinds else ""
    return Group(
        Prose(f"our allocated bytes over the measured ones{what}:"),
        terminal_table(TableView((*GROUP, *GROUP_BYTES), groups)),
        *_doubted(found),
    )


def _doubted(found: Mapping[str, Any]) -> list[Prose]:
    """Bytes that are not compared, and why."""
    apart = _by(found["rows"], lambda row: row["bytes_reason"])
    return [
        Prose(f"{len(rows)} not compared: {one_line(reason)} ({'; '.join(map(_named_bytes, rows))})")
        for reason, rows in apart.items()
    ]


def _by(rows: Sequence[Record], reason: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Reason -> its rows, in their order; rows without a reason are left out."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        if reason(row):
            found.setdefault(reason(row), []).append(row)
    return found


def _named_bytes(row: Record) -> str:
    held, measured = (human(count) if count else "unknown" for count in (row["allocated_bytes"], row["measured_bytes"]))
    return f"{row['model']} on {row['gpus']}, {row['setup']}: {held} for {measured}"


def _worst(found: Mapping[str, Any]) -> RenderableType | None:
    rows = [row for row in worst_first(found["rows"]) if row["ratio"]][:_WORST]
    return terminal_table(TableView(ROW_COLUMNS, rows)) if rows else None


def _differing(found: Mapping[str, Any]) -> RenderableType | None:
    """Rows by what is known to set them apart."""
    lines = [
        Prose(
            f"{one_line(reason)}: "
            + "; ".join(f"{row['model']} on {row['gpus']}, {row['setup']} ({row['ratio']:.2f})" for row in rows)
        )
        for reason, rows in _by(found["rows"], lambda row: row["differs"] if row["ratio"] else "").items()
    ]
    title = Text("known to differ from what is predicted (predicted over measured)", style="bold")
    return Group(title, *lines) if lines else None


def _reasons(found: Mapping[str, Any]) -> RenderableType | None:
    """What is likely to part the rows predicted worst, outside `WITHIN`, from what was measured."""
    off = [row for row in worst_first(found["rows"]) if row["ratio"] and is_off(row)]
    by_reason = _by(off, lambda row: row["differs"] or "no reason is known")
    if not by_reason:
        return None
    lines: list[RenderableType] = [Text("likely reasons of what is more than 15 % away", style="bold")]
    for why, some in sorted(by_reason.items(), key=lambda each: -len(each[1])):
        ratios = [row["ratio"] for row in some]
        spread = between(min(ratios), max(ratios)) if len(some) > 1 else f"{ratios[0]:.2f}"
        lines.append(Prose(f"{len(some)}: {one_line(why)} ({spread}; {one_line(', '.join(named(some)[:4]))})"))
    return Group(*lines)


def _unsaid(found: Mapping[str, Any]) -> RenderableType | None:
    if not found["unsaid"]:
        return None
    lines: list[RenderableType] = [Text("not compared", style="bold")]
    for group in found["unsaid"]:
        models = named(group["rows"])
        more = ", ..." if len(models) > 6 else ""
        lines.append(Prose(f"{len(group['rows'])}: {one_line(group['reason'])} ({', '.join(models[:6])}{more})"))
    return Group(*lines)


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(found: Mapping[str, Any]) -> str:
    """The page of a validation's JSON (`validation_result.ValidationResult.to_json`), as text."""
    rates = f"rates: {found['rates']}" if found["rates"] else ""
    long = len(rates) > _LINE  # of several chips
    return page(
        "validation",
        f"{found['set']} · validate",
        page_data(found),
        heading=f"{found['set']}: predicted and measured",
        where="" if long else rates,
        facts=[],
        versions=versions(found["versions"]),
        figures=_figures(found),
        left=len(found["left"]),
        cohorts=page_table(TableView((*cohort_columns("rows"), *COHORT_BYTES), found["cohorts"])),
        sources=page_table(TableView((*cohort_columns("source"), *COHORT_BYTES), found["sources"])),
        groups=page_table(TableView(GROUP_COLUMNS, found["groups"])),
        rows=page_table(TableView(ROW_COLUMNS, worst_first(found["rows"]))),
        unsaid=page_table(TableView(UNSAID_COLUMNS, found["unsaid"])),
        notes=(*NOTES, rates) if long else NOTES,
    )


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the script draws: for each model and number of GPUs its runs, seconds measured and predicted, and tips."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        if row["measured_seconds"]:
            series.setdefault((row["model"], row["gpus"]), []).append(row)
    return {
        "series": [
            {
                "name": f"{model} on {gpus}",
                "x": [row["measured_seconds"] for row in rows],
                "y": [row["predicted_seconds"] for row in rows],
                "tips": [_tip(row) for row in rows],
            }
            for (model, gpus), rows in series.items()
        ]
    }


def _tip(row: Mapping[str, Any]) -> list[str]:
    bytes_of = (
        f"{row['allocated_bytes'] / 2**30:.2f} GiB allocated, {row['measured_bytes'] / 2**30:.2f} measured"
        if row["allocated_bytes"] and row["measured_bytes"]
        else ""
    )
    return [
        text
        for text in (
            f"{row['model']} on {row['gpus']}: {row['setup'] or row['id']}",
            f"measured {seconds(row['measured_seconds'])}",
            f"predicted {seconds(row['predicted_seconds'])} ({row['ratio']:.2f}), bound by {row['bound_by']}",
            f"device alone {seconds(row['device_seconds'])}" if row["launch_seconds"] else "",
            bytes_of,
            row["differs"],
            row["bytes_reason"],
        )
        if text
    ]


def _figures(found: Mapping[str, Any]) -> list[HeaderFigure]:
    """No score: those of different models and numbers of GPUs are never pooled."""
    unsaid = sum(len(group["rows"]) for group in found["unsaid"])
    return [
        HeaderFigure("runs", str(len(found["rows"])), "measured and predicted"),
        HeaderFigure("not compared", str(unsaid), "with the reason below"),
    ]
