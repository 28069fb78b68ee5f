"""How far predictions were from what was measured, by generation of chip: the interval that a prediction is shown with.

A row is the quantiles of predicted/measured seconds over measured runs of JAX, those that the constants were fitted on
(`bytescope validate --set=jax`, quality A, the newest of each source; jax 0.10.2, 2026-11-22 and 23), each program of
weight one. `python tests/bench/fit_rates.py --folder=DIR` prints them twice, with the constants as they are and with
constants that were fitted without the row's source; the row here is the wider end of both. Runs further away are in the
validation: rows of quality B (MaxText 7B on GCP's A3, 0.63 to 0.79; an A5000, 0.84 to 0.91; B200, 1.4), older releases
(0.77 to 1.03), eager PyTorch.
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


# Compute capability -> the spread of its generation. Four programs on A100 are too few alone: its low end is that of
# all 12 on A100, H100 and H200 (0.875 to 1.023), its high end its own.
_MEASURED: Mapping[tuple[int, int], Spread] = {
    (7, 0): Spread(0.983, 1.136, 12, "12 programs of Alpa on 1 to 8 V100"),
    (8, 0): Spread(0.875, 1.093, 12, "12 programs of MaxText and Pax on A100, H100 and H200"),
    (9, 0): Spread(0.857, 1.015, 8, "8 programs of MaxText and Pax on H100 and H200"),
}
# An assumption: twice as far on both sides, as efficiencies of another generation are carried over.
OTHERS = Spread(0.72, 1.19, 0, "no run was measured on this chip: twice the spread of H100 and A100")
# An assumption: products and copies measured by numpy say little of XLA's kernels on cores that devices share.
CPU = Spread(0.5, 2.0, 0, "assumed, for a CPU")


def of(target: Mapping[str, Any]) -> Spread:
    """The spread for a target's JSON, by its chip."""
    if target.get("platform") == "cpu":
        return CPU
    name = str(target.get("name", "")).partition(":")[0]
    chip = CHIPS.get(name) or next((chip for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    return _MEASURED.get(chip.gpu.capability, OTHERS) if chip and chip.gpu else OTHERS
