"""Products of rows with the weights of their experts, rows of one table behind one signature.

A kernel has three products, all linear: rows times weights, and the two of its gradient. Rows are in tiles, each of one
expert (`Tiles`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.experts.expert_rows import Tiles
from bytescope.model.experts.grouped import rows_times, weights_of
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
    """(row of the table, why) for `config.moe_kernel` on a `platform` of `platform_of`; ("", "") without experts.

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
