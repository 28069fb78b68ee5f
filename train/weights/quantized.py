"""Quantizes weights of a folder while they are read. The host holds one piece of a tensor, its codes and
its scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.placement import ONE_DEVICE
from bytescope.model.quantized.quantized_formats import Matrix, dequantize, quantize
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.weights.leaves import Leaf

PIECE = 4 * 2**20  # bytes on disk that are read at a time


@dataclasses.dataclass(frozen=True)
class QuantizedJob:
    """Quantizes one weight and writes its codes and scales into shards.

    Each process reads the whole weight, because a format may store all its scales relative to their mean.

    Attributes:
      leaf: lazy view of the weight on disk.
      base: storage format, a row of FORMATS such as "nf4".
      matrix: shape of the weight, and which of its axes are inputs.
      shards: array of the format, such as codes or scales -> the shards of this process.
      layer: index in a stack of layers; None if the weight is not in a stack.
    """

    leaf: Leaf
    base: str
    matrix: Matrix
    shards: Mapping[str, Sequence[Any]]
    layer: int | None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the unquantized weight to read from disk."""
        return self.leaf.nbytes

    def write(self) -> Iterator[int]:
        """Reads, quantizes and writes the weight; yields the number of bytes of each piece that was read."""
        read: list[int] = []
        arrays = quantize(self.base, self.matrix, self._read_pieces(read))
        for name, array in arrays.items():
            for shard in self.shards[name]:
                spans, starts = shard.spans, [0] * array.ndim
                if self.layer is not None:
                    first, stop = spans[0]
                    if not first <= self.layer < stop:
                        continue
                    spans, starts = spans[1:], [self.layer - first, *starts]
                shard.write(array[tuple(slice(*span) for span in spans)], starts)
        yield from read

    def _read_pieces(self, read: list[int]) -> Iterator[np.ndarray]:
        """Yields the weight in pieces [inputs, some of the outputs]. Appends the number of bytes of each piece to
        `read`.
        """
        matrix, (inputs, _) = self.matrix, self.matrix.sizes
        size, inner = matrix.outputs[0], int(np.prod(matrix.outputs[1:], dtype=int))
        at_once = max(PIECE // (inputs * inner * self.leaf.itemsize), 1)
        if self.leaf.outer < matrix.inputs:  # on disk the outputs of an input are adjacent
            at_once = size
        for start in range(0, size, at_once):
            index = [slice(None)] * len(matrix.shape)
            index[matrix.inputs] = slice(start, min(start + at_once, size))
            piece = self.leaf.read(index)
            read.append(piece.size * self.leaf.itemsize)
            yield piece.reshape(inputs, -1)


def matrices_of(model: ModelConfig, base: str) -> dict[str, Matrix]:
    """Returns the weights of a layer that are stored quantized in the format `base`, such as "int8": path in the layer,
    such as `attention.w_q` -> the weight's shape and its number of input axes. Returns {} for "bf16".
    """
    if base == "bf16":
        return {}
    one = dataclasses.replace(model, n_layers=1, scan=False, unroll=1, dense_layers=0, moe_every=1)
    abstract = nnx.eval_shape(lambda: Transformer(one, Precision(), base=base, rngs=nnx.Rngs(params=0)))
    return {name.removeprefix("blocks.0."): matrix for name, (_, matrix) in quantized_weights(abstract).items()}


def as_computed(leaf: Leaf, base: str, matrix: Matrix) -> np.ndarray:
    """Quantizes a weight and dequantizes it again. Returns the float32 values with which a training step computes if
    `lora.base` is `base`.

    An export reads frozen weights in this way, so that the exported model computes like the trained one.

    Args:
      leaf: lazy view of the weight on disk.
      base: storage format such as "nf4".
      matrix: shape of the weight, and which of its axes are inputs.
    """
    w = leaf.read()
    arrays = quantize(base, matrix, [w.reshape(matrix.sizes)])
    return np.asarray(dequantize(base, matrix, jax.tree.map(jnp.asarray, arrays), jnp.float32, ONE_DEVICE))
