"""All that a card is measured for, in one command, one folder of results.

    python tests/gpu/everything.py --out=DIR                     # Ctrl-C, and again: it resumes
    python tests/gpu/everything.py --out=DIR --only policies sizes --peer-python=B/bin/python
    python tests/gpu/everything.py --out=DIR --dry-run           # the commands
    python tests/gpu/everything.py --out=DIR --rehearse          # small sizes, on a machine without a GPU too

Each row below is a command of its own; its output goes to DIR/NAME.txt, its figures to DIR/NAME.json where it writes
any. The first row measures the rates of the card (`bytescope calibrate`), by which later ones predict seconds beside
those that they measure. A row whose command ended (exit code 0 or 1: a bar was missed) is not run again; --again does.
Rows come in the order in which an hour of a card is best spent. Shown at the end: what each row's exit code was, how
long it took, and its bars that were missed. Exit code 1 where a row failed or missed a bar.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bytescope.memory.devices.platform import accelerator

ROOT = Path(__file__).parents[2]
PYTHON, OUT, PEER = "PYTHON", "OUT", "PEER"  # in a command: filled in when it runs
RATES = "--rates=OUT/rates.json"  # left out where the first row has written none
PYTEST = (PYTHON, "-m", "pytest", "-s", "-p", "no:cacheprovider")
LLAMA_ATTENTION = ("--precision=bf16", "--heads=32", "--groups=8", "--width=128")

# Of --rehearse: a GPT-2 that two cores train in a second.
SMALL_GPT = (
    "--config.model.n_layers=1",
    "--config.model.unroll=1",
    "--config.model.d_model=64",
    "--config.model.n_heads=1",
    "--config.model.n_kv_heads=1",
    "--config.model.d_ff=128",
    "--config.model.vocab_size=512",
    "--config.data.seq_len=128",
    "--config.batch.micro=2",
    "--config.batch.accumulation=1",
    "--config.precision.preset=fp32",
)

ROWS: Mapping[str, tuple[str, ...]] = {
    "rates": (PYTHON, "-m", "bytescope.memory", "calibrate", "--out=OUT/rates.json"),
    "card": (PYTHON, "tests/gpu/card.py"),
    # 42 rows in 12 minutes on 16 cores and an H100; tables.py compares them with predictions without a GPU.
    "policies": (
        PYTHON,
        "tests/gpu/accuracy.py",
        "--grid=policies",
        "--jobs=8",
        "--keep=OUT/reports",
        "--trace=OUT/traces",
        "--out=OUT/policies.jsonl",
    ),
    "kernels": (*PYTEST, "tests/gpu/test_kernels.py", "tests/gpu/test_experts.py", "tests/gpu/test_peak.py"),
    "sizes": (PYTHON, "tests/bench/sizes.py", "--out=OUT/sizes", "--peer-python=PEER", "--json=OUT/sizes.json"),
    "speed": (PYTHON, "tests/bench/speed.py", "--config=gpt2_small", "--keep", "--json=OUT/speed.json"),
    "attention": (
        PYTHON,
        "tests/bench/attention.py",
        *LLAMA_ATTENTION,
        "--lengths",
        "1024",
        "4096",
        "16384",
        "65536",
        "--json=OUT/attention.json",
        "--assert",
    ),
    "experts": (PYTHON, "tests/bench/experts.py", "--layer=mixtral", "--json=OUT/experts.json", "--assert"),
    "loss": (
        PYTHON,
        "tests/bench/loss.py",
        "--tokens=32768",
        "--vocab=131072",
        "--d-model=4096",
        "--precision=bf16",
        "--chunks",
        "2048",
        "4096",
        "8192",
        "--json=OUT/loss.json",
        "--assert",
    ),
    "remat": (
        PYTHON,
        "tests/bench/remat.py",
        "--config=gpt2_small",
        "--config.batch.micro=16",
        "--config.batch.accumulation=1",
        "--json=OUT/remat.json",
    ),
    "accumulation": (
        PYTHON,
        "tests/bench/accumulation.py",
        "--config=gpt2_small",
        "--json=OUT/accumulation.json",
        "--assert",
    ),
    "auto": (*PYTEST, "tests/gpu/test_auto.py"),
    "scan": (PYTHON, "tests/bench/scan.py", "--config=gpt2_small", "--json=OUT/scan.json"),
    "profile": (
        PYTHON,
        "-m",
        "bytescope.memory",
        "train",
        "tiny",
        "--profile=3",
        "--config.train.steps=20",
        "--config.train.sample_tokens=0",
        "--config.train.eval_every=0",
        "--workdir=OUT/profile",
        RATES,
    ),
    "trace": (
        PYTHON,
        "-m",
        "bytescope.memory",
        "report",
        "OUT/profile/memory.json",
        "--trace=OUT/profile/profile",
        "--json=OUT/trace.json",
        RATES,
    ),
    "seconds": (
        PYTHON,
        "-m",
        "bytescope.memory",
        "compare",
        "--grid=config=gpt2_small,llama_1b",
        "--remat=none,selective,full",
        "--config.precision.preset=bf16",
        "--measure",
        "--json=OUT/seconds.json",
        RATES,
    ),
    "startup": (PYTHON, "tests/bench/startup.py", "--config=tiny", "--target=h200", "--json=OUT/startup.json"),
    "frontier": (PYTHON, "tests/gpu/frontier.py", "--out=OUT/frontier.jsonl"),
    "accuracy": (PYTHON, "tests/gpu/accuracy.py", "--out=OUT/accuracy.jsonl"),
    "overheads": (PYTHON, "tests/gpu/accuracy.py", "--calibrate", "--out=OUT/accuracy.jsonl"),
}
ENDED = (0, 1)

TINY = ("--config=tiny", "--rounds=1", "--steps=1")
# What --rehearse runs in the place of a row: the same script with small sizes. The other rows run as they are; tests of
# a GPU are skipped where there is none.
REHEARSED: Mapping[str, tuple[str, ...]] = {
    "rates": (*ROWS["rates"], "--seconds=5"),
    "policies": (
        PYTHON,
        "tests/gpu/accuracy.py",
        "--grid=policies",
        "--only",
        "tiny",
        "--jobs=2",
        *ROWS["policies"][4:],
    ),
    "sizes": (*ROWS["sizes"], "--sizes", "124M", "--rounds=1", "--steps=1", "--eager", *SMALL_GPT),
    "speed": (PYTHON, "tests/bench/speed.py", *TINY, "--levers", "layers", "--json=OUT/speed.json"),
    "attention": (PYTHON, "tests/bench/attention.py", "--lengths", "256", "--rounds=1", "--json=OUT/attention.json"),
    "experts": (PYTHON, "tests/bench/experts.py", "--tokens=256", "--rounds=1", "--json=OUT/experts.json"),
    "loss": (
        PYTHON,
        "tests/bench/loss.py",
        "--tokens=256",
        "--vocab=512",
        "--large-tokens=512",
        "--large-vocab=1024",
        "--chunks",
        "128",
        "--rounds=1",
        "--json=OUT/loss.json",
    ),
    "remat": (PYTHON, "tests/bench/remat.py", *TINY, "--policies", "none", "full", "--json=OUT/remat.json"),
    "accumulation": (PYTHON, "tests/bench/accumulation.py", *TINY, "--json=OUT/accumulation.json"),
    "scan": (
        PYTHON,
        "tests/bench/scan.py",
        "--layers",
        "2",
        "4",
        "--no-unrolled",
        "--rounds=1",
        "--json=OUT/scan.json",
    ),
    "seconds": (
        PYTHON,
        "-m",
        "bytescope.memory",
        "compare",
        "tiny",
        "local",
        "--remat=none,full",
        "--measure",
        "--json=OUT/seconds.json",
        RATES,
    ),
    "startup": (*ROWS["startup"], "--rounds=1"),
    "frontier": (*ROWS["frontier"], "--toy", "--ladder=context", "--steps=2"),
    "accuracy": (PYTHON, "tests/gpu/accuracy.py", "--grid=policies", "--only", "char", "--out=OUT/accuracy.jsonl"),
}


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of a row: exit code, seconds."""

    code: int
    seconds: float


def command_of(name: str, out: Path, peer: str, rehearsed: bool = False) -> list[str]:
    """The row's command, its places filled in; `rehearsed`: with small sizes."""
    words = REHEARSED.get(name, ROWS[name]) if rehearsed else ROWS[name]
    known = (out / "rates.json").exists() or not out.exists()  # a dry run shows the flag
    return [
        word.replace(PYTHON, sys.executable).replace(OUT, str(out)).replace(PEER, peer)
        for word in words
        if known or word != RATES
    ]


def run(name: str, out: Path, peer: str, rehearsed: bool = False) -> Done:
    """Runs a row, its output on the screen and in DIR/NAME.txt."""
    began = time.monotonic()
    with (
        (out / f"{name}.txt").open("w") as file,
        subprocess.Popen(
            command_of(name, out, peer, rehearsed),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
    return Done(process.returncode, time.monotonic() - began)


def missed(out: Path, name: str) -> list[str]:
    """The bars that a row's JSON says were not held."""
    try:
        checks = json.loads((out / f"{name}.json").read_text())["checks"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        f"{check['name']}: {check['value']:.3g}, at most {check['limit']:g}"
        for check in checks
        if check["limit"] is not None and not check["value"] <= check["limit"]
    ]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="results go there")
    flags.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    flags.add_argument("--peer-python", default=sys.executable, help="interpreter that has PyTorch")
    flags.add_argument("--again", action="store_true", help="run what is done already, too")
    flags.add_argument(
        "--rehearse", action="store_true", help="run every row with small sizes; without a GPU, all but card"
    )
    flags.add_argument("--dry-run", action="store_true", help="print the commands")
    asked = flags.parse_args()
    out = asked.out.resolve()
    if asked.rehearse and accelerator() != "cuda":
        asked.only = [name for name in asked.only if name != "card"]
    if asked.dry_run:
        print("\n".join(" ".join(command_of(name, out, asked.peer_python, asked.rehearse)) for name in asked.only))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    ledger = out / "done.json"
    done = (
        {}
        if asked.again or not ledger.exists()
        else {name: Done(**row) for name, row in json.loads(ledger.read_text()).items()}
    )
    try:
        for name in asked.only:
            if name in done and done[name].code in ENDED:
                continue
            print(f"== {name}", flush=True)
            done[name] = run(name, out, asked.peer_python, asked.rehearse)
            ledger.write_text(json.dumps({key: dataclasses.asdict(row) for key, row in done.items()}, indent=1))
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        return 130
    print(f"\n{'row':14} {'exit':>4} {'minutes':>8}")
    for name in asked.only:
        print(f"{name:14} {done[name].code:>4} {done[name].seconds / 60:>8.1f}  {'; '.join(missed(out, name))}")
    return int(any(done[name].code or missed(out, name) for name in asked.only))


if __name__ == "__main__":
    sys.exit(main())
