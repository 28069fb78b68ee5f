"""Prepares the data of the report page: the columns that its script draws, limited to what a browser shows without
delay.

Pure functions from records to lists. Each string is written once and columns have its index, because thousands of
buffers share a few hundred scopes, phases and source lines. Sizes are bytes on one device.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from bytescope.memory.records.report_record import (
    CATEGORIES,
    PHASES,
    ROWS,
    Buffer,
    ReportRecord,
    RowName,
    TimelinePoint,
)
from bytescope.memory.report.buffer_tables import array_type, what
from bytescope.memory.units import column_unit
from bytescope.memory.view.elements import row_name

# Limits that keep the page responsive in a browser. Beyond a limit, only the largest items are kept, and the page says
# so.
MAX_POINTS = 3000
MAX_BUFFERS = 20_000
MAX_BANDS = 240
MAX_TILES = 700

Tile = tuple[str, str, str, int, str, int]


class Strings:
    """A list of distinct strings in the order of their first use. Calling it with a string returns the index of the
    string.
    """

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.all.setdefault(text, len(self.all))


def page_data(report: ReportRecord) -> dict[str, Any]:
    """Returns the data of a report's page as JSON values, from which the script static/report.js draws the charts."""
    strings = Strings()
    indices = thin(report.timeline, report.peak_index)
    device = [b for b in report.buffers if b.memory == "device"]
    listed = sorted(device, key=lambda b: (not b.at_peak, -b.bytes))[:MAX_BUFFERS]
    listed.sort(key=lambda b: -b.bytes)
    points = [report.timeline[i] for i in indices]
    return {
        "rows": {row: row_name(row) for row in ROWS},
        "phases": list(PHASES),
        "unit": column_unit(max((p.bytes for p in points), default=0), 1.0),
        "peak": report.peak_index,
        "peak_bytes": report.peak_bytes,
        "allocated_bytes": report.allocated_bytes,
        "limit_bytes": report.limit_bytes,
        "n_points": len(report.timeline),
        "n_buffers": len(device),
        "points": {
            "index": indices,
            "bytes": [p.bytes for p in points],
            "phase": [strings(p.phase) for p in points],
            "instruction": [strings(p.instruction) for p in points],
        },
        "by_category": by_category(device, len(report.timeline), indices),
        "bands": [(start, end, strings(phase)) for start, end, phase in phase_bands(report.timeline)],
        "buffers": _buffer_columns(listed, strings),
        "tiles": tiles(report, device, {id(buffer): row for row, buffer in enumerate(listed)}),
        "strings": list(strings.all),
    }


def thin(timeline: Sequence[TimelinePoint], peak: int, most: int = MAX_POINTS) -> list[int]:
    """Returns the indices of the timeline points to draw, at most about `most`.

    A longer timeline is divided into `most / 2` stretches. The lowest and the highest point of each stretch are drawn,
    and the peak, so that no maximum is lost.
    """
    n = len(timeline)
    if n <= most:
        return list(range(n))
    stretches = most // 2
    kept = {0, n - 1, min(max(peak, 0), n - 1)}
    for k in range(stretches):
        stretch = range(k * n // stretches, (k + 1) * n // stretches)
        kept.add(min(stretch, key=lambda i: timeline[i].bytes))
        kept.add(max(stretch, key=lambda i: timeline[i].bytes))
    return sorted(kept)


def by_category(buffers: Iterable[Buffer], n_points: int, indices: Sequence[int]) -> dict[RowName, list[int]]:
    """Returns a dict: category of buffers -> live bytes at each of the timeline points `indices`. A category without
    live bytes at any point is left out.

    `n_points`: number of points of the whole timeline.
    """
    steps = {category: [0] * (n_points + 1) for category in CATEGORIES}
    for buffer in buffers:
        if buffer.category not in steps or buffer.start >= n_points or buffer.end < buffer.start:
            continue
        step = steps[buffer.category]
        step[max(buffer.start, 0)] += buffer.bytes
        step[min(buffer.end + 1, n_points)] -= buffer.bytes
    series = {}
    for category, step in steps.items():
        if any(step):
            alive = list(accumulate(step))
            series[category] = [alive[i] for i in indices]
    return series


def phase_bands(timeline: Sequence[TimelinePoint], most: int = MAX_BANDS) -> list[tuple[int, int, str]]:
    """Returns (first point, last point, phase) of each stretch of the timeline that belongs to one phase.

    If there are more than `most` stretches, the timeline is cut into `most` equal stretches instead, each with the
    phase of the majority of its points.
    """
    runs = _runs([p.phase for p in timeline])
    if len(runs) <= most:
        return runs
    n, phases = len(timeline), []
    for k in range(most):
        stretch = [p.phase for p in timeline[k * n // most : (k + 1) * n // most]]
        phases += [max(sorted(set(stretch)), key=stretch.count)] * len(stretch)
    return _runs(phases)


def _runs(values: Sequence[str]) -> list[tuple[int, int, str]]:
    starts = [i for i, value in enumerate(values) if i == 0 or values[i - 1] != value]
    ends = [*(start - 1 for start in starts[1:]), len(values) - 1]
    return [(start, end, values[start]) for start, end in zip(starts, ends, strict=False)]


def _buffer_columns(buffers: Sequence[Buffer], strings: Strings) -> dict[str, list[int]]:
    text = {
        "what": what,
        "name": lambda b: b.name,
        "type": array_type,
        "category": lambda b: b.category,
        "phase": lambda b: b.phase,
        "op": lambda b: b.op_name,
        "source": lambda b: b.source,
        "checkpoint": lambda b: b.checkpoint_name,
    }
    columns = {name: [strings(read(b)) for b in buffers] for name, read in text.items()}
    columns["bytes"] = [b.bytes for b in buffers]
    columns["start"] = [b.start for b in buffers]
    columns["end"] = [b.end for b in buffers]
    columns["at_peak"] = [int(b.at_peak) for b in buffers]
    return columns


def tiles(
    report: ReportRecord, buffers: Iterable[Buffer], rows: Mapping[int, int], most: int = MAX_TILES
) -> list[Tile]:
    """Returns (id, id of the parent tile, label, bytes, category, row) of each tile of the treemap of memory at the
    peak. Its levels are category, group and buffer.

    Only tiles without children have bytes. Only the `most` largest buffers have tiles of their own; the others of a
    group share one tile. Bytes of the memory breakdown that belong to no buffer are also a tile.

    `rows`: Python's `id` of a buffer -> its row in the buffer table. All other tiles have row -1.
    """
    alive = sorted((b for b in buffers if b.at_peak and b.bytes), key=lambda b: -b.bytes)
    out: list[Tile] = []
    parents: set[str] = set()
    rest: dict[tuple[RowName, str], list[int]] = {}
    sums = dict.fromkeys(ROWS, 0)
    for number, buffer in enumerate(alive):
        row = buffer.category if buffer.category in sums else "unattributed"
        group = group_of(buffer)
        parent = f"{row}/{group}"
        for node, above, label in ((row, "", row), (parent, row, group)):
            if node not in parents:
                parents.add(node)
                out.append((node, above, label, 0, row, -1))
        sums[row] += buffer.bytes
        if number < most:
            place = rows.get(id(buffer), -1)
            out.append((f"{parent}/{number}", parent, _tile_label(buffer, group), buffer.bytes, row, place))
        else:
            rest.setdefault((row, parent), []).append(buffer.bytes)
    for (row, parent), sizes in rest.items():
        out.append((f"{parent}/rest", parent, f"{len(sizes)} smaller", sum(sizes), row, -1))
    for row in ROWS:
        missing = report.breakdown[row] - sums[row]
        if missing > 0:
            if row not in parents:
                out.append((row, "", row, 0, row, -1))
            out.append((f"{row}/*", row, row if row == "fragmentation" else "not listed", missing, row, -1))
    return out


def _tile_label(buffer: Buffer, group: str) -> str:
    if buffer.phase == "argument":
        return buffer.name.removeprefix(group) or buffer.name
    return what(buffer).rsplit("/", 1)[-1]


def group_of(buffer: Buffer) -> str:
    """Returns the group of a buffer within its category: its checkpoint name or component for residuals,
    "phase/component" for workspace, the path one level up for an argument, and otherwise its component.
    """
    if buffer.category == "residuals":
        return buffer.checkpoint_name or buffer.component or "unnamed"
    if buffer.category == "workspace":
        return "/".join(part for part in (buffer.phase, buffer.component) if part) or "other"
    if buffer.phase == "argument":  # the group of params['blocks']['wq'] is params['blocks']
        return re.sub(r"(\[[^\]]*\]|\.\w+)$", "", buffer.name) or buffer.name
    return buffer.component or buffer.module.rsplit("/", 1)[-1] or buffer.dtype or "other"
