"""Commands that need no trainer: report and compare of any program, diff, trace, calibrate, targets.

In: the parsed command line. Out: text on the terminal, the files that flags ask for, and an exit code. A command is a
file with `add_arguments(parser)` and `run(args)`; `arguments` has what several share. The registry of all commands is
train/commands/registry.py; it adds configs to report and compare.
"""
