"""Our training step against an equivalent PyTorch model, in turn, on the same device and batches.

    python tests/bench/throughput.py                                    # configs/char.py, float32
    python tests/bench/throughput.py --assert-time=1.0 --assert-memory=0.8
    python tests/bench/throughput.py --ours-python=A/bin/python --peer-python=B/bin/python
    python tests/bench/throughput.py --config=gpt2_small --compile      # a GPU: bf16, compiled peer
    python tests/bench/throughput.py --same-start                       # equal parameters: losses must agree

Each side is a process of its own that stays alive; both do a few steps (optimizer updates) in turn, A B A B (with
--apart, for sizes of which a device holds one, A A B B).
Shown: median seconds a step, spread (interquartile range over median), CPU seconds of all threads in a step
of the last turn (which other users of the cores blur less), tokens/s, MFU where the device's peak is known,
seconds of compiling (tracing included; of the peer: first step less a later one), peak memory. On a CPU that
is the resident set of the whole process over its whole life, compiling and libraries included, so give each
side an interpreter without the other's packages (jax's CUDA plugin alone is some 350 MB). On a GPU it is what
the allocator took; preallocation is off, so that both fit side by side.

--same-start also writes our first parameters and starts the peer from them: the same losses, step for
step, show that the peer is the same model, optimizer and data.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from interleave import Check, Child, Samples, finish, mib, parse_config, parser, take_turns
from ml_collections import ConfigDict

# Parts of our config that the peer takes under the same names.
PEER_KEYS = {
    "model": (
        "d_model",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_head",
        "d_ff",
        "vocab_size",
        "max_seq_len",
        "norm",
        "norm_eps",
        "mlp",
        "position",
        "rope_theta",
        "bias",
        "tie_embeddings",
        "init_std",
    ),
    "data": ("seq_len",),
    "batch": ("micro", "accumulation"),
    "optimizer": ("learning_rate", "warmup_steps", "end_fraction", "b1", "b2", "eps", "weight_decay", "clip_norm"),
}
LOSS_TOLERANCE = 1e-4  # relative, of the worst turn, with equal first parameters in float32


def peer_arguments(config: ConfigDict, asked: argparse.Namespace) -> list[str]:
    """The flags of torch_peer.py that make it the model of `config`."""
    flags = {key: config[group][key] for group, keys in PEER_KEYS.items() for key in keys}
    flags = {key: int(value) if isinstance(value, bool) else value for key, value in flags.items()}
    flags |= {
        "train_steps": config.train.steps,
        "precision": config.precision.preset,
        "recompute": int(asked.peer_recompute),
        "compile": int(asked.compile),
        "fused": int(not asked.unfused),
        "attention": asked.attention,
    }
    if asked.peer_accumulation:
        rows = flags["micro"] * flags["accumulation"]
        if rows % asked.peer_accumulation:
            raise SystemExit(f"{rows} sequences do not divide into {asked.peer_accumulation} micro-batches")
        flags |= {"micro": rows // asked.peer_accumulation, "accumulation": asked.peer_accumulation}
    return [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]


def row(name: str, child: Child, samples: Samples, facts: dict[str, Any]) -> dict[str, str]:
    """One line of the table; `facts` are those of our child: the tokens and FLOPs are the same."""
    seconds, peak = samples.median, facts["peak_flops"]
    mfu = f"{100 * facts['flops'] / seconds / peak:.1f} %" if peak else "-"
    found = child.ready["versions"]
    package = "jax" if name == "ours" else "torch"
    return {
        "side": name,
        "step s": f"{seconds:.4f}",
        "spread": f"{100 * samples.spread:.0f} %",
        "CPU s": f"{child.last['cpu_s']:.2f}",
        "tokens/s": f"{facts['tokens'] / seconds:,.0f}",
        "MFU": mfu,
        "compile s": f"{child.ready['compile_s']:.1f}",
        "peak MiB": mib(child.last["peak_bytes"]),
        "device": child.ready["device"],
        "version": f"{package} {found[package]}, Python {found['python']}",
    }


def check_same_model(sides: Mapping[str, Child]) -> None:
    """Ends the benchmark where two sides have not the same number of parameters."""
    sizes = {name: child.ready["parameters"] for name, child in sides.items()}
    if len(set(sizes.values())) > 1:
        raise SystemExit(
            f"ours has {sizes['ours']:,} parameters and the peer {sizes['peer']:,}: they are not the same model"
        )


def compare(config: ConfigDict, rest: list[str], asked: argparse.Namespace) -> int:
    """Runs both sides, shows and writes what they did; the exit code."""
    with contextlib.ExitStack() as stack:
        ours_flags, peer_flags = [f"--config={asked.config}", *rest], peer_arguments(config, asked)
        if asked.same_start:
            saved = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "params.npz")
            ours_flags, peer_flags = [*ours_flags, f"--save={saved}"], [*peer_flags, f"--load={saved}"]
        commands = {
            "ours": (asked.ours_python, "ours.py", ours_flags, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
            "peer": (asked.peer_python, "torch_peer.py", peer_flags),
        }
        sides, samples, seen = {}, {}, {name: [] for name in commands}

        def turn(name: str, steps: int) -> list[float]:
            seconds = sides[name](steps)
            seen[name].append(sides[name].last["loss"])
            return seconds

        for names in (("ours",), ("peer",)) if asked.apart else (("ours", "peer"),):
            with contextlib.ExitStack() as alive:
                sides |= {name: alive.enter_context(Child(*commands[name])) for name in names}
                check_same_model(sides)
                samples |= take_turns({name: partial(turn, name) for name in names}, asked.rounds, asked.steps)
        ours, peer, losses = sides["ours"], sides["peer"], list(zip(seen["ours"], seen["peer"]))
    ratio = samples["ours"].over(samples["peer"])
    memory = ours.last["peak_bytes"] / peer.last["peak_bytes"]
    checks = [
        Check("step time, ours by peer", ratio.median, asked.assert_time),
        Check("peak memory, ours by peer", memory, asked.assert_memory),
    ]
    if asked.same_start:
        worst = max(abs(a - b) / b for a, b in losses)
        checks.append(Check("losses from equal parameters, worst relative difference", worst, LOSS_TOLERANCE))
    mode = "compiled" if asked.compile else "eager"
    return finish(
        f"{asked.config} {config.precision.preset}, {ours.ready['tokens']:,} tokens a step, "
        f"{ours.ready['parameters']:,} parameters, peer {mode}; ratio of time {ratio}",
        [row(name, child, samples[name], ours.ready) for name, child in sides.items()],
        checks,
        {name: {"ready": child.ready, "last": child.last, **samples[name].to_json()} for name, child in sides.items()}
        | {"losses": losses},
        asked.json,
    )


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=3, config="char")
    flags.add_argument("--ours-python", default=sys.executable, help="interpreter of our side")
    flags.add_argument("--peer-python", default=sys.executable, help="interpreter of the peer")
    flags.add_argument("--compile", action="store_true", help="the peer under torch.compile")
    flags.add_argument("--unfused", action="store_true", help="the peer with PyTorch's default AdamW")
    flags.add_argument("--attention", default="cudnn,flash", help="the peer's GPU attention, by priority")
    flags.add_argument(
        "--peer-accumulation",
        type=int,
        metavar="N",
        help="cut the peer's batch into N micro-batches (default: as ours)",
    )
    flags.add_argument(
        "--peer-recompute",
        action="store_true",
        help="activation checkpointing of every block of the peer, where it would not fit",
    )
    flags.add_argument(
        "--apart",
        action="store_true",
        help="all turns of one side, then all of the other, where both do not fit the device",
    )
    flags.add_argument("--same-start", action="store_true", help="equal first parameters, losses compared")
    flags.add_argument("--assert-time", type=float, metavar="X", help="exit 1 above this ratio of time")
    flags.add_argument("--assert-memory", type=float, metavar="X", help="exit 1 above this ratio of memory")
    asked, config, rest = parse_config(flags)
    return compare(config, rest, asked)


if __name__ == "__main__":
    sys.exit(main())
