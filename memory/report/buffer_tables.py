"""Lists the largest buffers at the peak, as text and as a table object, and names buffers for all lists."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo.sources import notebook_cell
from bytescope.memory.records.report_record import Buffer, ReportRecord
from bytescope.memory.units import plural
from bytescope.memory.view.console import shorten
from bytescope.memory.view.object_table import Table
from bytescope.memory.view.table_model import ColumnView

# Maximum characters of a buffer's name and of its type.
_NAME, _TYPE = 60, 28
_KINDS = {"bfloat": "bf", "float": "f", "int": "i", "uint": "u", "complex": "c"}
# Matches the number of a layer in a name.
_NUMBER = re.compile(r"(\d+)")
_DTYPE = re.compile(r"^(bfloat|float|int|uint|complex)(\d)")
# Columns of the table that `Report.table` returns.
TABLE_COLUMNS = (
    ColumnView("what", "largest at the peak", "path", read=lambda row: shorten(row["what"], _NAME)),
    ColumnView("times", "", "times"),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("type", "type", "text", read=lambda row: shorten(row["type"], _TYPE)),
    ColumnView("row", "row", "text"),
    ColumnView("line", "line", "place"),
)


def largest_table(report: ReportRecord, n: int = 10) -> Table:
    """Returns the `n` largest buffers at the peak as a table. Buffers that differ only in the layer number are one row.

    Keys of a row: what (path of an argument, or scopes and operation), times (number of buffers), bytes (of one
    buffer), dtype, shape, type (dtype and shape as text), row (category of the memory breakdown), phase, scope (the
    named scopes), checkpoint_name, line ("file.py:line", shortened), source (the unshortened source line), name (the
    compiler's name).

    Raises ReportError if `n` is not an integer of 1 or more.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ReportError(f"n={n!r} is not valid: give the number of buffers to list, 1 or more")
    groups = largest(report, n)
    return Table(TABLE_COLUMNS, tuple(map(_cells, groups)), note=listed_share(report, groups))


def _cells(alike: Alike) -> dict[str, Any]:
    one = alike.one
    return {
        "what": alike.name,
        "times": alike.times,
        "bytes": one.bytes,
        "dtype": one.dtype,
        "shape": tuple(one.shape),
        "type": array_type(one),
        "row": one.category,
        "phase": one.phase,
        "scope": one.module,
        "checkpoint_name": one.checkpoint_name,
        "line": line(one.source),
        "source": one.source,
        "name": one.name,
    }


class Alike(NamedTuple):
    """Buffers that have the same text in every column of the table.

    Fields:
        name: the common name of the buffers.
        times: number of buffers.
        one: one of the buffers, from which the columns are read.
    """

    name: str
    times: int
    one: Buffer


def largest(report: ReportRecord, n: int) -> tuple[Alike, ...]:
    """Returns the `n` largest buffers in device memory at the peak, largest first.

    Buffers of unrolled layers whose names differ only in the layer number are one group.
    """
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in report.alive_at(report.peak_index):
        name = _NUMBER.sub("*", what(buffer))
        alike = (name, buffer.bytes, buffer.dtype, buffer.shape, buffer.category, buffer.phase, buffer.source)
        groups.setdefault(alike, []).append(buffer)
    return tuple(
        Alike(_common_name(list(map(what, alike))), len(alike), alike[0]) for alike in list(groups.values())[:n]
    )


def _common_name(names: list[str]) -> str:
    parts = zip(*(_NUMBER.split(name) for name in names))
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def listed_share(report: ReportRecord, groups: Iterable[Alike]) -> str:
    """Returns a sentence on how much of the peak a table lists, such as "20 of 310 buffers, 85.1% of the peak".
    `groups`: the rows of the table.
    """
    groups = tuple(groups)
    count, listed = len(report.alive_at(report.peak_index)), sum(alike.times for alike in groups)
    share = sum(alike.times * alike.one.bytes for alike in groups) / max(report.peak_bytes, 1)
    return f"{listed:,} of {plural(count, 'buffer')}, {share:.1%} of the peak"


def what(buffer: Buffer) -> str:
    """Returns a readable name of a buffer: the path of an argument, the parameter of a gradient, or the scopes and the
    operation, such as `blocks/mlp · mul`. If none of these is known, returns the compiler's name, such as `fusion.12`.
    """
    if buffer.phase == "argument":
        return buffer.name
    if buffer.category == "gradients" and buffer.parameter:
        return f"gradient of {buffer.parameter}"
    operation = buffer.op_name.rsplit("/", 1)[-1]
    parts = [part for part in (buffer.module or buffer.component, operation) if part]
    return " · ".join(dict.fromkeys(parts)) or buffer.name


def array_type(buffer: Buffer) -> str:
    """Returns the dtype and shape of a buffer's array as text, such as `bf16[8,4096,1024]`; "" if the buffer holds no
    array.
    """
    if not buffer.dtype:
        return ""
    return f"{_DTYPE.sub(_short, buffer.dtype, count=1)}[{','.join(map(str, buffer.shape))}]"


def _short(dtype: re.Match[str]) -> str:
    return f"{_KINDS[dtype[1]]}{dtype[2]}"


def line(source: str) -> str:
    """Returns a source place as `file.py:line`. The path is relative to the working directory or to the installed
    packages; for any other file, only the last folder is shown. A line of a notebook cell becomes `In[3]:line`.
    """
    path, colon, number = source.rpartition(":")
    if not colon or not os.path.isabs(path):
        return source
    if cell := notebook_cell(path):
        return f"{cell}:{number}"
    if "/site-packages/" in path:
        return source.rsplit("/site-packages/", 1)[1]
    inside = os.path.relpath(path)
    if inside.startswith(os.pardir):
        inside = os.path.join(*path.split(os.sep)[-2:])
    return f"{inside}:{number}"
