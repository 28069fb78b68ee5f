"""The trainer: from a command line to a trained model. Start at `cli.py`, which finds the command; `program/` makes the
step that runs, `run/` runs it. train/README.md lists the folders from the lowest layer up."""
