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
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bytescope.memory.errors import one_line
from bytescope.train.source import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, MAX_JSON_BYTES, SINGLE
from bytescope.train.user_errors import UserError

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


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns the content of the folder's config.json. Raises UserError if it is missing or damaged."""
    return _read_json(_folder(path), CONFIG)[0]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      name: name of the tensor.
      file: name of the file.
      dtype: safetensors name of the dtype, such as "BF16".
      shape: shape on disk.
      start: offset in the file of the tensor's first byte.
      nbytes: size of the tensor's values in bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


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
        config, text = _read_json(root, CONFIG)
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
          UserError: a file is missing, truncated or damaged.
        """
        root = _folder(path, ADAPTER_CONFIG)
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
        weights = SINGLE if config == CONFIG else ADAPTER
        repository = str(path) if str(path).count("/") == 1 else f"OWNER/{root.name}"
        raise UserError(
            f"there is no folder {root}: give a folder with {config} and {weights}, as hf download {repository} "
            f"--local-dir={root.name} writes it"
        )
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


def _read_index(root: Path) -> dict[str, str]:
    if not os.path.lexists(root / INDEX):
        if os.path.lexists(root / SINGLE):
            return {}
        raise UserError(
            f"{root} has no {SINGLE} and no {INDEX}: download the safetensors of the model (pickle files, which may "
            "run code, GGUF files and adapters are not read), or save it with save_pretrained(safe_serialization=True)"
        )
    weight_map = _read_json(root, INDEX)[0].get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise UserError(f"{root / INDEX} is damaged (weight_map is not an object of file names): download it again")
    return weight_map


def _header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    """Returns name -> tensor of a safetensors file, and the bytes of its header, which the library has verified: the
    tensors fill the file without gaps, and their shapes and dtypes agree with their sizes."""
    from safetensors import safe_open

    try:
        safe_open(str(path), "numpy")
        with open(path, "rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
    except Exception as error:  # SafetensorError, which derives from Exception, or OSError
        raise UserError(f"{path} is truncated or damaged ({one_line(error)}): download it again") from error
    tensors = {}
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            place = 8 + len(text) + start
            tensors[name] = StoredTensor(name, path.name, entry["dtype"], tuple(entry["shape"]), place, stop - start)
    return tensors, text


def _first_and_last_bytes(path: Path, begin: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        first = file.read(SAMPLED)
        file.seek(max(begin, path.stat().st_size - SAMPLED))
        return first + file.read(SAMPLED)


def _quoted(name: Any) -> str:
    return one_line(repr(name))
