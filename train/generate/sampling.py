"""Chooses the next token of each sequence from logits: the most likely one, or a sample with the request's own key.

A drawn token depends on the logits, the request's seed and the token's place alone, never on what else is in the
batch. Of the filters temperature comes first, then top-k, top-p and min-p, each over what those before it left, as
transformers has them.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature_B", "top_k_B", "top_p_B", "min_p_B", "seed_B"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Draws:
    """How the tokens of a batch are chosen.

    Fields:
      temperature_B: float32, 0 for the likeliest token. top_k_B: int32, 0 for all. top_p_B: float32, 1 for all.
      min_p_B: float32, 0 for all. seed_B: uint32.
    """

    temperature_B: Any  # each: jax.Array in a step, np.ndarray on its way there, ShapeDtypeStruct to describe one
    top_k_B: Any
    top_p_B: Any
    min_p_B: Any
    seed_B: Any


def filtered(logits_BV: jax.Array, draws: Draws) -> jax.Array:
    """Returns logits at their temperature, float32 [B, V], with the lowest float32 for tokens that a filter drops. The
    most likely token always stays."""
    least = jnp.finfo(jnp.float32).min
    scaled_BV = logits_BV.astype(jnp.float32) / jnp.where(draws.temperature_B > 0, draws.temperature_B, 1.0)[:, None]
    order_BV = jnp.argsort(-scaled_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
    # Tokens as likely as the k-th stay too.
    last_B1 = jnp.clip(draws.top_k_B, 1, scaled_BV.shape[-1])[:, None] - 1
    kept_BV = (draws.top_k_B[:, None] == 0) | (sorted_BV >= jnp.take_along_axis(sorted_BV, last_B1, axis=-1))
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, least), axis=-1)
    # A token stays while those before it do not come to top_p yet.
    kept_BV &= (jnp.cumsum(probs_BV, axis=-1) - probs_BV < draws.top_p_B[:, None]) | (draws.top_p_B[:, None] >= 1)
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, least), axis=-1)
    kept_BV &= probs_BV >= draws.min_p_B[:, None] * probs_BV[:, :1]
    kept_BV = kept_BV.at[:, 0].set(True)
    sorted_BV = jnp.where(kept_BV, sorted_BV, least)
    return jnp.zeros_like(sorted_BV).at[jnp.arange(len(order_BV))[:, None], order_BV].set(sorted_BV)


def choose(logits_BV: jax.Array, draws: Draws, places_B: jax.Array, drawing: bool) -> jax.Array:
    """Returns the next token of each sequence, int32 [B]. places_B: its position in the sequence. drawing: whether any
    row samples; if none does, nothing is sorted."""
    likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if not drawing:
        return likeliest_B

    def draw(logits_V: jax.Array, seed: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), place), logits_V)

    drawn_B = jax.vmap(draw)(filtered(logits_BV, draws), draws.seed_B, places_B).astype(jnp.int32)
    return jnp.where(draws.temperature_B > 0, drawn_B, likeliest_B)
