"""Measures with jax the rates that the devices of this machine reach, in about a minute: `bytescope calibrate`.

In: jax devices of one host and a number of seconds. Out: the rates and the samples that they are computed from. Start
at `measure`; `cases` lists the measurements and builds the chain of kernels of each.
"""
