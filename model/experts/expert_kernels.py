"""Products of rows with the weights of their experts, rows of one table behind one signature.

A kernel has three products, all linear: rows times weights, and the two of its gradient. Rows are in tiles, each of one
expert (`Tiles`).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from bytescope.model.experts.expert_rows import Tiles
from bytescope.model.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Products:
    """One row of the table.

    forward: (x_XC, w_ECN, tiles) -> [X, N]. to_rows: (y_XN, w_ECN, tiles) -> [X, C]. to_weights: (x_XC, y_XN, tiles) ->
    [E, C, N]. All in the dtype of the first.
    """

    summary: str
    forward: Callable[..., jax.Array]
    to_rows: Callable[..., jax.Array]
    to_weights: Callable[..., jax.Array]


def _by_tile(spec: str, x_XC: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    """One tile after the other."""
    x_nTC = x_XC.reshape(tiles.expert.size, -1, x_XC.shape[1])

    def one(_, xs):
        x_TC, expert = xs
        return None, jnp.einsum(spec, x_TC, jax.lax.dynamic_index_in_dim(w, expert, keepdims=False))

    return jax.lax.scan(one, None, (x_nTC, tiles.expert))[1].reshape(x_XC.shape[0], -1)


def _weights_by_tile(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    """One tile after the other, added to its expert's sum in float32."""
    cut = [x.reshape(tiles.expert.size, -1, x.shape[1]) for x in (x_XC, y_XN)]

    def add(total_ECN, xs):
        x_TC, y_TN, expert = xs
        here = jax.lax.dynamic_index_in_dim(total_ECN, expert, keepdims=False)
        here = here + jnp.einsum("tc,tn->cn", x_TC, y_TN, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(total_ECN, here, expert, 0), None

    zeros = jnp.zeros((tiles.count.size, x_XC.shape[1], y_XN.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, (*cut, tiles.expert))[0].astype(x_XC.dtype)


def _ragged(x_XC: jax.Array, w_ECN: jax.Array, tiles: Tiles) -> jax.Array:
    sizes_E = tiles.count * (x_XC.shape[0] // tiles.expert.size)
    return jax.lax.ragged_dot(x_XC, w_ECN, sizes_E)


def _ragged_weights(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    zeros = jnp.zeros((tiles.count.size, x_XC.shape[1], y_XN.shape[1]), x_XC.dtype)
    return jax.vjp(lambda w_ECN: _ragged(x_XC, w_ECN, tiles), zeros)[1](y_XN)[0]


def _batched(spec: str, x_XC: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    """All experts at once: each has one tile, its slots."""
    x_ECC = x_XC.reshape(tiles.count.size, -1, x_XC.shape[1])
    return jnp.einsum(spec, x_ECC, w).reshape(x_XC.shape[0], -1)


def _batched_weights(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    return jnp.einsum("esc,esn->ecn", *(x.reshape(tiles.count.size, -1, x.shape[1]) for x in (x_XC, y_XN)))


# ---- Pallas kernels (Triton): one launch for all experts ------------------------------------------------------------
#
# Rows are sorted by expert in whole tiles, so each program of a kernel reads the weights of one expert. XLA has no such
# product on GPUs: `jax.lax.ragged_dot` becomes a dense product over all experts (16.0 GiB of temporaries for one
# Mixtral layer at 8,192 tokens, where these kernels take 1.1). Sums are float32.

# Max block of a kernel along a dimension of the weights, and along the one that is summed.
BLOCK, DEPTH = 128, 64


def rows_times(
    x_XC: jax.Array, w: jax.Array, tiles: Tiles, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiplies each row by the matrix of its expert: x [X, C] and w [E, C, N], or [E, N, C] if `transposed`, to
    [X, N] in the dtype of `x`.
    """
    (X, C), N = x_XC.shape, w.shape[1 if transposed else 2]
    tile, wide, deep = X // tiles.expert.size, _block(N, BLOCK), _block(C, DEPTH)

    last = tiles.count.size - 1

    def kernel(expert_ref, first_ref, count_ref, x_ref, w_ref, out_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        expert, rows, columns = expert_ref[i], pl.ds(i * tile, tile), pl.ds(j * wide, wide)
        # A buffer for the most rows that can come is empty for the larger part.
        steps = (i < first_ref[last] + count_ref[last]).astype(jnp.int32) * (C // deep)

        def add(step, total):
            part = pl.ds(step * deep, deep)
            block = w_ref[expert, columns, part].T if transposed else w_ref[expert, part, columns]
            return total + jax.lax.dot(x_ref[rows, part], block, preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile, wide), jnp.float32))
        out_ref[rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((X, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(tiles.expert.size, N // wide),
        name="expert_rows",
        **_how(interpret, 2 * (tiles.filled or X) * C * N, x_XC, w, out),
    )(tiles.expert, tiles.first, tiles.count, x_XC, w)


def weights_of(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles, *, interpret: bool = False) -> jax.Array:
    """Returns for each expert the sum over its rows of x^T y: [X, C] and [X, N] to [E, C, N] in the dtype of `x`."""
    (X, C), N, E = x_XC.shape, y_XN.shape[1], tiles.count.size
    tile = X // tiles.expert.size
    high, wide, deep = _block(C, BLOCK), _block(N, BLOCK), _block(tile, DEPTH)

    def kernel(first_ref, count_ref, x_ref, y_ref, out_ref):
        e, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        rows, columns = pl.ds(i * high, high), pl.ds(j * wide, wide)
        begin, steps = first_ref[e] * tile, count_ref[e] * (tile // deep)

        def add(step, total):
            part = pl.ds(begin + step * deep, deep)
            return total + jax.lax.dot(x_ref[part, rows].T, y_ref[part, columns], preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((high, wide), jnp.float32))
        out_ref[e, rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((E, C, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(E, C // high, N // wide),
        name="expert_weights",
        **_how(interpret, 2 * (tiles.filled or X) * C * N, x_XC, y_XN, out),
    )(tiles.first, tiles.count, x_XC, y_XN)


def _block(size: int, largest: int) -> int:
    """Returns the largest power of 2, up to `largest`, that divides a dimension; a small dimension as it is."""
    return size if size <= largest else math.gcd(size, largest)


def _how(interpret: bool, flops: int, *arrays: jax.Array | jax.ShapeDtypeStruct) -> dict:
    """Returns the settings of a kernel call, with its cost: reports cannot look into a kernel."""
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)
    if interpret:
        return {"interpret": True, "cost_estimate": cost}
    return {"compiler_params": pallas_triton.CompilerParams(num_warps=8, num_stages=3), "cost_estimate": cost}


def _grouped(interpret: bool) -> tuple[Callable[..., jax.Array], ...]:
    return (
        partial(rows_times, interpret=interpret),
        partial(rows_times, transposed=True, interpret=interpret),
        partial(weights_of, interpret=interpret),
    )


KERNELS = {
    "grouped": Products("Pallas kernels over tiles of rows, on NVIDIA GPUs from Ampere on", *_grouped(False)),
    "grouped_interpreted": Products("the same as plain jax, for any backend", *_grouped(True)),
    "capacity": Products(
        "batched products over slots of fixed number; more rows are dropped",
        partial(_batched, "esc,ecn->esn"),
        partial(_batched, "esn,ecn->esc"),
        _batched_weights,
    ),
    "ragged": Products(
        "jax.lax.ragged_dot, which XLA expands to dense products on GPUs",
        _ragged,
        lambda y_XN, w_ECN, tiles: _ragged(y_XN, w_ECN.swapaxes(1, 2), tiles),
        _ragged_weights,
    ),
    "scan": Products(
        "a loop over tiles of rows, on any backend",
        partial(_by_tile, "tc,cn->tn"),
        partial(_by_tile, "tn,cn->tc"),
        _weights_by_tile,
    ),
}
# What model.moe_kernel may be. `dense` multiplies every token by every expert, without rows: the reference of tests.
MOE_KERNELS = ("auto", "grouped", "capacity", "ragged", "scan", "dense")
# Slots of an expert over the mean where the config does not say (Switch, Fedus et al. 2021, arXiv 2101.03961).
CAPACITY = 1.25


def choose_moe_kernel(config: ModelConfig, platform: str) -> tuple[str, str]:
    """Returns (row of the table, reason) for `config.moe_kernel` on a `platform` of `platform_of`; ("", "") without
    experts.

    Raises:
      ValueError: a kernel that does not exist, with those that do.
    """
    if not config.experts:
        return "", ""
    on_gpu = platform in ("gpu", "cuda")
    asked = config.moe_kernel
    if asked not in MOE_KERNELS:
        raise ValueError(f"model.moe_kernel={asked!r}: choose one of {', '.join(MOE_KERNELS)}")
    if asked == "auto":
        if on_gpu:
            return "grouped", "no row dropped, least memory"
        return "scan", f"the grouped kernels run on NVIDIA GPUs from Ampere on, not on {platform}"
    if asked == "grouped" and not on_gpu:
        # Interpreted: slow, and right for tests.
        return "grouped_interpreted", "as asked, interpreted off the GPU"
    return asked, "as asked"
