"""Records of a quantization, its memory and its results, for JSON, and the tables that show them on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label

BAR = 24  # columns of the longest bar


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of the device and the disk that a quantization needs, known before it starts.

    Fields:
      device: program -> bytes on the device while it runs.
      limit: bytes of the device that may be used.
      folder: bytes on disk of the quantized weights.
    """

    device: Mapping[str, int]
    limit: int
    folder: int

    @property
    def peak(self) -> tuple[str, int]:
        """Pair (name of the program that needs the most device memory, bytes that it needs)."""
        return max(self.device.items(), key=lambda item: item[1])

    @property
    def line(self) -> str:
        """The line that is printed before a quantization starts."""
        name, peak = self.peak
        return f"device {human(peak)} of {human(self.limit)}, in the program '{name}'; folder {human(self.folder)}"


@dataclasses.dataclass(frozen=True)
class QuantizationResult:
    """The result of a finished quantization.

    Fields:
      title: title of the model.
      out: path of the quantized folder.
      facts: lines of text that describe the settings.
      memory: the memory that the quantization needs, computed before it started.
      components: component of the model -> (bytes in 16 bits, bytes in the folder).
      tokens: number of calibration tokens.
      layers: a row per layer. `layer` is its number. `weights` has a row per weight: `weight` is its path, `power` the
        exponent of the input magnitudes in the scales, `error` the mean square error of the outputs with the stored
        weight, and `rounding` the error of plain rounding for comparison. Both errors are fractions of the mean square
        of the outputs.
      host_memory: the host memory of this process by phase, predicted and measured.
    """

    title: str
    out: str
    facts: Sequence[str]
    memory: Memory
    components: Mapping[str, tuple[int, int]]
    tokens: int
    layers: Sequence[Mapping[str, Any]]
    host_memory: HostMemory


def result_view(result: QuantizationResult) -> RenderableType:
    """Returns the result for the terminal: bytes by component, and errors by layer."""
    sizes = FigureTable(label(), figure("16 bits"), figure("here"), figure("share"))
    whole = tuple(map(sum, zip(*result.components.values())))
    for name, (unquantized, quantized) in [*result.components.items(), ("all", whole)]:
        fraction = f"{quantized / unquantized:.0%}" if unquantized else ""
        sizes.add(name, human(unquantized), human(quantized), fraction)
    layers = FigureTable(figure("layer"), figure("rounding"), figure("here"), label())
    means = [[_mean(row, "rounding"), _mean(row, "error")] for row in result.layers]
    most = max(error for _, error in means) or 1.0
    for row, (rounding, error) in zip(result.layers, means):
        bar = "█" * max(round(BAR * error / most), 1)
        layers.add(str(row["layer"]), f"{rounding:.2%}", f"{error:.2%}", bar)
    return Group(
        Text(f"{result.out}: {result.title} in 4 bits", style="bold"),
        *map(Prose, result.facts),
        Text(),
        sizes,
        Text(),
        Prose("mean square error of a layer's matrix products, as a percentage of the mean square of the original"),
        layers,
        Prose(f"perplexity: bytescope generate {result.out} --score=TEXT"),
    )


def _mean(row: Mapping[str, Any], key: str) -> float:
    return sum(product[key] for product in row["weights"]) / len(row["weights"])
