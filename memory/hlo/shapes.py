"""Shapes of HLO values: dtype, dimensions, tuple structure, and unpadded bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.wire import Span

Index = tuple[int, ...]

# PrimitiveType: number -> (name, bits).
DTYPES = {
    1: ("bool", 8),
    2: ("int8", 8),
    3: ("int16", 16),
    4: ("int32", 32),
    5: ("int64", 64),
    6: ("uint8", 8),
    7: ("uint16", 16),
    8: ("uint32", 32),
    9: ("uint64", 64),
    10: ("float16", 16),
    11: ("float32", 32),
    12: ("float64", 64),
    15: ("complex64", 64),
    16: ("bfloat16", 16),
    18: ("complex128", 128),
    19: ("float8_e5m2", 8),
    20: ("float8_e4m3fn", 8),
    21: ("int4", 4),
    22: ("uint4", 4),
    23: ("float8_e4m3b11fnuz", 8),
    24: ("float8_e5m2fnuz", 8),
    25: ("float8_e4m3fnuz", 8),
    26: ("int2", 2),
    27: ("uint2", 2),
    28: ("float8_e4m3", 8),
    29: ("float8_e3m4", 8),
    32: ("float4_e2m1fn", 4),
    33: ("float8_e8m0fnu", 8),
}
_TUPLE = 13
_MAX_NESTING = 32
_MAX_RANK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class HloShape:
    """The shape of an array or of a tuple.

    Fields:
        dtype: dtype of the array, "" for a tuple.
        dims: dimensions of the array.
        memory_space: number of the memory space that holds the array; 5 is the host.
        parts: shapes of the elements of a tuple, None for an array.
        bits: size of one array element in bits.
    """

    dtype: str = ""
    dims: tuple[int, ...] = ()
    memory_space: int = 0
    parts: tuple[HloShape, ...] | None = None
    bits: int = 0

    def leaf(self, index: Index) -> HloShape:
        """Returns the shape of the tuple element at an index, which has one number per level of nested tuples; the
        empty shape for an invalid index.
        """
        shape = self
        for i in index:
            if shape.parts is None or not 0 <= i < len(shape.parts):
                return HloShape()
            shape = shape.parts[i]
        return shape

    @property
    def elements(self) -> int:
        """Number of elements of an array; 0 for tuples, tokens and unknown types."""
        if not self.dtype:
            return 0
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def bytes(self) -> int:
        """Size of an array in bytes, without padding."""
        return (self.elements * self.bits + 7) // 8


def read_shape(data: bytes, span: Span, depth: int = 0) -> HloShape:
    """Parses the ShapeProto at `span` of `data`. `depth`: number of tuples around the shape. Raises WireError if it is
    damaged.
    """
    if depth > _MAX_NESTING:
        raise wire.WireError(
            f"the program is damaged: a tuple shape is nested more than {_MAX_NESTING} levels deep; dump it again"
        )
    element, space = 0, 0
    dims: tuple[int, ...] = ()
    parts: list[HloShape] = []
    for field, value in wire.fields(data, span):
        if field == 2:
            element = wire.number(value)
        elif field == 3:
            dims += tuple(wire.signed(dim) for dim in wire.numbers(data, value))
        elif field == 4:
            parts.append(read_shape(data, wire.message(value), depth + 1))
        elif field == 5:
            space = wire.plain(data, wire.message(value)).get(8, 0)
    if len(dims) > _MAX_RANK:
        raise wire.WireError(
            f"the program is damaged: an array has {len(dims)} dimensions, the maximum is {_MAX_RANK}; dump it again"
        )
    if element == _TUPLE:
        return HloShape(parts=tuple(parts))
    dtype, bits = DTYPES.get(element, ("", 0))
    return HloShape(dtype, tuple(max(dim, 0) for dim in dims), space, None, bits)


def leaves(shape: HloShape, index: Index = ()) -> Iterator[tuple[Index, HloShape]]:
    """Yields (index, shape) of every array in a shape, which may be a nested tuple. `index`: prefix of all indices."""
    if shape.parts is None:
        yield index, shape
    else:
        for i, part in enumerate(shape.parts):
            yield from leaves(part, (*index, i))
