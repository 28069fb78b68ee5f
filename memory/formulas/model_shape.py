"""The shape of a decoder and its layout over devices, as all formulas take them: plain records, and the matrices of a
layer.
"""

from __future__ import annotations

import dataclasses

# Matrices of a layer that may have an adapter.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank adapters over frozen weights. Only the adapters are trained.

    rank: r of the paper (Hu et al. 2021, arXiv 2106.09685). targets: names of TARGETS; names that the model does not
    have are ignored. base: a key of `adapter_formulas.BASES`.
    """

    rank: int
    targets: tuple[str, ...] = TARGETS
    base: str = "bf16"


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Routed experts in the place of a layer's MLP.

    count: E, the number of experts; per_token: k, the number of experts that a token goes to; width: of one expert.
    shared: number of experts that every token goes to, computed as one MLP. dense_layers: number of first layers whose
    MLP stays dense; every: after those, every N-th layer has experts. capacity: rows that there is room for, as a
    multiple of their mean; 0: room for all rows that can come. slots: each expert has room for the same number of rows
    and drops the rest; otherwise its rows fill tiles.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0
    slots: bool = False

    def has(self, layer: int) -> bool:
        """Whether a layer (numbered from 0) has experts: after the dense layers, the last of each `every` layers."""
        routed = layer - self.dense_layers
        return routed >= 0 and (routed + 1) % self.every == 0


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values are projected from one latent per token; queries may have a latent of their own. A part of each
    head carries the rotary position, and all heads share that part of the keys.

    query_rank: width of the queries' latent; 0: queries are projected from the input. rank: width of the latent of
    keys and values. rotary: width of the part of a head that carries the position, which comes on top of
    `ModelShape.head_width`. value: width of a head's values.
    """

    query_rank: int
    rank: int
    rotary: int
    value: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder. GPT: `gated=False`, as many key/value heads as heads; Llama: gated, no dropout, untied.

    adapters: trained instead of the weights; None: the weights are trained. experts: instead of an MLP in some layers;
    latent: the latents of keys and values; None: neither.
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

    @property
    def dense_width(self) -> int:
        """Width of the MLP that every token of a layer goes to: with experts, the shared experts' width, 0 for none."""
        return self.experts.shared * self.experts.width if self.experts else self.mlp_width


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """How a training step is sharded.

    tensor: tensor-parallel devices. sequence: the activations between the tensor-parallel products are sharded too.
    data: data-parallel ranks, which shard state by the ZeRO stage `zero`; groups of `expert` ranks share the routed
    experts. pipeline: stages, of `interleave` chunks each. stash: if one program runs on all stages, the layers whose
    activations each stage keeps, as a share of all layers; 0 if every stage has a program of its own, of which the
    formulas describe the first.
    """

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    zero: int = 0
    pipeline: int = 1
    interleave: int = 1
    expert: int = 1
    stash: float = 0.0

    def held(self, sharded: bool, routed: float = 0.0) -> float:
        """Returns the share of some parameters that a device holds.

        sharded: whether ZeRO shards them. routed: the share of routed experts in them, which expert parallelism shards
        in any case.
        """
        ranks = self.data if sharded else 1
        return ((1 - routed) / ranks + routed / max(ranks, self.expert)) / (self.tensor * self.pipeline)


def gpt(layers: int, width: int, heads: int, vocabulary: int, *, dropout: bool = True) -> ModelShape:
    """The architecture of the papers: MLP of 4h, GELU, one embedding table for input and output."""
    return ModelShape(layers, width, heads, heads, width // heads, 4 * width, vocabulary, dropout=dropout)


def matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns name -> (inputs, outputs) of the matrices of a layer that every token meets.

    The names are those of TARGETS; latent attention has matrices down to a latent and up from it instead of q, k, v.
    """
    queries, keys, latent = model.heads * model.score_width, model.kv_heads * model.head_width, model.latent
    if latent is None:
        found = {"q": (model.width, queries), "k": (model.width, keys), "v": (model.width, keys)}
    else:
        found = {"q": (model.width, queries)}
        if latent.query_rank:
            found = {"q_down": (model.width, latent.query_rank), "q_up": (latent.query_rank, queries)}
        found |= {
            "kv_down": (model.width, latent.rank + latent.rotary),
            "k_up": (latent.rank, model.heads * model.head_width),
            "v_up": (latent.rank, model.heads * latent.value),
        }
    found["o"] = (model.heads * model.value_width, model.width)
    if model.gated:
        found["gate"] = (model.width, model.dense_width)
    found |= {"up": (model.width, model.dense_width), "down": (model.dense_width, model.width)}
    return {name: shape for name, shape in found.items() if 0 not in shape}
