"""Runs the `bytescope train` command for `python -m bytescope.train`."""

import sys

from bytescope.train.cli import run_process

if __name__ == "__main__":
    code = run_process(["train", *sys.argv[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
