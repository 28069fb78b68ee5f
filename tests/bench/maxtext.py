"""MaxText's models on described GPUs: every remat policy with its verdict, and the smallest state where nothing fits.

    python tests/bench/maxtext.py llama2-7b llama3-8b --target=h100:8     # MaxText installed beside bytescope
    python tests/bench/maxtext.py                                         # all models and targets, ten minutes

Prints Markdown tables for tests/bench/RESULTS.md. One sequence per device, cuDNN's attention, MaxText's defaults
otherwise. If no policy fits, the levers that shrink the state are compiled with the policy `full`, each alone and then
all together. Compiled programs come from the cache of `bytescope compare` where their sources are the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bytescope.memory.units import GIB

# Model -> length of a sequence in tokens.
MODELS = {"llama2-7b": 4096, "llama3-8b": 8192, "mixtral-8x7b": 4096, "llama3-70b": 8192}
TARGETS = ("h100:8", "h100:8x8")
# Keys that shrink the state or its copies. The first needs several hosts.
OVER_HOSTS = "dcn_fsdp_parallelism=8 dcn_data_parallelism=1"
LEVERS = (
    *(OVER_HOSTS, "param_scan_axis=0", "mu_dtype=bfloat16", "weight_dtype=bfloat16"),
    "optimizer_memory_host_offload=true",
)


def compared(model: str, target: str, *words: str) -> dict:
    """The JSON of `bytescope compare` for a model, with more words of its command line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compare.json")
        size = (f"max_target_length={MODELS[model]}", "per_device_batch_size=1")
        command = ["-m", "bytescope.memory", "compare", f"maxtext:{model}", target, *size, *words, f"--json={file}"]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if not file.exists():  # no row could be compiled
            return {"rows": [], "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        return json.loads(file.read_text())["result"]


def cells(name: str, row: dict) -> str:
    """A row of the Markdown table: verdict, GiB, recomputation and predicted seconds of one program."""
    if row["status"] != "ok":
        return f"| {name} | {row['status'][:80]} | | | | |"
    verdict = "fits" if row["fits"] else "exceeds"
    star, recomputed = " ★" if row["pareto"] else "", row["recompute_flops_fraction"] or 0
    sizes = f"{row['allocated_bytes'] / GIB:.2f} | {row['temp_bytes'] / GIB:.2f}"
    return f"| {name}{star} | {verdict} | {sizes} | {recomputed:.1%} | {row['predicted_seconds'] or 0:.3f} |"


def show(model: str, target: str) -> None:
    """Prints the table of a model on a target, and the levers if no policy fits."""
    found = compared(model, target, "--remat=all")
    rows = found["rows"]
    print(f"\n**{model}, {MODELS[model]:,} tokens, {target}**\n")
    if not rows:
        print(found["error"], flush=True)
        return
    print("| policy | verdict | allocated GiB | temp GiB | recomputed | predicted s |\n|---|---|---|---|---|---|")
    for row in rows:
        print(cells(row["overrides"]["remat_policy"], row), flush=True)
    if not any(row["fits"] for row in rows):
        levers = [lever for lever in LEVERS if "x" in target.partition(":")[2] or lever != OVER_HOSTS]
        for words in (*levers, " ".join(levers)):
            for row in compared(model, target, *words.split(), "--remat=full")["rows"]:
                print(cells(f"full {words}", row), flush=True)
    print(f"\n{', '.join(f'{name} {number}' for name, number in found['versions'].items())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--target", action="append", help=f"devices (default: {' and '.join(TARGETS)})")
    args = parser.parse_args()
    for target in args.target or TARGETS:
        for model in args.models or MODELS:
            show(model, target)


if __name__ == "__main__":
    main()
