"""Reads the protobuf wire format, to walk messages whose field numbers are known.

This module uses neither generated code nor the protobuf package, because a report must read protos of any XLA version
and skip unknown fields. The value of a field is an int (varint and fixed widths) or a `Span`, a (start, end) pair of
offsets into the data, so that large messages are walked without copies. Every read is checked against the end of its
message and raises WireError beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator

from bytescope.memory.errors import ReportError

Span = tuple[int, int]
Value = int | Span

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ReportError):
    """Raised if bytes are not the expected message."""


def fields(data: bytes, span: Span) -> Iterator[tuple[int, Value]]:
    """Yields (field number, value) of one message in order. Raises WireError if the bytes are not a field."""
    at, end = span
    while at < end:
        key = data[at]
        at += 1
        if key > 127:
            key, at = _long_varint(data, at, end, key & 127)
        wire = key & 7
        if wire == _BYTES:
            if at >= end:
                raise WireError(f"truncated at byte {at}")
            size = data[at]
            at += 1
            if size > 127:
                size, at = _long_varint(data, at, end, size & 127)
            stop = at + size
            if stop > end:
                raise WireError(f"truncated at byte {at}: a field of {size} bytes does not fit its message")
            yield key >> 3, (at, stop)
            at = stop
        elif wire == _VARINT:
            if at >= end:
                raise WireError(f"truncated at byte {at}")
            value = data[at]
            at += 1
            if value > 127:
                value, at = _long_varint(data, at, end, value & 127)
            yield key >> 3, value
        elif wire in (_FIXED64, _FIXED32):
            stop = at + (8 if wire == _FIXED64 else 4)
            if stop > end:
                raise WireError(f"truncated at byte {at}")
            yield key >> 3, int.from_bytes(data[at:stop], "little")
            at = stop
        else:
            raise WireError(f"not a protobuf field at byte {at - 1} (wire type {wire})")


def _long_varint(data: bytes, at: int, end: int, value: int) -> tuple[int, int]:
    """Reads the rest of a varint whose first seven bits are `value`. Returns (number, offset after it)."""
    shift = 7
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            break
    raise WireError(f"the varint at byte {at} does not end")


def signed(value: int) -> int:
    """Returns the value of an int64 field. Protobuf writes negative numbers as their 64-bit complement."""
    return value - (1 << 64) if value >> 63 else value


def text(data: bytes, value: Value) -> str:
    """Returns the value of a string field. Bytes that are not UTF-8 become U+FFFD. Raises WireError if the field is a
    number."""
    if isinstance(value, int):
        raise WireError("expected a string, but the field is a number")
    return data[value[0] : value[1]].decode("utf-8", "replace")


def message(value: Value) -> Span:
    """Returns the span of a sub-message field. Raises WireError if the field is a number."""
    if isinstance(value, int):
        raise WireError("expected a message, but the field is a number")
    return value


def number(value: Value) -> int:
    """Returns the value of a number field. Raises WireError if the field has bytes."""
    if not isinstance(value, int):
        raise WireError("expected a number, but the field has bytes")
    return value


def numbers(data: bytes, value: Value) -> list[int]:
    """Returns one occurrence of a repeated number field: several packed numbers, or a single number. Raises WireError
    if packed numbers are truncated."""
    if isinstance(value, int):
        return [value]
    at, end = value
    out = []
    while at < end:
        item = data[at]
        at += 1
        if item > 127:
            item, at = _long_varint(data, at, end, item & 127)
        out.append(item)
    return out


def plain(data: bytes, span: Span) -> dict[int, int]:
    """Returns field number -> value of a message's number fields. For a repeated field, the last value counts."""
    return {field: value for field, value in fields(data, span) if isinstance(value, int)}
