"""Commands that need no trainer: report, explain, compare and names for any program, diff, trace, calibrate, targets.

In: the parsed command line. Out: text on the terminal, the files named by flags, and an exit code. Each command is a
file with `add_arguments(parser)` and `run(args)`; `arguments.py` contains what several commands share. `registry.py`
lists all commands, those of `train` as text.
"""
