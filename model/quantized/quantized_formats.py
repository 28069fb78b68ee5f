"""Storage formats of the blocks' frozen weights: the arrays that a weight is stored as.

BASES has one row for each value of `lora.base`. FORMATS also has the formats of folders that are already quantized.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bytescope.model.placement import Axes, Placement
from bytescope.model.quantized import groups, nf4

CHUNK = 2**18  # elements that one host thread quantizes at once, so that they fit its caches


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The shape of a weight that is multiplied with activations as a matrix [inputs, outputs].

    Fields:
      shape: all dimensions, inputs first.
      axes: the logical axis of each dimension.
      inputs: the number of leading dimensions that the product contracts.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: int

    @property
    def sizes(self) -> tuple[int, int]:
        """(number of inputs, number of outputs) of the weight as a matrix."""
        return math.prod(self.shape[: self.inputs]), math.prod(self.outputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The sizes of the dimensions that are not contracted."""
        return self.shape[self.inputs :]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Description of an array that stores a quantized weight or its scales. Contracted dimensions are merged into one,
    which has the logical axis of the first.

    Fields:
      shape: its dimensions.
      dtype: its dtype.
      axes: the logical axis of each dimension, None if it is not sharded.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Format:
    """A storage format of quantized weights. A weight is stored as several arrays, such as codes and scales, in dicts
    by array name.

    Fields:
      summary: a one-line description.
      block: number of inputs that share a scale; 0 if all inputs of an output share one.
      parts: shape of the weight -> the shape, dtype and axes of each stored array.
      on_device: weights [inputs, outputs] -> the stored arrays, with output dimensions flattened.
      decode: the stored arrays -> float32 weights [inputs, ...]. `...` are the output dimensions of the arrays.
    """

    summary: str
    block: int
    parts: Callable[[Matrix], dict[str, ArraySpec]]
    on_device: Callable[[jax.Array], dict[str, jax.Array]]
    decode: Callable[[Mapping[str, jax.Array]], jax.Array]


@dataclasses.dataclass(frozen=True)
class Base(Format):
    """A storage format for the frozen weights below LoRA adapters (config key `lora.base`). Its functions quantize a
    weight on the host while it is loaded, one range of outputs after the other.

    Fields:
      encode: weights [some outputs, inputs] -> codes and scales of these outputs.
      finish: codes and scales of all outputs -> the stored arrays, in the shapes that `Format.parts` gives.
    """

    encode: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    finish: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]


def _nf4_parts(matrix: Matrix) -> dict[str, ArraySpec]:
    (inputs, outputs), axes = matrix.sizes, (matrix.axes[0], *matrix.axes[matrix.inputs :])
    scales = inputs // nf4.BLOCK
    return {
        "codes": ArraySpec((inputs // 2, *matrix.outputs), jnp.uint8, axes),
        "scales": ArraySpec((scales, *matrix.outputs), jnp.uint8, axes),
        "scale_blocks": ArraySpec((nf4.scale_blocks(scales * outputs),), jnp.float32, (None,)),
        "scale_mean": ArraySpec((), jnp.float32, ()),
    }


def _nf4_finish(codes_OP: np.ndarray, scale_OB: np.ndarray) -> dict[str, np.ndarray]:
    scales, largest, mean = nf4.encode_scales(scale_OB)
    return {"codes": codes_OP.T, "scales": scales.T, "scale_blocks": largest, "scale_mean": mean}


def _nf4_on_device(w_IO: jax.Array) -> dict[str, jax.Array]:
    codes, scale_BO = nf4.encode_on_device(w_IO)
    scales, largest, mean = nf4.encode_scales(scale_BO.T, jnp)
    return {"codes": codes, "scales": scales.T, "scale_blocks": largest, "scale_mean": mean}


def _nf4_decode(parts: Mapping[str, jax.Array]) -> jax.Array:
    scale = nf4.decode_scales(parts["scales"], parts["scale_blocks"], parts["scale_mean"])
    # The barrier decodes each scale once. Fused with the rest, a scale would be decoded for each of its 64 weights.
    return nf4.decode(parts["codes"], jax.lax.optimization_barrier(scale))


# 8-bit weights with one scale per output, round(127 w / largest) (Dettmers et al. 2022, arXiv 2208.07339, section 2):
# the paper's vector-wise quantization, for weights only. Activations stay in 16 bits. The paper's outlier columns are
# not needed, because they handle quantized activations.
INT8_MAX, INT8_STEP = np.float32(127), np.float32(1 / 127)


def encode_int8(w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes weights [outputs, inputs] to 8-bit integers. Returns codes int8 [outputs, inputs] and scales float32
    [outputs].

    The scale of an output is its largest magnitude divided by 127; 0 if all its weights are 0.
    """
    x = w_OI.astype(np.float32, order="C")
    largest = np.maximum(x.max(-1), -x.min(-1))
    x *= (INT8_MAX / np.where(largest > 0, largest, 1))[:, None]
    return np.rint(x, out=x).astype(np.int8), largest * INT8_STEP


def _int8_on_device(w_IO: jax.Array) -> dict[str, jax.Array]:
    x = w_IO.astype(jnp.float32)
    largest = jnp.abs(x).max(0)
    codes = jnp.round(x * (INT8_MAX / jnp.where(largest > 0, largest, 1))[None]).astype(jnp.int8)
    return {"codes": codes, "scales": largest * INT8_STEP}


def _int8_decode(parts: Mapping[str, jax.Array]) -> jax.Array:
    return parts["codes"].astype(jnp.float32) * parts["scales"][None]


def _int8_parts(matrix: Matrix) -> dict[str, ArraySpec]:
    axes = (matrix.axes[0], *matrix.axes[matrix.inputs :])
    return {
        "codes": ArraySpec((matrix.sizes[0], *matrix.outputs), jnp.int8, axes),
        "scales": ArraySpec(matrix.outputs, jnp.float32, axes[1:]),
    }


def _groups_parts(size: int, matrix: Matrix) -> dict[str, ArraySpec]:
    inputs, axes = matrix.sizes[0], (matrix.axes[0], *matrix.axes[matrix.inputs :])
    of_group = (inputs // size, *matrix.outputs)
    return {
        "codes": ArraySpec((inputs // 2, *matrix.outputs), jnp.uint8, axes),
        "zeros": ArraySpec(of_group, jnp.uint8, axes),
        "scales": ArraySpec(of_group, jnp.float16, axes),
    }


def _groups_on_device(size: int, w_IO: jax.Array) -> dict[str, jax.Array]:
    codes, zeros, scales = groups.encode(w_IO.astype(jnp.float32), size)
    return {"codes": groups.pack(codes), "zeros": zeros, "scales": scales}


# Value of `lora.base` -> its format; None if weights stay unquantized.
BASES: Mapping[str, Base | None] = {
    "bf16": None,
    "nf4": Base(
        "4-bit NormalFloat, scales of blocks of 64 in 8 bits",
        nf4.BLOCK,
        _nf4_parts,
        _nf4_on_device,
        _nf4_decode,
        nf4.encode,
        _nf4_finish,
    ),
    "int8": Base(
        "8 bits, one scale per output",
        0,
        _int8_parts,
        _int8_on_device,
        _int8_decode,
        encode_int8,
        lambda codes_OI, scale_O: {"codes": codes_OI.T, "scales": scale_O},
    ),
}
# BASES and the formats that `bytescope export --awq` and AWQ write, one per group size.
FORMATS: Mapping[str, Format | None] = {
    **BASES,
    **{
        f"int4_g{size}": Format(
            f"4 bits, scale and zero point of groups of {size}",
            size,
            partial(_groups_parts, size),
            partial(_groups_on_device, size),
            lambda parts: groups.decode(groups.unpack(parts["codes"]), parts["zeros"], parts["scales"]),
        )
        for size in groups.SIZES
    },
}


def format_of(name: str) -> Format:
    """Returns the storage format `name`, a row of FORMATS. Raises ValueError if `name` is a format of unquantized
    weights."""
    row = FORMATS[name]
    if row is None:
        formats = ", ".join(filter(FORMATS.get, FORMATS))
        raise ValueError(f"the format {name} stores weights unquantized: choose a quantized format, one of {formats}")
    return row


def check_blocks(base: str, name: str, matrix: Matrix, shards: int = 1) -> None:
    """Raises ValueError if the inputs of a weight cannot be divided into whole quantization blocks on each of `shards`
    devices.

    `base`: the storage format. `name`: the weight's name in the message. `matrix`: its shape.
    """
    block, inputs = format_of(base).block or 1, matrix.sizes[0]
    if inputs % (block * shards):
        per_device, cause = (f" on each of {shards} devices", "the mesh") if shards > 1 else ("", "the size")
        setting, remedy = (f"lora.base={base}", ", or set lora.base=int8") if base in BASES else (base, "")
        raise ValueError(
            f"{setting}: the {inputs} inputs of {name} cannot be split into blocks of {block}{per_device}: "
            f"change {cause}{remedy}"
        )


def parts_of(base: str, matrix: Matrix) -> dict[str, ArraySpec]:
    """Returns the arrays that store a weight in the format `base`: array name -> shape, dtype and axes. `matrix`: the
    shape of the weight."""
    return format_of(base).parts(matrix)


def quantize(base: str, matrix: Matrix, pieces: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Quantizes a weight on the host. Returns its stored arrays by name, such as codes and scales.

    Args:
      base: the storage format, a row of FORMATS.
      matrix: the shape of the weight.
      pieces: consecutive ranges of outputs of the weight, [inputs, some outputs], in any float dtype. Only one piece is
        in memory unquantized at a time.
    """
    row = BASES[base]
    if row is None:
        raise ValueError(f"lora.base={base} stores weights unquantized: choose a quantized format")
    done: list[tuple[np.ndarray, np.ndarray]] = []
    at_once = max(CHUNK // matrix.sizes[0], 1)
    with ThreadPoolExecutor() as pool:  # NumPy's loops release the interpreter lock and run in parallel
        for piece_IO in pieces:
            w_OI = piece_IO.T
            done += pool.map(row.encode, [w_OI[at : at + at_once] for at in range(0, len(w_OI), at_once)])
    arrays = row.finish(*map(np.concatenate, zip(*done)))
    return {name: arrays[name].reshape(part.shape) for name, part in row.parts(matrix).items()}


def quantize_on_device(base: str, matrix: Matrix, w: jax.Array) -> dict[str, jax.Array]:
    """Quantizes a weight on its device. Returns its stored arrays by name, such as codes and scales. The result is the
    same on every mesh.

    `base`: the storage format. `matrix`: the shape of the weight.
    """
    arrays = format_of(base).on_device(w.reshape(matrix.sizes))
    return {name: arrays[name].reshape(part.shape) for name, part in format_of(base).parts(matrix).items()}


def dequantize(
    base: str, matrix: Matrix, arrays: Mapping[str, jax.Array], dtype: DTypeLike, place: Placement
) -> jax.Array:
    """Returns a quantized weight in `dtype` and its original shape. Under ZeRO-3 devices gather the quantized codes,
    which are smaller than the weight.

    Args:
      base: the storage format, a row of FORMATS.
      matrix: the shape of the weight.
      arrays: the arrays that store it, by name.
      place: shards arrays over the mesh.
    """
    row = format_of(base)
    whole = {name: place.weight(arrays[name], part.axes) for name, part in row.parts(matrix).items()}
    return row.decode(whole).astype(dtype).reshape(matrix.shape)
