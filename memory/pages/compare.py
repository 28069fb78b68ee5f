"""A comparison as one HTML file that opens offline: growth curves, Pareto picture, breakdown bars, table.

The page is `page.compare.html` with the styles of the report's page, its own script, plotly.js and the data
put in. Whatever comes from a comparison is escaped here, and reaches the page as text there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bytescope.memory.formulas.reconcile import share
from bytescope.memory.pages import feasibility_grid as feasibility_grid_page
from bytescope.memory.pages.frame import fill
from bytescope.memory.pages.report import label as row_name
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
    "kernel_recompute_flops": ("kernels' own", "flops"), "compile_seconds": ("compile", "seconds"),
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


def render(comparison: Mapping[str, Any], config: str = "") -> str:
    """The page of a comparison's JSON (`memory.plan.rows.to_json`), as text; `config` is the file it is about."""
    rows = [Row.of(entry["overrides"], entry) for entry in comparison["rows"]]
    subject = _subject(rows, config)
    parts = {
        "HEADER": _header(comparison, subject),
        "ABOUT": _about(comparison),
        "MAP": feasibility_grid_page.render(rows),
    }
    return fill("compare", f"{subject} · compared", page_data(comparison), parts)


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
        "axes": axes(rows, keys), "unit": unit_of(rows), "policies": policies,
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


def _header(comparison: Mapping[str, Any], subject: str) -> str:
    target, best = comparison["target"], comparison.get("best")
    kind = str(target.get("kind", ""))
    where = " · ".join(filter(None, [str(target.get("name", "")), kind, "per device"]))
    versions = " · ".join(f"{name} {version}" for name, version in comparison["versions"].items())
    rows = comparison["rows"]
    limits = {row.get("limit_bytes") for row in rows if row.get("limit_bytes")}
    fitting = sum(row.get("fits") is True for row in rows)
    figures = [("combinations", str(len(rows)), f"{sum(row['status'] != 'ok' for row in rows)} failed"),
               ("fit", str(fitting), f"of {human(limits.pop())}" if len(limits) == 1 else "their own limit")]
    several = len({workload(Row.of(row["overrides"], row)) for row in rows}) > 1
    if best and not several:
        figures.append(("best that fits", human(best["allocated_bytes"]), "allocated"))
    cells = "".join(f'<div class="figure"><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
                    for name, value, note in figures)
    words = "Recomputing or taking least of all that fit" if several else "Best that fits"
    use = (f'<p class="best">{words}: <span class="flags">{escape(best["flags"] or "as configured")}</span></p>'
           if best else '<p class="best exceeds">None of these fits.</p>')
    stopped = "<p class=\"best\">Stopped early: some are missing.</p>" if comparison.get("interrupted") else ""
    return (f'<div class="title"><p class="eyebrow">{escape(where)}</p>'
            f"<h1>{escape(subject)}, compared</h1>"
            f'<p class="versions">{escape(versions)}</p></div>'
            f'<dl class="figures">{cells}</dl>{use}{stopped}')


def _about(comparison: Mapping[str, Any]) -> str:
    notes = (
        "Allocated: what the runtime takes, arguments and packed temporaries included. Peak: what is live at once.",
        "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs. HFU/MFU counts them, and what attention "
        "and loss kernels recompute in their own gradients.",
        "Compile seconds are taken while other combinations compile beside it.",
        "Rows are rivals when they differ only in how the same task runs: remat, mesh, loss, precision, kernel. The "
        "highlighted row is the best that fits of each task: the fastest measured, else the least recomputation, "
        "then the fewest bytes.",
    )
    if any(row.get("formula") for row in comparison["rows"]):
        notes += ("By formula: what the published formulas give for the same step, and by how much the compiler's "
                  "figure exceeds it; empty where no formula says what a policy keeps.",)
    listed = "".join(f"<li>{note}</li>" for note in notes)
    known = {name: comparison["target"][name] for name in TARGET_FIELDS if name in comparison["target"]}
    target = "".join(f"<div><dt>{escape(name)}</dt><dd>"
                     f"{escape(human(value) if name.endswith('_bytes') else as_text(value))}</dd></div>"
                     for name, value in known.items())
    return (f"<section><h3>How to read it</h3><ul>{listed}</ul></section>"
            f"<section><h3>Target</h3><dl>{target}</dl></section>")
