"""Chunked against full cross-entropy: time and memory of the loss with the gradients of both its inputs.

    python tests/bench/loss.py
    python tests/bench/loss.py --tokens=8192 --vocab=65536 --chunks 1024 2048
    python tests/bench/loss.py --assert      # exit 1 above 0.25x the memory or 1.13x the time of `full`

Two sizes. What is timed (--tokens, --vocab) fits a small host; what is only compiled (--large-tokens,
--large-vocab: 32k tokens and a vocabulary of 128k) tells the memory where it matters. Memory is what the loss
makes: temporaries plus outputs (the loss and two gradients) of the compiled function, bytes of one device.
Chunks are tokens whose logits exist at once. The checks take the chunk of --asserted (default: the largest
for memory and time alike).
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleave import Check, Turn, finish, mib, parser, take_turns, timed, versions
from ours import compiled_bytes, start

from bytescope.model import PRECISIONS
from bytescope.train.parallel.axes import AXES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.step.losses import LOSSES, LossSettings

MEMORY_LIMIT, TIME_LIMIT = 0.25, 1.13


def compile_loss(kind: str, chunk: int, tokens: int, vocab: int, asked: argparse.Namespace) -> Callable[..., Any]:
    """The loss and its gradients for [rows, length] = `tokens` positions, compiled."""
    precision = PRECISIONS[asked.precision]
    layout = Layout(make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    settings = LossSettings(layout, precision.compute, max(chunk // asked.rows, 1))

    def loss(x_BLD, w_DV, targets_BL):
        return LOSSES[kind](x_BLD, w_DV, targets_BL, settings)

    shapes = (
        jax.ShapeDtypeStruct((asked.rows, tokens // asked.rows, asked.d_model), precision.compute),
        jax.ShapeDtypeStruct((asked.d_model, vocab), precision.param),
        jax.ShapeDtypeStruct((asked.rows, tokens // asked.rows), jnp.int32),
    )
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()


def arrays(asked: argparse.Namespace) -> tuple[jax.Array, ...]:
    """Inputs of the timed size."""
    rng, precision = np.random.default_rng(0), PRECISIONS[asked.precision]
    shape = (asked.rows, asked.tokens // asked.rows)
    x = rng.normal(size=(*shape, asked.d_model))
    w = rng.normal(size=(asked.d_model, asked.vocab)) * 0.02
    return (
        jnp.asarray(x, precision.compute),
        jnp.asarray(w, precision.param),
        jnp.asarray(rng.integers(0, asked.vocab, shape), jnp.int32),
    )


def turn(compiled: Callable[..., Any], inputs: tuple[jax.Array, ...]) -> Turn:
    each = jax.default_backend() == "cpu"
    return lambda steps: timed(lambda: compiled(*inputs), jax.block_until_ready, steps, each=each)


def options() -> argparse.Namespace:
    flags = parser(__doc__, rounds=5, steps=1)
    flags.add_argument("--tokens", type=int, default=4096, help="timed (default %(default)s)")
    flags.add_argument("--vocab", type=int, default=32768, help="timed (default %(default)s)")
    flags.add_argument("--large-tokens", type=int, default=32768, help="compiled only (default %(default)s)")
    flags.add_argument("--large-vocab", type=int, default=131072, help="compiled only (default %(default)s)")
    flags.add_argument("--d-model", type=int, default=256, help="(default %(default)s)")
    flags.add_argument("--rows", type=int, default=4, help="sequences of the tokens (default %(default)s)")
    flags.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    flags.add_argument("--chunks", type=int, nargs="+", default=(256, 512, 1024, 2048), metavar="TOKENS")
    flags.add_argument("--asserted", type=int, metavar="TOKENS", help="the chunk that the checks take")
    flags.add_argument(
        "--assert",
        dest="check",
        action="store_true",
        help=f"exit 1 above {MEMORY_LIMIT}x memory (compiled size) or {TIME_LIMIT}x time",
    )
    asked = flags.parse_args()
    for tokens in (asked.tokens, asked.large_tokens):
        if tokens % asked.rows:
            flags.error(f"{tokens} tokens do not divide into {asked.rows} sequences")
    asked.asserted = asked.asserted or max(asked.chunks)
    if asked.asserted not in asked.chunks:
        flags.error(f"--asserted={asked.asserted} is none of --chunks {asked.chunks}")
    return asked


def main() -> int:
    asked = options()
    start()
    kinds = {"full": ("full", asked.tokens)}
    kinds |= {f"chunked {chunk}": ("chunked", chunk) for chunk in asked.chunks}
    inputs, turns, made, large = arrays(asked), {}, {}, {}
    for name, (kind, chunk) in kinds.items():
        compiled = compile_loss(kind, chunk, asked.tokens, asked.vocab, asked)
        jax.block_until_ready(compiled(*inputs))
        turns[name], made[name] = turn(compiled, inputs), compiled_bytes(compiled)
        large[name] = compiled_bytes(compile_loss(kind, chunk, asked.large_tokens, asked.large_vocab, asked))
    samples = take_turns(turns, asked.rounds, asked.steps)

    def share(sizes: dict[str, dict[str, int]], name: str) -> float:
        total = {key: value["temp"] + value["outputs"] for key, value in sizes.items()}
        return total[name] / total["full"]

    def row(name: str) -> dict[str, Any]:
        return {
            "loss": name,
            "s": f"{samples[name].median:.3f}",
            "spread": f"{100 * samples[name].spread:.0f} %",
            "to full": str(samples[name].over(samples["full"])),
            "temp MiB": mib(made[name]["temp"]),
            "made to full": f"{share(made, name):.3f}",
            "large temp MiB": mib(large[name]["temp"]),
            "large made to full": f"{share(large, name):.3f}",
        }

    chosen = f"chunked {asked.asserted}"
    checks = [
        Check(
            f"memory at the large size, {chosen} by full", share(large, chosen), MEMORY_LIMIT if asked.check else None
        ),
        Check(
            f"time, {chosen} by full", samples[chosen].over(samples["full"]).median, TIME_LIMIT if asked.check else None
        ),
    ]
    return finish(
        f"cross-entropy with gradients, {asked.precision}, width {asked.d_model}: {asked.tokens:,} tokens x "
        f"{asked.vocab:,} timed, {asked.large_tokens:,} x {asked.large_vocab:,} compiled; "
        f"jax {jax.__version__}",
        [row(name) for name in kinds],
        checks,
        {
            "versions": versions(),
            "sides": {
                name: {**samples[name].to_json(), "bytes": made[name], "large_bytes": large[name]} for name in kinds
            },
        },
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
