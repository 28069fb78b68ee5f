"""A folder of weights as Hugging Face publishes it: config.json, index and headers are verified before any use.

Nothing in the folder is run or unpickled: all files are JSON or safetensors, regular, and inside the folder. A
safetensors file has 8 bytes with the length N of the header, little-endian; N bytes of JSON, name -> dtype, shape,
data_offsets; then the tensors, row-major and without gaps (https://github.com/huggingface/safetensors#format).
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

# Beginning of a model's name -> its owner on the Hugging Face Hub.
OWNERS = {
    "smollm": "HuggingFaceTB",
    "llama-": "meta-llama",
    "meta-llama-": "meta-llama",
    "qwen": "Qwen",
    "gemma-": "google",
    "mistral-": "mistralai",
    "mixtral-": "mistralai",
    "deepseek-": "deepseek-ai",
    "gpt2": "openai-community",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")  # a repository's OWNER/NAME
# Safetensors name of an 8-bit float dtype -> NumPy dtype.
FP8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
State = tuple[int, int]  # (size of a file in bytes, time of its last change in ns)
SAMPLED = 1 << 16  # bytes at each end of a file's data that are part of the fingerprint
CHECKED = 1 << 20  # number of values that are checked at a time
# Safetensors name of a float dtype -> (unsigned integer dtype of the same size, mask of the exponent bits).
EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
}  # for e4m3fn, all bits except the sign: it has no infinity, and one NaN per sign
# Safetensors name of a dtype -> bytes per element.
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
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
MAX_NUMBER = 2**63 - 1  # maximum size or offset in a header


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns the content of the folder's config.json. Raises UserError if it is missing or damaged."""
    return _read_config(_folder(path))[0]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      name: name of the tensor.
      file: name of the file.
      dtype: safetensors name of the dtype, such as "BF16".
      shape: shape on disk.
      start: offset in the file of the tensor's first byte.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's values on disk, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder of weights whose headers have been verified.

    Attributes:
      path: path of the folder.
      config: content of config.json.
      tensors: name -> tensor.
      fingerprint: hash of config.json, and of the name, size, header, first and last bytes of each file.
      states: size and modification time of each file when it was verified.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    fingerprint: str
    states: Mapping[str, State]

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """Opens the folder at `path`. Reads and verifies config.json, the index and the headers of the files.

        Raises:
          UserError: a file is missing, truncated or damaged, or the format of the weights is not supported.
        """
        root = _folder(path)
        config, text = _read_config(root)
        index = _read_index(root)
        digest = hashlib.sha256(text)
        tensors: dict[str, StoredTensor] = {}
        states: dict[str, State] = {}
        for name in sorted(set(index.values()) if index else {SINGLE}):
            file = _find_file(root, name)
            states[name] = _state(file)
            file_tensors, header = _header(file)
            digest.update(
                f"{name} {file.stat().st_size} ".encode() + header + _first_and_last_bytes(file, 8 + len(header))
            )
            for tensor in file_tensors.values():
                if index and index.get(tensor.name) != name:
                    where = index.get(tensor.name)
                    raise UserError(
                        f"{file} has the tensor {_quoted(tensor.name)}, which {INDEX} "
                        f"{f'lists in the file {_quoted(where)}' if where else 'does not list'}: "
                        "download the folder again"
                    )
                tensors[tensor.name] = tensor
        for tensor_name, name in index.items():
            if tensor_name not in tensors:
                raise UserError(
                    f"{root / name} does not contain the tensor {_quoted(tensor_name)}, which {INDEX} lists in this "
                    "file: download the file again"
                )
        return cls(root, config, tensors, digest.hexdigest()[:16], states)

    @classmethod
    def open_adapter(cls, path: str | Path) -> Folder:
        """Opens a folder of adapters that peft saved. Its `config` is the content of adapter_config.json.

        Raises:
          UserError: a file is missing, truncated or damaged, or the folder contains a pickled adapter or a model.
        """
        root = _folder(path, ADAPTER_CONFIG)
        if not os.path.lexists(root / ADAPTER):
            other = _find_unsupported_file(root, NO_ADAPTER)
            if other:
                raise UserError(f"{root} cannot be used, since it has {other[0]} and no {ADAPTER}: {other[1]}")
        config, text = _read_json(root, ADAPTER_CONFIG)
        file = _find_file(root, ADAPTER)
        state = _state(file)
        tensors, header = _header(file)
        digest = hashlib.sha256(text + header + _first_and_last_bytes(file, 8 + len(header)))
        return cls(root, config, tensors, digest.hexdigest()[:16], {ADAPTER: state})

    def read(self, name: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns a part of a tensor, in the dtype of the file. `name`: name of the tensor. `spans`: start and end of
        the part along each axis, end excluded.

        Raises:
          UserError: the file has changed since it was verified, or a value is NaN or infinite.
        """
        tensor = self.tensors[name]
        state = self._state_if_unchanged(tensor.file)
        try:
            if tensor.dtype in FP8:  # safetensors returns no NumPy arrays of these dtypes
                view = np.memmap(self.path / tensor.file, FP8[tensor.dtype], "r", tensor.start, tensor.shape)
            else:
                view = _map_file(str(self.path / tensor.file), state).get_slice(name)
            piece = np.asarray(view[tuple(slice(*span) for span in spans)] if spans else view[...])
            non_finite = count_non_finite(piece, tensor.dtype) and count_non_finite(view[...], tensor.dtype)
        except Exception as error:  # SafetensorError, which derives from Exception, or OSError
            raise UserError(
                f"{self.path / tensor.file}: {_quoted(name)} cannot be read ({one_line(error)}): "
                "the file has changed or is damaged, download it again"
            ) from error
        if non_finite:
            raise UserError(
                f"{self.path / tensor.file}: {non_finite:,} of the {math.prod(tensor.shape):,} values of "
                f"{one_line(name)} are NaN or infinite: download it again, or give other weights"
            )
        return piece

    def _state_if_unchanged(self, name: str) -> State:
        # Files are memory-mapped, and reading past the end of a file that has become shorter would end the process with
        # SIGBUS.
        path = self.path / name
        try:
            now = _state(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): download it again") from error
        if now != self.states[name]:
            raise UserError(
                f"{path} has changed since it was verified, from {self.states[name][0]:,} bytes to "
                f"{now[0]:,}: start again when no program writes to it"
            )
        return now


def count_non_finite(array: np.ndarray, dtype: str) -> int:
    """Returns the number of values of an array that are NaN or infinite; 0 if they are integers. `dtype` is the
    safetensors name of the dtype, such as "BF16".

    The exponent bits are tested, since NumPy's isfinite is ten times slower for 16-bit floats.
    """
    if dtype not in EXPONENTS:
        return 0
    integers, exponent = EXPONENTS[dtype]
    bits = array.view(integers).reshape(-1)
    count = 0
    for start in range(0, bits.size, CHECKED):  # in pieces, since the temporary results are as large as the values
        count += int(np.count_nonzero((bits[start : start + CHECKED] & integers(exponent)) == exponent))
    return count


def _state(path: Path) -> State:
    stat_result = path.stat()
    return stat_result.st_size, stat_result.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _map_file(path: str, state: State) -> Any:
    # `state` is part of the cache key, so that a file that has changed is mapped again.
    from safetensors import safe_open

    return safe_open(path, "numpy")


def close() -> None:
    """Unmaps the files that were read, so that their pages no longer count as memory of this process."""
    _map_file.cache_clear()


def _folder(path: str | Path, config: str = CONFIG) -> Path:
    root = Path(os.path.expanduser(str(path)))
    if not str(path):
        raise UserError(f"the name of the folder of weights is empty: give a folder with {config}")
    if os.path.isfile(root):
        raise UserError(f"{root} is a file: give the folder with {config}")
    if not os.path.isdir(root):
        weights, keys = (SINGLE, "hf: and init.folder") if config == CONFIG else (ADAPTER, "init.adapter")
        if HUB_NAME.fullmatch(str(path)):
            raise UserError(
                f"there is no folder {root}, and {keys} must name a local folder: download it from the Hugging Face "
                f"Hub with hf download {path} --local-dir={root.name}"
            )
        remedy = f"give a folder with {config} and {weights}"
        if HUB_NAME.fullmatch(f"OWNER/{path}"):
            owner = next((owner for name, owner in OWNERS.items() if root.name.lower().startswith(name)), "OWNER")
            remedy += f", as hf download {owner}/{path} --local-dir={root.name} writes it"
        raise UserError(f"there is no folder {root}: {remedy}")
    return root


def _find_file(root: Path, name: str) -> Path:
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise UserError(
            f"{root / INDEX} names {_quoted(name)}, which is not the name of a file in the folder: download it again"
        )
    path = root / name
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise UserError(f"{root} has no {_quoted(name)}: download the file") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a regular file: download the file again")
    real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [real_root]
    if real_root.parent.name == "snapshots":  # Hugging Face's cache has links to its blobs
        allowed.append(Path(os.path.realpath(real_root.parents[1] / "blobs")))
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise UserError(f"{path} is a link to {real}, outside the folder: replace the link by the file")
    return path


def _read_json(root: Path, name: str) -> tuple[dict[str, Any], bytes]:
    path = _find_file(root, name)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise UserError(f"{path} has {size:,} bytes, which is too large for this file: download it again")
    content = path.read_bytes()
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}): download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged (not a JSON object): download it again")
    return values, content


def _read_config(root: Path) -> tuple[dict[str, Any], bytes]:
    if not os.path.lexists(root / CONFIG):
        other = _find_unsupported_file(root, UNREADABLE)
        if other:
            raise UserError(f"{root} cannot be used, since it has {other[0]} and no {CONFIG}: {other[1]}")
    return _read_json(root, CONFIG)


def _read_index(root: Path) -> dict[str, str]:
    if not os.path.lexists(root / INDEX):
        if os.path.lexists(root / SINGLE):
            return {}
        other = _find_unsupported_file(root, (*UNREADABLE, UNNAMED))
        if other:
            raise UserError(f"{root} cannot be used, since it has {other[0]} and no {SINGLE}: {other[1]}")
        raise UserError(f"{root} has no {SINGLE} and no {INDEX}: download the weights")
    weight_map = _read_json(root, INDEX)[0].get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise UserError(f"{root / INDEX} is damaged (weight_map is not an object of file names): download it again")
    return weight_map


def _find_unsupported_file(root: Path, kinds: Sequence[tuple[tuple[str, ...], str]]) -> tuple[str, str] | None:
    try:
        names = sorted(os.listdir(root))
    except OSError:  # no permission to read the folder
        return None
    for ends, why in kinds:
        for name in names:
            if name.endswith(ends):
                return _quoted(name), why
    return None


_PICKLED = "pickle files may run code and are not read; save the model with save_pretrained(safe_serialization=True)"
# (Ends of names of files that folders have instead of safetensors, why they are not supported).
UNREADABLE = (
    ((ADAPTER, ADAPTER_CONFIG), "this is an adapter, not a model: give the folder of its base model"),
    (
        ("params.json", "consolidated.00.pth"),
        "Meta's format has the rows of q and k in another order; download the files for transformers",
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
UNNAMED = ((".safetensors",), f"several files need an {INDEX}, and a single file must be named {SINGLE}")


def _header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    try:
        return read_header(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): download it again") from error


def _first_and_last_bytes(path: Path, begin: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        first = file.read(SAMPLED)
        file.seek(max(begin, path.stat().st_size - SAMPLED))
        return first + file.read(SAMPLED)


def _quoted(name: Any) -> str:
    return one_line(repr(name))


# ---- headers of files -----------------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    """Reads the header of a safetensors file. Returns name -> tensor, and the bytes of the header.

    Raises:
      UserError: the header is damaged, or the file is shorter or longer than the header says.
      OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little") if len(first) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"the {size:,} bytes of the file are too few for a header of {max(length, 0):,} bytes")
        text = file.read(length)
    if len(text) != length:
        raise _damaged(path, "the file ends before the end of its header")
    tensors, end = [], 0
    for name, entry in _entries(path, text):
        tensor, stop = _parse_header_entry(path, name, entry, 8 + length)
        tensors.append((tensor.start, stop, tensor))
    for start, stop, tensor in sorted(tensors, key=lambda row: row[:2]):
        if start - 8 - length != end:
            raise _damaged(
                path,
                f"the bytes of tensor {_quoted(tensor.name)} begin at {start - 8 - length:,}, but the tensor before "
                f"it ends at {end:,}",
            )
        end = stop
    if 8 + length + end != size:
        raise _damaged(path, f"the file has {size:,} bytes, but its header describes {8 + length + end:,} bytes")
    return {tensor.name: tensor for _, _, tensor in tensors}, text


def _entries(path: Path, text: bytes) -> list[tuple[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{_quoted(twice)} appears twice")
        return entries

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header of the file is not a JSON object")
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _parse_header_entry(path: Path, name: str, entry: Any, begin: int) -> tuple[StoredTensor, int]:
    """Returns the tensor that an entry of a safetensors header describes, and the offset at which its data end,
    relative to the end of the header. Raises UserError if the entry is not valid. `begin`: offset in the file at which
    the header ends."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"the header entry of {_quoted(name)} lacks dtype, shape or data_offsets") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(
            f"{path}: tensor {_quoted(name)} has dtype {_quoted(dtype)}: give float32, float16 or bfloat16 weights"
        )
    if not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in whole):
        raise _damaged(path, f"the shape or the data_offsets of tensor {_quoted(name)} are not whole numbers")
    if math.prod(shape) * DTYPES[dtype] != stop - start:
        raise _damaged(
            path,
            f"tensor {_quoted(name)} is {dtype} {tuple(shape)}, which takes {math.prod(shape) * DTYPES[dtype]:,} "
            f"bytes, but its data_offsets span {stop - start:,} bytes",
        )
    return StoredTensor(name, path.name, dtype, tuple(shape), begin + start), stop


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is truncated or damaged ({why}): download it again")
