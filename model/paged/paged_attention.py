"""Attention over a pool of pages.

A step computes T tokens of each of B sequences. Their keys and values are written into the pool first, then each token
attends to all positions up to its own. Suffixes are those of page_pool.py, and R is the number of queries that share a
head of keys.
"""

import jax
import jax.numpy as jnp

from bytescope.model.attention.chunked import Scoring
from bytescope.model.paged.page_pool import NOBODY, PAGE, PagePool, View

# Number of pages that are read at once.
BLOCK = 8


def attend(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """Computes attention of new tokens to the keys and values in a page pool, BLOCK pages at a time with a running
    softmax (Dao et al. 2022, arXiv 2205.14135). Returns the context [B, T, H, V] in the dtype of the queries; rows of
    padding tokens are arbitrary.

    The longest sequence determines the number of loop iterations.

    Args:
      q_BTHK: queries of the tokens.
      pool: pages with the keys and values of one layer, the tokens' own included.
      view: positions of the tokens, and the pages of their sequences.
      scoring: turns query-key dot products into attention scores.
      width: head width that scales the scores.
      value_width: V, elements of a value.
    """
    B, T, H, _ = q_BTHK.shape
    G, P = pool.keys.shape[2], view.table_BP.shape[1]
    count = min(BLOCK, P)
    table_BP = jnp.pad(view.table_BP, ((0, 0), (0, -P % count)), constant_values=NOBODY)
    q_BTHK = q_BTHK.astype(pool.compute)

    def turn(i: jax.Array, carry: tuple) -> tuple:
        sums_BGRTV, most_BGRT, total_BGRT = carry
        k_BSGK, v_BSGV = pool.read(jax.lax.dynamic_slice_in_dim(table_BP, i * count, count, 1), value_width)
        scores_BGRTS = _scores(q_BTHK, k_BSGK, scoring, width)
        scores_BGRTS = _mask_later_keys(scores_BGRTS, i * count * PAGE + jnp.arange(count * PAGE), view)
        above_BGRT = jnp.maximum(most_BGRT, scores_BGRTS.max(-1))
        probs_BGRTS = jnp.exp(scores_BGRTS - above_BGRT[..., None])
        kept_BGRT = jnp.exp(most_BGRT - above_BGRT)
        added_BGRTV = jnp.einsum(
            "bgrts,bsgv->bgrtv", probs_BGRTS.astype(v_BSGV.dtype), v_BSGV, preferred_element_type=jnp.float32
        )
        return (
            sums_BGRTV * kept_BGRT[..., None] + added_BGRTV,
            above_BGRT,
            total_BGRT * kept_BGRT + probs_BGRTS.sum(-1),
        )

    rows = (B, G, H // G, T)
    lowest = jnp.finfo(jnp.float32).min
    start = jnp.zeros((*rows, value_width), jnp.float32), jnp.full(rows, lowest), jnp.zeros(rows, jnp.float32)
    turns = view.positions_BT.max() // (count * PAGE) + 1
    sums_BGRTV, _, total_BGRT = jax.lax.fori_loop(0, turns, turn, start)
    context_BGRTV = sums_BGRTV / jnp.maximum(total_BGRT, 1e-30)[..., None]
    return _merge_heads(jnp.moveaxis(context_BGRTV, 3, 1), q_BTHK)


def _scores(q_BTHK: jax.Array, k_BSGK: jax.Array, scoring: Scoring, width: int) -> jax.Array:
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K).astype(k_BSGK.dtype)
    products = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32)
    return scoring(products, width)


def _mask_later_keys(scores_BGRTS: jax.Array, positions_S: jax.Array, view: View) -> jax.Array:
    allowed_BTS = positions_S[None, None] <= view.positions_BT[..., None]
    return jnp.where(allowed_BTS[:, None, None], scores_BGRTS, jnp.finfo(jnp.float32).min)


def _merge_heads(context_BTGRV: jax.Array, q_BTHK: jax.Array) -> jax.Array:
    B, T, H, _ = q_BTHK.shape
    return context_BTGRV.reshape(B, T, H, -1).astype(q_BTHK.dtype)
