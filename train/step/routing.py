"""Router statistics of an update: sums over micro-batches, auxiliary losses, metrics, and the update of router
biases."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bytescope.model.experts.expert_layer import Load
from bytescope.model.frozen import ROUTER_BIAS

# Values of loss.balance_layers.
BALANCE_LAYERS = ("separate", "pooled")
# (number of layers that have experts, number of experts in each); None without experts.
Routed = tuple[int, int] | None


def no_load(layers: int, experts: int) -> Load:
    """Returns router statistics that are all zero, the start value of a sum over micro-batches. `layers`: number of
    layers with experts. `experts`: number of experts in each."""
    by_layer = jnp.zeros(layers, jnp.float32)
    return Load(jnp.zeros((layers, experts), jnp.float32), by_layer, by_layer, by_layer, by_layer)


def weighted_load(load: Load | None, tokens: jax.Array) -> Load | None:
    """Returns a micro-batch's router statistics in a form that can be added over micro-batches: entropy, balance loss
    and z-loss are multiplied by `tokens`, the number of unmasked targets. Counts stay as they are, and `shares` becomes
    None. Returns None if `load` is None."""
    if load is None:
        return None
    means = {name: getattr(load, name) * tokens for name in ("entropy", "balance", "router_z")}
    return dataclasses.replace(load, shares=None, **means)


def auxiliary_loss(load: Load, tokens: jax.Array, balance: float, router_z: float) -> jax.Array:
    """Returns the sum of the load-balance loss and the router z-loss, float32. Each is its mean over layers times its
    coefficient times the number of unmasked targets.

    The number of targets is a factor because the cross-entropy is a sum over targets. The z-loss is then a sum over
    targets too, and the micro-batches of an update add up to one batch. The balance loss is a product of two means over
    the tokens of a micro-batch, so the size of the micro-batches changes it.

    Args:
      load: the router statistics, which have both losses of each layer.
      tokens: number of unmasked targets.
      balance, router_z: the coefficients of the two losses.
    """
    return (balance * load.balance.mean() + router_z * load.router_z.mean()) * tokens


def routing_metrics(routing: Load | None, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns the routing metrics of an update, float32; {} without experts. Each token chooses one or more experts.
    Padding is not counted. The metrics are:
      load_max: number of choices of the busiest expert relative to the mean, maximum over layers.
      load_mean: number of choices of the busiest expert relative to the mean, averaged over layers.
      idle_experts: number of experts that no token chose, summed over layers.
      dropped_share: fraction (0 to 1) of choices that were dropped because the expert was full.
      router_entropy: entropy of a token's scores over the experts, in nats, averaged over the tokens with an unmasked
        target and over layers.
      balance, router_z: auxiliary losses without their coefficients, averaged over layers. If the balance loss is
        pooled over layers, it is one value for all layers.
      expert_load: number of choices of each expert relative to the mean of its layer, [layers with experts, experts].

    Args:
      routing: router statistics, summed over the update's micro-batches.
      tokens: number of unmasked targets of the update.
    """
    if routing is None:
        return {}
    counts_NE, counted = routing.counts, jnp.maximum(tokens, 1) * routing.counts.shape[0]
    load_NE = counts_NE / jnp.maximum(counts_NE.mean(-1, keepdims=True), 1.0)
    load_N = load_NE.max(-1)
    return {
        "load_max": load_N.max(),
        "load_mean": load_N.mean(),
        EXPERT_LOAD: load_NE,
        "idle_experts": (counts_NE == 0).sum().astype(jnp.float32),
        "dropped_share": routing.dropped.sum() / jnp.maximum(counts_NE.sum(), 1.0),
        "router_entropy": routing.entropy.sum() / counted,
        "balance": routing.balance.sum() / counted,
        "router_z": routing.router_z.sum() / counted,
    }


ROUTING_METRICS = ("load_max", "load_mean", "idle_experts", "dropped_share", "router_entropy", "balance", "router_z")
EXPERT_LOAD = "expert_load"


def routing_row(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scalar routing metrics among the metrics of a step, for a row of metrics.jsonl."""
    return {name: float(values[name]) for name in ROUTING_METRICS if name in values}


def move_router_biases(frozen: Any, counts_NE: jax.Array, rate: jax.Array) -> Any:
    """Returns the frozen parameters after the routers' biases were moved up or down by `rate`.

    A bias moves up if its expert was chosen less often than the mean of its layer, and down if more often (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). `counts_NE`: number of choices of each of E experts in each of N layers.
    """
    moves_NE = rate * jnp.sign(counts_NE.mean(-1, keepdims=True) - counts_NE)
    blocks = frozen["blocks"]
    if "experts" in blocks:
        return {**frozen, "blocks": _moved(blocks, moves_NE)}
    routed = [layer for layer in sorted(blocks) if "experts" in blocks[layer]]
    return {
        **frozen,
        "blocks": {**blocks, **{layer: _moved(blocks[layer], move_E) for layer, move_E in zip(routed, moves_NE)}},
    }


def _moved(block: Any, move: jax.Array) -> Any:
    experts = block["experts"]
    return {**block, "experts": {**experts, ROUTER_BIAS: experts[ROUTER_BIAS] + move}}
