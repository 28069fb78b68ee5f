"""Runs `python -m bytescope.memory COMMAND` as `bytescope COMMAND`. `worker` starts a worker process of `compare`.

The commands are registered in memory/commands/registry.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

# The internal command by which `compare` starts its worker processes, and the word before a command of `bytescope mcp`.
WORKER, SERVED = "worker", "served"


def main(argv: Sequence[str]) -> int:
    """Runs the command given by the command-line arguments and returns its exit code."""
    if list(argv) == [WORKER]:
        from bytescope.memory.compare import worker

        worker.main()
        return 0
    from bytescope.memory import cli

    return cli.main(argv)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == [SERVED]:  # the command ends with the server
        from bytescope.memory.processes import end_with_parent

        end_with_parent(signal.SIGTERM)
        words = words[1:]
    if words == [WORKER]:
        sys.exit(main(words))
    from bytescope.memory.cli import supervised

    code = supervised(words)
    sys.stdout.flush()
    sys.exit(code)
