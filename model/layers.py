"""Norms, rotary positions, activations, dropout: the small parts, as table rows where there is a choice."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from model.config import ModelConfig
from model.names import tag
from model.precision import Precision

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def param(key: jax.Array | None, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike,
          *, std: float = 0.0, fill: float = 0.0) -> nnx.Param:
    """A parameter that knows its logical axes: normal with `std` if there is a key, else constant `fill`."""
    if len(shape) != len(axes):
        raise ValueError(f"parameter of shape {shape} has logical axes {axes}")
    value = jnp.full(shape, fill, dtype) if key is None else std * jax.random.normal(key, shape, dtype)
    return nnx.Param(value, axes=axes)


# A logical axis that is only ever stored split: the parameter is gathered along it before use (ZeRO-3).
GATHERED = "d_model"


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(value: jax.Array, constrain: Constrain, axes: tuple[str, ...]) -> jax.Array:
    return constrain(value, tuple(None if axis == GATHERED else axis for axis in axes))


def _gather_forward(value, constrain, axes):
    return _gather(value, constrain, axes), None


def _gather_backward(constrain, axes, residual, d_value):
    del residual
    # A sharding constraint's own transpose would ask for the whole gradient on every device; asking
    # for the stored layout instead lets the compiler reduce-scatter.
    return (constrain(d_value, axes),)


_gather.defvjp(_gather_forward, _gather_backward)


def read(p: nnx.Param, dtype: DTypeLike, constrain: Constrain) -> jax.Array:
    """The parameter as the computation wants it: cast first, so that the gather moves the narrow dtype."""
    return _gather(p[...].astype(dtype), constrain, p.get_metadata()["axes"])


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the model width, in `precision.norm`."""

    def __init__(self, config: ModelConfig, precision: Precision, constrain: Constrain):
        self.center, self.eps = NORMS[config.norm], config.norm_eps
        self.precision, self.constrain = precision, constrain
        self.scale = param(None, (config.d_model,), ("d_model",), precision.param, fill=1.0)
        self.bias = (param(None, (config.d_model,), ("d_model",), precision.param)
                     if self.center and config.bias else None)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            y_BLD = x_BLD.astype(self.precision.norm)
            if self.center:
                y_BLD = y_BLD - y_BLD.mean(-1, keepdims=True)
            y_BLD = y_BLD * jax.lax.rsqrt(jnp.square(y_BLD).mean(-1, keepdims=True) + self.eps)
            y_BLD = y_BLD * read(self.scale, y_BLD.dtype, self.constrain)[None, None, :]
            if self.bias is not None:
                y_BLD = y_BLD + read(self.bias, y_BLD.dtype, self.constrain)[None, None, :]
            return self.constrain(y_BLD.astype(self.precision.compute), ("batch", "stream", None))


NORMS = {"rmsnorm": False, "layernorm": True}  # whether the mean is taken out

ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}
# kind -> (gated, activation): GELU as in GPT-2 (tanh form), SwiGLU after Shazeer 2020 (arXiv 2002.05202)
MLPS = {"gelu": (False, "gelu"), "swiglu": (True, "silu")}
POSITIONS = ("learned", "rope", "none")


def rope_frequencies(d_head: int, theta: float, scaling: tuple[float, ...]) -> jax.Array:
    """Angle per position of each pair, [d_head / 2] float32 (Su et al. 2021, arXiv 2104.09864).

    `scaling` is Llama 3.1's: wavelengths above original/low are stretched by `factor`, below
    original/high they are kept, and those between are blended (Grattafiori et al. 2024, arXiv 2407.21783).
    """
    frequency = theta ** -(jnp.arange(0, d_head, 2, dtype=jnp.float32) / d_head)
    if not scaling:
        return frequency
    factor, low, high, original = scaling
    wavelengths = original * frequency / (2 * math.pi)  # how often a pair turns within the original length
    blend = jnp.clip((wavelengths - low) / (high - low), 0.0, 1.0)
    return frequency * (blend + (1 - blend) / factor)


def rotate(x_BLHK: jax.Array, positions_L: jax.Array, frequency: jax.Array) -> jax.Array:
    """Rotary positions in float32, halves paired (x[i], x[i + K/2]); the result in `x`'s dtype."""
    angle = positions_L.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHK.dtype)


def dropout(x: jax.Array, key_B: jax.Array | None, rate: float, mask_name: str) -> jax.Array:
    """Inverted dropout with a key per sequence, so the mask of a sequence does not depend on how the
    global batch is cut into micro-batches. The mask is kept as one byte an element under `mask_name`."""
    if key_B is None or rate == 0.0:
        return x
    with jax.named_scope("dropout"):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(key_B)
        keep = tag(keep, mask_name)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def fold(key_B: jax.Array | None, salt: int | jax.Array) -> jax.Array | None:
    """The keys of one place or layer, derived from the keys of the sequences."""
    return None if key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, salt))(key_B)
