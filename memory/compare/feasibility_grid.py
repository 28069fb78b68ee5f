"""The feasibility table of a comparison: a line per task, a column per way to run it, a cell per combination.

`templates/feasibility_grid.html` renders the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from bytescope.memory.compare.compare_rows import Row, best_of_each, label, unit_of, varying
from bytescope.memory.compare.grids import CONFIG, TARGET

# Combinations above this fraction of the limit are marked as near the limit.
NEAR = 0.9
# CSS class of a cell -> its meaning in the legend, with a known limit and without one.
WITH_LIMIT = {"room": "fits", "near": f"above {NEAR:.0%} of the limit", "over": "exceeds", "failed": "failed"}
WITHOUT = {"free": "darker: more bytes", "failed": "failed"}

Values = tuple[str, ...]


class Square(NamedTuple):
    """A cell of the table that shows which combinations fit in memory.

    Fields:
        text: the allocated bytes in the unit of the table.
        kind: the CSS class.
        share: the bytes as a percentage of the memory limit, at most 100; without a limit, of the largest cell.
        title: the hover text.
    """

    text: str
    kind: str
    share: int
    title: str


class HeadLine(NamedTuple):
    """A line of column headings in the table that shows which combinations fit in memory. The line shows the values of
    one config key above the columns.

    Fields:
        left: headings of the columns that name the table's lines: config keys in the last line of headings, "" in the
            others.
        corner: the text of the cell between `left` and `spans`, such as "seq_len \\ policy".
        spans: (value of the key, number of adjacent columns with this value).
    """

    left: list[str]
    corner: str
    spans: list[tuple[str, int]]


class GridLine(NamedTuple):
    """A line of the table that shows which combinations fit in memory. It shows one task, rows that compute the same.

    Fields:
        names: the values of the config keys that define the task.
        squares: one cell per combination; None if the combination was not compiled.
        first: whether a new group of lines begins, because the first name differs from the line above.
    """

    names: list[str]
    squares: list[Square | None]
    first: bool


class Grid(NamedTuple):
    """A table that shows which combinations of config keys fit in memory.

    Fields:
        unit: the unit of the cells' bytes.
        legend: (CSS class, meaning) pairs.
        heads: the lines of column headings.
        lines: one per task, a group of rows that compute the same.
    """

    unit: str
    legend: list[tuple[str, str]]
    heads: list[HeadLine]
    lines: list[GridLine]


def grid(rows: Sequence[Row]) -> Grid | None:
    """Returns the table that shows which of the compared rows fit in memory. Returns None if it would have only one
    line or only one column."""
    policy = rows[0].policy_key if rows else ""
    keys = sorted(varying(rows), key=lambda key: key == policy)  # the policy is last: its values are adjacent columns
    down, across = ([key for key in keys if rows[0].is_how(key) is how] for how in (False, True))
    cells = {(_values(row, down), _values(row, across)): row for row in rows}
    names, columns = _distinct_values(rows, down), _distinct_values(rows, across)
    if min(len(names), len(columns)) < 2:
        return None
    winners = [row.overrides for row in best_of_each(rows)]
    largest = max((row.allocated_bytes or 0 for row in rows), default=0)
    unit, size = unit_of(rows)
    lines = []
    for before, line in zip([None, *names], names):
        squares = [_square(cells.get((line, column)), keys, size, largest, winners) for column in columns]
        new = before is not None and len(line) > 1 and before[0] != line[0]
        lines.append(GridLine(_line_names(line, before), squares, new))
    return Grid(unit, _legend(rows), _heads(down, across, columns, policy), lines)


def _legend(rows: Sequence[Row]) -> list[tuple[str, str]]:
    kinds = WITH_LIMIT if any(row.limit_bytes for row in rows) else WITHOUT
    failed = any(not row.ok for row in rows)
    return [(kind, meaning) for kind, meaning in kinds.items() if failed or kind != "failed"]


def _values(row: Row, keys: Sequence[str]) -> Values:
    return tuple(row.value_text(key) for key in keys)


def _distinct_values(rows: Sequence[Row], keys: Sequence[str]) -> list[Values]:
    order = [list(dict.fromkeys(row.value_text(key) for row in rows)) for key in keys]
    return sorted(
        {_values(row, keys) for row in rows},
        key=lambda values: [texts.index(text) for texts, text in zip(order, values)],
    )


def _heads(down: Sequence[str], across: Sequence[str], columns: Sequence[Values], policy: str) -> list[HeadLine]:
    """Returns one line of column headings for each key in `across`. Adjacent columns with equal values share a heading.

    Args:
        down: the keys whose values are at the left of each table line.
        across: the keys whose values are above the columns.
        columns: the values of `across` for each column.
        policy: the key of the remat policy; its heading is "policy".
    """

    def short(key: str) -> str:
        if key == policy:
            return "policy"
        return key if key in (CONFIG, TARGET) else key.rsplit(".", 1)[-1]

    heads = []
    for level, key in enumerate(across):
        last = level == len(across) - 1
        runs = groupby(values[: level + 1] for values in columns)
        heads.append(
            HeadLine(
                [short(name) if last else "" for name in down[:-1]],
                f"{short(down[-1])} \\ {short(key)}" if last else short(key),
                [(values[-1], len(list(run))) for values, run in runs],
            )
        )
    return heads


def _line_names(line: Values, before: Values | None) -> list[str]:
    # Leading names that are equal to those of the line before are left empty.
    return ["" if before and before[: i + 1] == line[: i + 1] else text for i, text in enumerate(line)]


def _square(row: Row | None, keys: Sequence[str], size: int, largest: int, winners: Sequence[Mapping]) -> Square | None:
    if row is None:
        return None
    if not row.ok or row.allocated_bytes is None:
        return Square("failed", "failed", 0, f"{label(row, keys)}: {row.status}")
    share = row.allocated_bytes / (row.limit_bytes or largest or 1)
    title = f"{label(row, keys)}: {100 * share:.0f} % of {'the limit' if row.limit_bytes else 'the largest'}"
    if row.recompute_flops_fraction is not None:
        title += f", {100 * row.recompute_flops_fraction:.1f} % recomputed"
    kind = _kind(row, share) + (" best" if row.overrides in winners else "")
    return Square(
        _format_three_digits(row.allocated_bytes / size, whole=size == 1), kind, round(100 * min(share, 1)), title
    )


def _kind(row: Row, share: float) -> str:
    if row.limit_bytes is None:
        return "free"
    if share > 1:
        return "over"
    return "near" if share > NEAR else "room"


def _format_three_digits(value: float, whole: bool) -> str:
    if whole or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"
