"""Attention of single tokens over pages as one Pallas kernel for GPUs.

A program for each sequence and head of keys walks the pages of that sequence and no more, so that nothing is gathered
(Kwon et al. 2023, arXiv 2309.06180, section 5.1).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from bytescope.model.attention.scoring import Scoring
from bytescope.model.paged.page_pool import NOBODY, PAGE, PagePool, View

# Pages that a program reads in one turn, and the least rows of a product in Triton.
PAGES, ROWS = 4, 16


def takes(q_BTHK: jax.Array, pool: PagePool) -> bool:
    """Whether the kernel takes these arrays: one token of each sequence, keys and values apart and as they are
    computed, heads of a power of two."""
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
    """The context [B, 1, H, K] of one token of each sequence; rows of padding are 0.

    interpret: run it step by step, on any device.
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

        least = jnp.full((high,), jnp.finfo(jnp.float32).min, jnp.float32)
        start = jnp.zeros((high, K), jnp.float32), least, jnp.zeros((high,), jnp.float32)
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
    found_BGRK = run(q_BGRK, pool.keys, pool.values, table_BP, view.positions_BT[:, 0] + 1)
    return found_BGRK[:, :, :R].reshape(B, 1, H, K)
