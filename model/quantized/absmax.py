"""Double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3): NF4's scales in 8 bits.

The scales of a weight, less their mean, in blocks of 256, each with one float32: 8 / 64 + 32 / (64 x 256) bits for each
weight instead of 32 / 64. The 8-bit levels are the paper's dynamic ones (Dettmers et al. 2022, arXiv 2110.02861,
section 1.3), those of bitsandbytes. Blocks go through the scales output by output, as in bitsandbytes: one may begin
within one output and end within the next, so each device has the float32 of all blocks.

Every code is of the nearest level, as in bitsandbytes' implementation in PyTorch. Its library for CPUs searches
otherwise and takes the second nearest for about two scales of a thousand.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.model.quantized.nf4 import SMALLEST, look_up

BLOCK = 256


def _dynamic_levels() -> np.ndarray:
    """The 256 numbers of the signed dynamic data type, float32 in order: of each decade from 1e-7 to 1 twice as many as
    of the one below, in the middles of equal intervals, and 0 and 1."""
    positive: list[float] = []
    for decade in range(7):
        count, at = 2**decade, np.arange(2**decade + 1)
        # Rounded where PyTorch's `linspace` rounds, to equal bitsandbytes' numbers.
        step, first = np.float64(np.float32(0.9) / np.float32(count)), np.float64(np.float32(0.1))
        ends = np.where(at < (count + 1) // 2, first + step * at, 1 - step * (count - at)).astype(np.float32)
        positive += list(np.float32(10.0 ** (decade - 6)) * ((ends[1:] + ends[:-1]) / 2))
    return np.array(sorted([*positive, *(-x for x in positive), 0.0, 1.0]), np.float32)


LEVELS = _dynamic_levels()
BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / 2


def blocks_of(scales: int) -> int:
    """Blocks of so many scales, a last short one included."""
    return -(-scales // BLOCK)


def _mean(x: Any, numbers: Any) -> Any:
    """The mean of an array of `numbers`, NumPy or jax.numpy, summed in pairs: the same on every mesh and device."""
    count = x.size
    x = numbers.pad(x.reshape(-1), (0, (1 << (count - 1).bit_length()) - count))
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0] / np.float32(count)


def encode(scale_OB: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [outputs, blocks], float32 [blocks of 256] and the mean, float32 [], of scales [outputs, blocks]."""
    mean = _mean(scale_OB, np)
    x = (scale_OB - mean).reshape(-1)
    x = np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.abs(x).max(-1)
    x = x * (np.float32(1) / np.maximum(largest, SMALLEST))[:, None]
    codes = np.searchsorted(BOUNDS, x.reshape(-1))[: scale_OB.size]
    return codes.astype(np.uint8).reshape(scale_OB.shape), largest, np.asarray(mean)


def encode_on_device(scale_BO: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same of scales [blocks, outputs] that are on a device: codes [blocks, outputs]."""
    blocks, outputs = scale_BO.shape
    scale = scale_BO.T.reshape(-1)
    mean = _mean(scale, jnp)
    x = jnp.pad(scale - mean, (0, -scale.size % BLOCK)).reshape(-1, BLOCK)
    largest = jnp.abs(x).max(-1)
    x = x * (1 / jnp.maximum(largest, SMALLEST))[:, None]
    codes = jnp.searchsorted(jnp.asarray(BOUNDS), x.reshape(-1))[: scale.size]
    return codes.astype(jnp.uint8).reshape(outputs, blocks).T, largest, mean


def decode(codes: jax.Array, largest: jax.Array, mean: jax.Array) -> jax.Array:
    """The float32 scales [blocks, ...] of codes [blocks, ...]; dots: the outputs, of any number of dimensions."""
    blocks, *outputs = codes.shape
    each = jnp.broadcast_to(largest[:, None], (largest.size, BLOCK)).reshape(-1)[: codes.size]
    return look_up(LEVELS, codes) * jnp.moveaxis(each.reshape(*outputs, blocks), -1, 0) + mean
