"""Norms over the model width or the width of a head, and the sums of their scale and bias gradients over devices.

The suffix D is the normed dimension. Any dimensions may precede it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.layers import STREAM, param, read
from bytescope.model.model_config import ModelConfig
from bytescope.model.placement import Axes, Placement
from bytescope.model.precision import Precision


def _broadcast_over_leading_dims(vector_D: jax.Array, x_D: jax.Array) -> jax.Array:
    return vector_D[(None,) * (x_D.ndim - 1) + (slice(None),)]


def _scale(x_D: jax.Array, scale_D: jax.Array, place: Placement, axes: Axes) -> jax.Array:
    del place, axes
    return x_D * _broadcast_over_leading_dims(scale_D, x_D)


def _scaled_forward(x_D, scale_D, place, axes):
    return _scale(x_D, scale_D, place, axes), (x_D, scale_D)


def _scaled_backward(place, axes, residuals, dy_D):
    x_D, scale_D = residuals
    return dy_D * _broadcast_over_leading_dims(scale_D, x_D), _sum_over_leading_dims(place, axes, dy_D * x_D)


def _shift(x_D: jax.Array, bias_D: jax.Array, place: Placement, axes: Axes) -> jax.Array:
    del place, axes
    return x_D + _broadcast_over_leading_dims(bias_D, x_D)


def _shifted_forward(x_D, bias_D, place, axes):
    return _shift(x_D, bias_D, place, axes), None


def _shifted_backward(place, axes, residuals, dy_D):
    del residuals
    return dy_D, _sum_over_leading_dims(place, axes, dy_D)


# `_scale` and `_shift` with a custom gradient of the vector: it is summed over a device's own tokens and heads and
# then cast to `place.reduce`. The partitioner would sum over devices in the larger dtype.
_scaled = jax.custom_vjp(_scale, nondiff_argnums=(2, 3))
_shifted = jax.custom_vjp(_shift, nondiff_argnums=(2, 3))
_scaled.defvjp(_scaled_forward, _scaled_backward)
_shifted.defvjp(_shifted_forward, _shifted_backward)


def _sum_over_leading_dims(place: Placement, axes: Axes, dy_D: jax.Array) -> jax.Array:
    others = tuple(range(dy_D.ndim - 1))
    # Devices exchange the sums in the dtype `place.reduce`.
    own = place.own(lambda dy_D: (place.reduced(dy_D.sum(others)),), (axes,), ((None,),), sums=(axes[:-1],))
    return own(dy_D)[0].astype(dy_D.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last axis, computed in the dtype
    `precision.norm`.

    Args:
      width: name of the `config` field with the size of the last axis. If it is not `d_model`, the norm is always
        RMSNorm.
      axes: logical axes of the input.
      axis: logical axis of the scale; "" means that it is named like `width`.
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

    def __call__(self, x_D: jax.Array) -> jax.Array:
        """Returns `x_D` [..., D] normalized over its last axis, in the compute dtype."""
        with jax.named_scope("norm"):
            y_D = x_D.astype(self.precision.norm)
            if self.center:
                y_D = y_D - y_D.mean(-1, keepdims=True)
            y_D = y_D * jax.lax.rsqrt(jnp.square(y_D).mean(-1, keepdims=True) + self.eps)
            times, plus = (_scaled, _shifted) if self.place.narrows(y_D.dtype) else (_scale, _shift)
            scale_D = read(self.scale, y_D.dtype, self.place)
            y_D = times(y_D, 1.0 + scale_D if self.kind.offset else scale_D, self.place, self.axes)
            if self.bias is not None:
                y_D = plus(y_D, read(self.bias, y_D.dtype, self.place), self.place, self.axes)
            return self.place(y_D.astype(self.precision.compute), self.axes)


class NormKind(NamedTuple):
    """One kind of norm, a row of NORMS.

    Fields:
      center: True to subtract the mean (LayerNorm).
      offset: True if the stored scale is the scale minus 1, as in Gemma.
    """

    center: bool = False
    offset: bool = False


NORMS = {"rmsnorm": NormKind(), "layernorm": NormKind(center=True), "rmsnorm_offset": NormKind(offset=True)}
