"""The subcommands of `bytescope` that read the trainer's configs, runs or weights: one file per command.

Each command takes parsed arguments and config overrides, and returns an exit code. Its answer goes to the terminal, to
a page or to a file. `memory/cli.py` finds the command.
"""
