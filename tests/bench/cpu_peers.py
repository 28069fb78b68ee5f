"""Our training step on a CPU beside PyTorch (eager and compiled), MaxText and nanodo, in turn, on the same batches.

    python tests/bench/cpu_peers.py 10m --python=PYTHON --torch-python=PYTHON --maxtext-python=PYTHON
    python tests/bench/cpu_peers.py 124m --sides=ours,compiled,maxtext-minimal --rounds=3 --json=FILE
    python tests/bench/cpu_peers.py 10m --sides=ours,nanodo --nanodo-python=PYTHON --nanodo=FOLDER

One model on all sides: Llama's layers (RMSNorm, SwiGLU, rotary positions), tied embeddings, float32, AdamW without
weight decay, gradients clipped to norm 1, constant learning rate. PyTorch and MaxText start from our first parameters,
so their losses must be equal to ours, up to rounding. nanodo's model cannot be chosen: LayerNorm, GELU and learned
positions, with the same number of parameters in its layers; its losses are not compared.

PyTorch has fused products and the fused optimizer (torch_peer.py); MaxText runs with three settings, and each is
printed. Each side is a process of its own that stays alive, with an interpreter of its own, so that a side's memory has
no packages of another side. Printed: CPU seconds of all threads and wall time of a step (medians over the rounds), the
ratio of ours to each peer, round by round (median, range), peak resident memory during the steps and since the process
started, and the largest relative difference of the losses. --profile adds one traced step of each side with
jax: seconds of its instructions by kind, summed over the threads. --assert: exit code 1 if our CPU seconds are
above 0.85 or our resident memory during the steps is above 0.9 of the fastest peer's, or if a loss differs by more than
1e-4.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from interleave import Check, Child, finish, mib, parser

TIME, MEMORY, LOSS = 0.85, 0.9, 1e-4  # limits of --assert: CPU seconds, resident memory, relative difference of a loss
LEARNING_RATE = 3e-4


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch: width, layers, heads of 64, width of the MLP, vocabulary, tokens of a sequence, rows."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    vocab_size: int
    seq_len: int
    rows: int


SIZES = {
    "10m": Size(384, 6, 6, 1024, 256, 256, 12),
    "124m": Size(768, 12, 12, 2048, 50304, 512, 2),
}
# Settings of MaxText: name of the side -> keys. `none` is not among them: MaxText 0.2.5 then recomputes as with `full`.
MAXTEXT = {
    "maxtext-full": {"remat_policy": "full", "scan_layers": True},
    "maxtext-minimal": {"remat_policy": "minimal", "scan_layers": True},
    "maxtext-unrolled": {"remat_policy": "minimal", "scan_layers": False},
}
SIDES = ("ours", "eager", "compiled", *MAXTEXT)


def ours_flags(size: Size) -> list[str]:
    """The config of our side: `char`, a config for CPUs, with the model of `size`."""
    model = dataclasses.asdict(size) | {"n_kv_heads": size.n_heads, "d_head": 64, "max_seq_len": size.seq_len}
    model |= {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "norm_eps": 1e-5}
    keys = {f"model.{key}": value for key, value in model.items() if key not in ("seq_len", "rows")}
    keys |= {"data.seq_len": size.seq_len, "batch.micro": size.rows, "optimizer.weight_decay": 0.0}
    keys |= {"optimizer.learning_rate": LEARNING_RATE, "optimizer.b2": 0.95, "optimizer.end_fraction": 1.0}
    keys |= {"optimizer.warmup_steps": 0, "model.tie_embeddings": True, "model.rope_theta": 10_000.0}
    return ["--config=char", *(f"--config.{key}={value}" for key, value in keys.items())]


def torch_flags(size: Size, compiled: bool) -> list[str]:
    """The flags of torch_peer.py for the model of `size`."""
    flags = {
        **{key: value for key, value in dataclasses.asdict(size).items() if key != "rows"},
        **{"n_kv_heads": size.n_heads, "d_head": 64, "max_seq_len": size.seq_len, "micro": size.rows},
        **{"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": 0, "tie_embeddings": 1},
        **{"learning_rate": LEARNING_RATE, "warmup_steps": 0, "end_fraction": 1.0, "b2": 0.95, "weight_decay": 0.0},
        "compile": int(compiled),
    }
    return [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]


def command(side: str, size: Size, asked: argparse.Namespace, saved: str) -> tuple:
    """Interpreter, script, arguments and environment of a side."""
    numbers = [f"--{key.replace('_', '-')}={value}" for key, value in dataclasses.asdict(size).items()]
    numbers.append(f"--learning-rate={LEARNING_RATE}")
    cpu = {"JAX_PLATFORMS": "cpu"}
    if side == "ours":
        return asked.python, "ours.py", [*ours_flags(size), f"--save={saved}"], cpu
    if side in ("eager", "compiled"):
        return asked.torch_python, "torch_peer.py", [*torch_flags(size, side == "compiled"), f"--load={saved}"]
    if side == "nanodo":
        return asked.nanodo_python, "nanodo_peer.py", [*numbers, f"--source={asked.nanodo}"], cpu
    keys = [f"{key}={value}" for key, value in MAXTEXT[side].items()]
    return asked.maxtext_python, "maxtext_peer.py", [*numbers, f"--load={saved}", *keys], cpu


def measure(size: Size, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs all sides in turn. Returns side -> its first answer ("ready") and the answers of all rounds ("turns")."""
    sides: dict[str, Child] = {}
    turns: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        saved = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "params.npz")
        for side in asked.sides:
            print(f"starting {side}", file=sys.stderr, flush=True)
            sides[side] = stack.enter_context(Child(*command(side, size, asked, saved)))
        for number in range(asked.rounds):
            for side, child in sides.items():
                child(asked.steps)
                turns.setdefault(side, []).append(child.last)
                print(f"round {number + 1} of {asked.rounds}: {side}", file=sys.stderr, flush=True)
        found = {side: {"ready": child.ready, "turns": turns[side]} for side, child in sides.items()}
        for side in sides if asked.profile else ():
            if side not in ("eager", "compiled"):
                found[side]["kinds"] = sides[side].profile()
    return found


def seconds(found: dict[str, Any], key: str) -> list[float]:
    """A round's seconds of a step: "cpu" of all threads, or median "wall"."""
    return [turn["cpu_s"] if key == "cpu" else statistics.median(turn["seconds"]) for turn in found["turns"]]


def by_rounds(ours: list[float], peer: list[float]) -> str:
    """The ratio of ours to a peer by rounds: median and range."""
    ratios = [a / b for a, b in zip(ours, peer)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def row(side: str, found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """One line of the table."""
    here, ours = found[side], found["ours"]
    cpu, wall = seconds(here, "cpu"), seconds(here, "wall")
    pairs = [(a["loss"], b["loss"]) for a, b in zip(here["turns"], ours["turns"])]
    loss = "other model" if side == "nanodo" else f"{max(abs(a - b) / b for a, b in pairs):.1e}"
    library = "torch" if side in ("eager", "compiled") else "jax"
    return {
        "side": side,
        "parameters": f"{here['ready']['parameters']:,}",
        "CPU s": f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
        "ours by it": by_rounds(seconds(ours, "cpu"), cpu),
        "wall s": f"{statistics.median(wall):.2f}",
        "ours by it, wall": by_rounds(seconds(ours, "wall"), wall),
        "resident MiB, steps": mib(max(turn["step_peak_bytes"] for turn in here["turns"])),
        "since start": mib(here["turns"][-1]["peak_bytes"]),
        "loss": loss,
        "version": f"{library} {here['ready']['versions'][library]}",
    } | {f"{kind}, s": f"{value:.2f}" for kind, value in sorted(here.get("kinds", {}).items())}


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=2)
    flags.add_argument("size", choices=SIZES, help="parameters of the model")
    flags.add_argument("--sides", default=",".join(SIDES), help="sides in their order (default: all but nanodo)")
    for name in ("python", "torch-python", "maxtext-python", "nanodo-python"):
        flags.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help="interpreter of that side")
    flags.add_argument(
        "--nanodo", default=".", metavar="FOLDER", help="folder with a checkout of google-deepmind/nanodo"
    )
    flags.add_argument(
        "--profile", action="store_true", help="trace one more step of each side with jax, by kind of work"
    )
    flags.add_argument("--assert", dest="check", action="store_true", help="exit 1 above the limits")
    asked = flags.parse_args()
    asked.sides = ["ours", *(side for side in asked.sides.split(",") if side != "ours")]
    unknown = set(asked.sides) - {*SIDES, "nanodo"}
    if unknown:
        flags.error(f"--sides: {', '.join(sorted(unknown))} is not one of {', '.join((*SIDES, 'nanodo'))}")
    found = measure(SIZES[asked.size], asked)
    peers = [side for side in found if side != "ours"]
    fastest = min(peers, key=lambda side: statistics.median(seconds(found[side], "cpu")))
    ratios = [a / b for a, b in zip(seconds(found["ours"], "cpu"), seconds(found[fastest], "cpu"))]
    memory = {side: max(turn["step_peak_bytes"] for turn in found[side]["turns"]) for side in found}
    equal = [side for side in peers if side != "nanodo"]
    worst = max(
        (abs(a["loss"] - b["loss"]) / b["loss"])
        for side in equal
        for a, b in zip(found[side]["turns"], found["ours"]["turns"])
    )
    checks = [
        Check(f"CPU seconds, ours by {fastest}", statistics.median(ratios), TIME if asked.check else None),
        Check(f"resident memory, ours by {fastest}", memory["ours"] / memory[fastest], MEMORY if asked.check else None),
        Check("losses from equal parameters, largest relative difference", worst, LOSS if asked.check else None),
    ]
    size = SIZES[asked.size]
    title = f"{asked.size}, {size.rows} x {size.seq_len} tokens, float32, {asked.rounds} rounds of {asked.steps} steps"
    return finish(title, [row(side, found) for side in found], checks, found, asked.json)


if __name__ == "__main__":
    sys.exit(main())
