"""Shows a quantization in the terminal and as a page: bytes, perplexity, error by layer and by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.elements import HeaderFigure, table, versions
from bytescope.memory.view.frame import page
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.quantize.quantize_result import Memory, QuantizationResult

BAR = 24  # columns of the longest bar


def memory_view(memory: Memory) -> RenderableType:
    """Returns the table of memory that is printed before a quantization starts."""
    name, peak = memory.peak
    rows = FigureTable(label(), figure(), words())
    rows.add("device", human(peak), f"of {human(memory.limit)}, in the program '{name}'")
    checkpoint = f", the checkpoint {human(memory.held)}" if memory.held else ""
    rows.add(
        "host",
        human(memory.host),
        f"activations {human(memory.streams)}, a layer or the tables {human(memory.layer)}{checkpoint}",
    )
    rows.add("folder", human(memory.folder), "")
    return Group(rows, Text())


def plan_view(title: str, memory: Memory) -> RenderableType:
    """Returns the table of the bytes that each program needs on a target, and a line that says if they fit in its
    memory."""
    programs = FigureTable(label("on the device"), figure("bytes"))
    for name, size in memory.device.items():
        programs.add(name, human(size))
    verdict = "fits" if memory.fits else "does not fit: give a shorter --length, or use a device with more memory"
    return Group(
        Text(title, style="bold"),
        memory_view(memory),
        programs,
        Text(),
        Prose(verdict, "green" if memory.fits else "red"),
    )


def result_view(result: QuantizationResult) -> RenderableType:
    """Returns the result for the terminal: perplexity, bytes by component, and errors by layer."""
    sizes = FigureTable(label(), figure("16 bits"), figure("here"), figure("share"))
    whole = result.bytes
    for name, (unquantized, quantized) in [*result.components.items(), ("all", whole)]:
        fraction = f"{quantized / unquantized:.0%}" if unquantized else ""
        sizes.add(name, human(unquantized), human(quantized), fraction)
    layers = FigureTable(figure("layer"), figure("rounding"), figure("here"), figure("stream"), label())
    means = [mean_error(row) for row in result.layers]
    most = max(error for _, error in means) or 1.0
    for row, (rounding, error) in zip(result.layers, means):
        layers.add(
            str(row["layer"]),
            f"{rounding:.2%}",
            f"{error:.2%}",
            f"{row['stream']:.2%}",
            "█" * max(round(BAR * error / most), 1),
        )
    return Group(
        Text(f"{result.out}: {result.title} in 4 bits", style="bold"),
        *map(Prose, result.facts),
        Text(f"perplexity {result.before:.4f} before, {result.after:.4f} after"),
        Text(),
        sizes,
        Text(),
        Prose(
            "mean square error of a layer's matrix products and of the residual stream after the layer, each as a "
            "percentage of the mean square of the original"
        ),
        layers,
    )


# ---- the page ----------------------------------------------------------------------------------------------------


def result_page(result: QuantizationResult) -> str:
    """Returns the HTML page of a finished quantization: perplexity and bytes before and after, errors of each layer,
    and the memory of each program."""
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
        weights=[path.rsplit(".w_", 1)[-1] for path in result.weights],  # attention.w_q -> q
        heat=heat(result),
        sizes=table(sizes, [*result.components.items(), ("all", result.bytes)]),
        programs=table(programs, list(result.memory.device.items())),
        limit=result.memory.limit,
        host=result.memory.host,
    )


def page_data(result: QuantizationResult) -> dict[str, Any]:
    """Returns the data of the plot of errors by layer: "layers", the layer numbers, and "shares", name of a line -> its
    errors, one per layer, as fractions from 0 to 1.

    The lines are the mean error of plain rounding, the mean error of the written weights (left out if they are plainly
    rounded), and the error of the residual stream.
    """
    shares = {
        "rounding": [mean_error(row)[0] for row in result.layers],
        "written": [mean_error(row)[1] for row in result.layers],
        "residual stream": [row["stream"] for row in result.layers],
    }
    products = [product for row in result.layers for product in row["weights"]]
    if all(product["error"] == product["rounding"] for product in products):  # the method is plain rounding
        del shares["written"]
    return {"layers": [row["layer"] for row in result.layers], "shares": shares}


def heat(result: QuantizationResult) -> list[dict[str, Any]]:
    """Returns the rows of the heat map, one per layer. A row has the layer number and a cell for each quantized weight.

    A cell has `share`, the weight's error relative to the largest error of all weights (0 to 1). As text it has the
    error in percent, the exponent `power` of the input magnitudes in its scales, and a tooltip.
    """
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


def mean_error(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (mean error of plain rounding, mean error of the stored weights) over the weights of a layer. `row` is a
    row of `QuantizationResult.layers`.
    """
    products = row["weights"]
    rounding = sum(product["rounding"] for product in products) / len(products)
    return rounding, sum(product["error"] for product in products) / len(products)
