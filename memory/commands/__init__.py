"""The subcommands of `bytescope`: one file each, arguments in, an exit code out.

In: the parsed command line, overrides of config keys and a `plan.trainer.Trainer`. Out: text on the terminal, the
files that flags ask for, and an exit code (EXIT_CODES of `memory/__main__.py`). Start at `memory/__main__.py`, which
finds the command; `arguments` has what several commands share.

To add a subcommand: a file with `add_arguments(parser)` and `run(args, overrides, trainer)`, and a row of COMMANDS in
`memory/__main__.py`.
"""
