"""A config becomes the program that runs.

In: a config file with its overrides, and devices. Out: the step that runs, its abstract arguments and its initializer.
`config_files.py` reads a config, `checks.py` says which values it may contain, `choices.py` chooses mesh, kernels,
batch and remat plan, `program.py` makes the step.
"""
