"""Memory of a quantized model in generation: codes on the device, and one layer's product decoded at a time."""

import jax
import numpy as np
import pytest

from bytescope.memory.devices import targets
from bytescope.model.quantized import groups
from bytescope.model.quantized.quantized_formats import BASES, FORMATS
from bytescope.train.commands import quantize_command
from bytescope.train.generate.generate_flags import STORED_WEIGHTS
from bytescope.train.generate.model_source import describe_model
from bytescope.train.generate.steps import EngineSizes, Steps
from bytescope.train.weights.packed import LAYOUTS, SIZES
from support.exhaustive import exhaustive
from support.models.generating import TINY
from support.toy import small_config

SHAPE = {"model.d_model": 128, "model.d_head": 32, "model.d_ff": 512, "model.n_heads": 4, "model.n_kv_heads": 4}
WIDEST = 128 * 512  # numbers of a layer's widest weight
PRODUCTS = 4 * 128 * 128 + 3 * WIDEST


def step_bytes(layers, base):
    """(bytes of the weights, bytes that a step takes beyond weights and pool)."""
    config = small_config({**TINY, **SHAPE, "model.n_layers": layers})
    steps = Steps(describe_model(config, jax.devices()[:1], dtype="float32", base=base), "float32")
    sizes = EngineSizes(8, 2, 16, 64)
    return steps.weight_bytes, steps.extra_bytes(sizes, steps.report(sizes, 2, 1, False, targets.parse("local")))


@pytest.fixture(scope="module")
def measured():
    wanted = ((2, "bf16"), (2, "int4_g32"), (6, "int4_g32"))
    return {key: step_bytes(*key) for key in wanted}


def test_weights_take_the_bytes_of_their_codes(measured):
    wide, _ = measured[2, "bf16"]
    packed, _ = measured[2, "int4_g32"]
    # Half a byte, and for 32 inputs a scale of two and a zero point of one, in the place of four bytes.
    assert wide - packed == 2 * PRODUCTS * (4 - 0.5 - 3 / 32)


def test_a_step_decodes_no_layer_before_it_is_its_turn(measured):
    _, wide = measured[2, "bf16"]
    _, two = measured[2, "int4_g32"]
    _, six = measured[6, "int4_g32"]
    assert two - wide <= 2 * 4 * WIDEST  # gate and up, which share their input
    assert six - two < 4 * WIDEST  # not a weight more for four layers


def test_choices_of_the_parsers_are_the_rows_of_the_tables():
    assert quantize_command.GROUPS == groups.SIZES == SIZES
    assert set(quantize_command.FORMATS) == set(LAYOUTS)
    assert set(STORED_WEIGHTS) == set(FORMATS) - set(BASES) == {f"int4_g{size}" for size in SIZES}


ROWS = [name for name in FORMATS if name not in BASES]


@pytest.mark.parametrize("base", [ROWS[0], *exhaustive(*ROWS[1:])])
def test_a_row_stores_what_it_says_and_reads_it_back(base):
    from bytescope.model.placement import ONE_DEVICE
    from bytescope.model.quantized.quantized_formats import Matrix, dequantize, parts_of, quantize_on_device

    matrix = Matrix((4, 32, 24), ("heads", "d_head", "d_model"), 2)
    w = np.random.default_rng(0).standard_normal(matrix.shape).astype(np.float32)
    arrays = quantize_on_device(base, matrix, w)
    parts = parts_of(base, matrix)
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (part.shape, np.dtype(part.dtype)) for name, part in parts.items()
    }
    back = np.asarray(dequantize(base, matrix, arrays, np.float32, ONE_DEVICE))
    codes = groups.encode(w.reshape(128, 24), FORMATS[base].block)
    np.testing.assert_array_equal(back, np.asarray(groups.decode(*codes)).reshape(matrix.shape))
    assert 0 < np.abs(back - w).max() < 0.5
