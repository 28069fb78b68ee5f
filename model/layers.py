"""Building blocks of layers: parameters, weight matmuls with custom gradients, embedding look-up, activations and
dropout."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.fp8 import Linear, linear
from bytescope.model.names import tag
from bytescope.model.placement import ONE_DEVICE, Axes, Placement
from bytescope.model.quantized.quantized_formats import Matrix, dequantize
from bytescope.model.quantized.weight import Quantized
from bytescope.model.remat.offload import stored_like, to_device


def param(
    key: jax.Array | None,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: DTypeLike,
    *,
    std: float = 0.0,
    fill: float = 0.0,
    pad: tuple[int, ...] = (),
    contracted: bool = False,
    always_float32: bool = False,
) -> nnx.Param:
    """Returns a parameter with its logical axes in the metadata. Values are normally distributed with standard
    deviation `std`, or all `fill` if `key` is None.

    Args:
      axes: the logical axis of each dimension, such as "d_model".
      pad: number of zeros to append to each dimension of `shape`.
      contracted: True if only matrix products in the compute dtype read the parameter.
      always_float32: True if the parameter is float32 in every precision preset, frozen or not.

    Raises:
      ValueError: the number of axes differs from the number of dimensions.
    """
    if len(shape) != len(axes):
        raise ValueError(f"a parameter of shape {shape} has the logical axes {axes}: give one axis per dimension")
    # Sampled in float32, so that every precision preset starts from the same values.
    value = jnp.full(shape, fill, dtype) if key is None else (std * jax.random.normal(key, shape)).astype(dtype)
    if any(pad):
        value = jnp.pad(value, [(0, after) for after in pad])
    return nnx.Param(value, axes=axes, contracted=contracted, always_float32=always_float32, frozen=False)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(value: jax.Array, place: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Returns the stored parameter `value` as a layer computes with it: gathered along axes that are sharded only in
    storage (ZeRO-3). Its gradient gets the sharding and dtype in which gradients are stored.

    `axes`: the parameter's logical axes.
    """
    return place.weight(value, axes)


def _gather_forward(value, place, axes):
    return gathered(value, place, axes), None


def _gather_backward(place, axes, residual, d_value):
    del residual
    # A sharding constraint's own transpose would ask for the whole gradient on every device. Asking for the layout
    # that gradients are stored in lets the compiler reduce-scatter.
    return (place.gradient(d_value, axes).astype(d_value.dtype),)


gathered.defvjp(_gather_forward, _gather_backward)


def read(p: nnx.Param | Quantized, dtype: DTypeLike, place: Placement) -> jax.Array:
    """Returns the parameter in `dtype`, gathered over the devices that share it only in storage (ZeRO-3). The cast is
    before the gather, which then moves fewer bytes."""
    if isinstance(p, Quantized):
        return p.read(dtype, place)
    return gathered(to_device(p[...]).astype(dtype), place, p.get_metadata()["axes"])


def _read_for(p: nnx.Param | Quantized, x: jax.Array, place: Placement) -> jax.Array:
    if not isinstance(p, Quantized):
        return read(p, x.dtype, place)
    # In unrolled layers the compiler would dequantize the weights of many layers as early as it can. Their codes depend
    # on `x`, so that dequantization waits for `x`.
    # A zero that the compiler cannot prove to be zero. An optimization barrier would be dropped before XLA fuses the
    # loops of several layers.
    zero = jnp.minimum(jnp.abs(x[(0,) * x.ndim].astype(jnp.int32)), 0)
    arrays = p.arrays()
    arrays["codes"] = arrays["codes"] | zero.astype(arrays["codes"].dtype)
    return dequantize(p.base, p.matrix, jax.lax.stop_gradient(arrays), x.dtype, place)


# The logical axes of the tokens whose table rows are looked up.
ROWS = ("table_batch", "table_length")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_rows(table_VD: jax.Array, tokens_BL: jax.Array, place: Placement) -> jax.Array:
    return jnp.take(table_VD, tokens_BL, axis=0, mode="clip")


def _narrow_rows_forward(table_VD, tokens_BL, place):
    return _narrow_rows(table_VD, tokens_BL, place), (table_VD, tokens_BL)


def _narrow_rows_backward(place, residuals, d_BLD):
    table_VD, tokens_BL = residuals

    def sums(d_BLD, tokens_BL, rows_V):
        row_BL = jnp.clip(tokens_BL, 0, table_VD.shape[0] - 1) - rows_V[0]
        row_BL = jnp.where(row_BL < 0, rows_V.size, row_BL)  # a negative index would count from the end
        # Float32 sums over this device's tokens, cast to the dtype in which devices exchange gradients.
        zeros_VD = jnp.zeros((rows_V.size, d_BLD.shape[-1]), jnp.float32)
        return (place.reduced(zeros_VD.at[row_BL].add(d_BLD.astype(jnp.float32), mode="drop")),)

    sums = place.own(sums, ((*ROWS, "table_width"), ROWS, ("vocab",)), (("vocab", "table_width"),), sums=(ROWS,))
    (sums_VD,) = sums(d_BLD, tokens_BL, jnp.arange(table_VD.shape[0]))
    # The barrier makes the cast happen here. Otherwise the compiler stores the float32 sum until the update reads it.
    return jax.lax.optimization_barrier(sums_VD.astype(table_VD.dtype)), None


_narrow_rows.defvjp(_narrow_rows_forward, _narrow_rows_backward)


def look_up(table_VD: jax.Array, tokens_BL: jax.Array, place: Placement = ONE_DEVICE) -> jax.Array:
    """Returns the rows of an embedding table for int32 tokens, [B, L, D] in the table's dtype.

    The gradient of a row is always summed in float32, because a frequent token adds to its row thousands of times.
    `place`: shards the gradient.
    """
    if jnp.dtype(table_VD.dtype).itemsize < 4:
        return _narrow_rows(table_VD, tokens_BL, place)
    return jnp.take(table_VD, tokens_BL, axis=0, mode="clip")


# The layouts of the residual stream between tensor-parallel regions (STREAM) and within them (WITHIN), see
# model/placement.py. Under sequence parallelism an all-gather enters a region and a reduce-scatter leaves it; in the
# backward pass it is the reverse.
STREAM, WITHIN = ("batch", "stream", None), ("batch", "length", None)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def move(x_BLD: jax.Array, place: Placement, axes: Axes, gradient_axes: Axes) -> jax.Array:
    """Returns `x_BLD` with the sharding of the logical axes `axes`. Its gradient gets the sharding of
    `gradient_axes`."""
    return place(x_BLD, axes)


def _move_forward(x_BLD, place, axes, gradient_axes):
    return move(x_BLD, place, axes, gradient_axes), None


def _move_backward(place, axes, gradient_axes, residual, d_BLD):
    del axes, residual
    return (place(d_BLD, gradient_axes),)


move.defvjp(_move_forward, _move_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns `einsum(spec, x, w)` of an activation and a weight, in their dtype.

    It equals jnp.einsum, except for the order of the operands in the gradient of the weight (`_weight_gradient`).
    `spec`: such as "bld,dhk->blhk".
    """
    return jnp.einsum(spec, x, w)


def _product_forward(spec, x, w):
    # Not `product` itself: a policy of jax.checkpoint sees no matrix product inside a call of a custom_vjp.
    return jnp.einsum(spec, x, w), (x, w)


def _product_backward(spec, residuals, dy):
    x, w = residuals
    left, right, out = _letters(spec)
    return jnp.einsum(f"{out},{right}->{left}", dy, w), _weight_gradient(spec, x, dy)


product.defvjp(_product_forward, _product_backward)


def _letters(spec: str) -> tuple[str, str, str]:
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    return left, right, out


def _weight_gradient(spec: str, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the gradient of the weight of the product `spec`, for its input `x` and the gradient `dy` of its result.

    The smaller array is the first operand, because XLA's compiler for CPUs transposes the first operand. jax's own rule
    always takes `dy` first; XLA then computes the larger `dy` of a SwiGLU MLP a second time in transposed order, and
    the gradient of the MLP takes 1.7x the CPU seconds. The compiled programs for GPUs are the same in both orders.
    """
    left, right, out = _letters(spec)
    if x.size <= dy.size:
        return jnp.einsum(f"{left},{out}->{right}", x, dy)
    kept = "".join(letter for letter in out if letter in right)
    contracted = "".join(letter for letter in left if letter in right)
    swapped = jnp.einsum(f"{out},{left}->{kept}{contracted}", dy, x)
    return jnp.einsum(f"{kept}{contracted}->{right}", swapped)


def _multiplier(p: nnx.Param | Quantized) -> Callable[[str, jax.Array, jax.Array], jax.Array]:
    # The custom gradient would read `x` for the gradient of a frozen weight too.
    frozen = isinstance(p, Quantized) or p.get_metadata()["frozen"]
    return jnp.einsum if frozen else product


@dataclasses.dataclass(frozen=True)
class _Product:
    """Static description of one matrix product of an activation with a weight.

    Fields:
      name: the named scope of the product.
      spec: its einsum.
      axes: logical axes of the weight.
      frozen: True if the weight is frozen. The product then computes no weight gradient and saves no activation for it.
      stored: (storage format, shape as a matrix) of a quantized weight, None for an unquantized weight.
    """

    name: str
    spec: str
    axes: Axes
    frozen: bool
    stored: tuple[str, Matrix] | None = None

    @classmethod
    def from_param(cls, name: str, spec: str, p: nnx.Param | Quantized) -> "_Product":
        if isinstance(p, Quantized):
            return cls(name, spec, p.matrix.axes, True, (p.base, p.matrix))
        return cls(name, spec, p.get_metadata()["axes"], p.get_metadata()["frozen"])

    def read(self, w: Any, dtype: DTypeLike, place: Placement) -> jax.Array:
        if self.stored:
            return dequantize(*self.stored, w, dtype, place)
        return place.weight(to_device(w).astype(dtype), self.axes)


def _value(p: nnx.Param | Quantized) -> Any:
    return p.arrays() if isinstance(p, Quantized) else p[...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _regathered(
    products: tuple[_Product, ...],
    place: Placement,
    moves: tuple[Axes, Axes] | None,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Returns the matrix products of `x` with stored weights, one result per weight. Only `x` and the stored weights
    are saved for the backward pass, which casts and gathers the weights again.

    Args:
      products: the description of each product.
      place: shards arrays over the mesh.
      moves: (logical axes of `x` while it is multiplied, logical axes of the saved `x` and of its gradient); None to
        leave the sharding of `x` unchanged.
      weights: the weights as stored, sharded and in the dtype of parameters.
    """
    within = place(place(x, moves[1]), moves[0]) if moves else x
    read_weights = [one.read(w, x.dtype, place) for one, w in zip(products, weights)]
    out = []
    for one, w in zip(products, read_weights):
        # Reports identify the compiled product by this name.
        with jax.named_scope(one.name):
            out.append(jnp.einsum(one.spec, within, w))
    return tuple(out)


def _regathered_forward(products, place, moves, x, weights):
    kept = None if all(one.frozen for one in products) else x
    return _regathered(products, place, moves, x, weights), (kept, weights)


def _regathered_backward(products, place, moves, residuals, d_outs):
    x, weights = residuals
    within, dx, d_weights = x if x is None or not moves else place(place(x, moves[1]), moves[0]), [], []
    for one, w, dy in zip(products, weights, d_outs):
        left, right, out = _letters(one.spec)
        if one.stored:  # otherwise the compiler would store what unrolled layers dequantized in the forward pass
            w, dy = jax.lax.optimization_barrier((w, dy))
        dx.append(jnp.einsum(f"{out},{right}->{left}", dy, one.read(w, dy.dtype, place)))
        if one.frozen:
            d_weights.append(None)
            continue
        dw = _weight_gradient(one.spec, within, dy)
        d_weights.append(stored_like(place.gradient(dw, one.axes).astype(w.dtype), w))
    return place(sum(dx), moves[1]) if moves else sum(dx), tuple(d_weights)


_regathered.defvjp(_regathered_forward, _regathered_backward)


def enter(
    spec: str,
    x_BLD: jax.Array,
    params: Mapping[str, nnx.Param],
    place: Placement,
    *,
    regather: bool,
    matmul: str = "wide",
    name: str = "",
) -> tuple[jax.Array, ...]:
    """Returns `einsum(spec, x, p)` of the residual stream `x_BLD` with each named parameter `p`, in the dtype of `x`.
    One gather of `x` serves all products.

    Args:
      params: name of the product -> parameter.
      regather: how the gradient gets the parameters. True saves `x` and the parameters as stored, and the backward pass
        gathers and casts them again. False saves the gathered parameters. Pass False inside a checkpoint, which keeps
        the gathered parameters of only one layer: one gather then serves the recomputation and the gradient.
      matmul: "wide" for unquantized operands, or a row of PRODUCTS (model/fp8.py), whose products save `x` quantized.
      name: prefix of the checkpoint names of the quantized `x`.
    """
    if matmul != "wide":
        axes = tuple(p.get_metadata()["axes"] for p in params.values())
        how = Linear(spec, axes, STREAM, WITHIN, STREAM, name, tuple(params), regather, matmul)
        return linear(
            how, place, x_BLD, tuple(p[...] if regather else read(p, x_BLD.dtype, place) for p in params.values())
        )
    if regather:
        products = tuple(_Product.from_param(each, spec, p) for each, p in params.items())
        return _regathered(products, place, (WITHIN, STREAM), x_BLD, tuple(map(_value, params.values())))
    # Sharded like the stream first: a remat policy then saves the shard, not the result of the gather.
    within_BLD = move(place(x_BLD, STREAM), place, WITHIN, STREAM)
    out = []
    for each, p in params.items():
        weight = _read_for(p, within_BLD, place)
        with jax.named_scope(each):
            out.append(_multiplier(p)(spec, within_BLD, weight))
    return tuple(out)


def leave(
    spec: str,
    x: jax.Array,
    p: nnx.Param,
    place: Placement,
    *,
    regather: bool,
    matmul: str = "wide",
    name: str = "",
    out: str = "out",
) -> jax.Array:
    """Returns `einsum(spec, x, p)` [B, L, D] in the dtype of `x`, moved back into the layout of the residual stream.

    Args:
      regather: True if the backward pass gathers and casts the stored parameter again; False to save it gathered.
      matmul: "wide" for unquantized operands, or a row of PRODUCTS (model/fp8.py), which multiplies in fp8.
      name: prefix of the checkpoint names of the quantized `x`. Pass "" if `x` is saved anyway: fp8 products then do
        not save a quantized `x` as well.
      out: the named scope of the product.
    """
    if matmul != "wide":
        axes = p.get_metadata()["axes"]
        own = ("batch", "length", *axes[: x.ndim - 2])
        how = Linear(spec, (axes,), own, own, own, name, (out,), regather, matmul)
        (y_BLD,) = linear(how, place, x, (p[...] if regather else read(p, x.dtype, place),))
    else:
        y_BLD = multiply(spec, x, p, place, regather=regather, name=out)
    return move(y_BLD, place, STREAM, WITHIN)


def multiply(spec: str, x: jax.Array, p: nnx.Param, place: Placement, *, regather: bool, name: str) -> jax.Array:
    """Returns `einsum(spec, x, p)` in the dtype of `x`, without changing the sharding of `x` or the result.

    `regather`: True if the backward pass gathers the stored parameter again; False to save it gathered. `name`: the
    named scope of the product.
    """
    if regather:
        return _regathered((_Product.from_param(name, spec, p),), place, None, x, (_value(p),))[0]
    return _multiplier(p)(spec, x, _read_for(p, x, place))


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
# kind -> (gated, activation). GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415) in its tanh form as in GPT-2 or with
# the error function. SwiGLU, and GeGLU with the tanh form as in Gemma, after Shazeer 2020 (arXiv 2002.05202).
MLPS = {"gelu": (False, "gelu"), "gelu_exact": (False, "gelu_exact"), "swiglu": (True, "silu"), "geglu": (True, "gelu")}
POSITIONS = ("learned", "rope", "none")


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Limits `x` smoothly to the range -cap to cap: cap tanh(x / cap) (Bello et al. 2016, arXiv 1611.09940). Returns
    `x` if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def dropout(x: jax.Array, key_B: jax.Array | None, rate: float, mask_name: str) -> jax.Array:
    """Applies inverted dropout to `x` [B, ...] with one key per sequence. Returns `x` unchanged if `key_B` is None or
    the rate is 0.

    The mask of a sequence does not depend on how the global batch is split into micro-batches. It takes one byte per
    element and has the checkpoint name `mask_name`.
    """
    if key_B is None or rate == 0.0:
        return x
    with jax.named_scope("dropout"):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(key_B)
        keep = tag(keep, mask_name)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def fold(key_B: jax.Array | None, salt: int | jax.Array) -> jax.Array | None:
    """Derives dropout keys [B] for one layer, or for one use in a layer, from the keys of the sequences `key_B`.
    `salt`: the number of the layer or use. Returns None if `key_B` is None."""
    return None if key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, salt))(key_B)
