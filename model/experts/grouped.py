"""Products of rows with the weights of their experts as GPU kernels (Pallas, Triton): one launch for all experts.

Rows are sorted by expert in whole tiles, so each program of a kernel reads the weights of one expert. XLA has no such
product on GPUs: `jax.lax.ragged_dot` becomes a dense product over all experts (16.0 GiB of temporaries for one Mixtral
layer at 8,192 tokens, where these kernels take 1.1). Sums are float32.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from bytescope.model.experts.expert_rows import Tiles

# Largest block of a kernel along a dimension of the weights, and along the one that is summed.
BLOCK, DEPTH = 128, 64


def rows_times(
    x_XC: jax.Array, w: jax.Array, tiles: Tiles, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Each row times the matrix of its expert: x [X, C] and w [E, C, N], or [E, N, C] if `transposed`, to [X, N] in the
    dtype of `x`."""
    (X, C), N = x_XC.shape, w.shape[1 if transposed else 2]
    tile, wide, deep = X // tiles.expert.size, _block(N, BLOCK), _block(C, DEPTH)

    last = tiles.count.size - 1

    def kernel(expert_ref, first_ref, count_ref, x_ref, w_ref, out_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        expert, rows, columns = expert_ref[i], pl.ds(i * tile, tile), pl.ds(j * wide, wide)
        # A buffer for the most rows that can come is empty for the larger part.
        steps = (i < first_ref[last] + count_ref[last]).astype(jnp.int32) * (C // deep)

        def add(step, total):
            part = pl.ds(step * deep, deep)
            block = w_ref[expert, columns, part].T if transposed else w_ref[expert, part, columns]
            return total + jax.lax.dot(x_ref[rows, part], block, preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile, wide), jnp.float32))
        out_ref[rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((X, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(tiles.expert.size, N // wide),
        name="expert_rows",
        **_how(interpret, 2 * (tiles.filled or X) * C * N, x_XC, w, out),
    )(tiles.expert, tiles.first, tiles.count, x_XC, w)


def weights_of(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles, *, interpret: bool = False) -> jax.Array:
    """For each expert the sum over its rows of x^T y: [X, C] and [X, N] to [E, C, N] in the dtype of `x`."""
    (X, C), N, E = x_XC.shape, y_XN.shape[1], tiles.count.size
    tile = X // tiles.expert.size
    high, wide, deep = _block(C, BLOCK), _block(N, BLOCK), _block(tile, DEPTH)

    def kernel(first_ref, count_ref, x_ref, y_ref, out_ref):
        e, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        rows, columns = pl.ds(i * high, high), pl.ds(j * wide, wide)
        begin, steps = first_ref[e] * tile, count_ref[e] * (tile // deep)

        def add(step, total):
            part = pl.ds(begin + step * deep, deep)
            return total + jax.lax.dot(x_ref[part, rows].T, y_ref[part, columns], preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((high, wide), jnp.float32))
        out_ref[e, rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((E, C, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(E, C // high, N // wide),
        name="expert_weights",
        **_how(interpret, 2 * (tiles.filled or X) * C * N, x_XC, y_XN, out),
    )(tiles.first, tiles.count, x_XC, y_XN)


def _block(size: int, largest: int) -> int:
    """The largest power of 2 that divides a dimension, up to `largest`; the dimension itself where that is small."""
    return size if size <= largest else math.gcd(size, largest)


def _how(interpret: bool, flops: int, *arrays: jax.Array | jax.ShapeDtypeStruct) -> dict:
    """The settings of a call; the cost is what reports count for a kernel that they cannot look into."""
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)
    if interpret:
        return {"interpret": True, "cost_estimate": cost}
    return {"compiler_params": pallas_triton.CompilerParams(num_warps=8, num_stages=3), "cost_estimate": cost}
