"""The fitted constants of a step's seconds, and the spread of predictions around measured seconds.

There are at most five constants, each with the runs on which it was fitted. Every other figure comes from
microbenchmarks (`achieved`) or from the schedule. A constant of 1.0 means that nothing was fitted.

tests/bench/fit_rates.py fitted all constants together on 30 measured runs of JAX programs. They are the runs in bf16
and fp16 of `validation`, set `jax`, quality A, only the newest run of each source: MaxText Llama2-7B on 8 H100,
Llama2-70B on 64 to 256, Llama3.1-70B on 256 H200, Pax GPT-126M, 5B and 175B on 64 and 256 A100 and H100 (2024-04), and
Alpa's GPT on 1 to 8 V100. For the predictions, jax 0.10.2 compiled them on 2026-11-22 and 23, as 24 different programs.

Percentage of these programs whose predicted seconds are 0.85 to 1.15 times the measured seconds (in parentheses: median
of predicted/measured seconds):

- all 24 programs: 93.8 % without a fit (1.00), 100 % with the constants (1.02)
- the 12 programs that are not on V100: 87.5 % without a fit (0.95), 100 % with the constants (1.00)
- programs of a source that was left out of the fit: all (Pax 0.95, dgxc 1.01, Llama3.1-70B 1.00, Alpa 1.10) except for
  MaxText 7B at 0.84

The bounds on MEMORY and COLLECTIVES were set after a first fit without them. Runs in fp8 are different programs here
(`validation.measured_rows.refused`) and were left out after they had been predicted; with them, 84.6 % were within the
range.

A spread has the quantiles of predicted/measured seconds over the same runs, where each program has the same weight.
`python tests/bench/fit_rates.py --folder=DIR` prints the quantiles with these constants, and with constants that were
fitted without the source of the predicted run. The low end of a spread is the lower one of the two, the high end the
higher one. The validation has runs with larger differences: runs of quality B (MaxText 7B on GCP's A3, 0.63 to 0.79; an
A5000, 0.84 to 0.91; B200, 1.4), older releases (0.77 to 1.03), and eager PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS, base_name

# Seconds of matrix products in a training step, divided by the seconds of the same products measured alone. Power
# limits lower the clock under a sustained load, and operands are seldom in the cache.
PRODUCTS = 1.054
# The same ratio for kernels that move memory. It is below 1, because a kernel reads part of the previous kernel's
# output from the cache. The fit limits it to at least 0.87, below which the largest kernels would exceed the data
# sheet.
MEMORY = 0.887
# The same ratio for attention kernels. cuDNN's kernels were measured alone at the full clock. The kernels in
# `achieved.ATTENTION_KERNELS` were not in the fit, and their published seconds are used unchanged.
ATTENTION = 1.184
# The same ratio for collectives. The fit limits it to at least 1, below which they would exceed the links.
COLLECTIVES = 1.0
# Relative slowdown of compute while a collective runs, which occupies cores and memory bandwidth.
SLOWDOWN = 0.13


@dataclasses.dataclass(frozen=True)
class Spread:
    """The accuracy of predictions: quantiles of predicted seconds divided by measured seconds.

    Fields:
        low, high: the quantiles at 10 % and 90 %.
        rows: number of measured programs; 0 if the quantiles are an assumption.
        source: the measured runs, or the assumption, in words.
    """

    low: float
    high: float
    rows: int
    source: str

    def around(self, seconds: float) -> tuple[float, float]:
        """Returns the (lowest, highest) measured seconds to expect for a prediction of `seconds`."""
        return seconds / self.high, seconds / self.low


# Compute capability -> the spread of its generation. The four programs on A100 are too few for a spread of their own:
# the low end is that of all 12 programs on A100, H100 and H200 (0.875 to 1.023), the high end that of A100.
_MEASURED_SPREADS: Mapping[tuple[int, int], Spread] = {
    (7, 0): Spread(0.983, 1.136, 12, "12 programs of Alpa on 1 to 8 V100"),
    (8, 0): Spread(0.875, 1.093, 12, "12 programs of MaxText and Pax on A100, H100 and H200"),
    (9, 0): Spread(0.857, 1.015, 8, "8 programs of MaxText and Pax on H100 and H200"),
}
# An assumption: twice the spread on both sides, because efficiencies of another generation are used.
ASSUMED_SPREAD = Spread(0.72, 1.19, 0, "no run was measured on this chip: twice the spread of H100 and A100")
# An assumption: products and copies measured with numpy differ from XLA's kernels on cores that several devices share.
CPU_SPREAD = Spread(0.5, 2.0, 0, "assumed, for a CPU")


def spread_of(target: Mapping[str, Any]) -> Spread:
    """Returns the accuracy of predictions for the chip of a target.

    `target`: the devices of the program, as the JSON of a Target.
    """
    if target.get("platform") == "cpu":
        return CPU_SPREAD
    name = base_name(str(target.get("name", "")))
    chip = CHIPS.get(name) or next((chip for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    return _MEASURED_SPREADS.get(chip.gpu.capability, ASSUMED_SPREAD) if chip and chip.gpu else ASSUMED_SPREAD
