"""The block-scaled product as one GPU kernel (Pallas, Triton): 8-bit operands in, scaled and summed in registers.

As a chain of XLA's own products, one per 128 of the contracted dimension, every partial product would go through
memory in float32. Here a partial product stays in registers until it is scaled and added.

From jax 0.11 on a DeprecationWarning of Pallas says that it will drop its Triton backend; there it still works.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering as triton  # no public way to a lowering rule
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jax.extend.core import Primitive
from jax.interpreters import mlir

TILE = 128
CONTRACT_LAST = (((1,), (1,)), ((), ()))

# A product of two tiles [M, 128] and [N, 128] whose 128 terms are summed at the matrix unit's own precision. The usual
# product asks for float32 sums, and for those Triton widens 8-bit floats to 16 bits on Hopper. The unit keeps about 14
# bits of a sum, which is enough where sums of 128 terms are added in float32 (DeepSeek-V3, 3.3.2).
tile_product = Primitive("fp8_tile_product")


@tile_product.def_abstract_eval
def _(a, b, *, dimension_numbers):
    del dimension_numbers
    return jax.core.ShapedArray((a.shape[0], b.shape[0]), jnp.float32)


def _anywhere(a, b, *, dimension_numbers):
    """Off the GPU, where the kernel is interpreted."""
    return jax.lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dimension_numbers)


tile_product.def_impl(_anywhere)
mlir.register_lowering(tile_product, mlir.lower_fun(_anywhere, multiple_results=False))


@triton.register_lowering(tile_product)
def _on_gpu(context, a, b, *, dimension_numbers):
    del dimension_numbers
    from jaxlib.mlir import ir

    shape = context.avals_out[0].shape
    zeros = triton._zeros(ir.RankedTensorType.get(list(shape), ir.F32Type.get()))
    turned = triton.tt_dialect.trans(b, (1, 0))
    return triton.tt_dialect.dot(a, turned, zeros, max_num_imprecise_acc=TILE)


def scaled_product(
    a_MC: jax.Array,
    a_scale: jax.Array,
    b_NC: jax.Array,
    b_scale: jax.Array,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """sum over tiles t of (a_t b_t^T) a_scale_t b_scale_t, [M, N] in `dtype`.

    Args:
      a_MC, b_NC: float8_e4m3fn; a_scale, b_scale: float32 [M, C / 128], [N, C / 128], a last short tile included.
      dtype: of the result; the sums are float32.
      interpret: run as plain jax, for tests without a GPU.
    """
    (M, C), N = a_MC.shape, b_NC.shape[0]
    padded = [-(-size // TILE) * TILE for size in (M, N, C)]
    a_MC, b_NC = _padded(a_MC, padded[0], padded[2]), _padded(b_NC, padded[1], padded[2])
    # Scales lead with the tile: a program reads those of its rows side by side.
    tiles = padded[2] // TILE
    a_scale, b_scale = _padded(a_scale.T, tiles, padded[0]), _padded(b_scale.T, tiles, padded[1])
    out = pl.pallas_call(
        partial(_kernel, tiles),
        grid=(padded[0] // TILE, padded[1] // TILE),
        in_specs=[
            pl.BlockSpec((TILE, padded[2]), lambda i, j: (i, 0)),
            pl.BlockSpec((TILE, padded[2]), lambda i, j: (j, 0)),
            pl.BlockSpec((tiles, TILE), lambda i, j: (0, i)),
            pl.BlockSpec((tiles, TILE), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((padded[0], padded[1]), dtype),
        name="fp8_product",
        compiler_params=pallas_triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(a_MC, b_NC, a_scale, b_scale)
    return out[:M, :N]


def _padded(x: jax.Array, *shape: int) -> jax.Array:
    return jnp.pad(x, [(0, size - own) for size, own in zip(shape, x.shape)]) if x.shape != shape else x


def _kernel(tiles, a_ref, b_ref, a_scale_ref, b_scale_ref, out_ref):
    def add(t, total):
        part = pl.ds(t * TILE, TILE)
        partial_product = tile_product.bind(a_ref[:, part], b_ref[:, part], dimension_numbers=CONTRACT_LAST)
        return total + partial_product * a_scale_ref[t, :][:, None] * b_scale_ref[t, :][None, :]

    zeros = jnp.zeros((TILE, TILE), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, tiles, add, zeros).astype(out_ref.dtype)
