"""Training memory and FLOPs from the published formulas: plain arithmetic, no compiler, no jax.

Sizes are bytes on one device, FLOPs are for all devices together. Symbols of the papers: s tokens of a sequence,
b sequences of a micro-batch, h width, a heads, L layers, v vocabulary, t tensor parallel size, p pipeline stages.

Left out everywhere: workspace of kernels and collectives, fragmentation, the runtime's own share, gathered copies of
sharded parameters, and what else a compiler fuses, merges or keeps. Those are what a report is for.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.adapter_formulas import adapted
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, matrices


def parameter_count(model: ModelShape) -> int:
    """Parameters of the matrices and embedding tables. Leaves out norms, biases and learned positions (about 0.1 %
    together)."""
    return sum(layer_count(kind) * kind.layers for kind in expert_formulas.by_kind(model)) + table_count(model)


def active_count(model: ModelShape) -> int:
    """Parameters that one token meets: those of `parameter_count` without the routed experts that it does not go to."""
    return parameter_count(model) - expert_formulas.idle_count(model)


def table_count(model: ModelShape) -> int:
    """Parameters of the embedding tables, including an untied head."""
    return (1 if model.tied else 2) * model.vocabulary * model.width


def layer_count(kind: ModelShape) -> int:
    """Parameters of the matrices of one layer of a model whose layers are alike (see `expert_formulas.by_kind`)."""
    count = sum(rows * columns for rows, columns in matrices(kind).values())
    if kind.experts:
        count += expert_formulas.router_size(kind) + expert_formulas.expert_size(kind) * kind.experts.count
    return count


# ---- activations ---------------------------------------------------------------------------------------------


class LayerTensor(NamedTuple):
    """One tensor that a layer keeps for its backward pass.

    size: elements per token, a key of `token_sizes`. split: "tensor" is always sharded t ways, "sequence" only with
    sequence parallelism, "" never. itemsize: bytes of an element, 0 for the itemsize of activations. core: part of the
    attention core. only: the ModelShape field without which the tensor does not exist. operand: kept only for products,
    in their dtype. tiled: if the MLP is in tiles, it exists for one tile of positions at a time. weights: the matrices
    whose gradients read it, () if other gradients read it too.
    """

    name: str
    size: str
    split: str
    itemsize: int = 0
    core: bool = False
    only: str = ""
    operand: bool = False
    tiled: bool = False
    weights: tuple[str, ...] = ()


# Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1: with dropout, a GELU MLP of 4h and 16-bit activations this
# sums to sbh(34 + 5as/h): attention 11 and the core 5as/h, MLP 19, norms 4; split by t it is 10 + 24/t + 5as/(ht),
# with sequence parallelism all of it by t. Grouped keys (Ainslie et al. 2023, arXiv 2305.13245) and the third matrix
# of SwiGLU (Shazeer 2020, arXiv 2002.05202) follow from the shapes. Left out: statistics of norms (two numbers a
# token) and whatever else plain autodiff keeps: 46.4 sbh in the place of 26.3 on the paper's 22B layer, under XLA.
# The context is an operand too, but a fused core reads it unquantized in its own gradient. A frozen matrix has no
# gradient, and the gradient of its input reads only the matrix: inputs are kept where one of `weights` has an adapter,
# which reads them too and keeps r numbers a token besides (Hu et al. 2021, arXiv 2106.09685). Left out: dropout before
# adapters.
LAYER = (
    LayerTensor("attention norm input", "width", "sequence"),
    LayerTensor("qkv input", "width", "sequence", operand=True, weights=("q", "k", "v")),
    LayerTensor("queries' latent", "query_latent", "sequence", only="latent"),
    LayerTensor("queries' latent, normed", "query_latent", "sequence", operand=True, only="latent"),
    LayerTensor("keys' and values' latent", "latent", "sequence", only="latent"),
    LayerTensor("keys' and values' latent, normed", "latent", "sequence", operand=True, only="latent"),
    LayerTensor("queries before their norm", "queries", "tensor", only="qk_norm"),
    LayerTensor("keys before their norm", "keys", "tensor", only="qk_norm"),
    LayerTensor("queries", "queries", "tensor"),
    LayerTensor("keys", "keys", "tensor"),
    LayerTensor("values", "values", "tensor"),
    LayerTensor("probabilities", "scores", "tensor", core=True),
    LayerTensor("probabilities' dropout mask", "scores", "tensor", 1, core=True, only="dropout"),
    LayerTensor("dropped probabilities", "scores", "tensor", core=True, only="dropout"),
    LayerTensor("context", "context", "tensor"),
    LayerTensor("attention output", "width", "sequence", only="post_norms"),
    LayerTensor("attention dropout mask", "width", "sequence", 1, only="dropout"),
    LayerTensor("mlp norm input", "width", "sequence"),
    LayerTensor("mlp input", "width", "sequence", operand=True, tiled=True, weights=("gate", "up")),
    LayerTensor("gate", "mlp", "tensor", only="gated", tiled=True),
    LayerTensor("up", "mlp", "tensor", tiled=True),
    LayerTensor("down input", "mlp", "tensor", operand=True, tiled=True, weights=("down",)),
    LayerTensor("router logits", "experts", "sequence", 4, only="experts"),
    LayerTensor("dispatched rows", "routed", "", only="experts"),
    LayerTensor("experts' gate", "routed_mlp", "tensor", only="gated"),
    LayerTensor("experts' up", "routed_mlp", "tensor"),
    LayerTensor("experts' down input", "routed_mlp", "tensor"),
    LayerTensor("mlp output", "width", "sequence", only="post_norms", tiled=True),
    LayerTensor("mlp dropout mask", "width", "sequence", 1, only="dropout"),
    LayerTensor("inside the adapters", "adapters", "sequence", only="adapters"),
)

# FlashAttention (Dao et al. 2022, arXiv 2205.14135) keeps one float32 per query instead of the core.
FLASH = LayerTensor("log of the softmax's denominator", "heads", "tensor", 4)

# Full recomputation keeps only the block's input: 2 sbh, with sequence parallelism 2/t.
BLOCK_INPUT = LAYER[0]

# Outside the layers, on the first stage (the paper's section 4.3): sbh/t (p + 4 + 4v/h), the last two for p = 1 only.
# Logits in float32; their gradient is left out.
EMBEDDING_MASK = LayerTensor("embedding dropout mask", "width", "sequence", 1, only="dropout")
HEAD = (LayerTensor("final norm input", "width", "sequence"), LayerTensor("head input", "width", "sequence"))
LOGITS = LayerTensor("logits", "vocabulary", "tensor", 4)

RECOMPUTE = {
    "none": "nothing recomputed",
    "selective": "the attention core recomputed (Korthikanti et al. 2022)",
    "full": "each layer recomputed from its input",
}
ATTENTION = ("naive", "flash")


# Sizes that count elements per row of the routed experts, not per token.
BY_ROW = ("routed", "routed_mlp")


def token_sizes(model: ModelShape, sequence: int) -> dict[str, int]:
    """Returns `LayerTensor.size` -> elements per token, for the sizes of BY_ROW elements per row."""
    experts, latent = model.experts, model.latent
    return {
        "width": model.width,
        "queries": model.heads * model.score_width,
        "keys": model.kv_heads * model.score_width,
        "unrotated": model.kv_heads * model.head_width,
        "values": model.kv_heads * model.value_width,
        "context": model.heads * model.value_width,
        "scores": model.heads * sequence,
        "heads": model.heads,
        "mlp": model.dense_width,
        "vocabulary": model.vocabulary,
        "experts": experts.count if experts else 0,
        "routed": model.width if experts else 0,
        "routed_mlp": experts.width if experts else 0,
        "query_latent": latent.query_rank if latent else 0,
        "latent": latent.rank if latent else 0,
        "rotary": latent.rotary if latent else 0,
        "rank": model.adapters.rank if model.adapters else 0,
        "adapters": model.adapters.rank * len(adapted(model)) if model.adapters else 0,
    }


def tensor_bytes(
    tensor: LayerTensor,
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    tokens: float,
    itemsize: int,
    operand: float = 0.0,
) -> float:
    """Returns the bytes of one tensor on a device for `tokens` tokens of sequences of `sequence` tokens.

    itemsize: bytes of an element of the activations; operand: of an element that is kept only for products, 0 for
    `itemsize`.
    """
    if not exists(tensor, model):
        return 0.0
    split = layout.tensor if tensor.split == "tensor" or (tensor.split and layout.sequence) else 1
    count = tokens
    if model.experts and tensor.size in BY_ROW:
        count = expert_formulas.rows(model.experts, tokens, layout.expert)
    element: float = itemsize
    if tensor.itemsize:
        element = tensor.itemsize
    elif tensor.operand and operand:
        element = operand
    return token_sizes(model, sequence)[tensor.size] * count * element / split


def exists(tensor: LayerTensor, model: ModelShape) -> bool:
    """Whether a layer of this model computes a tensor and some gradient reads it."""
    if tensor.only and not getattr(model, tensor.only):
        return False
    if tensor.size == "routed_mlp" and model.experts is None:
        return False
    if tensor.size == "mlp" and not model.dense_width:
        return False
    return model.adapters is None or not tensor.weights or not adapted(model).keys().isdisjoint(tensor.weights)


def kept_by_layer(recompute: str, attention: str = "naive", tiled: bool = False) -> tuple[LayerTensor, ...]:
    """Returns the tensors that a layer keeps. Under `flash` there is no core to recompute: `selective` equals `none`.

    tiled: the MLP is in tiles, which keep only their input, whatever the policy (Bekman et al. 2025, arXiv 2506.13996).
    """
    if tiled:
        return tuple(tensor for tensor in kept_by_layer(recompute, attention) if not tensor.tiled)
    if recompute == "full":
        return (BLOCK_INPUT,)
    if attention == "flash":
        return (*(tensor for tensor in LAYER if not tensor.core), FLASH)
    return tuple(tensor for tensor in LAYER if recompute == "none" or not tensor.core)


def layer_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    recompute: str = "none",
    attention: str = "naive",
    itemsize: int = 2,
    operand: float = 0.0,
    tile: float = 0.0,
) -> float:
    """Returns the bytes on a device that one layer keeps for the backward pass of one micro-batch; `tile`: tokens of a
    tile of the MLP, 0 without tiles."""
    return sum(
        tensor_bytes(tensor, model, layout, sequence, sequence * batch, itemsize, operand)
        for tensor in kept_by_layer(recompute, attention, tile > 0)
    )


def tile_bytes(
    model: ModelShape, layout: StepLayout, sequence: int, tokens: float, *, itemsize: int = 2, operand: float = 0.0
) -> float:
    """Bytes on a device of the MLP's tensors for the `tokens` of one tile."""
    return sum(
        tensor_bytes(tensor, model, layout, sequence, tokens, itemsize, operand) for tensor in LAYER if tensor.tiled
    )


def layers_in_flight(layers: int, layout: StepLayout) -> float:
    """Returns the number of layers whose activations the first pipeline stage holds, for one micro-batch each.

    One-forward-one-backward holds p micro-batches of L/p layers, so L for any p; interleaving multiplies by
    1 + (p-1)/(pm) (Korthikanti et al. 2022, section 4.2.3). Leaves out that later stages hold less. If one program runs
    on all stages, its schedule (`layout.stash`) says what each stage holds.
    """
    if layout.stash:
        return layers * layout.stash
    p, m = layout.pipeline, layout.interleave
    return layers * (1 + (p - 1) / (p * m) if m > 1 else 1)


def outside_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    itemsize: int = 2,
    logit_tokens: int | None = None,
) -> float:
    """Bytes on a device of embedding, final norm, head and logits (Korthikanti et al. 2022, section 4.3):
    (sbhL/t)(p/L + [p=1](4/L)(1 + v/h)) with sequence parallelism.

    logit_tokens: number of tokens that have logits at once, for losses in chunks; None for all. If one program runs on
    all stages, the vocabulary is sharded over them, and embedding and loss hold one micro-batch.
    """
    tokens = sequence * batch
    mask = tensor_bytes(EMBEDDING_MASK, model, layout, sequence, tokens, itemsize)
    if layout.pipeline > 1 and not layout.stash:
        return mask * layout.pipeline
    head = sum(tensor_bytes(tensor, model, layout, sequence, tokens, itemsize) for tensor in HEAD)
    at_once = tokens if logit_tokens is None else min(logit_tokens, tokens)
    return mask + head + tensor_bytes(LOGITS, model, layout, sequence, at_once, itemsize) / layout.pipeline


def recomputed_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    recompute: str,
    attention: str = "naive",
    itemsize: int = 2,
    operand: float = 0.0,
    tile: float = 0.0,
) -> float:
    """Returns the bytes on a device that recomputing one layer adds: what it keeps under `none`, less what it keeps
    under `recompute`, and one tile.

    The papers leave this out: they count what is alive at the end of the forward pass.
    """
    everything, kept = (
        layer_bytes(
            model,
            layout,
            sequence,
            batch,
            recompute=policy,
            attention=attention,
            itemsize=itemsize,
            operand=operand,
            tile=tile,
        )
        for policy in ("none", recompute)
    )
    tokens = min(tile, sequence * batch)
    return everything - kept + tile_bytes(model, layout, sequence, tokens, itemsize=itemsize, operand=operand)
