"""Mixtures of experts from folders: published sizes, each expert where it belongs, read by the devices that hold it."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from bytescope.memory import cli
from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.export.config_json import config_json
from bytescope.train.program import config_files as configs
from bytescope.train.program.program import build
from bytescope.train.user_errors import UserError
from bytescope.train.weights import load as loading
from bytescope.train.weights.finetune import check_agreement
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.hf_config import describe, routed_layers
from bytescope.train.weights.leaves import checkpoint_leaves
from bytescope.train.weights.load import load_params
from support.exhaustive import exhaustive
from support.models import checkpoints, weights

# config.json as published, without what says nothing of the model.
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# With weights in fp8, a layer that predicts the token after the next, and the code of before transformers had it.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MATRICES = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


@pytest.mark.parametrize(
    ("raw", "parameters", "keys", "balance", "layers"),
    [
        (
            MIXTRAL_8X7B,
            46_702_792_704,
            {"experts": 8, "experts_per_token": 2, "router_renormalize": True},
            0.04,
            "pooled",
        ),
        (
            QWEN3_30B_A3B,
            30_532_122_624,
            {
                "experts": 128,
                "experts_per_token": 8,
                "d_expert": 768,
                "d_ff": 6144,
                "qk_norm": True,
                "router_renormalize": True,
            },
            0.008,
            "pooled",
        ),
        (
            DEEPSEEK_V3,
            671_026_419_200,
            {
                "attention_kind": "mla",
                "dense_layers": 3,
                "shared_experts": 1,
                "mla_q_rank": 1536,
                "router": "sigmoid",
                "router_bias": True,
                "router_groups": 8,
                "rope_scaling": (40.0, 32.0, 1.0, 4096.0, 1.0),
            },
            0.0,
            "separate",
        ),
    ],
)
def test_published_sizes(tmp_path, raw, parameters, keys, balance, layers):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = configs.load(f"hf:{tmp_path}")
    model = ModelConfig.from_dict(config.model)
    assert {key: getattr(model, key) for key in keys} == keys
    assert config.loss.balance == pytest.approx(balance) and config.loss.balance_layers == layers
    abstract = nnx.eval_shape(lambda: Transformer(model, Precision(), rngs=nnx.Rngs(params=0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param))) == parameters
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}  # unquantized, 61 layers alone
    plain |= {key: 0 for key in raw if key == "num_nextn_predict_layers"}
    assert config_json(config.model.to_dict(), raw) == plain
    written = config_json(config.model.to_dict())  # of the keys alone
    assert written.items() >= {key: plain[key] for key in written.keys() & raw.keys() if key != "rope_scaling"}.items()
    assert describe(written, "config.json").keys == describe(raw, "config.json").keys


@pytest.mark.quick
@pytest.mark.parametrize(
    ("step", "dense"),
    [
        (1, []),
        (2, []),
        (3, [2]),
        (1, [0, 1]),
        (2, [1]),
        (4, []),
        (7, []),
        (1, [0, 2, 4, 6]),
        (2, [1, 3]),
        (1, [0, 1, 3, 5, 7]),
    ],
)
def test_dense_layers_both_ways(step, dense):
    raw = {**QWEN3_30B_A3B, "num_hidden_layers": 8, "decoder_sparse_step": step, "mlp_only_layers": dense}
    keys = describe(raw, "config.json").keys
    assert routed_layers(keys) == [(layer + 1) % step == 0 and layer not in dense for layer in range(8)]
    model = configs.load("tiny").model.to_dict() | dict(keys)
    again = describe(config_json(model), "config.json").keys
    assert routed_layers(again) == routed_layers(keys)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("raw", "changes", "why"),
    [
        (QWEN3_30B_A3B, {"mlp_only_layers": [5]}, "mlp_only_layers=[5]: bytescope supports only dense layers first"),
        (QWEN3_30B_A3B, {"mlp_only_layers": ["0"]}, "a list of layer numbers"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 1}, "a list"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 64}, "decoder_sparse_step=64: bytescope"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_30B_A3B, {"num_experts": "8"}, "num_experts='8': the value must be a whole number"),
        (QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias=True"),
        (QWEN3_30B_A3B, {"n_routed_experts": 8}, "n_routed_experts asks for experts"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False: bytescope supports only True"),
        (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: bytescope supports only 1e-06"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        (
            DEEPSEEK_V3,
            {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "truncate": False}},
            "truncate=False: bytescope",
        ),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings=None"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "dynamic", "factor": 4}}, "of the kind 'dynamic'"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "describes quantized weights: give the folder",
        ),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            "with weight_block_size=None, and only fp8",
        ),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            "with fmt='e5m2', and only e4m3",
        ),
        (
            {"model_type": "llama4", "text_config": {}},
            {},
            "model_type=llama4 is not supported: bytescope lacks layers without",
        ),
        (
            {"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}},
            {},
            "model_type=gpt_oss is not supported: bytescope lacks attention sinks",
        ),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: bytescope supports only 0.0"),
        (MIXTRAL_8X7B, {"router_aux_loss_coef": "x"}, "router_aux_loss_coef='x'"),
        (MIXTRAL_8X7B, {"model_type": "qwen2_moe"}, "num_local_experts asks for experts, which are supported only for"),
    ],
)
def test_what_is_refused_of_a_mixture(raw, changes, why):
    with pytest.raises(UserError) as caught:
        describe({**raw, **changes}, "config.json")
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.quick
def test_keys_that_files_leave_out_or_spell_otherwise():
    absent = {key: value for key, value in MIXTRAL_8X7B.items() if key not in ("rope_theta", "sliding_window")}
    assert describe(absent, "").keys == describe(MIXTRAL_8X7B, "").keys  # a base of 1e6, no window
    assert describe({**absent, "sliding_window": 4096}, "").keys["max_seq_len"] == 4096
    used = {**QWEN3_30B_A3B, "use_sliding_window": True}
    assert describe({**used, "sliding_window": 4096}, "").window == 4096 and describe(used, "").window is None
    five = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert describe(five, "").keys == describe(QWEN3_30B_A3B, "").keys


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shared_experts": 1}, "model.shared_experts=1"),
        ({"router": "sigmoid"}, "model.router=sigmoid"),
        ({"router_scale": 2.5}, "model.router_scale=2.5"),
        ({"dense_layers": 1}, "model.qk_norm=False: the nearest is qwen3_moe"),
    ],
)
def test_a_mixture_that_no_family_computes_is_named(changes, named):
    model = configs.load("tiny").model.to_dict() | {"experts": 8, "d_expert": 64} | changes
    with pytest.raises(UserError, match="no family of transformers computes .*" + named):
        config_json(model)
    raw = config_json(model | dict.fromkeys(changes, 0) | {"router": "softmax", "router_scale": 1.0})
    assert (raw["model_type"], raw["intermediate_size"], raw["num_local_experts"]) == ("mixtral", 64, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-MoE whose first layer is dense, of 8 experts."""
    made = checkpoints.model("qwen3_moe", num_experts=8)
    return checkpoints.save(made, tmp_path_factory.mktemp("mixture") / "m")


def program_of(folder, devices, **keys):
    config = configs.load(f"hf:{folder}")
    for key, value in {"precision.preset": "fp32", "batch.accumulation": 1, **keys}.items():
        configs.override(config, key, str(value))
    return build(config, jax.devices()[:devices])


def tensors_of(folder):
    opened = Folder.open(folder)
    return {
        name: np.asarray(opened.read(name, [(0, size) for size in tensor.shape]))
        for name, tensor in opened.tensors.items()
    }


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize(
    "mesh",
    [{"mesh.expert": 4, "mesh.fsdp": 2}, {"mesh.expert": 2, "mesh.tensor": 2, "mesh.fsdp": 2, "model.scan": "false"}],
)
def test_experts_are_where_they_belong_and_read_by_the_devices_that_hold_them(folder, mesh, monkeypatch):
    program, read = program_of(folder, 8, **mesh), []
    real = Folder.read
    monkeypatch.setattr(
        Folder, "read", lambda self, name, spans: read.append((name, real(self, name, spans))) or read[-1][1]
    )
    found = load_params(Folder.open(folder), program.model, program.state.params)
    monkeypatch.undo()
    theirs = tensors_of(folder)
    nbytes = sum(array.nbytes for name, array in read if ".experts." in name)
    assert nbytes == sum(array.nbytes for name, array in theirs.items() if ".experts." in name)  # once
    scanned = "model.scan" not in mesh

    def block_of(layer):
        if not scanned:
            return found["blocks"][layer]
        stack, place = (found["blocks"], layer - 1) if layer else (found["dense_blocks"], 0)
        return jax.tree.map(lambda leaf: leaf[place], stack)

    for layer in (1, 2):
        block = block_of(layer)
        before = f"model.layers.{layer}.mlp"
        np.testing.assert_array_equal(block["experts"]["w_router"], theirs[f"{before}.gate.weight"].T)
        for ours, name in MATRICES.items():
            each = np.stack([theirs[f"{before}.experts.{expert}.{name}.weight"].T for expert in range(8)])
            np.testing.assert_array_equal(block["experts"][ours], each)
    np.testing.assert_array_equal(block_of(0)["mlp"]["w_up"], theirs["model.layers.0.mlp.up_proj.weight"].T)
    up = (found["blocks"] if scanned else found["blocks"][1])["experts"]["w_up"]
    assert up.addressable_shards[0].data.shape[-3] == 8 // mesh["mesh.expert"]
    assert up.addressable_shards[0].data.size == up.size // 8


@pytest.mark.oracle("transformers")
def test_an_expert_that_is_missing_misshapen_or_too_many_is_named(folder, tmp_path):
    theirs, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    eighth = name.replace(".5.", ".8.")
    fused = {"model.layers.1.mlp.experts.gate_up_proj": np.zeros((8, 48, 32), np.float32)}
    without = {one: array for one, array in theirs.items() if one != name}
    plain = {one: array for one, array in theirs.items() if ".experts." not in one}
    for number, (tensors, why) in enumerate(
        (
            (without, f"has no tensor {name}"),
            ({**theirs, eighth: theirs[name]}, f"has tensor {eighth}, which"),
            ({**theirs, name: theirs[name].T}, f"{name} has shape 32 x 24, but config.json describes 24 x 32"),
            (
                {**theirs, "model.layers.0.mlp.gate.weight": theirs["model.layers.1.mlp.gate.weight"]},
                "has tensor model.layers.0.mlp.gate.weight, which",
            ),
            ({**plain, **fused}, "all experts of a layer in one tensor, model.layers.1.mlp.experts.gate_up_proj"),
        )
    ):
        opened = Folder.open(weights.write(tmp_path / str(number), config, tensors))
        model = ModelConfig.from_dict(configs.load(f"hf:{opened.path}").model)
        with pytest.raises(UserError) as caught:
            checkpoint_leaves(opened, model)
        assert why in str(caught.value) and "\n" not in str(caught.value)
    more = dataclasses.replace(model, experts=9)
    with pytest.raises(UserError, match="has no tensor model.layers.1.mlp.experts.8."):
        checkpoint_leaves(Folder.open(folder), more)


def blocked(tensors, layers, size):
    """(tensors as DeepSeek publishes them, of which matrices of these layers are in fp8 with a scale per block of
    size x size; the same dequantized)."""
    packed, plain = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if not name.startswith("model.layers.") or array.ndim != 2 or name.endswith(".gate.weight"):
            continue
        tiles = [-(-length // size) for length in array.shape]
        whole = np.zeros([count * size for count in tiles], np.float32)
        whole[: array.shape[0], : array.shape[1]] = array
        whole = whole.reshape(tiles[0], size, tiles[1], size)
        scales = np.abs(whole).max((1, 3)) / 448
        codes = (whole / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
        values = codes.astype(np.float32) * scales[:, None, :, None]
        inside = tuple(slice(length) for length in array.shape)
        flat = [count * size for count in tiles]
        packed |= {name: codes.reshape(flat)[inside], f"{name}_scale_inv": scales}
        plain[name] = values.reshape(flat)[inside]
    for name in ("embed_tokens.weight", "eh_proj.weight", "self_attn.o_proj.weight"):
        packed[f"model.layers.{layers}.{name}"] = np.zeros((3, 3), np.float32)  # which predicts further ahead
    return packed, plain


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """(a DeepSeek-V3 of transformers whose queries have no latent, and no YaRN; its folder)."""
    made = checkpoints.model("deepseek_v3", q_lora_rank=None, rope_parameters=None)
    return made, checkpoints.save(made, tmp_path_factory.mktemp("deepseek") / "m")


@pytest.mark.oracle("transformers")
def test_deepseek_without_a_latent_of_queries(deepseek):
    import torch

    made, folder = deepseek
    program = program_of(folder, 1, **{"model.attention": "naive", "data.seq_len": 24})
    params = load_params(Folder.open(folder), program.model, program.state.model_params)
    tokens = np.random.default_rng(1).integers(0, checkpoints.VOCAB, (2, 24)).astype(np.int32)
    ours = jax.jit(lambda params: nnx.merge(program.graph, params)(tokens))(params)
    with torch.no_grad():
        theirs = made(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("size", [16, 128])
def test_blocks_in_fp8_are_dequantized_piece_by_piece(deepseek, tmp_path, monkeypatch, size):
    theirs, raw = tensors_of(deepseek[1]), json.loads((deepseek[1] / "config.json").read_text())
    packed, plain = blocked(theirs, raw["num_hidden_layers"], size)
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [size, size]}
    ours = weights.write(tmp_path / "fp8", raw | {"quantization_config": fp8, "num_nextn_predict_layers": 1}, packed)
    other = weights.write(tmp_path / "plain", raw, plain)
    program, read = program_of(ours, 8, **{"mesh.expert": 2, "mesh.fsdp": 4}), []
    wanted = load_params(Folder.open(other), program.model, program.state.model_params)
    monkeypatch.setattr(loading, "PIECE", 512)
    real = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, name, spans: read.append(real(self, name, spans)) or read[-1])
    found = load_params(Folder.open(ours), program.model, program.state.model_params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert max(array.size for array in read if array.itemsize == 1) <= 512
    assert config_json(program.config.model.to_dict(), Folder.open(ours).config).keys() == raw.keys()


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda tensors, name: tensors.pop(f"{name}_scale_inv"),
            "has no tensor {}_scale_inv, the scales of the fp8 tensor {}",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scale_inv": np.ones((2, 1), np.float32)}),
            "tensor {}_scale_inv is F32 2 x 1, but for blocks of 128 x 128 it must be 1 x 1",
        ),
        (
            lambda tensors, name: tensors.update({name: tensors[name].astype(ml_dtypes.float8_e4m3fn)[:4]}),
            "tensor {} has shape 4 x 32, but config.json describes 24 x 32",
        ),
    ],
)
def test_fp8_whose_scales_do_not_fit_is_named(deepseek, tmp_path, change, why):
    raw = json.loads((deepseek[1] / "config.json").read_text())
    packed, _ = blocked(tensors_of(deepseek[1]), raw["num_hidden_layers"], 128)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    change(packed, name)
    folder = weights.write(tmp_path / "m", raw | {"quantization_config": {"quant_method": "fp8"}}, packed)
    with pytest.raises(UserError) as caught:
        checkpoint_leaves(Folder.open(folder), ModelConfig.from_dict(configs.load(f"hf:{folder}").model))
    assert why.format(name, name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama4", "gpt_oss"])
def test_a_family_that_our_model_lacks_is_refused_by_the_command(name, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "num_local_experts": 8}))
    assert cli.main(["report", f"hf:{tmp_path}", "h100"]) == 2
    out, err = capsys.readouterr()
    assert not out and f"model_type={name} is not supported: bytescope lacks" in err and len(err.splitlines()) == 1


def test_adapters_of_nothing_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    with pytest.raises(ValueError, match="lora.targets=gate,up .* model in which every MLP is a mixture"):
        program_of(tmp_path, 1, **{"lora.rank": 2, "lora.targets": "gate,up"})


@pytest.mark.quick
def test_a_config_of_ones_own_with_their_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    keys = describe(MIXTRAL_8X7B, "").keys
    config = configs.load("tiny")
    config.model.update(keys)
    config.init.folder = str(tmp_path)
    config.model.d_expert = 0  # d_ff, which is theirs
    check_agreement(config, ())
    config.model.experts_per_token = 1
    with pytest.raises(UserError, match="model.experts_per_token=1, and .* has 2"):
        check_agreement(config, ())


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("family", ["mixtral", *exhaustive("qwen3_moe")])
def test_the_balance_loss_and_its_gradients_are_theirs(family, tmp_path):
    """Over three layers of experts and rows of unequal lengths, whose padding neither counts."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    more = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    made = checkpoints.model(family, num_hidden_layers=3, router_aux_loss_coef=0.5, **more)
    program = program_of(
        checkpoints.save(made, tmp_path / "m"),
        1,
        **{"data.format": "pairs", "data.packing": "false", "data.seq_len": 24, "batch.micro": 4, "loss.chunk": 64},
    )
    rng, lengths = np.random.default_rng(1), np.array([24, 17, 9, 3])
    real = np.arange(24) < lengths[:, None]
    tokens, following = rng.integers(0, checkpoints.VOCAB, (2, *real.shape))
    batch = {"inputs": tokens, "targets": np.where(real, following, IGNORE), "mask": real}
    batch["targets"][:, :2] = IGNORE  # a prompt has no loss and goes to experts all the same
    batch = {name: array.astype(np.int32) for name, array in batch.items()}
    assert batch.keys() == program.batch_shapes.keys()

    def loss(params):
        total, (cross_entropy, load) = program.parts.loss(params, batch, None)
        return (total - cross_entropy) / (batch["targets"] >= 0).sum(), load

    params = load_params(Folder.open(tmp_path / "m"), program.model, program.state.params)
    (ours, load), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))

    out = made(torch.tensor(tokens), attention_mask=torch.tensor(real), output_router_logits=True)
    experts, k = program.model.experts, program.model.experts_per_token
    theirs = load_balancing_loss_func(out.router_logits, experts, k, torch.tensor(real))
    unmasked = load_balancing_loss_func(out.router_logits, experts, k).item()
    (0.5 * theirs).backward()
    assert ours == pytest.approx(0.5 * theirs.item(), rel=1e-5) and abs(unmasked - theirs.item()) > 1e-3
    np.testing.assert_allclose(k * load.balance, theirs.item(), rtol=1e-5)
    assert load.counts.sum(-1).tolist() == [real.sum() * k] * 3
    routers = gradients["blocks"]["experts"]["w_router"]
    for ours, layer in zip(routers, made.model.layers, strict=True):
        wanted = layer.mlp.gate.weight.grad.numpy().T
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
