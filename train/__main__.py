"""`python -m bytescope.train` is the command `bytescope train`."""

import sys

from bytescope.train.commands.train_command import main
from bytescope.train.launch.signals import end_quietly

if __name__ == "__main__":
    code = main(sys.argv[1:])
    end_quietly()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
