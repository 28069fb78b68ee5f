"""Shows predictions against published measurements on the terminal and as an HTML page, with scores, and with the
measurements that are not compared.

Both show the JSON of a validation (`validation_result.ValidationResult.to_json`). The terminal shows the scores, the
worst rows and the reasons. The page shows a mark for each run and every table. The page is one HTML file that opens
offline; `static/validation.js` draws its chart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, put
from bytescope.memory.view.elements import HeaderFigure, versions
from bytescope.memory.view.figures import seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView, value_at
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.train.plan.validation.validation_score import BYTES_WITHIN, WITHIN

Record = Mapping[str, Any]

# Maximum number of rows in the table of the worst predictions.
_MAX_WORST = 10
# Minimum number of pairs for which a fraction of right pairs is meaningful.
_MIN_PAIRS = 5
NOTES = (
    "For each measured run, the config that comes nearest to it is compiled. Its seconds are predicted from the "
    "compiled schedule, at the FLOP/s and bytes/s that the chip reaches.",
    "Pairs: two runs whose measured seconds differ by more than 5 % (near: by less than 1.5x). A pair is right if "
    "the faster run is predicted to be faster; a tie counts as half. Other columns show the fraction that is right if "
    "runs are sorted by the size of the tensor-parallel group (tp), then by the number of stages (pp) and of "
    "micro-batches (mb), smaller first. A coloured fraction is below one of them. Runs of different models or numbers "
    "of GPUs are never pooled.",
    "Claimed: some measured programs are known to be other programs than ours, and some measured seconds are "
    "unreliable. Such runs are predicted, but each score is also given without them.",
    "If the measured framework launches kernels more slowly than the device runs them, the time of its launches is "
    "the prediction. The time per launch was read from runs of this set. Our compiled step has no such minimum; the "
    "seconds of the device are shown too.",
    "Interval: four of five measured runs are expected within it. Its width is that of the ratios of other publishers' "
    "runs of the same kind: compiled or eager, with or without sends between devices, limited by the device, by "
    "transfers or by launches.",
    "Bytes: the bytes that our program allocates, with the bytes that only the measured framework has by its source "
    "code, divided by the measured bytes. A reserved maximum is an upper bound of the bytes that were needed.",
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


def is_beaten(path: str) -> Callable[[Record], str]:
    """Returns a function from a group to the style of its fraction of right pairs: "exceeds" (a warning colour) if a
    baseline puts more pairs in the right order than the prediction, else "".

    path: where the group has its `Pairs`, such as "order.pairs".
    """

    def style(group: Record) -> str:
        pairs = value_at(group, path)
        if not pairs or pairs["right"] is None:
            return ""
        return "exceeds" if max(pairs["sorted_by"].values()) > pairs["right"] else ""

    return style


def ratio(key: str, title: str, **more: Any) -> ColumnView:
    """Returns a table column for ratios predicted/measured, with two digits after the decimal point.

    Args:
        key: the key of the records that has the ratio.
        title: the title of the column.
        more: other arguments of `ColumnView`.
    """
    return ColumnView(key, title, "ratio", digits=2, **more)


# The parts of a group or cohort: all runs, and the runs that we claim to predict. Each has a `Score`.
_ALL, _CLAIMED = "all", "claimed"
# Baseline -> the title of its column, in full and on the terminal.
_BASELINE_TITLES = {
    "tensor": ("by tensor split", "by tp"),
    "tensor_micro": ("by tensor split, micro-batches", "tp, mb"),
    "tensor_stages_micro": ("by tensor split, stages, micro-batches", "tp, pp, mb"),
}


def score_columns(part: str, quantiles: bool = False) -> tuple[ColumnView, ...]:
    """Returns the columns for the `Score` of measured seconds.

    Args:
        part: the key of the score in a group or cohort, "all" or "claimed".
        quantiles: whether the terminal shows the quantiles 0.1 and 0.9 instead of the number of programs.
    """
    title = "runs" if part == _ALL else "runs claimed"
    columns = [ColumnView(f"{part}_rows", title, "number", path=f"{part}.rows", short="runs")]
    if not quantiles:
        columns.append(
            ColumnView(f"{part}_programs", "programs", "number", path=f"{part}.programs", skip_zero=True, only=TERMINAL)
        )
    columns.append(ColumnView(f"{part}_within", "within 15 %", "share", path=f"{part}.within"))
    columns.append(
        ratio(
            f"{part}_median",
            "predicted/measured",
            short="median",
            path=f"{part}.median",
            note=lambda row: between(row[part]["least"], row[part]["most"]),
        )
    )
    columns.append(ratio(f"{part}_least", "least", path=f"{part}.least", only=TERMINAL))
    if quantiles:
        columns.append(ratio(f"{part}_low", "10 %", path=f"{part}.low", only=TERMINAL))
        columns.append(ratio(f"{part}_high", "90 %", path=f"{part}.high", only=TERMINAL))
    columns.append(ratio(f"{part}_most", "most", path=f"{part}.most", only=TERMINAL))
    return tuple(columns)


def cohort_columns(title: str, part: str = _ALL) -> tuple[ColumnView, ...]:
    """Returns the columns of the table that compares predicted with measured seconds for groups of runs.

    Args:
        title: the title of the first column, which contains the name of each group.
        part: "all" for all runs, "claimed" for the runs that we claim to predict.
    """
    return (ColumnView("name", title, min_width=18), *score_columns(part))


COHORT_BYTES = (
    ColumnView("bytes_are", "measured", "text", path="all.bytes_are", only=TERMINAL),
    ColumnView("bytes_rows", "with bytes", "number", short="runs", path="all.bytes_rows", skip_zero=True),
    ColumnView(
        "bytes_programs", "programs with bytes", "number", short="programs", path="all.bytes_programs", only=TERMINAL
    ),
    ColumnView("bytes_below", "at or below", "share", path="all.bytes_below", only=TERMINAL),
    *(
        ColumnView(f"bytes {name}", f"bytes {name}", "share", short=name, path=f"all.bytes_within.{number}")
        for number, name in enumerate(BYTES_WITHIN)
    ),
    ratio(
        "bytes_median",
        "bytes, ours/measured",
        short="median",
        path="all.bytes_median",
        note=lambda cohort: between(cohort["all"]["bytes_least"], cohort["all"]["bytes_most"]),
    ),
    ratio("bytes_least", "least", path="all.bytes_least", only=TERMINAL),
    ratio("bytes_most", "most", path="all.bytes_most", only=TERMINAL),
)

# How many measured runs are within their predicted interval, by source.
COVERAGE_COLUMNS = (
    ColumnView("name", "source", min_width=18),
    ColumnView("published", "published", "text", rank=1),
    ColumnView("rows", "runs", "number"),
    ColumnView("refused", "not predicted", "number", short="refused", skip_zero=True),
    ColumnView("held", "within their interval", "share", short="within"),
    ColumnView("claimed_rows", "claimed", "number"),
    ColumnView("claimed_held", "claimed within", "share", short="within"),
    ratio("width", "upper/lower end, median", short="width"),
)

# The scores of a model on a number of GPUs. The page has one table, the terminal has several.
GROUP = (ColumnView("name", "model"), ColumnView("gpus", "GPUs", "number"))
GROUP_FREE_OF_HOST = (
    ratio("free_median", "not bound by the host", short="free of host", path="all.free_median"),
    ColumnView(
        "free_rows",
        "runs",
        "number",
        read=lambda group: group["all"]["free_rows"] if group["all"]["free_median"] else None,
        only=TERMINAL,
    ),
)


def pair_columns(path: str, title: str, near: bool = True) -> tuple[ColumnView, ...]:
    """Returns the columns for the `Pairs` of a group: their number, the fraction that is predicted in the right order,
    and the fractions of the baselines.

    Args:
        path: where the group has its `Pairs`, such as "order.pairs".
        title: the title of the first column on the page.
        near: whether the page shows pairs that differ by less than 1.5x too.
    """
    columns = [
        ColumnView(f"{path}.count", title, "number", short="pairs"),
        ColumnView(f"{path}.right", "right", "share", verdict=is_beaten(path)),
    ]
    for name, (long, short) in _BASELINE_TITLES.items():
        columns.append(ColumnView(f"{path}.sorted_by.{name}", long, "share", short=short))
    if near:
        columns.append(ColumnView(f"{path}.near_count", "near pairs", "number", short="near", only=TERMINAL))
        columns.append(ColumnView(f"{path}.near_right", "near pairs right", "share", short="right"))
        for name, (long, short) in _BASELINE_TITLES.items():
            columns.append(
                ColumnView(f"{path}.near_sorted_by.{name}", f"near, {long}", "share", short=short, only=PAGE)
            )
    return tuple(columns)


GROUP_RANKS = (
    ratio("spearman", "rank correlation", short="rank corr.", path="order.spearman"),
    *(
        ratio(f"spearman_{name}", long, short=short, path=f"order.spearman_by.{name}")
        for name, (long, short) in _BASELINE_TITLES.items()
    ),
)
GROUP_BYTES = (
    ColumnView("bytes_rows", "runs with bytes", "number", short="runs", path="all.bytes_rows", only=TERMINAL),
    ratio("bytes_median", "bytes, ours/measured", short="median", path="all.bytes_median"),
    ColumnView("bytes_below", "at or below", "share", path="all.bytes_below"),
    ColumnView(
        "claimed_bytes_rows", "claimed with bytes", "number", short="claimed", path="claimed.bytes_rows", only=TERMINAL
    ),
    ratio("claimed_bytes_median", "claimed, ours/measured", short="median", path="claimed.bytes_median"),
    ColumnView("claimed_bytes_below", "at or below", "share", path="claimed.bytes_below"),
)
GROUP_COLUMNS = (
    *GROUP,
    *score_columns(_ALL, quantiles=True),
    *GROUP_FREE_OF_HOST,
    *score_columns(_CLAIMED, quantiles=True),
    *pair_columns("order.pairs", "pairs"),
    *pair_columns("order.across", "pairs across stages", near=False),
    *pair_columns("claimed_order.pairs", "pairs claimed", near=False),
    *pair_columns("claimed_order.across", "claimed pairs across stages", near=False),
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
    ColumnView(
        "interval", "interval", "value", read=lambda row: within(row["seconds_low"], row["seconds_high"]), rank=1
    ),
    ColumnView("device_seconds", "device alone", "seconds", only=PAGE),
    ColumnView("allocated_bytes", "allocated", "bytes", short="alloc", skip_zero=True, rank=1),
    ColumnView("measured_bytes", "measured bytes", "bytes", short="measured", skip_zero=True, rank=1),
    ColumnView(
        "framework_bytes",
        "framework alone",
        "bytes",
        read=lambda row: sum(row["framework_bytes"].values()),
        skip_zero=True,
        only=PAGE,
        rank=2,
    ),
    ColumnView("bound_by", "bound by", "value"),
    ratio("bytes_ratio", "ratio of bytes", only=PAGE, rank=2),
    ColumnView("quality", "source", "text", hover=lambda row: row["source"], only=PAGE, rank=2),
    ColumnView("differs", "differs", "text", only=PAGE, rank=2),
    ColumnView("not_claimed", "not claimed", "text", only=PAGE, rank=2),
)
NOT_CLAIMED_COLUMNS = (
    ColumnView("reason", "predicted, but not claimed"),
    ColumnView("rows", "runs", "number", read=lambda group: len(group["rows"])),
    ratio("median", "median", read=lambda group: _median_ratio(group["rows"])),
)
NOT_COMPARED_COLUMNS = (
    ColumnView("reason", "why"),
    ColumnView("rows", "runs", "number", read=lambda group: len(group["rows"])),
    ColumnView("which", "which", "text", read=lambda group: ", ".join(named(group["rows"]))),
)
CHOICE_COLUMNS = (
    ColumnView("date", "date", "text"),
    ColumnView("rows", "runs", "text"),
    ColumnView("choice", "choice", "text"),
    ColumnView("reason", "why", "text"),
    ColumnView("source", "source", "text"),
    ColumnView("outcome_known", "outcome known", "text"),
)


def _median_ratio(rows: Sequence[Record]) -> float | None:
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    return statistics.median(ratios) if ratios else None


def not_claimed(rows: Sequence[Record]) -> list[Record]:
    """Returns the runs that have a prediction which we do not claim, grouped by the reason: {"reason", "rows"}, largest
    group first."""
    groups = _by_reason(rows, lambda row: row["not_claimed"])
    largest_first = sorted(groups.items(), key=lambda each: -len(each[1]))
    return [{"reason": reason, "rows": some} for reason, some in largest_first]


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
    model and number of GPUs, the worst predictions, runs with known differences, the reasons why other runs are not
    compared, and the number of choices of setup.

    validation: the JSON of the comparison (`ValidationResult.to_json`).
    """
    pooled = bool(validation["cohorts"])
    return blocks(
        _head(validation),
        _cohorts(validation["cohorts"], "rows"),
        _cohorts(validation["sources"], "source"),
        _coverage(validation),
        _cohort_bytes(validation),
        _seconds(validation) if validation["groups"] else None,
        *_order(validation),
        *_claimed(validation),
        _render_ranks(validation),
        None if pooled else _bytes(validation),
        _worst(validation),
        *map(render_own_fit, validation["own"]),
        _render_reasons_of_errors(validation) if pooled else _render_known_differences(validation),
        _not_compared(validation),
        _count_choices(validation["choices"]),
    )


def _head(validation: Mapping[str, Any]) -> RenderableType:
    counts = (f"{validation['set']}: {len(validation['rows'])} measured runs", "bold")
    claimed = sum(not row["not_claimed"] for row in validation["rows"])
    unclaimed = f" ({claimed} claimed)" if claimed < len(validation["rows"]) else ""
    lines: list[RenderableType] = [Text.assemble(counts, f"{unclaimed}, {validation['compiled']} compiled now")]
    if validation["rates"]:
        lines.append(Prose(f"rates: {one_line(validation['rates'])}", "dim"))
    for compiler, rows in validation["elsewhere"]:
        lines.append(Prose(f"{rows} rows were compiled by another environment ({compiler})", "dim"))
    if validation["left"]:
        lines.append(Prose(f"stopped: {len(validation['left'])} rows left; run the same command to continue", "yellow"))
    return Group(*lines)


def _cohorts(cohorts: Sequence[Record], title: str) -> RenderableType | None:
    timed = [cohort for cohort in cohorts if cohort["all"]["rows"]]
    if not timed:
        return None
    words = Prose(
        "predicted over measured seconds, for all models; runs that have the same program have the weight of one run:"
    )
    heading = words if title == "rows" else Text("by source:")
    tables: list[RenderableType] = [heading, terminal_table(TableView(cohort_columns(title), timed))]
    claimed = [cohort for cohort in timed if cohort["claimed"]["rows"]]
    if _some_unclaimed(timed):
        tables += [Text("runs that are claimed:"), terminal_table(TableView(cohort_columns(title, _CLAIMED), claimed))]
    return Group(*tables)


def _some_unclaimed(parts: Sequence[Record]) -> bool:
    return any(part["claimed"]["rows"] != part["all"]["rows"] for part in parts)


def _coverage(validation: Mapping[str, Any]) -> RenderableType | None:
    counted = [one for one in validation["coverage"] if one["rows"]]
    if not counted:
        return None
    share = f"{counted[0]['nominal']:.0%}"
    words = Prose(
        f"measured seconds within the predicted interval, which should contain {share} of them; the interval of a run "
        "is from the runs of other publishers, and a run without a prediction counts as missed:"
    )
    return Group(words, terminal_table(TableView(COVERAGE_COLUMNS, counted)))


def _cohort_bytes(validation: Mapping[str, Any]) -> RenderableType | None:
    sized = [source for source in validation["sources"] if source["all"]["bytes_rows"]]
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
    columns = (*GROUP, *score_columns(_ALL, quantiles=True), *(GROUP_FREE_OF_HOST if hosts else ()))
    return Group(
        Prose(f"predicted over measured seconds{free}"), terminal_table(TableView(columns, validation["groups"]))
    )


def _order(validation: Mapping[str, Any]) -> list[RenderableType]:
    words = (
        "order: pairs of runs with equal numbers of stages that differ by more than 5 % (near: by less than 1.5x), "
        "the share that is predicted in the right order, and the share in the right order if runs are sorted by "
        "the size of the tensor-parallel group (tp), the number of micro-batches (mb) and of stages (pp), smaller "
        "first:"
    )
    across = "order of runs with different numbers of stages, including runs without stages:"
    # Small groups are left out if there are also scores over the runs of all models.
    fewest = _MIN_PAIRS if validation["cohorts"] else 0
    return [
        *_pairs(validation["groups"], "order.pairs", words, fewest),
        *_pairs(validation["groups"], "order.across", across, 1, near=False),
    ]


def _claimed(validation: Mapping[str, Any]) -> list[RenderableType]:
    groups = [group for group in validation["groups"] if group["claimed"]["rows"]]
    if not _some_unclaimed(validation["groups"]):
        return []
    words = "runs that are claimed, predicted over measured seconds:"
    columns = (*GROUP, *score_columns(_CLAIMED, quantiles=True))
    return [
        terminal_table(TableView(NOT_CLAIMED_COLUMNS, not_claimed(validation["rows"]))),
        Group(Text(words), terminal_table(TableView(columns, groups))),
        *_pairs(
            groups,
            "claimed_order.pairs",
            "order of the claimed runs, pairs with equal numbers of stages:",
            1,
            near=False,
        ),
        *_pairs(
            groups,
            "claimed_order.across",
            "order of the claimed runs, pairs with different numbers of stages:",
            1,
            near=False,
        ),
    ]


def _pairs(groups: Sequence[Record], path: str, words: str, fewest: int, near: bool = True) -> list[RenderableType]:
    some = [group for group in groups if (value_at(group, f"{path}.count") or 0) >= fewest]
    if not some:
        return []
    return [Group(Prose(words), terminal_table(TableView((*GROUP, *pair_columns(path, "pairs", near)), some)))]


def _render_ranks(validation: Mapping[str, Any]) -> RenderableType | None:
    groups = [group for group in validation["groups"] if group["order"]["spearman"] is not None]
    if not groups:
        return None
    return Group(
        Prose("rank correlation with the measured seconds, of the prediction and of sorting by splits:"),
        terminal_table(TableView((*GROUP, *GROUP_RANKS), groups)),
    )


def _bytes(validation: Mapping[str, Any]) -> RenderableType | None:
    groups = [group for group in validation["groups"] if group["all"]["bytes_rows"]]
    if not groups:
        return None
    kinds = {row["bytes_are"] for row in validation["rows"] if row["bytes_ratio"]} - {""}
    what = f" ({' or '.join(sorted(kinds))})" if kinds else ""
    framework = any(row["framework_bytes"] for row in validation["rows"])
    more = " and the bytes that only the measured framework has" if framework else ""
    return Group(
        Prose(f"our allocated bytes{more} over the measured bytes{what}:"),
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
    """Renders rates that are fitted to the user's own runs: the factor of each part of the step, the interval of later
    predictions, the runs by model, target and framework with the part that probably causes the error, and the config
    key for whose values predicted/measured differs most.

    own: the JSON of the fit (`own_fit.OwnFit`).
    """
    fit = own["fit"]
    what = f"proposed rates of {own['chip']}"
    counts = f" (measured runs: {fit['runs']}, programs: {fit['programs']})"
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
            "the interval of later predictions is as wide as without your runs, or as their largest error if that is "
            "more: give runs of at least four different programs to base the width on them"
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


def _count_choices(choices: Sequence[Record]) -> RenderableType | None:
    if not choices:
        return None
    late = sum(choice["outcome_known"] != "no" for choice in choices)
    return Prose(
        f"choices of setup: {len(choices)}, of which {late} were made when the outcome was known, at least in part; "
        "the page and the JSON list them"
    )


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
        cohorts=page_table(TableView(_page_cohort_columns("rows"), validation["cohorts"])),
        sources=page_table(TableView(_page_cohort_columns("source"), validation["sources"])),
        coverage=page_table(TableView(COVERAGE_COLUMNS, [one for one in validation["coverage"] if one["rows"]])),
        groups=page_table(TableView(GROUP_COLUMNS, validation["groups"])),
        own=page_table(TableView(OWN_COLUMNS, [group for own in validation["own"] for group in own["groups"]])),
        rows=page_table(TableView(ROW_COLUMNS, worst_first(validation["rows"]))),
        not_claimed=page_table(TableView(NOT_CLAIMED_COLUMNS, not_claimed(validation["rows"]))),
        unsaid=page_table(TableView(NOT_COMPARED_COLUMNS, validation["unsaid"])),
        choices=page_table(TableView(CHOICE_COLUMNS, validation["choices"])),
        notes=(*NOTES, *[line for own in validation["own"] for line in own_fit_lines(own)], *([rates] if long else [])),
    )


def _page_cohort_columns(title: str) -> tuple[ColumnView, ...]:
    return (*cohort_columns(title), *score_columns(_CLAIMED), *COHORT_BYTES)


def page_data(validation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the page's chart as JSON values.

    For each source (if runs of several models are scored together), or each model and number of GPUs, these are the
    measured seconds, the predicted seconds, the ends of their intervals, and the tooltips of the runs.
    """
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(validation["rows"], key=lambda row: row["measured_seconds"] or 0.0):
        if row["measured_seconds"]:
            source = row["source"].partition(":")[0]
            name = source if validation["cohorts"] else f"{row['model']} on {row['gpus']}"
            series.setdefault(name, []).append(row)
    return {
        "series": [
            {
                "name": name,
                "x": [row["measured_seconds"] for row in rows],
                "y": [row["predicted_seconds"] for row in rows],
                "low": [row["seconds_low"] for row in rows],
                "high": [row["seconds_high"] for row in rows],
                "tips": [_tip(row) for row in rows],
            }
            for name, rows in series.items()
        ]
    }


def _tip(row: Mapping[str, Any]) -> list[str]:
    inside = row["seconds_low"] <= row["measured_seconds"] <= row["seconds_high"]
    holds = "contains" if inside else "does not contain"
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
            f"interval {within(row['seconds_low'], row['seconds_high'])} s: {holds} the measured seconds",
            f"device only {seconds(row['device_seconds'])}" if row["launch_seconds"] else "",
            sizes,
            f"{human(sum(row['framework_bytes'].values()))} more by the framework" if row["framework_bytes"] else "",
            row["differs"],
            row["bytes_reason"],
            f"not claimed: {row['not_claimed']}" if row["not_claimed"] else "",
        )
        if text
    ]


def _header_figures(validation: Mapping[str, Any]) -> list[HeaderFigure]:
    # There is no overall score, because runs of different models are never pooled.
    unsaid = sum(len(group["rows"]) for group in validation["unsaid"])
    claimed = sum(not row["not_claimed"] for row in validation["rows"])
    return [
        HeaderFigure("runs", str(len(validation["rows"])), "measured and predicted"),
        HeaderFigure("claimed", str(claimed), "our program, with reliable seconds"),
        HeaderFigure("not compared", str(unsaid), "with the reason below"),
    ]
