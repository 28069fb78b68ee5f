"""The columns of a comparison, for the terminal table and for the page.

A record is one entry of `rows` in the JSON of a comparison: the fields of a `compare_rows.Row`. The tables of
`bytescope compare --levers` and `bytescope fit` consist of records with the same fields, and share some of
these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from bytescope.memory.compare.compare_rows import MEASURED, PREDICTED, RECOMPUTED, Row
from bytescope.memory.formulas.reconcile import share
from bytescope.memory.view.elements import at_least, spread
from bytescope.memory.view.prediction_text import with_spread
from bytescope.memory.view.table_model import PAGE, ColumnView, value_at
from bytescope.memory.view.table_views import VERDICT_STYLES

Record = Mapping[str, Any]

NO_FORMULA = "no formula"


class CostAxis(NamedTuple):
    """The cost axis of a chart that shows the cost and the bytes of compared programs.

    Fields:
        key: the key of a comparison row that contains the cost.
        title: the title of the axis.
        is_share: whether the cost is a fraction from 0 to 1; otherwise it is seconds.
    """

    key: str
    title: str
    is_share: bool = False


# The figure by which rows are ranked -> its axis in charts.
COST_AXES = {
    MEASURED: CostAxis(MEASURED, "seconds per update, measured"),
    PREDICTED: CostAxis(PREDICTED, "seconds per update, predicted"),
    RECOMPUTED: CostAxis(RECOMPUTED, "FLOPs recomputed, % of the model's", is_share=True),
}


def record_of(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a comparison row as a dict. The additional item "texts" lists the row's values for the
    config keys `keys`, as text."""
    return {**vars(row), "texts": [row.value_text(key) for key in keys]}


def key_columns(keys: Sequence[str]) -> list[ColumnView]:
    """Returns one table column for each config key in `keys`, the keys of the compared grid. The column's title is the
    last part of the key, such as "seq_len"."""
    return [ColumnView(key, key.rsplit(".", 1)[-1], "value", path=f"texts.{number}") for number, key in enumerate(keys)]


def hfu_over_mfu(record: Record) -> float | None:
    """Returns hardware FLOPs / model FLOPs of a compared program. This is HFU / MFU, the ratio of hardware to model
    FLOPs utilization. Returns None if either is missing or 0."""
    hardware, model = record["hardware_flops"], record["model_flops"]
    return hardware / model if hardware and model else None


def formula_hfu_over_mfu(record: Record) -> float | None:
    """Returns HFU / MFU (hardware FLOPs / model FLOPs) of a compared program as published formulas give it. Returns
    None if they do not give both."""
    hardware, model = value_at(record, "formula.hardware_flops"), value_at(record, "formula.model_flops")
    return hardware / model if hardware and model else None


def gap(record: Record, key: str) -> float | None:
    """Returns by what fraction the compiler's bytes exceed the bytes of a published formula: (compiler's - formula's) /
    formula's. Returns infinity if the formula gives 0, and None if no formula applies.

    record: a comparison row as a dict. key: the compared quantity, such as "peak_bytes".
    """
    return share(record[key], value_at(record, f"formula.{key}"))


def fits(record: Record) -> str:
    """Returns the word that chooses the colour of a table cell: "fits" if the program is within its memory limit,
    "exceeds" if it exceeds the limit or failed to compile, and "" if no limit is known."""
    if record.get("status", "ok") != "ok":
        return "exceeds"
    return {True: "fits", False: "exceeds", None: ""}[record["fits"]]


def verdict(record: Record) -> str:
    """Returns a one-word verdict on a program: "failed" (to compile), "fits", "exceeds", or "ok" if no memory limit is
    known."""
    return "failed" if record.get("status", "ok") != "ok" else fits(record) or "ok"


def verdict_with_star(record: Record) -> Text:
    """Returns the one-word verdict on a program as coloured text, with a star if its row is Pareto-optimal."""
    return Text.assemble((verdict(record), VERDICT_STYLES[fits(record)]), (" ★" if record["pareto"] else "", "yellow"))


def predicted_with_spread(record: Record) -> str:
    """Returns the predicted seconds of an update and the ends of their interval as text, such as "0.721, 0.65 to
    0.81". Returns "" if there is no prediction."""
    ends = record.get("predicted_seconds_low"), record.get("predicted_seconds_high")
    return with_spread(record["predicted_seconds"], *ends)


def command_column(command: Callable[[Any], str]) -> ColumnView:
    """Returns the last column of the table of compared programs on an HTML page. It shows a button that copies the
    row's command.

    command: a function from a row (as a dict) to the command that reproduces it.
    """
    return ColumnView("command", "command", "command", read=command, only=PAGE, css="command", rank=10)


VERDICT = ColumnView("fits", "verdict", "text", read=verdict, verdict=fits)
MARKED_VERDICT = ColumnView("fits", "verdict", "text", read=verdict, terminal=verdict_with_star)
PEAK = ColumnView("peak_bytes", "peak", "bytes", rank=6)
ALLOCATED = ColumnView("allocated_bytes", "allocated", "bytes", short="alloc")
HOST = ColumnView("host_bytes", "host", "bytes", skip_zero=True, rank=3)
RECOMPUTED_SHARE = ColumnView("recompute_flops_fraction", "recomputed", "share", short="recomp", rank=2)
HFU_OVER_MFU = ColumnView("hfu_over_mfu", "HFU/MFU", "ratio", read=hfu_over_mfu, rank=7)
PREDICTED_STEP = ColumnView(
    "predicted_seconds",
    "step, predicted",
    "seconds",
    short="predicted s",
    terminal=predicted_with_spread,
    note=spread,
    hover=at_least,
    rank=1,
)
PREDICTED_TOKENS = ColumnView("predicted_tokens_per_s", "tokens/s, predicted", "count", short="tokens/s", rank=3)
PREDICTED_MFU = ColumnView("predicted_mfu", "MFU, predicted", "share", short="MFU", rank=4)

MEASURED_STEP = ColumnView("step_seconds", "step, measured", "seconds", short="step s", path="measured.step_seconds")
RESIDUALS = ColumnView("residual_bytes", "residuals", "bytes", short="resid", rank=5)

# The columns after the keys of the grid and the verdict, in terminal order.
COLUMNS = (
    PEAK,
    ALLOCATED,
    ColumnView("temp_bytes", "temp", "bytes", rank=8),
    HOST,
    RESIDUALS,
    RECOMPUTED_SHARE,
    HFU_OVER_MFU,
    ColumnView("compile_seconds", "compile", "seconds", short="comp s", digits=3, rank=9),
    PREDICTED_STEP,
    PREDICTED_TOKENS,
    PREDICTED_MFU,
    MEASURED_STEP,
    ColumnView(
        "tokens_per_s", "tokens/s, measured", "count", short="real tokens/s", path="measured.tokens_per_s", rank=1
    ),
    ColumnView("real_bytes", "peak, measured", "bytes", short="real", path="measured.peak_bytes", rank=2),
    ColumnView("least_seconds", "step, at least", "seconds", only=PAGE, rank=9),
    ColumnView("kernel_recompute_flops", "recomputed in kernels", "flops", only=PAGE, rank=9),
)

# The columns that --formulas adds: on the terminal they are in a separate table.
_RESIDUALS_BY_FORMULA = (
    ColumnView(
        "formula_residuals",
        "residuals by formula",
        "bytes",
        short="formula",
        path="formula.residual_bytes",
        absent=NO_FORMULA,
        rank=4,
    ),
    ColumnView(
        "residuals_gap",
        "gap of residuals",
        "gap",
        short="gap",
        read=lambda record: gap(record, "residual_bytes"),
        rank=4,
    ),
)
_PEAK_BY_FORMULA = (
    ColumnView(
        "formula_peak",
        "peak by formula",
        "bytes",
        short="formula",
        path="formula.peak_bytes",
        absent=NO_FORMULA,
        rank=4,
    ),
    ColumnView("peak_gap", "gap of peak", "gap", short="gap", read=lambda record: gap(record, "peak_bytes"), rank=4),
)
_RATIO_BY_FORMULA = ColumnView(
    "formula_ratio", "HFU/MFU by formula", "ratio", short="formula", read=formula_hfu_over_mfu, absent="-", rank=7
)
BY_FORMULA = (*_RESIDUALS_BY_FORMULA, *_PEAK_BY_FORMULA, _RATIO_BY_FORMULA)
BESIDE_FORMULAS = (RESIDUALS, *_RESIDUALS_BY_FORMULA, PEAK, *_PEAK_BY_FORMULA, HFU_OVER_MFU, _RATIO_BY_FORMULA)
