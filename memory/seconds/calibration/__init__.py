"""Measures with jax the rates that the devices of this machine reach, in about a minute (`bytescope calibrate`).

The input is the jax devices of one host and a number of seconds. The output is the rates and the samples from which
they are computed. Start at `measure`; `cases` lists the measurements and builds the chain of kernels of each.
"""
