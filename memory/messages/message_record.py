"""Records of a message about memory: its form, the sizes in it, and the buffers that it lists.

`read_buffers` reads the lists of buffers of GPUs ("Buffer 3: Size: ...") and TPUs ("3. Size: ...").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from bytescope.memory.hlo.shapes import DTYPES
from bytescope.memory.units import GIB, KIB, MIB, TIB

# A printed size, such as "4.44GiB", "12.5M", "1.2 KiB", "4,237,689,856 bytes" or "0B".
SIZE = r"-?\d[\d,]*(?:\.\d+)?\s?(?:[KMGTP]i?B?|B|bytes)(?![A-Za-z])"
_SIZE = re.compile(r"(-?[\d,]+(?:\.\d+)?)\s?(\w*)")
_UNITS = {"K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": 2**50}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

# XLA's short name of a dtype -> jax's name.
_SHORT = {
    "pred": "bool",
    "bf16": "bfloat16",
    **{
        f"{short}{bits}": f"{name}{bits}"
        for short, name in (("s", "int"), ("u", "uint"), ("f", "float"))
        for bits in (2, 4, 8, 16, 32, 64)
    },
    "c64": "complex64",
    "c128": "complex128",
}
BITS = dict(DTYPES.values())
_SHAPE = re.compile(r"([a-z][a-z0-9_]*)\[([\d,<= ]*)\]")


def size_of(text: str | None, decimal: bool = False) -> int | None:
    """Returns the bytes of a printed size such as "4.44GiB"; None if the text is None or not a size. K and KiB are
    2**10 bytes; if `decimal` is True, K is 1000 bytes."""
    match = _SIZE.match(text.strip()) if text else None
    if match is None or len(match[1]) > 40:
        return None
    try:
        value = float(match[1].replace(",", ""))
    except ValueError:
        return None
    if "." not in match[1] and match[2][:1] not in _UNITS:
        return int(match[1].replace(",", ""))
    return round(value * (_DECIMAL if decimal else _UNITS).get(match[2][:1], 1)) if abs(value) < 1e30 else None


class ArrayType(NamedTuple):
    """Dtype and dimensions of an array in a message. The dtype has jax's name, such as "float32"."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int | None:
        """Size of the array without padding, in bytes; None if the dtype is unknown."""
        if self.dtype not in BITS:
            return None
        count = BITS[self.dtype]
        for dim in self.dims:
            count *= dim
        return (count + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def array_types(text: str, max_types: int = 10_000) -> list[ArrayType]:
    """Returns the array types in a text, as XLA writes them (f32[8,128]) or as jax writes them (float32[8,128]). Only
    the first `max_types` are returned."""
    found = []
    for match in _SHAPE.finditer(text):
        short = match[1]
        dtype = _SHORT.get(short) or (short if short in BITS else "")
        if not dtype and short.startswith("f8"):
            dtype = f"float8_{short[2:]}"
        dims = [dim.lstrip("<= ") for dim in match[2].split(",") if dim.strip()]
        if dtype in BITS and len(dims) < 32 and all(dim.isdigit() and len(dim) < 19 for dim in dims):
            found.append(ArrayType(dtype, tuple(map(int, dims))))
        if len(found) == max_types:
            break
    return found


@dataclasses.dataclass(frozen=True)
class ListedBuffer:
    """One of the buffers that a message lists.

    Fields:
        bytes: size with padding; None if the message does not contain it.
        array: dtype and dimensions of the array in the buffer, or of the largest array of a tuple; None if the message
            does not contain them.
        op_name: jax's name of the operation that creates the array; "" if unknown.
        source: file and line of this operation, such as "model.py:12"; "" if unknown.
        label: opcode or name of the XLA instruction that creates the array, such as "fusion".
        unpadded_bytes: size without padding; None if the message does not contain it.
        is_argument: whether the buffer is an argument of the program.
    """

    bytes: int | None = None
    array: ArrayType | None = None
    op_name: str = ""
    source: str = ""
    label: str = ""
    unpadded_bytes: int | None = None
    is_argument: bool = False


@dataclasses.dataclass(frozen=True)
class Message:
    """A message about memory in a log.

    Fields:
        form: the form of the message, a key of `message_forms.FORMS` such as "gpu_request".
        line: line of the log in which the message begins, starting at 1.
        position: position in characters at which the message begins in its passage (`log_text.Passage`).
        figures: name -> bytes of each size in the message, such as "requested", "limit", "total", "free", "in_use".
        words: name -> text of other values in the message, such as "space", "allocator" or "operation".
        buffers: the buffers that the message lists.
        quote: beginning of the message.
    """

    form: str
    line: int = 0
    position: int = 0
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: tuple[ListedBuffer, ...] = ()
    quote: str = ""


# ---- lists of buffers ------------------------------------------------------------------------------------------

_KEY = re.compile(
    rf"""(?P<start>\bBuffer\ \d+:|(?<![\w.])\d+\.\ +Size:\s+(?P<first>{SIZE}))
    |\bSize:\s+(?P<size>{SIZE})
    |\bOperator:\s+(?P<operator>.*)
    |\bEntry\ Parameter\ Subshape:\s*(?P<parameter>.*)
    |\bShape:\s*(?P<shape>.*)
    |\bUnpadded\ size:\s+(?P<unpadded>{SIZE})
    |\bExtra\ memory\ due\ to\ padding:\s+(?P<padding>{SIZE})
    |\bXLA\ [Ll]abel:\s*(?P<label>.*)
    |\bAllocation\ type:\s*(?P<allocation>.*)
    |(?P<end>={{10,}})""",
    re.VERBOSE,
)
# Keys whose values may continue on the next lines.
_LONG = ("operator", "label", "shape")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"?')
_SOURCE = re.compile(r'source_file="([^"]*)"(?:\s+source_line=(\d+))?')
# Maximum characters before a key in its line, characters of a value, and buffers of a list. XLA lists at most 20.
_MAX_PREFIX, _MAX_VALUE, _MAX_BUFFERS = 300, 4000, 500


def read_buffers(text: str) -> tuple[ListedBuffer, ...]:
    """Returns the buffers that a text lists, in the order of the text. An entry that is cut off at the beginning or end
    of the text is returned if it contains a size or a shape."""
    buffers: list[ListedBuffer] = []
    entry: dict[str, str] = {}
    last = ""

    def finish() -> None:
        nonlocal entry, last
        if any(key in entry for key in ("size", "shape", "parameter", "unpadded")) and len(buffers) < _MAX_BUFFERS:
            buffers.append(_buffer(entry))
        entry, last = {}, ""

    for line in text.split("\n"):
        found = _KEY.search(line, 0, _MAX_PREFIX)
        match = _KEY.match(line, found.start()) if found else None
        if match is None:
            if last and line.strip():
                entry[last] = (entry[last] + line.strip())[:_MAX_VALUE]
            elif not line.strip():
                last = ""
            continue
        key = match.lastgroup or ""
        if key == "end":
            finish()
        elif key in ("start", "first"):
            finish()
            if match["first"]:
                entry["size"] = match["first"]
        else:
            if key in entry:
                finish()
            entry[key] = match[key][:_MAX_VALUE]
            last = key if key in _LONG else ""
    finish()
    return tuple(buffers)


def _buffer(entry: dict[str, str]) -> ListedBuffer:
    operator, label = entry.get("operator", ""), entry.get("label", "")
    shapes = array_types(entry.get("shape") or entry.get("parameter") or "")
    if not shapes and " = " in label[:200]:  # the label is a whole instruction: "%name = shape opcode(...)"
        shapes = array_types(label.split("=", 1)[1][:200])[:1]
    array = max(shapes, key=lambda shape: shape.bytes or 0, default=None)
    unpadded, padding = size_of(entry.get("unpadded")), size_of(entry.get("padding"))
    size = size_of(entry.get("size"))
    if size is None and unpadded is not None:
        size = unpadded + (padding or 0)
    if size is None and array is not None and "parameter" not in entry:
        size = array.bytes
    name, source = _OP_NAME.search(operator), _SOURCE.search(operator)
    where = ""
    if source and source[1]:
        where = source[1] + (f":{source[2]}" if source[2] else "")
    return ListedBuffer(
        bytes=size,
        array=array,
        op_name=name[1].replace('\\"', '"') if name else "",
        source=where,
        label=re.split(r"[ =(]", label.strip().lstrip("%"), maxsplit=1)[0],
        unpadded_bytes=unpadded,
        is_argument="parameter" in entry
        or entry.get("allocation", "").strip().lower() in ("parameter", "argument", "arguments"),
    )
