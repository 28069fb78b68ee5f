"""Training memory and FLOPs from the published formulas: plain arithmetic, no compiler, no jax.

Sizes are bytes on one device, FLOPs are for all devices together. Symbols of the papers: s tokens of a sequence,
b sequences of a micro-batch, h width, a heads, L layers, v vocabulary, t tensor parallel size, p pipeline stages.

Left out everywhere: workspace of kernels and collectives, fragmentation, the runtime's own share, gathered copies of
sharded parameters, and what else a compiler fuses, merges or keeps. Those are what a report is for.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas as experts
from bytescope.memory.formulas import latent_formulas as latent
from bytescope.memory.formulas.adapter_formulas import Adapters, adapted, matrices
from bytescope.memory.formulas.expert_formulas import ExpertShape
from bytescope.memory.formulas.latent_formulas import Latent


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder. GPT: `gated=False`, as many key/value heads as heads; Llama: gated, no dropout, untied.

    adapters: what is trained in the place of the weights; None: the weights. experts: what layers have in the place of
    an MLP; latent: what keys and values come from; None: neither.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    gated: bool = False
    dropout: bool = False
    tied: bool = True
    adapters: Adapters | None = None
    qk_norm: bool = False
    post_norms: bool = False
    experts: ExpertShape | None = None
    latent: Latent | None = None

    @property
    def score_width(self) -> int:
        """Width of a head's queries and keys."""
        return self.head_width + (self.latent.rotary if self.latent else 0)

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.latent.value if self.latent else self.head_width


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """How a training step is sharded: `tensor` t ways, with `sequence` the activations between the tensor-parallel
    products too; `data` ranks that shard state by the ZeRO stage `zero`, of which each `expert` share the routed
    experts; `pipeline` stages of `interleave` chunks each. `stash`: what each stage of one program that runs on all of
    them keeps of layers, in units of all layers; 0 for a program per stage, of which the first one's is meant."""

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    zero: int = 0
    pipeline: int = 1
    interleave: int = 1
    expert: int = 1
    stash: float = 0.0

    def held(self, sharded: bool, routed: float = 0.0) -> float:
        """Share of some parameters that a device holds. sharded: by ZeRO; routed: the share of routed experts in them,
        which expert parallelism shards in any case."""
        ranks = self.data if sharded else 1
        return ((1 - routed) / ranks + routed / max(ranks, self.expert)) / (self.tensor * self.pipeline)


def gpt(layers: int, width: int, heads: int, vocabulary: int, *, dropout: bool = True) -> ModelShape:
    """The architecture of the papers: MLP of 4h, GELU, one embedding table for input and output."""
    return ModelShape(layers, width, heads, heads, width // heads, 4 * width, vocabulary, dropout=dropout)


def parameter_count(model: ModelShape) -> int:
    """Matrices and embedding tables. Leaves out norms, biases and learned positions (about 0.1 % together)."""
    return sum(layer_count(kind) * kind.layers for kind in experts.by_kind(model)) + table_count(model)


def active_count(model: ModelShape) -> int:
    """Those of `parameter_count` that one token meets: all but the routed experts that it does not go to."""
    return parameter_count(model) - experts.idle_count(model)


def table_count(model: ModelShape) -> int:
    """Parameters of the embedding tables, an untied head among them."""
    return (1 if model.tied else 2) * model.vocabulary * model.width


def layer_count(kind: ModelShape) -> int:
    """Parameters of the matrices of one layer, one of `experts.by_kind`."""
    routed = experts.expert_size(kind) * kind.experts.count if kind.experts else 0
    return sum(rows * columns for rows, columns in matrices(kind).values()) + experts.router_size(kind) + routed


# ---- activations ---------------------------------------------------------------------------------------------


class LayerTensor(NamedTuple):
    """One tensor that a layer keeps for its backward pass.

    name; size: elements per token, a key of `token_sizes`; split: "tensor" is sharded t ways always, "sequence" only
    with sequence parallelism, "" never; itemsize: bytes of an element, 0 for the activations' own; core: part of the
    attention core; only: the ModelShape field without which it does not exist; operand: kept only for products, in
    their dtype; tiled: exists for one tile of positions at a time where the MLP is in tiles; weights: the matrices for
    whose gradients alone it is kept, () for what other gradients read too.
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
# The context is an operand too, but a fused core reads it wide in its own gradient. A frozen matrix has no gradient,
# and that of its input reads the matrix alone: inputs are kept where one of `weights` has an adapter, which reads them
# too and keeps r numbers a token besides (Hu et al. 2021, arXiv 2106.09685). Left out: dropout before adapters.
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

# FlashAttention (Dao et al. 2022, arXiv 2205.14135) keeps one float32 per query in the place of the core.
FLASH = LayerTensor("log of the softmax's denominator", "heads", "tensor", 4)

# Full recomputation keeps the block's input alone: 2 sbh, with sequence parallelism 2/t.
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


def token_sizes(model: ModelShape, sequence: int) -> dict[str, int]:
    """Elements per token by kind of tensor, the values of `LayerTensor.size`."""
    return {
        "width": model.width,
        "queries": model.heads * model.score_width,
        "keys": model.kv_heads * model.score_width,
        "unrotated": model.kv_heads * model.head_width,
        "values": model.kv_heads * model.value_width,
        "context": model.heads * model.value_width,
        "scores": model.heads * sequence,
        "heads": model.heads,
        "mlp": experts.mlp_width(model),
        "vocabulary": model.vocabulary,
        **experts.token_sizes(model),
        **latent.token_sizes(model),
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
    """Bytes of one tensor on a device for `tokens` of sequences of `sequence`; `itemsize`: of the activations,
    `operand`: of those that are kept for products alone, 0 for the same."""
    if not exists(tensor, model):
        return 0.0
    split = layout.tensor if tensor.split == "tensor" or (tensor.split and layout.sequence) else 1
    count = tokens
    if model.experts and tensor.size in experts.BY_ROW:
        count = experts.rows(model.experts, tokens, layout.expert)
    return (
        token_sizes(model, sequence)[tensor.size]
        * count
        * (tensor.itemsize or (tensor.operand and operand) or itemsize)
        / split
    )


def exists(tensor: LayerTensor, model: ModelShape) -> bool:
    """Whether a layer of this model keeps a tensor: it makes it, and some gradient reads it."""
    if (tensor.only and not getattr(model, tensor.only)) or not _has_mlp(tensor.size, model):
        return False
    return model.adapters is None or not tensor.weights or not adapted(model).keys().isdisjoint(tensor.weights)


def _has_mlp(size: str, model: ModelShape) -> bool:
    """Whether tensors of a size exist: of the routed experts' widths, or of an MLP's that every token goes to."""
    if size == "routed_mlp":
        return model.experts is not None
    return size != "mlp" or experts.mlp_width(model) > 0


def kept_by_layer(recompute: str, attention: str = "naive", tiled: bool = False) -> tuple[LayerTensor, ...]:
    """The tensors a layer keeps; under `flash` there is no core to recompute, and `selective` equals `none`.

    tiled: of an MLP in tiles only the input is kept, whatever the policy (Bekman et al. 2025, arXiv 2506.13996).
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
    """Bytes on a device that one layer keeps for the backward pass of one micro-batch; `tile`: tokens of a tile of the
    MLP, 0 for all."""
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
    """Layers' worth of activations on the first pipeline stage.

    One-forward-one-backward: p micro-batches of L/p layers, so L for any p; interleaving multiplies by
    1 + (p-1)/(pm) (Korthikanti et al. 2022, section 4.2.3). Leaves out that later stages hold less. Of one program on
    all stages: what its schedule has each of them hold.
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

    `logit_tokens`: how many tokens have logits at once, for losses in chunks; None for all. Of one program on all
    stages the vocabulary is sharded over them, and embedding and loss are those of one micro-batch.
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
    """Bytes on a device while one layer is recomputed: all it keeps under `none`, less what it had kept, and one tile.

    The papers leave it out: their figures are what lives through the forward pass.
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
