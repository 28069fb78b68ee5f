"""Updates added to parameters in float32, and rounded to the dtype in which the parameters are stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.model import Precision

# numpy's: an import starts no device.
_MULTIPLIER, _MIX = np.uint32(747_796_405), np.uint32(277_803_737)


def random_bits(key: jax.Array, shape: tuple[int, ...], first: jax.Array | int = 0) -> jax.Array:
    """Returns random uint32 of `shape`. They depend only on the position of each element and on `key`: they are the
    same on every mesh.

    first: for a piece of a larger array, its first row along the first axis.

    The position, times an odd stride and from a start that `key` gives, goes through the permutation of PCG-RXS-M-XS
    (O'Neill 2014; as a hash, Jarzynski & Olano 2020). Compilers fuse it into its readers, so that no array of bits need
    exist.
    """
    start, stride = jax.random.bits(key, (2,), jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        here = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * jnp.uint32(size) + here + (jnp.asarray(first).astype(jnp.uint32) if axis == 0 else 0)
    state = (start + place * (stride | jnp.uint32(1))) * _MULTIPLIER + jnp.uint32(2_891_336_453)
    word = ((state >> ((state >> jnp.uint32(28)) + jnp.uint32(4))) ^ state) * _MIX
    return (word >> jnp.uint32(22)) ^ word


def round_stochastic(x: jax.Array, key: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """float32 `x` in bfloat16, rounded up with the probability that makes the mean `x` (Gupta et al. 2015, arXiv
    1502.02551).

    Random low bits are added to the bit pattern, and the bits below bfloat16 are cut off. Numbers that are not finite,
    or representable in bfloat16, stay as they are. `first` as in `random_bits`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(key, x.shape, first) >> jnp.uint32(16))
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def apply_update(
    param: jax.Array, update: jax.Array, precision: Precision, key: jax.Array, number: int, first: jax.Array | int = 0
) -> jax.Array:
    """`param + update`, summed in float32 and rounded to the parameter's dtype as `precision.rounding` says.

    `key`: of this update; parameter `number` of the tree derives its own. `first` as in `random_bits`.
    """
    total = param.astype(jnp.float32) + update.astype(jnp.float32)
    if precision.rounding == "stochastic" and param.dtype == jnp.bfloat16:  # a router's are float32
        return round_stochastic(total, jax.random.fold_in(key, number), first)
    return total.astype(param.dtype)


def apply_updates(params: Any, updates: Any, precision: Precision, key: jax.Array) -> Any:
    """Applies `apply_update` to every parameter of the tree. updates: a tree like `params`. key: of this update."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree,
        [
            apply_update(*pair, precision, key, number)
            for number, pair in enumerate(zip(leaves, jax.tree.leaves(updates)))
        ],
    )
