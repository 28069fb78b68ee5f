"""Measures with jax what the devices of this machine reach, in about a minute: `bytescope calibrate`.

In: jax devices of one host and a number of seconds. Out: the rates and the samples that they are computed from. Start
at `measure`; `cases` describes one measurement and builds its chain of kernels; `kernel_cases` and `links` list the
measurements.
"""
