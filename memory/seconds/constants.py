"""The fitted constants of a step's seconds: no more than five, each with what it was fitted on.

All else comes from microbenchmarks (`achieved`) or from the schedule. 1.0 says that nothing was fitted.

Fitted together by tests/bench/fit_rates.py on 28 rows of JAX (`validation`, set `jax`, quality A, bf16 and fp16):
MaxText Llama2-7B on 8 H100, Llama2-70B on 64 and 256, Pax GPT-126M, 5B and 175B on 64 and 256 A100 and H100 (2024-04),
Alpa's GPT on 1 to 8 V100; compiled by jax 0.10.2, 2026-11-22. Five of Alpa's rows are
programs of others again; of the 27 that differ, four in fp8 among them (scored, not fitted), 22 lie within 0.85 to 1.15
of the measured seconds with nothing fitted and 24 with these (median 1.04 both); without the V100's 10 and 12 of 15.
Left-out sources: MaxText 7B 0.84, Pax 9 of 10 within, dgxc 2 of 4 (fp8 1.3), Alpa 15 of 17. The bounds on MEMORY and
COLLECTIVES were set, and fp8 left out of the fit, after a first fit without them.
"""

# Seconds of products in a training step over those of the same products alone: power limits lower the clock under a
# load that lasts, and operands are seldom in the cache.
PRODUCTS = 1.03
# The same of kernels that move memory: below 1 as what one kernel wrote the next one finds in the cache, in part. Not
# below 0.87, where the largest would be faster than a data sheet says.
MEMORY = 0.874
# The same of attention kernels: those of cuDNN that were measured alone ran at a full clock.
ATTENTION = 1.208
# The same of collectives. Not below 1, where they would be faster than the links.
COLLECTIVES = 1.0
# How much longer compute takes while a collective runs: it holds cores and memory bandwidth.
SLOWDOWN = 0.139
