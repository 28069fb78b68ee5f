"""The trainer: turns a command line into a trained model. Start at `commands/train_command.py`; `program/`
builds the training step and `run/` runs it. memory/ARCHITECTURE.md lists the folders by layer."""
