"""4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E), as bitsandbytes stores it.

A weight is a matrix [inputs, outputs]. A block is 64 elements along the inputs of one output. Each block has one
scale, its largest magnitude, and an element is stored as the nearest of 16 levels times that scale. Two neighbors
along the inputs share a byte, the first in the high bits. The transposed bytes equal the bytes of bitsandbytes for the
weight [outputs, inputs].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64

# Appendix E: quantiles of a normal distribution, eight for each sign with a common zero, scaled to [-1, 1].
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
# The bounds between levels. A number above a bound gets the upper level, a number equal to it the lower level.
BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / 2
SMALLEST = np.float32(1e-38)  # lower bound of a block's divisor, for blocks of zeros


def encode(w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes weights [outputs, inputs] of any float dtype to NF4, a 4-bit format, on the host.

    Returns codes uint8 [outputs, inputs / 2], two per byte, and scales float32 [outputs, inputs / 64]. Outputs are
    independent, so a weight can be quantized in pieces.
    """
    outputs, inputs = w_OI.shape
    x = w_OI.astype(np.float32, order="C").reshape(outputs, inputs // BLOCK, BLOCK)
    scale = np.maximum(x.max(-1), -x.min(-1))
    x *= (np.float32(1) / np.maximum(scale, SMALLEST))[..., None]
    # Comparisons with each bound are five times as fast as a binary search per number.
    level, above = np.zeros(x.shape, np.uint8), np.empty(x.shape, bool)
    for bound in BOUNDS:
        level += np.greater(x, bound, out=above).view(np.uint8)
    level = level.reshape(outputs, inputs // 2, 2)
    return (level[..., 0] << 4) | level[..., 1], scale


def encode_on_device(w_IO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes weights [inputs, outputs] to NF4, a 4-bit format, on a device. Returns codes uint8 [inputs / 2,
    outputs], two per byte, and scales float32 [inputs / 64, outputs]."""
    inputs, outputs = w_IO.shape
    x = w_IO.astype(jnp.float32).reshape(inputs // BLOCK, BLOCK, outputs)
    scale = jnp.abs(x).max(1)
    x = x * (1 / jnp.maximum(scale, SMALLEST))[:, None]
    level = jnp.searchsorted(jnp.asarray(BOUNDS), x, method="scan_unrolled").astype(jnp.uint8)
    level = level.reshape(inputs // 2, 2, outputs)
    return (level[:, 0] << 4) | level[:, 1], scale


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the float32 weights [inputs, ...] of NF4 codes [inputs / 2, ...], two per byte, and scales [inputs / 64,
    ...].

    `...` are the output dimensions.
    """
    outputs = codes.shape[1:]
    # Shifts by 4 and by 0, because a concatenation of both halves would be a separate kernel.
    shift = jnp.array([4, 0], jnp.uint8).reshape(1, 2, *[1] * len(outputs))
    levels = look_up(LEVELS, (codes[:, None] >> shift) & 15).reshape(-1, BLOCK, *outputs)
    return (levels * scale[:, None]).reshape(-1, *outputs)


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Returns `table[index]`, the levels of codes. Every index must be within the table.

    This is one gather, which the compiler fuses with the surrounding operations. It would also fuse a chain of selects,
    but would broadcast their 16 constants to the size of the weight and hoist them out of the loop over layers.
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
# The scales of a weight, minus their mean, are in blocks of 256, each with one float32: 8 / 64 + 32 / (64 x 256) bits
# per weight instead of 32 / 64. The 8-bit levels are the dynamic levels of Dettmers et al. 2022 (arXiv 2110.02861,
# section 1.3), as in bitsandbytes. Blocks run through the scales output by output, as in bitsandbytes: a block may
# begin within one output and end within the next, so each device has the float32 scales of all blocks.
#
# Every code is the code of the nearest level, as in bitsandbytes' PyTorch implementation. Its CPU library searches
# differently and takes the second nearest level for about two scales in a thousand.

SCALE_BLOCK = 256


def _dynamic_levels() -> np.ndarray:
    """Returns the 256 values (levels) of the signed dynamic 8-bit data type of bitsandbytes, float32 in ascending
    order.

    The levels are 0, 1, and levels of both signs in each of the 7 decades from 1e-7 to 1. Decade k is divided into 2^k
    equal intervals, whose centers are its levels.
    """
    positive: list[float] = []
    for decade in range(7):
        count, at = 2**decade, np.arange(2**decade + 1)
        # Rounded like PyTorch's `linspace`, to match the levels of bitsandbytes.
        step, first = np.float64(np.float32(0.9) / np.float32(count)), np.float64(np.float32(0.1))
        ends = np.where(at < (count + 1) // 2, first + step * at, 1 - step * (count - at)).astype(np.float32)
        positive += list(np.float32(10.0 ** (decade - 6)) * ((ends[1:] + ends[:-1]) / 2))
    return np.array(sorted([*positive, *(-x for x in positive), 0.0, 1.0]), np.float32)


SCALE_LEVELS = _dynamic_levels()
SCALE_BOUNDS = (SCALE_LEVELS[1:] + SCALE_LEVELS[:-1]) / 2


def scale_blocks(scales: int) -> int:
    """Returns the number of blocks into which `scales` scales are divided when they are quantized themselves. A block
    has SCALE_BLOCK scales; the last block may be shorter."""
    return -(-scales // SCALE_BLOCK)


def _pairwise_mean(x: Any, numbers: Any) -> Any:
    # Summed pairwise, so that the result is equal on every mesh and device. `numbers` is NumPy or jax.numpy.
    count = x.size
    x = numbers.pad(x.reshape(-1), (0, (1 << (count - 1).bit_length()) - count))
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0] / np.float32(count)


def encode_scales(scale_OB: Any, numbers: Any = np) -> tuple[Any, Any, Any]:
    """Quantizes the scales of quantized weights, [outputs, blocks], to 8 bits (double quantization). Returns codes
    uint8 [outputs, blocks], float32 scales (one per 256 codes) and the mean that was subtracted first, float32 [].

    `numbers`: NumPy to compute on the host, jax.numpy to compute on a device.
    """
    mean = _pairwise_mean(scale_OB, numbers)
    x = (scale_OB - mean).reshape(-1)
    x = numbers.pad(x, (0, -x.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    largest = numbers.abs(x).max(-1)
    x = x * (np.float32(1) / numbers.maximum(largest, SMALLEST))[:, None]
    codes = numbers.searchsorted(numbers.asarray(SCALE_BOUNDS), x.reshape(-1))[: scale_OB.size]
    return codes.astype(np.uint8).reshape(scale_OB.shape), largest, numbers.asarray(mean)


def decode_scales(codes: jax.Array, largest: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns the float32 scales [blocks, ...] of 8-bit codes [blocks, ...]. `largest`: the factor of every 256 codes.
    `mean`: the mean that was subtracted before quantization."""
    blocks, *outputs = codes.shape
    each = jnp.broadcast_to(largest[:, None], (largest.size, SCALE_BLOCK)).reshape(-1)[: codes.size]
    return look_up(SCALE_LEVELS, codes) * jnp.moveaxis(each.reshape(*outputs, blocks), -1, 0) + mean
