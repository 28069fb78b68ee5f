"""Blockwise attention with a custom gradient: memory linear in the sequence length on every backend.

The forward pass is the online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867). The backward pass recomputes
each block of probabilities from the saved log-denominators as in FlashAttention (Dao et al. 2022, arXiv 2205.14135).
One `lax.scan` of static length visits the pairs (query block, key block) of the lower triangle. Masked blocks
therefore cost nothing, and the trip count, hence the FLOPs, can be read from the program.

The functions `start`, `add_pairs`, `finish` and `add_gradients` take any list of pairs; `model/attention/ring.py`
calls them for the keys of each rank in turn. Shapes: query blocks [n, B, G, R, c, K], one block of keys or values [B,
G, c, K], row sums and maxima [n, B, G, R, c], pairs two int32 arrays of block indices. If values have another width
than keys, the context has the width of the values. Positions come after the heads, because every einsum reads them in
that order: blocks are transposed once instead of once per pair.

In packed rows a query counts only the scores of its own segment. All pairs of the triangle are still computed: which
blocks share a segment depends on the data, and the trip count must be static.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.model.layers import soft_cap
from bytescope.model.names import tag

Pairs = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]
# Block index -> the keys and values of that block.
Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# (query block index, key block index) -> which of their scores count, [c, c] booleans.
Mask = Callable[[jax.Array, jax.Array], jax.Array]
# For packed rows: the segment ids of the query blocks and of the key blocks, int32 [n, B, c] each.
Ids = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Turns the dot product of a query and a key into an attention score.

    Fields:
      scale: the factor; 0 means 1/sqrt(width of a head).
      cap: maximum absolute value of the scores (soft cap of Gemma 2, arXiv 2408.00118), 0 for no maximum.
    """

    scale: float = 0.0
    cap: float = 0.0

    def _factor(self, width: int) -> float:
        return self.scale or width**-0.5

    def __call__(self, products: jax.Array, width: int) -> jax.Array:
        """Returns the scores of query-key dot products `products` [...], in their dtype. `width`: number of elements
        of a head."""
        return soft_cap(products * self._factor(width), self.cap)

    def slope(self, scores: jax.Array, width: int) -> jax.Array | float:
        """Returns the derivative of the scores with respect to the query-key dot products. With a cap, the derivative
        of masked scores is 0.

        `scores`: results of `__call__`, masked scores included. `width`: number of elements of a head.
        """
        if not self.cap:
            return self._factor(width)
        # Masked scores are very large negative numbers: without the clamp their square would overflow.
        return self._factor(width) * (1.0 - jnp.square(jnp.maximum(scores / self.cap, -1.0)))


PLAIN = Scoring()


def blocks(x: jax.Array, chunk: int, spans: int = 1, axis: int = -2) -> jax.Array:
    """Splits positions into blocks: [B, L, ...] -> [n, B, ..., chunk, ...] for n blocks of `chunk` positions. The block
    index comes first and the positions of a block are at `axis`.

    The sequence consists of `spans` equal pieces, such as the two chunks of a ring rank. Each piece is split
    separately, and zeros pad its last block, so that no block has positions of two pieces.
    """
    B, L = x.shape[:2]
    pad = -(L // spans) % chunk
    if pad:
        x = x.reshape(B, spans, L // spans, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 3))
        x = x.reshape(B, -1, *x.shape[3:])
    return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), (1, 2), (0, axis))


def positions(x_blocks: jax.Array, length: int, spans: int = 1, axis: int = -2) -> jax.Array:
    """Inverts `blocks`: joins the blocks of a sequence of `length` positions and drops the padding, [n, B, ..., chunk,
    ...] -> [B, L, ...]. `spans` and `axis` must be the values passed to `blocks`: the number of separately split
    pieces, and the axis of the positions in a block."""
    x = jnp.moveaxis(x_blocks, (0, axis), (1, 2))
    B, rest = x.shape[0], x.shape[3:]
    return x.reshape(B, spans, -1, *rest)[:, :, : length // spans].reshape(B, length, *rest)


def triangle(n: int) -> Pairs:
    """Returns the pairs (query block, key block) of causal attention, those on or below the diagonal of n x n blocks,
    as two int32 arrays of block indices [n(n+1)/2]."""
    i, j = np.tril_indices(n)
    return i.astype(np.int32), j.astype(np.int32)


def causal(chunk: int) -> Mask:
    """Returns the causal mask as a function (query block index, key block index) -> bool [chunk, chunk], True for
    scores that count.

    If the key block is before the query block, no score is masked. If both are the same block, scores above the
    diagonal are masked.
    """
    return lambda i, j: jnp.tril(jnp.ones((chunk, chunk), bool)) | (j < i)


def _allowed_scores(i: jax.Array, j: jax.Array, mask: Mask | None, ids: Ids | None) -> jax.Array | None:
    allowed = None if mask is None else mask(i, j)
    if ids is None:
        return allowed
    same = ids[0][i][:, :, None] == ids[1][j][:, None, :]
    return same if allowed is None else allowed[None] & same


def _compute_scores(q_BGRcK, k_BGcK, allowed, scoring):
    scores = jnp.einsum("bgrlk,bgsk->bgrls", q_BGRcK, k_BGcK, preferred_element_type=jnp.float32)
    scores = scoring(scores, q_BGRcK.shape[-1])
    if allowed is None:
        return scores
    allowed = allowed[None, None, None] if allowed.ndim == 2 else allowed[:, None, None]
    return jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)


def _delay_until(q: jax.Array, pairs: Pairs, ids: Ids | None, sums: jax.Array) -> tuple[jax.Array, Pairs, Ids | None]:
    """Returns `q`, `pairs` and `ids` unchanged, behind an optimization barrier, so that the compiler computes nothing
    from them before `sums` exists.

    The pairs are constants, and the segment ids are the same in every layer. Without the barrier the compiler would
    hoist the masks and query blocks of all pairs out of a checkpointed loop over layers and stack them. That takes as
    many bytes as the full score matrix. Only one element of `sums` enters the barrier, because a barrier around all
    sums would keep unread values alive.
    """
    tie = sums[(0,) * sums.ndim]
    return jax.lax.optimization_barrier((q, jax.tree.map(jnp.asarray, pairs), ids, tie))[:3]


def start(q: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the initial values of the online softmax for query blocks `q` [n, B, G, R, c, K], float32.

    The axes are n blocks, B sequences, G key heads, R query heads per key head and c queries per block. The results are
    the weighted sums of values [n, B, G, R, c, width], and the maximum scores and the denominators, both [n, B, G, R,
    c]. `width`: number of elements of a value.
    """
    rows = q.shape[:-1]
    return jnp.zeros((*rows, width), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)


def add_pairs(
    sums,
    q: jax.Array,
    read: Read,
    pairs: Pairs,
    mask: Mask | None = None,
    ids: Ids | None = None,
    scoring: Scoring = PLAIN,
):
    """Adds pairs of a query block and a key block to the sums of an online softmax. Returns the new sums.

    Axes: n query blocks, B sequences, G key heads, R query heads per key head, c positions per block, K elements per
    head. While all scores of a query are masked, its sums are meaningless. Its first unmasked score rescales them to
    exactly 0, so the pairs must include each query's own position.

    Args:
      sums: the three arrays that `start` or an earlier call returned.
      q: query blocks [n, B, G, R, c, K].
      read: index of a key block -> its keys and values, [B, G, c, K] each.
      pairs: the indices of the query blocks and of the key blocks, two int32 arrays.
      mask: (query block index, key block index) -> bool [c, c], True for scores that count. None masks nothing.
      ids: for packed rows, the segment ids of the query blocks and of the key blocks, int32 [n, B, c] each.
      scoring: the scale and the cap of the scores.
    """
    q, pairs, ids = _delay_until(q, pairs, ids, sums[1])

    def pair(sums, ij):
        i, j = ij
        out, peak, total = sums
        k, v = read(j)
        scores = _compute_scores(q[i], k, _allowed_scores(i, j, mask, ids), scoring)
        old_peak = peak[i]
        new_peak = jnp.maximum(old_peak, scores.max(-1))
        probs = jnp.exp(scores - new_peak[..., None])
        shrink = jnp.exp(old_peak - new_peak)
        block = jnp.einsum("bgrls,bgsk->bgrlk", probs.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (
            out.at[i].set(out[i] * shrink[..., None] + block),
            peak.at[i].set(new_peak),
            total.at[i].set(total[i] * shrink + probs.sum(-1)),
        ), None

    return jax.lax.scan(pair, sums, pairs)[0]


def finish(sums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Converts the final sums of the online softmax to the attention context [n, B, G, R, c, K] in `dtype` and the
    log-denominators [n, B, G, R, c] float32.

    Axes: n query blocks, B sequences, G key heads, R query heads per key head, c positions per block, K elements per
    value.
    """
    out, peak, total = sums
    return (out / total[..., None]).astype(dtype), peak + jnp.log(total)


def row_products(d_context_BLHK: jax.Array, context_BLHK: jax.Array) -> jax.Array:
    """Returns for each query the sum of P * dP over the keys, [B, L, H] float32. P are the attention probabilities and
    dP is their gradient. The softmax gradient needs this sum.

    It equals the sum of context * d_context over the elements of a head, so that the probabilities are not needed.
    """
    return jnp.einsum("blhk,blhk->blh", d_context_BLHK, context_BLHK, preferred_element_type=jnp.float32)


def add_gradients(
    sums,
    q,
    read: Read,
    write,
    d_out,
    lse,
    delta,
    pairs: Pairs,
    mask: Mask | None = None,
    ids: Ids | None = None,
    scoring: Scoring = PLAIN,
):
    """Adds the gradients of pairs of a query block and a key block to `sums`. Returns the new sums.

    Axes: n query blocks, B sequences, G key heads, R query heads per key head, c positions per block, K elements per
    head.

    Args:
      sums: float32 gradients (dq, d_keys). dq has the shape of `q`; d_keys is any array or tuple that `write` can
        update.
      q: query blocks [n, B, G, R, c, K].
      read: index of a key block -> its keys and values, [B, G, c, K] each.
      write: (d_keys, index of a key block, (dk, dv)) -> d_keys with the gradients of that block's keys and values
        added, [B, G, c, K] float32 each.
      d_out: gradient of the context, in blocks like `q`.
      lse: log-denominators of the softmax, the second result of `finish`, [n, B, G, R, c].
      delta: results of `row_products`, [n, B, G, R, c].
      pairs: the indices of the query blocks and of the key blocks, two int32 arrays.
      mask: (query block index, key block index) -> bool [c, c], True for scores that count. None masks nothing.
      ids: for packed rows, the segment ids of the query blocks and of the key blocks, int32 [n, B, c] each.
      scoring: the scale and the cap of the scores.
    """
    one = partial(jnp.einsum, preferred_element_type=jnp.float32)
    q, pairs, ids = _delay_until(q, pairs, ids, sums[0])

    def pair(sums, ij):
        i, j = ij
        dq, d_keys = sums
        k, v = read(j)
        with jax.named_scope("kernel_recompute"):
            scores = _compute_scores(q[i], k, _allowed_scores(i, j, mask, ids), scoring)
            probs = jnp.exp(scores - lse[i][..., None])
        d_probs = one("bgrlk,bgsk->bgrls", d_out[i], v)
        d_scores = probs * (d_probs - delta[i][..., None]) * scoring.slope(scores, q.shape[-1])
        d_scores = d_scores.astype(q.dtype)
        d_block = (one("bgrls,bgrlk->bgsk", d_scores, q[i]), one("bgrls,bgrlk->bgsk", probs.astype(q.dtype), d_out[i]))
        return (dq.at[i].add(one("bgrls,bgsk->bgrlk", d_scores, k)), write(d_keys, j, d_block)), None

    return jax.lax.scan(pair, sums, pairs)[0]


def _ids(segments_BL: jax.Array | None, chunk: int) -> Ids | None:
    return None if segments_BL is None else (blocks(segments_BL, chunk, axis=-1),) * 2


def _forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, chunk, scoring):
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    q = blocks(q_BLHK.reshape(B, L, G, H // G, K), chunk)
    k, v = blocks(k_BLGK, chunk), blocks(v_BLGK, chunk)
    sums = add_pairs(
        start(q, v.shape[-1]),
        q,
        lambda j: (k[j], v[j]),
        triangle(q.shape[0]),
        causal(chunk),
        _ids(segments_BL, chunk),
        scoring,
    )
    context, lse = finish(sums, q_BLHK.dtype)
    return positions(context, L).reshape(B, L, H, -1), lse


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chunked_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    chunk: int,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Computes causal attention in blocks of `chunk` positions. Returns the context [B, L, H, K]. Scores and sums are
    float32.

    If `segments_BL` (int32) is given, queries attend only within their own segment (text of a packed row). Saved for
    the gradient are the arguments, the result (checkpoint name `context`) and the log-denominators of the softmax
    (checkpoint name `lse`). `scoring`: the scale and the cap of the scores.
    """
    return tag(_forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, chunk, scoring)[0], "context")


def _attention_forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, chunk, scoring):
    context_BLHK, lse = _forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, chunk, scoring)
    context_BLHK, lse = tag(context_BLHK, "context"), tag(lse, "lse")
    return context_BLHK, (q_BLHK, k_BLGK, v_BLGK, segments_BL, context_BLHK, lse)


def _attention_backward(chunk, scoring, residuals, d_context_BLHK):
    q_BLHK, k_BLGK, v_BLGK, segments_BL, context_BLHK, lse = residuals
    B, L, H = q_BLHK.shape[:3]
    G = k_BLGK.shape[2]
    q, d_out = (blocks(x.reshape(B, L, G, H // G, -1), chunk) for x in (q_BLHK, d_context_BLHK))
    k, v = blocks(k_BLGK, chunk), blocks(v_BLGK, chunk)
    delta_BLGR = row_products(d_context_BLHK, context_BLHK).reshape(B, L, G, H // G)
    delta = blocks(delta_BLGR, chunk, axis=-1)
    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

    def write(d_keys, j, d_block):
        return tuple(d.at[j].add(new) for d, new in zip(d_keys, d_block))

    dq, (dk, dv) = add_gradients(
        (dq, (dk, dv)),
        q,
        lambda j: (k[j], v[j]),
        write,
        d_out,
        lse,
        delta,
        triangle(q.shape[0]),
        causal(chunk),
        _ids(segments_BL, chunk),
        scoring,
    )
    return *(
        positions(d, L).reshape(x.shape).astype(x.dtype) for d, x in zip((dq, dk, dv), (q_BLHK, k_BLGK, v_BLGK))
    ), None


chunked_attention.defvjp(_attention_forward, _attention_backward)
