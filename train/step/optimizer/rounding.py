"""Adds updates to parameters in float32 and rounds the sum to the dtype in which the parameters are stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.model import Precision

# NumPy constants, because jax constants would start a device when the module is imported.
_MULTIPLIER, _MIX = np.uint32(747_796_405), np.uint32(277_803_737)


def random_bits(key: jax.Array, shape: tuple[int, ...], first: jax.Array | int = 0) -> jax.Array:
    """Returns random uint32 of `shape`. They depend only on `key` and each element's position, so they are equal on
    every mesh.

    The bits are a hash of key and position, PCG-RXS-M-XS (O'Neill 2014; as a hash, Jarzynski & Olano 2020). Compilers
    fuse the computation into the operations that use it, so no array of bits is stored.

    Args:
      first: if the array is a range of rows of a larger one, the index of its first row in the larger array.
    """
    start, stride = jax.random.bits(key, (2,), jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * jnp.uint32(size) + index + (jnp.asarray(first).astype(jnp.uint32) if axis == 0 else 0)
    state = (start + place * (stride | jnp.uint32(1))) * _MULTIPLIER + jnp.uint32(2_891_336_453)
    word = ((state >> ((state >> jnp.uint32(28)) + jnp.uint32(4))) ^ state) * _MIX
    return (word >> jnp.uint32(22)) ^ word


def round_stochastic(x: jax.Array, key: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Rounds float32 `x` to bfloat16 so that the expected value is `x` (Gupta et al. 2015, arXiv 1502.02551).

    Random low bits are added to the bit pattern, and the bits below bfloat16 are cut off. Numbers that are not finite,
    or exact in bfloat16, are unchanged.

    Args:
      key: random key.
      first: if `x` is a range of rows of a larger array, the index of its first row, so that both get the same random
        bits.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(key, x.shape, first) >> jnp.uint32(16))
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def apply_update(
    param: jax.Array, update: jax.Array, precision: Precision, key: jax.Array, number: int, first: jax.Array | int = 0
) -> jax.Array:
    """Returns `param + update`, summed in float32 and rounded to the parameter's dtype by `precision.rounding`
    ("nearest" or "stochastic").

    Args:
      key: random key of this update.
      number: index of the parameter in the tree, from which the parameter's own key is derived.
      first: if `param` is a range of rows of a larger parameter, the index of its first row.
    """
    total = param.astype(jnp.float32) + update.astype(jnp.float32)
    if precision.rounding == "stochastic" and param.dtype == jnp.bfloat16:  # router parameters are float32
        return round_stochastic(total, jax.random.fold_in(key, number), first)
    return total.astype(param.dtype)


def apply_updates(params: Any, updates: Any, precision: Precision, key: jax.Array) -> Any:
    """Adds `updates`, a tree with the structure of `params`, to the parameters. Sums are float32 and are rounded to the
    parameters' dtypes by `precision.rounding`. `key`: random key of this update."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree,
        [
            apply_update(*pair, precision, key, number)
            for number, pair in enumerate(zip(leaves, jax.tree.leaves(updates)))
        ],
    )
