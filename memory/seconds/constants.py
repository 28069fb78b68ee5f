"""The fitted constants of a step's seconds: no more than five, each with what it was fitted on.

All else comes from microbenchmarks (`achieved`) or from the schedule. 1.0 says that nothing was fitted.
"""

# Seconds of products in a training step over those of the same products alone: power limits lower the clock under a
# load that lasts, and operands are seldom in the cache.
PRODUCTS = 1.0
# The same of kernels that move memory: XLA's fusions beside the copies of which bandwidths were measured.
MEMORY = 1.0
# The same of attention kernels.
ATTENTION = 1.0
# The same of collectives: they share links and memory with what runs beside them, and devices begin them unevenly.
COLLECTIVES = 1.0
# How much longer compute takes while a collective runs: it holds cores and memory bandwidth.
SLOWDOWN = 0.1
