"""A quantization in the terminal: what it will take, and what it found."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.quantize.quantize_result import Memory, Result

BAR = 24  # columns of the longest bar


def memory(found: Memory) -> RenderableType:
    """The bytes, told before the work begins."""
    name, peak = found.peak
    table = FigureTable(label(), figure(), words())
    table.add("device", human(peak), f"of {human(found.limit)}; {name} takes most")
    checkpoint = f", the checkpoint {human(found.held)}" if found.held else ""
    table.add(
        "host",
        human(found.host),
        f"activations {human(found.streams)}, a layer or the tables {human(found.layer)}{checkpoint}",
    )
    table.add("folder", human(found.folder), "")
    return Group(table, Text())


def plan(title: str, found: Memory) -> RenderableType:
    """The bytes of a quantization that is not begun."""
    programs = FigureTable(label("on the device"), figure("bytes"))
    for name, size in found.device.items():
        programs.add(name, human(size))
    verdict = "fits" if found.fits else "does not fit: give a shorter --length, or a device with more memory"
    return Group(
        Text(title, style="bold"), memory(found), programs, Text(), Prose(verdict, "green" if found.fits else "red")
    )


def view(result: Result) -> RenderableType:
    """What was found."""
    sizes = FigureTable(label(), figure("16 bits"), figure("here"), figure("share"))
    whole = result.bytes
    for name, (wide, here) in [*result.components.items(), ("all", whole)]:
        sizes.add(name, human(wide), human(here), f"{here / wide:.0%}" if wide else "")
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
            "error of a layer's products, as a share of their outputs' mean square, and of the residual "
            "stream behind it"
        ),
        layers,
    )


def mean_error(row) -> tuple[float, float]:
    """(plain rounding's error, that of what was written), means over a layer's products."""
    weights = row["weights"]
    return tuple(sum(one[key] for one in weights) / len(weights) for key in ("rounding", "error"))
