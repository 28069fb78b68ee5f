"""Shows predictions against published measurements on the terminal and as an HTML page, with scores, and with the
measurements that are not compared.

Both show the JSON of a validation (`validation_result.ValidationResult.to_json`). The terminal shows the scores, the
worst rows and the reasons. The page shows a mark for each run and every table. The page is one HTML file that opens
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

# Maximum number of rows in the table of the worst predictions.
_MAX_WORST = 10
# Minimum number of pairs for which a fraction of right pairs is meaningful.
_MIN_PAIRS = 5
NOTES = (
    "For each measured run, the config that comes nearest to it is compiled. Its seconds are predicted from the "
    "compiled schedule, at the FLOP/s and bytes/s that the chip reaches.",
    "Pairs: two runs whose measured seconds differ by more than 5 % (near: by less than 1.5x). A pair is right if "
    "the faster run is predicted to be faster; a tie counts as half. The columns by tensor split show the fraction "
    "that sorting by the size of the tensor-parallel group gets right. Runs of different models or numbers of GPUs "
    "are never pooled.",
    "If the measured framework launches kernels more slowly than the device runs them, the time of its launches is "
    "the prediction. The time per launch was read from runs of this set. Our compiled step has no such minimum; the "
    "seconds of the device are shown too.",
    "Bytes: the bytes that our program allocates, divided by the measured bytes. A reserved maximum is an upper "
    "bound of the bytes that were needed.",
    "Scores over all models: runs that have the same program (measured twice, or with differences that no config "
    "expresses) have the weight of one run.",
)
# Maximum number of characters in the line under the heading.
_MAX_LINE = 160


# ---- the tables -----------------------------------------------------------------------------------------------


def between(lowest: float, highest: float) -> str:
    return f"{lowest:.2f} to {highest:.2f}"


def is_off(row: Record) -> str:
    """Returns the style of a table cell: "exceeds" (a warning colour) if the predicted seconds differ from the measured
    ones by more than 15 % (`WITHIN`), else "". `row`: a run in the JSON result."""
    return "" if WITHIN[0] <= row["ratio"] <= WITHIN[1] else "exceeds"


def ratio(key: str, title: str, **more: Any) -> ColumnView:
    """Returns a table column for ratios predicted/measured, with two digits after the decimal point.

    Args:
        key: the key of the records that has the ratio.
        title: the title of the column.
        more: other arguments of `ColumnView`.
    """
    return ColumnView(key, title, "ratio", digits=2, **more)


def cohort_columns(title: str) -> tuple[ColumnView, ...]:
    """Returns the columns of the table that compares predicted with measured seconds for groups of runs.

    title: the title of the first column, which contains the name of each group.
    """
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

# The scores of a model on a number of GPUs. The page has one table, the terminal has four.
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

# A measured run and its prediction. The page lists all runs, the terminal those with the worst predictions.
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
NOT_COMPARED_COLUMNS = (
    ColumnView("reason", "why"),
    ColumnView("rows", "runs", "number", read=lambda group: len(group["rows"])),
    ColumnView("which", "which", "text", read=lambda group: ", ".join(named(group["rows"]))),
)


def named(rows: Sequence[Record]) -> list[str]:
    """Returns "MODEL on GPUS" for each different pair of a model and a number of GPUs, sorted."""
    return sorted({f"{row['model']} on {row['gpus']}" for row in rows})


def worst_first(rows: Sequence[Record]) -> list[Record]:
    """Returns the runs sorted by the factor between predicted and measured seconds, largest first. The factor is at
    least 1."""
    return sorted(rows, key=lambda row: -abs(math.log(row["ratio"])) if row["ratio"] else 0.0)


# ---- the terminal ---------------------------------------------------------------------------------------------


def show(validation: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints the comparison of predictions with measurements on the console, by default standard output.

    validation: the JSON of the comparison (`ValidationResult.to_json`).
    """
    put(render_text(validation), console)


def render_text(validation: Mapping[str, Any]) -> RenderableType:
    """Renders the comparison of predictions with measurements for the terminal.

    The text has a heading, scores over all models (if the set has cohorts), scores of seconds, order and bytes for each
    model and number of GPUs, the worst predictions, runs with known differences, and the reasons why other runs are not
    compared.

    validation: the JSON of the comparison (`ValidationResult.to_json`).
    """
    pooled = bool(validation["cohorts"])
    return blocks(
        _head(validation),
        _cohorts(validation["cohorts"], "rows"),
        _cohorts(validation["sources"], "source"),
        _cohort_bytes(validation),
        _seconds(validation) if validation["groups"] else None,
        _render_order(validation),
        _render_order_across_stages(validation),
        None if pooled else _bytes(validation),
        _worst(validation),
        *map(render_own_fit, validation["own"]),
        _render_reasons_of_errors(validation) if pooled else _render_known_differences(validation),
        _not_compared(validation),
    )


def _head(validation: Mapping[str, Any]) -> RenderableType:
    counts = (f"{validation['set']}: {len(validation['rows'])} measured runs", "bold")
    lines: list[RenderableType] = [Text.assemble(counts, f", {validation['compiled']} compiled now")]
    if validation["rates"]:
        lines.append(Prose(f"rates: {one_line(validation['rates'])}", "dim"))
    for compiler, rows in validation["elsewhere"]:
        lines.append(Prose(f"{rows} rows were compiled by another environment ({compiler})", "dim"))
    if validation["left"]:
        lines.append(Prose(f"stopped: {len(validation['left'])} rows left; run the same command to continue", "yellow"))
    return Group(*lines)


def _cohorts(cohorts: Sequence[Record], title: str) -> RenderableType | None:
    timed = [cohort for cohort in cohorts if cohort["rows"]]
    if not timed:
        return None
    words = Prose(
        "predicted over measured seconds, for all models; runs that have the same program have the weight of one run:"
    )
    heading = words if title == "rows" else Text("by source:")
    return Group(heading, terminal_table(TableView(cohort_columns(title), timed)))


def _cohort_bytes(validation: Mapping[str, Any]) -> RenderableType | None:
    sized = [source for source in validation["sources"] if source["bytes_rows"]]
    if not sized:
        return None
    name, *_ = cohort_columns("source")
    return Group(
        Prose("our allocated bytes over the measured bytes, by source:"),
        terminal_table(TableView((name, *COHORT_BYTES), sized)),
        *_lines_of_uncompared_bytes(validation),
    )


def _seconds(validation: Mapping[str, Any]) -> RenderableType:
    hosts = any(row["host_bound"] for row in validation["rows"])
    free = "; free of host: the median of runs that are not bound by launches:" if hosts else ", by model and GPUs:"
    columns = (*GROUP, *GROUP_SECONDS, *(GROUP_FREE_OF_HOST if hosts else ()))
    return Group(
        Prose(f"predicted over measured seconds{free}"), terminal_table(TableView(columns, validation["groups"]))
    )


def _render_order(validation: Mapping[str, Any]) -> RenderableType | None:
    # Small groups are left out if there are also scores over the runs of all models.
    groups = [
        group
        for group in validation["groups"]
        if group["pairs"]["count"] >= (_MIN_PAIRS if validation["cohorts"] else 0)
    ]
    if not groups:
        return None
    return Group(
        Prose(
            "order: pairs of runs with equal numbers of stages that differ by more than 5 % (near: by less than 1.5x), "
            "the share that is predicted in the right order, and the share in the right order if runs are sorted by "
            "the size of the tensor-parallel group:"
        ),
        terminal_table(TableView((*GROUP, *GROUP_PAIRS, *GROUP_RANKS), groups)),
    )


def _render_order_across_stages(validation: Mapping[str, Any]) -> RenderableType | None:
    groups = [group for group in validation["groups"] if group["across"] and group["across"]["count"]]
    if not groups:
        return None
    return Group(
        Prose("order of runs with different numbers of stages, including runs without stages:"),
        terminal_table(TableView((*GROUP, *GROUP_PAIRS_ACROSS), groups)),
    )


def _bytes(validation: Mapping[str, Any]) -> RenderableType | None:
    groups = [group for group in validation["groups"] if group["bytes_rows"]]
    if not groups:
        return None
    kinds = {row["bytes_are"] for row in validation["rows"] if row["bytes_ratio"]} - {""}
    what = f" ({' or '.join(sorted(kinds))})" if kinds else ""
    return Group(
        Prose(f"our allocated bytes over the measured bytes{what}:"),
        terminal_table(TableView((*GROUP, *GROUP_BYTES), groups)),
        *_lines_of_uncompared_bytes(validation),
    )


def _lines_of_uncompared_bytes(validation: Mapping[str, Any]) -> list[Prose]:
    apart = _by_reason(validation["rows"], lambda row: row["bytes_reason"])
    return [
        Prose(f"{len(rows)} not compared: {one_line(reason)} ({'; '.join(map(_named_bytes, rows))})")
        for reason, rows in apart.items()
    ]


def _by_reason(rows: Sequence[Record], reason: Callable[[Record], str]) -> dict[str, list[Record]]:
    # Runs without a reason are left out.
    by_reason: dict[str, list[Record]] = {}
    for row in rows:
        if reason(row):
            by_reason.setdefault(reason(row), []).append(row)
    return by_reason


def _named_bytes(row: Record) -> str:
    ours, measured = (human(count) if count else "unknown" for count in (row["allocated_bytes"], row["measured_bytes"]))
    return f"{row['model']} on {row['gpus']}, {row['setup']}: ours {ours}, measured {measured}"


def _worst(validation: Mapping[str, Any]) -> RenderableType | None:
    rows = [row for row in worst_first(validation["rows"]) if row["ratio"]][:_MAX_WORST]
    return terminal_table(TableView(ROW_COLUMNS, rows)) if rows else None


OWN_COLUMNS = (
    ColumnView("name", "your runs"),
    ColumnView("runs", "runs", "number"),
    ratio("before", "predicted/measured", short="pred./meas."),
    ratio("after", "with proposed rates", short="proposed"),
    ColumnView("cause", "likely cause", "value"),
    ColumnView("cause_seconds", "of measured seconds", "share", short="adds", skip_zero=True),
)


def render_own_fit(own: Record) -> RenderableType:
    """Renders rates that are fitted to the user's own runs: their factors, the interval of later predictions, the runs
    by group with the likely cause, and the key by which they differ most.

    own: the JSON of the fit (`own_fit.OwnFit`).
    """
    fit = own["fit"]
    what = f"proposed rates of {own['chip']}"
    counts = f", from {fit['runs']} measured runs of {fit['programs']} programs"
    lines: list[RenderableType] = [Text.assemble((what, "bold"), counts)]
    lines += [Prose(text) for text in own_fit_lines(own)]
    lines.append(terminal_table(TableView(OWN_COLUMNS, own["groups"])))
    return Group(*lines)


def own_fit_lines(own: Record) -> list[str]:
    """Returns sentences about rates that are fitted to the user's own runs. `own`: as for `render_own_fit`."""
    fit = own["fit"]
    factors = ", ".join(
        f"{part} {factor:.2f}x" + ("" if part in fit["own"] else " (too few seconds for a factor of its own)")
        for part, factor in fit["factors"].items()
    )
    lines = [f"predicted seconds are multiplied by: {factors or 'nothing'}"]
    if own["low"] is None:
        lines.append(
            "the interval of later predictions keeps the width that it has without your runs, or their largest error: "
            "runs of four different programs determine a width of their own"
        )
    else:
        lines.append(
            f"four of five further runs are expected to take {own['low']:.2f} to {own['high']:.2f} times the predicted "
            "seconds, from predictions of each program by rates of the others"
        )
    if own["differs"]:
        values = ", ".join(f"{value}: {middle:.2f} ({runs} runs)" for value, runs, middle in own["differs"]["values"])
        lines.append(
            f"without these rates, predicted/measured differs most by {one_line(own['differs']['key'])}: {values}"
        )
    return lines


def _render_known_differences(validation: Mapping[str, Any]) -> RenderableType | None:
    lines = [
        Prose(
            f"{one_line(reason)}: "
            + "; ".join(f"{row['model']} on {row['gpus']}, {row['setup']} ({row['ratio']:.2f})" for row in rows)
        )
        for reason, rows in _by_reason(validation["rows"], lambda row: row["differs"] if row["ratio"] else "").items()
    ]
    title = Text("runs that are known to differ from our program (predicted over measured seconds)", style="bold")
    return Group(title, *lines) if lines else None


def _render_reasons_of_errors(validation: Mapping[str, Any]) -> RenderableType | None:
    off = [row for row in worst_first(validation["rows"]) if row["ratio"] and is_off(row)]
    by_reason = _by_reason(off, lambda row: row["differs"] or "no reason is known")
    if not by_reason:
        return None
    lines: list[RenderableType] = [Text("likely reasons for errors of more than 15 %", style="bold")]
    for why, some in sorted(by_reason.items(), key=lambda each: -len(each[1])):
        ratios = [row["ratio"] for row in some]
        spread = between(min(ratios), max(ratios)) if len(some) > 1 else f"{ratios[0]:.2f}"
        lines.append(Prose(f"{len(some)}: {one_line(why)} ({spread}; {one_line(', '.join(named(some)[:4]))})"))
    return Group(*lines)


def _not_compared(validation: Mapping[str, Any]) -> RenderableType | None:
    if not validation["unsaid"]:
        return None
    lines: list[RenderableType] = [Text("not compared", style="bold")]
    for group in validation["unsaid"]:
        models = named(group["rows"])
        more = ", ..." if len(models) > 6 else ""
        lines.append(Prose(f"{len(group['rows'])}: {one_line(group['reason'])} ({', '.join(models[:6])}{more})"))
    return Group(*lines)


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(validation: Mapping[str, Any]) -> str:
    """Returns the HTML page that compares predictions with published measurements.

    validation: the JSON of the comparison (`ValidationResult.to_json`).
    """
    rates = f"rates: {validation['rates']}" if validation["rates"] else ""
    long = len(rates) > _MAX_LINE  # the rates of several chips
    return page(
        "validation",
        f"{validation['set']} · validate",
        page_data(validation),
        heading=f"{validation['set']}: predicted and measured",
        where="" if long else rates,
        facts=[],
        versions=versions(validation["versions"]),
        figures=_header_figures(validation),
        left=len(validation["left"]),
        cohorts=page_table(TableView((*cohort_columns("rows"), *COHORT_BYTES), validation["cohorts"])),
        sources=page_table(TableView((*cohort_columns("source"), *COHORT_BYTES), validation["sources"])),
        groups=page_table(TableView(GROUP_COLUMNS, validation["groups"])),
        own=page_table(TableView(OWN_COLUMNS, [group for own in validation["own"] for group in own["groups"]])),
        rows=page_table(TableView(ROW_COLUMNS, worst_first(validation["rows"]))),
        unsaid=page_table(TableView(NOT_COMPARED_COLUMNS, validation["unsaid"])),
        notes=(*NOTES, *[line for own in validation["own"] for line in own_fit_lines(own)], *([rates] if long else [])),
    )


def page_data(validation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the page's chart as JSON values.

    For each model and number of GPUs these are the measured seconds, the predicted seconds, and the tooltips of the
    runs.
    """
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in validation["rows"]:
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
    sizes = (
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
            f"device only {seconds(row['device_seconds'])}" if row["launch_seconds"] else "",
            sizes,
            row["differs"],
            row["bytes_reason"],
        )
        if text
    ]


def _header_figures(validation: Mapping[str, Any]) -> list[HeaderFigure]:
    # There is no overall score, because runs of different models are never pooled.
    unsaid = sum(len(group["rows"]) for group in validation["unsaid"])
    return [
        HeaderFigure("runs", str(len(validation["rows"])), "measured and predicted"),
        HeaderFigure("not compared", str(unsaid), "with the reason below"),
    ]
