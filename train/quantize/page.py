"""A quantization as a page: perplexity, the error by layer and by weight, bytes by component."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bytescope.memory.units import human
from bytescope.memory.view.elements import Figure, table, versions
from bytescope.memory.view.frame import page
from bytescope.train.quantize.result import Result
from bytescope.train.quantize.shown import mean_error

# The drawing, in its own units; shares are on a logarithmic axis.
WIDE, HIGH, LEFT, BELOW = 860, 280, 64, 30
TICKS = 16  # layers that are named at most


def render(result: Result) -> str:
    """The page, as text."""
    before, after = result.bytes
    sizes = (
        ("component", "name", lambda row: row[0]),
        ("16 bits", "num", lambda row: human(row[1][0])),
        ("here", "num", lambda row: human(row[1][1])),
    )
    programs = (("program", "name", lambda row: row[0]), ("on the device", "num", lambda row: human(row[1])))
    return page(
        "quantize",
        f"{result.title} in 4 bits",
        {},
        heading=f"{result.title} in 4 bits",
        where=result.out,
        facts=result.facts,
        versions=versions(result.versions),
        figures=[
            Figure("perplexity", f"{result.after:.3f}", f"{result.before:.3f} before"),
            Figure("weights", human(after), f"{human(before)} in 16 bits", f"{after:,} bytes"),
        ],
        drawing=drawing(result),
        scaled=_differ(result),
        weights=[_short(name) for name in result.weights],
        heat=heat(result),
        sizes=table(sizes, [*result.components.items(), ("all", result.bytes)]),
        programs=table(programs, list(result.memory.device.items())),
        limit=result.memory.limit,
        host=result.memory.host,
    )


def _differ(result: Result) -> bool:
    """Whether what was written is other than plain rounding."""
    return any(one["error"] != one["rounding"] for row in result.layers for one in row["weights"])


def drawing(result: Result) -> dict[str, Any]:
    """Lines of shares by layer, with ticks of both axes."""
    lines = {
        "rounding": [mean_error(row)[0] for row in result.layers],
        "error": [mean_error(row)[1] for row in result.layers],
        "stream": [row["stream"] for row in result.layers],
    }
    if not _differ(result):
        del lines["error"]
    known = [share for shares in lines.values() for share in shares if share > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    high = max(high, low + 1)
    count = max(len(result.layers) - 1, 1)

    def x(layer: int) -> float:
        return LEFT + (WIDE - LEFT) * layer / count

    def y(share: float) -> float:
        return (HIGH - BELOW) * (high - math.log10(max(share, 10.0**low))) / (high - low)

    every = -(-len(result.layers) // TICKS)
    return {
        "width": WIDE + 20,
        "height": HIGH + 14,
        "left": LEFT,
        "right": WIDE,
        "bottom": HIGH - BELOW,
        "shares": [
            {"y": y(10.0**power), "text": f"{10.0**power:.{max(-power - 2, 0)}%}"} for power in range(low, high + 1)
        ],
        "layers": [{"x": x(layer), "text": str(layer)} for layer in range(0, len(result.layers), every)],
        "lines": [_line(name, shares, x, y) for name, shares in lines.items()],
    }


def _line(name: str, shares: Sequence[float], x: Any, y: Any) -> dict[str, Any]:
    marks = [
        {"x": x(layer), "y": y(share), "title": f"layer {layer}: {share:.3%}"} for layer, share in enumerate(shares)
    ]
    return {"name": name, "marks": marks, "points": " ".join(f"{one['x']:.1f},{one['y']:.1f}" for one in marks)}


def heat(result: Result) -> list[dict[str, Any]]:
    """A row for each layer: the error of each weight, its share of the largest, and the power of its scales."""
    most = max(one["error"] for row in result.layers for one in row["weights"]) or 1.0
    return [
        {
            "layer": row["layer"],
            "cells": [
                {
                    "share": one["error"] / most,
                    "text": f"{one['error']:.2%}",
                    "power": f"{one['power']:.2f}",
                    "title": f"layer {row['layer']}, {one['weight']}: {one['error']:.4%}, "
                    f"rounding {one['rounding']:.4%}",
                }
                for one in row["weights"]
            ],
        }
        for row in result.layers
    ]


def _short(path: str) -> str:
    """attention.w_q -> q"""
    return path.rsplit(".w_", 1)[-1]
