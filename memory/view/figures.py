"""How figures are written on pages: seconds, shares and counts with their units; "" for None. Pure."""

from __future__ import annotations


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


def percent(share: float | None, digits: int = 1) -> str:
    """A share in per cent: "12.5 %"; "" for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def count(value: float | None) -> str:
    """A number of things: "112,131"; "" for None."""
    return "" if value is None else f"{value:,.0f}"
