"""Wall time, CPU seconds and memory of bytescope's own commands on Llama 3 8B, without and with cached programs.

    python tests/bench/own_commands.py                      # all commands, two rounds
    python tests/bench/own_commands.py report compare --rounds=3 --json=FILE

Each round runs every command twice in processes of its own: cold, with an empty cache folder, and warm, with the cache
that the cold command has filled. Wall time is from the start of the process to its end; CPU seconds and the largest
resident memory of one process include its workers. Nothing else should run on the machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bytescope.memory.units import GIB

POLICIES = "none,dots,minimal,dots_no_batch,selective,full,offload,auto"
COMMANDS = {
    "report": "report llama_8b h100:8",
    "compare": f"compare llama_8b h100:8 --remat={POLICIES}",
    "fit": "fit llama_8b h100:8 --batch-tokens=4194304",
    "front": "front llama_8b h100:8",
    "levers": "levers llama_8b h100:8",
}


def timed(command: str, cache: Path) -> dict[str, float]:
    """Runs a command of bytescope with its cache in the folder `cache`. Returns seconds of wall time ("wall") and of
    the CPU ("cpu"), and bytes of the largest resident memory of one of its processes ("resident")."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    words = [str(Path(sys.executable).with_name("bytescope")), *command.split()]
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment | {"XDG_CACHE_HOME": str(cache)})
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise SystemExit(f"bytescope {command} ended with exit code {code}")
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime, "resident": used.ru_maxrss * 1024}


def cell(rounds: list[dict[str, float]]) -> str:
    """Wall time (median, range), CPU seconds and resident memory of the rounds of one command."""
    walls = [each["wall"] for each in rounds]
    cpu = statistics.median(each["cpu"] for each in rounds)
    resident = max(each["resident"] for each in rounds) / GIB
    return f"{statistics.median(walls):.1f} ({min(walls):.1f} to {max(walls):.1f}) | {cpu:.1f} | {resident:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each command, cold and warm (default: 2)")
    parser.add_argument("--json", type=Path, help="file for all measured values")
    args = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(args.rounds):
        for name in args.commands or COMMANDS:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    measured = timed(COMMANDS[name], Path(cache))
                    found.setdefault(name, {}).setdefault(state, []).append(measured)
                    print(f"round {number + 1} {name} {state} {measured['wall']:.1f} s", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores\n")
    print("| command | cache | wall s, median (range) | CPU s | resident GiB |\n|---|---|---|---|---|")
    for name, states in found.items():
        for state, rounds in states.items():
            print(f"| `{COMMANDS[name]}` | {state} | {cell(rounds)} |")


if __name__ == "__main__":
    main()
