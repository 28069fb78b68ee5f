"""The table of architectures: whose config.json our model can be, and where each of its parameters lies on disk.

A row says what a family's config.json means for `config.model` (`fields`, `fixed`), which of its settings our model
computes (`needs`), and for each parameter of ours the tensor that has it (`rows`). A parameter that a model lacks, such
as a bias, is a row that is not read. To add a family: a row, in train/README.md's three lines.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Where our leaf and their tensor have the number of the layer.
LAYER = "{n}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor as one parameter of ours, or a part of it.

    tensor: its name on disk. pattern: its layout (patterns.py). parts: where several parameters share a tensor, the
    letters of each along the shared axis, in order; part: which of them this one is.
    """

    tensor: str
    pattern: str
    part: int = 0
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    architecture: the class of transformers, which config.json names. base: what checkpoints of the model without its
    head leave out in front of every name. rows: our leaf -> tensor. fields: key of `config.model` -> (their key, value
    where it is absent or null, None where it may not be); `fixed`: keys that all of the family share; `needs`: their
    key -> values that our model computes, the first where it is absent; `ignored`: patterns of tensors without
    parameters in them.
    """

    architecture: str
    base: str
    rows: Mapping[str, Row]
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    needs: Mapping[str, tuple[Any, ...]]
    ignored: tuple[str, ...] = ()
    window: str = "none"  # a row of hf_config.WINDOWS: which layers see a sliding window


_LAYERS = f"model.layers.{LAYER}."
LLAMA_ROWS = {
    "w_token": Row("model.embed_tokens.weight", "v d -> v d"),
    "w_head": Row("lm_head.weight", "v d -> d v"),
    "final_norm.scale": Row("model.norm.weight", "d -> d"),
    **{f"blocks.{LAYER}.{ours}": Row(_LAYERS + theirs, pattern) for ours, theirs, pattern in (
        ("norm_attention.scale", "input_layernorm.weight", "d -> d"),
        ("attention.w_q", "self_attn.q_proj.weight", "(h k) d -> d h k"),
        ("attention.w_k", "self_attn.k_proj.weight", "(g k) d -> d g k"),
        ("attention.w_v", "self_attn.v_proj.weight", "(g k) d -> d g k"),
        ("attention.w_o", "self_attn.o_proj.weight", "d (h k) -> h k d"),
        ("norm_mlp.scale", "post_attention_layernorm.weight", "d -> d"),
        ("mlp.w_gate", "mlp.gate_proj.weight", "f d -> d f"),
        ("mlp.w_up", "mlp.up_proj.weight", "f d -> d f"),
        ("mlp.w_down", "mlp.down_proj.weight", "d f -> f d"),
    )},
}
SIZES = {"d_model": ("hidden_size", None), "n_layers": ("num_hidden_layers", None),
         "n_heads": ("num_attention_heads", None), "d_ff": ("intermediate_size", None),
         "vocab_size": ("vocab_size", None)}
# None for what depends on other keys: as many key-value heads as heads, heads that divide the width.
LLAMA_FIELDS = {**SIZES, "n_kv_heads": ("num_key_value_heads", "n_heads"), "d_head": ("head_dim", "d_model/n_heads"),
                "max_seq_len": ("max_position_embeddings", 2048), "norm_eps": ("rms_norm_eps", 1e-6),
                "rope_theta": ("rope_theta", 10_000.0), "tie_embeddings": ("tie_word_embeddings", False),
                "init_std": ("initializer_range", 0.02), "dropout": ("attention_dropout", 0.0)}
LLAMA_FIXED = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False}
SILU = ("silu", "swish")
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}

_QKV = ("h k", "g k", "g k")
_H = f"transformer.h.{LAYER}."
GPT2_ROWS = {
    "w_token": Row("transformer.wte.weight", "v d -> v d"),
    "w_position": Row("transformer.wpe.weight", "p d -> p d"),
    "w_head": Row("lm_head.weight", "v d -> d v"),
    "final_norm.scale": Row("transformer.ln_f.weight", "d -> d"),
    "final_norm.bias": Row("transformer.ln_f.bias", "d -> d"),
    **{f"blocks.{LAYER}.{ours}": Row(_H + theirs, pattern, *part) for ours, theirs, pattern, *part in (
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
    )},
}
GPT2_FIELDS = {"d_model": ("n_embd", None), "n_layers": ("n_layer", None), "n_heads": ("n_head", None),
               "d_ff": ("n_inner", "4*d_model"), "vocab_size": ("vocab_size", None),
               "n_kv_heads": ("", "n_heads"), "d_head": ("", "d_model/n_heads"), "max_seq_len": ("n_positions", None),
               "norm_eps": ("layer_norm_epsilon", 1e-5), "tie_embeddings": ("tie_word_embeddings", True),
               "init_std": ("initializer_range", 0.02), "dropout": ("attn_pdrop", 0.1)}

# model_type of config.json -> family.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "model.", LLAMA_ROWS, LLAMA_FIELDS, LLAMA_FIXED,
                    {"hidden_act": SILU, **NO_BIAS}, (r".*\.rotary_emb\.inv_freq",)),
    "mistral": Family("MistralForCausalLM", "model.", LLAMA_ROWS,
                      {**LLAMA_FIELDS, "n_kv_heads": ("num_key_value_heads", 8),
                       "max_seq_len": ("max_position_embeddings", 131072)}, LLAMA_FIXED,
                      {"hidden_act": SILU, **NO_BIAS}, (r".*\.rotary_emb\.inv_freq",), window="all"),
    "gpt2": Family("GPT2LMHeadModel", "transformer.", GPT2_ROWS, GPT2_FIELDS,
                   {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True},
                   {"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
                    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
                    "add_cross_attention": (False,)},
                   (r".*\.attn\.bias", r".*\.attn\.masked_bias")),
}
