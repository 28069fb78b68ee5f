"""Frozen weights in 4 and 8 bits: the numbers of the papers and of bitsandbytes, on the host and on devices."""

import hashlib
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.model.placement import ONE_DEVICE
from bytescope.model.quantized import nf4, quantized_formats
from bytescope.model.quantized.quantized_formats import BASES, Matrix, parts_of
from bytescope.train.parallel.axes import AXES, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout

QUANTIZED = [base for base, row in BASES.items() if row]
# As stored: one dimension in and two out, two in and one out, one and one.
MATRICES = [
    Matrix((128, 2, 32), ("d_model", "heads", "d_head"), 1),
    Matrix((4, 32, 128), ("heads", "d_head", "d_model"), 2),
    Matrix((128, 192), ("d_model", "d_ff"), 1),
]


def weights(outputs, inputs, seed=0):
    return (np.random.RandomState(seed).standard_normal((outputs, inputs)) * 0.02).astype(np.float32)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


# ---- bitsandbytes 0.50.2 on a CPU, torch 2.13: quantize_4bit(weights(96, 448), 64, compress_statistics=True, "nf4") --
# Seven scales an output, so that blocks of 256 scales end within one.


@pytest.mark.quick
def test_bytes_of_bitsandbytes():
    codes, scale = nf4.encode(weights(96, 448))
    assert codes.reshape(-1)[:8].tolist() == [233, 191, 227, 182, 121, 141, 184, 153]
    assert digest(codes) == "e4f78a8db4cce299c6a3a6b6a57a00cb8f90c3f1dc506be706c9d54a5fc2ef55"
    assert digest(scale) == "bcdf0f76069fcadc2e872bb5dd0813b1ec312c5991e267342cd2318060600395"


@pytest.mark.quick
def test_double_quantization_of_bitsandbytes():
    # Its dynamic map.
    assert digest(nf4.SCALE_LEVELS) == "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    codes, largest, mean = nf4.encode_scales(nf4.encode(weights(96, 448))[1])
    assert digest(codes) == "1740a016d962701539d099eb46cdf1966d0095c1441e338a978b93d67f04a207"
    assert largest.tolist() == [0.023911941796541214, 0.04107779636979103, 0.02395561710000038]
    assert float(mean) == 0.05212126299738884


def test_weights_of_bitsandbytes():
    codes, scale = nf4.encode(weights(96, 448))
    found = np.asarray(nf4.decode(jnp.asarray(codes.T), jnp.asarray(scale.T)))
    assert digest(found.T) == "878b329dd58be9d5652f96f16e854ea003a657080682cfcc5819e489da5c1295"


# ---- the papers ---------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_levels_are_quantiles_of_a_normal_distribution():
    """Appendix E of QLoRA: eight quantiles above zero, seven below, at equal steps of probability, over the largest."""
    normal = np.vectorize(NormalDist().inv_cdf)
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2  # half between the outermost probabilities of 16 and of 15 levels
    up, down = normal(np.linspace(offset, 0.5, 9)[:-1]), -normal(np.linspace(offset, 0.5, 8)[:-1])
    expected = np.sort([*up, 0, *down]) / up.max()
    np.testing.assert_allclose(nf4.LEVELS, expected, atol=3e-7)


@pytest.mark.quick
def test_nearest_level():
    """Against a search of the distances, on numbers that include the bounds themselves and what is next to them."""
    bounds = nf4.BOUNDS
    near = np.concatenate([bounds, np.nextafter(bounds, 1), np.nextafter(bounds, -1), nf4.LEVELS, [0.3, -0.3, 1]])
    row = np.float32([near]).reshape(1, 64)  # 1 is among them: the scale
    codes, scale = nf4.encode(row * 4)
    assert scale == 4
    levels = np.stack([codes >> 4, codes & 15], -1).reshape(-1)
    distances = np.abs(near.astype(np.float64)[:, None] - nf4.LEVELS.astype(np.float64))
    chosen = np.take_along_axis(distances, levels[:, None].astype(int), 1)[:, 0]
    np.testing.assert_allclose(chosen, distances.min(1), atol=2e-7)  # bounds are rounded to float32
    assert levels[:15].tolist() == list(range(15))  # a bound itself has the lower level
    assert levels[15:30].tolist() == list(range(1, 16))


@pytest.mark.quick
def test_zeros_and_single_numbers():
    row = np.zeros((2, 128), np.float32)
    row[1, 70] = -3e-5
    arrays = quantized_formats.quantize("nf4", Matrix((128, 2), ("d_model", "d_ff"), 1), [row.T])
    codes, scale = nf4.encode(row)
    back = nf4.LEVELS[np.stack([codes >> 4, codes & 15], -1)].reshape(2, 2, 64) * scale[..., None]
    np.testing.assert_array_equal(back.reshape(2, 128), row)
    assert all(np.isfinite(array).all() for array in arrays.values())
    np.testing.assert_array_equal(quantized_formats.encode_int8(row)[0].astype(np.float32)[1, 70], -127)
    assert not quantized_formats.encode_int8(row)[0][0].any() and quantized_formats.encode_int8(row)[1][0] == 0


@pytest.mark.quick
@pytest.mark.parametrize("base,bits", [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8 + 32 / 4096)])
def test_bits_of_a_parameter(base, bits):
    """Section 3 of QLoRA: double quantization takes 8/64 + 32/(64 256) = 0.127 bits of scales, here and one mean."""
    parts = parts_of(base, Matrix((4096, 14336), ("d_model", "d_ff"), 1))
    stored = sum(np.prod(part.shape, dtype=int) * np.dtype(part.dtype).itemsize for part in parts.values())
    assert 8 * stored - (32 if base == "nf4" else 0) == bits * 4096 * 14336


# ---- what comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", MATRICES, ids=["qkv", "o", "mlp"])
@pytest.mark.parametrize("base,error", [("nf4", 0.092), ("int8", 0.0065)])
def test_round_trip(base, error, matrix):
    """The weight that is read is codes times scales, in the place of each number, and as near as the format has it."""
    inputs, outputs = matrix.sizes
    w_OI = weights(outputs, inputs, seed=3)
    arrays = quantized_formats.quantize(base, matrix, [w_OI.T[:, :50], w_OI.T[:, 50:]])
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (part.shape, part.dtype) for name, part in parts_of(base, matrix).items()
    }
    found = quantized_formats.dequantize(base, matrix, jax.tree.map(jnp.asarray, arrays), jnp.float32, ONE_DEVICE)
    assert found.shape == matrix.shape
    codes, scale = BASES[base].encode(w_OI)
    if base == "nf4":
        eight, largest, mean = nf4.encode_scales(scale)
        scale = nf4.SCALE_LEVELS[eight] * np.repeat(largest, 256)[: eight.size].reshape(eight.shape) + mean
        numbers = nf4.LEVELS[np.stack([codes >> 4, codes & 15], -1)].reshape(outputs, -1, 64)
        expected = (numbers * scale[..., None]).reshape(outputs, inputs)
    else:
        expected = codes * scale[:, None]
    np.testing.assert_allclose(np.asarray(found).reshape(inputs, outputs).T, expected, rtol=2e-6, atol=1e-9)
    off = np.sqrt(((expected - w_OI) ** 2).mean() / (w_OI**2).mean())
    assert error * 0.9 < off < error * 1.1


@pytest.mark.parametrize("base", QUANTIZED)
def test_devices_quantize_as_the_host_does(base):
    """The same on a mesh that shards inputs and outputs: the mean of the scales is summed in one order."""
    matrix = MATRICES[0]
    w = jnp.asarray(weights(64, 128, seed=5).T).reshape(matrix.shape)
    expected = quantized_formats.quantize(base, matrix, [np.asarray(w).reshape(matrix.sizes)])
    mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    layout = Layout(mesh, STRATEGIES["zero3"])
    sharded = jax.device_put(w, layout.stored(matrix.axes))
    for array in (w, sharded):
        found = jax.jit(lambda w: quantized_formats.quantize_on_device(base, matrix, w))(array)
        for name, one in expected.items():
            np.testing.assert_array_equal(np.asarray(found[name]), one, err_msg=name)
    arrays = {
        name: jax.device_put(expected[name], layout.stored(part.axes)) for name, part in parts_of(base, matrix).items()
    }
    assert not arrays["codes"].is_fully_replicated
    read = jax.jit(
        lambda arrays, place: quantized_formats.dequantize(base, matrix, arrays, jnp.bfloat16, place), static_argnums=1
    )
    np.testing.assert_array_equal(np.asarray(read(arrays, layout)), np.asarray(read(expected, ONE_DEVICE)))


@pytest.mark.quick
def test_blocks_that_are_not_whole():
    odd = Matrix((96, 64), ("d_model", "d_ff"), 1)
    with pytest.raises(
        ValueError, match=r"=nf4: the 96 inputs of w_up cannot be split into blocks of 64: change the size"
    ):
        quantized_formats.check_blocks("nf4", "w_up", odd)
    with pytest.raises(
        ValueError, match=r"the 128 inputs of w_q cannot be split into blocks of 64 on each of 4 devices"
    ):
        quantized_formats.check_blocks("nf4", "w_q", MATRICES[0], shards=4)
    quantized_formats.check_blocks("int8", "w_up", odd, shards=3)
