"""Scales and clipped ranges that make the least error in a product's output, on the calibration text.

The error of a weight's replacement W' is the mean square of X W' - X W. With G = X'X / tokens it is the trace of
D' G D, D = W' - W: so of the text one matrix [inputs, inputs] is kept for each input, whatever its length.

Scales are the inputs' mean magnitudes to a power, the best of 20 (Lin et al. 2023, arXiv 2306.00978, section 3.2, and
its implementation llm-awq). Then each group is clipped to the share of its range that does best by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.quantized import groups

POWERS = 20  # of the magnitudes, from 0 by 1 / POWERS
SHARES = tuple(1 - step / 20 for step in range(10))  # of a group's range that are tried


def scale_of(magnitudes_I: jax.Array, power: jax.Array | float) -> jax.Array:
    """Returns scales [inputs]: magnitudes to a power, normalized so that the largest and the smallest are each other's
    inverse."""
    scale_I = jnp.maximum(magnitudes_I, 1e-4) ** power
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


def error_of(gram_II: jax.Array, delta_IO: jax.Array) -> jax.Array:
    """Returns the trace of D' G D."""
    return (delta_IO * (gram_II @ delta_IO)).sum()


def share_of(gram_II: jax.Array, w_IO: jax.Array, replaced_IO: jax.Array) -> jax.Array:
    """Returns the error of a weight's replacement as a share of the output's mean square; 0 if the output is 0."""
    whole = error_of(gram_II, w_IO)
    return jnp.where(whole > 0, error_of(gram_II, replaced_IO - w_IO) / whole, 0)


@partial(jax.jit, static_argnames="group")
def search_scale(
    gram_II: jax.Array, magnitudes_I: jax.Array, weights: Sequence[jax.Array], group: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (the best scales [inputs], their power, the error of each power [POWERS]) for weights of one input."""

    def error(power: jax.Array) -> jax.Array:
        scale_I1 = scale_of(magnitudes_I, power)[:, None]
        total = jnp.zeros((), jnp.float32)
        for w_IO in weights:
            total += error_of(gram_II, groups.decode(*groups.encode(w_IO * scale_I1, group)) / scale_I1 - w_IO)
        return total

    powers = jnp.arange(POWERS, dtype=jnp.float32) / POWERS
    errors = jax.lax.map(error, powers)  # one after the other: each holds copies of the weights
    power = powers[jnp.argmin(errors)]
    return scale_of(magnitudes_I, power), power, errors


@partial(jax.jit, static_argnames=("group", "clip"))
def quantize(
    gram_II: jax.Array, scale_I: jax.Array, w_IO: jax.Array, group: int, clip: bool
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns (codes, zero points and scales as `groups.encode` gives them; the error as a share of the output's mean
    square).

    gram_II: of the inputs before they were scaled by `scale_I`. w_IO: float32, scaled.
    """
    gram_II = gram_II / (scale_I[:, None] * scale_I[None])
    kept = _shares(gram_II, w_IO, group) if clip else 1.0
    found = groups.encode(w_IO, group, kept)
    return found, share_of(gram_II, w_IO, groups.decode(*found))


def _shares(gram_II: jax.Array, w_IO: jax.Array, group: int) -> jax.Array:
    """Returns for each group the share of its range with the least error of that group alone, float32 [groups,
    outputs]."""
    inputs, outputs = w_IO.shape
    count = inputs // group
    number = jnp.arange(count)
    own_Ggg = gram_II.reshape(count, group, count, group)[number, :, number]

    def better(best: tuple[jax.Array, jax.Array], share: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        delta_GgO = (groups.decode(*groups.encode(w_IO, group, share)) - w_IO).reshape(count, group, outputs)
        error_GO = (delta_GgO * jnp.einsum("gij,gjo->gio", own_Ggg, delta_GgO)).sum(1)
        return (jnp.minimum(error_GO, best[0]), jnp.where(error_GO < best[0], share, best[1])), None

    start = jnp.full((count, outputs), jnp.inf), jnp.ones((count, outputs))
    return jax.lax.scan(better, start, jnp.asarray(SHARES, jnp.float32))[0][1]


@partial(jax.jit, static_argnames="group")
def rounding_error(gram_II: jax.Array, w_IO: jax.Array, group: int) -> jax.Array:
    """Returns the error of plain rounding as a share of the output's mean square."""
    return share_of(gram_II, w_IO, groups.decode(*groups.encode(w_IO, group)))
