"""The header of a safetensors file, checked: what tensors it has, and that each lies where nothing else does.

Format: 8 bytes with the length N of the header, little-endian; N bytes of JSON, name -> dtype, shape, data_offsets; the
tensors, row-major and without gaps (https://github.com/huggingface/safetensors#format).
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from bytescope.memory.errors import one_line
from bytescope.train.user_errors import UserError

# Bytes of an element by the format's name of a dtype.
DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
LONGEST = 100_000_000  # bytes of a header, the format's own limit
LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `dtype` is the format's name; `start`: of its bytes, from the beginning of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """Name -> tensor of a file, and the header as it lies there.

    Raises:
      UserError: the file is truncated, longer than its header says, or the header is damaged. OSError: it cannot be
        read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(first, "little") if len(first := file.read(8)) == 8 else -1
        if not 2 <= length <= min(LONGEST, size - 8):
            raise _damaged(path, f"{size:,} bytes cannot hold a header of {max(length, 0):,}")
        text = file.read(length)
    if len(text) != length:
        raise _damaged(path, "it ends within its header")
    tensors, end = [], 0
    for name, entry in _entries(path, text):
        tensor, stop = _tensor(path, name, entry, 8 + length)
        tensors.append((tensor.start, stop, tensor))
    for start, stop, tensor in sorted(tensors, key=lambda row: row[:2]):
        if start - 8 - length != end:
            raise _damaged(
                path,
                f"the bytes of {_shown(tensor.name)} begin at {start - 8 - length:,}, not where the "
                f"tensor before it ends, at {end:,}",
            )
        end = stop
    if 8 + length + end != size:
        raise _damaged(path, f"{size:,} bytes, and its header says {8 + length + end:,}")
    return {tensor.name: tensor for _, _, tensor in tensors}, text


def _entries(path: Path, text: bytes) -> list[tuple[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{_shown(twice)} is there twice")
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise _damaged(path, "its header is no object")
    return [(name, entry) for name, entry in found.items() if name != "__metadata__"]


def _tensor(path: Path, name: str, entry: Any, begin: int) -> tuple[Tensor, int]:
    """The tensor of a header's entry, and where it ends, from the end of the header."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"{_shown(name)} lacks dtype, shape or data_offsets") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: {_shown(name)} has dtype {_shown(dtype)}: give float32, float16 or bfloat16 weights")
    if not all(type(number) is int and 0 <= number <= LARGEST for number in whole):
        raise _damaged(path, f"shape or data_offsets of {_shown(name)} are not whole numbers")
    if math.prod(shape) * DTYPES[dtype] != stop - start:
        raise _damaged(
            path, f"{_shown(name)} is {dtype} {tuple(shape)}, and its data_offsets span {stop - start:,} bytes"
        )
    return Tensor(name, path.name, dtype, tuple(shape), begin + start), stop


def _shown(value: Any) -> str:
    """A name of others, in one short line."""
    return one_line(repr(value))


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is truncated or damaged ({why}): download it again")
