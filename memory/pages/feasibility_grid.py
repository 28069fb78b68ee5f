"""What fits, as one HTML table: tasks down, ways to run them across, a cell for each combination.

Every text of a comparison is escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from bytescope.memory.plan.rows import (
    CONFIG,
    POLICY,
    TARGET,
    Row,
    best_of_each,
    is_how,
    label,
    unit_of,
    value_text,
    varying,
)

# The share of the limit above which a combination is only just within it.
NEAR = 0.9
# Class of a cell -> what it means, with a limit and where none is known.
WITH_LIMIT = {"room": "fits", "near": f"above {NEAR:.0%} of the limit", "over": "exceeds", "failed": "failed"}
WITHOUT = {"free": "the darker the more bytes", "failed": "failed"}

Values = tuple[str, ...]


def render(rows: Sequence[Row]) -> str:
    """The card with the table, "" where either side would have one line only."""
    keys = sorted(varying(rows), key=lambda key: key == POLICY)  # policies stand side by side
    down, across = ([key for key in keys if is_how(key) is how] for how in (False, True))
    cells = {(_values(row, down), _values(row, across)): row for row in rows}
    lines, columns = _ordered(rows, down), _ordered(rows, across)
    if min(len(lines), len(columns)) < 2:
        return ""
    winners = [row.overrides for row in best_of_each(rows)]
    most = max((row.allocated_bytes or 0 for row in rows), default=0)
    unit, size = unit_of(rows)
    body, before = [], None
    for line in lines:
        first = ' class="first"' if before and len(line) > 1 and before[0] != line[0] else ""
        body.append(f"<tr{first}>{_names(line, before)}" + "".join(
            _cell(cells.get((line, column)), keys, size, most, winners) for column in columns) + "</tr>")
        before = line
    kinds = WITH_LIMIT if any(row.limit_bytes for row in rows) else WITHOUT
    if all(row.ok for row in rows):
        kinds = {name: meaning for name, meaning in kinds.items() if name != "failed"}
    legend = "".join(f'<span class="map"><i class="{name}"></i>{meaning}</span>' for name, meaning in kinds.items())
    return (f'<section class="card" id="map-card"><div class="head"><h2>What fits</h2><p>{unit} allocated on one '
            f'device. Framed: the best that fits of each line.</p></div><p class="keys soft">{legend}</p>'
            f'<div class="scroll"><table class="map"><thead>{_heads(down, across, columns)}</thead>'
            f'<tbody>{"".join(body)}</tbody></table></div></section>')


def _values(row: Row, keys: Sequence[str]) -> Values:
    return tuple(value_text(row, key) for key in keys)


def _ordered(rows: Sequence[Row], keys: Sequence[str]) -> list[Values]:
    """What the rows hold under `keys`, sorted by each key's values in the order of the grid."""
    order = [list(dict.fromkeys(value_text(row, key) for row in rows)) for key in keys]
    return sorted({_values(row, keys) for row in rows},
                  key=lambda values: [texts.index(text) for texts, text in zip(order, values)])


def _heads(down: Sequence[str], across: Sequence[str], columns: Sequence[Values]) -> str:
    """A line of headings for each key across; neighbours that share a value, and all above it, share a heading."""
    out = []
    for level, key in enumerate(across):
        last = level == len(across) - 1
        left = ("".join(f'<th class="key">{escape(_short(name))}</th>' for name in down[:-1]) if last else
                f'<th colspan="{len(down) - 1}"></th>' if len(down) > 1 else "")
        corner = f"{_short(down[-1])} \\ {_short(key)}" if last else _short(key)
        cells = "".join(f'<th class="value" colspan="{len(list(run))}">{escape(values[-1])}</th>'
                        for values, run in groupby(columns, key=lambda values: values[:level + 1]))
        out.append(f'<tr>{left}<th class="key">{escape(corner)}</th>{cells}</tr>')
    return "".join(out)


def _names(line: Values, before: Values | None) -> str:
    """The headings of a line; what the line above has as well is left empty."""
    return "".join(f"<th>{'' if before and before[:i + 1] == line[:i + 1] else escape(text)}</th>"
                   for i, text in enumerate(line))


def _cell(row: Row | None, keys: Sequence[str], size: int, most: int, winners: Sequence[Mapping]) -> str:
    if row is None:
        return "<td></td>"
    if not row.ok or row.allocated_bytes is None:
        return f'<td class="failed" title="{escape(label(row, keys))}: {escape(row.status)}">failed</td>'
    share = row.allocated_bytes / (row.limit_bytes or most or 1)
    kind = "free" if row.limit_bytes is None else "over" if share > 1 else "near" if share > NEAR else "room"
    again = row.recompute_flops_fraction
    about = f"{label(row, keys)}: {100 * share:.0f} % of {'the limit' if row.limit_bytes else 'the largest'}" + (
        "" if again is None else f", {100 * again:.1f} % recomputed")
    value = row.allocated_bytes / size
    text = f"{value:,.0f}" if value >= 100 or size == 1 else f"{value:.{1 if value >= 1 else 2}f}"
    best = " best" if row.overrides in winners else ""
    return (f'<td class="{kind}{best}" style="--share: {100 * min(share, 1):.0f}%" title="{escape(about)}">'
            f"{text}</td>")


def _short(key: str) -> str:
    return key if key in (CONFIG, TARGET) else "policy" if key == POLICY else key.rsplit(".", 1)[-1]
