"""Keys of `config.model` that say where a mixture has experts, and when two ways to say it are one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]
# What only a model with experts reads.
ROUTED = (
    "experts_per_token",
    "d_expert",
    "shared_experts",
    "dense_layers",
    "moe_every",
    "router",
    "router_renormalize",
    "router_scale",
    "router_bias",
    "router_groups",
    "router_top_groups",
)


def routed_layers(keys: Keys) -> list[bool]:
    """For each layer whether it has experts, as `ModelConfig.has_experts`."""
    dense, every = keys["dense_layers"], keys["moe_every"]
    return [layer >= dense and (layer - dense + 1) % every == 0 for layer in range(keys["n_layers"])]


def expressed(routed: Sequence[bool]) -> dict[str, int] | None:
    """`dense_layers` and `moe_every` that give these layers experts; None where none do."""
    places = [layer for layer, has in enumerate(routed) if has]
    if not places:
        return None
    gap = places[1] - places[0] if len(places) > 1 else len(routed) - places[0]
    for dense, every in ((places[0], 1), (0, gap), (places[0] - gap + 1, gap)):
        keys = {"dense_layers": dense, "moe_every": every}
        if dense >= 0 and routed_layers({**keys, "n_layers": len(routed)}) == list(routed):
            return keys
    return None


def same_model(key: str, ours: Keys, theirs: Keys) -> bool:
    """Whether a key that differs between two `config.model` makes no other model of it."""
    if not ours["experts"] and not theirs["experts"]:
        return key in ROUTED
    if key == "d_expert":
        return (ours[key] or ours["d_ff"]) == (theirs[key] or theirs["d_ff"])
    if key in ("dense_layers", "moe_every"):
        return routed_layers(ours) == routed_layers(theirs)
    # The width of dense MLPs, where there are none.
    return key == "d_ff" and all(routed_layers(ours)) and same_model("d_expert", ours, theirs)
