"""Chooses the next token of each sequence from logits: the most likely token, or a sample with the request's random
key.

A sampled token depends only on the logits, the request's seed and the token's position, never on other sequences of
the batch. Temperature is applied first, then top-k, and then top-p to the tokens that top-k kept, as in
transformers.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature_B", "top_k_B", "top_p_B", "seed_B"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Draws:
    """Sampling settings of each row of a batch. All arrays have the shape [B], where B is the number of rows.

    Fields:
      temperature_B: float32; 0 takes the most likely token.
      top_k_B: int32, keeps only the k most likely tokens; 0 keeps all tokens.
      top_p_B: float32, keeps the most likely tokens until their total probability is p; 1 keeps all tokens.
      seed_B: uint32, the random seed.
    """

    temperature_B: Any  # each field is a jax.Array in a step, an np.ndarray on the host, or a ShapeDtypeStruct
    top_k_B: Any
    top_p_B: Any
    seed_B: Any


def filtered(logits_BV: jax.Array, draws: Draws) -> jax.Array:
    """Divides the logits by the temperature and applies top-k and top-p. Returns logits, float32 [B, V] (B sequences, V
    tokens of the vocabulary).

    Tokens that a filter drops get the lowest float32. The most likely token is never dropped.
    """
    dropped = jnp.finfo(jnp.float32).min
    scaled_BV = logits_BV.astype(jnp.float32) / jnp.where(draws.temperature_B > 0, draws.temperature_B, 1.0)[:, None]
    order_BV = jnp.argsort(-scaled_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
    # Ties with the k-th token are kept.
    last_B1 = jnp.clip(draws.top_k_B, 1, scaled_BV.shape[-1])[:, None] - 1
    kept_BV = (draws.top_k_B[:, None] == 0) | (sorted_BV >= jnp.take_along_axis(sorted_BV, last_B1, axis=-1))
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, dropped), axis=-1)
    # A token is kept while the tokens before it sum to less than top_p.
    kept_BV &= (jnp.cumsum(probs_BV, axis=-1) - probs_BV < draws.top_p_B[:, None]) | (draws.top_p_B[:, None] >= 1)
    kept_BV = kept_BV.at[:, 0].set(True)
    sorted_BV = jnp.where(kept_BV, sorted_BV, dropped)
    return jnp.zeros_like(sorted_BV).at[jnp.arange(len(order_BV))[:, None], order_BV].set(sorted_BV)


def choose(logits_BV: jax.Array, draws: Draws, places_B: jax.Array, drawing: bool) -> jax.Array:
    """Returns the next token of each sequence, int32 [B].

    Args:
      logits_BV: the model's output for the last token of each sequence, one value for each token of the vocabulary.
      draws: temperature, top-k, top-p and seed of each sequence. Temperature 0 takes the most likely token.
      places_B: position of the next token in its sequence. With the seed it determines the random numbers.
      drawing: False if all rows take the most likely token, so that nothing has to be sorted.
    """
    likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if not drawing:
        return likeliest_B

    def draw(logits_V: jax.Array, seed: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), place), logits_V)

    drawn_B = jax.vmap(draw)(filtered(logits_BV, draws), draws.seed_B, places_B).astype(jnp.int32)
    return jnp.where(draws.temperature_B > 0, drawn_B, likeliest_B)
