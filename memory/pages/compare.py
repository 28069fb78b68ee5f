"""A comparison as one HTML file that opens offline: growth curves, Pareto picture, breakdown bars, table.

The header and "what fits" are prepared here for `templates/compare.html`; the rest is drawn by `static/compare.js`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.formulas.reconcile import share
from bytescope.memory.pages import feasibility_grid
from bytescope.memory.pages.elements import Figure, Section, figure, row_name, versions, where
from bytescope.memory.pages.frame import page
from bytescope.memory.plan.rows import (
    CONFIG,
    POLICY,
    TARGET,
    Row,
    as_text,
    best_of_each,
    is_how,
    label,
    unit_of,
    value_text,
    varying,
    workload,
)
from bytescope.memory.records import ROWS
from bytescope.memory.units import human

# Column -> (title, kind); the kinds are the script's ways to write a number. Beside these stand the grid's keys.
COLUMNS = {
    "peak_bytes": ("peak", "bytes"), "allocated_bytes": ("allocated", "bytes"), "temp_bytes": ("temp", "bytes"),
    "host_bytes": ("host", "bytes"), "residual_bytes": ("residuals", "bytes"),
    "recompute_flops_fraction": ("recomputed", "share"), "hfu_over_mfu": ("HFU/MFU", "ratio"),
    "kernel_recompute_flops": ("recomputed in kernels", "flops"), "compile_seconds": ("compile", "seconds"),
    "predicted_step_seconds": ("predicted step", "seconds"),
    "step_seconds": ("step", "seconds"), "tokens_per_s": ("tokens/s", "count"),
    "real_bytes": ("measured peak", "bytes"),
    "formula_residuals": ("residuals by formula", "bytes"), "residuals_gap": ("gap", "gap"),
    "formula_peak": ("peak by formula", "bytes"), "peak_gap": ("gap", "gap"),
    "formula_ratio": ("HFU/MFU by formula", "ratio"),
}

# What of a target the page tells; a report has all of it.
TARGET_FIELDS = ("name", "platform", "kind", "n_devices", "device_memory_bytes", "reserved_bytes", "limit_bytes",
                 "host_memory_bytes", "is_described")


# What the page says of itself.
NOTES = (
    "Allocated: what the runtime takes, arguments and packed temporaries included. Peak: what is live at once.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs. HFU/MFU counts them, and what attention "
    "and loss kernels recompute in their own gradients.",
    "Compile seconds are taken while other combinations compile in parallel.",
    "Rows are rivals when they differ only in how the same task runs: remat, mesh, loss, precision, kernel. The "
    "highlighted row is the best of each task that fits: the fastest measured, else the least recomputation, then the "
    "fewest bytes.",
)
FORMULA_NOTE = ("By formula: what the published formulas give for the same step, and by how much the compiler's figure "
                "exceeds it; empty where no formula says what a policy keeps.")


def render(comparison: Mapping[str, Any], config: str = "") -> str:
    """The page of a comparison's JSON (`memory.plan.rows.to_json`), as text; `config` is the file it is about."""
    rows = [Row.of(entry["overrides"], entry) for entry in comparison["rows"]]
    subject, several = _subject(rows, config), len({workload(row) for row in rows}) > 1
    best, target = comparison.get("best"), comparison["target"]
    with_formulas = any(row.formula for row in rows)
    return page(
        "compare", f"{subject} · compared", page_data(comparison), heading=f"{subject}, compared",
        where=where(target), versions=versions(comparison["versions"]),
        figures=_figures(rows, None if several else best),
        best=best["flags"] if best else None,
        best_title="Least recomputation of all that fit" if several else "Best that fits",
        interrupted=comparison.get("interrupted", False), grid=feasibility_grid.grid(rows),
        notes=[*NOTES, FORMULA_NOTE] if with_formulas else NOTES, about_target=_about_target(target))


def page_data(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values.

    `rows` hold their label, the text of each key in `keys`, and the columns that any row fills; of the label, `group`
    is all but the policy, `section` what of it is the model and the target, `short` the rest; `rival` is what tells
    it from the rest of its task and `task_label` what it shares with them. Growth is drawn along one of `axes`.
    """
    rows = [Row.of(entry["overrides"], entry) for entry in comparison["rows"]]
    keys = varying(rows)
    best = [row.overrides for row in best_of_each(rows)]
    lines = [_line(row, entry, keys, row.overrides in best) for row, entry in zip(rows, comparison["rows"])]
    columns = [(name, *COLUMNS[name]) for name in COLUMNS
               if any(line["values"][name] for line in lines)
               or (name.endswith("_gap") and any(line["values"][name] is not None for line in lines))]
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    return {
        "keys": [(key, key.rsplit(".", 1)[-1]) for key in keys], "columns": columns, "rows": lines,
        "axes": axes(rows, keys), "unit": unit_of(rows), "policies": policies, "policy_key": POLICY,
        "timed": any(row.measured for row in rows),
        "categories": [(name, row_name(name)) for name in ROWS if any(row.breakdown.get(name) for row in rows)],
    }


def axes(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Keys of three or more values, positive numbers in every row: what a curve on a logarithmic axis takes."""
    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

    return [key for key in keys if key != POLICY and all(number(row.overrides.get(key)) for row in rows)
            and len({row.overrides[key] for row in rows}) > 2]


def _line(row: Row, entry: Mapping[str, Any], keys: Sequence[str], best: bool) -> dict[str, Any]:
    measured = row.measured or {}
    values = {name: entry.get(name) for name in COLUMNS} | {
        "hfu_over_mfu": row.hfu_over_mfu, "step_seconds": measured.get("step_seconds"),
        "tokens_per_s": measured.get("tokens_per_s"), "real_bytes": measured.get("peak_bytes")}
    values |= _by_formula(row)
    how, where = [key for key in keys if is_how(key)], [key for key in keys if key in (CONFIG, TARGET)]
    rest = [key for key in keys if key not in (POLICY, *where)]
    return {
        "label": label(row, keys), "keys": [row.overrides.get(key, "") for key in keys],
        "texts": [value_text(row, key) for key in keys], "group": label(row, rest) if rest else "",
        "section": label(row, where) if where else "", "short": label(row, [key for key in keys if key not in where]),
        "rival": label(row, how) if how else "", "task_label": label(row, [key for key in keys if key not in how]),
        "policy": value_text(row, POLICY) or "as configured",
        "values": values, "breakdown": dict(row.breakdown), "limit": row.limit_bytes, "fits": row.fits,
        "task": workload(row), "status": row.status, "pareto": bool(entry.get("pareto")), "best": best,
    }


def _by_formula(row: Row) -> dict[str, float | None]:
    """The formulas' figures and by what share the compiler's exceed them; null where one has none."""
    found = row.formula or {}
    residuals, peak = found.get("residual_bytes"), found.get("peak_bytes")
    gaps = {"residuals_gap": share(row.residual_bytes, residuals), "peak_gap": share(row.peak_bytes, peak)}
    return {"formula_residuals": residuals, "formula_peak": peak, "formula_ratio": row.formula_hfu_over_mfu,
            **{name: None if gap is None or math.isinf(gap) else gap for name, gap in gaps.items()}}


def _subject(rows: Sequence[Row], config: str) -> str:
    """What is compared: the config, or those of the grid."""
    names = list(dict.fromkeys(str(row.overrides[CONFIG]) for row in rows if CONFIG in row.overrides))
    return (", ".join(names) if len(names) <= 4 else f"{len(names)} configs") or config or "Combinations"


def _figures(rows: Sequence[Row], best: Mapping[str, Any] | None) -> list[Figure]:
    """`best`: the best row, None where rows of several tasks have none in common."""
    limits = {row.limit_bytes for row in rows if row.limit_bytes}
    limit = f"of {human(limits.pop())}" if len(limits) == 1 else "each within its own limit"
    found = [Figure("combinations", str(len(rows)), f"{sum(not row.ok for row in rows)} failed"),
             Figure("fit", str(sum(row.fits is True for row in rows)), limit)]
    return [*found, figure("best that fits", best["allocated_bytes"], "allocated")] if best else found


def _about_target(target: Mapping[str, Any]) -> Section:
    return Section("Target", [(name, human(target[name]) if name.endswith("_bytes") else as_text(target[name]))
                              for name in TARGET_FIELDS if name in target])
