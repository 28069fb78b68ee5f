"""4-bit integers with a scale and a zero point for each group of inputs of an output, as AWQ folders have them.

    weight = (code - zero) * scale,  code and zero in 0..15,  scale float16

Round to nearest (Jacob et al. 2018, arXiv 1712.05877, section 2.1) over groups as in Lin et al. 2023 (arXiv 2306.00978,
section 2): of a group the least and the largest number, 0 among them, are 15 steps apart.
"""

import jax
import jax.numpy as jnp

SIZES = (32, 64, 128)  # inputs of a group: what vLLM and transformers read of both layouts
LARGEST = 15
LEAST_SCALE = 1e-5  # a group of zeros is divided by this


def encode(w_IO: jax.Array, group: int, kept: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(codes uint8 [inputs, outputs], zero points uint8 [groups, outputs], scales float16 [groups, outputs]).

    Args:
      w_IO: float32. kept: the share of its range that a group is clipped to, [groups, outputs] or one for all.
    """
    inputs, outputs = w_IO.shape
    w_GIO = w_IO.reshape(inputs // group, group, outputs)
    high_GO, low_GO = jnp.maximum(w_GIO.max(1), 0) * kept, jnp.minimum(w_GIO.min(1), 0) * kept
    # Codes are those of the scale that is stored, not of the one before it is rounded.
    scale_GO = jnp.maximum((high_GO - low_GO) / LARGEST, LEAST_SCALE).astype(jnp.float16)
    wide_GO = scale_GO.astype(jnp.float32)
    zero_GO = jnp.clip(jnp.round(-low_GO / wide_GO), 0, LARGEST)
    codes_GIO = jnp.clip(jnp.round(w_GIO / wide_GO[:, None]) + zero_GO[:, None], 0, LARGEST)
    return codes_GIO.reshape(inputs, outputs).astype(jnp.uint8), zero_GO.astype(jnp.uint8), scale_GO


def decode(codes: jax.Array, zero: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 weights [inputs, ...] of codes of that shape, zero points and scales [groups, ...]."""
    groups, *outputs = scale.shape
    whole = codes.reshape(groups, -1, *outputs).astype(jnp.float32) - zero[:, None].astype(jnp.float32)
    return (whole * scale[:, None].astype(jnp.float32)).reshape(codes.shape)


def pack(codes: jax.Array) -> jax.Array:
    """Two codes a byte, uint8 [inputs / 2, ...]: of two neighbours along the inputs the first in the low bits."""
    pairs = codes.reshape(codes.shape[0] // 2, 2, *codes.shape[1:])
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of `pack`."""
    # Shifted by 0 and by 4: a concatenation of both halves would be a kernel of its own.
    shift = jnp.array([0, 4], jnp.uint8).reshape(1, 2, *[1] * (packed.ndim - 1))
    return ((packed[:, None] >> shift) & LARGEST).reshape(2 * packed.shape[0], *packed.shape[1:])
