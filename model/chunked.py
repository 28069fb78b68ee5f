"""Attention in blocks with its own gradient: memory linear in the sequence length on every backend.

The forward pass is the online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867), the
backward pass recomputes each block of probabilities from the saved log-denominators as in
FlashAttention (Dao et al. 2022, arXiv 2205.14135). The pairs (query block, key block) of the lower
triangle are walked by one `lax.scan` of static length, so masked blocks cost nothing and the trip
count, hence the FLOPs, can be read from the program.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from model.names import tag


def _blocks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, L, ...] -> [n, B, chunk, ...], zeros behind the last position; causality hides them."""
    pad = -x.shape[1] % chunk
    if pad:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _positions(x_blocks: jax.Array, length: int) -> jax.Array:
    """The inverse of `_blocks`."""
    x = jnp.moveaxis(x_blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key block of each pair at or below the diagonal, int32."""
    i, j = np.tril_indices(n)
    return i.astype(np.int32), j.astype(np.int32)


def _scores(q_BcGRK, k_BcGK, i, j):
    """Scaled scores [B, G, R, c, c] float32 of one pair of blocks, masked on the diagonal."""
    c = q_BcGRK.shape[1]
    scores = jnp.einsum("blgrk,bsgk->bgrls", q_BcGRK, k_BcGK, preferred_element_type=jnp.float32)
    allowed = jnp.tril(jnp.ones((c, c), bool)) | (j < i)
    return jnp.where(allowed[None, None, None], scores * q_BcGRK.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)


def _forward(q_BLHK, k_BLGK, v_BLGK, chunk):
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    q = _blocks(q_BLHK.reshape(B, L, G, H // G, K), chunk)
    k, v = _blocks(k_BLGK, chunk), _blocks(v_BLGK, chunk)
    n, rows = q.shape[0], (q.shape[0], B, G, H // G, chunk)

    def pair(carry, ij):
        i, j = ij
        out, peak, total = carry
        scores = _scores(q[i], k[j], i, j)
        old_peak = peak[i]
        new_peak = jnp.maximum(old_peak, scores.max(-1))
        probs = jnp.exp(scores - new_peak[..., None])
        shrink = jnp.exp(old_peak - new_peak)
        block = jnp.einsum("bgrls,bsgk->bgrlk", probs.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
        return (out.at[i].set(out[i] * shrink[..., None] + block), peak.at[i].set(new_peak),
                total.at[i].set(total[i] * shrink + probs.sum(-1))), None

    start = (jnp.zeros((*rows, K), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32),
             jnp.zeros(rows, jnp.float32))
    (out, peak, total), _ = jax.lax.scan(pair, start, _pairs(n))
    out = jnp.moveaxis((out / total[..., None]).astype(q_BLHK.dtype), 4, 2)  # [n, B, c, G, R, K]
    return _positions(out, L).reshape(B, L, H, K), peak + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked_attention(q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, chunk: int) -> jax.Array:
    """Causal attention [B, L, H, K] in blocks of `chunk` positions; scores and sums in float32."""
    return tag(_forward(q_BLHK, k_BLGK, v_BLGK, chunk)[0], "context")


def _attention_forward(q_BLHK, k_BLGK, v_BLGK, chunk):
    context_BLHK, lse = _forward(q_BLHK, k_BLGK, v_BLGK, chunk)
    context_BLHK, lse = tag(context_BLHK, "context"), tag(lse, "lse")
    return context_BLHK, (q_BLHK, k_BLGK, v_BLGK, context_BLHK, lse)


def _attention_backward(chunk, residuals, d_context_BLHK):
    q_BLHK, k_BLGK, v_BLGK, context_BLHK, lse = residuals
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    q, d_out = (_blocks(x.reshape(B, L, G, H // G, K), chunk) for x in (q_BLHK, d_context_BLHK))
    k, v = _blocks(k_BLGK, chunk), _blocks(v_BLGK, chunk)
    # Row sums of dP * P, from the output instead of the probabilities.
    delta_BLH = jnp.einsum("blhk,blhk->blh", d_context_BLHK, context_BLHK, preferred_element_type=jnp.float32)
    delta = jnp.moveaxis(_blocks(delta_BLH.reshape(B, L, G, H // G), chunk), 2, 4)  # [n, B, G, R, c]

    def pair(carry, ij):
        i, j = ij
        dq, dk, dv = carry
        with jax.named_scope("kernel_recompute"):
            probs = jnp.exp(_scores(q[i], k[j], i, j) - lse[i][..., None])
        d_probs = jnp.einsum("blgrk,bsgk->bgrls", d_out[i], v[j], preferred_element_type=jnp.float32)
        d_scores = (probs * (d_probs - delta[i][..., None]) * K ** -0.5).astype(q.dtype)
        one = partial(jnp.einsum, preferred_element_type=jnp.float32)
        return (dq.at[i].add(one("bgrls,bsgk->blgrk", d_scores, k[j])),
                dk.at[j].add(one("bgrls,blgrk->bsgk", d_scores, q[i])),
                dv.at[j].add(one("bgrls,blgrk->bsgk", probs.astype(q.dtype), d_out[i]))), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(pair, start, _pairs(q.shape[0]))
    return tuple(_positions(d, L).reshape(x.shape).astype(x.dtype)
                 for d, x in ((dq, q_BLHK), (dk, k_BLGK), (dv, v_BLGK)))


chunked_attention.defvjp(_attention_forward, _attention_backward)
