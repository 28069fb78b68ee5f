"""The tables below the result of `bytescope fit` for a config: its meshes, and the limits of each rank of adapters.

`memory.compare.fit_view` shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_columns import Record, command_column
from bytescope.memory.compare.fit_view import ALLOCATED, HOST, VERDICT, FitTable, kind
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.view.elements import command
from bytescope.memory.view.table_model import PAGE, ColumnView, TableView

# Explains the table of meshes, and its bounds.
MESH_NOTE = (
    "Meshes are compared with everything recomputed. The search continues on meshes that could be faster than the best "
    "variant so far if nothing were recomputed."
)
LOWER_BOUND_NOTE = (
    '"at least" and "at best": the mesh was compiled only with everything recomputed; the figure is how much slower it '
    "would be without any recomputation"
)


def tables_of(out: Mapping[str, Any]) -> list[FitTable]:
    """Returns the tables for a result, without empty ones.

    out: the JSON result of `bytescope fit` for a config (keys: module train/plan/fit/fit_result.py).
    """
    meshes, reach, tables = out["layouts"], out["reach"], list[FitTable]()
    if out["best"] and len(meshes) > 1:
        reasons = [f"{row['layout']}: {row['verdict']}" for row in meshes if row["predicted_seconds"] is None]
        note = f"{MESH_NOTE} {LOWER_BOUND_NOTE}." if has_bounds(meshes) else MESH_NOTE
        table = TableView(LAYOUT_COLUMNS, meshes, emphasis=_dim_if_exceeding)
        tables.append(FitTable("layouts", "Each mesh compared with the choice", table, note, reasons))
    if reach:
        run = command_column(lambda row: command(out["config"], out["target"], row["flags"], fits=row["fits"]))
        table = TableView((*REACH_COLUMNS, run), reach, emphasis=_dim_if_exceeding)
        note = (
            "The longest sequences and the largest micro-batches that fit with full recomputation. The next larger "
            "sizes were compiled too and do not fit."
        )
        tables.append(FitTable("reach", "Limits of each LoRA rank", table, note))
    return tables


def _dim_if_exceeding(row: Record) -> str:
    return "" if row["fits"] else "dim"


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


# Predicted seconds of an update.
STEP = ColumnView("predicted_seconds", "step, predicted", "duration", short="update")
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


def has_bounds(rows: Sequence[Record]) -> bool:
    """Returns whether the table of these meshes has a bound, which needs an explanation."""
    return any(" at best" in slower(row) or "at least" in slower(row) for row in rows)
