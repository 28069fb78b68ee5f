"""4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E), as bitsandbytes stores it.

A weight is a matrix [inputs, outputs]. Blocks are 64 numbers along the inputs of one output; each has one scale, its
largest magnitude, and a number is the nearest of 16 levels times that scale. Two neighbours along the inputs share a
byte, the first in the high bits: transposed, the bytes are those of bitsandbytes for the weight [outputs, inputs].
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64

# Appendix E: quantiles of a normal distribution, eight of each sign with one zero, scaled to [-1, 1].
LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# A number between two of them has the upper level; one that equals a bound has the lower level.
BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / 2
SMALLEST = np.float32(1e-38)  # a block of zeros is divided by this


def encode(w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [outputs, inputs / 2] and scales float32 [outputs, inputs / 64] of weights of any float dtype.

    Outputs may come a few at a time.
    """
    outputs, inputs = w_OI.shape
    x = w_OI.astype(np.float32, order="C").reshape(outputs, inputs // BLOCK, BLOCK)
    scale = np.maximum(x.max(-1), -x.min(-1))
    x *= (np.float32(1) / np.maximum(scale, SMALLEST))[..., None]
    # Comparisons in order are five times as fast as a search of each number.
    level, above = np.zeros(x.shape, np.uint8), np.empty(x.shape, bool)
    for bound in BOUNDS:
        level += np.greater(x, bound, out=above).view(np.uint8)
    level = level.reshape(outputs, inputs // 2, 2)
    return (level[..., 0] << 4) | level[..., 1], scale


def encode_on_device(w_IO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of weights [inputs, outputs] that are on a device: codes [inputs / 2, outputs], scales [inputs / 64,
    outputs]."""
    inputs, outputs = w_IO.shape
    x = w_IO.astype(jnp.float32).reshape(inputs // BLOCK, BLOCK, outputs)
    scale = jnp.abs(x).max(1)
    x = x * (1 / jnp.maximum(scale, SMALLEST))[:, None]
    level = jnp.searchsorted(jnp.asarray(BOUNDS), x, method="scan_unrolled").astype(jnp.uint8)
    level = level.reshape(inputs // 2, 2, outputs)
    return (level[:, 0] << 4) | level[:, 1], scale


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 weights [inputs, ...] of codes [inputs / 2, ...] and scales [inputs / 64, ...]; dots: the outputs, of
    any number of dimensions."""
    outputs = codes.shape[1:]
    # Shifted by 4 and by 0: a concatenation of both halves would be a kernel of its own.
    shift = jnp.array([4, 0], jnp.uint8).reshape(1, 2, *[1] * len(outputs))
    levels = look_up(LEVELS, (codes[:, None] >> shift) & 15).reshape(-1, BLOCK, *outputs)
    return (levels * scale[:, None]).reshape(-1, *outputs)


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """`table[index]`, where every index is within the table.

    One gather, which the compiler fuses with what surrounds it. A chain of selects would be fused too, but its
    constants, broadcast to the size of the weight, are moved out of the loop over layers: 16 such arrays.
    """
    dims = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(
        jnp.asarray(table),
        index.astype(jnp.int32)[..., None],
        dims,
        (1,),
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
