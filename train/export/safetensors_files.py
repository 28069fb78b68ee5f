"""Safetensors files of planned tensors: headers and room for all of them first, then each tensor at its place.

Format: see train/weights/header.py. Files and index are named as transformers names them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from bytescope.train.source import INDEX, SINGLE

ALIGNED = 8  # bytes that a header's length is a multiple of


class Planned(Protocol):
    """A tensor to write; `dtype`: the format's name."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Files:
    """The files of a model in `folder`, each of at most `most` bytes of tensors unless one tensor has more.

    Their room is taken at once, so that a full disk shows before anything is computed.

    Args:
      begin: make them; else they are as `found` has it.

    Raises:
      OSError: the disk is full, or cannot be written.
    """

    def __init__(self, folder: Path, tensors: Sequence[Planned], most: int, begin: bool = True):
        self._folder = folder
        self._places: dict[str, tuple[str, int]] = {}  # tensor -> file, and its first byte there
        shards = _split(tensors, most)
        self.names = (
            [SINGLE]
            if len(shards) == 1
            else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        )
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._begins = {name: self._place(name, shard) for name, shard in zip(self.names, shards)}
        if begin:
            self._begin(tensors)

    @classmethod
    def found(cls, folder: Path, tensors: Sequence[Planned], most: int) -> Files | None:
        """The files of these tensors that are there already, begun as here; None where one is not."""
        files = cls(folder, tensors, most, begin=False)
        return files if all(_is_begun(folder / name, *begin) for name, begin in files._begins.items()) else None

    def _place(self, name: str, shard: Sequence[Planned]) -> tuple[bytes, int]:
        """(what a file begins with, its bytes in all)."""
        entries: dict = {"__metadata__": {"format": "pt"}}  # transformers asks for it
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

    def _begin(self, tensors: Sequence[Planned]) -> None:
        for name, (header, size) in self._begins.items():
            with open(self._folder / name, "wb") as file:
                file.write(header)
                file.flush()
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self.nbytes},
                "weight_map": {tensor.name: self._places[tensor.name][0] for tensor in tensors},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, tensor: Planned, pieces: Iterable[np.ndarray]) -> None:
        """Writes a tensor whose bytes are those of its pieces. Raises OSError: the disk cannot be written."""
        name, start = self._places[tensor.name]
        with open(self._folder / name, "r+b") as file:
            file.seek(start)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if (written := file.tell() - start) != tensor.nbytes:
                raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.nbytes}")

    def read(self, tensor: Planned, dtype: np.dtype) -> np.ndarray:
        """A tensor that was written. Raises OSError: the disk cannot be read."""
        name, start = self._places[tensor.name]
        with open(self._folder / name, "rb") as file:
            file.seek(start)
            return np.frombuffer(file.read(tensor.nbytes), dtype).reshape(tensor.shape)

    def sync(self) -> None:
        """Returns when all of it is on the disk."""
        for name in self.names:
            with open(self._folder / name, "rb") as file:
                os.fsync(file.fileno())


def _is_begun(path: Path, begin: bytes, size: int) -> bool:
    """Whether a file is there that begins so and has this size."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as file:
        return file.read(len(begin)) == begin


def _split(tensors: Sequence[Planned], most: int) -> list[list[Planned]]:
    """The tensors in files, in order."""
    shards: list[list[Planned]] = [[]]
    room = most
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards
