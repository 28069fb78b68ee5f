"""The fitted constants of a step's seconds: no more than five, each with what it was fitted on.

All else comes from microbenchmarks (`achieved`) or from the schedule. 1.0 says that nothing was fitted.

Fitted together by tests/bench/fit_rates.py on 30 rows of JAX, 24 programs that differ for us (`validation`, set `jax`,
quality A, the newest of each source, bf16 and fp16): MaxText Llama2-7B on 8 H100, Llama2-70B on 64 to 256, Llama3.1-70B
on 256 H200, Pax GPT-126M, 5B and 175B on 64 and 256 A100 and H100 (2024-04), Alpa's GPT on 1 to 8 V100; compiled by jax
0.10.2, 2026-11-22 and 23. Within 0.85 to 1.15 of the measured seconds lie 93.8 % of the programs with nothing fitted
(median 1.00) and all with these (1.02); of the 12 that are not V100's 87.5 % (0.95) and all (1.00). With a source left
out of the fit its rows are all within (Pax 0.95, dgxc 1.01, Llama3.1-70B 1.00, Alpa 1.10) but for MaxText 7B, 0.84.
The bounds on MEMORY and COLLECTIVES were set after a first fit without them. Runs in fp8 are another program than ours
(`validation.measured_rows.refused`), left out after they had been predicted: with them it was 84.6 %.
"""

# Seconds of products in a training step over those of the same products alone: power limits lower the clock under a
# load that lasts, and operands are seldom in the cache.
PRODUCTS = 1.054
# The same of kernels that move memory: below 1 as what one kernel wrote the next one finds in the cache, in part. Not
# below 0.87, where the largest would be faster than a data sheet says.
MEMORY = 0.887
# The same of attention kernels: those of cuDNN that were measured alone ran at a full clock.
ATTENTION = 1.184
# The same of collectives. Not below 1, where they would be faster than the links.
COLLECTIVES = 1.0
# How much longer compute takes while a collective runs: it holds cores and memory bandwidth.
SLOWDOWN = 0.13
