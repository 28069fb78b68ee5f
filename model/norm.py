"""Norms over the model width, and how devices sum the gradients of their vectors."""

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.config import ModelConfig
from bytescope.model.layers import STREAM, param, read
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision


def _scale(x_BLD: jax.Array, scale_D: jax.Array, place: Placement) -> jax.Array:
    del place
    return x_BLD * scale_D[None, None, :]


def _scaled_forward(x_BLD, scale_D, place):
    return _scale(x_BLD, scale_D, place), (x_BLD, scale_D)


def _scaled_backward(place, residuals, d_BLD):
    x_BLD, scale_D = residuals
    return d_BLD * scale_D[None, None, :], _sum_tokens(place, d_BLD * x_BLD)


def _shift(x_BLD: jax.Array, bias_D: jax.Array, place: Placement) -> jax.Array:
    del place
    return x_BLD + bias_D[None, None, :]


def _shifted_forward(x_BLD, bias_D, place):
    return _shift(x_BLD, bias_D, place), None


def _shifted_backward(place, residuals, d_BLD):
    del residuals
    return d_BLD, _sum_tokens(place, d_BLD)


# The same, but the gradient of the vector is summed over a device's own tokens and then narrowed to `place.reduce`:
# left to the partitioner, devices would sum in the wide dtype.
_scaled = jax.custom_vjp(_scale, nondiff_argnums=(2,))
_shifted = jax.custom_vjp(_shift, nondiff_argnums=(2,))
_scaled.defvjp(_scaled_forward, _scaled_backward)
_shifted.defvjp(_shifted_forward, _shifted_backward)


def _sum_tokens(place: Placement, d_BLD: jax.Array) -> jax.Array:
    """Sum over all tokens, [D], of a tensor sharded like the residual stream; devices send it in `place.reduce`."""
    own = place.own(lambda d_BLD: (place.reduced(d_BLD.sum((0, 1))),), (STREAM,), ((None,),), sums=(STREAM[:2],))
    return own(d_BLD)[0].astype(d_BLD.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the model width, in `precision.norm`."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement):
        self.center, self.eps = NORMS[config.norm], config.norm_eps
        self.precision, self.place = precision, place
        self.scale = param(None, (config.d_model,), ("d_model",), precision.param, fill=1.0)
        self.bias = (param(None, (config.d_model,), ("d_model",), precision.param)
                     if self.center and config.bias else None)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            y_BLD = x_BLD.astype(self.precision.norm)
            if self.center:
                y_BLD = y_BLD - y_BLD.mean(-1, keepdims=True)
            y_BLD = y_BLD * jax.lax.rsqrt(jnp.square(y_BLD).mean(-1, keepdims=True) + self.eps)
            scale, shift = (_scaled, _shifted) if self.place.narrows(y_BLD.dtype) else (_scale, _shift)
            y_BLD = scale(y_BLD, read(self.scale, y_BLD.dtype, self.place), self.place)
            if self.bias is not None:
                y_BLD = shift(y_BLD, read(self.bias, y_BLD.dtype, self.place), self.place)
            return self.place(y_BLD.astype(self.precision.compute), ("batch", "stream", None))


NORMS = {"rmsnorm": False, "layernorm": True}  # kind -> whether the mean is subtracted
