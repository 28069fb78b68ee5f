"""Records of a quantization, its memory and its results, for the terminal and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.records.host_record import HostMemory


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

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        fields = dataclasses.asdict(self) | {"host_memory": self.host_memory.to_json()}
        return {**fields, "perplexity": {"before": self.before, "after": self.after}}
