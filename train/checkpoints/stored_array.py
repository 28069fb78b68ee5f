"""An array of a checkpoint, read in pieces from disk: its checksum is that of all pieces together.

Orbax stores an array as one chunk for each shard of the devices that saved it, compressed: a stack of layers that one
device saved is a single chunk. Chunks are kept decoded while they are read from, so that each is decoded once; what is
compressed is mapped, not held. Memory: the array's own bytes and a piece, less where its chunks are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorstore

_FACTOR = np.uint32(2_654_435_762)  # of a position in the checksum of train/checkpoints/checkpoint.py
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class StoredArray:
    """`shape`, `dtype`; pieces that together are the whole array, each once and in any order, are verified with the
    last of them. Of a stack that was saved as the stages of a pipeline hold it, `shape` and pieces are in the order of
    the layers.

    Args:
      order: the layer of each row on disk, -1 for a row of none; empty where they are the layers in order.

    Raises:
      ValueError: nothing of that name, shape and dtype is there.
    """

    def __init__(
        self, folder: Path, name: str, dtype: str, shape: Sequence[int], checksum: int, order: Sequence[int] = ()
    ):
        on_disk = (len(order), *shape[1:]) if order else tuple(shape)
        context = tensorstore.Context(
            {
                # Never full: with what counts besides numbers, a limit of the array's bytes drops its only chunk.
                "cache_pool": {
                    "total_bytes_limit": 2 * math.prod(on_disk) * tensorstore.dtype(dtype).numpy_dtype.itemsize + 2**20
                },
                "file_io_mode": {"mode": "memmap"},
                "data_copy_concurrency": {"limit": 1},
            }
        )
        # Orbax writes one database of all arrays, or, asked to, a folder for each; in Zarr 2 or 3.
        place = (
            {"driver": "ocdbt", "base": folder.as_uri(), "path": f"{name}/"}
            if (folder / "manifest.ocdbt").is_file()
            else {"driver": "file", "path": f"{folder / name}/"}
        )
        self._store = tensorstore.open(
            {"driver": "auto", "kvstore": place}, context=context, read=True, open=True
        ).result()
        self.shape, self.dtype = tuple(shape), self._store.dtype.numpy_dtype
        if (self._store.shape, self.dtype.name) != (on_disk, dtype):
            raise ValueError(f"{name} is {self.dtype.name}{list(self._store.shape)}")
        self._name, self._checksum, self._sum, self._left = name, checksum, 0, math.prod(on_disk)
        layers = sorted((layer, row) for row, layer in enumerate(order) if layer >= 0)
        self._rows, self._blank = [row for _, row in layers], [row for row, layer in enumerate(order) if layer < 0]

    @property
    def is_read(self) -> bool:
        """Whether all of it was read and verified."""
        return not self._left

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """A piece: from the first to before the second index of each axis.

        Raises:
          ValueError: it is the last piece and all of them do not match the checksum, or the file is damaged.
        """
        if self._rows:
            first, last = spans[0]
            piece = np.concatenate([self._piece([(row, row + 1), *spans[1:]]) for row in self._rows[first:last]])
        else:
            piece = self._piece(spans)
        if self._left == len(self._blank) * math.prod(self.shape[1:]):  # the checksum has rows of no layer, too
            for row in self._blank:
                self._piece([(row, row + 1), *((0, size) for size in self.shape[1:])])
        if not self._left and self._sum != self._checksum:
            raise ValueError(f"{self._name} does not match its checksum")
        return piece

    def _piece(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        piece = self._store[tuple(slice(*span) for span in spans)].read().result()
        self._sum = (self._sum + _checksum(piece, spans, self._store.shape)) % 2**32
        self._left -= piece.size
        return piece


def _checksum(piece: np.ndarray, spans: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """What a piece adds to the checksum of its array."""
    place = np.zeros((1,) * piece.ndim, np.uint32)
    for axis, (start, stop) in enumerate(spans):
        stride = math.prod(shape[axis + 1 :])
        steps = (np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)).astype(np.uint32)
        place = place + steps.reshape([-1 if other == axis else 1 for other in range(piece.ndim)])
    place *= _FACTOR
    place += np.uint32(1)
    place *= piece.view(_BITS[piece.dtype.itemsize])
    return int(place.sum(dtype=np.uint32))


class Slices:
    """An array of a checkpoint, or of a stack one layer, or of that one expert, as something to be sliced: `shape`,
    `[slices]`.

    index: in the leading axes. told: a context in which errors of the disk are told as the user can mend them.
    """

    def __init__(self, array: StoredArray, told, index: Sequence[int] = ()):
        self._array, self._told = array, told
        self._before = tuple((number, number + 1) for number in index)
        self.shape = array.shape[len(self._before) :]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        spans = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        with self._told():
            found = self._array.read([*self._before, *spans])
        return found[(0,) * len(self._before)]


def whole(values: np.ndarray | Slices) -> np.ndarray:
    """All of it in memory."""
    return values[(slice(None),) * len(values.shape)]
