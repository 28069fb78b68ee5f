"""Rotary position embeddings: the frequencies of a head's element pairs, and the rotation of queries and keys."""

import math

import jax
import jax.numpy as jnp


def rope_frequencies(d_head: int, theta: float, scaling: tuple[float, ...]) -> jax.Array:
    """Returns the rotation angle per position of each pair of elements, [d_head / 2] float32 (Su et al. 2021, arXiv
    2104.09864). `theta`: the base of the angles. `scaling`: () or one of three forms.

    (factor,): all pairs are slowed by `factor`, which interpolates positions (Chen et al. 2023, arXiv 2306.15595).

    (factor, low, high, original), Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783): wavelengths above original/low
    are stretched by `factor`, wavelengths below original/high are unchanged, and the others are blended.

    (factor, fast, slow, original, amplitude), YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): pairs with more
    than `fast` rotations within the original length keep their frequency. Pairs with fewer than `slow` are slowed by
    `factor`. The others are blended linearly by the index of the pair. `amplitude` is not used here; it is an argument
    of `rotate`.
    """
    frequency = theta ** -(jnp.arange(0, d_head, 2, dtype=jnp.float32) / d_head)
    if not scaling:
        return frequency
    if len(scaling) == 1:
        return frequency / scaling[0]
    if len(scaling) == 5:
        factor, fast, slow, original, _ = scaling
        first, last = (
            d_head * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))
            for rotations in (fast, slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), d_head - 1)
        pairs = jnp.arange(d_head // 2, dtype=jnp.float32)
        slowed = jnp.clip((pairs - first) / max(last - first, 0.001), 0.0, 1.0)
        return frequency * (1 - slowed + slowed / factor)
    factor, low, high, original = scaling
    rotations = original * frequency / (2 * math.pi)  # of each pair, within the original length
    blend = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return frequency * (blend + (1 - blend) / factor)


def rotate(x_BLHK: jax.Array, positions: jax.Array, frequency: jax.Array, amplitude: float = 1.0) -> jax.Array:
    """Applies rotary positions: rotates the pairs (x[i], x[i + K/2]) of each head by an angle that grows with the
    position. Computed in float32; returns the dtype of `x_BLHK`.

    Args:
      positions: int32 [L], or [B, L] if rows differ.
      frequency: the angles per position, result of `rope_frequencies`.
      amplitude: factor of the result (YaRN's attention factor).
    """
    positions = positions.astype(jnp.float32)
    positions = positions[None, :, None, None] if positions.ndim == 1 else positions[:, :, None, None]
    angle = positions * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if amplitude != 1.0:
        cos, sin = amplitude * cos, amplitude * sin
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHK.dtype)


@jax.custom_vjp
def rotate_by_layer(x_BLHK: jax.Array, positions: jax.Array, frequency: jax.Array) -> jax.Array:
    """Applies rotary positions like `rotate` (rotates pairs of each head's elements by position). The frequencies may
    depend on the layer and get no gradient.

    Saves only the positions and frequencies for the backward pass, not the sines and cosines of all positions.
    """
    return rotate(x_BLHK, positions, frequency)


# The transpose of a rotation is the rotation by the negative angle.
rotate_by_layer.defvjp(
    lambda x_BLHK, positions, frequency: (rotate(x_BLHK, positions, frequency), (positions, frequency)),
    lambda kept, d_BLHK: (rotate(d_BLHK, kept[0], -kept[1]), None, None),
)
