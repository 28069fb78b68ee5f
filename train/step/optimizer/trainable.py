"""Which parameters a run trains: the patterns of `optimizer.freeze`, and how what they freeze is stored."""

import math
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from bytescope.memory.errors import remedy_for
from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.adapters import TARGETS, Lora
from bytescope.model.layers import MLPS
from bytescope.model.quantized.quantized_formats import check_blocks
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.parallel.axes import SHARDS
from bytescope.train.parallel.layout import Layout


def frozen_names(names: Collection[str], patterns: Sequence[str], scan: bool) -> frozenset[str]:
    """Those of the dotted paths `names` that the patterns of `optimizer.freeze` match.

    A pattern is a shell's: `blocks.attention.w_q`, `w_token`, `blocks.*norm*`. In unrolled layers the number of the
    layer may be left out, for all of them. scan: whether the layers are one stack, and so frozen together.

    Raises:
      ValueError: a pattern that matches nothing, or everything.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(_of_any_layer(name), pattern)}
        if not own and scan and re.match(r"blocks\.[\d\[]", pattern):
            raise ValueError(
                f"optimizer.freeze={pattern!r} names some layers, and with model.scan=true all layers are "
                "one stack: set model.scan=false, or leave out the number"
            )
        if not own:
            remedy = remedy_for(pattern, tuple(dict.fromkeys(map(_of_any_layer, sorted(names)))))
            raise ValueError(f"optimizer.freeze={pattern!r} matches no parameter: {remedy}")
        found |= own
    if found and len(found) == len(names):
        raise ValueError(
            f"optimizer.freeze={','.join(patterns)} freezes every parameter: leave out what is to be trained"
        )
    return frozenset(found)


def _of_any_layer(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.", name)


def adapters_of(config: ConfigDict, layout: Layout) -> Lora | None:
    """The adapters of the group `lora`, None for a rank of 0.

    Raises:
      ValueError: a value that no adapter can have, or what cannot be combined with adapters.
    """
    group = config.lora
    if not group.rank:
        return None
    asked = f"lora.rank={group.rank}"
    if config.model.attention_kind != "gqa":
        raise ValueError(
            f"{asked} with model.attention_kind={config.model.attention_kind}: adapters are beside the "
            "matrices of gqa; set lora.rank=0"
        )
    shards = math.prod(layout.mesh.shape[axis] for axis in SHARDS)
    lora = Lora(group.rank, group.alpha, tuple(group.targets), group.dropout, shared=group.rank % shards == 0)
    if config.optimizer.freeze:
        raise ValueError(
            f"optimizer.freeze={','.join(config.optimizer.freeze)} with {asked}, which freezes everything "
            "but the adapters: leave it empty"
        )
    if not MLPS[config.model.mlp][0] and set(lora.targets) == {"gate"}:
        raise ValueError(
            f"lora.targets=gate with model.mlp={config.model.mlp}, which has no gate: choose others of "
            f"{', '.join(TARGETS)}"
        )
    dense = config.model.shared_experts or ModelConfig.from_dict(config.model).expert_layers < config.model.n_layers
    if not dense and set(lora.targets) <= {"gate", "up", "down"}:
        raise ValueError(
            f"lora.targets={','.join(lora.targets)} of a model whose every MLP is a mixture: routed "
            "experts have no adapters; choose some of q, k, v, o"
        )
    for key, what in (("model.mlp_chunk", config.model.mlp_chunk), ("mesh.context", config.mesh.context - 1)):
        if lora.dropout and what > 0:
            raise ValueError(
                f"lora.dropout={lora.dropout} with {key}: its masks are drawn for whole sequences on one "
                f"device; set lora.dropout=0, or leave {key} at its default"
            )
    return lora


def check_frozen(config: ConfigDict, frozen: Collection[str], precision: Precision) -> None:
    """Raises ValueError for what cannot be combined with the parameters `frozen`, dotted paths."""
    if not frozen:
        return
    patterns = ",".join(config.optimizer.freeze)
    why = f"lora.rank={config.lora.rank}" if config.lora.rank else f"optimizer.freeze={patterns}"
    if config.offload.params:
        raise ValueError(
            f"offload.params=true with {why}: frozen parameters stay on the device, and those that are "
            "trained are few; set offload.params=false"
        )
    products = sorted(name for name in frozen if fnmatchcase(name, "blocks.*.w_*"))
    if precision.matmul != "wide" and products:
        raise ValueError(
            f"precision.preset=fp8 with {why}: products in fp8 compute the gradient of every weight, that "
            f"of {products[0]} too; choose precision.preset=bf16"
        )


def stored_frozen(layout: Layout, axes: Sequence[str], contracted: bool) -> NamedSharding:
    """The sharding of a frozen parameter: that with which a step would compute.

    Under zero3 it is sharded as the trained ones are, and gathered layer by layer. Under zero1 and zero2 those are
    gathered once per step into a copy; of a frozen one there is nothing but this copy. What zero2 keeps sharded, the
    token table and vectors, stays so.
    """
    strategy = layout.strategy
    sharded = strategy.by_layer or (strategy.gradients and not contracted)
    return layout.stored(axes) if sharded else layout.sharding(axes)


def check_quantized(model: Transformer, layout: Layout, frozen: Collection[str]) -> None:
    """Raises ValueError for a quantized weight that is not among the parameters `frozen`, and where devices that share
    the inputs of one would share a block of them."""
    strategy = layout.strategy
    for name, (base, matrix) in quantized_weights(model).items():
        if f"{name}.codes" not in frozen:
            raise ValueError(
                f"lora.base={base} with trained {name}: quantized weights are frozen; set lora.rank=16 "
                "for adapters, or lora.base=bf16"
            )
        over = layout.mesh_axes(matrix.axes[0], state=strategy.by_layer or strategy.gradients)
        check_blocks(base, name, matrix, math.prod(layout.mesh.shape[axis] for axis in over))
