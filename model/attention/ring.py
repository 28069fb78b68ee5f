"""Causal attention over a sequence sharded over devices: keys and values travel, queries stay.

Ring attention (Liu et al. 2023, arXiv 2310.01889); every device computes blocks as in `attention/chunked.py`. The
sequence is cut into 2C chunks for C ranks. Rank r holds chunks r and 2C-1-r, an early one and a late one, as in Llama
3's context parallelism (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2). A rank's own keys form one causal
triangle. For the keys of every other rank exactly two of the four chunk pairs (query chunk, key chunk) lie below the
diagonal:

    keys of an earlier rank (j < i): (late, early) and (early, early)
    keys of a later rank    (j > i): (late, early) and (late, late)

All ranks therefore do the same work at every step, and together exactly the work of one device: blocks above the
diagonal are never computed. The pairs of a step have the same shapes on all ranks and differ only in block indices.

Keys and values travel in one message, which is sent before the step that uses them on the sending rank. Their
gradients follow in a separate float32 message and return to their owner after C hops; rounding to 16 bits at every hop
would lose the contributions of late ranks. The GPU compiler keeps one message in flight, so a step of the backward
pass has two halves: the gradients travel during the first pair of chunks and the keys during the second. The memory of
a rank does not grow with the number of ranks.

Segment ids of packed rows do not travel: every rank has the ids of the whole row, 4 bytes per token, and selects the
ids of the keys that it currently holds.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.attention.chunked import (
    PLAIN,
    Ids,
    Mask,
    Scoring,
    add_gradients,
    add_pairs,
    blocks,
    causal,
    finish,
    positions,
    row_products,
    start,
    triangle,
)
from bytescope.model.names import tag
from bytescope.model.placement import Ring, row_major
from bytescope.model.zigzag import chunk_length

# ---- one rank's part, inside shard_map --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rank:
    """The block layout of the positions on one rank (device) of the ring.

    A rank stores two chunks of n positions. Each chunk is split into m blocks of c positions. If n < m * c, the last
    block of a chunk is padded, and its padding is masked.

    Fields:
      ring: the devices that share the sequence.
      n: positions of a chunk.
      m: blocks of a chunk.
      c: positions of a block.
    """

    ring: Ring
    n: int
    m: int
    c: int

    @classmethod
    def for_length(cls, ring: Ring, length: int, chunk: int) -> "_Rank":
        # As few blocks as possible, of equal size and at most `chunk` positions.
        n = length // 2
        m = -(-n // chunk)
        return cls(ring, n, m, -(-n // m))

    def blocks(self, x: jax.Array, axis: int = -2) -> jax.Array:
        # The layout is fixed once: otherwise every loop over the blocks may make its own transposed copy, all alive at
        # once.
        return row_major(blocks(x, self.c, 2, axis))

    def positions(self, x: jax.Array, axis: int = -2) -> jax.Array:
        return positions(x, 2 * self.n, 2, axis)

    def mask_padding(self, inner: Mask | None) -> Mask | None:
        if self.n == self.m * self.c:
            return inner

        def allowed(i, j):
            filled = (j % self.m * self.c + jax.lax.broadcasted_iota(jnp.int32, (self.c, self.c), 1)) < self.n
            return filled if inner is None else filled & inner(i, j)

        return allowed

    @property
    def own(self):
        """The work of the rank's queries with its own keys, as (block pairs, mask).

        The block pairs are two int32 arrays, the indices of query blocks and of key blocks, for all pairs on or below
        the diagonal of the rank's 2m blocks. The mask is causal, and excludes padding.
        """
        return triangle(2 * self.m), self.mask_padding(causal(self.c))

    def pairs_with(self, hops):
        """Returns the block pairs to compute with the keys from the rank `hops` ranks back in the ring. There are two
        groups, each ((indices of query blocks, indices of key blocks), mask).

        A rank has two chunks of the sequence, an earlier and a later one. The first group pairs this rank's later chunk
        of queries with the other rank's earlier chunk of keys. The second group pairs the earlier chunks of both ranks
        if the keys come from an earlier rank, else the later chunks.
        """
        i, j = (x.reshape(-1) for x in jnp.indices((self.m, self.m), jnp.int32))
        from_earlier = hops <= jax.lax.axis_index(self.ring.axis)
        shift = jnp.where(from_earlier, 0, self.m).astype(jnp.int32)
        return ((i + self.m, j), self.mask_padding(None)), ((i + shift, j + shift), self.mask_padding(None))

    def segment_ids(self, segments_BL: jax.Array | None, hops: int | jax.Array = 0) -> Ids | None:
        if segments_BL is None:
            return None
        chunks_BCn, C = segments_BL.reshape(segments_BL.shape[0], -1, self.n), self.ring.size

        def ids_of(rank):
            both = jnp.stack([rank, 2 * C - 1 - rank])
            return self.blocks(jnp.take(chunks_BCn, both, axis=1).reshape(-1, 2 * self.n), -1)

        rank = jax.lax.axis_index(self.ring.axis)
        return ids_of(rank), ids_of((rank - hops) % C)

    def send_to_next(self, x: jax.Array) -> jax.Array:
        C = self.ring.size
        return jax.lax.ppermute(x, self.ring.axis, [(rank, (rank + 1) % C) for rank in range(C)])

    def varying_zeros(self, x: jax.Array) -> jax.Array:
        return self.mark_varying(jnp.zeros(x.shape, jnp.float32))

    def mark_varying(self, tree):
        # `jax.shard_map` requires that the initial values of a loop are marked as varying between devices.
        axes = (*self.ring.batch, self.ring.axis, *self.ring.heads)
        return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree)


def _forward_rank(q_BLHK, k_BLGK, v_BLGK, segments_BL, *, ring, chunk, scoring):
    """Computes the attention of one rank's l positions, inside shard_map, while keys and values travel around the ring.

    Returns (context [B, l, H, K], log-sum-exp of each query's scores [B, G, R, l]), for G key heads and R query heads
    per key head.

    Args:
      segments_BL: the segment ids of the whole row, None if rows are not packed.
      ring: the devices that share the sequence.
      chunk: maximum number of positions of a block.
      scoring: the scale and the cap of the scores.
    """
    B, length, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    rank, C = _Rank.for_length(ring, length, chunk), ring.size
    q, k, v = (rank.blocks(x) for x in (q_BLHK.reshape(B, length, G, H // G, K), k_BLGK, v_BLGK))
    kv = jnp.stack([k, v])

    def visit(sums, kv, hops):
        for pairs, mask in rank.pairs_with(hops):
            sums = add_pairs(sums, q, lambda j: kv[:, j], pairs, mask, rank.segment_ids(segments_BL, hops), scoring)
        return sums

    def step(carry, hops):
        kv, sums = carry
        return (rank.send_to_next(kv), visit(sums, kv, hops)), None

    sums = rank.mark_varying(start(q, q.shape[-1]))
    sums = add_pairs(sums, q, lambda j: kv[:, j], *rank.own, rank.segment_ids(segments_BL), scoring)
    if C > 1:
        # The last step is outside the loop because its keys are not sent further: C-1 hops in all.
        (kv, sums), _ = jax.lax.scan(step, (rank.send_to_next(kv), sums), jnp.arange(1, C - 1))
        sums = visit(sums, kv, C - 1)
    context, lse = finish(sums, q_BLHK.dtype)
    lse_BLGR = rank.positions(lse, -1)
    return rank.positions(context).reshape(B, length, H, K), jnp.moveaxis(lse_BLGR, 1, 3)


def _backward_rank(
    q_BLHK, k_BLGK, v_BLGK, segments_BL, context_BLHK, lse_BGRL, d_context_BLHK, *, ring, chunk, scoring
):
    """Returns the gradients of one rank's queries, keys and values, in their shapes and dtypes.

    Args:
      segments_BL: the segment ids of the whole row, None if rows are not packed.
      context_BLHK, lse_BGRL: the results of `_forward_rank`, the context and the log-sum-exp of each query's scores.
      d_context_BLHK: the gradient of the context.
      ring: the devices that share the sequence.
      chunk: maximum number of positions of a block.
      scoring: the scale and the cap of the scores.
    """
    B, length, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    rank, C = _Rank.for_length(ring, length, chunk), ring.size
    q, d_out = (rank.blocks(x.reshape(B, length, G, H // G, K)) for x in (q_BLHK, d_context_BLHK))
    k, v = rank.blocks(k_BLGK), rank.blocks(v_BLGK)
    delta_BLGR = row_products(d_context_BLHK, context_BLHK).reshape(B, length, G, H // G)
    lse, delta = (rank.blocks(x, -1) for x in (jnp.moveaxis(lse_BGRL, 3, 1), delta_BLGR))
    kv = jnp.stack([k, v])

    def add(dq, d_kv, kv, pairs, mask, hops=0):
        return add_gradients(
            (dq, d_kv),
            q,
            lambda j: kv[:, j],
            lambda d_kv, j, new: d_kv.at[:, j].add(jnp.stack(new)),
            d_out,
            lse,
            delta,
            pairs,
            mask,
            rank.segment_ids(segments_BL, hops),
            scoring,
        )

    def visit(dq, d_kv, kv, hops):
        # `kv`: the keys and values that this rank currently has. `d_kv`: the sum of their gradients from the ranks
        # visited before.
        first, second = rank.pairs_with(hops)
        # While the gradient sums travel, the first pair of chunks, which reads only early keys, adds to separate sums.
        d_kv = rank.send_to_next(d_kv)
        dq, d_early = add(dq, rank.varying_zeros(kv[:, : rank.m]), kv, *first, hops)
        # The barrier sends the keys after that. Otherwise the scheduler would overlap the sums' hop with no
        # computation.
        d_kv, leaving = jax.lax.optimization_barrier((d_kv.at[:, : rank.m].add(d_early), kv))
        return *add(dq, d_kv, kv, *second, hops), leaving

    def step(carry, hops):
        dq, d_kv, leaving = visit(*carry, hops)
        return (dq, d_kv, rank.send_to_next(leaving)), None

    dq, d_kv = add(rank.varying_zeros(q), rank.varying_zeros(kv), kv, *rank.own)
    if C > 1:
        (dq, d_kv, kv), _ = jax.lax.scan(step, (dq, d_kv, rank.send_to_next(kv)), jnp.arange(1, C - 1))
        dq, d_kv, _ = visit(dq, d_kv, kv, C - 1)
    # The sums are complete before the last hop back to their owner, so that hop can use the keys' dtype.
    d_kv = d_kv.astype(k_BLGK.dtype)
    dk, dv = (rank.positions(d) for d in (rank.send_to_next(d_kv) if C > 1 else d_kv))
    return rank.positions(dq).reshape(q_BLHK.shape).astype(q_BLHK.dtype), dk, dv


# ---- all ranks, on globally shaped arrays -----------------------------------------------------------------


def _forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring):
    x = ring.activation
    with jax.named_scope("ring"):
        return jax.shard_map(
            partial(_forward_rank, ring=ring, chunk=chunk, scoring=scoring),
            mesh=ring.mesh,
            in_specs=(x, x, x, ring.ids),
            out_specs=(x, ring.rows),
        )(q_BLHK, k_BLGK, v_BLGK, segments_BL)


# The gradient is defined around shard_map, not inside: the named residuals are then plain values of the program, where
# every checkpoint policy sees them, and shard_map is never transposed.
@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _ring_attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring):
    return tag(_forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring)[0], "context")


def _attention_forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring):
    context_BLHK, lse_BGRL = _forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring)
    context_BLHK, lse_BGRL = tag(context_BLHK, "context"), tag(lse_BGRL, "lse")
    return context_BLHK, (q_BLHK, k_BLGK, v_BLGK, segments_BL, context_BLHK, lse_BGRL)


def _attention_backward(ring, chunk, scoring, residuals, d_context_BLHK):
    x = ring.activation
    with jax.named_scope("ring"):
        return *jax.shard_map(
            partial(_backward_rank, ring=ring, chunk=chunk, scoring=scoring),
            mesh=ring.mesh,
            in_specs=(x, x, x, ring.ids, x, ring.rows, x),
            out_specs=(x, x, x),
        )(*residuals, d_context_BLHK), None


_ring_attention.defvjp(_attention_forward, _attention_backward)


def _check_divisible(ring: Ring, batch: int, length: int, groups: int) -> None:
    chunk_length(length, ring.size, f"mesh.{ring.axis}")
    for name, size, axes in (("batch", batch, ring.batch), ("model.n_kv_heads", groups, ring.heads)):
        parts = math.prod(ring.mesh.shape[axis] for axis in axes)
        if size % parts:
            over = " x ".join(f"mesh.{axis}={ring.mesh.shape[axis]}" for axis in axes)
            raise ValueError(f"{name}={size} is not divisible by {over}: make it a multiple of {parts}")


def ring_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None = None,
    *,
    ring: Ring,
    chunk: int,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Computes causal attention [B, L, H, K] of a sequence that is sharded over `ring.axis`. The positions are in
    `zigzag` order: every device has an early and a late chunk.

    Every device computes its pairs of chunks in blocks of at most `chunk` positions. Scores and sums are float32. Saved
    for the gradient are the arguments, the result (checkpoint name `context`) and the log-denominators of the softmax
    (checkpoint name `lse`), [B, G, R, L] for G key heads and R query heads per key head.

    Args:
      segments_BL: segment ids of packed rows, int32, in the order of the row (not in `zigzag` order).
      ring: the devices that share a sequence.
      scoring: the scale and the cap of the scores.

    Raises:
      ValueError: the length, batch or number of heads is not divisible by the sizes of its mesh axes.
    """
    B, L, _, _ = q_BLHK.shape
    _check_divisible(ring, B, L, k_BLGK.shape[2])
    return _ring_attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring)
