"""Quantized weights that replace parameters of a block. Their codes and scales are frozen parameters."""

from typing import TypeVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.placement import Placement
from bytescope.model.quantized.quantized_formats import (
    Matrix,
    check_blocks,
    dequantize,
    format_of,
    quantize_on_device,
)

AnyModule = TypeVar("AnyModule", bound=nnx.Module)
# The matrices of a block that are quantized, as in bitsandbytes: all but adapters, norms and biases.
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")


class Quantized(nnx.Module):
    """A weight stored in the quantized format `base`, a row of FORMATS. Each array of the format, such as codes and
    scales, is an attribute."""

    def __init__(self, base: str, matrix: Matrix, w: jax.Array):
        self.base, self.matrix = base, matrix
        parts = format_of(base).parts(matrix)
        for name, array in quantize_on_device(base, matrix, w).items():
            setattr(
                self, name, nnx.Param(array, axes=parts[name].axes, contracted=False, always_float32=False, frozen=True)
            )

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the arrays in which the weight is stored, such as codes and scales: name -> array."""
        return {name: getattr(self, name)[...] for name in format_of(self.base).parts(self.matrix)}

    def read(self, dtype: DTypeLike, place: Placement) -> jax.Array:
        """Returns the dequantized weight in `dtype`, gathered over the devices that store parts of it. The stored
        arrays get no gradient."""
        return dequantize(self.base, self.matrix, jax.lax.stop_gradient(self.arrays()), dtype, place)


def quantized(block: AnyModule, base: str) -> AnyModule:
    """Replaces the weight matrices of `block` by weights stored in the format `base` (a row of FORMATS), in place.
    Returns the block.

    Raises:
      ValueError: the number of inputs of a weight is not a multiple of the block size.
    """
    for _, node in list(nnx.iter_graph(block)):
        if not isinstance(node, nnx.Module):
            continue
        for name, p in list(vars(node).items()):
            if name in WEIGHTS and isinstance(p, nnx.Param):
                matrix = matrix_of(p)
                check_blocks(base, name, matrix)
                setattr(node, name, Quantized(base, matrix, p[...]))
    return block


def matrix_of(p: nnx.Param) -> Matrix:
    """Returns the shape of a weight parameter as a matrix [inputs, outputs]. If the first dimension is the model width
    D, it is the input: [D, H, K] has D inputs. Else all dimensions before D are inputs: [H, K, D] has H * K inputs."""
    axes = p.get_metadata()["axes"]
    return Matrix(p.shape, axes, axes.index("d_model") or 1)


def quantized_weights(model: nnx.Module) -> dict[str, tuple[str, Matrix]]:
    """Returns the quantized weights of a model: dotted path, such as `blocks.attention.w_q` -> (name of the storage
    format, shape as a matrix)."""
    return {
        ".".join(map(str, path)): (node.base, node.matrix)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, Quantized)
    }
