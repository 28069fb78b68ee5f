"""Records of a quantization, its memory and its results, for the terminal, the page and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a quantization needs, known before it begins.

    Fields:
      device: program -> bytes on the device while it runs.
      limit: bytes of the device that may be used.
      streams: bytes of activations on the host.
      layer: host bytes of one layer, or of the tables if they are larger.
      held: host bytes of a run's checkpoint.
      folder: bytes of the weights on disk.
    """

    device: Mapping[str, int]
    limit: int
    streams: int
    layer: int
    held: int
    folder: int

    @property
    def peak(self) -> tuple[str, int]:
        """(name of the program that needs the most bytes, its bytes on the device)."""
        return max(self.device.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        """True if the largest program fits the device."""
        return self.peak[1] <= self.limit

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self.streams + self.layer + self.held


@dataclasses.dataclass(frozen=True)
class QuantizationResult:
    """The results of a finished quantization.

    Fields:
      title: title of the model. out: path of the folder. facts: lines that describe the settings. memory: bytes that
        it needed.
      components: name -> (bytes in 16 bits, bytes in the folder).
      before, after: perplexity of the held-out text with the original and with the quantized weights.
      tokens: (number of calibration tokens, number of held-out tokens).
      layers: a row per layer. `layer`: its number. `stream`: mean square difference of the residual stream after the
        layer from the original, as a fraction of the original's mean square. `weights`: a row per weight with `weight`
        (path), `power` (exponent of the magnitudes), `error` and `rounding` (errors of the stored weight and of plain
        rounding, as fractions of the mean square of the output).
      versions: versions of the libraries.
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

    @property
    def bytes(self) -> tuple[int, int]:
        """(bytes of all weights in 16 bits, bytes in the folder)."""
        return tuple(sum(sizes) for sizes in zip(*self.components.values()))

    @property
    def weights(self) -> list[str]:
        """Paths of the quantized weights of a layer, in order."""
        return [row["weight"] for row in self.layers[0]["weights"]]

    def to_json(self) -> str:
        """Returns the text of --json."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "perplexity": {"before": self.before, "after": self.after}}, indent=2) + "\n"
