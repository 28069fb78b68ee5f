"""Kernels of experts: time and memory of one layer of experts, forward and backward, router and moves of rows included.

    python tests/bench/experts.py                                   # CPU: scan, ragged and capacity, a small layer
    python tests/bench/experts.py --layer=mixtral --target=h200     # compiled only: memory
    python tests/bench/experts.py --layer=mixtral --assert          # on a card: exit 1 where grouped is not the leanest

The kernels of model.experts.kernels.KERNELS over the same tokens, in turn. Memory is the temporaries of the compiled
function, bytes of one device. TFLOP/s counts 6 FLOPs for each parameter that a token meets in its experts. `capacity`
has slots for 1.25 times the mean and drops what is beyond; the others drop nothing.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from interleave import Check, Samples, finish, mib, parser, take_turns, timed, versions
from ours import compiled_bytes, start

from bytescope.configs.base import get_config
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import limit_bytes
from bytescope.model import PRECISIONS, ModelConfig
from bytescope.model.experts.expert_layer import Experts
from bytescope.model.placement import ONE_DEVICE

# Layer -> its shape, and its tokens.
LAYERS = {
    "small": ({"d_model": 128, "d_expert": 192, "experts": 8, "experts_per_token": 2}, 2048),
    "mixtral": ({"d_model": 4096, "d_expert": 14336, "experts": 8, "experts_per_token": 2}, 8192),
    "qwen3": ({"d_model": 2048, "d_expert": 768, "experts": 128, "experts_per_token": 8}, 8192),
    "deepseek": ({"d_model": 7168, "d_expert": 2048, "experts": 256, "experts_per_token": 8}, 4096),
}
ON_A_CARD = ("grouped", "capacity", "ragged", "scan")
TIME = 1.25  # grouped by the quickest of the others


@dataclasses.dataclass(frozen=True)
class Side:
    """A kernel: what was compiled, or why it does not run."""

    name: str
    compiled: Callable[..., Any] | None = None
    refused: str = ""

    @property
    def bytes(self) -> int | None:
        return None if self.compiled is None else compiled_bytes(self.compiled)["temp"]


def layer_of(kernel: str, asked: argparse.Namespace) -> tuple[Any, Any, int, ModelConfig]:
    """(graph, abstract state, tokens, model) of the layer with a kernel, its matrices in the compute dtype."""
    shape, tokens = LAYERS[asked.layer]
    model = ModelConfig.from_dict({**get_config().model.to_dict(), **shape, "moe_kernel": kernel})
    precision = PRECISIONS[asked.precision]
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(model, precision, ONE_DEVICE, rngs=nnx.Rngs(params=0))))
    cast = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, precision.compute if leaf.ndim == 3 else leaf.dtype), state
    )
    return graph, cast, asked.tokens or tokens, model


def compile_side(kernel: str, asked: argparse.Namespace, target: targets.Target) -> Side:
    """The layer with its gradients, compiled for the first device of `target`."""
    if kernel == "grouped" and target.platform == "cpu":
        return Side(kernel, refused="runs on NVIDIA GPUs")
    graph, state, tokens, model = layer_of(kernel, asked)
    device = target.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def run(state, x_BLD, d_BLD):
        def forward(state, x_BLD):
            y_BLD, load = nnx.merge(graph, state)(x_BLD)
            return y_BLD, load.balance

        (y_BLD, balance), pullback = jax.vjp(forward, state, x_BLD)
        return y_BLD, pullback((d_BLD, jnp.ones_like(balance)))

    def placed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    state = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), state)
    x_BLD = placed((1, tokens, model.d_model), PRECISIONS[asked.precision].compute)
    kind = jax.sharding.Mesh([device], "x").abstract_mesh.abstract_device  # Pallas asks for it from jax 0.11 on
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)):
        side = Side(kernel, jax.jit(run).lower(state, x_BLD, x_BLD).compile())
    if side.bytes > (limit := limit_bytes(target)):
        return Side(kernel, refused=f"makes {mib(side.bytes)} MiB, {mib(limit)} are free")
    return side


def time_sides(sides: list[Side], asked: argparse.Namespace) -> dict[str, Samples]:
    """Seconds of each, in turn, over the same random weights and tokens."""
    each, turns, rng = jax.default_backend() == "cpu", {}, np.random.default_rng(0)
    _, state, tokens, model = layer_of("scan", asked)
    state = jax.tree.map(
        lambda leaf: jnp.asarray(0.02 * rng.standard_normal(leaf.shape, np.float32), leaf.dtype), state
    )
    x_BLD, d_BLD = (
        jnp.asarray(rng.standard_normal((1, tokens, model.d_model), np.float32), PRECISIONS[asked.precision].compute)
        for _ in range(2)
    )
    for side in (side for side in sides if side.compiled):
        jax.block_until_ready(side.compiled(state, x_BLD, d_BLD))
        turns[side.name] = lambda steps, side=side: timed(
            lambda: side.compiled(state, x_BLD, d_BLD), jax.block_until_ready, steps, each=each
        )
    return take_turns(turns, asked.rounds, asked.steps)


def checks_of(sides: list[Side], samples: dict[str, Samples], check: bool) -> list[Check]:
    """Temporaries of `grouped` by those of the leanest other that drops nothing, and its time by the quickest other."""
    made = {side.name: side for side in sides if side.compiled}
    if "grouped" not in made or len(made) < 2:
        return []
    others = [side for name, side in made.items() if name != "grouped"]
    lean = min((side for side in others if side.name != "capacity"), key=lambda side: side.bytes, default=None)
    checks = []
    if lean:
        checks.append(
            Check(f"temporaries, grouped by {lean.name}", made["grouped"].bytes / lean.bytes, 1.0 if check else None)
        )
    if samples:
        quick = min(others, key=lambda side: samples[side.name].median)
        checks.append(
            Check(
                f"time, grouped by {quick.name}",
                samples["grouped"].over(samples[quick.name]).median,
                TIME if check else None,
            )
        )
    return checks


def row(side: Side, samples: dict[str, Samples], asked: argparse.Namespace) -> dict[str, str]:
    """A line of the table."""
    made = {"kernel": side.name, "temporaries MiB": mib(side.bytes)}
    if (taken := samples.get(side.name)) is None:
        return made | dict.fromkeys(("s", "spread", "TFLOP/s"), "-") | {"": side.refused}
    _, _, tokens, model = layer_of("scan", asked)
    flops = 6 * tokens * model.experts_per_token * 3 * model.d_model * model.expert_width
    return made | {
        "s": f"{taken.median:.4f}",
        "spread": f"{100 * taken.spread:.0f} %",
        "TFLOP/s": f"{flops / taken.median / 1e12:.3g}",
        "": "",
    }


def main() -> int:
    flags = parser(__doc__, rounds=5, steps=2)
    flags.add_argument("--layer", choices=LAYERS, default="small")
    flags.add_argument("--tokens", type=int, default=0, help="of a call; 0: those of the layer")
    flags.add_argument("--kernels", nargs="+", choices=ON_A_CARD, default=list(ON_A_CARD))
    flags.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    flags.add_argument("--target", default="local", help="another than local is compiled for, not run")
    flags.add_argument(
        "--assert",
        dest="check",
        action="store_true",
        help=f"exit 1 where grouped is not the leanest, or takes over {TIME}x the time",
    )
    asked = flags.parse_args()
    start()
    target = targets.parse(asked.target)
    sides = [compile_side(kernel, asked, target) for kernel in asked.kernels]
    samples = {} if target.is_described else time_sides(sides, asked)
    return finish(
        f"experts of {asked.layer} with gradients, {asked.precision}; {target.kind}, jax {jax.__version__}",
        [row(side, samples, asked) for side in sides],
        checks_of(sides, samples, asked.check),
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
