"""The 8-bit code of the moments: its map, its errors, its blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.train.step.optimizer import adam_8bit

MAPS = {
    "signed": (adam_8bit.encode_signed, adam_8bit.decode_signed, np.arange(-127, 128).astype(np.int8)),
    "unsigned": (adam_8bit.encode_unsigned, adam_8bit.decode_unsigned, np.arange(256).astype(np.uint8)),
}


@pytest.mark.parametrize("name, top", [("signed", 64), ("unsigned", 128)])
def test_the_map_is_dynamic(name, top):
    """Each of seven decades has half the codes of the one above; every code stands for itself; 1 is exact."""
    encode, decode, codes = MAPS[name]
    values = np.asarray(decode(codes), np.float64)
    assert (np.diff(values) > 0).all() and values[-1] == 1.0 and values[codes == 0] == 0.0
    np.testing.assert_array_equal(encode(decode(codes)), codes)
    for decade in range(6):
        inside = (values > 10.0 ** -(decade + 1) * (1 + 1e-5)) & (values < 10.0**-decade * (1 + 1e-5))
        assert inside.sum() == top // 2**decade


@pytest.mark.parametrize("name", MAPS)
def test_the_code_is_the_nearest(name):
    encode, decode, codes = MAPS[name]
    values = np.asarray(decode(codes), np.float64)
    x = np.float32(10.0 ** np.random.default_rng(0).uniform(-6, 0, 4000))
    x = np.concatenate([x, -x]) if name == "signed" else x
    best = np.abs(x[:, None] - values[None]).min(1)
    np.testing.assert_allclose(np.abs(x - np.asarray(decode(encode(x)))), best, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name, most", [("signed", 0.5 * 0.9 / 64), ("unsigned", 0.5 * 0.9 / 128)])
def test_errors_stay_within_half_a_step_of_the_block(name, most):
    """Of the block's largest value; what lies in the top decade is within 7 % and 3.5 % of itself."""
    encode, decode, _ = MAPS[name]
    x = np.random.default_rng(1).standard_normal((3, 64, 4, 32)).astype(np.float32) * np.float32(1e-3)
    x = np.abs(x) if name == "unsigned" else x
    x[1, 5] *= 1e4  # one block of outliers
    codes, scale = adam_8bit.quantize(x, (1, 1, 2, 32), encode)
    assert codes.shape == x.shape and scale.shape == (3, 64, 2, 1)
    error = np.abs(np.asarray(adam_8bit.dequantize(codes, scale, (1, 1, 2, 32), decode)) - x)
    largest = np.abs(x).reshape(3, 64, 2, 64).max(-1)
    np.testing.assert_array_equal(scale[..., 0], largest)
    bound = np.repeat(largest, 2, -1)[..., None]
    assert (error <= most * bound * (1 + 1e-4)).all()
    top = np.abs(x) > 0.1 * bound
    assert (error[top] <= 10 * most * np.abs(x)[top] * (1 + 1e-4)).all()


def test_a_second_moment_above_zero_never_becomes_zero():
    tiny = jnp.asarray([0.0, 1e-30, 1e-9, 1.0])
    np.testing.assert_array_equal(adam_8bit.encode_unsigned(tiny), [0, 1, 1, 255])
    codes, scale = adam_8bit.quantize(jnp.zeros((4, 128)), (1, 128), adam_8bit.encode_signed)
    assert not np.any(codes) and not np.any(scale)


@pytest.mark.parametrize(
    "name, shape, block",
    [
        ("w_q", (32, 4096, 32, 128), (1, 1, 1, 128)),
        ("w_k", (48, 1600, 25, 64), (1, 1, 1, 64)),
        ("w_o", (32, 128, 4096), (1, 128, 1)),
        ("w_o", (4, 4, 32, 128), (1, 2, 32, 1)),
        ("w_up", (4096, 14336), (1, 128)),
        ("w_down", (2, 14336, 4096), (1, 128, 1)),
        ("w_token", (128256, 4096), (1, 128)),
        ("w_head", (768, 50304), (128, 1)),
        ("w_up", (9, 40, 100), None),
        ("scale", (8192,), None),
        ("b_up", (32, 14336), None),
    ],
)
def test_blocks_divide_the_parameter(name, shape, block):
    assert adam_8bit.block_shape((jax.tree_util.DictKey(name),), shape) == block
