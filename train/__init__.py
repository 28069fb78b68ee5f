"""The training loop and the program it runs. `bytescope train --help`."""
