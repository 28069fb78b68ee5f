"""Reads and writes the protobuf wire format, to walk messages whose field numbers are known.

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
    """Raised if bytes are not a valid protobuf message of the expected type."""


def fields(data: bytes, span: Span) -> Iterator[tuple[int, Value]]:
    """Yields (field number, value) for each field of the protobuf message at `span`, the (start, end) offsets in
    `data`. The value of a field with a number is the number; the value of any other field is the span of its bytes.
    Raises WireError if the bytes are not valid fields.
    """
    at, end = span
    while at < end:
        key = data[at]
        at += 1
        if key > 127:
            key, at = _read_long_varint(data, at, end, key & 127)
        wire = key & 7
        if wire == _BYTES:
            if at >= end:
                raise WireError(
                    f"the file is damaged or is not a protobuf: a message ends inside the field at byte {at}"
                )
            size = data[at]
            at += 1
            if size > 127:
                size, at = _read_long_varint(data, at, end, size & 127)
            stop = at + size
            if stop > end:
                raise WireError(
                    f"the file is damaged or is not a protobuf: {size} bytes at byte {at} do not fit into a message"
                )
            yield key >> 3, (at, stop)
            at = stop
        elif wire == _VARINT:
            if at >= end:
                raise WireError(
                    f"the file is damaged or is not a protobuf: a message ends inside the field at byte {at}"
                )
            value = data[at]
            at += 1
            if value > 127:
                value, at = _read_long_varint(data, at, end, value & 127)
            yield key >> 3, value
        elif wire in (_FIXED64, _FIXED32):
            stop = at + (8 if wire == _FIXED64 else 4)
            if stop > end:
                raise WireError(
                    f"the file is damaged or is not a protobuf: a message ends inside the field at byte {at}"
                )
            yield key >> 3, int.from_bytes(data[at:stop], "little")
            at = stop
        else:
            raise WireError(
                f"the file is damaged or is not a protobuf: the field at byte {at - 1} has the unknown wire type {wire}"
            )


def _read_long_varint(data: bytes, at: int, end: int, value: int) -> tuple[int, int]:
    # `value`: the seven bits of the first byte, which has been read.
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
    raise WireError(f"the file is damaged or is not a protobuf: the varint that contains byte {at} does not end")


def signed(value: int) -> int:
    """Converts the unsigned number read from an int64 field to its signed value. Protobuf encodes a negative number as
    its 64-bit complement.
    """
    return value - (1 << 64) if value >> 63 else value


def text(data: bytes, value: Value) -> str:
    """Returns the text of a string field. Invalid UTF-8 bytes become U+FFFD. Raises WireError if the field contains a
    number.
    """
    if isinstance(value, int):
        raise WireError(
            "the file is damaged or is not a protobuf: a field contains a number where a string is expected"
        )
    return data[value[0] : value[1]].decode("utf-8", "replace")


def message(value: Value) -> Span:
    """Returns the (start, end) offsets of the message that a field contains. Raises WireError if the field contains a
    number.
    """
    if isinstance(value, int):
        raise WireError(
            "the file is damaged or is not a protobuf: a field contains a number where a message is expected"
        )
    return value


def number(value: Value) -> int:
    """Returns the number that a field contains. Raises WireError if the field contains bytes."""
    if not isinstance(value, int):
        raise WireError("the file is damaged or is not a protobuf: a field contains bytes where a number is expected")
    return value


def numbers(data: bytes, value: Value) -> list[int]:
    """Returns the numbers of one occurrence of a repeated number field: a list of packed numbers, or a single number.
    Raises WireError if packed numbers are truncated.
    """
    if isinstance(value, int):
        return [value]
    at, end = value
    out = []
    while at < end:
        item = data[at]
        at += 1
        if item > 127:
            item, at = _read_long_varint(data, at, end, item & 127)
        out.append(item)
    return out


def plain(data: bytes, span: Span) -> dict[int, int]:
    """Returns field number -> value for the number fields of the message at `span`. If a field is repeated, returns its
    last value.
    """
    return {field: value for field, value in fields(data, span) if isinstance(value, int)}


def write_varint(value: int) -> bytes:
    """Serializes a number that is not negative as a protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def write_field(number: int, value: int | bytes) -> bytes:
    """Serializes one protobuf field: a number as a varint, bytes with their length. `number`: the field's number."""
    if isinstance(value, int):
        return write_varint(number << 3 | _VARINT) + write_varint(value)
    return write_varint(number << 3 | _BYTES) + write_varint(len(value)) + value
