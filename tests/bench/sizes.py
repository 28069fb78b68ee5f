"""The sizes that throughput is promised for, one after the other: ours against the PyTorch peer, with the bars.

    python tests/bench/sizes.py --out=DIR                            # one GPU: every size, a JSON each
    python tests/bench/sizes.py --out=DIR --sizes 124M 8B --ours-python=A/bin/python --peer-python=B/bin/python
    python tests/bench/sizes.py --out=DIR --compile-only --target=h200     # no device: bytes, predicted s

Each size is a run of throughput.py with the flags of its row below, and --config.KEY=VALUE of this command line last;
--rounds and --steps are handed on. Shown at the end: tokens/s of both sides, their ratio (ours by the peer's, at least
1.0 asked and 1.1 aimed at), MFU and our peak in GB (1e9 bytes) with the bar of each, and whether they are held. A size
that fails is a row with its reason; the others go on. Exit code 1 where a bar is missed or a size failed. Sizes of
which a device holds one side at a time run --apart.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interleave import ROOT, Check, finish, parser, versions

RATIO = 1.0  # tokens/s, ours by the peer's


@dataclasses.dataclass(frozen=True)
class Size:
    """A row: `keys` over the config, flags of throughput.py for the peer, least MFU, most GB of ours (None: no bar)."""

    config: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    peer: Sequence[str] = ("--compile",)
    mfu: float | None = None
    gigabytes: float | None = None

    def flags(self) -> list[str]:
        return [f"--config.{key}={value}" for key, value in self.keys.items()]


APART = ("--compile", "--apart")  # each side has the card to itself
# bfloat16 parameters, gradients and first moment: with each layer updated in the backward pass one gradient exists at a
# time, and that pays for a second moment in float32. The peer has both moments in bfloat16, and all gradients.
BF16_STATE = {
    "precision.preset": "bf16_params",
    "optimizer.name": "adamw_bf16",
    "optimizer.fused_backward": True,
    "optimizer.clip": "layer",
}

SIZES: Mapping[str, Size] = {
    "124M": Size("gpt2_small", mfu=0.50),
    "350M": Size("gpt2_medium"),
    "1.5B": Size("gpt2_xl", {"model.unroll": 48, "remat.policy": "selective"}, APART, mfu=0.55),
    "1B": Size("llama_1b", {"model.unroll": 16, "remat.policy": "minimal"}, APART),
    "8B": Size(
        "llama_8b",
        {"data.seq_len": 4096, "batch.micro": 4, "remat.policy": "full", **BF16_STATE},
        peer=(*APART, "--peer-recompute"),
        mfu=0.58,
        gigabytes=81.0,
    ),
}


def measured(name: str, found: Mapping[str, Any]) -> tuple[dict[str, str], list[Check]]:
    """(row, bars) of a size from the JSON of throughput.py."""
    size, ours = SIZES[name], found["ours"]
    ready = ours["ready"]
    speed = {side: ready["tokens"] / found[side]["median_s"] for side in ("ours", "peer")}
    ratio, used = speed["ours"] / speed["peer"], ours["last"]["peak_bytes"] / 1e9
    mfu = ready["peak_flops"] and ready["flops"] / ours["median_s"] / ready["peak_flops"]
    # Bars are least values, and a Check has most ones: what is held against it is the inverse.
    checks = [Check(f"{name}: tokens/s, the peer's by ours", 1 / ratio, 1 / RATIO)]
    if size.mfu and mfu:
        checks.append(Check(f"{name}: asked MFU by ours", size.mfu / mfu, 1.0))
    if size.gigabytes:
        checks.append(Check(f"{name}: GB at the peak", used, size.gigabytes))
    return {
        "size": name,
        "ours tokens/s": f"{speed['ours']:,.0f}",
        "peer tokens/s": f"{speed['peer']:,.0f}",
        "ratio": f"{ratio:.3f}",
        "MFU": f"{100 * mfu:.1f} %" if mfu else "-",
        "MFU bar": f"{100 * size.mfu:.0f} %" if size.mfu else "-",
        "GB": f"{used:.1f}",
        "GB bar": f"{size.gigabytes:.0f}" if size.gigabytes else "-",
        "held": "NO"
        if not all(check.held for check in checks)
        else "yes, MFU unknown"
        if size.mfu and not mfu
        else "yes",
    }, checks


def described(name: str, found: Mapping[str, Any]) -> tuple[dict[str, str], list[Check]]:
    """(row, bars) of a size from the JSON of `bytescope report`."""
    size, used = SIZES[name], found["allocated_bytes"] / 1e9
    checks = [Check(f"{name}: GB allocated", used, size.gigabytes)] if size.gigabytes else []
    predicted = found.get("prediction") or {}
    seconds, mfu = predicted.get("seconds"), predicted.get("mfu")
    return {
        "size": name,
        "GB": f"{used:.2f}",
        "GB bar": f"{size.gigabytes:.0f}" if size.gigabytes else "-",
        "predicted s": f"{seconds:.4f}" if seconds else "-",
        "MFU": f"{100 * mfu:.1f} %" if mfu else "-",
        "target": found["target"]["name"],
        "held": "yes" if all(check.held for check in checks) else "NO",
    }, checks


def run(name: str, asked: Any, rest: Sequence[str]) -> tuple[dict[str, str], list[Check]]:
    """(row, bars) of one size; a failure is a row with its reason and a bar that is missed."""
    size, file = SIZES[name], asked.out / f"{name}.json"
    file.unlink(missing_ok=True)
    if asked.compile_only:
        command = [sys.executable, "-m", "bytescope.memory", "report", size.config, asked.target, *size.flags()]
    else:
        peer = [flag for flag in size.peer if not (asked.eager and flag == "--compile")]
        command = [
            sys.executable,
            str(Path(__file__).with_name("throughput.py")),
            f"--config={size.config}",
            *size.flags(),
            *peer,
            f"--rounds={asked.rounds}",
            f"--steps={asked.steps}",
            f"--ours-python={asked.ours_python}",
            f"--peer-python={asked.peer_python}",
        ]
    code = subprocess.run([*command, *rest, f"--json={file}"], cwd=ROOT).returncode
    try:
        found = json.loads(file.read_text())
        return described(name, found["result"]) if asked.compile_only else measured(name, found)
    except (OSError, ValueError, KeyError) as error:
        reason = f"failed: exit code {code}, {type(error).__name__}"
        return {"size": name, "held": reason}, [Check(f"{name}: {reason}", 1.0, 0.0)]


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=3)
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="a JSON of each size goes there")
    flags.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE", help=f"of {', '.join(SIZES)}"
    )
    flags.add_argument("--ours-python", default=sys.executable, help="interpreter of our side")
    flags.add_argument("--peer-python", default=sys.executable, help="interpreter of the peer")
    flags.add_argument("--eager", action="store_true", help="the peer without torch.compile")
    flags.add_argument("--compile-only", action="store_true", help="no device: bytes and predicted seconds")
    flags.add_argument("--target", default="h200", help="with --compile-only: what for (default %(default)s)")
    asked, rest = flags.parse_known_args()
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    done = []
    try:
        for name in asked.sizes:
            done.append(run(name, asked, rest))
    except KeyboardInterrupt:
        print("stopped: what was done is below", file=sys.stderr)
    if not done:
        return 130
    columns = max((list(row) for row, _ in done), key=len)
    rows = [dict.fromkeys(columns, "-") | row for row, _ in done]
    code = finish(
        "throughput by size",
        rows,
        [check for _, checks in done for check in checks],
        {"versions": versions()},
        asked.json,
    )
    return code if len(done) == len(asked.sizes) else 130


if __name__ == "__main__":
    sys.exit(main())
