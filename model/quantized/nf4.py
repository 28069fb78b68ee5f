"""4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E), as bitsandbytes stores it.

A weight is a matrix [inputs, outputs]. Blocks are 64 numbers along the inputs of one output; each has one scale, its
largest magnitude, and a number is the nearest of 16 levels times that scale. Two neighbours along the inputs share a
byte, the first in the high bits: transposed, the bytes are those of bitsandbytes for the weight [outputs, inputs].
"""

from typing import Any

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
    """Quantizes weights [inputs, outputs] on a device: codes [inputs / 2, outputs], scales [inputs / 64, outputs]."""
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


# ---- double quantization (section 3): scales in 8 bits ---------------------------------------------------------------
#
# The scales of a weight, less their mean, are in blocks of 256, each with one float32: 8 / 64 + 32 / (64 x 256) bits
# for each weight instead of 32 / 64. The 8-bit levels are the paper's dynamic ones (Dettmers et al. 2022, arXiv
# 2110.02861, section 1.3), those of bitsandbytes. Blocks go through the scales output by output, as in bitsandbytes:
# one may begin within one output and end within the next, so each device has the float32 of all blocks.
#
# Every code is that of the nearest level, as in bitsandbytes' implementation in PyTorch. Its library for CPUs searches
# otherwise and takes the second nearest for about two scales of a thousand.

SCALE_BLOCK = 256


def _dynamic_levels() -> np.ndarray:
    """Returns the 256 numbers of the signed dynamic data type, float32 in order: 0, 1, and in each decade from 1e-7
    to 1 twice as many as in the decade below, in the middles of equal intervals.
    """
    positive: list[float] = []
    for decade in range(7):
        count, at = 2**decade, np.arange(2**decade + 1)
        # Rounded where PyTorch's `linspace` rounds, to equal bitsandbytes' numbers.
        step, first = np.float64(np.float32(0.9) / np.float32(count)), np.float64(np.float32(0.1))
        ends = np.where(at < (count + 1) // 2, first + step * at, 1 - step * (count - at)).astype(np.float32)
        positive += list(np.float32(10.0 ** (decade - 6)) * ((ends[1:] + ends[:-1]) / 2))
    return np.array(sorted([*positive, *(-x for x in positive), 0.0, 1.0]), np.float32)


SCALE_LEVELS = _dynamic_levels()
SCALE_BOUNDS = (SCALE_LEVELS[1:] + SCALE_LEVELS[:-1]) / 2


def scale_blocks(scales: int) -> int:
    """Returns the number of blocks of so many scales; a last short block counts."""
    return -(-scales // SCALE_BLOCK)


def _mean(x: Any, numbers: Any) -> Any:
    """The mean of an array of `numbers`, NumPy or jax.numpy, summed in pairs: the same on every mesh and device."""
    count = x.size
    x = numbers.pad(x.reshape(-1), (0, (1 << (count - 1).bit_length()) - count))
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0] / np.float32(count)


def encode_scales(scale_OB: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [outputs, blocks], float32 [blocks of 256] and the mean, float32 [], of scales [outputs, blocks]."""
    mean = _mean(scale_OB, np)
    x = (scale_OB - mean).reshape(-1)
    x = np.pad(x, (0, -x.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    largest = np.abs(x).max(-1)
    x = x * (np.float32(1) / np.maximum(largest, SMALLEST))[:, None]
    codes = np.searchsorted(SCALE_BOUNDS, x.reshape(-1))[: scale_OB.size]
    return codes.astype(np.uint8).reshape(scale_OB.shape), largest, np.asarray(mean)


def encode_scales_on_device(scale_BO: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes scales [blocks, outputs] on a device: codes [blocks, outputs], float32 [blocks of 256], mean."""
    blocks, outputs = scale_BO.shape
    scale = scale_BO.T.reshape(-1)
    mean = _mean(scale, jnp)
    x = jnp.pad(scale - mean, (0, -scale.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    largest = jnp.abs(x).max(-1)
    x = x * (1 / jnp.maximum(largest, SMALLEST))[:, None]
    codes = jnp.searchsorted(jnp.asarray(SCALE_BOUNDS), x.reshape(-1))[: scale.size]
    return codes.astype(jnp.uint8).reshape(outputs, blocks).T, largest, mean


def decode_scales(codes: jax.Array, largest: jax.Array, mean: jax.Array) -> jax.Array:
    """The float32 scales [blocks, ...] of codes [blocks, ...]; dots: the outputs, of any number of dimensions."""
    blocks, *outputs = codes.shape
    each = jnp.broadcast_to(largest[:, None], (largest.size, SCALE_BLOCK)).reshape(-1)[: codes.size]
    return look_up(SCALE_LEVELS, codes) * jnp.moveaxis(each.reshape(*outputs, blocks), -1, 0) + mean
