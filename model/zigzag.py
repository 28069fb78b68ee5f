"""The zigzag order of a sequence that a ring of devices shares: each rank has an early and a late chunk.

With a causal mask every rank then has the same work.
"""

import jax
import jax.numpy as jnp


def chunk_length(length: int, ranks: int, axis: str = "mesh.context") -> int:
    """Returns the number of positions in each of the 2 * `ranks` chunks into which ring attention splits a sequence.

    `axis`: the config key that the error message names.

    Raises:
      ValueError: the sequence is not divisible by 2 * ranks.
    """
    if length % (2 * ranks):
        raise ValueError(
            f"data.seq_len={length} cannot be split into 2 x {axis} = {2 * ranks} chunks: "
            f"make it a multiple of {2 * ranks}, or change {axis}"
        )
    return length // (2 * ranks)


def zigzag(x: jax.Array, ranks: int, axis: int = 1) -> jax.Array:
    """Splits dimension `axis` of `x` into 2*ranks chunks and reorders them, so that rank r gets chunks r and
    2*ranks-1-r if the dimension is sharded. Causal attention then has the same work on every rank (device).

    Raises:
      ValueError: the sequence is not divisible by 2*ranks.
    """
    n = chunk_length(x.shape[axis], ranks)
    early, late = jnp.split(x.reshape(*x.shape[:axis], 2 * ranks, n, *x.shape[axis + 1 :]), 2, axis)
    return jnp.stack([early, jnp.flip(late, axis)], axis + 1).reshape(x.shape)


def zigzag_positions(length: int, ranks: int) -> jax.Array:
    """Returns the original position of each element of a sequence after `zigzag` (the reordering for ring attention),
    int32 [L].

    Raises:
      ValueError: the sequence is not divisible by 2 * ranks.
    """
    # Computed from an iota: the program has no constant of L elements, and every device computes its own part.
    n = chunk_length(length, ranks)
    place = jax.lax.iota(jnp.int32, length)
    rank = place // (2 * n)
    chunk = jnp.where(place // n % 2 == 0, rank, 2 * ranks - 1 - rank)
    return chunk * n + place % n
