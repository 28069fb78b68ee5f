"""What this machine's devices reach, measured with jax in about a minute: `bytescope calibrate`.

In: jax devices of one host and a number of seconds. Out: `Rates` and the samples that they are made of. Start at
measure.py; cases.py has what one measurement is and builds its chain of kernels; kernels.py and links.py list them.
"""
