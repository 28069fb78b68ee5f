"""The products of a block that share an input, and the parameters that take the inverse of the input's scales.

    (x / s) (s W) = x W:  rows of the weights W are multiplied by s, and what makes x is divided by it

(Lin et al. 2023, arXiv 2306.00978, section 3.2.) The block computes what it did before, and a channel that is scaled up
is rounded more finely than its neighbours in the same group.
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

Params = Mapping[str, Any]  # of one block, by their path in it


@dataclasses.dataclass(frozen=True)
class Fold:
    """Weights that multiply the same input.

    Fields:
      name: for people. input: its checkpoint name. weights: paths in the block. before: what takes the inverse, a row
      of BEFORE; "" where nothing can. clipped: those of the weights whose groups may be clipped.
    """

    name: str
    input: str
    weights: tuple[str, ...]
    before: str
    clipped: tuple[str, ...]


def folds_of(config: ModelConfig) -> tuple[Fold, ...]:
    """Returns the folds of a dense layer, in the order of the computation."""
    gated = MLPS[config.mlp][0]
    rising = ("mlp.w_gate", "mlp.w_up") if gated else ("mlp.w_up",)
    # Queries and keys are not clipped: a softmax follows their product (llm-awq's auto_clip leaves them out, too).
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
        # Without a gate the activation is between up and down, and scales do not pass through it.
        Fold("down", "act", ("mlp.w_down",), "up" if gated else "", ("mlp.w_down",)),
    )


def shared(fold: Fold, config: ModelConfig, magnitudes_I: Any) -> Any:
    """Returns magnitudes of the inputs, float32 [inputs], averaged over inputs that must have one scale: the heads of
    queries that read the same values."""
    if fold.before != "values":
        return magnitudes_I
    G, K = config.n_kv_heads, config.d_head
    each_GRK = magnitudes_I.reshape(G, config.n_heads // G, K)
    return jnp.broadcast_to(each_GRK.mean(1, keepdims=True), each_GRK.shape).reshape(-1)


def fold_in(
    fold: Fold, config: ModelConfig, params: Params, scale_I: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Multiplies the weights of a fold by scales [inputs], and the parameters before them by the inverse. Returns (the
    parameters of the block, float32 on the host; the scales that were applied).

    A norm's vector is rounded to float16, as it will be stored, and its scales are what that makes of them: so only
    rounded codes differ from the model.
    """
    found = dict(params)
    scale_I = BEFORE[fold.before](config, found, np.asarray(scale_I, np.float32))
    for path in fold.weights:
        w = found[path]
        found[path] = (w.reshape(scale_I.size, -1) * scale_I[:, None]).reshape(w.shape)
    return found, scale_I


def _norm(name: str):
    def divide(config: ModelConfig, found: dict[str, np.ndarray], scale_D: np.ndarray) -> np.ndarray:
        offset = np.float32(NORMS[config.norm].offset)
        old_D = found[f"{name}.scale"] + offset
        stored_D = (old_D / scale_D - offset).astype(np.float16).astype(np.float32)
        new_D = stored_D + offset
        dead = (new_D == 0) | (old_D == 0)  # nothing comes through, and no scale mends it
        exact_D = np.where(dead, scale_D, old_D / np.where(dead, 1, new_D))
        if f"{name}.bias" in found:
            found[f"{name}.bias"] = found[f"{name}.bias"] / exact_D
        found[f"{name}.scale"] = stored_D
        return exact_D

    return divide


def _values(config: ModelConfig, found: dict[str, np.ndarray], scale_I: np.ndarray) -> np.ndarray:
    # Inputs of the output product that read the same values have one scale (`shared`).
    scale_GK = scale_I.reshape(config.n_kv_heads, -1, config.d_head)[:, 0]
    for path in ("attention.w_v", "attention.b_v"):
        if path in found:
            found[path] = found[path] / scale_GK
    return scale_I


def _up(config: ModelConfig, found: dict[str, np.ndarray], scale_F: np.ndarray) -> np.ndarray:
    for path in ("mlp.w_up", "mlp.b_up"):
        if path in found:
            found[path] = found[path] / scale_F
    return scale_F


# What takes the inverse -> (config, parameters to change, scales) -> the scales that were taken.
BEFORE = {"norm_attention": _norm("norm_attention"), "norm_mlp": _norm("norm_mlp"), "values": _values, "up": _up}
