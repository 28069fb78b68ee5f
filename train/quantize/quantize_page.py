"""A quantization as a page: perplexity, the error by layer and by weight, bytes by component."""

from __future__ import annotations

from typing import Any

from bytescope.memory.units import human
from bytescope.memory.view.elements import HeaderFigure, table, versions
from bytescope.memory.view.frame import page
from bytescope.train.quantize.quantize_result import Result
from bytescope.train.quantize.quantize_text import mean_error


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
        page_data(result),
        heading=f"{result.title} in 4 bits",
        where=result.out,
        facts=result.facts,
        versions=versions(result.versions),
        figures=[
            HeaderFigure("perplexity", f"{result.after:.3f}", f"{result.before:.3f} before"),
            HeaderFigure("weights", human(after), f"{human(before)} in 16 bits", f"{after:,} bytes"),
        ],
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


def page_data(result: Result) -> dict[str, Any]:
    """Returns what the script draws: layer numbers, and for each line its share of error in each layer, from 0 to 1."""
    shares = {
        "rounding": [mean_error(row)[0] for row in result.layers],
        "written": [mean_error(row)[1] for row in result.layers],
        "residual stream": [row["stream"] for row in result.layers],
    }
    if not _differ(result):
        del shares["written"]
    return {"layers": [row["layer"] for row in result.layers], "shares": shares}


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
