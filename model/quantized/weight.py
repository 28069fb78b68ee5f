"""A frozen weight in the place of a parameter of a block: its codes and scales are parameters that nothing trains."""

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
# The matrices of a block that are quantized, as bitsandbytes has it: all but adapters, norms and biases.
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")


class Quantized(nnx.Module):
    """A weight that is stored as the row `base` of FORMATS says; each array of that row is an attribute."""

    def __init__(self, base: str, matrix: Matrix, w: jax.Array):
        self.base, self.matrix = base, matrix
        parts = format_of(base).parts(matrix)
        for name, array in quantize_on_device(base, matrix, w).items():
            setattr(self, name, nnx.Param(array, axes=parts[name].axes, contracted=False, wide=False, frozen=True))

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the stored arrays by name."""
        return {name: getattr(self, name)[...] for name in format_of(self.base).parts(self.matrix)}

    def read(self, dtype: DTypeLike, place: Placement) -> jax.Array:
        """The weight in `dtype`, gathered for the computation; no gradient goes to what is stored."""
        return dequantize(self.base, self.matrix, jax.lax.stop_gradient(self.arrays()), dtype, place)


def quantized(block: AnyModule, base: str) -> AnyModule:
    """The block with the weights of its products stored as the row `base` of FORMATS says; in place.

    Raises:
      ValueError: a weight whose inputs are not whole blocks.
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
    """Returns the matrix of a parameter of a product, whose inputs are the model width or whose outputs are."""
    axes = p.get_metadata()["axes"]
    return Matrix(p.shape, axes, axes.index("d_model") or 1)


def quantized_weights(model: nnx.Module) -> dict[str, tuple[str, Matrix]]:
    """The dotted path of every quantized weight, such as `blocks.attention.w_q` -> its row of FORMATS, its matrix."""
    return {
        ".".join(map(str, path)): (node.base, node.matrix)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, Quantized)
    }
