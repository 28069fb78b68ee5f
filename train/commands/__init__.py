"""The subcommands of `bytescope` that know the trainer's configs: one file per command.

In: parsed arguments and config overrides. Out: an exit code, with the answer on the terminal, in a page or in a file.
Start at `train/cli.py`, which finds the command. `completion_words.py` gathers the words of `bytescope completion`.
"""
