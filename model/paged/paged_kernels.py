"""Attention over a pool of pages.

A step computes T tokens of each of B sequences. Their keys and values are written into the pool first, then each token
attends to all positions up to its own. The kernels are rows of KERNELS with one signature:

    run(q_BTHK, pool, view, *, scoring, width, value_width) -> context_BTHV

`width` is the head width that scales the scores, `value_width` is V. Suffixes are those of page_pool.py, and R is the
number of queries that share a head of keys.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from bytescope.model.attention.chunked import Scoring
from bytescope.model.paged.page_pool import NOBODY, PAGE, PagePool, View

# Number of pages that `blocks` reads at once.
BLOCK = 8
# Pages that the Triton kernel reads in one loop step, and the minimum number of rows of a matrix product in Triton.
PAGES, ROWS = 4, 16


def gather(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """Computes attention of new tokens to the keys and values in a page pool, by copying all pages into one array. In
    this array every sequence has the length of the longest. Returns the context [B, T, H, V].

    Takes the arguments of every kernel for pages (explained at `triton`).
    """
    k_BSGK, v_BSGV = pool.read(view.table_BP, value_width)
    scores_BGRTS = _scores(q_BTHK, k_BSGK, scoring, width)
    scores_BGRTS = _mask_later_keys(scores_BGRTS, jnp.arange(k_BSGK.shape[1]), view)
    probs_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1).astype(v_BSGV.dtype)
    return _merge_heads(jnp.einsum("bgrts,bsgv->btgrv", probs_BGRTS, v_BSGV), q_BTHK)


def blocks(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """Computes attention of new tokens to the keys and values in a page pool, BLOCK pages at a time with a running
    softmax (Dao et al. 2022, arXiv 2205.14135). Returns the context [B, T, H, V].

    The longest sequence determines the number of loop iterations. Takes the arguments of every kernel for pages
    (explained at `triton`).
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
    """Computes attention of new tokens to the keys and values in a page pool. Returns the context [B, T, H, V] in the
    dtype of the queries.

    If `takes` accepts the arrays (one new token per sequence), one GPU kernel computes it (`attend`). Other inputs,
    such as prompts, use `blocks`, which runs on any backend.

    Args:
      q_BTHK: queries of T new tokens of each of B sequences, H heads with K elements.
      pool: pages with the keys and values of one layer.
      view: positions of the new tokens, and the pages of their sequences.
      scoring: turns query-key dot products into attention scores.
      width: head width that scales the scores.
      value_width: V, the number of elements of a head's value.
      interpret: True to run the kernel as plain jax on any backend.
    """
    if not takes(q_BTHK, pool):
        return blocks(q_BTHK, pool, view, scoring=scoring, width=width, value_width=value_width)
    return attend(q_BTHK, pool, view, scoring=scoring, width=width, interpret=interpret)


def takes(q_BTHK: jax.Array, pool: PagePool) -> bool:
    """Returns True if the Triton kernel accepts these arrays. It needs one token of each sequence, keys and values that
    are separate and stored in the compute dtype, and a head width that is a power of two."""
    width = pool.keys.shape[-1]
    return (
        q_BTHK.shape[1] == 1
        and pool.values is not None
        and pool.key_scales is None
        and width == pool.values.shape[-1]
        and width & (width - 1) == 0
        and width >= ROWS
    )


def attend(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, interpret: bool = False
) -> jax.Array:
    """Returns the context [B, 1, H, K] of one new token of each sequence, computed by one Pallas kernel. Padding rows
    are 0.

    One kernel program per sequence and key head reads the pages of that sequence in place (Kwon et al. 2023, arXiv
    2309.06180, section 5.1).

    Args:
      q_BTHK: queries of the tokens, T = 1.
      pool: pages with the keys and values of one layer.
      view: positions of the tokens, and the pages of their sequences.
      scoring: turns query-key dot products into attention scores.
      width: head width that scales the scores.
      interpret: True to run the kernel as plain jax on any backend.
    """
    B, _, H, K = q_BTHK.shape
    G, R = pool.keys.shape[2], H // pool.keys.shape[2]
    high = max(ROWS, pl.next_power_of_2(R))
    q_BGRK = jnp.pad(q_BTHK.reshape(B, G, R, K).astype(pool.compute), ((0, 0), (0, 0), (0, high - R), (0, 0)))
    table_BP = jnp.pad(view.table_BP, ((0, 0), (0, -view.table_BP.shape[1] % PAGES)), constant_values=NOBODY)
    precision = jax.lax.Precision.HIGHEST if jnp.dtype(pool.compute) == jnp.float32 else None

    def kernel(q_ref, k_ref, v_ref, table_ref, length_ref, out_ref):
        b, g = pl.program_id(0), pl.program_id(1)
        q_RK, length = q_ref[b, g], length_ref[b]

        def turn(i, carry):
            sums_RK, most_R, total_R = carry
            pages_P = table_ref[b, pl.ds(i * PAGES, PAGES)]
            k_SK = k_ref[pages_P, :, g, :].reshape(PAGES * PAGE, K)
            v_SK = v_ref[pages_P, :, g, :].reshape(PAGES * PAGE, K)
            products_RS = jax.lax.dot(q_RK, k_SK.T, precision=precision, preferred_element_type=jnp.float32)
            scores_RS = scoring(products_RS, width)
            places_1S = i * PAGES * PAGE + jax.lax.broadcasted_iota(jnp.int32, (1, PAGES * PAGE), 1)
            scores_RS = jnp.where(places_1S < length, scores_RS, jnp.finfo(jnp.float32).min)
            above_R = jnp.maximum(most_R, scores_RS.max(-1))
            probs_RS, kept_R = jnp.exp(scores_RS - above_R[:, None]), jnp.exp(most_R - above_R)
            added_RK = jax.lax.dot(
                probs_RS.astype(v_SK.dtype), v_SK, precision=precision, preferred_element_type=jnp.float32
            )
            return sums_RK * kept_R[:, None] + added_RK, above_R, total_R * kept_R + probs_RS.sum(-1)

        lowest = jnp.full((high,), jnp.finfo(jnp.float32).min, jnp.float32)
        start = jnp.zeros((high, K), jnp.float32), lowest, jnp.zeros((high,), jnp.float32)
        turns = (length + PAGES * PAGE - 1) // (PAGES * PAGE)
        sums_RK, _, total_R = jax.lax.fori_loop(0, turns, turn, start)
        out_ref[b, g] = (sums_RK / jnp.maximum(total_R, 1e-30)[:, None]).astype(out_ref.dtype)

    positions = pl.CostEstimate(
        flops=4 * B * H * K * table_BP.shape[1] * PAGE,
        transcendentals=0,
        bytes_accessed=2 * B * G * K * table_BP.shape[1] * PAGE * pool.keys.dtype.itemsize,
    )
    how = (
        {"interpret": True}
        if interpret
        else {"compiler_params": pallas_triton.CompilerParams(num_warps=4, num_stages=2), "cost_estimate": positions}
    )
    run = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(q_BGRK.shape, q_BTHK.dtype), grid=(B, G), name="paged_attention", **how
    )
    context_BGRK = run(q_BGRK, pool.keys, pool.values, table_BP, view.positions_BT[:, 0] + 1)
    return context_BGRK[:, :, :R].reshape(B, 1, H, K)


KERNELS: Mapping[str, Callable[..., jax.Array]] = {"gather": gather, "blocks": blocks, "triton": triton}
