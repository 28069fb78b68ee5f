"""The trainer: turns a command line into a trained model. Start at `cli.py`, which finds the command; `program/`
builds the training step and `run/` runs it. train/README.md lists the folders from the lowest layer to the highest."""
