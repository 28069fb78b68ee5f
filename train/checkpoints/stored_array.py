"""Reads an array of a checkpoint from disk in pieces, and verifies the checksum over all pieces.

Orbax stores an array as one compressed chunk for each shard of the devices that saved it: a stack of layers that one
device saved is a single chunk. Decoded chunks are cached, so that each is decoded once. Compressed data is mapped, not
loaded. Memory: at most the array's own bytes and one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorstore

_FACTOR = np.uint32(2_654_435_762)  # factor of a position in the checksum of train/checkpoints/checkpoint.py
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class StoredArray:
    """An array of a checkpoint that is read in pieces.

    Pieces may be read in any order, each once. Once every element was read, the checksum of the whole array is verified
    and the decoded chunks are freed. The
    attributes `shape` and `dtype` describe the array. For a stack saved in the order of pipeline stages, shape and
    pieces are in model order.

    Args:
      folder: folder with the arrays of the checkpoint.
      name: dotted path of the array in the saved state.
      dtype, shape: expected dtype and shape of the array, with stacked layers in model order.
      checksum: the recorded checksum of the whole array, a uint32.
      order: the layer index of each row on disk, -1 for an unused row; empty if the rows are the layers in order.

    Raises:
      ValueError: the folder has no array of this name, shape and dtype.
    """

    def __init__(
        self, folder: Path, name: str, dtype: str, shape: Sequence[int], checksum: int, order: Sequence[int] = ()
    ):
        on_disk = (len(order), *shape[1:]) if order else tuple(shape)
        context = tensorstore.Context(
            {
                # Twice the array's bytes: a limit of exactly the array's bytes would evict its only chunk.
                "cache_pool": {
                    "total_bytes_limit": 2 * math.prod(on_disk) * tensorstore.dtype(dtype).numpy_dtype.itemsize + 2**20
                },
                "file_io_mode": {"mode": "memmap"},
                "data_copy_concurrency": {"limit": 1},
            }
        )
        # Orbax writes one database for all arrays, or optionally one folder per array, in Zarr 2 or 3.
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
            raise ValueError(
                f"the stored array {name} is {self.dtype.name}{list(self._store.shape)}, but the checkpoint lists it "
                f"as {dtype}{list(on_disk)}: one of the two files is damaged"
            )
        self._name, self._checksum, self._sum, self._left = name, checksum, 0, math.prod(on_disk)
        layers = sorted((layer, row) for row, layer in enumerate(order) if layer >= 0)
        self._rows, self._blank = [row for _, row in layers], [row for row, layer in enumerate(order) if layer < 0]

    @property
    def is_read(self) -> bool:
        """True if the whole array was read and verified."""
        return not self._left

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns a piece of the array. `spans`: for each axis the first index and the end index (exclusive).

        Raises:
          ValueError: the file is damaged, or the array is now completely read and its checksum does not match.
        """
        if self._rows:
            first, last = spans[0]
            piece = np.concatenate([self._piece([(row, row + 1), *spans[1:]]) for row in self._rows[first:last]])
        else:
            piece = self._piece(spans)
        if self._left == len(self._blank) * math.prod(self.shape[1:]):  # unused rows are part of the checksum
            for row in self._blank:
                self._piece([(row, row + 1), *((0, size) for size in self.shape[1:])])
        if not self._left and self._sum != self._checksum:
            raise ValueError(f"the array {self._name} does not match its checksum: its values are damaged")
        if self.is_read:
            del self._store  # frees the decoded chunks
        return piece

    def _piece(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        piece = self._store[tuple(slice(*span) for span in spans)].read().result()
        self._sum = (self._sum + _checksum(piece, spans, self._store.shape)) % 2**32
        self._left -= piece.size
        return piece


def _checksum(piece: np.ndarray, spans: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """Returns the checksum, a uint32, of a piece of an array. The checksums of all pieces add up to the checksum of the
    array, modulo 2**32.

    `spans`: [start, stop) of the piece along each axis. `shape`: shape of the whole array.
    """
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
    """An array of a checkpoint, or one layer or expert of a stack, that supports `shape` and slicing.

    Args:
      array: the array on disk.
      report_damage: context manager that turns read errors into a UserError with the remedy.
      index: indices in the leading axes, such as the layer and the expert.
    """

    def __init__(self, array: StoredArray, report_damage, index: Sequence[int] = ()):
        self._array, self._report_damage = array, report_damage
        self._before = tuple((number, number + 1) for number in index)
        self.shape = array.shape[len(self._before) :]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        spans = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        with self._report_damage():
            values = self._array.read([*self._before, *spans])
        return values[(0,) * len(self._before)]


def whole(values: np.ndarray | Slices) -> np.ndarray:
    """Returns all values of an array. If `values` are `Slices`, an array on disk that is read by slicing, they are read
    from the checkpoint. A numpy array is returned as a view.
    """
    return values[(slice(None),) * len(values.shape)]
