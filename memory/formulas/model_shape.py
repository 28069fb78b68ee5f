"""The shape of a decoder and its layout over devices, as plain records for all formulas, and the matrices of a
layer."""

from __future__ import annotations

import dataclasses

# Names of the matrices of a layer that may have an adapter.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685) over frozen weights. Only the adapters are trained.

    Fields:
        rank: the inner width r of an adapter's two matrices.
        targets: names of the matrices that have an adapter, such as "q" or "up". Names that the model does not have are
            ignored.
        base: the storage format of the frozen weights: "bf16", "nf4" or "int8".
    """

    rank: int
    targets: tuple[str, ...] = TARGETS
    base: str = "bf16"


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Routed experts, which replace the MLP of some layers.

    Fields:
        count: E, the number of experts. per_token: k, the number of experts per token. width: the width of one expert.
        shared: number of experts that process every token. They are computed as one MLP.
        dense_layers: number of layers at the beginning that have a dense MLP instead.
        every: N: of the other layers, every N-th has experts.
        capacity: maximum number of rows of an expert, as a multiple of the mean number. 0 means room for all rows.
        slots: whether each expert has room for the same number of rows, and rows beyond them are dropped.
        padded: whether the rows of an expert are padded to whole tiles. Has no effect with `slots`.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0
    slots: bool = False
    padded: bool = True

    def has(self, layer: int) -> bool:
        """Returns whether a layer (numbered from 0) has experts. The first `dense_layers` layers have none. Of the
        other layers, every `every`-th has experts."""
        routed = layer - self.dense_layers
        return routed >= 0 and (routed + 1) % self.every == 0


@dataclasses.dataclass(frozen=True)
class Latent:
    """The widths of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values are projected from one latent vector per token. Queries may have their own latent vector. A part of
    each head encodes the rotary position. All heads share this part of the keys.

    Fields:
        query_rank: width of the latent for queries, 0 if queries are projected from the input.
        rank: width of the latent for keys and values.
        rotary: width of the part of a head that encodes the position, in addition to `ModelShape.head_width`.
        value: width of a head's values.
    """

    query_rank: int
    rank: int
    rotary: int
    value: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder-only transformer. GPT has no gate and as many key/value heads as query heads. Llama has a
    gate, separate tables for embedding and output head, and no dropout.

    Fields:
        layers: number of layers. width: width of the residual stream.
        heads, kv_heads: number of query heads and of key/value heads.
        head_width, mlp_width: widths of one head and of the MLP. vocabulary: number of token ids.
        gated: whether the MLP has a gate. dropout: whether activations have dropout. tied: whether embedding and output
            head are one table.
        qk_norm: whether queries and keys are normalized.
        post_norms: whether outputs of attention and MLP are normalized.
        adapters: adapters that are trained instead of the weights, None if the weights are trained.
        experts: experts that replace the MLP in some layers, None for a dense model.
        latent: latent attention, None for standard attention.
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
        """Elements of one head's query or key, including the rotary part of latent attention."""
        return self.head_width + (self.latent.rotary if self.latent else 0)

    @property
    def value_width(self) -> int:
        """Elements of one head's value vector for one token."""
        return self.latent.value if self.latent else self.head_width

    @property
    def dense_width(self) -> int:
        """Width of the MLP that processes every token of a layer. In a layer with experts, this is the total width of
        the shared experts, or 0."""
        return self.experts.shared * self.experts.width if self.experts else self.mlp_width


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """How a training step is sharded over devices.

    Fields:
        tensor: number of tensor-parallel devices.
        sequence: whether activations between tensor-parallel matrix products are sharded too.
        data: number of data-parallel ranks. They shard the training state by the ZeRO stage `zero` (0 to 3).
        expert: number of data-parallel ranks that share the routed experts.
        pipeline: number of pipeline stages, each with `interleave` chunks of layers.
        stash: memory of one stage for activations that wait for their backward pass, if all stages run one program and
            so allocate the same. It is a multiple of the memory for one micro-batch's activations of all layers. 0 if
            each stage has its own program; the formulas then describe the first stage.
    """

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    zero: int = 0
    pipeline: int = 1
    interleave: int = 1
    expert: int = 1
    stash: float = 0.0

    def held_share(self, sharded: bool, routed: float = 0.0) -> float:
        """Returns the fraction of a group of parameters that one device holds.

        sharded: whether ZeRO shards these parameters. routed: the fraction of them that are in routed experts, which
        expert parallelism always shards.
        """
        ranks = self.data if sharded else 1
        return ((1 - routed) / ranks + routed / max(ranks, self.expert)) / (self.tensor * self.pipeline)


def gpt(layers: int, width: int, heads: int, vocabulary: int, *, dropout: bool = True) -> ModelShape:
    """Returns the shape of a GPT, as in the papers: an MLP of four times the width, and one embedding table for input
    and output."""
    return ModelShape(layers, width, heads, heads, width // heads, 4 * width, vocabulary, dropout=dropout)


def matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns the weight matrices of a layer that process every token, as name -> (input width, output width).

    The names are "q", "k", "v", "o", "gate", "up" and "down". Latent attention has no matrices q, k and v. Its matrices
    project inputs down to a latent vector and up from the vector.
    """
    queries, keys, latent = model.heads * model.score_width, model.kv_heads * model.head_width, model.latent
    if latent is None:
        shapes = {"q": (model.width, queries), "k": (model.width, keys), "v": (model.width, keys)}
    else:
        shapes = {"q": (model.width, queries)}
        if latent.query_rank:
            shapes = {"q_down": (model.width, latent.query_rank), "q_up": (latent.query_rank, queries)}
        shapes |= {
            "kv_down": (model.width, latent.rank + latent.rotary),
            "k_up": (latent.rank, model.heads * model.head_width),
            "v_up": (latent.rank, model.heads * latent.value),
        }
    shapes["o"] = (model.heads * model.value_width, model.width)
    if model.gated:
        shapes["gate"] = (model.width, model.dense_width)
    shapes |= {"up": (model.width, model.dense_width), "down": (model.dense_width, model.width)}
    return {name: shape for name, shape in shapes.items() if 0 not in shape}
