"""Converts bytes, FLOPs and counts to text, and text to bytes. Output units of bytes are binary (GiB = 2**30); input
may use decimal units too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bytescope.memory.errors import ReportError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
# Sizes from here on are refused, and counts above this number: no run has a trillion of anything that a flag counts.
MAX_BYTES, MAX_COUNT = 2**63, 2**40
# (name, bytes), the largest first.
BINARY = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
# Units for columns of figures. TiB is left out because device memory is commonly given in GiB.
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
_BITS = re.compile("[KMGT]i?b$")  # kb, mb and gb in small letters are read as bytes
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def human(count: float | None) -> str:
    """Returns a number of bytes as text: "21.44 GiB", "3.00 KiB", "17 B"; "-" for None."""
    if count is None:
        return "-"
    for unit, scale in BINARY[:-1]:
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def column_unit(figure: float, share: float = 0.1) -> tuple[str, int]:
    """Chooses the unit in which a table column shows bytes. Returns (name, bytes of the unit), such as ("GiB", 2**30).

    Args:
        figure: a number of bytes of the column, by which the unit is chosen.
        share: minimum value that `figure` must have in the unit. With 0.1, at least 0.1 GiB are shown in GiB, and less
            in MiB.
    """
    return next(((name, scale) for name, scale in COLUMN if figure >= scale * share), COLUMN[-1])


def flops(count: float) -> str:
    """Returns a number of FLOPs as text with three digits and a unit, such as "12.1 TFLOP"."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} FLOP"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Returns a number with its noun, such as "1 array", "3 arrays" or "1,200 copies". `nouns`: the plural of the noun
    if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def list_names(names: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Returns at most `most` names as text, such as "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def parse_bytes(size: int | str) -> int:
    """Returns a size in bytes. `size` is text such as "512 MB" or "72GiB", or a number of bytes of at least 1 MiB.

    Raises:
      ReportError: the size is not valid. A number below 1 MiB is refused because its unit was probably forgotten (72
          for 72GiB).
    """
    unit = ""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        count = size
    else:
        match = _SIZE.match(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _SCALES:
            raise ReportError(f"{size!r} is not a valid size: write it as 72GiB, 512MB or a number of bytes")
        if _BITS.search(match[2]):
            raise ReportError(f"{size!r} is a number of bits, not bytes: write {match[0].strip()[:-1]}B for bytes")
        unit = match[2].lower()
        scaled = float(match[1]) * _SCALES[unit]
        if not scaled < MAX_BYTES:  # true for infinity too
            raise ReportError(f"{match[0][:40]!r} is not a valid size: give less than {MAX_BYTES // TIB:,} TiB")
        count = int(scaled)
    if not unit and 0 < count < MIB:
        number = str(size).strip()
        raise ReportError(
            f"{number} without a unit is {count:,} bytes: write {number}GiB or {number}MiB, or {number}B for bytes"
        )
    return count


def reads_as_size(text: str) -> bool:
    """Returns whether a text can be parsed as a size above 0, such as "72GiB" or "1000000". Callers use this to
    distinguish a size from a name.
    """
    match = _SIZE.match(text)
    return bool(match and match[2].lower() in _SCALES and float(match[1]) > 0)
