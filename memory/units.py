"""Bytes as text and text as bytes. Units are binary (GiB = 2**30); people may write decimal ones too. Pure."""

from __future__ import annotations

import re

from bytescope.memory.errors import ReportError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
# No size is as large.
MOST = 2**63
# (name, bytes), the largest first.
BINARY = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
# The units that a column of figures is written in: terabytes are left in GiB, which is what devices have.
COLUMN = BINARY[1:]

_SCALES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    **{name.lower(): scale for name, scale in BINARY},
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def human(count: float | None) -> str:
    """Bytes as people read them: "21.44 GiB", "3.00 KiB", "17 B"; "-" for None."""
    if count is None:
        return "-"
    for unit, scale in BINARY[:-1]:
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def column_unit(least: float, share: float = 0.1) -> tuple[str, int]:
    """(name, bytes) of the unit for a column of figures: the largest one of which `least`, the smallest figure in
    bytes, makes at least `share`."""
    return next(((name, scale) for name, scale in COLUMN if least >= scale * share), COLUMN[-1])


def parse_bytes(size: int | str) -> int:
    """Returns the bytes of a size as people write it: "512 MB", "72GiB", or a number of bytes, 1 MiB or more.

    Raises:
      ReportError: anything else, with the value and how to write it. A smaller number without a unit is refused, since
          it most likely lacks its unit: 72 for 72GiB.
    """
    unit = ""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        count = size
    else:
        match = _SIZE.match(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _SCALES:
            raise ReportError(f"{size!r} is not a valid size: write it as 72GiB, 512MB or a number of bytes")
        unit = match[2].lower()
        scaled = float(match[1]) * _SCALES[unit]
        if not scaled < MOST:  # true for infinity too
            raise ReportError(f"{match[0][:40]!r} is not a valid size: no memory has {MOST // TIB:,} TiB")
        count = int(scaled)
    if not unit and 0 < count < MIB:
        number = str(size).strip()
        raise ReportError(
            f"{number} without a unit is {count:,} bytes: write {number}GiB or {number}MiB, or {number}B for bytes"
        )
    return count


def reads_as_size(text: str) -> bool:
    """Returns whether text can only mean a size above 0, with or without its unit."""
    match = _SIZE.match(text)
    return bool(match and match[2].lower() in _SCALES and float(match[1]) > 0)
