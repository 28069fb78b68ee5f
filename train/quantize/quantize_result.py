"""Records of a quantization, its memory and its results, for JSON, and the tables that show them on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words

BAR = 24  # columns of the longest bar


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a quantization needs, known before it starts.

    Fields:
      device: program -> bytes on the device while it runs.
      limit: bytes of the device that may be used.
      streams: host bytes of the activations between two layers, of all calibration and held-out text.
      layer: host bytes of one layer, or of the parameters outside the layers if those are larger.
      held: host bytes of a run's checkpoint that stay in memory.
      folder: bytes on disk of the quantized weights.
    """

    device: Mapping[str, int]
    limit: int
    streams: int
    layer: int
    held: int
    folder: int

    @property
    def peak(self) -> tuple[str, int]:
        """Pair (name of the program that needs the most device memory, bytes that it needs)."""
        return max(self.device.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        """True if every program fits in the memory of the device."""
        return self.peak[1] <= self.limit

    @property
    def host(self) -> int:
        """Bytes of host memory that the quantization needs: activations, one layer, and the checkpoint data that stay
        loaded."""
        return self.streams + self.layer + self.held


@dataclasses.dataclass(frozen=True)
class QuantizationResult:
    """The result of a finished quantization.

    Fields:
      title: title of the model.
      out: path of the quantized folder.
      facts: lines of text that describe the settings.
      memory: the memory that the quantization needs, computed before it started.
      components: component of the model -> (bytes in 16 bits, bytes in the folder).
      before, after: perplexity of the held-out text with the original and with the quantized weights.
      tokens: (number of calibration tokens, number of held-out tokens).
      layers: a row per layer. `layer` is its number. `stream` is the mean square error of the residual stream after the
        layer, as a fraction of the original's mean square. `weights` has a row per weight: `weight` is its path,
        `power` the exponent of the input magnitudes in the scales, `error` the mean square error of the outputs with
        the stored weight, and `rounding` the error of plain rounding for comparison. Both errors are fractions of the
        mean square of the outputs.
      versions: name of a library -> its version.
      host_memory: the host memory of this process by phase, predicted and measured.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("perplexity",)

    title: str
    out: str
    facts: Sequence[str]
    memory: Memory
    components: Mapping[str, tuple[int, int]]
    before: float
    after: float
    tokens: tuple[int, int]
    layers: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    host_memory: HostMemory

    @property
    def bytes(self) -> tuple[int, int]:
        """Pair (bytes of all weights in 16 bits, bytes of all weights in the quantized folder)."""
        return tuple(sum(sizes) for sizes in zip(*self.components.values()))

    @property
    def perplexity(self) -> dict[str, float]:
        """Perplexity of the held-out text, `before` and `after`."""
        return {"before": self.before, "after": self.after}


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
