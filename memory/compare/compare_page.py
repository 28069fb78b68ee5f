"""Renders a comparison as one HTML file that opens offline: growth curves, Pareto chart, breakdown bars and table.

The header and the feasibility table are prepared here for `templates/compare.html`; `static/compare.js` draws the
rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_columns import (
    ALLOCATED,
    BY_FORMULA,
    COLUMNS,
    COST_AXES,
    MARKED_VERDICT,
    MEASURED_STEP,
    PREDICTED_MFU,
    PREDICTED_STEP,
    PREDICTED_TOKENS,
    RECOMPUTED_SHARE,
    command_column,
    record_of,
)
from bytescope.memory.compare.compare_rows import (
    MEASURED,
    PREDICTED,
    RECOMPUTED,
    Row,
    best_of_each,
    beyond_xla_limit,
    cost_of,
    label,
    task_keys,
    tasks,
    tells_rows_apart,
    unit_of,
    varying,
    workload,
)
from bytescope.memory.compare.grids import CONFIG, TARGET, as_text
from bytescope.memory.compare.what_if import sentences
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.units import human
from bytescope.memory.view.elements import (
    HeaderFigure,
    PageTable,
    Section,
    facts,
    figure,
    limit_notes,
    predictions,
    rates_notes,
    row_name,
    title,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE, ColumnView, TableView
from bytescope.memory.view.table_views import page_table

# The columns that the script draws after the keys of the grid. A narrow page hides columns of high rank.
PAGE_COLUMNS = TableView((*COLUMNS, *BY_FORMULA), ()).columns_for(PAGE)

# The target's fields on the page. A report shows all fields.
TARGET_FIELDS = (
    "name",
    "platform",
    "kind",
    "n_devices",
    "device_memory_bytes",
    "reserved_bytes",
    "limit_bytes",
    "host_memory_bytes",
    "is_described",
)


# The page's explanations of its figures.
NOTES = (
    "Allocated: bytes that the runtime allocates on one device, including arguments and packed temporaries. Peak: "
    "maximum bytes that are live at the same time.",
    "At least: lower bound of seconds per update from the data sheet's rates, which no program reaches.",
    "Recomputed: FLOPs that jax.checkpoint runs again, divided by model FLOPs. HFU/MFU also counts FLOPs that "
    "attention and loss kernels recompute in their gradients.",
    "Compile seconds are measured while other combinations compile in parallel.",
    "Rows compete if they differ only in how the same task runs: remat, mesh, loss, precision, kernel. A different "
    "model, sequence length or batch is a different task. The highlighted row is the best of its task that fits: the "
    "fastest by measurement, otherwise by prediction. Ties are decided by less recomputation, then by fewer bytes.",
)
FORMULA_NOTE = (
    "By formula: the figures of published formulas for the same step, and by how much the compiler's figure exceeds "
    "them. Empty if no formula covers the remat policy."
)


COMMAND = command_column(lambda record: record["command"])
BEST_COLUMNS = (
    ColumnView("task", "task"),
    ColumnView("how", "best that fits", "text", verdict=lambda record: record["verdict"], css="how"),
    ALLOCATED,
    MEASURED_STEP,
    PREDICTED_STEP,
    PREDICTED_TOKENS,
    PREDICTED_MFU,
    RECOMPUTED_SHARE,
    COMMAND,
)


def render(comparison: Mapping[str, Any], row_type: type[Row] = Row) -> str:
    """Returns the HTML page of a comparison of programs.

    comparison: the JSON of a `memory.compare.compare_rows.CompareResult`. row_type: the class of
    its rows; a program factory may use a subclass of Row.
    """
    rows = [row_type.from_answer(entry["overrides"], entry) for entry in comparison["rows"]]
    subject, target, several = _page_title(rows, comparison["config"]), comparison["target"], len(tasks(rows)) > 1
    winner = next(iter(best_of_each(rows)), None) if not several else None
    with_formulas = any(row.formula for row in rows)
    return page(
        "compare",
        title(subject, target, "compared"),
        page_data(comparison, row_type),
        heading=f"{subject}, compared",
        where=where(target),
        facts=facts(comparison["rows"], comparison["given"]),
        versions=versions(comparison["versions"]),
        figures=_header_figures(rows, winner),
        best=(describe_method(winner), _row_command(comparison, winner)) if winner else None,
        each=_best_row_per_task(comparison, rows) if several else None,
        none_fits=bool(rows) and not any(row.fits is not False for row in rows if row.ok),
        interrupted=comparison.get("interrupted", False),
        notes=[
            *(f"{line}." for line in sentences(comparison.get("unchanged", ()), comparison.get("left_out", {}))),
            *limit_notes(target, target.get("limit_bytes")),
            *rates_notes(comparison["rows"]),
            *(f"{sentence}." for sentence in filter(None, [beyond_xla_limit(rows)])),
            *NOTES,
            *([FORMULA_NOTE] if with_formulas else []),
        ],
        about_target=_about_target(target),
    )


def page_data(comparison: Mapping[str, Any], row_type: type[Row] = Row) -> dict[str, Any]:
    """Returns the data that the page's script draws, as JSON values. A task is a group of rows whose programs compute
    the same and differ only in how they run.

    comparison: the JSON of the comparison. row_type: the class of its rows.

    In the result, `axes` lists the config keys that can be the x-axis of a growth curve. Each object in `rows` has the
    key values, memory, time and command of one combination. It also has texts that join some of its key values:

        label: all key values
        group: all but the remat policy, the config and the target
        section: the config and the target
        short: all but the config and the target
        rival: the values that only change how the program runs, which distinguish the rows of a task
        task_label: the other values, which all rows of the task share
    """
    rows = [row_type.from_answer(entry["overrides"], entry) for entry in comparison["rows"]]
    keys = varying(rows)
    best = [row.overrides for row in best_of_each(rows)]
    marked = [
        dataclasses.replace(row, pareto=bool(entry.get("pareto"))) for row, entry in zip(rows, comparison["rows"])
    ]
    ranked_by = cost_of(rows)[0]
    lines = [
        _line(row, entry, keys, row.overrides in best)
        | {"command": _row_command(comparison, row), "interval": _interval(row) if ranked_by == PREDICTED else None}
        for row, entry in zip(rows, comparison["rows"])
    ]
    columns = [column for column in PAGE_COLUMNS if any(_has_value(column, line["values"]) for line in lines)]
    drawn = {column.key for column in columns} | {MEASURED, PREDICTED, RECOMPUTED, "allocated_bytes"}
    numbers = {task: number for number, task in enumerate(tasks(rows))}
    for line in lines:  # there may be hundreds of rows: omit values that are not drawn, and replace long task keys
        line["values"] = {name: value for name, value in line["values"].items() if name in drawn}
        line["task"] = str(numbers[line["task"]])
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    return {
        "keys": [(key, key.rsplit(".", 1)[-1]) for key in keys],
        "verdict": MARKED_VERDICT.title,
        "command": COMMAND.title,
        "columns": [(column.key, column.title, column.kind, column.rank) for column in columns],
        "rows": lines,
        "axes": axes(rows, keys),
        "unit": unit_of(rows),
        "policies": policies,
        "policy_key": rows[0].policy_key if rows else "",
        "cost": COST_AXES[ranked_by]._asdict(),
        "starred": tells_rows_apart(marked),
        "categories": [(name, row_name(name)) for name in ROWS if any(row.breakdown.get(name) for row in rows)],
    }


def _has_value(column: ColumnView, values: Mapping[str, float | None]) -> bool:
    value = values[column.key]
    # 0 is shown only in columns with gaps between compiler and formula.
    return value is not None if column.kind == "gap" else bool(value)


def describe_method(row: Row) -> str:
    """Returns a label of a row: its remat policy and the other settings that change how its program runs but not what
    it computes."""
    if row.change:
        return row.change
    keys = [key for key in row.overrides if row.is_how(key) and key not in row.policy_parts]
    return label(row, keys) if keys else row.policy or "as configured"


def _row_command(comparison: Mapping[str, Any], row: Row) -> str:
    source = "" if CONFIG in row.overrides else comparison["config"]
    target = row.overrides.get(TARGET) or comparison["target"].get("name", "")
    return row.command(source, target, comparison["given"])


def _best_row_per_task(comparison: Mapping[str, Any], rows: Sequence[Row]) -> PageTable:
    keys, records = task_keys(rows), []
    for members in tasks(rows).values():
        best = next(iter(best_of_each(members)), None)
        records.append(
            record_of(best or type(members[0])({}), ())
            | {
                "task": label(members[0], keys),
                "how": describe_method(best) if best else "none fits",
                "verdict": "" if best else "exceeds",
                "command": _row_command(comparison, best) if best else "",
            }
        )
    return page_table(TableView(BEST_COLUMNS, records))


def axes(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Returns those of the config keys `keys` that can be the logarithmic x-axis of a curve. Such a key has at least
    three values, which are all positive numbers."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

    return [
        key
        for key in keys
        if all(row.policy_key != key for row in rows)
        and all(number(row.overrides.get(key)) for row in rows)
        and len({row.overrides[key] for row in rows}) > 2
    ]


def _line(row: Row, entry: Mapping[str, Any], keys: Sequence[str], best: bool) -> dict[str, Any]:
    record = record_of(row, keys)
    how, where = [key for key in keys if row.is_how(key)], [key for key in keys if key in (CONFIG, TARGET)]
    rest = [key for key in keys if key not in (row.policy_key, *where)]
    return {
        "label": label(row, keys),
        "keys": [row.overrides.get(key, row.value_text(key)) for key in keys],
        "texts": [row.value_text(key) for key in keys],
        "group": label(row, rest) if rest else "",
        "section": label(row, where) if where else "",
        "short": label(row, [key for key in keys if key not in where]),
        "rival": label(row, how) if how else "",
        "task_label": label(row, [key for key in keys if key not in how]),
        "policy": row.value_text(row.policy_key) or "as configured",
        "values": {column.key: _finite(column.value(record)) for column in PAGE_COLUMNS},
        "shown": {column.key: column.text(record, PAGE) for column in PAGE_COLUMNS if not column.is_figure},
        "notes": {column.key: column.note(record) for column in PAGE_COLUMNS if column.note},
        "breakdown": dict(row.breakdown),
        "limit": row.limit_bytes,
        "fits": row.fits,
        "task": workload(row),
        "status": row.status,
        "pareto": bool(entry.get("pareto")),
        "best": best,
    }


def _interval(row: Row) -> tuple[float, float] | None:
    low, high = row.predicted_seconds_low, row.predicted_seconds_high
    return None if low is None or high is None else (low, high)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value  # JSON has no infinity


def _page_title(rows: Sequence[Row], config: str) -> str:
    names = list(dict.fromkeys(str(row.overrides[CONFIG]) for row in rows if CONFIG in row.overrides))
    return (", ".join(names) if len(names) <= 4 else f"{len(names)} configs") or config or "Combinations"


def _header_figures(rows: Sequence[Row], best: Row | None) -> list[HeaderFigure]:
    limits = {row.limit_bytes for row in rows if row.limit_bytes}
    limit = f"of {human(limits.pop())}" if len(limits) == 1 else "each within its own limit"
    figures = [
        HeaderFigure("combinations", str(len(rows)), f"{sum(not row.ok for row in rows)} failed"),
        HeaderFigure("fit", str(sum(row.fits is True for row in rows)), limit),
    ]
    if best is None:
        return figures
    return [
        *figures,
        figure("best that fits", best.allocated_bytes, describe_method(best)),
        *predictions(dataclasses.asdict(best)),
    ]


def _about_target(target: Mapping[str, Any]) -> Section:
    return Section(
        "Target",
        [
            (name, human(target[name]) if name.endswith("_bytes") else as_text(target[name]))
            for name in TARGET_FIELDS
            if name in target
        ],
    )
