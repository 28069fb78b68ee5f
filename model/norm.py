"""Norms over the model width or that of a head, and how devices sum the gradients of their vectors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.layers import STREAM, param, read
from bytescope.model.model_config import ModelConfig
from bytescope.model.placement import Axes, Placement
from bytescope.model.precision import Precision


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """`vector` [width] with the rank of `x` [..., width]."""
    return vector[(None,) * (x.ndim - 1) + (slice(None),)]


def _scale(x: jax.Array, scale: jax.Array, place: Placement, axes: Axes) -> jax.Array:
    del place, axes
    return x * _along_last(scale, x)


def _scaled_forward(x, scale, place, axes):
    return _scale(x, scale, place, axes), (x, scale)


def _scaled_backward(place, axes, residuals, dy):
    x, scale = residuals
    return dy * _along_last(scale, x), _sum_others(place, axes, dy * x)


def _shift(x: jax.Array, bias: jax.Array, place: Placement, axes: Axes) -> jax.Array:
    del place, axes
    return x + _along_last(bias, x)


def _shifted_forward(x, bias, place, axes):
    return _shift(x, bias, place, axes), None


def _shifted_backward(place, axes, residuals, dy):
    del residuals
    return dy, _sum_others(place, axes, dy)


# The same, but the gradient of the vector is summed over a device's own tokens and heads and then narrowed to
# `place.reduce`: left to the partitioner, devices would sum in the wide dtype.
_scaled = jax.custom_vjp(_scale, nondiff_argnums=(2, 3))
_shifted = jax.custom_vjp(_shift, nondiff_argnums=(2, 3))
_scaled.defvjp(_scaled_forward, _scaled_backward)
_shifted.defvjp(_shifted_forward, _shifted_backward)


def _sum_others(place: Placement, axes: Axes, dy: jax.Array) -> jax.Array:
    """Sum over all dimensions but the last of a tensor sharded by the logical `axes`; devices send it in
    `place.reduce`."""
    others = tuple(range(dy.ndim - 1))
    own = place.own(lambda dy: (place.reduced(dy.sum(others)),), (axes,), ((None,),), sums=(axes[:-1],))
    return own(dy)[0].astype(dy.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the model width, in `precision.norm`.

    Args:
      width: the field of `config` that is the last dimension. Over any other than the model's it is RMSNorm always.
      axes: the logical axes of what is normed. axis: that of its last dimension in the vectors, "" for `width`.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        place: Placement,
        width: str = "d_model",
        axes: Axes = STREAM,
        axis: str = "",
    ):
        self.kind, self.eps, self.axes = NORMS[config.norm], config.norm_eps, axes
        self.center = self.kind.center and width == "d_model"
        self.precision, self.place = precision, place
        size = getattr(config, width)
        self.scale = param(None, (size,), (axis or width,), precision.param, fill=0.0 if self.kind.offset else 1.0)
        self.bias = param(None, (size,), (width,), precision.param) if self.center and config.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` [..., width] normed, in the compute dtype."""
        with jax.named_scope("norm"):
            y = x.astype(self.precision.norm)
            if self.center:
                y = y - y.mean(-1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
            times, plus = (_scaled, _shifted) if self.place.narrows(y.dtype) else (_scale, _shift)
            scale = read(self.scale, y.dtype, self.place)
            y = times(y, 1.0 + scale if self.kind.offset else scale, self.place, self.axes)
            if self.bias is not None:
                y = plus(y, read(self.bias, y.dtype, self.place), self.place, self.axes)
            return self.place(y.astype(self.precision.compute), self.axes)


class Kind(NamedTuple):
    """center: the mean is subtracted. offset: the scale is stored as what is added to 1, as Gemma's checkpoints have
    it."""

    center: bool = False
    offset: bool = False


NORMS = {"rmsnorm": Kind(), "layernorm": Kind(center=True), "rmsnorm_offset": Kind(offset=True)}
