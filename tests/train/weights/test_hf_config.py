"""config.json to `config.model`: published files in both spellings, and what is refused by name."""

import json

import pytest

from bytescope.train.program import config_files as configs
from bytescope.train.source import title_of
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import FAMILIES
from bytescope.train.weights.hf_config import describe
from support.models import weights

pytestmark = pytest.mark.quick

# config.json as published, without what says nothing of the model.
LLAMA_31_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMOLLM2 = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "head_dim": None,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
MISTRAL_V01 = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN25 = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GEMMA2 = {
    "model_type": "gemma2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}

# The text models of Gemma 3 1B, and of 4B, whose layers that see everything have slower positions.
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_4B = {
    **GEMMA3_1B,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "vocab_size": 262208,
}


def keys(raw, **changes):
    return describe({**raw, **changes}, "config.json").keys


@pytest.mark.parametrize(
    ("raw", "shipped", "differ"),
    [(LLAMA_31_8B, "llama_8b", {}), (GPT2, "gpt2_small", {"vocab_size": 50304, "dropout": 0.0})],
)
def test_a_published_config_is_the_shipped_one(raw, shipped, differ):
    ours = configs.load(shipped).model.to_dict()
    assert {key: value for key, value in keys(raw).items() if ours[key] != value} == {
        key: keys(raw)[key] for key in differ
    }
    assert {key: ours[key] for key in differ} == differ


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (SMOLLM2, {"d_head": 64, "n_kv_heads": 3, "rope_theta": 100_000.0, "tie_embeddings": True, "rope_scaling": ()}),
        (GPT2, {"d_ff": 3072, "n_kv_heads": 12, "tie_embeddings": True, "dropout": 0.1, "mlp": "gelu", "bias": True}),
        (QWEN25, {"qkv_bias": True, "bias": False, "d_head": 64, "max_seq_len": 32768, "qk_norm": False}),
        (QWEN3, {"qk_norm": True, "d_head": 128, "qkv_bias": False, "rope_theta": 1e6}),
        (MISTRAL_V01, {"max_seq_len": 4096, "d_head": 128}),
        (
            GEMMA2,
            {
                "mlp": "geglu",
                "norm": "rmsnorm_offset",
                "post_norms": True,
                "tie_embeddings": True,
                "embed_scale": 48.0,
                "attention_scale": 1 / 16,
                "attention_softcap": 50.0,
                "logits_softcap": 30.0,
                "max_seq_len": 4096,
            },
        ),
        (
            GEMMA3_1B,
            {
                "qk_norm": True,
                "post_norms": True,
                "attention_softcap": 0.0,
                "logits_softcap": 0.0,
                "rope_theta": 1e6,
                "rope_local_theta": 1e4,
                "global_every": 6,
                "rope_scaling": (),
                "max_seq_len": 512,
                "attention_scale": 1 / 16,
                "tie_embeddings": True,
                "n_kv_heads": 1,
            },
        ),
        (
            GEMMA3_4B,
            {
                "rope_scaling": (8.0,),
                "rope_theta": 1e6,
                "rope_local_theta": 1e4,
                "max_seq_len": 1024,
                "n_layers": 34,
                "vocab_size": 262208,
            },
        ),
        (
            {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"attention_softcap": 0.0, "logits_softcap": 0.0},
        ),
    ],
)
def test_published_configs(raw, expected):
    assert {key: value for key, value in keys(raw).items() if key in expected} == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_keys_of_ours_and_layouts_that_parse(name):
    from bytescope.train.weights.patterns import Pattern

    family, known = FAMILIES[name], configs.load("tiny").model
    assert not {*family.fields, *family.fixed} - set(known)
    for row in family.rows.values():
        pattern = Pattern.parse(row.pattern)
        assert not row.parts or pattern.axis_of(row.parts[row.part])


def test_both_spellings_of_rotary_positions():
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert keys(new) == keys(LLAMA_31_8B) and keys(new)["rope_scaling"] == (8.0, 1.0, 4.0, 8192.0)
    old = {"rope_scaling": {**LLAMA_31_8B["rope_scaling"], "type": "llama3"}}
    del old["rope_scaling"]["rope_type"]  # as the first files had it
    assert keys(LLAMA_31_8B, **old) == keys(LLAMA_31_8B)
    assert keys(SMOLLM2, rope_parameters={"rope_type": "default", "rope_theta": 5e4})["rope_theta"] == 5e4
    assert keys(SMOLLM2, rope_scaling={"type": "linear", "factor": 2})["rope_scaling"] == (2.0,)
    new = {key: value for key, value in GEMMA3_4B.items() if not key.startswith("rope") and "pattern" not in key}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new["layer_types"] = [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(34)]
    assert keys(new) == keys(GEMMA3_4B)


@pytest.mark.parametrize(
    ("raw", "changes", "why"),
    [
        (SMOLLM2, {"model_type": "lama"}, "did you mean llama"),
        (SMOLLM2, {"model_type": None}, "model_type=None"),
        (SMOLLM2, {"model_type": ["llama"]}, "model_type=['llama']"),
        (SMOLLM2, {"model_type": "olmoe"}, "not a supported family"),
        (SMOLLM2, {"num_local_experts": 8}, "experts"),
        (SMOLLM2, {"kv_lora_rank": 512}, "latent attention"),
        (SMOLLM2, {"quantization_config": {"bits": 4}}, "quantized weights"),
        (SMOLLM2, {"auto_map": {"AutoModel": "m.M"}}, "never run"),
        (SMOLLM2, {"vision_config": {"x": 1}}, "modalities"),
        (SMOLLM2, {"alibi": True}, "ALiBi"),
        (SMOLLM2, {"peft_type": "LORA"}, "an adapter"),
        (SMOLLM2, {"attention_bias": True}, "attention_bias=True"),
        (SMOLLM2, {"mlp_bias": True}, "mlp_bias=True"),
        (SMOLLM2, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (GPT2, {"activation_function": "relu"}, "gelu_new"),
        (SMOLLM2, {"attention_dropout": 0.1}, "--config.model.dropout"),
        (GPT2, {"attn_pdrop": 0.0}, "embd_pdrop=0.1"),
        (SMOLLM2, {"rope_scaling": {"type": "linear"}}, "factor=None"),
        (SMOLLM2, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
        (SMOLLM2, {"rope_scaling": {"type": ["linear"]}}, "kind ['linear']"),
        (GEMMA3_4B, {"layer_types": ["full_attention", *["sliding_attention"] * 33]}, "layer_types"),
        (
            GEMMA3_4B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            "only in layers without a sliding window",
        ),
        (SMOLLM2, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "kind 'longrope'"),
        (SMOLLM2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kind 'dynamic'"),
        (SMOLLM2, {"rope_scaling": {"rope_type": "llama3"}}, "factor=None"),
        (SMOLLM2, {"rope_scaling": 3}, "give a JSON object"),
        (SMOLLM2, {"partial_rotary_factor": 0.5}, "supports only the value 1"),
        (SMOLLM2, {"rope_theta": "x"}, "rope_theta='x'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (SMOLLM2, {"hidden_size": None}, "is missing"),
        (SMOLLM2, {"hidden_size": 10**400}, "a whole number"),
        (SMOLLM2, {"num_hidden_layers": -1}, "a whole number"),
        (SMOLLM2, {"num_hidden_layers": 10**6}, "layers: give at most"),
        (SMOLLM2, {"vocab_size": True}, "vocab_size=True"),
        (SMOLLM2, {"vocab_size": 5.0}, "vocab_size=5.0"),
        (SMOLLM2, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        (SMOLLM2, {"tie_word_embeddings": "yes"}, "true or false"),
        (QWEN25, {"use_sliding_window": 1}, "False or True"),
        (QWEN25, {"use_sliding_window": True, "layer_types": ["x"] * 24}, "layer_types"),
        (MISTRAL_V01, {"sliding_window": 0}, "sliding_window=0"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({**GEMMA2, "hidden_activation": None}, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_our_model_does_not_compute_is_refused_by_name(raw, changes, why):
    with pytest.raises(UserError) as caught:
        keys(raw, **changes)
    assert why in str(caught.value) and str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "changes", "window"),
    [
        (MISTRAL_V01, {}, 4096),
        (MISTRAL_V01, {"sliding_window": None}, None),
        (QWEN25, {}, None),
        (GEMMA2, {}, 4096),
        (GEMMA2, {"layer_types": ["full_attention"] * 26}, None),
        (QWEN25, {"use_sliding_window": True}, None),  # all 24 layers are below max_window_layers
        (QWEN25, {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 512}, 512),
        (QWEN25, {"use_sliding_window": True, "layer_types": ["full_attention"] * 24, "max_window_layers": 0}, None),
    ],
)
def test_which_models_have_a_sliding_window(raw, changes, window):
    found = describe({**raw, **changes}, "config.json")
    assert found.window == window
    assert found.keys["max_seq_len"] == min(window or 2**31, raw["max_position_embeddings"])


def folder_of(path, raw):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_folder_is_a_config_and_the_command_line_wins(tmp_path):
    folder = folder_of(tmp_path / "SmolLM2-1.7B v2", SMOLLM2)
    config = configs.load(f"hf:{folder}", [("optimizer.learning_rate", "1e-4")])
    assert config.init.folder == str(folder) and config.optimizer.learning_rate == 1e-4
    assert (config.data.seq_len, config.remat.policy, config.model.d_model) == (2048, "full", 576)
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert title_of(f"hf:{folder}/") == "SmolLM2-1.7B v2" and title_of("configs/char.py") == "char"
    assert title_of("hf:/hub/models--org--SmolLM2-135M/snapshots/93efa2") == "SmolLM2-135M"
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "config.json").write_text(json.dumps({**SMOLLM2, "vocab_size": 256}))
    assert configs.load(f"hf:{tmp_path / 'bytes'}").data.tokenizer == "bytes"


def test_a_home_and_a_relative_folder(tmp_path, monkeypatch):
    folder_of(tmp_path / "m", SMOLLM2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configs.load("hf:~/m").init.folder == str(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    assert configs.load("hf:.").model.d_model == 576 and title_of("hf:.") == "m"
    with pytest.raises(UserError, match="or hf:~/m to use the weights in the folder"):
        configs.load("~/m")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"model.n_layers": "3"}, "model.n_layers=3, and"),
        ({"model.tie_embeddings": "false"}, "has True"),
        ({"model.mlp": "gelu"}, "has swiglu"),
        ({"model.qkv_bias": "true"}, "has False"),
    ],
)
def test_what_the_weights_decide_may_not_differ(tmp_path, overrides, why):
    folder = folder_of(tmp_path / "m", SMOLLM2)
    with pytest.raises(UserError, match=why):
        configs.load(f"hf:{folder}", list(overrides.items()))


def test_a_config_with_init_folder_has_to_be_that_model(tmp_path):
    folder, init = folder_of(tmp_path / "m", LLAMA_31_8B), [("init.folder", str(tmp_path / "m"))]
    assert configs.load("llama_8b", init).init.folder == str(folder)
    with pytest.raises(UserError) as caught:
        configs.load("llama_1b", init)
    assert "model.d_model=2048, and" in str(caught.value) and "--config.model.d_model=4096" in str(caught.value)
    (folder / "config.json").write_text(json.dumps({**LLAMA_31_8B, "rope_theta": 1e6}))
    with pytest.raises(UserError, match="--config.model.rope_theta=1000000.0"):
        configs.load("llama_8b", init)
    # A base that the command line gives is meant, such as for longer sequences.
    assert configs.load("llama_8b", [*init, ("model.rope_theta", "5e5")]).model.rope_theta == 5e5


@pytest.mark.parametrize("key", ["data.seq_len", "model.max_seq_len"])
def test_longer_sequences_than_a_sliding_window_are_refused(tmp_path, key):
    folder = folder_of(tmp_path / "m", MISTRAL_V01)
    assert configs.load(f"hf:{folder}", [("data.seq_len", "4096")]).model.max_seq_len == 4096
    with pytest.raises(UserError, match=f"{key}=4097: .* sliding window of 4096 positions"):
        configs.load(f"hf:{folder}", [(key, "4097")])


def test_one_rate_of_dropout_may_be_chosen(tmp_path):
    folder = folder_of(tmp_path / "m", {**GPT2, "attn_pdrop": 0.0})
    with pytest.raises(UserError, match="embd_pdrop"):
        configs.load(f"hf:{folder}")
    assert configs.load(f"hf:{folder}", [("model.dropout", "0")]).model.dropout == 0


def test_the_toys_are_configs_of_their_families():
    assert keys(weights.LLAMA)["d_head"] == 16 and keys(weights.GPT2)["d_head"] == 8
