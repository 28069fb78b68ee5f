"""Trains six small configs on this CPU, and predicts the step time of each from the other five.

    python tests/bench/six_runs.py [--assert]

For each config, `bytescope calibrate --runs` corrects the rates of the CPU by the five other runs, and predicts
the sixth with them. Printed: its interval and its measured seconds. The interval is meant for four of
five runs; on a busy machine, whose load changes between the runs, it may hold for fewer. --assert: exit code 1 if it
holds for fewer than four of the six. Takes about two minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bytescope.memory.records.result_envelope import unwrap

_CLI = "import sys; from bytescope.memory import cli; sys.exit(cli.main(sys.argv[1:]))"
# (width, layers, micro-batch, tokens per sequence)
SHAPES = {
    "a": (64, 4, 16, 64),
    "b": (64, 8, 8, 64),
    "c": (128, 2, 8, 64),
    "d": (32, 4, 32, 64),
    "e": (128, 2, 4, 128),
    "f": (96, 4, 8, 64),
}
SETTINGS = {
    "train.steps": 30,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 8,
    "train.checkpoint_every": 0,
    "train.sample_tokens": 0,
}


def keys_of(width: int, layers: int, micro: int, length: int) -> dict[str, object]:
    """Returns the config keys of a shape in `SHAPES`."""
    heads = width // 32
    return {
        "model.d_model": width,
        "model.n_heads": heads,
        "model.n_kv_heads": heads,
        "model.d_ff": 3 * width,
        "model.n_layers": layers,
        "batch.micro": micro,
        "data.seq_len": length,
        **SETTINGS,
    }


def main() -> int:
    """Runs the commands in a temporary folder. Returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder / 'cache'}", "JAX_NUM_CPU_DEVICES": "1"}

        def bytescope(*words: str) -> None:
            command = (sys.executable, "-c", _CLI, *words)
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

        for config, shape in SHAPES.items():
            words = [f"--config.{key}={value}" for key, value in keys_of(*shape).items()]
            bytescope("train", "tiny", f"--workdir=runs/{config}", *words)
        bytescope("calibrate", "--seconds=20", "--out=cpu.json")
        held = 0
        print("config  interval, ms            measured, ms  within")
        for sixth in SHAPES:
            others = ",".join(f"runs/{config}" for config in SHAPES if config != sixth)
            bytescope("calibrate", f"--runs={others}", "--rates=cpu.json", "--out=rates.json")
            bytescope("calibrate", f"--runs=runs/{sixth}", "--rates=rates.json", "--json=v.json")
            (row,) = unwrap(json.loads((folder / "v.json").read_text()), "calibrate")["runs"]["rows"]
            seconds = (row["prediction"]["low"], row["run"]["seconds"], row["prediction"]["high"])
            low, measured, high = (1e3 * each for each in seconds)
            held += low <= measured <= high
            print(f"{sixth:6}  {low:8.3g} to {high:8.3g}  {measured:12.3g}  {low <= measured <= high}")
    print(f"{held} of {len(SHAPES)} within their interval")
    return int("--assert" in sys.argv and held < 4)


if __name__ == "__main__":
    sys.exit(main())
