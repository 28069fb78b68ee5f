"""Shows a quantization on the terminal: bytes, perplexity, error by layer and by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
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


def mean_error(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (mean error of plain rounding, mean error of the stored weights) over the weights of a layer. `row` is a
    row of `QuantizationResult.layers`.
    """
    products = row["weights"]
    rounding = sum(product["rounding"] for product in products) / len(products)
    return rounding, sum(product["error"] for product in products) / len(products)
