"""Writes the folder of a model: checks that OUT may be written, fills safetensors files, and moves the folder to OUT.

Each file gets its header and its full size first; then each tensor is written at its offset. train/weights/folder.py
describes the format. The files and the index have the names that transformers gives them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bytescope.memory.errors import disk_remedy
from bytescope.train.checkpoints.workdir import require_utf8
from bytescope.train.source import INDEX, SINGLE, holds_model
from bytescope.train.user_errors import UserError
from bytescope.train.weights.leaves import READABLE

ALIGNED = 8  # the length of a header in bytes is a multiple of this


def refuse_used(out: Path, force: bool) -> None:
    """Raises UserError if the output folder `out` may not be written.

    It may be written if it does not exist or is empty, or if it contains a model and `force` is True. Its path must be
    valid UTF-8.
    """
    require_utf8(out)
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is not a folder: give a new or empty folder")
    if not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"{out} is not empty: give a new or empty folder, or --force to replace the model in it")
    if not holds_model(out):
        raise UserError(f"{out} contains no model, and --force replaces only models: give another folder")


def move_into_place(partial: Path, out: Path) -> None:
    """Moves the finished folder `partial` to `out`. An old folder at `out` is deleted only after the new one is in
    place.
    """
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def disk_errors_explained(out: Path) -> Iterator[None]:
    """Turns an OSError in the `with` block into a UserError of one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written or read ({error.strerror or error}): "
            f"{disk_remedy(error)}choose another folder; nothing was left there"
        ) from error


# Safetensors name of a dtype that is written -> NumPy dtype.
DTYPES = {**READABLE, "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """A tensor that `Files` can write.

    Attributes:
      name: its name in the safetensors file.
      dtype: the safetensors name of the dtype, such as "BF16".
      shape: its shape on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's values on disk, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Files:
    """The safetensors files of a model.

    The files get their full size when they are created, so that a full disk is noticed before anything is computed.

    Args:
      folder: the folder of the files.
      tensors: the tensors, in the order in which they are stored.
      most: maximum bytes of tensors per file. A larger tensor has a file of its own.

    Raises:
      OSError: the disk is full or cannot be written.
    """

    def __init__(self, folder: Path, tensors: Sequence[TensorToWrite], most: int):
        self._folder = folder
        self._places: dict[str, tuple[str, int]] = {}  # tensor -> (file, offset of its first byte)
        shards = _split_into_files(tensors, most)
        self.names = (
            [SINGLE]
            if len(shards) == 1
            else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        )
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        for name, shard in zip(self.names, shards):
            self._create(name, *self._assign_to_file(name, shard))
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self.nbytes},
                "weight_map": {tensor.name: self._places[tensor.name][0] for tensor in tensors},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _assign_to_file(self, name: str, shard: Sequence[TensorToWrite]) -> tuple[bytes, int]:
        """Assigns the tensors in `shard` to the file `name` and records the offset of each. Returns the file's header,
        and its size in bytes.
        """
        entries: dict = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        for tensor in shard:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNED)
        for tensor in shard:
            self._places[tensor.name] = name, 8 + len(header) + entries[tensor.name]["data_offsets"][0]
        return len(header).to_bytes(8, "little") + header, 8 + len(header) + end

    def _create(self, name: str, header: bytes, size: int) -> None:
        with open(self._folder / name, "wb") as file:
            file.write(header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)

    def write(self, tensor: TensorToWrite, pieces: Iterable[np.ndarray]) -> None:
        """Writes a tensor into its file, from consecutive pieces. Raises OSError if the disk cannot be written."""
        name, start = self._places[tensor.name]
        with open(self._folder / name, "r+b") as file:
            file.seek(start)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if (written := file.tell() - start) != tensor.nbytes:
                raise ValueError(
                    f"{tensor.name} has {tensor.nbytes} bytes, but {written} bytes were written for it: "
                    "pass all pieces of the tensor"
                )

    def sync(self) -> None:
        """Waits until the operating system has written all weight files of the folder to disk (fsync)."""
        for name in self.names:
            with open(self._folder / name, "rb") as file:
                os.fsync(file.fileno())


def _split_into_files(tensors: Sequence[TensorToWrite], most: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    room = most
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards
