"""Formats figures for pages: seconds, fractions and counts with their units; None becomes "". Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exact(count: int | None) -> str:
    """Returns the exact number of bytes as text, such as "1,234 bytes"; "" for None."""
    return "" if count is None else f"{count:,} bytes"


def seconds(value: float | None) -> str:
    """Formats a time in seconds with four digits and a unit, such as "37.41 s", "0.5900 s" or "12.30 ms"; "" for
    None."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:#.4g} s" if value >= 0.1 else f"{1000 * value:#.4g} ms"


def rounded(value: float, digits: int = 3) -> str:
    """Formats a number of 0 or more with `digits` significant digits, such as "90,900", "0.650" or "0.0000012"."""
    if not value:
        return "0"
    kept = float(f"{value:.{digits - 1}e}")
    return f"{kept:,.{max(digits - 1 - math.floor(math.log10(kept)), 0)}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Formats a fraction (0 to 1) as percent, such as "12.5 %"; "" for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def written_gap(share: float | None, digits: int = 1) -> str:
    """Formats a relative difference as signed percent, such as "+12.3 %". Infinity (the old value was 0) becomes
    "new"; None becomes ""."""
    if share is None:
        return ""
    return "new" if math.isinf(share) else f"{100 * share:+.{digits}f} %"


def count(value: float | None) -> str:
    """Formats a count with thousands separators, such as "112,131"; "" for None."""
    return "" if value is None else f"{value:,.0f}"


def shares(sizes: Sequence[float]) -> list[float]:
    """Returns the percentages that sizes have of their sum, rounded to one decimal so that they add up to 100.0: those
    with the largest remainders are rounded up. Returns zeros if the sum is 0."""
    total = sum(sizes)
    tenths = [1000 * size / total if total else 0.0 for size in sizes]
    floors = [math.floor(tenth) for tenth in tenths]
    missing = round(sum(tenths)) - sum(floors)
    for at in sorted(range(len(sizes)), key=lambda at: floors[at] - tenths[at])[:missing]:
        floors[at] += 1
    return [floor / 10 for floor in floors]
