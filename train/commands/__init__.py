"""The commands that know the trainer's configs: one file per command.

In: parsed arguments and config overrides. Out: an exit code, with what was asked for on the terminal, in a page or in a
file. Start at `train/cli.py`, which finds the command. Each module has `add_arguments(parser)` and `run(args, ...)`.
"""
