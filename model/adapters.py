"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) for the weight matrices of a block.

The frozen matrix W, for example `w_q`, has the adapter matrices A, `w_q_a` [inputs, r], and B, `w_q_b` [r, outputs].
The layer computes y = x W + alpha / r * dropout(x) A B. A is initialized as in peft, uniform within 1 / sqrt(inputs),
and B is zero, so that the model starts as the base model. A and B are stored in `precision.param` and multiplied in
the compute dtype. x A is computed first, and the product A B is never formed. All adapters that read the same input
share one dropout mask.
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

# Target name -> number of leading input axes of the matrix `w_<target>`.
TARGETS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
_ADAPTER = re.compile(rf"\.w_(?:{'|'.join(TARGETS)})_[ab]$")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Configuration of low-rank adapters (LoRA): a small matrix product of rank r that is added to the output of a
    weight.

    Fields:
      rank: r, at least 1.
      alpha: adapter outputs are multiplied by alpha / rank.
      targets: the weight matrices that get an adapter, keys of TARGETS.
      dropout: dropout rate of the adapters' input, 0 to below 1.
      shared: True to shard the rank of adapter matrices that have no model-width axis over the devices that share
        optimizer state (ZeRO). The number of these devices must then divide the rank.

    Raises:
      ValueError: the rank is below 1, a target is unknown, or the dropout rate is outside [0, 1).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)
    dropout: float = 0.0
    shared: bool = False

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} is out of range: give 1 or more, or 0 for no adapters")
        if not self.targets or set(self.targets) - set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora.targets={','.join(self.targets)} has an unknown or repeated name: choose some of "
                f"{', '.join(TARGETS)}, each once"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout={self.dropout} is out of range: give a probability from 0 to below 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adaptable(Protocol):
    """A module whose weight matrices may have adapters: attention or an MLP.

    Fields:
      lora: the configuration of the adapters, None without adapters.
      place: shards the module's arrays over the mesh.
      regather: True if the backward pass gathers the sharded weights (ZeRO-3) again. False if it reads gathered weights
        that the forward pass saved.
    """

    lora: Lora | None
    place: Placement
    regather: bool


def is_adapter(name: str) -> bool:
    """Returns True if `name`, a dotted parameter path, is a parameter of an adapter."""
    return bool(_ADAPTER.search(name))


def add_adapters(module: Adaptable, lora: Lora, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
    """Adds the adapters of the weights `lora.targets` to `module`. Targets that the module does not have are skipped.

    Call it after all other parameters of the block are created, so that their initial values are the same as without
    adapters.

    Args:
      module: an attention or MLP module.
      lora: the configuration of the adapters.
      dtype: dtype of the adapters' parameters.
      rngs: its `params` stream initializes them.
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
            ("a", drawn, (*axes[:inputs], _choose_rank_axis(lora, axes[:inputs]))),
            ("b", jnp.zeros((lora.rank, *after), dtype), (_choose_rank_axis(lora, axes[inputs:]), *axes[inputs:])),
        ):
            setattr(
                module,
                f"w_{target}_{half}",
                nnx.Param(value, axes=own, contracted=True, always_float32=False, frozen=False),
            )


def _choose_rank_axis(lora: Lora, others: Sequence[str]) -> str:
    # ZeRO shards optimizer state along the model width. Adapter matrices without this axis are sharded along the rank
    # instead.
    return "adapter_state" if lora.shared and "d_model" not in others else "adapter"


def add_adapter_outputs(
    module: Adaptable,
    spec: str,
    x: jax.Array,
    outs: Sequence[jax.Array],
    targets: Sequence[str],
    key_B: jax.Array | None,
    mask: str,
) -> list[jax.Array]:
    """Returns `outs`, the products of `x` with the weights `targets` of `module`, with the output of each weight's
    adapter added. Products of weights without an adapter are returned unchanged.

    Args:
      module: the attention or MLP module that has the weights and adapters.
      spec: the einsum of `x` with a weight, such as "bld,dhk->blhk". Letters of the weight that `x` also has are the
        weight's input dimensions.
      x: the activation, the input of the weights.
      outs: one product per weight.
      targets: the name of each product's weight, such as ("q", "k", "v").
      key_B: dropout keys, one per sequence; None for no dropout.
      mask: the checkpoint name of the dropout mask.
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
        low = enter(down, x, halves, place, regather=module.regather)
    else:
        low = [multiply(down, x, half, place, regather=module.regather, name=name) for name, half in halves.items()]
    added = {}
    for target, x_BLr in zip(own, low):
        x_BLr = tag(place(x_BLr, ("batch", "length", None)), f"lora_{target}") * lora.scale
        up, half = f"blr,r{kept}->{out}", getattr(module, f"w_{target}_b")
        # The branch whose output is added to the residual stream ends in the stream's layout.
        product = leave if kept == "d" else multiply
        named = {"out": f"lora_{target}"} if kept == "d" else {"name": f"lora_{target}"}
        added[target] = product(up, x_BLr, half, place, regather=module.regather, **named)
    return [y + added[target] if target in added else y for target, y in zip(targets, outs)]
