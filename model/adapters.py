"""Low-rank adapters beside the products of a block, LoRA (Hu et al. 2021, arXiv 2106.09685).

Beside a frozen matrix W, `w_q` say, lie A, `w_q_a` [inputs, r], and B, `w_q_b` [r, outputs]; the product is
y = x W + alpha / r * dropout(x) A B. A starts as peft's, uniform within 1 / sqrt(inputs), and B at zero, so that the
model starts as the base. Both are kept in `precision.param` and multiplied in the compute dtype, x A first: no product
of the two is ever made. All adapters that read the same input share its dropout mask.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.layers import dropout, enter, leave, multiply
from bytescope.model.names import tag
from bytescope.model.placement import Placement

# Target, which is the matrix `w_<target>` -> how many of its axes are inputs.
TARGETS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
_ADAPTER = re.compile(rf"\.w_(?:{'|'.join(TARGETS)})_[ab]$")


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    rank: r. alpha: the products of adapters are multiplied by alpha / r. targets: keys of TARGETS. dropout: rate, on
    what adapters read. shared: whether the rank divides over the devices that share state; then the halves that have no
    model width are sharded along it.

    Raises:
      ValueError: a rank below 1, an unknown target, or a rate outside of [0, 1).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)
    dropout: float = 0.0
    shared: bool = False

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: give 1 or more, or 0 for no adapters")
        if not self.targets or set(self.targets) - set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets={','.join(self.targets)}: choose some of {', '.join(TARGETS)}, each once")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout={self.dropout}: give a probability from 0 to below 1")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class Adaptable(Protocol):
    """A module whose matrices may have adapters: attention or an MLP."""

    lora: Lora | None
    place: Placement
    again: bool


def is_adapter(name: str) -> bool:
    """Whether the dotted path names a parameter of an adapter."""
    return bool(_ADAPTER.search(name))


def add_adapters(module: Adaptable, lora: Lora, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
    """Gives `module`, attention or MLP, the adapters of those targets that it has.

    After all parameters of the block, so that these have the values that they have without adapters.
    """
    module.lora = lora
    for target in lora.targets:
        matrix = getattr(module, f"w_{target}", None)
        if matrix is None:
            continue
        inputs, axes = TARGETS[target], matrix.get_metadata()["axes"]
        before, after = matrix.shape[:inputs], matrix.shape[inputs:]
        bound = 1 / math.sqrt(math.prod(before))  # kaiming_uniform with a = sqrt(5)
        drawn = jax.random.uniform(rngs.params(), (*before, lora.rank), jnp.float32, -bound, bound).astype(dtype)
        for half, value, own in (
            ("a", drawn, (*axes[:inputs], _rank(lora, axes[:inputs]))),
            ("b", jnp.zeros((lora.rank, *after), dtype), (_rank(lora, axes[inputs:]), *axes[inputs:])),
        ):
            setattr(module, f"w_{target}_{half}", nnx.Param(value, axes=own, contracted=True, wide=False, frozen=False))


def _rank(lora: Lora, others: Sequence[str]) -> str:
    """The logical axis of the rank in a matrix with these other axes: ZeRO shards it where none is the model width."""
    return "adapter_state" if lora.shared and "d_model" not in others else "adapter"


def adapted(
    module: Adaptable,
    spec: str,
    x: jax.Array,
    outs: Sequence[jax.Array],
    targets: Sequence[str],
    key_B: jax.Array | None,
    mask: str,
) -> list[jax.Array]:
    """`outs`, the products of `x` with the matrices `targets` of `module`, each with that of its adapter added.

    Args:
      spec: the einsum of the products with the matrices; the inputs of a matrix are the letters it shares with `x`.
      key_B: dropout keys, None for no dropout. mask: the checkpoint name of the mask.
    """
    lora, place = module.lora, module.place
    own = [target for target in targets if lora and target in lora.targets]
    if not own or lora is None:
        return list(outs)
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    contracted = "".join(letter for letter in right if letter in left)
    kept = "".join(letter for letter in right if letter not in left)
    x = dropout(x, key_B, lora.dropout, mask)
    low: Sequence[jax.Array]
    halves = {f"lora_{target}": getattr(module, f"w_{target}_a") for target in own}
    down = f"{left},{contracted}r->blr"
    if len(contracted) == 1 and left == "bld":
        low = enter(down, x, halves, place, again=module.again)
    else:
        low = [multiply(down, x, half, place, again=module.again, name=name) for name, half in halves.items()]
    added = {}
    for target, x_BLr in zip(own, low):
        x_BLr = tag(place(x_BLr, ("batch", "length", None)), f"lora_{target}") * lora.scale
        up, half = f"blr,r{kept}->{out}", getattr(module, f"w_{target}_b")
        # The branch that leads back into the residual stream ends with the layout of it.
        product = leave if kept == "d" else multiply
        named = {"out": f"lora_{target}"} if kept == "d" else {"name": f"lora_{target}"}
        added[target] = product(up, x_BLr, half, place, again=module.again, **named)
    return [y + added[target] if target in added else y for target, y in zip(targets, outs)]
