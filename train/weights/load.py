"""Loads the files of a folder into sharded arrays, a piece of one tensor at a time.

Each process reads only the parts of its own devices, file by file in file order, and writes them into arrays that
exist already. So the host needs memory only for these arrays if they are in host memory, and for a few pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from bytescope.memory.host.process_memory import release_free_memory
from bytescope.memory.records.host_record import HostTerm
from bytescope.model import ModelConfig
from bytescope.model.frozen import dotted
from bytescope.model.quantized.quantized_formats import Matrix, parts_of
from bytescope.train.weights import folder as folders
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import Leaf, by_array, by_row, checkpoint_leaves
from bytescope.train.weights.patterns import Span, spans_of
from bytescope.train.weights.quantized import PIECE, QuantizedJob

PIECE_COPIES = 4  # as Python bytes, as an array on the device, and in a program: the transposed piece and its result
RELEASED = 64 * 2**20  # bytes read between two returns of mapped files and freed memory to the operating system
SMALL = 2**20  # maximum bytes of a shard that is assembled in host memory and sent as a whole


def load_params(
    folder: Folder,
    model: ModelConfig,
    shapes: Any,
    tell: Callable[[int, int], None] = lambda done, total: None,
    quantized: Mapping[str, tuple[str, Matrix]] = {},
    order: Mapping[str, Sequence[int]] = {},
) -> Any:
    """Loads the weights of a folder. Returns a tree of jax.Array with the structure, shapes, dtypes and shardings of
    `shapes`.

    Args:
      shapes: tree of ShapeDtypeStruct with shardings, for all or some of our parameters. Scanned blocks are stacked.
      tell: called with (bytes read so far, total bytes).
      quantized: dotted path of each weight to quantize while it is loaded -> (storage format such as "nf4", shape of
        the weight as a matrix). `shapes` has codes and scales for these weights.
      order: path of a stack of layers -> the number of the layer in each of its rows (entries of the first axis), or -1
        for an unused row. Stacks whose rows are in the order of the layers are left out.

    Raises:
      UserError: a tensor is missing, unexpected, or has a wrong shape or dtype, or a file changes while it is read.
    """
    return load_leaves(checkpoint_leaves(folder, model), model, shapes, tell, quantized, order)


def load_leaves(
    leaves: Mapping[str, Leaf],
    model: ModelConfig,
    shapes: Any,
    tell: Callable[[int, int], None] = lambda done, total: None,
    quantized: Mapping[str, tuple[str, Matrix]] = {},
    order: Mapping[str, Sequence[int]] = {},
) -> Any:
    """Loads parameters from lazy views. Returns a tree of jax.Array with the structure, shapes, dtypes and shardings of
    `shapes`.

    Args:
      leaves: our dotted path, with the number of the layer and expert -> lazy view of the parameter on disk.
      model: config of the model.
      shapes, tell, quantized, order: the arrays to make, the progress function, the weights to quantize and the rows of
        stacks, with the types that `load_params` takes.
    """
    by_target = by_row(by_array(model, leaves), order)
    flat, tree = jax.tree_util.tree_flatten_with_path(shapes)
    targets = {dotted(path): _Target(like) for path, like in flat}
    jobs: list[_Job | QuantizedJob] = []
    parts: set[str] = set()  # arrays of quantized weights
    for name, (base, matrix) in quantized.items():
        shards = {part: targets[f"{name}.{part}"].shards for part in parts_of(base, matrix)}
        parts.update(f"{name}.{part}" for part in shards)
        for index, leaf in by_target[name].items():
            jobs.append(QuantizedJob(leaf, base, matrix, shards, index[0] if index else None))
    for name, target in targets.items():
        if name not in parts:
            jobs += _make_jobs(target, by_target[name])
    jobs.sort(key=lambda job: (job.leaf.tensor.file, job.leaf.tensor.start, job.leaf.before))
    done, total = 0, sum(job.nbytes for job in jobs)
    for job in jobs:
        for number in job.write():
            if done // RELEASED != (done + number) // RELEASED:
                folders.close()  # otherwise all pages that were read would count as memory of this process
                release_free_memory()
            done += number
            tell(done, total)
    folders.close()
    release_free_memory()
    return jax.tree.unflatten(tree, [target.array() for target in targets.values()])


def host_terms(shapes: Any) -> list[HostTerm]:
    """Returns the host memory of this process while `load_params` reads a folder. `shapes`: the arrays to load, a tree
    of ShapeDtypeStruct with shardings."""
    return [
        HostTerm("load", "parameters", bytes_on_host(shapes), "shards on CPU devices or in host memory"),
        *reading_terms(),
    ]


def reading_terms() -> list[HostTerm]:
    """Returns the host memory that `load_params` needs besides the arrays that it returns."""
    return [
        HostTerm("load", "pieces of a tensor", PIECE_COPIES * PIECE, "PIECE: read, sent, and transposed on the device"),
        HostTerm("load", "pages of the weight files, mapped", RELEASED, "RELEASED: mapped files are closed after it"),
    ]


def bytes_on_host(shapes: Any) -> int:
    """Returns the bytes of arrays that this process keeps in host memory: all shards on CPU devices, and shards of
    other devices whose memory kind is a host memory. `shapes`: tree of arrays or ShapeDtypeStructs with shardings."""
    total = 0
    for leaf in jax.tree.leaves(shapes):
        sharding = leaf.sharding
        size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        in_host = sharding.memory_kind in ("pinned_host", "unpinned_host")
        total += size * sum(in_host or device.platform == "cpu" for device in sharding.addressable_devices)
    return total


class _Target:
    """A jax.Array that is being filled from a checkpoint. Each distinct shard has a copy on every device that stores
    it.
    """

    def __init__(self, like: jax.ShapeDtypeStruct):
        self.like = like
        # Arrays for host memory are assembled on the device first, since no program can write to host memory.
        kind = None if like.sharding.memory_kind in (None, "device", "unpinned_host") else "device"
        self.sharding = like.sharding.with_memory_kind(kind) if kind else like.sharding
        where: dict[tuple[Span, ...], list[jax.Device]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(like.shape).items():
            where.setdefault(tuple(spans_of(index, like.shape)), []).append(device)
        small = math.prod(self.sharding.shard_shape(like.shape)) * like.dtype.itemsize <= SMALL
        # One program creates the zeros on all devices. Compiling a program per device would take longer than reading.
        buffers = (
            {} if small else {shard.device: shard.data for shard in _zeros(like, self.sharding).addressable_shards}
        )
        self.shards = [
            _Shard(spans, devices, [buffers[device] for device in devices] if buffers else [], like.dtype)
            for spans, devices in where.items()
        ]

    def array(self) -> jax.Array:
        copies = [copy for shard in self.shards for copy in shard.copies()]
        array = jax.make_array_from_single_device_arrays(self.like.shape, self.sharding, copies)
        return array if self.sharding is self.like.sharding else jax.device_put(array, self.like.sharding)


class _Shard:
    """A shard of an array that is being filled. A small shard is a buffer in host memory until it is complete. A large
    shard is its copies on devices."""

    def __init__(self, spans: Sequence[Span], devices: Sequence[jax.Device], buffers: list[jax.Array], dtype: Any):
        self.spans, self.devices, self.buffers = spans, devices, buffers
        self.buffer = None if buffers else np.zeros([stop - start for start, stop in spans], dtype)

    def write(self, piece: np.ndarray, starts: Sequence[int]) -> None:
        """Writes a piece into all copies of the shard. `starts` is the index in the shard of the piece's first
        element.
        """
        piece = piece.reshape((1,) * (len(starts) - piece.ndim) + piece.shape)
        if self.buffer is not None:
            self.buffer[tuple(slice(start, start + size) for start, size in zip(starts, piece.shape))] = piece
            return
        # Sent with its axes in memory order, so that the host copies nothing. The device transposes it.
        by_stride = sorted(range(piece.ndim), key=lambda axis: -piece.strides[axis])
        order = tuple(by_stride.index(axis) for axis in range(piece.ndim))
        for number, device in enumerate(self.devices):
            sent = jax.device_put(piece.transpose(by_stride), device)
            self.buffers[number] = _write_transposed(self.buffers[number], sent, np.asarray(starts, np.int32), order)
        jax.block_until_ready(self.buffers)  # otherwise unfinished transfers would fill the host memory

    def copies(self) -> list[jax.Array]:
        if self.buffer is not None:
            return [jax.device_put(self.buffer, SingleDeviceSharding(device)) for device in self.devices]
        return self.buffers


def _zeros(like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    # `jnp.zeros` would create them on the first device and copy them.
    return _maker(like.shape, like.dtype, sharding)()


@functools.lru_cache(maxsize=64)  # layers that are not stacked have many arrays of one shape
def _maker(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write_transposed(whole: jax.Array, piece: jax.Array, starts: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, piece.transpose(order).astype(whole.dtype), tuple(starts))


@dataclasses.dataclass(frozen=True)
class _Job:
    """Reads one parameter of a layer or expert and writes it into one shard of an array that is stacked over layers and
    experts.

    Fields:
      leaf: lazy view of the parameter on disk.
      shard: the shard to fill.
      index: (layer, expert) of the parameter in the leading axes of the array; () if it is not stacked.
    """

    leaf: Leaf
    shard: _Shard
    index: tuple[int, ...]

    @property
    def _spans(self) -> Sequence[Span]:
        return self.shard.spans[len(self.index) :]

    @property
    def nbytes(self) -> int:
        return math.prod(stop - start for start, stop in self._spans) * self.leaf.itemsize

    def write(self) -> Iterator[int]:
        """Reads the parameter and writes it into the shard; yields the number of bytes of each piece."""
        first = [number - start for number, (start, _) in zip(self.index, self.shard.spans)]
        for spans in pieces(self._spans, PIECE // self.leaf.itemsize, self.leaf.outer):
            piece = self.leaf.read([slice(*span) for span in spans])
            begins = [start - base for (start, _), (base, _) in zip(spans, self._spans)]
            self.shard.write(piece, [*first, *begins])
            yield piece.size * self.leaf.itemsize


def pieces(spans: Sequence[Span], most: int, outer: int) -> Iterator[list[Span]]:
    """Divides a part of a tensor into pieces of at most `most` elements. Yields the (start, stop) of each piece along
    each axis.

    Args:
      spans: (start, stop) of the part along each axis.
      most: maximum number of elements of a piece.
      outer: the axis that is divided first; then the longest axis is.
    """
    sizes = [stop - start for start, stop in spans]
    if math.prod(sizes) <= most:
        yield list(spans)
        return
    axis = outer if sizes[outer] > 1 else max(range(len(sizes)), key=sizes.__getitem__)
    start, stop = spans[axis]
    middle = start + (stop - start) // 2
    for half in ((start, middle), (middle, stop)):
        yield from pieces([*spans[:axis], half, *spans[axis + 1 :]], most, outer)


def _make_jobs(target: _Target, leaves: Mapping[tuple[int, ...], Leaf]) -> list[_Job]:
    jobs = []
    for shard in target.shards:
        for index, leaf in leaves.items():
            # The leading axes of the shard are layers and experts.
            if all(start <= number < stop for number, (start, stop) in zip(index, shard.spans)):
                jobs.append(_Job(leaf, shard, index))
    return jobs
