"""Turns a config and devices into the program that runs: the step, its abstract arguments and its initializer.

The path, in the order of `program.build`:

    config_files.load              file and overrides -> ConfigDict
    program_settings.read_settings ConfigDict -> Settings: typed groups, each value checked by itself
    checks.check                   Settings, devices -> Choices: mesh, kernels, batch, ..., checked together, once
    program.assemble               Choices -> Program: the traced step is checked once by step_checks.check_traced
    Program.compile_for_report     the compiled step, checked once by step_checks.check_compiled

`remat.policy=auto` is resolved between `read_settings` and `check`, by train/plan/remat_auto.py.
"""
