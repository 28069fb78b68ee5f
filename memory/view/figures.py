"""How figures are written on pages: seconds, shares and counts with their units; "" for None. Pure."""

from __future__ import annotations

import math


def exact(count: int | None) -> str:
    """A number of bytes in full, for a hover; "" for None."""
    return "" if count is None else f"{count:,} bytes"


def seconds(value: float | None) -> str:
    """Seconds with their unit, in four digits: "37.41 s", "0.5900 s", "12.30 ms"; "" for None."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:#.4g} s" if value >= 0.1 else f"{1000 * value:#.4g} ms"


def rounded(value: float, digits: int = 3) -> str:
    """A figure of 0 or more in so many digits, thousands with commas: "90,900", "0.650", "0.0000012"."""
    if not value:
        return "0"
    kept = float(f"{value:.{digits - 1}e}")
    return f"{kept:,.{max(digits - 1 - math.floor(math.log10(kept)), 0)}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share in per cent: "12.5 %"; "" for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def written_gap(share: float | None, digits: int = 1) -> str:
    """A difference as a share of what it is compared with: "+12.3 %"; "new" where that is 0, "" for None."""
    if share is None:
        return ""
    return "new" if math.isinf(share) else f"{100 * share:+.{digits}f} %"


def count(value: float | None) -> str:
    """A number of things: "112,131"; "" for None."""
    return "" if value is None else f"{value:,.0f}"
