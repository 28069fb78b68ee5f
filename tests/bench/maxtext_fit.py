"""Checks what `bytescope fit` promises for MaxText.

The keys that `fit` prints, compiled by MaxText's unmodified step, must give the promised bytes. The script needs an
environment with MaxText.

    python tests/bench/maxtext_fit.py                    # searches, then reports on each answer (about an hour)
    python tests/bench/maxtext_fit.py --found=DIR        # uses the searches that DIR already has as pair1.json...

Each search and each report is a process of its own. Exits with 1 if a pair does not fit or its bytes differ.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

# Model, target, and the keys that the search does not change.
PAIRS = (
    ("maxtext:llama2-7b", "h100:8", "max_target_length=4096 per_device_batch_size=2 scan_layers=true"),
    ("maxtext:llama3-8b", "h100:8", "max_target_length=8192 per_device_batch_size=2 scan_layers=true"),
    (
        "maxtext:llama3-70b",
        "h100:8x8",
        # By default, MaxText shards over the devices of a host only, and every host has the whole state.
        "max_target_length=8192 per_device_batch_size=1 scan_layers=true dcn_data_parallelism=1 dcn_fsdp_parallelism=8",
    ),
)


def run(*words: str, out: Path) -> dict:
    """Runs a command of bytescope and returns the JSON that it writes."""
    command = [sys.executable, "-m", "bytescope.memory", *words, f"--json={out}"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())["result"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--found", type=Path, help="folder with pair1.json, pair2.json... of earlier searches")
    folder = parser.parse_args().found or Path(tempfile.mkdtemp())
    wrong = 0
    for number, (model, target, given) in enumerate(PAIRS, 1):
        searched = folder / f"pair{number}.json"
        if not searched.exists():
            run("fit", model, target, *given.split(), out=searched)
        best = json.loads(searched.read_text())["result"]["best"]
        if best is None:
            print(f"{model} {target}: does not fit")
            wrong += 1
            continue
        report = run("report", model, target, *best["flags"].split(), out=folder / f"report{number}.json")
        promised, compiled = best["allocated_bytes"], report["allocated_bytes"]
        equal = promised == compiled
        print(f"{model} {target}: promised {promised:,}, compiled {compiled:,}: {'equal' if equal else 'DIFFERS'}")
        print(f"  {best['flags']}", flush=True)
        wrong += not equal
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
