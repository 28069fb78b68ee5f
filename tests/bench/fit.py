"""What a fit promises on this machine's CPU, and what training then holds: peak resident memory of the steps.

    python -m tests.bench.fit --budgets=100MiB,200MiB,400MiB [--config=tiny] [--batch-tokens=16384] [--assert]

For each budget `bytescope fit CONFIG local` finds a configuration; a fresh process compiles it, makes the
state, and gives back what compiling held. `before` is its resident memory then, less the state. Held: the highest
resident memory during the steps (VmHWM, reset before them) less `before`. With --assert held must stay within the
budget and a margin, MARGIN of it and MARGIN_BYTES: what products on a CPU pack their operands into, what the allocator
keeps beside the buffers, threads and their stacks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MARGIN, MARGIN_BYTES = 0.2, 24 * 2**20
STEPS = 4


def fit(config: str, budget: str, tokens: int) -> dict:
    """The fit's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fit.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "bytescope.memory",
                "fit",
                config,
                "local",
                f"--budget={budget}",
                f"batch.tokens={tokens}",
                f"--json={out}",
            ],
            check=False,
            stdout=sys.stderr,
        )
        return json.loads(out.read_text())["result"]


def held(config: str, keys: dict[str, str]) -> dict:
    """{"held", "before", "allocated"} in bytes of the steps of a configuration, in a process of its own."""
    words = [sys.executable, "-m", "tests.bench.fit", "--run", json.dumps([config, list(keys.items())])]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def run(config: str, keys: list) -> dict:
    """The steps themselves, here."""
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import gc

    import jax
    import numpy as np

    from bytescope.memory.analysis import report_of
    from bytescope.memory.host.process_memory import release_free_memory
    from bytescope.train.program.config_files import load
    from bytescope.train.program.program import build

    program = build(load(config, [tuple(pair) for pair in keys]))
    compilation = program.compile_for_report()
    allocated, compiled = report_of(compilation).allocated_bytes, compilation.compiled
    state = jax.block_until_ready(program.init())
    del compilation
    jax.clear_caches()
    gc.collect()
    release_free_memory()
    before = _status("VmRSS") - sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    for step in range(STEPS):
        batch = {name: np.full(array.shape, step, array.dtype) for name, array in program.batch_shapes.items()}
        for _ in range(program.calls_per_update):
            state, metrics = compiled(state, jax.device_put(batch))
    jax.block_until_ready((state, metrics))
    return {"held": _status("VmHWM") - before, "before": before, "allocated": allocated}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def main() -> int:
    """Prints the table; 1 where --assert finds a step that holds more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--budgets", default="100MiB,200MiB,400MiB")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--assert", dest="strict", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(*json.loads(args.run))))
        return 0
    rows = []
    for budget in args.budgets.split(","):
        found = fit(args.config, budget, args.batch_tokens)
        row = {"budget": found["budget_bytes"], "what": (found["best"] or found["certificate"])["what"]}
        if found["best"]:
            row |= held(args.config, found["best"]["overrides"])
        rows.append(row)
        mib = " ".join(f"{key} {row[key] / 2**20:.0f}" for key in ("budget", "allocated", "held") if key in row)
        print(f"{mib} MiB  {row['what'] if found['best'] else 'nothing fits: ' + row['what']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    over = [row for row in rows if row.get("held", 0) > row["budget"] * (1 + MARGIN) + MARGIN_BYTES]
    for row in over:
        print(f"held {row['held'] / 2**20:.0f} MiB of a budget of {row['budget'] / 2**20:.0f}", file=sys.stderr)
    return int(args.strict and bool(over))


if __name__ == "__main__":
    sys.exit(main())
