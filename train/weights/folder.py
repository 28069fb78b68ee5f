"""A folder of weights as Hugging Face publishes them: its config.json, index and headers are verified before any use.

Nothing in it is run or unpickled: files are JSON and safetensors, regular, and inside the folder. A safetensors file
has 8 bytes with the length N of the header, little-endian; N bytes of JSON, name -> dtype, shape, data_offsets; the
tensors, row-major and without gaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bytescope.memory.errors import one_line
from bytescope.train.source import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, MAX_JSON_BYTES, SINGLE
from bytescope.train.user_errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")  # a repository's OWNER/NAME
# The format's name of an 8-bit dtype -> the NumPy dtype.
FP8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
State = tuple[int, int]  # of a file: bytes, time of its last change in ns
SAMPLED = 1 << 16  # bytes at either end of a file's data that the fingerprint has
CHECKED = 1 << 20  # number of values that are checked at once
# Format's name of a float dtype -> the unsigned integer of its size, and the mask of its exponent bits.
EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
}  # all bits but the sign: e4m3fn has no infinity, and one NaN of each sign
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
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_NUMBER = 2**63 - 1  # in a header


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads the object in the config.json of a folder. Raises UserError if it is missing or damaged."""
    return _config(_folder(path))[0]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. dtype: the format's name, such as "BF16". start: offset of its first byte in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A verified folder. config: the object of its config.json. tensors: by name. fingerprint: hash of names, sizes,
    headers, config.json and the ends of each file. states: size and time of each file when it was verified."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    fingerprint: str
    states: Mapping[str, State]

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """Opens the folder at `path`; only config.json, index and headers are read.

        Raises:
          UserError: something is missing, truncated, damaged, or nothing that weights should be in.
        """
        root = _folder(path)
        config, text = _config(root)
        index = _index(root)
        digest = hashlib.sha256(text)
        tensors: dict[str, StoredTensor] = {}
        states: dict[str, State] = {}
        for name in sorted(set(index.values()) if index else {SINGLE}):
            file = _file(root, name)
            states[name] = _state(file)
            found, header = _header(file)
            digest.update(f"{name} {file.stat().st_size} ".encode() + header + _ends(file, 8 + len(header)))
            for tensor in found.values():
                if index and index.get(tensor.name) != name:
                    where = index.get(tensor.name)
                    raise UserError(
                        f"{file} has {_shown(tensor.name)}, which {INDEX} "
                        f"{f'has in {_shown(where)}' if where else 'lacks'}: download the folder again"
                    )
                tensors[tensor.name] = tensor
        for tensor_name, name in index.items():
            if tensor_name not in tensors:
                raise UserError(
                    f"{root / name} lacks {_shown(tensor_name)}, which {INDEX} has there: download it again"
                )
        return cls(root, config, tensors, digest.hexdigest()[:16], states)

    @classmethod
    def open_adapter(cls, path: str | Path) -> Folder:
        """Opens the folder of an adapter as peft saves it; `config` is the object of adapter_config.json.

        Raises:
          UserError: as `open`; or it holds a pickled adapter, or a model.
        """
        root = _folder(path, ADAPTER_CONFIG)
        if not os.path.lexists(root / ADAPTER):
            other = _others(root, NO_ADAPTER)
            if other:
                raise UserError(f"{root} has {other[0]} and no {ADAPTER}: {other[1]}")
        config, text = _read_json(root, ADAPTER_CONFIG)
        file = _file(root, ADAPTER)
        state = _state(file)
        tensors, header = _header(file)
        digest = hashlib.sha256(text + header + _ends(file, 8 + len(header)))
        return cls(root, config, tensors, digest.hexdigest()[:16], {ADAPTER: state})

    def read(self, name: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads these spans of a tensor, in the dtype of the file.

        Raises:
          UserError: the file has changed since it was verified, or a value is NaN or infinite.
        """
        tensor = self.tensors[name]
        state = self._same(tensor.file)
        try:
            if tensor.dtype in FP8:  # safetensors returns no NumPy arrays of these dtypes
                view = np.memmap(self.path / tensor.file, FP8[tensor.dtype], "r", tensor.start, tensor.shape)
            else:
                view = _opened(str(self.path / tensor.file), state).get_slice(name)
            piece = np.asarray(view[tuple(slice(*span) for span in spans)] if spans else view[...])
            non_finite = count_non_finite(piece, tensor.dtype) and count_non_finite(view[...], tensor.dtype)
        except Exception as error:  # SafetensorError, which is none of Python's own, and OSError
            raise UserError(
                f"{self.path / tensor.file}: {_shown(name)} cannot be read ({one_line(error)}): "
                "the file has changed or is damaged"
            ) from error
        if non_finite:
            raise UserError(
                f"{self.path / tensor.file}: {non_finite:,} of the {math.prod(tensor.shape):,} values of "
                f"{one_line(name)} are NaN or infinite: download it again, or give other weights"
            )
        return piece

    def _same(self, name: str) -> State:
        """Returns the state of a file. Raises UserError if the file has changed since it was verified: files are
        mapped, and reading behind the end of a shortened file would end the process with SIGBUS."""
        path = self.path / name
        try:
            now = _state(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        if now != self.states[name]:
            raise UserError(
                f"{path} has changed since it was verified, from {self.states[name][0]:,} bytes to "
                f"{now[0]:,}: start again once nothing writes there"
            )
        return now


def count_non_finite(array: np.ndarray, dtype: str) -> int:
    """Counts the values of an array that are NaN or infinite; 0 for integers. dtype: the array's dtype as the
    safetensors format names it, such as "BF16".

    Tests whether all exponent bits are set: NumPy's isfinite is ten times slower for 16-bit floats.
    """
    if dtype not in EXPONENTS:
        return 0
    integers, exponent = EXPONENTS[dtype]
    bits = array.view(integers).reshape(-1)
    count = 0
    for start in range(0, bits.size, CHECKED):  # in pieces: the results take as much memory as the values
        count += int(np.count_nonzero((bits[start : start + CHECKED] & integers(exponent)) == exponent))
    return count


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _opened(path: str, state: State) -> Any:
    """Maps a file. state: makes a changed file at the same path another entry of the cache."""
    from safetensors import safe_open

    return safe_open(path, "numpy")


def close() -> None:
    """Closes the files that were read last, so that their mapped pages no longer count as this process's memory."""
    _opened.cache_clear()


def _folder(path: str | Path, config: str = CONFIG) -> Path:
    root = Path(os.path.expanduser(str(path)))
    if not str(path):
        raise UserError(f"the folder of the weights is empty: give the folder that holds {config}")
    if os.path.isfile(root):
        raise UserError(f"{root} is a file: give the folder that holds {config}")
    if not os.path.isdir(root):
        weights, keys = (SINGLE, "hf: and init.folder take") if config == CONFIG else (ADAPTER, "init.adapter takes")
        if HUB_NAME.fullmatch(str(path)):
            raise UserError(
                f"there is no folder {root}: {keys} a local folder; to make one from the Hugging Face Hub: "
                f"hf download {path} --local-dir={root.name}"
            )
        raise UserError(f"there is no folder {root}: give one that holds {config} and {weights}")
    return root


def _file(root: Path, name: str) -> Path:
    """Returns the path of a file in the folder. Raises UserError unless it is a regular file inside the folder."""
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise UserError(f"{root / INDEX} names {_shown(name)}, which is not the name of a file beside it")
    path = root / name
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise UserError(f"{root} has no {_shown(name)}: download it") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is no regular file: download it")
    real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [real_root]
    if real_root.parent.name == "snapshots":  # of Hugging Face's cache, which links to its blobs
        allowed.append(Path(os.path.realpath(real_root.parents[1] / "blobs")))
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise UserError(f"{path} is a link out of the folder, to {real}: put the file itself there")
    return path


def _read_json(root: Path, name: str) -> tuple[dict[str, Any], bytes]:
    """Reads (the object in a JSON file of the folder, the bytes of the file)."""
    path = _file(root, name)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise UserError(f"{path} has {size:,} bytes: no such file is that long, download it again")
    content = path.read_bytes()
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}): download it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged (no object): download it again")
    return found, content


def _config(root: Path) -> tuple[dict[str, Any], bytes]:
    """Reads (the object of config.json, its bytes). If there is no config.json, the error names what is there
    instead."""
    if not os.path.lexists(root / CONFIG):
        other = _others(root, UNREADABLE)
        if other:
            raise UserError(f"{root} has {other[0]} and no {CONFIG}: {other[1]}")
    return _read_json(root, CONFIG)


def _index(root: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index; {} for a folder with one file."""
    if not os.path.lexists(root / INDEX):
        if os.path.lexists(root / SINGLE):
            return {}
        other = _others(root, (*UNREADABLE, UNNAMED))
        if other:
            raise UserError(f"{root} has {other[0]} and no {SINGLE}: {other[1]}")
        raise UserError(f"{root} has no {SINGLE} and no {INDEX}: download the weights")
    found = _read_json(root, INDEX)[0].get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{root / INDEX} is damaged (weight_map is no object of file names): download it again")
    return found


def _others(root: Path, kinds: Sequence[tuple[tuple[str, ...], str]]) -> tuple[str, str] | None:
    """Returns (a file that the folder has instead of weights, why it is not read); None if there is no such file."""
    try:
        names = sorted(os.listdir(root))
    except OSError:  # not ours to read
        return None
    for ends, why in kinds:
        for name in names:
            if name.endswith(ends):
                return _shown(name), why
    return None


_PICKLED = "pickle files may run code and are not read; save the model with save_pretrained(safe_serialization=True)"
# Ends of names of what people have in the place of safetensors -> why it is not read.
UNREADABLE = (
    ((ADAPTER, ADAPTER_CONFIG), "this is an adapter, not a model: give the folder of its base model"),
    (
        ("params.json", "consolidated.00.pth"),
        "Meta's own format has the rows of q and k in another order; download the files that transformers reads",
    ),
    ((".bin", ".pth", ".pt", ".ckpt", ".pkl"), _PICKLED),
    ((".gguf",), "GGUF is quantized for inference; download the safetensors of the same model"),
)
NO_ADAPTER = (
    (
        ("adapter_model.bin",),
        "pickle files may run code and are not read; save the adapter with save_pretrained(safe_serialization=True)",
    ),
    ((SINGLE, INDEX), "this is a model, not an adapter: set init.folder to it"),
)
UNNAMED = ((".safetensors",), f"several files need {INDEX}, and a single one that name")


def _header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    try:
        return read_header(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _ends(path: Path, begin: int) -> bytes:
    """Returns the first and the last bytes of a file's data, which tell two models apart that have the same header."""
    with open(path, "rb") as file:
        file.seek(begin)
        first = file.read(SAMPLED)
        file.seek(max(begin, path.stat().st_size - SAMPLED))
        return first + file.read(SAMPLED)


def _shown(name: Any) -> str:
    return one_line(repr(name))


# ---- headers of files -----------------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    """Returns (name -> tensor of a safetensors file, the bytes of its header).

    Raises:
      UserError: the file is truncated, longer than its header says, or the header is damaged. OSError: it cannot be
        read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little") if len(first) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
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
        found = dict(pairs)
        if len(found) != len(pairs):
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


def _tensor(path: Path, name: str, entry: Any, begin: int) -> tuple[StoredTensor, int]:
    """Returns (the tensor of a header's entry, the offset of its end from the end of the header)."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"{_shown(name)} lacks dtype, shape or data_offsets") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: {_shown(name)} has dtype {_shown(dtype)}: give float32, float16 or bfloat16 weights")
    if not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in whole):
        raise _damaged(path, f"shape or data_offsets of {_shown(name)} are not whole numbers")
    if math.prod(shape) * DTYPES[dtype] != stop - start:
        raise _damaged(
            path, f"{_shown(name)} is {dtype} {tuple(shape)}, and its data_offsets span {stop - start:,} bytes"
        )
    return StoredTensor(name, path.name, dtype, tuple(shape), begin + start), stop


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is truncated or damaged ({why}): download it again")
