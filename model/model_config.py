"""The shape of a transformer. GPT-2, Llama and other models are values of these fields, not classes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

POSITIVE = (
    "d_model",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "d_ff",
    "vocab_size",
    "vocab_multiple",
    "max_seq_len",
    "attention_chunk",
    "unroll",
    "experts_per_token",
    "moe_every",
    "router_groups",
    "router_top_groups",
    "mla_kv_rank",
    "mla_d_rope",
    "mla_d_value",
)
NOT_NEGATIVE = ("experts", "d_expert", "shared_experts", "dense_layers", "mla_q_rank", "capacity_factor", "mlp_chunk")


@dataclasses.dataclass(frozen=True)
class ModelKeys:
    """The config group `model` before its values are checked. The comments in configs/base.py explain each key."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    vocab_multiple: int
    max_seq_len: int
    norm: str
    norm_eps: float
    post_norms: bool
    embed_scale: float
    mlp: str
    position: str
    rope_theta: float
    # The `scaling` argument of rotary.rope_frequencies; () for no scaling.
    rope_scaling: tuple[float, ...]
    rope_local_theta: float
    global_every: int
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    logits_softcap: float
    init_std: float
    scan: bool
    unroll: int
    dropout: float
    attention: str
    attention_chunk: int
    attention_scale: float
    attention_softcap: float
    attention_kind: str
    mla_q_rank: int
    mla_kv_rank: int
    mla_d_rope: int
    mla_d_value: int
    experts: int
    experts_per_token: int
    d_expert: int
    shared_experts: int
    dense_layers: int
    moe_every: int
    router: str
    router_renormalize: bool
    router_scale: float
    router_bias: bool
    router_groups: int
    router_top_groups: int
    moe_kernel: str
    capacity_factor: float
    mlp_chunk: int


@dataclasses.dataclass(frozen=True)
class ModelConfig(ModelKeys):
    """The checked, immutable description of a model's architecture.

    Raises:
      ValueError: values are invalid or contradict each other. The message has the value and the remedy.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Returns the architecture from the dictionary `config.model`, which must have exactly the fields of this
        class.

        Raises:
          ValueError: a key is missing or unknown, or a value is invalid.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise ValueError(f"config.model has missing or unknown keys: {odd}; give exactly the fields of ModelConfig")
        return cls(**{**values, "rope_scaling": tuple(values["rope_scaling"])})

    def is_global(self, layer: Any) -> Any:
        """Returns True if layer `layer` (from 0) is a global layer. Every `global_every`-th layer is one; it uses the
        rotary base `rope_theta` instead of `rope_local_theta`."""
        return (layer + 1) % self.global_every == 0

    def has_experts(self, layer: int) -> bool:
        """Returns True if layer `layer` (from 0) has experts. The first `dense_layers` layers have none; of the layers
        after them, every `moe_every`-th layer has experts."""
        routed = layer - self.dense_layers
        return self.experts > 0 and routed >= 0 and (routed + 1) % self.moe_every == 0

    @property
    def score_width(self) -> int:
        """Number of elements of a head's queries and keys in the attention kernel."""
        return self.d_head + (self.mla_d_rope if self.attention_kind == "mla" else 0)

    @property
    def value_width(self) -> int:
        """Number of elements of one head's value vector for one token."""
        return self.mla_d_value if self.attention_kind == "mla" else self.d_head

    @property
    def expert_layers(self) -> int:
        """The number of layers that have experts."""
        return sum(map(self.has_experts, range(self.n_layers)))

    @property
    def routed(self) -> tuple[int, int] | None:
        """(number of layers that have experts, number of experts in each); None for a model without experts."""
        return (self.expert_layers, self.experts) if self.experts else None

    @property
    def expert_width(self) -> int:
        """The hidden width of one expert's MLP: `d_expert`, or `d_ff` if `d_expert` is 0."""
        return self.d_expert or self.d_ff

    @property
    def padded_vocab(self) -> int:
        """Number of rows of the token table: the vocabulary size rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def __post_init__(self):
        for minimum, names in ((1, POSITIVE), (0, NOT_NEGATIVE)):
            for name in names:
                if getattr(self, name) < minimum:
                    raise ValueError(f"model.{name}={getattr(self, name)} is too small: give {minimum} or more")
        if self.experts:
            self._check_experts()
        if self.attention_kind == "mla":
            self._check_latent()
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} is not a multiple of model.n_kv_heads={self.n_kv_heads}: "
                "give a multiple, because every key/value head serves the same number of query heads"
            )
        if self.unroll > 1 and not self.scan:
            raise ValueError(
                f"model.unroll={self.unroll} cannot be combined with model.scan=false, which has no loop "
                "over layers: set model.scan=true, or model.unroll=1"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} is out of range: give a probability from 0 to below 1")
        if self.position == "rope" and self.d_head % 2 and self.attention_kind != "mla":
            raise ValueError(
                f"model.d_head={self.d_head} is odd: rotary positions rotate pairs of dimensions, give an even width"
            )
        local = f"model.rope_local_theta={self.rope_local_theta} cannot be combined with"
        if bool(self.rope_local_theta) != bool(self.global_every):
            raise ValueError(
                f"{local} model.global_every={self.global_every}, because rope_local_theta is the rotary base "
                "of local layers, and global_every selects the layers that are not local: set both, or 0 for both"
            )
        if self.rope_local_theta and self.position != "rope":
            raise ValueError(
                f"{local} model.position={self.position}, because rope_local_theta is a base of rotary "
                "positions: set model.position=rope, or model.rope_local_theta and model.global_every to 0"
            )
        numbers = [value for value in self.rope_scaling if isinstance(value, int | float) and 0 < value < math.inf]
        if len(numbers) < len(self.rope_scaling) or len(numbers) not in (0, 1, 4, 5):
            raise ValueError(
                f"model.rope_scaling={','.join(map(str, self.rope_scaling))} is not valid: give nothing, or "
                "positive numbers in one of three forms: "
                "factor (linear), factor,low_frequency_factor,high_frequency_factor,original_positions (Llama 3.1), or "
                "factor,beta_fast,beta_slow,original_positions,attention_factor (YaRN)"
            )
        if len(numbers) == 5 and self.rope_theta <= 1:
            raise ValueError(
                f"model.rope_theta={self.rope_theta} is too small for YaRN's model.rope_scaling: give a base above 1"
            )
        if self.rope_local_theta and len(numbers) == 5:
            raise ValueError(
                f"{local} YaRN's model.rope_scaling, because YaRN's attention factor is not applied in "
                "local layers: set model.rope_scaling=n for linear scaling, or set model.rope_local_theta and "
                "model.global_every to 0"
            )

    def _check_latent(self) -> None:
        kind = "model.attention_kind=mla"
        for name in ("bias", "qkv_bias", "qk_norm"):
            if getattr(self, name):
                raise ValueError(
                    f"model.{name}=true cannot be combined with {kind}, whose queries and keys come from "
                    f"normalized latents without biases: set model.{name}=false, or model.attention_kind=gqa"
                )
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"model.n_kv_heads={self.n_kv_heads} cannot be combined with {kind}, whose heads each have their own "
                f"keys: set model.n_kv_heads={self.n_heads}, the same number as model.n_heads"
            )
        if self.position != "rope":
            raise ValueError(
                f"model.position={self.position} cannot be combined with {kind}, which needs rotary "
                "positions: set model.position=rope"
            )
        if self.mla_d_rope % 2:
            raise ValueError(
                f"model.mla_d_rope={self.mla_d_rope} is odd: rotary positions rotate pairs of dimensions, "
                "give an even width"
            )

    def _check_experts(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} is more than model.experts={self.experts}: give "
                "at most the number of experts"
            )
        if not self.expert_layers:
            raise ValueError(
                f"model.experts={self.experts} cannot be combined with model.dense_layers={self.dense_layers} and "
                f"model.moe_every={self.moe_every}, because none of the {self.n_layers} layers (model.n_layers) has "
                "experts: lower dense_layers or moe_every, or set model.experts=0"
            )
        if self.bias:
            raise ValueError(
                "model.bias=true cannot be combined with model.experts, because experts have no biases: set "
                "model.bias=false, or model.qkv_bias=true for biases of queries, keys and values only"
            )
        if self.experts % self.router_groups:
            raise ValueError(
                f"model.experts={self.experts} is not divisible by model.router_groups="
                f"{self.router_groups}: every group has the same number of experts; give a divisor of model.experts"
            )
        if self.router_top_groups > self.router_groups:
            raise ValueError(
                f"model.router_top_groups={self.router_top_groups} is more than model.router_groups="
                f"{self.router_groups}: give at most the number of groups"
            )
        open_to_token = self.experts // self.router_groups * self.router_top_groups
        if self.experts_per_token > open_to_token:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} is more than the {open_to_token} experts in "
                f"model.router_top_groups={self.router_top_groups} groups: raise router_top_groups"
            )
        if self.mlp_chunk:
            raise ValueError(
                f"model.mlp_chunk={self.mlp_chunk} cannot be combined with model.experts={self.experts}, because "
                "experts process the rows of a whole micro-batch: set model.mlp_chunk=0, "
                "and a smaller batch.micro to save memory"
            )
