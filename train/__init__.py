"""The training loop and the program it runs. `python -m train --help`."""
