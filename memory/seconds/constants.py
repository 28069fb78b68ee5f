"""The fitted constants of a step's seconds, and the spread of predictions around measured seconds.

There are no more than five constants, each with the rows that it was fitted on. Every other figure comes from
microbenchmarks (`achieved`) or from the schedule. 1.0 means that nothing was fitted.

tests/bench/fit_rates.py fitted them together on 30 rows of JAX, 24 programs that differ for us (`validation`, set
`jax`, quality A, the newest of each source, bf16 and fp16): MaxText Llama2-7B on 8 H100, Llama2-70B on 64 to 256,
Llama3.1-70B on 256 H200, Pax GPT-126M, 5B and 175B on 64 and 256 A100 and H100 (2024-04), Alpa's GPT on 1 to 8 V100;
compiled by jax 0.10.2, 2026-11-22 and 23. Without a fit 93.8 % of the programs are within 0.85 to 1.15 of the measured
seconds (median 1.00); with these constants all are (1.02). Of the 12 that are not on V100 it is 87.5 % (0.95) and all
(1.00). If a source is left out of the fit, its rows are all within (Pax 0.95, dgxc 1.01, Llama3.1-70B 1.00, Alpa 1.10)
except for MaxText 7B, 0.84. The bounds on MEMORY and COLLECTIVES were set after a first fit without them. Runs in fp8
are another program than ours (`validation.measured_rows.refused`) and were left out after they had been predicted: with
them it was 84.6 %.

A row of the spread has the quantiles of predicted/measured seconds over the same runs, each program of weight one.
`python tests/bench/fit_rates.py --folder=DIR` prints them twice: with the constants as they are, and with constants
that were fitted without the row's source; the row has the wider end of both. Runs further away are in the validation:
rows of quality B (MaxText 7B on GCP's A3, 0.63 to 0.79; an A5000, 0.84 to 0.91; B200, 1.4), older releases (0.77 to
1.03), eager PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS

# Seconds of products in a training step over those of the same products alone: power limits lower the clock under a
# sustained load, and operands are seldom in the cache.
PRODUCTS = 1.054
# The same ratio of kernels that move memory: below 1, because a kernel finds part of the previous kernel's output in
# the cache. Its minimum is 0.87, where the largest kernels would be faster than a data sheet says.
MEMORY = 0.887
# The same ratio of attention kernels: those of cuDNN that were measured alone ran at a full clock.
ATTENTION = 1.184
# The same ratio of collectives. Its minimum is 1: below, they would be faster than the links.
COLLECTIVES = 1.0
# Relative slowdown of compute while a collective runs, which occupies cores and memory bandwidth.
SLOWDOWN = 0.13


@dataclasses.dataclass(frozen=True)
class Spread:
    """Quantiles of predicted/measured seconds: `low` at 10 %, `high` at 90 %, over `rows` programs; 0 rows:
    assumed."""

    low: float
    high: float
    rows: int
    source: str

    def around(self, seconds: float) -> tuple[float, float]:
        """(min, max) seconds to expect for a prediction of `seconds`."""
        return seconds / self.high, seconds / self.low


# Compute capability -> the spread of its generation. Four programs on A100 are too few: its low end is that of all 12
# on A100, H100 and H200 (0.875 to 1.023), its high end its own.
_MEASURED_SPREADS: Mapping[tuple[int, int], Spread] = {
    (7, 0): Spread(0.983, 1.136, 12, "12 programs of Alpa on 1 to 8 V100"),
    (8, 0): Spread(0.875, 1.093, 12, "12 programs of MaxText and Pax on A100, H100 and H200"),
    (9, 0): Spread(0.857, 1.015, 8, "8 programs of MaxText and Pax on H100 and H200"),
}
# An assumption: twice as far on both sides, because efficiencies of another generation are used.
ASSUMED_SPREAD = Spread(0.72, 1.19, 0, "no run was measured on this chip: twice the spread of H100 and A100")
# An assumption: products and copies measured by numpy say little about XLA's kernels on cores that devices share.
CPU_SPREAD = Spread(0.5, 2.0, 0, "assumed, for a CPU")


def spread_of(target: Mapping[str, Any]) -> Spread:
    """The spread for a target's JSON, by its chip."""
    if target.get("platform") == "cpu":
        return CPU_SPREAD
    name = str(target.get("name", "")).partition(":")[0]
    chip = CHIPS.get(name) or next((chip for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    return _MEASURED_SPREADS.get(chip.gpu.capability, ASSUMED_SPREAD) if chip and chip.gpu else ASSUMED_SPREAD
