"""Finds scales and clipped ranges that minimize the error of a matrix product's output on the calibration text.

The error of a weight W that is replaced by W' is the mean square of X W' - X W. With G = X'X / tokens it is the trace
of D' G D, where D = W' - W. So only one matrix [inputs, inputs] is kept per input, however long the text is.

Scales are powers of the inputs' mean magnitudes; the best of 20 exponents is chosen (Lin et al. 2023, arXiv
2306.00978, section 3.2, and its implementation llm-awq). Then the range of each group is clipped to the fraction with
the least error of this group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.quantized import groups

POWERS = 20  # number of exponents to try: 0, 1 / POWERS, 2 / POWERS, ...
SHARES = tuple(1 - step / 20 for step in range(10))  # fractions of a group's range to try


def scale_of(magnitudes_I: jax.Array, power: jax.Array | float) -> jax.Array:
    """Returns a scale for each input channel, [inputs]: the mean magnitude |x| of the channel raised to a power. The
    scales are normalized so that the largest is the inverse of the smallest."""
    scale_I = jnp.maximum(magnitudes_I, 1e-4) ** power
    return scale_I / jnp.sqrt(scale_I.max() * scale_I.min())


def error_of(gram_II: jax.Array, delta_IO: jax.Array) -> jax.Array:
    """Returns the squared error of the outputs X W if D = `delta_IO` is added to the weights W, summed over the
    outputs.

    It is the trace of D' G D, where G = `gram_II` is X'X of the inputs X [tokens, inputs], summed or averaged over
    tokens.
    """
    return (delta_IO * (gram_II @ delta_IO)).sum()


def share_of(gram_II: jax.Array, w_IO: jax.Array, replaced_IO: jax.Array) -> jax.Array:
    """Returns the squared error of the outputs if the weight `w_IO` is replaced by `replaced_IO`, as a fraction of the
    outputs' sum of squares. Returns 0 if the outputs are 0. `gram_II`: X'X of the inputs X [tokens, inputs]."""
    whole = error_of(gram_II, w_IO)
    return jnp.where(whole > 0, error_of(gram_II, replaced_IO - w_IO) / whole, 0)


@partial(jax.jit, static_argnames="group")
def search_scale(
    gram_II: jax.Array, magnitudes_I: jax.Array, weights: Sequence[jax.Array], group: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the scales of the input channels that several weights share. The best scales give the smallest error of the
    quantized weights' outputs. A scale is the channel's mean |x| raised to an exponent.

    Returns the best scales [inputs], their exponent, and the error of each exponent that was tried, [POWERS].

    Args:
      gram_II: X'X of the inputs X [tokens, inputs].
      magnitudes_I: mean |x| of the inputs.
      weights: the weights, each [inputs, outputs].
      group: number of inputs whose 4-bit codes share a quantization scale.
    """

    def error(power: jax.Array) -> jax.Array:
        scale_I1 = scale_of(magnitudes_I, power)[:, None]
        total = jnp.zeros((), jnp.float32)
        for w_IO in weights:
            total += error_of(gram_II, groups.decode(*groups.encode(w_IO * scale_I1, group)) / scale_I1 - w_IO)
        return total

    powers = jnp.arange(POWERS, dtype=jnp.float32) / POWERS
    errors = jax.lax.map(error, powers)  # sequentially, since each needs copies of the weights
    power = powers[jnp.argmin(errors)]
    return scale_of(magnitudes_I, power), power, errors


@partial(jax.jit, static_argnames=("group", "clip"))
def quantize(
    gram_II: jax.Array, scale_I: jax.Array, w_IO: jax.Array, group: int, clip: bool
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Quantizes a weight whose input channels are already scaled. Returns ((codes uint8 [inputs, outputs], zero points
    uint8 and scales float16, both [groups, outputs]), error of the outputs as a fraction of their mean square).

    Args:
      gram_II: X'X of the inputs X [tokens, inputs], before they were divided by `scale_I`.
      scale_I: scale of each input channel.
      w_IO: the scaled weight, float32.
      group: number of inputs whose 4-bit codes share a quantization scale.
      clip: True to clip the range of groups if that reduces the error.
    """
    gram_II = gram_II / (scale_I[:, None] * scale_I[None])
    kept = _best_clip_ratios(gram_II, w_IO, group) if clip else 1.0
    codes = groups.encode(w_IO, group, kept)
    return codes, share_of(gram_II, w_IO, groups.decode(*codes))


def _best_clip_ratios(gram_II: jax.Array, w_IO: jax.Array, group: int) -> jax.Array:
    """Returns the clip ratio with the smallest output error for each quantization group, float32 [groups, outputs].

    The clip ratio is the fraction of a group's range that is kept. `gram_II`: X'X of the weight's inputs X [tokens,
    inputs]. `group`: number of inputs in a quantization group.
    """
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
