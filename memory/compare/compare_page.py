"""A comparison as one HTML file that opens offline: growth curves, Pareto picture, breakdown bars, table.

The header and "what fits" are prepared here for `templates/compare.html`; the rest is drawn by `static/compare.js`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare import feasibility_grid
from bytescope.memory.compare.compare_rows import (
    MEASURED,
    PREDICTED,
    RECOMPUTED,
    Row,
    best_of_each,
    cost_of,
    label,
    task_keys,
    unit_of,
    varying,
    why_slower,
    workload,
)
from bytescope.memory.compare.grids import CONFIG, TARGET, as_text
from bytescope.memory.formulas.reconcile import share
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.units import human
from bytescope.memory.view.elements import (
    Cell,
    HeaderFigure,
    PageTable,
    Section,
    count,
    facts,
    figure,
    limit_notes,
    percent,
    predicted,
    predictions,
    rates_notes,
    row_name,
    seconds,
    size,
    table,
    title,
    versions,
    where,
)
from bytescope.memory.view.frame import page

# Column -> (title, kind, rank); the kinds are the script's ways to write a number, and columns of high rank are the
# first that a narrow page folds away. Beside these stand the grid's keys.
COLUMNS = {
    "allocated_bytes": ("allocated", "bytes", 0),
    "step_seconds": ("step, measured", "seconds", 0),
    "tokens_per_s": ("tokens/s, measured", "count", 1),
    "real_bytes": ("peak, measured", "bytes", 2),
    "predicted_seconds": ("step, predicted", "seconds", 1),
    "predicted_seconds_low": ("from", "seconds", 2),
    "predicted_seconds_high": ("to", "seconds", 2),
    "predicted_tokens_per_s": ("tokens/s, predicted", "count", 3),
    "predicted_mfu": ("MFU, predicted", "share", 4),
    "least_seconds": ("step, at least", "seconds", 9),
    "recompute_flops_fraction": ("recomputed", "share", 2),
    "residual_bytes": ("residuals", "bytes", 5),
    "host_bytes": ("host", "bytes", 3),
    "formula_residuals": ("residuals by formula", "bytes", 4),
    "residuals_gap": ("gap of residuals", "gap", 4),
    "formula_peak": ("peak by formula", "bytes", 4),
    "peak_gap": ("gap of peak", "gap", 4),
    "peak_bytes": ("peak", "bytes", 6),
    "temp_bytes": ("temp", "bytes", 8),
    "hfu_over_mfu": ("HFU/MFU", "ratio", 7),
    "formula_ratio": ("HFU/MFU by formula", "ratio", 7),
    "kernel_recompute_flops": ("recomputed in kernels", "flops", 9),
    "compile_seconds": ("compile", "seconds", 9),
}

# What of a target the page tells; a report has all of it.
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


# What the page says of itself.
NOTES = (
    "Allocated: what the runtime takes on one device, arguments and packed temporaries included. Peak: what is live at "
    "once.",
    "At least: seconds per update by the data sheet's rates, which no program reaches.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs. HFU/MFU counts them, and what attention "
    "and loss kernels recompute in their own gradients.",
    "Compile seconds are taken while other combinations compile in parallel.",
    "Rows are rivals when they differ only in how the same task runs: remat, mesh, loss, precision, kernel. Another "
    "model, sequence length or batch is another task. The highlighted row is the best of its task that fits: the "
    "fastest measured, else the fastest predicted; of a tie the least recomputation, then the fewest bytes.",
)
FORMULA_NOTE = (
    "By formula: what the published formulas give for the same step, and by how much the compiler's figure "
    "exceeds it; empty where no formula says what a policy keeps."
)


def render(comparison: Mapping[str, Any], row_type: type[Row] = Row) -> str:
    """The page of a comparison's JSON (`memory.compare.compare_rows.to_json`), as text.

    row_type: the factory's rows, which know its keys.
    """
    rows = [row_type.from_answer(entry["overrides"], entry) for entry in comparison["rows"]]
    subject, target, several = _subject(rows, comparison["config"]), comparison["target"], len(_tasks(rows)) > 1
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
        figures=_figures(rows, winner),
        best=(how_of(winner), _command(comparison, winner)) if winner else None,
        each=_best_of_each(comparison, rows) if several else None,
        none_fits=bool(rows) and not any(row.fits is not False for row in rows if row.ok),
        interrupted=comparison.get("interrupted", False),
        grid=feasibility_grid.grid(rows),
        notes=[
            *limit_notes(target, target.get("limit_bytes")),
            *rates_notes(comparison["rows"]),
            *(f"{name}: {reason}." for name, reason in why_slower(rows).items()),
            *NOTES,
            *([FORMULA_NOTE] if with_formulas else []),
        ],
        about_target=_about_target(target),
    )


def page_data(comparison: Mapping[str, Any], row_type: type[Row] = Row) -> dict[str, Any]:
    """Everything the script draws, as JSON values. row_type: as in `render`.

    `rows` hold their label, the text of each key in `keys`, the columns that any row fills, and the command that runs
    it; of the label, `group` is all but the policy, `section` what of it is the model and the target, `short` the
    rest; `rival` is what tells it from the rest of its task and `task_label` what it shares with them. Growth is drawn
    along one of `axes`.
    """
    rows = [row_type.from_answer(entry["overrides"], entry) for entry in comparison["rows"]]
    keys = varying(rows)
    best = [row.overrides for row in best_of_each(rows)]
    lines = [
        _line(row, entry, keys, row.overrides in best) | {"command": _command(comparison, row)}
        for row, entry in zip(rows, comparison["rows"])
    ]
    columns = [
        (name, *COLUMNS[name])
        for name in COLUMNS
        if any(line["values"][name] for line in lines)
        or (name.endswith("_gap") and any(line["values"][name] is not None for line in lines))
    ]
    drawn = {name for name, *_ in columns} | {MEASURED, PREDICTED, RECOMPUTED, "allocated_bytes"}
    tasks = {task: number for number, task in enumerate(_tasks(rows))}
    for line in lines:  # hundreds of rows: what is not drawn, or is long and only told apart, is left out
        line["values"] = {name: value for name, value in line["values"].items() if name in drawn}
        line["task"] = str(tasks[line["task"]])
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    return {
        "keys": [(key, key.rsplit(".", 1)[-1]) for key in keys],
        "columns": columns,
        "rows": lines,
        "axes": axes(rows, keys),
        "unit": unit_of(rows),
        "policies": policies,
        "policy_key": rows[0].policy_key if rows else "",
        "cost": cost_of(rows)[0],
        "categories": [(name, row_name(name)) for name in ROWS if any(row.breakdown.get(name) for row in rows)],
    }


def how_of(row: Row) -> str:
    """How a row runs its task, in words: its policy and what else of its combination is no part of the task."""
    keys = [key for key in row.overrides if row.is_how(key) and key not in row.policy_parts]
    return label(row, keys) if keys else row.policy or "as configured"


def _tasks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(workload(row), []).append(row)
    return found


def _command(comparison: Mapping[str, Any], row: Row) -> str:
    """The command that runs a row; its own keys come last, where they win."""
    source = "" if CONFIG in row.overrides else comparison["config"]
    target = row.overrides.get(TARGET) or comparison["target"].get("name", "")
    return row.command(source, target, comparison["given"])


def _best_of_each(comparison: Mapping[str, Any], rows: Sequence[Row]) -> PageTable:
    """A row for each task, in their order: tasks are not ranked against each other."""
    keys = task_keys(rows)
    found = [(label(members[0], keys), next(iter(best_of_each(members)), None)) for members in _tasks(rows).values()]

    def of(write: Callable[[Row], Cell | str], otherwise: Cell | str = "") -> Callable[[Any], Cell | str]:
        return lambda item: write(item[1]) if item[1] else otherwise

    return table(
        (
            ("task", "name", lambda item: item[0]),
            ("best that fits", "text how", of(how_of, Cell("none of them fits", kind="exceeds"))),
            ("allocated", "num", of(lambda row: size(row.allocated_bytes))),
            ("step, measured", "num", of(lambda row: seconds((row.measured or {}).get("step_seconds")))),
            ("step, predicted", "num", of(lambda row: predicted(dataclasses.asdict(row)))),
            ("tokens/s, predicted", "num", of(lambda row: count(row.predicted_tokens_per_s))),
            ("MFU, predicted", "num", of(lambda row: percent(row.predicted_mfu))),
            ("recomputed", "num", of(lambda row: percent(row.recompute_flops_fraction))),
            ("command", "text command", of(lambda row: Cell("copy", command=_command(comparison, row)))),
        ),
        found,
    )


def axes(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Keys of three or more values, positive numbers in every row: what a curve on a logarithmic axis takes."""

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
    measured = row.measured or {}
    values = {name: entry.get(name) for name in COLUMNS} | {
        "hfu_over_mfu": row.hfu_over_mfu,
        "step_seconds": measured.get("step_seconds"),
        "tokens_per_s": measured.get("tokens_per_s"),
        "real_bytes": measured.get("peak_bytes"),
    }
    values |= _by_formula(row)
    how, where = [key for key in keys if row.is_how(key)], [key for key in keys if key in (CONFIG, TARGET)]
    rest = [key for key in keys if key not in (row.policy_key, *where)]
    return {
        "label": label(row, keys),
        "keys": [row.overrides.get(key, "") for key in keys],
        "texts": [row.value_text(key) for key in keys],
        "group": label(row, rest) if rest else "",
        "section": label(row, where) if where else "",
        "short": label(row, [key for key in keys if key not in where]),
        "rival": label(row, how) if how else "",
        "task_label": label(row, [key for key in keys if key not in how]),
        "policy": row.value_text(row.policy_key) or "as configured",
        "values": values,
        "breakdown": dict(row.breakdown),
        "limit": row.limit_bytes,
        "fits": row.fits,
        "task": workload(row),
        "status": row.status,
        "pareto": bool(entry.get("pareto")),
        "best": best,
    }


def _by_formula(row: Row) -> dict[str, float | None]:
    """The formulas' figures and by what share the compiler's exceed them; null where one has none."""
    found = row.formula or {}
    residuals, peak = found.get("residual_bytes"), found.get("peak_bytes")
    gaps = {"residuals_gap": share(row.residual_bytes, residuals), "peak_gap": share(row.peak_bytes, peak)}
    return {
        "formula_residuals": residuals,
        "formula_peak": peak,
        "formula_ratio": row.formula_hfu_over_mfu,
        **{name: None if gap is None or math.isinf(gap) else gap for name, gap in gaps.items()},
    }


def _subject(rows: Sequence[Row], config: str) -> str:
    """What is compared: the config, or those of the grid."""
    names = list(dict.fromkeys(str(row.overrides[CONFIG]) for row in rows if CONFIG in row.overrides))
    return (", ".join(names) if len(names) <= 4 else f"{len(names)} configs") or config or "Combinations"


def _figures(rows: Sequence[Row], best: Row | None) -> list[HeaderFigure]:
    """`best`: the best row, None where none fits, and where rows of several tasks have none in common."""
    limits = {row.limit_bytes for row in rows if row.limit_bytes}
    limit = f"of {human(limits.pop())}" if len(limits) == 1 else "each within its own limit"
    found = [
        HeaderFigure("combinations", str(len(rows)), f"{sum(not row.ok for row in rows)} failed"),
        HeaderFigure("fit", str(sum(row.fits is True for row in rows)), limit),
    ]
    if best is None:
        return found
    return [
        *found,
        figure("best that fits", best.allocated_bytes, how_of(best)),
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
