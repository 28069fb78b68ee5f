"""The table of architectures that can be read: the meaning of config.json, and the tensor of each of our parameters.

A row says what a family's config.json means for `config.model` (`fixed`, `activation`, `fields`), which settings our
model supports (`needs`), and which tensor contains each of our parameters (`rows`). To add a family, add a row;
train/README.md shows how.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Placeholder for the number of the layer in our paths and in tensor names.
LAYER = "{n}"
# Placeholder for the number of the expert. A row with it has one tensor per expert.
EXPERT = "{e}"
REQUIRED = None


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """Says which tensor on disk contains one of our parameters, and in which layout.

    Several of our parameters may share a tensor, for example q, k and v in one matrix. Their parts then follow each
    other along one axis. If that axis is written with several letters, the parameters alternate. For example, in "(h k)
    c" with the parts k and u, each head h has k rows of the first parameter and then u rows of the second.

    Attributes:
        tensor: name of the tensor on disk.
        pattern: axes on disk -> our axes, each as letters, such as "(h k) d -> d h k"; patterns.py explains the
          letters.
        part: index of our parameter in `parts`.
        parts: if several parameters share the tensor, the letters of each along the shared axis, in order.
    """

    tensor: str
    pattern: str
    part: int = 0
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Field:
    """The key of Hugging Face's config.json that has the value of one of our config keys.

    Attributes:
        key: name of the key in config.json, or "" if there is none. `a|b` means the first of the two keys that is
          present; exports write the key a.
        default: value if the key is absent: a value, the name of a formula in hf_config.FORMULAS, or REQUIRED if the
          key must be present.
        null: value if the key is null. REQUIRED means the value of `default`.
    """

    key: str
    default: Any = REQUIRED
    null: Any = REQUIRED

    @property
    def written(self) -> str:
        """The name of the key in an exported config.json."""
        return self.key.partition("|")[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
        architecture: name of the family's class in transformers, as in config.json.
        base: prefix of tensor names, which is missing in checkpoints without the head.
        rows: our dotted path -> the tensor on disk.
        fields: key of `config.model` -> its key in config.json.
        activation: (key in config.json, its values -> values of our `model.mlp`). The first value is the default. A key
          `a|b` means the first of the two keys that is present.
        fixed: values of `config.model` that all models of the family share.
        needs: key in config.json -> values that our model supports. The first value is the default.
        dropouts: (keys of dropout rates in config.json, which must be equal; their default).
        dropout: True if the family applies dropout in the same places as our model.
        ignored: patterns of tensor names that contain no parameters.
        window: key of hf_config.WINDOWS, which says which layers have a sliding window.
        rope: key of hf_config.ROPES, which says how positions are rotated.
        routed: key of hf_config.ROUTED, which says which layers have experts.
        balance: key of hf_config.BALANCES, which says how the load-balance loss is computed.
        predicts: True if tensors of layers after the last one (multi-token prediction) are ignored, as in transformers.
        expected: keys of hf_config.OTHERS that a config.json of this family contains.
    """

    architecture: str
    base: str
    rows: Mapping[str, TensorRow]
    fields: Mapping[str, Field]
    activation: tuple[str, Mapping[str, str]]
    fixed: Mapping[str, Any]
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    dropouts: tuple[tuple[str, ...], float] = (("attention_dropout",), 0.0)
    dropout: bool = False
    ignored: tuple[str, ...] = ()
    window: str = "none"
    rope: str = "one"
    routed: str = "none"
    balance: str = "sum over choices"
    predicts: bool = False
    expected: tuple[str, ...] = ()


_LAYERS = f"model.layers.{LAYER}."


def _layer_rows(before: str, rows: tuple[tuple[Any, ...], ...]) -> dict[str, TensorRow]:
    # Each row is (our path in the block, tensor, pattern), followed by the index of the part and the parts if the
    # tensor is shared.
    return {f"blocks.{LAYER}.{ours}": TensorRow(before + theirs, *layout) for ours, theirs, *layout in rows}


LLAMA_ROWS = {
    "w_token": TensorRow("model.embed_tokens.weight", "v d -> v d"),
    "w_head": TensorRow("lm_head.weight", "v d -> d v"),
    "final_norm.scale": TensorRow("model.norm.weight", "d -> d"),
    **_layer_rows(
        _LAYERS,
        (
            ("norm_attention.scale", "input_layernorm.weight", "d -> d"),
            ("attention.w_q", "self_attn.q_proj.weight", "(h k) d -> d h k"),
            ("attention.w_k", "self_attn.k_proj.weight", "(g k) d -> d g k"),
            ("attention.w_v", "self_attn.v_proj.weight", "(g k) d -> d g k"),
            ("attention.w_o", "self_attn.o_proj.weight", "d (h k) -> h k d"),
            ("norm_mlp.scale", "post_attention_layernorm.weight", "d -> d"),
            ("mlp.w_gate", "mlp.gate_proj.weight", "f d -> d f"),
            ("mlp.w_up", "mlp.up_proj.weight", "f d -> d f"),
            ("mlp.w_down", "mlp.down_proj.weight", "d f -> f d"),
        ),
    ),
}
QKV_BIASES = _layer_rows(
    _LAYERS,
    (
        ("attention.b_q", "self_attn.q_proj.bias", "(h k) -> h k"),
        ("attention.b_k", "self_attn.k_proj.bias", "(g k) -> g k"),
        ("attention.b_v", "self_attn.v_proj.bias", "(g k) -> g k"),
    ),
)
QK_NORMS = _layer_rows(
    _LAYERS,
    (
        ("attention.norm_q.scale", "self_attn.q_norm.weight", "k -> k"),
        ("attention.norm_k.scale", "self_attn.k_norm.weight", "k -> k"),
    ),
)


def _expert_rows(block: str, matrices: tuple[str, str, str]) -> dict[str, TensorRow]:
    gate, up, down = (f"{block}.experts.{EXPERT}.{name}.weight" for name in matrices)
    return _layer_rows(
        _LAYERS,
        (
            ("experts.w_router", f"{block}.gate.weight", "e d -> d e"),
            (f"experts.w_gate.{EXPERT}", gate, "m d -> d m"),
            (f"experts.w_up.{EXPERT}", up, "m d -> d m"),
            (f"experts.w_down.{EXPERT}", down, "d m -> m d"),
        ),
    )


# In families with norms after attention and MLP, the norm before the MLP has another name.
POST_NORMS = _layer_rows(
    _LAYERS,
    (
        ("post_norm_attention.scale", "post_attention_layernorm.weight", "d -> d"),
        ("norm_mlp.scale", "pre_feedforward_layernorm.weight", "d -> d"),
        ("post_norm_mlp.scale", "post_feedforward_layernorm.weight", "d -> d"),
    ),
)


# Values for a model without optional features. Families override some of them.
PLAIN = {
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "post_norms": False,
    "embed_scale": 1.0,
    "attention_scale": 0.0,
    "attention_softcap": 0.0,
    "logits_softcap": 0.0,
    "rope_local_theta": 0.0,
    "global_every": 0,
    "attention_kind": "gqa",
    "experts": 0,
}
LLAMA = {**PLAIN, "norm": "rmsnorm", "position": "rope"}
LLAMA_FIELDS = {
    "d_model": Field("hidden_size"),
    "n_layers": Field("num_hidden_layers"),
    "n_heads": Field("num_attention_heads"),
    "n_kv_heads": Field("num_key_value_heads", "n_heads"),
    "d_head": Field("head_dim", "d_model/n_heads"),
    "d_ff": Field("intermediate_size"),
    "vocab_size": Field("vocab_size"),
    "max_seq_len": Field("max_position_embeddings", 2048),
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "tie_embeddings": Field("tie_word_embeddings", False),
    "init_std": Field("initializer_range", 0.02),
}
QWEN_FIELDS = {
    **LLAMA_FIELDS,
    "n_kv_heads": Field("num_key_value_heads", 32, "n_heads"),
    "max_seq_len": Field("max_position_embeddings", 32768),
}
# Values for models with experts that no family overrides, or all families share.
MIXTURE = {
    **LLAMA,
    "router": "softmax",
    "router_scale": 1.0,
    "router_bias": False,
    "router_groups": 1,
    "router_top_groups": 1,
    "shared_experts": 0,
}
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
# Early files have "gelu" in hidden_act; hidden_activation has the true value.
GELU = ("hidden_activation|hidden_act", {"gelu_pytorch_tanh": "geglu"})
GEMMA = {**LLAMA, "norm": "rmsnorm_offset"}
GEMMA_FIELDS = {
    **LLAMA_FIELDS,
    "d_head": Field("head_dim", 256),
    "tie_embeddings": Field("tie_word_embeddings", True),
    "max_seq_len": Field("max_position_embeddings", 8192),
    "embed_scale": Field("", "sqrt(d_model)"),
}
# A null value means no cap. Files without query_pre_attn_scalar mean 256.
GEMMA2_FIELDS = {
    **GEMMA_FIELDS,
    "attention_scale": Field("query_pre_attn_scalar", 256.0),
    "attention_softcap": Field("attn_logit_softcapping", 50.0, 0.0),
    "logits_softcap": Field("final_logit_softcapping", 30.0, 0.0),
}
ONE_WAY = {**NO_BIAS, "use_bidirectional_attention": (False,)}
SILU = ("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
BUFFERS = (r".*\.rotary_emb\.inv_freq",)

_KV = ("k", "u")
DEEPSEEK_ROWS = {
    **{ours: row for ours, row in LLAMA_ROWS.items() if ".attention." not in ours},
    **_expert_rows("mlp", ("gate_proj", "up_proj", "down_proj")),
    **_layer_rows(
        _LAYERS,
        (
            ("attention.w_q", "self_attn.q_proj.weight", "(h s~) d -> d h s"),
            ("attention.w_q_down", "self_attn.q_a_proj.weight", "q d -> d q"),
            ("attention.norm_q_latent.scale", "self_attn.q_a_layernorm.weight", "q -> q"),
            ("attention.w_q_up", "self_attn.q_b_proj.weight", "(h s~) q -> q h s"),
            ("attention.w_kv_down", "self_attn.kv_a_proj_with_mqa.weight", "z~ d -> d z"),
            ("attention.norm_kv_latent.scale", "self_attn.kv_a_layernorm.weight", "c -> c"),
            ("attention.w_k_up", "self_attn.kv_b_proj.weight", "(h k) c -> c h k", 0, _KV),
            ("attention.w_v_up", "self_attn.kv_b_proj.weight", "(h u) c -> c h u", 1, _KV),
            ("attention.w_o", "self_attn.o_proj.weight", "d (h u) -> h u d"),
            ("experts.router_bias", "mlp.gate.e_score_correction_bias", "e -> e"),
            ("shared.w_gate", "mlp.shared_experts.gate_proj.weight", "t d -> d t"),
            ("shared.w_up", "mlp.shared_experts.up_proj.weight", "t d -> d t"),
            ("shared.w_down", "mlp.shared_experts.down_proj.weight", "d t -> t d"),
        ),
    ),
}
DEEPSEEK_FIELDS = {
    **{ours: field for ours, field in LLAMA_FIELDS.items() if ours != "d_head"},
    "d_head": Field("qk_nope_head_dim", 128),
    "max_seq_len": Field("max_position_embeddings", 4096),
    "mla_q_rank": Field("q_lora_rank", 1536, 0),
    "mla_kv_rank": Field("kv_lora_rank", 512),
    "mla_d_rope": Field("qk_rope_head_dim", 64),
    "mla_d_value": Field("v_head_dim", 128),
    "d_expert": Field("moe_intermediate_size", 2048),
    "experts": Field("n_routed_experts|num_local_experts", 256),
    "experts_per_token": Field("num_experts_per_tok", 8),
    "shared_experts": Field("n_shared_experts", 1),
    "router_groups": Field("n_group", 8),
    "router_top_groups": Field("topk_group", 4),
    "router_scale": Field("routed_scaling_factor", 2.5),
    "router_renormalize": Field("norm_topk_prob", True),
}

_QKV = ("h k", "g k", "g k")
GPT2_ROWS = {
    "w_token": TensorRow("transformer.wte.weight", "v d -> v d"),
    "w_position": TensorRow("transformer.wpe.weight", "p d -> p d"),
    "w_head": TensorRow("lm_head.weight", "v d -> d v"),
    "final_norm.scale": TensorRow("transformer.ln_f.weight", "d -> d"),
    "final_norm.bias": TensorRow("transformer.ln_f.bias", "d -> d"),
    **_layer_rows(
        f"transformer.h.{LAYER}.",
        (
            ("norm_attention.scale", "ln_1.weight", "d -> d"),
            ("norm_attention.bias", "ln_1.bias", "d -> d"),
            ("attention.w_q", "attn.c_attn.weight", "d (h k) -> d h k", 0, _QKV),
            ("attention.w_k", "attn.c_attn.weight", "d (g k) -> d g k", 1, _QKV),
            ("attention.w_v", "attn.c_attn.weight", "d (g k) -> d g k", 2, _QKV),
            ("attention.b_q", "attn.c_attn.bias", "(h k) -> h k", 0, _QKV),
            ("attention.b_k", "attn.c_attn.bias", "(g k) -> g k", 1, _QKV),
            ("attention.b_v", "attn.c_attn.bias", "(g k) -> g k", 2, _QKV),
            ("attention.w_o", "attn.c_proj.weight", "(h k) d -> h k d"),
            ("attention.b_o", "attn.c_proj.bias", "d -> d"),
            ("norm_mlp.scale", "ln_2.weight", "d -> d"),
            ("norm_mlp.bias", "ln_2.bias", "d -> d"),
            ("mlp.w_up", "mlp.c_fc.weight", "d f -> d f"),
            ("mlp.b_up", "mlp.c_fc.bias", "f -> f"),
            ("mlp.w_down", "mlp.c_proj.weight", "f d -> f d"),
            ("mlp.b_down", "mlp.c_proj.bias", "d -> d"),
        ),
    ),
}
GPT2_FIELDS = {
    "d_model": Field("n_embd"),
    "n_layers": Field("n_layer"),
    "n_heads": Field("n_head"),
    "n_kv_heads": Field("", "n_heads"),
    "d_head": Field("", "d_model/n_heads"),
    "d_ff": Field("n_inner", "4*d_model"),
    "vocab_size": Field("vocab_size"),
    "max_seq_len": Field("n_positions"),
    "norm_eps": Field("layer_norm_epsilon", 1e-5),
    "tie_embeddings": Field("tie_word_embeddings", True),
    "init_std": Field("initializer_range", 0.02),
}

# model_type of config.json -> family.
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "transformer.",
        GPT2_ROWS,
        GPT2_FIELDS,
        (
            "activation_function",
            {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact"},
        ),
        {**PLAIN, "norm": "layernorm", "position": "learned", "bias": True},
        needs={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        dropouts=(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
        dropout=True,
        ignored=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    ),
    "llama": Family(
        "LlamaForCausalLM", "model.", LLAMA_ROWS, LLAMA_FIELDS, SILU, LLAMA, needs=NO_BIAS, ignored=BUFFERS
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "model.",
        LLAMA_ROWS,
        {
            **LLAMA_FIELDS,
            "n_kv_heads": Field("num_key_value_heads", 8, "n_heads"),
            "max_seq_len": Field("max_position_embeddings", 131072),
        },
        SILU,
        LLAMA,
        needs=NO_BIAS,
        ignored=BUFFERS,
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "model.",
        {**LLAMA_ROWS, **QKV_BIASES},
        QWEN_FIELDS,
        SILU,
        {**LLAMA, "qkv_bias": True},
        ignored=BUFFERS,
        window="last layers",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "model.",
        {**LLAMA_ROWS, **QK_NORMS},
        {**QWEN_FIELDS, "d_head": Field("head_dim", 128)},
        SILU,
        {**LLAMA, "qk_norm": True},
        needs=NO_BIAS,
        ignored=BUFFERS,
        window="last layers",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "model.",
        {
            **{ours: row for ours, row in LLAMA_ROWS.items() if ".mlp." not in ours},
            **_expert_rows("block_sparse_moe", ("w1", "w3", "w2")),
        },
        {
            **LLAMA_FIELDS,
            "n_kv_heads": Field("num_key_value_heads", 8, "n_heads"),
            "max_seq_len": Field("max_position_embeddings", 131072),
            "norm_eps": Field("rms_norm_eps", 1e-5),
            "d_expert": Field("intermediate_size"),
            "experts": Field("num_local_experts|num_experts", 8),
            "experts_per_token": Field("num_experts_per_tok", 2),
        },
        SILU,
        {**MIXTURE, "router_renormalize": True},
        needs={"router_jitter_noise": (0.0, 0)},
        ignored=BUFFERS,
        window="all, if given",
        rope="one, of 1e6",
        routed="all",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "model.",
        {**LLAMA_ROWS, **QK_NORMS, **_expert_rows("mlp", ("gate_proj", "up_proj", "down_proj"))},
        {
            **LLAMA_FIELDS,
            "n_kv_heads": Field("num_key_value_heads", 4, "n_heads"),
            "max_seq_len": Field("max_position_embeddings", 32768),
            "d_expert": Field("moe_intermediate_size", 768),
            "experts": Field("num_experts|num_local_experts", 128),
            "experts_per_token": Field("num_experts_per_tok", 8),
            "router_renormalize": Field("norm_topk_prob", False),
        },
        SILU,
        {**MIXTURE, "qk_norm": True},
        needs={"attention_bias": (False,)},
        ignored=BUFFERS,
        window="all, if used",
        routed="by step",
    ),
    # Norms of latents always have epsilon 1e-6, so only this value of rms_norm_eps is supported.
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "model.",
        DEEPSEEK_ROWS,
        DEEPSEEK_FIELDS,
        SILU,
        {**LLAMA, "attention_kind": "mla", "router": "sigmoid", "router_bias": True},
        needs={
            "attention_bias": (False,),
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            "rms_norm_eps": (1e-6,),
        },
        ignored=BUFFERS,
        rope="one, of latents",
        routed="after the first",
        balance="mean",
        predicts=True,
        expected=("auto_map",),
    ),
    "gemma": Family(
        "GemmaForCausalLM", "model.", LLAMA_ROWS, GEMMA_FIELDS, GELU, GEMMA, needs=ONE_WAY, ignored=BUFFERS
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "model.",
        {**LLAMA_ROWS, **POST_NORMS},
        GEMMA2_FIELDS,
        GELU,
        {**GEMMA, "post_norms": True},
        needs=ONE_WAY,
        ignored=BUFFERS,
        window="every second",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "model.",
        {**LLAMA_ROWS, **POST_NORMS, **QK_NORMS},
        {
            **GEMMA2_FIELDS,
            "max_seq_len": Field("max_position_embeddings", 131072),
            "attention_softcap": Field("attn_logit_softcapping", 0.0),
            "logits_softcap": Field("final_logit_softcapping", 0.0),
        },
        GELU,
        {**GEMMA, "post_norms": True, "qk_norm": True},
        needs=ONE_WAY,
        ignored=BUFFERS,
        window="but each n-th",
        rope="two",
    ),
}
