"""The parameters that a run trains: the patterns of `optimizer.freeze`, and the storage of frozen parameters."""

import math
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from jax.sharding import NamedSharding

from bytescope.memory.errors import remedy_for
from bytescope.model import Transformer
from bytescope.model.quantized.quantized_formats import check_blocks
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.parallel.layout import Layout


def frozen_names(names: Collection[str], patterns: Sequence[str], scan: bool) -> frozenset[str]:
    """Returns the dotted paths among `names` that the patterns of `optimizer.freeze` match.

    A pattern is a shell pattern such as `blocks.attention.w_q`, `w_token` or `blocks.*norm*`. If layers are not
    stacked, paths contain the layer index, and a pattern without a layer index matches all layers.

    Args:
      names: dotted paths of all parameters.
      patterns: the patterns.
      scan: True if the layers are one stack, so that a parameter is frozen in all layers or in none.

    Raises:
      ValueError: a pattern matches no parameter, or the patterns match all parameters.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(_of_any_layer(name), pattern)}
        if not own and scan and re.match(r"blocks\.[\d\[]", pattern):
            raise ValueError(
                f"optimizer.freeze={pattern!r} selects some layers, but with model.scan=true all layers are "
                "one stack: set model.scan=false, or leave out the layer number"
            )
        if not own:
            remedy = remedy_for(pattern, tuple(dict.fromkeys(map(_of_any_layer, sorted(names)))))
            raise ValueError(f"optimizer.freeze={pattern!r} matches no parameter: {remedy}")
        frozen |= own
    if frozen and len(frozen) == len(names):
        raise ValueError(
            f"optimizer.freeze={','.join(patterns)} freezes every parameter: leave out the parameters to train"
        )
    return frozenset(frozen)


def _of_any_layer(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.", name)


def stored_frozen(layout: Layout, axes: Sequence[str], contracted: bool) -> NamedSharding:
    """Returns the sharding in which a frozen parameter is stored between steps. A step reads it in this sharding. Only
    trained parameters are copied and gathered under zero1 and zero2.

    Under zero3 the parameter is sharded like trained parameters, and gathered layer by layer. Under zero1 and zero2 it
    is not sharded over the data-parallel devices, except that under zero2 the token table and vectors stay sharded.

    Args:
      layout: the shardings over the mesh.
      axes: the logical axes of the parameter, such as ("vocab", "d_model").
      contracted: True if only matrix products read the parameter, False for token tables and vectors.
    """
    strategy = layout.strategy
    sharded = strategy.by_layer or (strategy.gradients and not contracted)
    return layout.stored(axes) if sharded else layout.sharding(axes)


def check_quantized(model: Transformer, layout: Layout, frozen: Collection[str]) -> None:
    """Raises ValueError if a quantized weight is not frozen, or if the mesh would split one of its quantization blocks
    (elements that share a scale) over devices. `frozen`: dotted paths of the frozen parameters."""
    strategy = layout.strategy
    for name, (base, matrix) in quantized_weights(model).items():
        if f"{name}.codes" not in frozen:
            raise ValueError(
                f"lora.base={base} cannot train {name}, because quantized weights are frozen: set lora.rank=16 "
                "for adapters, or lora.base=bf16"
            )
        over = layout.mesh_axes(matrix.axes[0], state=strategy.by_layer or strategy.gradients)
        check_blocks(base, name, matrix, math.prod(layout.mesh.shape[axis] for axis in over))
