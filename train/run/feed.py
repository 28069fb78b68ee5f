"""Puts batches on the devices, one ahead of the step that needs them."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bytescope.train.program.program import Program
from bytescope.train.run.profile import hosted

HostBatch = dict[str, np.ndarray]


def _pieces(shape: jax.ShapeDtypeStruct) -> list[tuple[int, int]]:
    """[first row, end) of each part of a batch [..., B, L] on this process's devices, in order, without repetition."""
    indices = shape.sharding.addressable_devices_indices_map(shape.shape).values()
    return sorted({index[-2].indices(shape.shape[-2])[:2] for index in indices})


def local_rows(program: Program) -> list[slice]:
    """Rows, of each batch that is read, on this process's devices, in order, without repetition."""
    rows, pieces = program.batch.rows, _pieces(program.eval_shapes["inputs"])
    return [
        slice(micro * rows + start, micro * rows + stop)
        for micro in range(program.batch.read_steps)
        for start, stop in pieces
    ]


def held_out_rows(program: Program) -> list[slice]:
    """Rows of each held-out micro-batch on this process's devices."""
    rows = program.batch.rows
    return [piece for piece in local_rows(program) if piece.stop <= rows]


@hosted("put_on_devices")
def put(host: HostBatch, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """This process's rows as global arrays of `shapes`; returns while the transfer still runs."""

    def one(array: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
        places, held = {}, 0  # first row of a part in the batch -> in `array`
        for start, stop in _pieces(shape):
            places[start], held = held, held + stop - start

        def shard(index: Any) -> np.ndarray:  # a tuple of slices
            start, stop, _ = index[-2].indices(shape.shape[-2])
            return array[(*index[:-2], slice(places[start], places[start] + stop - start), index[-1])]

        return jax.make_array_from_callback(shape.shape, shape.sharding, shard)

    return {name: one(host[name], shape) for name, shape in shapes.items()}


def calls(program: Program, host: HostBatch) -> list[dict[str, jax.Array]]:
    """The device batches of each call of the step, from one batch as it is read: an update, or a part of one."""
    micro_steps = program.batch.read_steps
    split = {name: array.reshape(micro_steps, -1, array.shape[-1]) for name, array in host.items()}
    if program.scanned:
        return [put(split, program.batch_shapes)]
    return [
        put({name: array[micro] for name, array in split.items()}, program.batch_shapes) for micro in range(micro_steps)
    ]


def feed(program: Program, batches: Iterator[HostBatch], update: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Yields the device batches of one update after the other, from number `update` on.

    The caller asks for the next while the device is busy with the last, so that reading and transfer overlap with the
    step.
    """
    for number in itertools.count(update):
        reads = program.batch.at(number) // program.batch.read_steps
        read = list(itertools.islice(batches, reads))
        if len(read) < reads:
            return
        yield [call for host in read for call in calls(program, host)]
