"""4-bit integer weights, the format of AWQ folders. The inputs of each output are divided into groups; a group has one
scale and one zero point.

    weight = (code - zero) * scale,  code and zero in 0..15,  scale float16

Codes are rounded to nearest (Jacob et al. 2018, arXiv 1712.05877, section 2.1). Groups are those of Lin et al. 2023
(arXiv 2306.00978, section 2): the 15 steps cover the range from the minimum to the maximum of a group, with 0 included.
"""

import jax
import jax.numpy as jnp

SIZES = (32, 64, 128)  # inputs per group that both vLLM and transformers can read
LARGEST = 15
MIN_SCALE = 1e-5  # lower bound of a group's scale, for groups of zeros


def encode(w_IO: jax.Array, group: int, kept: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes weights to 4-bit codes with one scale and zero point per group of consecutive inputs. Returns codes
    uint8 [inputs, outputs], zero points uint8 and scales float16 [groups, outputs].

    Args:
      w_IO: float32 weights [inputs, outputs].
      group: number of inputs in a group.
      kept: clip ratio, the fraction (0 to 1) of a group's range that is represented; [groups, outputs], or one number
        for all groups.
    """
    inputs, outputs = w_IO.shape
    w_GIO = w_IO.reshape(inputs // group, group, outputs)
    high_GO, low_GO = jnp.maximum(w_GIO.max(1), 0) * kept, jnp.minimum(w_GIO.min(1), 0) * kept
    # Codes are computed with the stored float16 scale, not with the scale before rounding.
    scale_GO = jnp.maximum((high_GO - low_GO) / LARGEST, MIN_SCALE).astype(jnp.float16)
    scale32_GO = scale_GO.astype(jnp.float32)
    zero_GO = jnp.clip(jnp.round(-low_GO / scale32_GO), 0, LARGEST)
    codes_GIO = jnp.clip(jnp.round(w_GIO / scale32_GO[:, None]) + zero_GO[:, None], 0, LARGEST)
    return codes_GIO.reshape(inputs, outputs).astype(jnp.uint8), zero_GO.astype(jnp.uint8), scale_GO


def decode(codes: jax.Array, zero: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the float32 weights [inputs, ...] of `codes` [inputs, ...], zero points and scales [groups, ...]. `...`
    are the output dimensions."""
    groups, *outputs = scale.shape
    whole = codes.reshape(groups, -1, *outputs).astype(jnp.float32) - zero[:, None].astype(jnp.float32)
    return (whole * scale[:, None].astype(jnp.float32)).reshape(codes.shape)


def pack(codes: jax.Array) -> jax.Array:
    """Packs two 4-bit codes per byte: uint8 [inputs, ...] -> uint8 [inputs / 2, ...]. The first of two adjacent inputs
    is in the low 4 bits."""
    pairs = codes.reshape(codes.shape[0] // 2, 2, *codes.shape[1:])
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack(packed: jax.Array) -> jax.Array:
    """Unpacks 4-bit codes, two per byte: uint8 [inputs / 2, ...] -> uint8 [inputs, ...]. The inverse of `pack`."""
    # Shifts by 0 and by 4, because a concatenation of both halves would be a separate kernel.
    shift = jnp.array([0, 4], jnp.uint8).reshape(1, 2, *[1] * (packed.ndim - 1))
    return ((packed[:, None] >> shift) & LARGEST).reshape(2 * packed.shape[0], *packed.shape[1:])
