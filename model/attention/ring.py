"""Causal attention over a sequence sharded over devices: keys and values travel, queries stay.

Ring attention (Liu et al. 2023, arXiv 2310.01889) with the walk over blocks of `attention/chunked.py` on every device.
The sequence is cut into 2C chunks for C ranks and rank r holds chunks r and 2C-1-r, an early one and a late one, as in
Llama 3's context parallelism (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2). A rank's own keys are one causal
triangle; of every other rank's keys exactly two of the four chunk pairs lie below the diagonal:

    keys of an earlier rank (j < i): (late, early) and (early, early)
    keys of a later rank    (j > i): (late, early) and (late, late)

so all ranks do the same work at every step, and together exactly that of one device: blocks above the diagonal
are never formed. The pairs of a step differ between ranks in block numbers alone, not in shapes.

Keys and values are one message, sent before the step that uses them here. Their gradients travel behind them, a message
of their own, and come home after C hops, in float32: rounded to 16 bits at every hop, they would lose what late ranks
add. The compiler for GPUs keeps one message in flight, so a step of the backward pass has two halves: the gradients
travel during the first pair of chunks, the keys during the second. What a rank holds does not grow with the ring.

Segment ids of packed rows do not travel: every rank has those of the whole row, 4 bytes a token, and takes those of the
keys that pass by.
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
    """One rank's blocks: m of c positions in each of its two chunks of n, the last filled up with masked ones."""

    ring: Ring
    n: int
    m: int
    c: int

    @classmethod
    def of(cls, ring: Ring, length: int, chunk: int) -> "_Rank":
        """For `length` positions here and blocks of at most `chunk`, as even as can be."""
        n = length // 2
        m = -(-n // chunk)
        return cls(ring, n, m, -(-n // m))

    def blocks(self, x: jax.Array, axis: int = -2) -> jax.Array:
        # Said once, here: else every loop over the blocks may transpose them for itself, and all copies are held.
        return row_major(blocks(x, self.c, 2, axis))

    def positions(self, x: jax.Array, axis: int = -2) -> jax.Array:
        return positions(x, 2 * self.n, 2, axis)

    def mask(self, inner: Mask | None) -> Mask | None:
        """`inner`, with the positions that fill up the last block of a chunk of keys masked."""
        if self.n == self.m * self.c:
            return inner

        def allowed(i, j):
            filled = (j % self.m * self.c + jax.lax.broadcasted_iota(jnp.int32, (self.c, self.c), 1)) < self.n
            return filled if inner is None else filled & inner(i, j)

        return allowed

    @property
    def own(self):
        """Pairs and mask of the rank's own keys: in its order of blocks they are one causal triangle."""
        return triangle(2 * self.m), self.mask(causal(self.c))

    def passing(self, hops):
        """Pairs and mask of keys that have made `hops` hops, twice: (late, early), and the other pair of chunks."""
        i, j = (x.reshape(-1) for x in jnp.indices((self.m, self.m), jnp.int32))
        from_earlier = hops <= jax.lax.axis_index(self.ring.axis)
        shift = jnp.where(from_earlier, 0, self.m).astype(jnp.int32)
        return ((i + self.m, j), self.mask(None)), ((i + shift, j + shift), self.mask(None))

    def ids(self, segments_BL: jax.Array | None, hops: int | jax.Array = 0) -> Ids | None:
        """Segment ids of the blocks of queries here, and of those of keys that have made `hops` hops; `segments_BL` of
        the whole row, in its order."""
        if segments_BL is None:
            return None
        chunks_BCn, C = segments_BL.reshape(segments_BL.shape[0], -1, self.n), self.ring.size

        def of(rank):
            both = jnp.stack([rank, 2 * C - 1 - rank])
            return self.blocks(jnp.take(chunks_BCn, both, axis=1).reshape(-1, 2 * self.n), -1)

        rank = jax.lax.axis_index(self.ring.axis)
        return of(rank), of((rank - hops) % C)

    def send(self, x: jax.Array) -> jax.Array:
        """`x` to the next rank of the ring."""
        C = self.ring.size
        return jax.lax.ppermute(x, self.ring.axis, [(rank, (rank + 1) % C) for rank in range(C)])

    def zeros(self, x: jax.Array) -> jax.Array:
        """Float32 sums for `x`, in the type of a loop's carry: a value that differs between devices."""
        return self.varying(jnp.zeros(x.shape, jnp.float32))

    def varying(self, tree):
        """Constants in that type."""
        axes = (*self.ring.batch, self.ring.axis, *self.ring.heads)
        return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree)


def _forward_rank(q_BLHK, k_BLGK, v_BLGK, segments_BL, *, ring, chunk, scoring):
    """Context [B, l, H, K] and log-denominators [B, G, R, l] of one rank's l positions; `segments_BL`: of all L."""
    B, length, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    rank, C = _Rank.of(ring, length, chunk), ring.size
    q, k, v = (rank.blocks(x) for x in (q_BLHK.reshape(B, length, G, H // G, K), k_BLGK, v_BLGK))
    kv = jnp.stack([k, v])

    def visit(sums, kv, hops):
        for pairs, mask in rank.passing(hops):
            sums = add_pairs(sums, q, lambda j: kv[:, j], pairs, mask, rank.ids(segments_BL, hops), scoring)
        return sums

    def step(carry, hops):
        kv, sums = carry
        return (rank.send(kv), visit(sums, kv, hops)), None

    sums = rank.varying(start(q, q.shape[-1]))
    sums = add_pairs(sums, q, lambda j: kv[:, j], *rank.own, rank.ids(segments_BL), scoring)
    if C > 1:
        # The last step stands outside the loop: its keys go nowhere, so C-1 hops in all.
        (kv, sums), _ = jax.lax.scan(step, (rank.send(kv), sums), jnp.arange(1, C - 1))
        sums = visit(sums, kv, C - 1)
    context, lse = finish(sums, q_BLHK.dtype)
    lse_BLGR = rank.positions(lse, -1)
    return rank.positions(context).reshape(B, length, H, K), jnp.moveaxis(lse_BLGR, 1, 3)


def _backward_rank(
    q_BLHK, k_BLGK, v_BLGK, segments_BL, context_BLHK, lse_BGRL, d_context_BLHK, *, ring, chunk, scoring
):
    """Gradients of one rank's queries, keys and values."""
    B, length, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    rank, C = _Rank.of(ring, length, chunk), ring.size
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
            rank.ids(segments_BL, hops),
            scoring,
        )

    def visit(dq, d_kv, kv, hops):
        """One step: `d_kv` is what these keys had gathered one hop ago. The sums, and `kv` ready to leave."""
        first, second = rank.passing(hops)
        # While the sums are on their way the first pair, which reads early keys alone, has sums of its own.
        d_kv = rank.send(d_kv)
        dq, d_early = add(dq, rank.zeros(kv[:, : rank.m]), kv, *first, hops)
        # The barrier makes the keys leave after that: else the scheduler lets the sums' hop stand bare.
        d_kv, leaving = jax.lax.optimization_barrier((d_kv.at[:, : rank.m].add(d_early), kv))
        return *add(dq, d_kv, kv, *second, hops), leaving

    def step(carry, hops):
        dq, d_kv, leaving = visit(*carry, hops)
        return (dq, d_kv, rank.send(leaving)), None

    dq, d_kv = add(rank.zeros(q), rank.zeros(kv), kv, *rank.own)
    if C > 1:
        (dq, d_kv, kv), _ = jax.lax.scan(step, (dq, d_kv, rank.send(kv)), jnp.arange(1, C - 1))
        dq, d_kv, _ = visit(dq, d_kv, kv, C - 1)
    # The sums are complete before the last hop, home: it can go in the keys' own dtype.
    d_kv = d_kv.astype(k_BLGK.dtype)
    dk, dv = (rank.positions(d) for d in (rank.send(d_kv) if C > 1 else d_kv))
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


def _check(ring: Ring, batch: int, length: int, groups: int) -> None:
    """Raises ValueError for a dimension that is not divisible by the sizes of its mesh axes."""
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
    """Causal attention [B, L, H, K] of a sequence in `zigzag` order, sharded over `ring.axis`.

    Every device walks its pairs of chunks in blocks of at most `chunk` positions; scores and sums in float32. Residuals
    of the gradient: the arguments, the result and the log-denominators [B, G, R, L], named `context` and `lse`.

    Args:
      segments_BL: segment ids of packed rows, int32, in the order of the row.

    Raises:
      ValueError: length, batch or heads are not divisible by the sizes of their mesh axes.
    """
    B, L, _, _ = q_BLHK.shape
    _check(ring, B, L, k_BLGK.shape[2])
    return _ring_attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring, chunk, scoring)
