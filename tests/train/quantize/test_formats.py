"""4-bit codes: what they are of, and where each lies in the words of both layouts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.model.quantized import groups
from bytescope.train.generate.model_source import open_source
from bytescope.train.user_errors import UserError
from bytescope.train.weights.packed import LAYOUTS, Codes, layout_of
from support.models import weights

AWQ_NIBBLE = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # column within a word -> its nibble, from the low bits


def made_codes(inputs=64, outputs=24, group=32, seed=0):
    rng = np.random.default_rng(seed)
    return Codes(
        rng.integers(0, 16, (inputs, outputs)).astype(np.uint8),
        rng.integers(0, 16, (inputs // group, outputs)).astype(np.uint8),
        rng.uniform(1e-3, 1, (inputs // group, outputs)).astype(np.float16),
    )


def nibble(word, place):
    """Bits 4 place to 4 place + 3 of an int32, without NumPy."""
    return (int(word) & 0xFFFFFFFF) >> 4 * place & 15


def test_codes_are_the_nearest_levels_of_their_group():
    w_IO = np.random.default_rng(1).standard_normal((128, 3)).astype(np.float32)
    w_IO[32:64, 0] = 0
    w_IO[64:96, 1] = np.abs(w_IO[64:96, 1])  # 0 stays a level
    codes, zeros, scales = map(np.asarray, groups.encode(jnp.asarray(w_IO), 32))
    for group in range(4):
        for output in range(3):
            own = w_IO[32 * group : 32 * group + 32, output]
            step = np.float32(np.float16(max((max(own.max(), 0) - min(own.min(), 0)) / 15, 1e-5)))
            levels = (np.arange(16) - int(zeros[group, output])) * step
            assert scales[group, output] == np.float16(step) and 0 in levels
            found = levels[codes[32 * group : 32 * group + 32, output]]
            assert np.abs(found - own).max() <= np.abs(levels[:, None] - own).min(0).max() + 1e-6
    back = groups.decode(jnp.asarray(codes), jnp.asarray(zeros), jnp.asarray(scales))
    assert np.array_equal(groups.unpack(groups.pack(jnp.asarray(codes))), codes)
    assert np.abs(np.asarray(back) - w_IO).max() < 0.6 * scales.max() + 1e-3
    assert np.array_equal(np.asarray(back)[32:64, 0], np.zeros(32))


def test_every_bit_of_awq_lies_where_autoawq_has_it():
    one = made_codes()
    tensors = LAYOUTS["awq"].pack(one)
    assert tensors["qweight"].dtype == np.int32 and tensors["qweight"].shape == (64, 3)
    for row in range(64):
        for column in range(24):
            assert nibble(tensors["qweight"][row, column // 8], AWQ_NIBBLE[column % 8]) == one.codes_IO[row, column]
            if row < 2:
                assert nibble(tensors["qzeros"][row, column // 8], AWQ_NIBBLE[column % 8]) == one.zeros_GO[row, column]
    assert np.array_equal(tensors["scales"], one.scales_GO)


def test_every_bit_of_pack_quantized_lies_where_compressed_tensors_has_it():
    one = made_codes()
    tensors = LAYOUTS["compressed-tensors"].pack(one)
    assert tensors["weight_packed"].shape == (24, 8) and tensors["weight_zero_point"].shape == (3, 2)
    for row in range(64):
        for column in range(24):
            assert nibble(tensors["weight_packed"][column, row // 8], row % 8) == one.codes_IO[row, column]
            if row < 2:
                assert nibble(tensors["weight_zero_point"][column // 8, row], column % 8) == one.zeros_GO[row, column]
    assert np.array_equal(tensors["weight_scale"], one.scales_GO.T)
    assert tensors["weight_shape"].tolist() == [24, 64]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_packed_is_read_back_and_has_the_shapes_it_says(layout):
    one, row = made_codes(), LAYOUTS[layout]
    tensors = row.pack(one)
    sizes = {"F16": np.float16, "I32": np.int32, "I64": np.int64}
    assert {name: (sizes[dtype], shape) for name, (dtype, shape) in row.shapes(64, 24, 32).items()} == {
        name: (array.dtype.type, array.shape) for name, array in tensors.items()
    }
    back = row.unpack(tensors)
    for name in ("codes_IO", "zeros_GO", "scales_GO"):
        assert np.array_equal(getattr(back, name), getattr(one, name))
    found, group = layout_of({"quantization_config": json.loads(json.dumps(row.config(32)))}, "config.json")
    assert found is row and group == 32


def test_symmetric_codes_have_their_zero_in_the_middle():
    tensors = LAYOUTS["compressed-tensors"].pack(made_codes())
    del tensors["weight_zero_point"], tensors["weight_shape"]
    assert (LAYOUTS["compressed-tensors"].unpack(tensors).zeros_GO == 8).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 8}, "bits=8"),
        ({"version": "gemv"}, "version='gemv'"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": -1}, "group_size=-1"),
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "compressed-tensors"}, "num_bits=None"),
    ],
)
def test_other_quantizations_are_refused_by_name(change, message):
    raw = {"quantization_config": LAYOUTS["awq"].config(32) | change}
    with pytest.raises(UserError, match=message):
        layout_of(raw, "config.json")


def test_a_folder_whose_packed_tensors_are_wrong_is_refused(tmp_path):
    config = weights.LLAMA | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "quantization_config": LAYOUTS["awq"].config(32),
    }
    tensors = weights.numbers(weights.llama_shapes(config))
    folder = weights.write(tmp_path / "wide", config, tensors)
    with pytest.raises(UserError, match="has no tensor model.layers.0.self_attn.[qkvo]_proj.qweight, which its quant"):
        open_source(folder)


def test_experts_in_4_bits_are_refused(tmp_path):
    config = weights.LLAMA | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "architectures": ["MixtralForCausalLM"],
        "quantization_config": LAYOUTS["awq"].config(32),
    }
    folder = weights.write(tmp_path / "mixture", config, weights.numbers({"model.norm.weight": (32,)}))
    with pytest.raises(UserError, match="has experts in 4 bits, which are not supported"):
        open_source(folder)
