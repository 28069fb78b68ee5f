"""Attention kernels: time and memory of the context with the gradients of queries, keys and values, by length.

    python tests/bench/attention.py                              # CPU: naive and chunked, float32
    python tests/bench/attention.py --precision=bf16 --lengths 1024 4096 16384 --heads 32 --groups 8 --width 128
    python tests/bench/attention.py --target=h200 --precision=bf16 --lengths 4096 65536     # compiled only: memory
    python tests/bench/attention.py --target=rtx4090 --precision=bf16 --lengths 2048 8192 --examples=4    # packed rows
    python tests/bench/attention.py --assert                     # exit 1 unless memory is linear and time is kept

The kernels of model.attention.kernels.KERNELS on the same --tokens a call, cut into sequences of each length, in turn.
Memory is what the kernel makes: temporaries plus outputs of the compiled function, bytes of one device; `chunk` is
--chunk. TFLOP/s counts the causal half of six products, two forward and four backward: 6 x tokens x length x heads x
width FLOPs (Dao 2023, arXiv 2307.08691, section 4.1, without the product that a flash kernel makes again).
What cannot run here, or takes more memory than is free, says so in its row.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleave import Check, Samples, finish, mib, parser, take_turns, timed, versions
from ours import compiled_bytes, start

from bytescope.configs.base import get_config
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import limit_bytes
from bytescope.model import PRECISIONS, ModelConfig
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.placement import ONE_DEVICE

LINEAR, TIME = 1.15, 1.25  # memory by tokens from the shortest to the longest; time of the leanest by the quickest
PRODUCTS = 6


@dataclasses.dataclass(frozen=True)
class Side:
    """A kernel at a length: what was compiled, or why it does not run."""

    kernel: str
    length: int
    compiled: Callable[..., Any] | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.length:,}"

    @property
    def bytes(self) -> int | None:
        if self.compiled is None:
            return None
        sizes = compiled_bytes(self.compiled)
        return sizes["temp"] + sizes["outputs"]


def shapes(length: int, asked: argparse.Namespace) -> list[jax.ShapeDtypeStruct]:
    """Queries, keys, values and the gradient of the context."""
    rows, dtype = asked.tokens // length, PRECISIONS[asked.precision].compute
    sizes = (asked.heads, asked.groups, asked.groups, asked.heads)
    return [jax.ShapeDtypeStruct((rows, length, heads, asked.width), dtype) for heads in sizes]


def compile_side(kernel: str, length: int, asked: argparse.Namespace, target: targets.Target) -> Side:
    """The kernel with its gradients, compiled for the first device of `target`."""
    model = ModelConfig.from_dict(
        {**get_config().model.to_dict(), "d_head": asked.width, "attention": kernel, "attention_chunk": asked.chunk}
    )
    if reason := KERNELS[kernel].refuses(model, PRECISIONS[asked.precision], target.platform):
        return Side(kernel, length, refused=reason.split(";")[0])

    def run(q_BLHK, k_BLGK, v_BLGK, d_context_BLHK):
        segments_BL = None
        if asked.examples:
            place_BL = jax.lax.broadcasted_iota(jnp.int32, q_BLHK.shape[:2], 1)
            segments_BL = 1 + place_BL * asked.examples // length
        context_BLHK, pull = jax.vjp(
            lambda q, k, v: KERNELS[kernel].run(q, k, v, segments_BL, config=model, key_B=None, place=ONE_DEVICE),
            q_BLHK,
            k_BLGK,
            v_BLGK,
        )
        return context_BLHK, *pull(d_context_BLHK)

    sharding = jax.sharding.SingleDeviceSharding(target.devices()[0])
    arguments = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in shapes(length, asked)]
    side = Side(kernel, length, jax.jit(run).lower(*arguments).compile())
    if side.bytes > (limit := limit_bytes(target)):
        return Side(kernel, length, refused=f"makes {mib(side.bytes)} MiB, {mib(limit)} are free")
    return side


def time_sides(sides: list[Side], asked: argparse.Namespace) -> dict[str, Samples]:
    """Seconds of each, in turn; every length has its own inputs, made once."""
    each, turns, rng = jax.default_backend() == "cpu", {}, np.random.default_rng(0)
    for length in asked.lengths:
        inputs = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes(length, asked)]
        for side in (side for side in sides if side.length == length and side.compiled):
            jax.block_until_ready(side.compiled(*inputs))
            turns[side.name] = lambda steps, side=side, inputs=inputs: timed(
                lambda: side.compiled(*inputs), jax.block_until_ready, steps, each=each
            )
    return take_turns(turns, asked.rounds, asked.steps)


def checks_of(sides: list[Side], samples: dict[str, Samples], asked: argparse.Namespace) -> list[Check]:
    """Memory of the leanest kernel from the shortest to the longest, by their tokens, and its time by the quickest."""
    first, last = min(asked.lengths), max(asked.lengths)
    run = [side for side in sides if side.compiled]
    lean = min((side for side in run if side.length == last), key=lambda side: side.bytes, default=None)
    if lean is None:
        return []
    short = next((side for side in run if (side.kernel, side.length) == (lean.kernel, first)), lean)
    checks = [
        Check(
            f"memory, {lean.name} by {short.name} for the same tokens",
            lean.bytes / short.bytes,
            LINEAR if asked.check else None,
        )
    ]
    others = [side for side in run if side.length == last and side.name in samples and side is not lean]
    if others:
        quick = min(others, key=lambda side: samples[side.name].median)
        checks.append(
            Check(
                f"time, {lean.name} by {quick.name}",
                samples[lean.name].over(samples[quick.name]).median,
                TIME if asked.check else None,
            )
        )
    return checks


def row(side: Side, samples: dict[str, Samples], first: dict[int, str], asked: argparse.Namespace) -> dict[str, str]:
    """A line of the table; ratios are to the first kernel that ran at the length."""
    made = {
        "kernel": side.kernel,
        "length": f"{side.length:,}",
        "sequences": f"{asked.tokens // side.length:,}",
        "made MiB": mib(side.bytes),
    }
    if (taken := samples.get(side.name)) is None:
        return made | dict.fromkeys(("s", "spread", "TFLOP/s", "to first"), "-") | {"": side.refused}
    flops = PRODUCTS * asked.tokens * side.length * asked.heads * asked.width
    return made | {
        "s": f"{taken.median:.4f}",
        "spread": f"{100 * taken.spread:.0f} %",
        "TFLOP/s": f"{flops / taken.median / 1e12:.3g}",
        "to first": str(taken.over(samples[first[side.length]])),
        "": "",
    }


def options() -> argparse.Namespace:
    flags = parser(__doc__, rounds=5, steps=2)
    flags.add_argument("--tokens", type=int, help="of a call (default: the longest length)")
    flags.add_argument("--lengths", type=int, nargs="+", default=(512, 1024, 2048, 4096), help="(default %(default)s)")
    flags.add_argument("--heads", type=int, default=4, help="query heads (default %(default)s)")
    flags.add_argument("--groups", type=int, default=4, help="key/value heads (default %(default)s)")
    flags.add_argument("--width", type=int, default=64, help="of a head (default %(default)s)")
    flags.add_argument("--chunk", type=int, default=512, help="model.attention_chunk (default %(default)s)")
    flags.add_argument("--examples", type=int, default=0, help="packed in a sequence; 0: one text (default 0)")
    flags.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    flags.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    flags.add_argument("--target", default="local", help="another than local is compiled for, not run")
    flags.add_argument(
        "--assert", dest="check", action="store_true", help=f"exit 1 above {LINEAR}x the memory or {TIME}x the time"
    )
    asked = flags.parse_args()
    asked.tokens = asked.tokens or max(asked.lengths)
    if bad := [length for length in asked.lengths if asked.tokens % length]:
        flags.error(f"--tokens={asked.tokens} does not divide into sequences of {bad[0]}")
    if asked.heads % asked.groups:
        flags.error(f"--heads={asked.heads} is no multiple of --groups={asked.groups}")
    return asked


def main() -> int:
    asked = options()
    start()
    target = targets.parse(asked.target)
    sides = [compile_side(kernel, length, asked, target) for length in asked.lengths for kernel in asked.kernels]
    samples = {} if target.is_described else time_sides(sides, asked)
    first: dict[int, str] = {}
    for side in sides:
        if side.name in samples:
            first.setdefault(side.length, side.name)
    packed = f"{asked.examples} examples a sequence, " if asked.examples else ""
    return finish(
        f"causal attention with gradients, {packed}{asked.precision}, {asked.tokens:,} tokens, "
        f"{asked.heads} heads ({asked.groups} of keys) of {asked.width}; {target.kind}, "
        f"jax {jax.__version__}",
        [row(side, samples, first, asked) for side in sides],
        checks_of(sides, samples, asked),
        {
            "versions": versions(),
            "sides": {
                side.name: {
                    "bytes": side.bytes,
                    "refused": side.refused,
                    **(samples[side.name].to_json() if side.name in samples else {}),
                }
                for side in sides
            },
        },
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
