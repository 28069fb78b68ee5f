"""The fitted constants of a step's seconds. `intervals` has the spread of predictions around measured seconds.

There are at most five constants, each with the runs on which it was fitted. Every other figure comes from
microbenchmarks (`achieved`) or from the schedule. A constant of 1.0 means that nothing was fitted.

tests/bench/validation/fit_rates.py fitted all constants together on 30 measured runs of JAX programs. They are the runs
in bf16 and fp16 of its set `jax`, quality A, only the newest run of each source: MaxText Llama2-7B on 8 H100,
Llama2-70B on 64 to 256, Llama3.1-70B on 256 H200, Pax GPT-126M, 5B and 175B on 64 and 256 A100 and H100 (2024-04), and
Alpa's GPT on 1 to 8 V100. For the predictions, jax 0.10.2 compiled them on 2026-11-22 and 23, as 24 different programs.

Percentage of these programs whose predicted seconds are 0.85 to 1.15 times the measured seconds (in parentheses: median
of predicted/measured seconds):

- all 24 programs: 93.8 % without a fit (1.00), 100 % with the constants (1.02)
- the 12 programs that are not on V100: 87.5 % without a fit (0.95), 100 % with the constants (1.00)
- programs of a source that was left out of the fit: all (Pax 0.95, dgxc 1.01, Llama3.1-70B 1.00, Alpa 1.10) except for
  MaxText 7B at 0.84

The bounds on MEMORY and COLLECTIVES were set after a first fit without them. Runs in fp8 are different programs here
and were left out after they had been predicted; with them, 84.6 % were within the
range.
"""

from __future__ import annotations

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
