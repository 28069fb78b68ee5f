"""Records of a quantization: the bytes that it takes and what it found, for the terminal, the page and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a quantization takes, known before it begins.

    Fields:
      device: program -> bytes on the device while it runs. limit: bytes of the device. streams: activations on the
      host. layer: one layer on the host, or the tables if they are larger. held: a run's checkpoint on the host.
      folder: the weights that are written.
    """

    device: Mapping[str, int]
    limit: int
    streams: int
    layer: int
    held: int
    folder: int

    @property
    def peak(self) -> tuple[str, int]:
        """The program that takes the most bytes, and these bytes."""
        return max(self.device.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        """Whether the largest program fits the device."""
        return self.peak[1] <= self.limit

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self.streams + self.layer + self.held


@dataclasses.dataclass(frozen=True)
class QuantizationResult:
    """A finished folder.

    Fields:
      title: of the model. facts: how the folder was made, a line each. memory: bytes that it took.
      components: name -> (bytes in 16 bits, bytes in the folder). before, after: perplexity of the held-out text, with
      the original weights and with the written ones. tokens: of the calibration text and of the held-out text.
      layers: a row for each: `layer`; `stream`, the difference of the residual stream behind the layer from the
      original's, as a share of its mean square; and `weights`, each with `weight`, the `power` of the magnitudes, its
      `error`, and the error of plain `rounding`, both as shares of the mean square of the product's output.
      versions: of the libraries.
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
        """The products of a layer, in order."""
        return [row["weight"] for row in self.layers[0]["weights"]]

    def to_json(self) -> str:
        """Returns the text of --json."""
        found = dataclasses.asdict(self)
        return json.dumps({**found, "perplexity": {"before": self.before, "after": self.after}}, indent=2) + "\n"
