"""Formulas for the tensors that layers keep and recompute under a policy that names tensors. Only shapes are needed.

`walk` begins at the tensors that the backward pass reads, and goes from each tensor to the inputs of the operation that
computes it. It stops at tensors that the policy saves: these are the layer's residuals. The operations that it passes
are recomputed. A saved name that it never reaches is not a residual and takes no bytes.

Not included: statistics of norms (two numbers per token), the FLOPs of recomputed adapters, the masks of their dropout,
and everything outside the layers.
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

# Checkpoint name -> its tensor. Names outside the layers (embed, final_norm) are left out: no policy moves them.
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


class TensorSource(NamedTuple):
    """The operation that computes a tensor in a layer.

    inputs: names of the tensors that the operation reads. product: its matrix product, a key of `product_flops`; ""
    for an elementwise operation.
    """

    inputs: tuple[str, ...] = ()
    product: str = ""


# The attention core of each kernel. `kernel` stands for one run of a fused kernel and is not a tensor.
CORES = {
    "naive": {
        "probs": TensorSource(("q_rot", "k_rot"), "scores"),
        "probs_mask": TensorSource(),
        "probs_dropped": TensorSource(("probs", "probs_mask")),
        "context": TensorSource(("probs", "probs_dropped", "v"), "weighted"),
    },
    "flash": {
        "kernel": TensorSource(("q_rot", "k_rot", "v"), "core"),
        "context": TensorSource(("kernel",)),
        "lse": TensorSource(("kernel",)),
    },
}
LAYER = {
    "attn_norm": TensorSource(("block_in",)),
    "q": TensorSource(("attn_norm",), "q"),
    "k": TensorSource(("attn_norm",), "k"),
    "v": TensorSource(("attn_norm",), "v"),
    "q_rot": TensorSource(("q",)),
    "k_rot": TensorSource(("k",)),
    "attn_out": TensorSource(("context",), "o"),
    "attn_out_mask": TensorSource(),
    "mid": TensorSource(("block_in", "attn_out", "attn_out_mask")),
    "mlp_norm": TensorSource(("mid",)),
    "gate": TensorSource(("mlp_norm",), "gate"),
    "up": TensorSource(("mlp_norm",), "up"),
    "act": TensorSource(("gate", "up")),
    "mlp_out": TensorSource(("act",), "down"),
    "mlp_out_mask": TensorSource(),
    "router_logits": TensorSource(("mlp_norm",), "router"),
    "dispatched": TensorSource(("mlp_norm", "router_logits")),
    "expert_gate": TensorSource(("dispatched",), "experts"),
    "expert_up": TensorSource(("dispatched",), "experts"),
    "expert_act": TensorSource(("expert_gate", "expert_up", "router_logits")),
    "combined": TensorSource(("expert_act",), "experts"),
    **{
        f"lora_{target}": TensorSource((name,))
        for targets, name in (
            (("q", "k", "v"), "attn_norm"),
            (("o",), "context"),
            (("gate", "up"), "mlp_norm"),
            (("down",), "act"),
        )
        for target in targets
    },
}
# Latent attention: these rows replace rows of LAYER. Norms and matrix products read the latents. `kv_down` stands for
# the matrix product that computes the latent of keys and values and the rotated part of the keys. It is not a tensor.
LATENT = {
    "q_latent": TensorSource(("attn_norm",), "q_down"),
    "kv_down": TensorSource(("attn_norm",), "kv_down"),
    "kv_latent": TensorSource(("kv_down",)),
    "k_rope": TensorSource(("kv_down",)),
    "q": TensorSource(("q_latent",), "q_up"),
    "k": TensorSource(("kv_latent",), "k_up"),
    "k_rot": TensorSource(("k", "k_rope")),
    "v": TensorSource(("kv_latent",), "v_up"),
}
# Intermediate tensors that no gradient reads, because rotations, sums and the second half of dropout are linear.
UNREAD = frozenset(("q", "k", "kv_down", "k_rope", "attn_out", "mlp_out", "combined", "kernel"))
# Tensors of UNREAD that are read if a norm follows -> the ModelShape field that enables the norm.
NORMED = {"q": "qk_norm", "k": "qk_norm", "attn_out": "post_norms", "mlp_out": "post_norms", "combined": "post_norms"}
# Tensor -> matrices whose gradients are its only readers. Frozen matrices without an adapter have no gradient.
OPERANDS = {"attn_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up"), "act": ("down",)}
# Names inside an MLP that is computed in tiles of tokens: none of them is kept.
TILED = frozenset(("mlp_norm", "gate", "up", "act", "mlp_out"))
# A fused kernel outside the checkpoint keeps the tensors that its gradient reads.
AROUND_KERNEL = ("q_rot", "k_rot", "v", "context", "lse")


class RematWalk(NamedTuple):
    """The tensors that one layer under jax.checkpoint keeps, and the tensors that it recomputes.

    kept: names of tensors that live until the backward pass. recomputed: names of tensors and kernels that are
    recomputed.
    """

    kept: frozenset[str]
    recomputed: frozenset[str]


def walk(model: ModelShape, attention: str, save: Collection[str]) -> RematWalk:
    """Returns the tensors that one layer under jax.checkpoint keeps for the backward pass and the tensors that it
    recomputes.

    model: the shape of the layer. save: the tensor names that the remat policy saves. The input of the block is always
    kept, because the loop over the layers carries it. attention: "naive" or "flash".
    """
    sources = {name: row for name, row in _operations(model, attention).items() if _layer_has(name, model)}
    kept, recomputed, todo = set(), set(), ["block_in", *(name for name in sources if _feeds_backward(name, model))]
    while todo:
        name = todo.pop()
        if name == "block_in" or name in save:
            kept.add(name)
        elif name not in recomputed and name in sources:
            recomputed.add(name)
            inputs = set(sources[name].inputs)
            if name == "context" and model.dropout:
                inputs.discard("probs")  # with dropout, the context is computed from the dropped probabilities
            todo += inputs
    return RematWalk(frozenset(kept), frozenset(recomputed))


def _operations(model: ModelShape, attention: str) -> dict[str, TensorSource]:
    table = {**LAYER, **CORES[attention]}
    if model.latent:
        table |= LATENT
        if not model.latent.query_rank:  # queries are projected from the input
            del table["q_latent"]
            table["q"] = LAYER["q"]
    return table


def _feeds_backward(name: str, model: ModelShape) -> bool:
    if name in UNREAD:
        return name in NORMED and getattr(model, NORMED[name])
    return not (model.adapters and name in OPERANDS and adapted(model).keys().isdisjoint(OPERANDS[name]))


def product_flops(model: ModelShape, sequence: int) -> dict[str, float]:
    """Returns the FLOPs per token of each matrix product in a layer.

    A product with a weight matrix has the name of the matrix. `scores` and `weighted` are the two products of
    attention; `core` is both together. `experts` is one of the experts' products, summed over the k experts of a token.
    """
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
    """Returns the FLOPs per token and layer of recomputing the tensors with these names once. attention: "naive" or
    "flash". sequence: tokens per sequence."""
    table, flops = _operations(model, attention), product_flops(model, sequence)
    return sum(flops.get(table[name].product, 0.0) for name in names)


def tiles_flops(model: ModelShape, sequence: int) -> float:
    """Returns the FLOPs per token and layer that are recomputed if the MLP is computed in tiles of tokens. All matrix
    products of the MLP are recomputed, except the last one, which is recomputed only if a norm reads its result."""
    names = ["up"]
    if model.gated:
        names.append("gate")
    if model.post_norms:
        names.append("mlp_out")
    return recomputed_flops(model, "flash", names, sequence)


def forward_flops(model: ModelShape, attention: str, sequence: int) -> float:
    """Returns the FLOPs of a layer's forward pass per token. attention: "naive" or "flash". sequence: tokens per
    sequence."""
    names = [name for name in _operations(model, attention) if _layer_has(name, model)]
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
    """Returns the bytes on a device of the tensors with these names, in one layer.

    Args:
        layout: how the step is sharded over devices.
        tokens: number of tokens, in sequences of `sequence` tokens.
        itemsize: bytes per element of an activation.
        operand: bytes per element of a tensor that is kept only as a matmul operand, such as about 1 under fp8; 0 means
            `itemsize`.
    """
    return sum(
        transformer_formulas.tensor_bytes(NAMED[name], model, layout, sequence, tokens, itemsize, operand)
        for name in names
        if name in NAMED
    )


def _layer_has(name: str, model: ModelShape) -> bool:
    # Names that are not tensors, such as `kernel`, exist in every layer.
    tensor = NAMED.get(name)
    return tensor is None or transformer_formulas.exists(tensor, model)


# ---- the layers of a segment ----------------------------------------------------------------------------------------


class RecomputedLayers(NamedTuple):
    """The residuals and the recomputation of those layers that have the same remat policy and are of one kind (dense,
    or with experts).

    Fields:
        device, host: bytes of the layers' residuals on the device and in host memory.
        recomputing: additional bytes on the device while one layer is recomputed.
        flops: FLOPs per token that recomputing all of the layers takes.
    """

    device: float
    host: float
    recomputing: float
    flops: float


def layers_of(
    kind: ModelShape, asked: Question, batch: float, segment: RematSegment, facts: ModelFacts, platform: str
) -> RecomputedLayers | None:
    """Returns the residuals and the recomputation of those layers that have the same remat policy and are of one kind;
    None if the policy has no formula.

    Args:
        kind: a model with only these layers, one of `expert_formulas.by_kind`.
        asked: the training step.
        batch: sequences per device and micro-step, a fraction if devices share a sequence.
        segment: the remat policy of the layers.
        facts: the trainer's description of the step.
        platform: the target's platform. On "cpu" nothing is offloaded.
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
    # Tensors between two checkpoints of one block are always kept.
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
    # Chen et al. 2016 (arXiv 1604.06174): the inputs of all groups, and of all blocks in the group being recomputed.
    flops += layers * forward_flops(kind, asked.attention, asked.sequence)
    return RecomputedLayers(device * (groups + layers / groups), 0.0, everything - device, flops)
