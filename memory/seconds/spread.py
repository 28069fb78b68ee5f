"""How far predictions were from what was measured, by generation of chip: the interval that a prediction is shown with.

A row is the quantiles of predicted/measured seconds over measured runs. Its figures are those of `bytescope validate`,
and until that has run over all sets they rest on the few rows that `source` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class Spread:
    """Quantiles of predicted/measured seconds: `low` of 10 %, `high` of 90 %, over so many `rows`; 0 rows: assumed."""

    low: float
    high: float
    rows: int
    source: str

    def around(self, seconds: float) -> tuple[float, float]:
        """(least, most) seconds that are to be expected where so many are predicted."""
        return seconds / self.high, seconds / self.low


# Ratios 0.83 (MaxText Llama2-7B), 0.90, 0.94, 0.94, 0.98, 1.00, 1.09 and 1.20 (Pax GPT-126M and 5B) on 8 to 256 H100
# and A100 (JAX-Toolbox, 2024), with nothing fitted; the quantiles between the rows beside them. Pax GPT-175B is left
# out: with the remat that is stated of it it needs 264 GiB a device.
_FIRST = Spread(0.88, 1.12, 8, "eight runs of MaxText and Pax on H100 and A100")
# Compute capability -> the spread of its generation.
_MEASURED: Mapping[tuple[int, int], Spread] = {(8, 0): _FIRST, (9, 0): _FIRST}
# An assumption: twice as far on both sides, as efficiencies of another generation are carried over.
OTHERS = Spread(0.76, 1.24, 0, "no run was measured on this chip: twice the spread of H100 and A100")
# An assumption: products and copies measured by numpy say little of XLA's kernels on cores that devices share.
CPU = Spread(0.5, 2.0, 0, "assumed, for a CPU")


def of(target: Mapping[str, Any]) -> Spread:
    """The spread for a target's JSON, by its chip."""
    if target.get("platform") == "cpu":
        return CPU
    name = str(target.get("name", "")).partition(":")[0]
    chip = CHIPS.get(name) or next((chip for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    return _MEASURED.get(chip.gpu.capability, OTHERS) if chip and chip.gpu else OTHERS
