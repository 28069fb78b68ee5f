"""Folders of weights as Hugging Face writes them, tiny, made without its libraries."""

import json

import ml_dtypes
import numpy as np

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 250,
    "n_positions": 64,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
NAMES = {
    np.dtype("float32"): "F32",
    np.dtype("float16"): "F16",
    np.dtype("float64"): "F64",
    np.dtype("int8"): "I8",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}


def llama_shapes(config=LLAMA):
    """Name -> shape of the tensors of a Llama, as its published files have them."""
    d, f, v, k = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    h, g = config["num_attention_heads"] * k, config["num_key_value_heads"] * k
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for layer in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (h, d),
            "self_attn.k_proj": (g, d),
            "self_attn.v_proj": (g, d),
            "self_attn.o_proj": (d, h),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def gpt2_shapes(config=GPT2):
    """The same of a GPT-2, with the buffers that old files hold."""
    d, v, p = (config[key] for key in ("n_embd", "vocab_size", "n_positions"))
    shapes = {
        "transformer.wte.weight": (v, d),
        "transformer.wpe.weight": (p, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    for layer in range(config["n_layer"]):
        own = {
            "ln_1.weight": (d,),
            "ln_1.bias": (d,),
            "ln_2.weight": (d,),
            "ln_2.bias": (d,),
            "attn.c_attn.weight": (d, 3 * d),
            "attn.c_attn.bias": (3 * d,),
            "attn.c_proj.weight": (d, d),
            "attn.c_proj.bias": (d,),
            "mlp.c_fc.weight": (d, 4 * d),
            "mlp.c_fc.bias": (4 * d,),
            "mlp.c_proj.weight": (4 * d, d),
            "mlp.c_proj.bias": (d,),
            "attn.bias": (1, 1, p, p),
            "attn.masked_bias": (),
        }
        shapes |= {f"transformer.h.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def numbers(shapes, dtype="float32", seed=0):
    """Random tensors of these shapes, small as weights are."""
    rng = np.random.default_rng(seed)
    return {name: (0.1 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def encode(tensors, *, header=None):
    """The bytes of a safetensors file; `header`: changes entries before they are written."""
    entries, end = {}, 0
    for name, array in tensors.items():
        kind = NAMES.get(array.dtype, "BF16")
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    entries = entries if header is None else header(entries)
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values())


def write(folder, config, tensors, shards=1):
    """Writes config.json and the tensors, in several files with an index where `shards` is more than 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(encode(tensors))
        return folder
    names, index = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        (folder / file).write_bytes(encode({name: tensors[name] for name in own}))
        index |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def llama(folder, dtype="float32", shards=1, seed=0, **changes):
    """A Llama in a folder; `changes`: of config.json."""
    config = LLAMA | changes
    return write(folder, config, numbers(llama_shapes(config), dtype, seed), shards)


def gpt2(folder, dtype="float32"):
    """A GPT-2 in a folder."""
    return write(folder, GPT2, numbers(gpt2_shapes(), dtype))
