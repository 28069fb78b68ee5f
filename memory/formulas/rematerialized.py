"""What layers keep and recompute under a policy that names tensors: from shapes alone, no compiler, no jax.

The walk starts at the tensors that the backward pass reads and goes to what each tensor is made from. It ends at kept
tensors, which are the layer's residuals; the products on its way are the FLOPs of the recomputation. A name that the
walk never reaches costs nothing, even if the policy keeps it.

Left out: statistics of norms (two numbers per token), the FLOPs of recomputed adapters, the masks of their dropout, and
everything outside the layers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas, transformer_formulas
from bytescope.memory.formulas.adapter_formulas import adapted
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import ModelFacts, RematSegment
from bytescope.memory.formulas.model_shape import TARGETS, ModelShape, StepLayout, matrices
from bytescope.memory.formulas.transformer_formulas import LayerTensor

# Checkpoint name -> what it holds. Names outside the layers (embed, final_norm) are left out: no policy moves them.
NAMED = {
    tensor.name: tensor
    for tensor in (
        LayerTensor("block_in", "width", "sequence"),
        LayerTensor("attn_norm", "width", "sequence", operand=True),
        LayerTensor("q", "queries", "tensor"),
        LayerTensor("k", "unrotated", "tensor"),
        LayerTensor("v", "values", "tensor"),
        LayerTensor("q_latent", "query_latent", "sequence", only="latent"),
        LayerTensor("kv_latent", "latent", "sequence", only="latent"),
        LayerTensor("k_rope", "rotary", "sequence", only="latent"),
        LayerTensor("q_rot", "queries", "tensor"),
        LayerTensor("k_rot", "keys", "tensor"),
        LayerTensor("probs", "scores", "tensor"),
        LayerTensor("probs_mask", "scores", "tensor", 1, only="dropout"),
        LayerTensor("probs_dropped", "scores", "tensor", only="dropout"),
        LayerTensor("lse", "heads", "tensor", 4),
        LayerTensor("context", "context", "tensor"),
        LayerTensor("attn_out", "width", "sequence"),
        LayerTensor("attn_out_mask", "width", "sequence", 1, only="dropout"),
        LayerTensor("mid", "width", "sequence"),
        LayerTensor("mlp_norm", "width", "sequence", operand=True),
        LayerTensor("gate", "mlp", "tensor", only="gated"),
        LayerTensor("up", "mlp", "tensor"),
        LayerTensor("act", "mlp", "tensor", operand=True),
        LayerTensor("mlp_out", "width", "sequence"),
        LayerTensor("mlp_out_mask", "width", "sequence", 1, only="dropout"),
        LayerTensor("router_logits", "experts", "sequence", 4, only="experts"),
        LayerTensor("dispatched", "routed", "", only="experts"),
        LayerTensor("expert_gate", "routed_mlp", "tensor", only="gated"),
        LayerTensor("expert_up", "routed_mlp", "tensor"),
        LayerTensor("expert_act", "routed_mlp", "tensor"),
        LayerTensor("combined", "width", "sequence", only="experts"),
        *(LayerTensor(f"lora_{target}", "rank", "sequence", only="adapters", weights=(target,)) for target in TARGETS),
    )
}


class MadeFrom(NamedTuple):
    """How a tensor is made. inputs: from which names; product: a key of `product_flops`, "" for elementwise work."""

    inputs: tuple[str, ...] = ()
    product: str = ""


# The core by kernel. `kernel` is one run of a fused kernel, no tensor of its own.
CORES = {
    "naive": {
        "probs": MadeFrom(("q_rot", "k_rot"), "scores"),
        "probs_mask": MadeFrom(),
        "probs_dropped": MadeFrom(("probs", "probs_mask")),
        "context": MadeFrom(("probs", "probs_dropped", "v"), "weighted"),
    },
    "flash": {
        "kernel": MadeFrom(("q_rot", "k_rot", "v"), "core"),
        "context": MadeFrom(("kernel",)),
        "lse": MadeFrom(("kernel",)),
    },
}
LAYER = {
    "attn_norm": MadeFrom(("block_in",)),
    "q": MadeFrom(("attn_norm",), "q"),
    "k": MadeFrom(("attn_norm",), "k"),
    "v": MadeFrom(("attn_norm",), "v"),
    "q_rot": MadeFrom(("q",)),
    "k_rot": MadeFrom(("k",)),
    "attn_out": MadeFrom(("context",), "o"),
    "attn_out_mask": MadeFrom(),
    "mid": MadeFrom(("block_in", "attn_out", "attn_out_mask")),
    "mlp_norm": MadeFrom(("mid",)),
    "gate": MadeFrom(("mlp_norm",), "gate"),
    "up": MadeFrom(("mlp_norm",), "up"),
    "act": MadeFrom(("gate", "up")),
    "mlp_out": MadeFrom(("act",), "down"),
    "mlp_out_mask": MadeFrom(),
    "router_logits": MadeFrom(("mlp_norm",), "router"),
    "dispatched": MadeFrom(("mlp_norm", "router_logits")),
    "expert_gate": MadeFrom(("dispatched",), "experts"),
    "expert_up": MadeFrom(("dispatched",), "experts"),
    "expert_act": MadeFrom(("expert_gate", "expert_up", "router_logits")),
    "combined": MadeFrom(("expert_act",), "experts"),
    **{
        f"lora_{target}": MadeFrom((name,))
        for targets, name in (
            (("q", "k", "v"), "attn_norm"),
            (("o",), "context"),
            (("gate", "up"), "mlp_norm"),
            (("down",), "act"),
        )
        for target in targets
    },
}
# Latent attention in the place of the same names. The latents are read by their norms and by products; `kv_down` is
# the product that gives the latent of keys and values and the part of the keys that is rotated, no tensor of its own.
LATENT = {
    "q_latent": MadeFrom(("attn_norm",), "q_down"),
    "kv_down": MadeFrom(("attn_norm",), "kv_down"),
    "kv_latent": MadeFrom(("kv_down",)),
    "k_rope": MadeFrom(("kv_down",)),
    "q": MadeFrom(("q_latent",), "q_up"),
    "k": MadeFrom(("kv_latent",), "k_up"),
    "k_rot": MadeFrom(("k", "k_rope")),
    "v": MadeFrom(("kv_latent",), "v_up"),
}
# Made on the way, but not read by any gradient: rotations, sums and the second half of dropout are linear. A norm
# reads its input: tensor -> the ModelShape field with which it is normed.
UNREAD = frozenset(("q", "k", "kv_down", "k_rope", "attn_out", "mlp_out", "combined", "kernel"))
NORMED = {"q": "qk_norm", "k": "qk_norm", "attn_out": "post_norms", "mlp_out": "post_norms", "combined": "post_norms"}
# Kept for the gradients of these matrices alone, which frozen ones without an adapter do not have.
OPERANDS = {"attn_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up"), "act": ("down",)}
# Names inside an MLP in tiles: none of them is kept.
TILED = frozenset(("mlp_norm", "gate", "up", "act", "mlp_out"))
# A fused kernel outside of the checkpoint keeps what its own gradient reads.
AROUND_KERNEL = ("q_rot", "k_rot", "v", "context", "lse")


class RematWalk(NamedTuple):
    """kept: names whose tensors live until the backward pass. recomputed: names and kernels that are recomputed."""

    kept: frozenset[str]
    recomputed: frozenset[str]


def walk(model: ModelShape, attention: str, save: Collection[str]) -> RematWalk:
    """Returns what one layer under jax.checkpoint keeps and recomputes if the policy keeps the names `save`.

    The input of the block is always kept, since the loop over the layers carries it. attention: "naive" or "flash".
    """
    made = {name: row for name, row in _table(model, attention).items() if _exists(name, model)}
    kept, recomputed, todo = set(), set(), ["block_in", *(name for name in made if _is_read(name, model))]
    while todo:
        name = todo.pop()
        if name == "block_in" or name in save:
            kept.add(name)
        elif name not in recomputed and name in made:
            recomputed.add(name)
            inputs = set(made[name].inputs)
            if name == "context" and model.dropout:
                inputs.discard("probs")  # with dropout the context is made from the dropped probabilities
            todo += inputs
    return RematWalk(frozenset(kept), frozenset(recomputed))


def _table(model: ModelShape, attention: str) -> dict[str, MadeFrom]:
    """How each tensor of a layer is made."""
    table = {**LAYER, **CORES[attention]}
    if model.latent:
        table |= LATENT
        if not model.latent.query_rank:  # queries are projected from the input
            del table["q_latent"]
            table["q"] = LAYER["q"]
    return table


def _is_read(name: str, model: ModelShape) -> bool:
    """Whether some gradient reads a tensor."""
    if name in UNREAD:
        return name in NORMED and getattr(model, NORMED[name])
    return not (model.adapters and name in OPERANDS and adapted(model).keys().isdisjoint(OPERANDS[name]))


def product_flops(model: ModelShape, sequence: int) -> dict[str, float]:
    """Returns product -> FLOPs per token. Products with a matrix have its name; `core` is both products of attention,
    `scores` and `weighted` are the two; `experts` is one product in all k experts of a token."""
    scores, weighted = (2.0 * model.heads * width * sequence for width in (model.score_width, model.value_width))
    routed = model.experts.per_token * model.experts.width if model.experts else 0
    return {
        **{name: 2.0 * rows * columns for name, (rows, columns) in matrices(model).items()},
        "core": scores + weighted,
        "scores": scores,
        "weighted": weighted,
        "router": 2.0 * expert_formulas.router_size(model),
        "experts": 2.0 * model.width * routed,
    }


def recomputed_flops(model: ModelShape, attention: str, names: Collection[str], sequence: int) -> float:
    """FLOPs per token and layer of computing these names once more."""
    table, flops = _table(model, attention), product_flops(model, sequence)
    return sum(flops.get(table[name].product, 0.0) for name in names)


def tiles_flops(model: ModelShape, sequence: int) -> float:
    """FLOPs per token and layer that an MLP in tiles recomputes: all its products; the last one only
    if a norm reads its result."""
    names = ["up"]
    if model.gated:
        names.append("gate")
    if model.post_norms:
        names.append("mlp_out")
    return recomputed_flops(model, "flash", names, sequence)


def forward_flops(model: ModelShape, attention: str, sequence: int) -> float:
    """FLOPs per token and layer in the forward pass."""
    names = [name for name in _table(model, attention) if _exists(name, model)]
    return recomputed_flops(model, attention, names, sequence)


def bytes_of(
    names: Collection[str],
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    tokens: float,
    itemsize: int,
    operand: float = 0.0,
) -> float:
    """Bytes on a device of a layer's tensors of these names, for `tokens` tokens of sequences of `sequence`.

    `itemsize`: bytes of an element of an activation; `operand`: of one kept for products alone, 0 for the same.
    """
    return sum(
        transformer_formulas.tensor_bytes(NAMED[name], model, layout, sequence, tokens, itemsize, operand)
        for name in names
        if name in NAMED
    )


def _exists(name: str, model: ModelShape) -> bool:
    """Whether a layer of this model makes the tensor; kernels, which have no row, always exist."""
    tensor = NAMED.get(name)
    return tensor is None or transformer_formulas.exists(tensor, model)


# ---- the layers of a segment ----------------------------------------------------------------------------------------


class RecomputedLayers(NamedTuple):
    """The layers of one kind in a segment.

    device, host: bytes that they keep on the device and in host memory. recomputing: bytes that recomputing one layer
    adds. flops: FLOPs per token that are recomputed.
    """

    device: float
    host: float
    recomputing: float
    flops: float


def layers_of(
    kind: ModelShape, asked: Question, batch: float, segment: RematSegment, facts: ModelFacts, platform: str
) -> RecomputedLayers | None:
    """Returns what the layers of one kind keep and recompute in a segment; None if the policy has no formula.

    kind: a model of these layers only, one of `expert_formulas.by_kind`. batch: sequences of a device and micro-step,
    a fraction if devices share a sequence. platform: of the target; "cpu" has no other memory to offload to.
    """
    layers, groups, precision = kind.layers, segment.groups, asked.precision
    in_flight = transformer_formulas.layers_in_flight(layers, asked.layout)
    tiled = asked.mlp_tokens > 0
    everything = transformer_formulas.layer_bytes(
        kind,
        asked.layout,
        asked.sequence,
        batch,
        attention=asked.attention,
        tile=asked.mlp_tokens,
        itemsize=precision.activation,
        operand=precision.operand,
    )
    if segment.everything:
        tiles = layers * tiles_flops(kind, asked.sequence) if tiled else 0.0
        return RecomputedLayers(in_flight * everything, 0.0, 0.0, tiles)
    if not segment.known:
        return None
    save, offload = segment.save, segment.offload
    # Names between two checkpoints of one block are kept, whatever the policy says.
    between: frozenset[str] = frozenset()
    if facts.kernel_outside and "context" in save | offload:
        between = frozenset(AROUND_KERNEL)
    elif facts.halves:
        between = frozenset(("mid",))
    if tiled:
        between |= {"mid"}
        save, offload = save - TILED, offload - TILED
    path = walk(kind, asked.attention, save | offload | between)
    moved = path.kept & offload - between if platform != "cpu" else frozenset()
    device, host = (
        bytes_of(
            names,
            kind,
            asked.layout,
            asked.sequence,
            asked.sequence * batch,
            precision.activation,
            precision.operand,
        )
        for names in (path.kept - moved, moved)
    )
    flops = layers * recomputed_flops(kind, asked.attention, path.recomputed, asked.sequence)
    if groups <= 1:
        return RecomputedLayers(device * in_flight, host * layers, everything - device, flops)
    # Chen et al. 2016 (arXiv 1604.06174): the inputs of all groups, and of the blocks of the group that is recomputed.
    flops += layers * forward_flops(kind, asked.attention, asked.sequence)
    return RecomputedLayers(device * (groups + layers / groups), 0.0, everything - device, flops)
