"""What a quantization took and found, for the terminal, the page and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes, known before the work begins.

    Fields:
      device: program -> on the device while it runs. limit: of the device. streams: activations on the host. layer: of
      one layer on the host, or of the tables where they are more. held: of a run's checkpoint on the host. folder: of
      the weights that are written.
    """

    device: Mapping[str, int]
    limit: int
    streams: int
    layer: int
    held: int
    folder: int

    @property
    def peak(self) -> tuple[str, int]:
        """The program that takes most, and its bytes."""
        return max(self.device.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak[1] <= self.limit

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self.streams + self.layer + self.held


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished folder.

    Fields:
      title: of the model. facts: how it was made, a line each. memory: what it took. components: name -> (bytes in 16
      bits, bytes in the folder). before, after: perplexity of the held-out text. tokens: of the calibration and of the
      held-out text. layers: a row each: `layer`, `stream`, the share of the residual stream behind it that differs from
      the original's, and `weights`, each with `weight`, `power` of the magnitudes, `error` and that of plain `rounding`
      as shares of the mean square of the product's output. versions: of the libraries.
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
        """(of all weights in 16 bits, of those in the folder)."""
        return tuple(sum(sizes) for sizes in zip(*self.components.values()))

    @property
    def weights(self) -> list[str]:
        """The products of a layer, in order."""
        return [row["weight"] for row in self.layers[0]["weights"]]

    def to_json(self) -> str:
        """For --json."""
        found = dataclasses.asdict(self)
        return json.dumps({**found, "perplexity": {"before": self.before, "after": self.after}}, indent=2) + "\n"
