"""The choice of experts for each token and their weights. Scores are float32 in every precision preset."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.model_config import ModelConfig

# Avoids division by a zero sum of sigmoids, as in DeepSeek-V3's released code.
SMALL = 1e-20

# Scores of experts from logits [B, L, E], each between 0 and 1. softmax: Switch (arXiv 2101.03961), Mixtral, Qwen3;
# sigmoid: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
ROUTERS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The K chosen experts of each token, and the scores of all E experts.

    Fields:
      expert_BLK: int32 indices of the chosen experts, E for padding tokens.
      weight_BLK: float32 factors of the chosen experts' outputs.
      share_BLE: float32 scores of all experts, normalized to sum to 1.
    """

    expert_BLK: jax.Array
    weight_BLK: jax.Array
    share_BLE: jax.Array


def choose(logits_BLE: jax.Array, bias_E: jax.Array | None, config: ModelConfig) -> Choice:
    """Chooses the experts of each token from the router's float32 logits.

    `bias_E` is added to the scores when experts are chosen, but does not change their weights; None for no bias. With
    `router_renormalize` the weights of a token's chosen experts sum to `router_scale`. Otherwise the weights are the
    scores times `router_scale`.
    """
    scores_BLE = ROUTERS[config.router](logits_BLE)
    picked_by_BLE = jax.lax.stop_gradient(scores_BLE if bias_E is None else scores_BLE + bias_E[None, None])
    _, expert_BLK = jax.lax.top_k(_mask_closed_groups(picked_by_BLE, config), config.experts_per_token)
    weight_BLK = jnp.take_along_axis(scores_BLE, expert_BLK, axis=-1)
    if config.router_renormalize:
        weight_BLK = weight_BLK / (weight_BLK.sum(-1, keepdims=True) + SMALL)
    share_BLE = scores_BLE
    if config.router != "softmax":
        share_BLE = scores_BLE / (scores_BLE.sum(-1, keepdims=True) + SMALL)
    return Choice(expert_BLK, weight_BLK * config.router_scale, share_BLE)


def _mask_closed_groups(scores_BLE: jax.Array, config: ModelConfig) -> jax.Array:
    """Keeps the scores [B, L, E] of experts in the token's best `router_top_groups` groups and sets all other scores to
    -inf. A token then chooses experts from these groups only (node-limited routing of DeepSeek-V3).

    Groups are equal ranges of experts. A group's score is the sum of its two best experts' scores.
    """
    groups, chosen = config.router_groups, config.router_top_groups
    if chosen == groups:
        return scores_BLE
    grouped = scores_BLE.reshape(*scores_BLE.shape[:-1], groups, -1)
    # Not computed with top_k: XLA's GPU compiler gathers the result of a sharded top_k for the tokens of all devices.
    best = grouped.max(-1)
    if grouped.shape[-1] > 1:
        is_best = jax.nn.one_hot(grouped.argmax(-1), grouped.shape[-1], dtype=bool)
        best = best + jnp.where(is_best, -jnp.inf, grouped).max(-1)
    open_groups = jax.lax.top_k(best, chosen)[1]
    is_open = jax.nn.one_hot(open_groups, groups, dtype=bool).any(-2)
    return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(scores_BLE.shape)
