"""Attention over a pool of pages.

A step computes T tokens of each of B sequences: their keys and values are written into the pool first, then each token
attends to all positions up to its own. Rows of KERNELS, behind one signature:

    run(q_BTHK, pool, view, *, scoring, width, value_width) -> context_BTHV

`width`: of a head as its scores are scaled. Suffixes as in pool.py, and R queries that share a head of keys.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from bytescope.model.attention.scoring import Scoring
from bytescope.model.paged.page_pool import NOBODY, PAGE, PagePool, View
from bytescope.model.paged.triton import attend, takes

# Pages that `blocks` reads at once.
BLOCK = 8


def gather(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """All pages of all sequences at once: they are read into one array, as long as the longest."""
    k_BSGK, v_BSGV = pool.read(view.table_BP, value_width)
    scores_BGRTS = _scores(q_BTHK, k_BSGK, scoring, width)
    scores_BGRTS = _masked(scores_BGRTS, jnp.arange(k_BSGK.shape[1]), view)
    probs_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1).astype(v_BSGV.dtype)
    return _joined(jnp.einsum("bgrts,bsgv->btgrv", probs_BGRTS, v_BSGV), q_BTHK)


def blocks(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """BLOCK pages at a time with a running softmax (Dao et al. 2022, arXiv 2205.14135), in as many turns as the longest
    sequence of the step needs."""
    B, T, H, _ = q_BTHK.shape
    G, P = pool.keys.shape[2], view.table_BP.shape[1]
    count = min(BLOCK, P)
    table_BP = jnp.pad(view.table_BP, ((0, 0), (0, -P % count)), constant_values=NOBODY)
    q_BTHK = q_BTHK.astype(pool.compute)

    def turn(i: jax.Array, carry: tuple) -> tuple:
        sums_BGRTV, most_BGRT, total_BGRT = carry
        k_BSGK, v_BSGV = pool.read(jax.lax.dynamic_slice_in_dim(table_BP, i * count, count, 1), value_width)
        scores_BGRTS = _scores(q_BTHK, k_BSGK, scoring, width)
        scores_BGRTS = _masked(scores_BGRTS, i * count * PAGE + jnp.arange(count * PAGE), view)
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
    least = jnp.finfo(jnp.float32).min
    start = jnp.zeros((*rows, value_width), jnp.float32), jnp.full(rows, least), jnp.zeros(rows, jnp.float32)
    turns = view.positions_BT.max() // (count * PAGE) + 1
    sums_BGRTV, _, total_BGRT = jax.lax.fori_loop(0, turns, turn, start)
    context_BGRTV = sums_BGRTV / jnp.maximum(total_BGRT, 1e-30)[..., None]
    return _joined(jnp.moveaxis(context_BGRTV, 3, 1), q_BTHK)


def _scores(q_BTHK: jax.Array, k_BSGK: jax.Array, scoring: Scoring, width: int) -> jax.Array:
    """float32 [B, G, R, T, S]."""
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K).astype(k_BSGK.dtype)
    products = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32)
    return scoring(products, width)


def _masked(scores_BGRTS: jax.Array, positions_S: jax.Array, view: View) -> jax.Array:
    """Scores of the positions up to each token's own."""
    allowed_BTS = positions_S[None, None] <= view.positions_BT[..., None]
    return jnp.where(allowed_BTS[:, None, None], scores_BGRTS, jnp.finfo(jnp.float32).min)


def _joined(context_BTGRV: jax.Array, q_BTHK: jax.Array) -> jax.Array:
    """The context of all heads, [B, T, H, V], in the queries' dtype."""
    B, T, H, _ = q_BTHK.shape
    return context_BTGRV.reshape(B, T, H, -1).astype(q_BTHK.dtype)


def triton(
    q_BTHK: jax.Array,
    pool: PagePool,
    view: View,
    *,
    scoring: Scoring,
    width: int,
    value_width: int,
    interpret: bool = False,
) -> jax.Array:
    """One kernel for GPUs, where it takes the arrays (model/paged/triton.py); else `blocks`, as for prompts."""
    if not takes(q_BTHK, pool):
        return blocks(q_BTHK, pool, view, scoring=scoring, width=width, value_width=value_width)
    return attend(q_BTHK, pool, view, scoring=scoring, width=width, interpret=interpret)


KERNELS: Mapping[str, Callable[..., jax.Array]] = {"gather": gather, "blocks": blocks, "triton": triton}
