"""Groups the weight matrices of a block that share an input. Their input channels are scaled before rounding to 4 bits,
and the inverse scales are multiplied into the parameters that compute the input.

    (x / s) (s W) = x W:  rows of the weights W are multiplied by s, and the parameters that produce x are divided by s

(Lin et al. 2023, arXiv 2306.00978, section 3.2.) The block computes the same function as before, but a channel that is
scaled up is rounded more finely than other channels in its quantization group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bytescope.model import ModelConfig
from bytescope.model.layers import MLPS
from bytescope.model.norm import NORMS

Params = Mapping[str, Any]  # path in the block -> parameter


@dataclasses.dataclass(frozen=True)
class Fold:
    """A group of weight matrices in a block that multiply the same input, such as q, k and v, and so share one scale
    per input channel.

    Fields:
      name: text that names the group in messages, such as "q, k, v".
      input: name of the input in the block, given by jax's checkpoint_name.
      weights: paths of the weights in the block.
      before: key in BEFORE of the parameters that compute the input: a norm, the value projection or the up projection.
        They are divided by the scales. "" if the input has no such parameters.
      clipped: paths of the weights whose quantization groups may be clipped.
    """

    name: str
    input: str
    weights: tuple[str, ...]
    before: str
    clipped: tuple[str, ...]


def folds_of(config: ModelConfig) -> tuple[Fold, ...]:
    """Returns the groups of weights of a dense layer that share an input, in the order of the computation."""
    gated = MLPS[config.mlp][0]
    rising = ("mlp.w_gate", "mlp.w_up") if gated else ("mlp.w_up",)
    # Queries and keys are not clipped, since a softmax follows their product. llm-awq's auto_clip excludes them too.
    return (
        Fold(
            "q, k, v",
            "attn_norm",
            ("attention.w_q", "attention.w_k", "attention.w_v"),
            "norm_attention",
            ("attention.w_v",),
        ),
        Fold("attention out", "context", ("attention.w_o",), "values", ("attention.w_o",)),
        Fold("gate, up" if gated else "up", "mlp_norm", rising, "norm_mlp", rising),
        # Without a gate the activation function is between up and down, and scales do not commute with it.
        Fold("down", "act", ("mlp.w_down",), "up" if gated else "", ("mlp.w_down",)),
    )


def shared(fold: Fold, config: ModelConfig, magnitudes_I: Any) -> Any:
    """Returns the mean magnitudes |x| of a group's input channels, averaged over channels that must have the same
    scale. Arguments and result: float32 [inputs].

    Only for the attention output projection are channels averaged, over the query heads that share a value head: their
    scales are divided out of the same column of the value projection. The magnitudes of other inputs are returned
    unchanged.
    """
    if fold.before != "values":
        return magnitudes_I
    G, K = config.n_kv_heads, config.d_head
    each_GRK = magnitudes_I.reshape(G, config.n_heads // G, K)
    return jnp.broadcast_to(each_GRK.mean(1, keepdims=True), each_GRK.shape).reshape(-1)


def fold_in(
    fold: Fold, config: ModelConfig, params: Params, scale_I: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Multiplies the weights of a group by the scales of their input channels, and divides the parameters that compute
    these inputs (`Fold.before`) by the scales.

    Returns the changed parameters of the block, path -> float32 array on the host, and the scales [inputs] that were
    applied. The vector of a norm is rounded to float16, in which it will be stored, and the applied scales are computed
    from the rounded vector. So only the quantization of weights changes what the model computes.

    Args:
      params: the block's parameters by path.
      scale_I: the wanted scale of each input channel.
    """
    folded = dict(params)
    scale_I = BEFORE[fold.before](config, folded, np.asarray(scale_I, np.float32))
    for path in fold.weights:
        w = folded[path]
        folded[path] = (w.reshape(scale_I.size, -1) * scale_I[:, None]).reshape(w.shape)
    return folded, scale_I


def _norm(name: str):
    def divide(config: ModelConfig, params: dict[str, np.ndarray], scale_D: np.ndarray) -> np.ndarray:
        offset = np.float32(NORMS[config.norm].offset)
        old_D = params[f"{name}.scale"] + offset
        stored_D = (old_D / scale_D - offset).astype(np.float16).astype(np.float32)
        new_D = stored_D + offset
        dead = (new_D == 0) | (old_D == 0)  # the channel is always 0, so its scale does not matter
        exact_D = np.where(dead, scale_D, old_D / np.where(dead, 1, new_D))
        if f"{name}.bias" in params:
            params[f"{name}.bias"] = params[f"{name}.bias"] / exact_D
        params[f"{name}.scale"] = stored_D
        return exact_D

    return divide


def _values(config: ModelConfig, params: dict[str, np.ndarray], scale_I: np.ndarray) -> np.ndarray:
    # Inputs of the output projection that read the same value head have the same scale (`shared`).
    scale_GK = scale_I.reshape(config.n_kv_heads, -1, config.d_head)[:, 0]
    for path in ("attention.w_v", "attention.b_v"):
        if path in params:
            params[path] = params[path] / scale_GK
    return scale_I


def _up(config: ModelConfig, params: dict[str, np.ndarray], scale_F: np.ndarray) -> np.ndarray:
    for path in ("mlp.w_up", "mlp.b_up"):
        if path in params:
            params[path] = params[path] / scale_F
    return scale_F


# Parameters that take the inverse scales -> function (config, parameters to change, scales) -> applied scales.
BEFORE = {"norm_attention": _norm("norm_attention"), "norm_mlp": _norm("norm_mlp"), "values": _values, "up": _up}
