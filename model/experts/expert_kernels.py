"""Kernels that multiply rows (one token for one expert) by the weights of their experts, in the table KERNELS.

A kernel has three products, all linear: rows times weights, and the two products of its gradient. Rows are grouped in
tiles, and all rows of a tile belong to one expert (`Tiles`).
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
    """The matrix products of one expert kernel, a row of the table of expert kernels. Each result has the dtype of the
    first argument.

    Axes: X rows (one token for one expert each), E experts, C inputs, N outputs. `tiles` says which expert each tile of
    rows belongs to.

    Fields:
      summary: a one-line description.
      forward: (x_XC, w_ECN, tiles) -> [X, N], each row times the weight of its expert.
      to_rows: (y_XN, w_ECN, tiles) -> [X, C], the gradient of the rows.
      to_weights: (x_XC, y_XN, tiles) -> [E, C, N], the gradient of the weights.
      tile: rows of a tile; 0 for a number that is chosen by the number of rows. With 1, no row is padding.
    """

    summary: str
    forward: Callable[..., jax.Array]
    to_rows: Callable[..., jax.Array]
    to_weights: Callable[..., jax.Array]
    tile: int = dataclasses.field(default=0, kw_only=True)


def _multiply_by_tile(spec: str, x_XC: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    # All rows of a tile belong to one expert.
    x_nTC = x_XC.reshape(tiles.expert.size, -1, x_XC.shape[1])

    def one(_, xs):
        x_TC, expert = xs
        return None, jnp.einsum(spec, x_TC, jax.lax.dynamic_index_in_dim(w, expert, keepdims=False))

    return jax.lax.scan(one, None, (x_nTC, tiles.expert))[1].reshape(x_XC.shape[0], -1)


def _weight_gradients_by_tile(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    # Adds the product x^T y of each tile to the float32 sum of its expert.
    cut = [x.reshape(tiles.expert.size, -1, x.shape[1]) for x in (x_XC, y_XN)]

    def add(total_ECN, xs):
        x_TC, y_TN, expert = xs
        own_sum = jax.lax.dynamic_index_in_dim(total_ECN, expert, keepdims=False)
        own_sum = own_sum + jnp.einsum("tc,tn->cn", x_TC, y_TN, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(total_ECN, own_sum, expert, 0), None

    zeros = jnp.zeros((tiles.count.size, x_XC.shape[1], y_XN.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, (*cut, tiles.expert))[0].astype(x_XC.dtype)


def _ragged(x_XC: jax.Array, w_ECN: jax.Array, tiles: Tiles) -> jax.Array:
    sizes_E = tiles.count * (x_XC.shape[0] // tiles.expert.size)
    return jax.lax.ragged_dot(x_XC, w_ECN, sizes_E)


def _ragged_weights(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    zeros = jnp.zeros((tiles.count.size, x_XC.shape[1], y_XN.shape[1]), x_XC.dtype)
    return jax.vjp(lambda w_ECN: _ragged(x_XC, w_ECN, tiles), zeros)[1](y_XN)[0]


def _multiply_batched(spec: str, x_XC: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    # Each expert has the same number of consecutive rows (the slot layout).
    x_ECC = x_XC.reshape(tiles.count.size, -1, x_XC.shape[1])
    return jnp.einsum(spec, x_ECC, w).reshape(x_XC.shape[0], -1)


def _batched_weights(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles) -> jax.Array:
    return jnp.einsum("esc,esn->ecn", *(x.reshape(tiles.count.size, -1, x.shape[1]) for x in (x_XC, y_XN)))


# ---- Pallas kernels (Triton): one launch for all experts ------------------------------------------------------------
#
# Rows are sorted by expert in whole tiles, so each program of a kernel reads the weights of one expert. XLA has no
# such matrix product on GPUs: `jax.lax.ragged_dot` becomes a dense product over all experts (16.0 GiB of temporaries
# for one Mixtral layer at 8,192 tokens; these kernels need 1.1 GiB). Sums are float32.

# Maximum block size of a kernel along a dimension of the weights (BLOCK) and along the summed dimension (DEPTH). Warps
# of a block, and the blocks that are loaded in advance (stages) in the products with rows and in weight gradients.
# Measured on an H100 for Mixtral's layer (4,096 x 14,336, 8,192 rows, jax 0.11.2): 504, 508 and 381 TFLOP/s, where 8
# warps and 3 stages reach 492, 466 and 301, and cuBLAS with as many rows for each expert 690 to 726. Blocks 256 wide
# reach 581 and 605 in the products with rows, but need 144 KiB of shared memory, which GPUs for workstations do not
# have.
BLOCK, DEPTH = 128, 64
WARPS, ROW_STAGES, WEIGHT_STAGES = 4, 3, 2


def rows_times(
    x_XC: jax.Array, w: jax.Array, tiles: Tiles, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiplies each of X rows (one token for one expert) by the matrix of its expert. Returns [X, N] in the dtype of
    `x_XC`.

    Args:
      w: the matrices, [E, C, N], or [E, N, C] if `transposed`.
      tiles: the expert of each tile of rows.
      interpret: True to run the kernel as plain jax on any backend.
    """
    (X, C), N = x_XC.shape, w.shape[1 if transposed else 2]
    tile, columns_per_block, summed_per_block = (
        X // tiles.expert.size,
        _choose_block_size(N, BLOCK),
        _choose_block_size(C, DEPTH),
    )

    last = tiles.count.size - 1

    def kernel(expert_ref, first_ref, count_ref, x_ref, w_ref, out_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        expert, rows, columns = expert_ref[i], pl.ds(i * tile, tile), pl.ds(j * columns_per_block, columns_per_block)
        # The buffer has room for the maximum number of rows, so most of it is usually empty and skipped.
        steps = (i < first_ref[last] + count_ref[last]).astype(jnp.int32) * (C // summed_per_block)

        def add(step, total):
            part = pl.ds(step * summed_per_block, summed_per_block)
            block = w_ref[expert, columns, part].T if transposed else w_ref[expert, part, columns]
            return total + jax.lax.dot(x_ref[rows, part], block, preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile, columns_per_block), jnp.float32))
        out_ref[rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((X, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(tiles.expert.size, N // columns_per_block),
        name="expert_rows",
        **_pallas_call_arguments(interpret, ROW_STAGES, 2 * (tiles.filled or X) * C * N, x_XC, w, out),
    )(tiles.expert, tiles.first, tiles.count, x_XC, w)


def weight_gradients(x_XC: jax.Array, y_XN: jax.Array, tiles: Tiles, *, interpret: bool = False) -> jax.Array:
    """Returns the weight gradient of each expert, the sum of x^T y over its rows: [E, C, N] in the dtype of `x_XC`.

    Args:
      x_XC: the inputs of X rows (one token for one expert).
      y_XN: the gradients of the rows' outputs.
      tiles: the expert of each tile of rows.
      interpret: True to run the kernel as plain jax on any backend.
    """
    (X, C), N, E = x_XC.shape, y_XN.shape[1], tiles.count.size
    tile = X // tiles.expert.size
    rows_per_block, columns_per_block, summed_per_block = (
        _choose_block_size(C, BLOCK),
        _choose_block_size(N, BLOCK),
        _choose_block_size(tile, DEPTH),
    )

    def kernel(first_ref, count_ref, x_ref, y_ref, out_ref):
        e, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        rows, columns = pl.ds(i * rows_per_block, rows_per_block), pl.ds(j * columns_per_block, columns_per_block)
        begin, steps = first_ref[e] * tile, count_ref[e] * (tile // summed_per_block)

        def add(step, total):
            part = pl.ds(begin + step * summed_per_block, summed_per_block)
            return total + jax.lax.dot(x_ref[part, rows].T, y_ref[part, columns], preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows_per_block, columns_per_block), jnp.float32))
        out_ref[e, rows, columns] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((E, C, N), x_XC.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(E, C // rows_per_block, N // columns_per_block),
        name="expert_weights",
        **_pallas_call_arguments(interpret, WEIGHT_STAGES, 2 * (tiles.filled or X) * C * N, x_XC, y_XN, out),
    )(tiles.first, tiles.count, x_XC, y_XN)


def _choose_block_size(size: int, largest: int) -> int:
    # The block size must divide the dimension.
    return size if size <= largest else math.gcd(size, largest)


def _pallas_call_arguments(interpret: bool, stages: int, flops: int, *arrays: jax.Array | jax.ShapeDtypeStruct) -> dict:
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    # XLA does not see the operations inside a kernel, so reports take its FLOPs and bytes from this estimate.
    cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)
    if interpret:
        return {"interpret": True, "cost_estimate": cost}
    return {"compiler_params": pallas_triton.CompilerParams(num_warps=WARPS, num_stages=stages), "cost_estimate": cost}


def _grouped(interpret: bool) -> tuple[Callable[..., jax.Array], ...]:
    return (
        partial(rows_times, interpret=interpret),
        partial(rows_times, transposed=True, interpret=interpret),
        partial(weight_gradients, interpret=interpret),
    )


KERNELS = {
    "grouped": Products("Pallas kernels over tiles of rows, on NVIDIA GPUs from Ampere on", *_grouped(False)),
    "grouped_interpreted": Products("the grouped kernels run as plain jax, on any backend", *_grouped(True)),
    "capacity": Products(
        "batched products over a fixed number of slots; rows beyond them are dropped",
        partial(_multiply_batched, "esc,ecn->esn"),
        partial(_multiply_batched, "esn,ecn->esc"),
        _batched_weights,
    ),
    "ragged": Products(
        "jax.lax.ragged_dot, which XLA expands to dense products on GPUs",
        _ragged,
        lambda y_XN, w_ECN, tiles: _ragged(y_XN, w_ECN.swapaxes(1, 2), tiles),
        _ragged_weights,
        tile=1,
    ),
    "scan": Products(
        "a loop over tiles of rows, on any backend",
        partial(_multiply_by_tile, "tc,cn->tn"),
        partial(_multiply_by_tile, "tn,cn->tc"),
        _weight_gradients_by_tile,
    ),
}
# The values of model.moe_kernel. `dense` multiplies every token by every expert, without rows: the reference of tests.
MOE_KERNELS = ("auto", "grouped", "capacity", "ragged", "scan", "dense")
# Slots of an expert relative to the mean if the config sets no factor (Switch, Fedus et al. 2021, arXiv 2101.03961).
CAPACITY = 1.25


def choose_moe_kernel(config: ModelConfig, platform: str) -> tuple[str, str]:
    """Returns the name of the expert kernel that `config.moe_kernel` selects (a row of KERNELS), and the reason.
    Returns ("", "") for a model without experts.

    Args:
      platform: name of the platform or GPU that will run the program, the result of `platform_of` for its device.

    Raises:
      ValueError: the kernel does not exist. The message lists the kernels.
    """
    if not config.experts:
        return "", ""
    on_gpu = platform in ("gpu", "cuda")
    asked = config.moe_kernel
    if asked not in MOE_KERNELS:
        raise ValueError(f"model.moe_kernel={asked!r} is unknown: choose one of {', '.join(MOE_KERNELS)}")
    if asked == "auto":
        if on_gpu:
            return "grouped", "drops no row and needs the least memory"
        return "scan", f"the grouped kernels run on NVIDIA GPUs from Ampere on, not on {platform}"
    if asked == "grouped" and not on_gpu:
        # Interpreted kernels are slow and only meant for tests.
        return "grouped_interpreted", "as configured, interpreted because there is no GPU"
    return asked, "as configured"
