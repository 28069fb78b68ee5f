"""Weights that are quantized while they are loaded: the same as of whole tensors, on any mesh, a piece at a time."""

import jax
import numpy as np
import pytest

from bytescope.model.quantized.quantized_formats import quantize
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.program import config_files as configs
from bytescope.train.program.program import build
from bytescope.train.weights import quantized as loading
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import Leaf, checkpoint_leaves
from bytescope.train.weights.load import load_params
from support.exhaustive import exhaustive
from support.models import weights

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}


def program(folder, devices=1, **overrides):
    config = configs.load(f"hf:{folder}")
    changes = {"data.seq_len": 16, "optimizer.freeze": "blocks.*.w_*", **overrides}
    for key, value in changes.items():
        configs.override(config, key, str(value))
    return build(config, jax.devices()[:devices])


@pytest.mark.parametrize(
    ("base", "make"), [("nf4", weights.llama), *exhaustive(("int8", weights.llama), ("nf4", "gpt2"))]
)
def test_what_is_loaded_is_what_the_tensor_quantizes_to(base, make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "PIECE", 128 * 24 * 4)  # pieces end within blocks of 256 scales
    if make == "gpt2":  # on disk the outputs of an input lie side by side
        sizes = weights.GPT2 | {"n_embd": 128}
        folder = weights.write(tmp_path / "m", sizes, weights.numbers(weights.gpt2_shapes(sizes)))
    else:
        folder = make(tmp_path / "m", "bfloat16", shards=2, **SIZES)
    made = program(folder, 4, **{"mesh.fsdp": 2, "mesh.tensor": 2, "lora.base": base, "batch.micro": 1})
    names = quantized_weights(made.abstract())
    asked, real = [], Leaf.read
    monkeypatch.setattr(Leaf, "read", lambda leaf, index=None: asked.append(real(leaf, index)) or asked[-1])
    opened, told = Folder.open(folder), []
    found = load_params(opened, made.model, made.state.model_params, lambda *done: told.append(done), names)
    assert told[-1][0] == told[-1][1] and len(asked) > len(names) * made.model.n_layers
    leaves = checkpoint_leaves(opened, made.model)
    for name, (row, matrix) in names.items():
        node = found
        for part in name.split("."):
            node = node[part]
        for layer in range(made.model.n_layers):
            whole = np.ascontiguousarray(real(leaves[name.replace("blocks.", f"blocks.{layer}.")]))
            for part, array in quantize(row, matrix, [whole.reshape(matrix.sizes)]).items():
                np.testing.assert_array_equal(np.asarray(node[part][layer]), array, err_msg=f"{name}.{part} {layer}")
    norm = found["blocks"]["norm_mlp"]["scale"]
    np.testing.assert_array_equal(np.asarray(norm[1]), np.float32(real(leaves["blocks.1.norm_mlp.scale"])))
