"""Dispatch of expert rows over a mesh and their matrix products, with custom gradients.

Arrays are global, and each function runs on a device's shard (`Placement.own`). Rows [X, 1, D] have an axis for the
tensor-parallel ranks. The ranks hold partial sums, which are added only when the rows return to their tokens, because
there are fewer tokens than rows.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.experts.exchange import EXCHANGES
from bytescope.model.experts.expert_kernels import KERNELS
from bytescope.model.placement import Axes, Placement
from bytescope.model.remat.offload import stored_like, to_device

TOKENS, CHOICES = ("batch", "length", None), ("batch", "length", None)
ROWS, HIDDEN, NUMBERS = ("rows", "copies", None), ("rows", "d_expert"), ("rows", "copies")


@dataclasses.dataclass(frozen=True)
class DispatchSettings:
    """Settings of the experts: how rows (one token for one expert) reach their experts and are multiplied.

    Fields:
      kernel: name of the expert kernel, a row of KERNELS.
      exchange: name of the way rows are moved between devices, a row of EXCHANGES.
      factor: maximum number of rows relative to the mean; 0 for no limit. It limits the rows of each expert if experts
        have a fixed number of slots, else the rows of each device.
      experts: number of experts on all devices together.
    """

    kernel: str
    exchange: str
    factor: float
    experts: int


def make_plan(how: DispatchSettings, place: Placement, expert_BLK: jax.Array) -> Any:
    """Decides which row stores which choice (pair of a token and one of its experts). Returns the plan: index arrays in
    the form that `how.exchange` uses. Every device has its own part of it.

    Args:
      how: the kernel, exchange and sizes of the experts.
      place: shards arrays over the mesh.
      expert_BLK: int32, the K experts of each token. Padding tokens have the index `how.experts` and get no row.
    """
    exchange = EXCHANGES[how.exchange]

    def plan(expert_BLK: jax.Array) -> Any:
        expert_TK = expert_BLK.reshape(-1, expert_BLK.shape[-1])
        shape = exchange.shape(*expert_TK.shape, how.experts, how.factor, KERNELS[how.kernel].tile, place.peers)
        return exchange.plan(expert_TK, shape, place.peers)

    return place.own(plan, (CHOICES,), ("rows",))(expert_BLK)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch(
    how: DispatchSettings, place: Placement, x_BLD: jax.Array, weight_BLK: jax.Array, plan: Any
) -> tuple[jax.Array, jax.Array]:
    """Moves tokens to the devices of their experts. Returns the rows [X, tensor, D] in the dtype of `x_BLD`, and the
    rows' router weights [X, tensor] float32. `tensor` is the size of the tensor-parallel mesh axis.

    Args:
      how: the kernel, exchange and sizes of the experts.
      place: shards arrays over the mesh.
      x_BLD: the tokens' vectors.
      weight_BLK: router weights of each token's K experts.
      plan: which row stores which pair of token and expert, from `make_plan`.
    """
    exchange = EXCHANGES[how.exchange]

    def move(x_BLD, weight_BLK, plan):
        x_XD = exchange.to_rows(x_BLD.reshape(-1, x_BLD.shape[-1]), plan, place.peers)
        weight_X = exchange.to_row_numbers(weight_BLK.reshape(-1, weight_BLK.shape[-1]), plan, place.peers)
        return x_XD[:, None], weight_X[:, None]

    return place.own(move, (TOKENS, CHOICES, ("rows",)), (ROWS, NUMBERS))(x_BLD, weight_BLK, plan)


def _dispatch_forward(how, place, x_BLD, weight_BLK, plan):
    return dispatch(how, place, x_BLD, weight_BLK, plan), (plan, _empty_like(x_BLD), _empty_like(weight_BLK))


def _dispatch_backward(how, place, residuals, gradients):
    plan, x_like, weight_like = residuals
    exchange = EXCHANGES[how.exchange]

    def move(d_rows, d_weight, x_like, weight_like, plan):
        d_TD = exchange.to_tokens(d_rows[:, 0], plan, place.peers)
        d_TK = exchange.to_choices(d_weight[:, 0], plan, place.peers)
        return d_TD.reshape(*x_like.shape[:2], -1), d_TK.reshape(*weight_like.shape[:2], -1)

    move = place.own(
        move, (ROWS, NUMBERS, TOKENS, CHOICES, ("rows",)), (TOKENS, CHOICES), sums=(("copies",), ("copies",))
    )
    return *move(*gradients, x_like, weight_like, plan), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def combine(how: DispatchSettings, place: Placement, y_X1D: jax.Array, like_BLD: jax.Array, plan: Any) -> jax.Array:
    """Moves rows (one token for one expert each) back to the devices of their tokens. Returns the sum of each token's
    rows, [B, L, D].

    Args:
      how: the kernel, exchange and sizes of the experts.
      place: shards arrays over the mesh.
      y_X1D: the rows' results.
      like_BLD: an array [B, L, 0], whose shape gives B and L.
      plan: which row stores which pair of token and expert, from `make_plan`.
    """

    def move(y_X1D, like_BLD, plan):
        y_TD = EXCHANGES[how.exchange].to_tokens(y_X1D[:, 0], plan, place.peers)
        return (y_TD.reshape(*like_BLD.shape[:2], -1),)

    move = place.own(move, (ROWS, TOKENS, ("rows",)), (TOKENS,), sums=(("copies",),))
    return move(y_X1D, like_BLD, plan)[0]


def _combine_forward(how, place, y_X1D, like_BLD, plan):
    return combine(how, place, y_X1D, like_BLD, plan), (plan, like_BLD)


def _combine_backward(how, place, residuals, d_BLD):
    plan, like_BLD = residuals

    def move(d_BLD, plan):
        return EXCHANGES[how.exchange].to_rows(d_BLD.reshape(-1, d_BLD.shape[-1]), plan, place.peers)[:, None]

    return place.own(move, (TOKENS, ("rows",)), ROWS)(d_BLD, plan), like_BLD, None


combine.defvjp(_combine_forward, _combine_backward)


def _empty_like(x_BLD: jax.Array) -> jax.Array:
    # Has no bytes; its shape tells a device its number of tokens.
    return x_BLD[:, :, :0]


@dataclasses.dataclass(frozen=True)
class Weight:
    """Static description of an expert weight [E, C, N]: E experts, C inputs, N outputs.

    Fields:
      axes: its logical axes.
      frozen: True if it gets no gradient.
      regather: True if the backward pass casts and gathers the stored weight again, instead of saving the result of the
        forward pass.
    """

    axes: Axes
    frozen: bool
    regather: bool

    @classmethod
    def from_param(cls, p: nnx.Param, regather: bool) -> "Weight":
        """Returns the description of the expert weight `p`. Its logical axes and whether it is frozen come from its
        metadata."""
        return cls(p.get_metadata()["axes"], p.get_metadata()["frozen"], regather)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _multiply(
    kernel: str,
    place: Placement,
    which: tuple[Weight, ...],
    spec: tuple[Axes, Axes],
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    tiles: Any,
) -> tuple[jax.Array, ...]:
    """Multiplies rows `x` (one token for one expert each) by each of the expert weights, with a custom gradient.
    Returns one result per weight. The weights are passed as stored: sharded and in the dtype of parameters.

    Args:
      kernel: name of the expert kernel.
      which: the description of each weight.
      spec: (logical axes of the rows, logical axes of the results).
      tiles: the expert of each tile of rows.
    """
    return _multiply_gathered(kernel, place, which, spec, x, _cast_and_gather(which, weights, x.dtype, place), tiles)


def _multiply_gathered(
    kernel: str,
    place: Placement,
    which: tuple[Weight, ...],
    spec: tuple[Axes, Axes],
    x: jax.Array,
    computed: tuple[jax.Array, ...],
    tiles: Any,
) -> tuple[jax.Array, ...]:
    def run(x, weights, tiles):
        return tuple(_shaped(KERNELS[kernel].forward(_flat(x), w, tiles), spec[1]) for w in weights)

    return place.own(run, (spec[0], tuple(one.axes for one in which), ("rows",)), (spec[1],) * len(which))(
        x, computed, tiles
    )


def _multiply_forward(kernel, place, which, spec, x, weights, tiles):
    # If weights are gathered again for the gradient, the residuals are the weights as stored, which costs no memory.
    # If a checkpoint recomputes the products, the weights are gathered for the recomputation: the compiler would not
    # notice that both gathers are the same.
    computed = _cast_and_gather(which, weights, x.dtype, place)
    outs = _multiply_gathered(kernel, place, which, spec, x, computed, tiles)
    kept = None if all(one.frozen for one in which) else x
    return outs, (kept, weights, None if which[0].regather else computed, tiles)


def _multiply_backward(kernel, place, which, spec, residuals, d_outs):
    x, weights, computed, tiles = residuals
    if computed is None:
        computed = _cast_and_gather(which, weights, d_outs[0].dtype, place)
    products, trained = KERNELS[kernel], [not one.frozen for one in which]

    def run(x, weights, d_outs, tiles):
        d_outs = [_flat(d_out) for d_out in d_outs]
        d_x = sum(products.to_rows(d_out, w, tiles) for d_out, w in zip(d_outs, weights))
        d_weights = [
            products.to_weights(_flat(x), d_out, tiles)[None, None] for d_out, train in zip(d_outs, trained) if train
        ]
        return _shaped(d_x, spec[0]), [place.reduced(d_w) for d_w in d_weights]

    axes = tuple(one.axes for one in which)
    d_x, sums = place.own(
        run,
        (spec[0], axes, [spec[1]] * len(which), ("rows",)),
        (spec[0], [("replicas", "sharers", *one.axes) for one in which if not one.frozen]),
    )(x, computed, list(d_outs), tiles)
    parts, d_weights = iter(sums), []
    for one, w in zip(which, weights):
        if one.frozen:
            d_weights.append(None)
            continue
        # Every device holds its own part of the sum. Summing first over the devices that share optimizer state, each
        # of which keeps its shard, lets the compiler reduce and scatter in one operation. The sum over replicas then
        # adds shards.
        part = next(parts)
        shard = place.gradient(_sum_in_own_dtype(part, 1), ("replicas", *one.axes))
        d_weights.append(stored_like(place.gradient(_sum_in_own_dtype(shard, 0), one.axes).astype(w.dtype), w))
    return d_x, tuple(d_weights), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _sum_in_own_dtype(parts: jax.Array, axis: int) -> jax.Array:
    # `jnp.sum` would send float32 between devices.
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (axis,))


def _cast_and_gather(
    which: Sequence[Weight], weights: Sequence[jax.Array], dtype: jnp.dtype, place: Placement
) -> tuple[jax.Array, ...]:
    return tuple(place.weight(to_device(w).astype(dtype), one.axes) for one, w in zip(which, weights))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[-1])


def _shaped(y_XN: jax.Array, axes: Axes) -> jax.Array:
    return y_XN[:, None] if len(axes) == 3 else y_XN


def enter(
    kernel: str, place: Placement, x_X1D: jax.Array, params: Sequence[nnx.Param], plan: Any, *, regather: bool
) -> tuple[jax.Array, ...]:
    """Multiplies rows [X, tensor, D] by the weights of their experts, for each parameter [E, D, F]. Returns one result
    [X, F] per parameter. A row is one token for one expert; `tensor` is the size of the tensor-parallel mesh axis.

    Args:
      kernel: name of the expert kernel.
      plan: which row belongs to which expert, from `make_plan`.
      regather: True to gather the sharded parameters again in the backward pass, instead of saving them gathered.
    """
    which = tuple(Weight.from_param(p, regather) for p in params)
    return _multiply(kernel, place, which, (ROWS, HIDDEN), x_X1D, tuple(p[...] for p in params), plan.tiles)


def leave(kernel: str, place: Placement, act_XF: jax.Array, p: nnx.Param, plan: Any, *, regather: bool) -> jax.Array:
    """Multiplies rows [X, F] by the weights of their experts, the parameter [E, F, D]. Returns [X, tensor, D]. A row is
    one token for one expert; `tensor` is the size of the tensor-parallel mesh axis.

    Args:
      kernel: name of the expert kernel.
      plan: which row belongs to which expert, from `make_plan`.
      regather: True to gather the sharded parameter again in the backward pass, instead of saving it gathered.
    """
    return _multiply(kernel, place, (Weight.from_param(p, regather),), (HIDDEN, ROWS), act_XF, (p[...],), plan.tiles)[0]


def weigh(place: Placement, act_XF: jax.Array, weight_X1: jax.Array) -> jax.Array:
    """Multiplies rows [X, F] (hidden values of one token for one expert) by their router weights, in the dtype of the
    rows."""

    def times(act_XF, weight_X1):
        return act_XF * weight_X1.astype(act_XF.dtype)

    return place.own(times, (HIDDEN, NUMBERS), HIDDEN)(act_XF, weight_X1)
