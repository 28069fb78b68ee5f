"""Formats figures for pages: seconds, fractions and counts with their units; None becomes "". Pure."""

from __future__ import annotations

import math


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
