"""Puts batches on the devices, one update ahead of the step that needs them, and evaluates held-out batches."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bytescope.train.data.batches import Data, heldout_batches
from bytescope.train.program.program import Program
from bytescope.train.run.profile import hosted
from bytescope.train.step.state import Tally, TrainState

HostBatch = dict[str, np.ndarray]


def _local_row_ranges(shape: jax.ShapeDtypeStruct) -> list[tuple[int, int]]:
    # (first row, row after the last) of each range; replicated rows occur once.
    indices = shape.sharding.addressable_devices_indices_map(shape.shape).values()
    return sorted({index[-2].indices(shape.shape[-2])[:2] for index in indices})


def local_rows(program: Program) -> list[slice]:
    """Returns the rows (sequences) of each host batch that this process's devices need, in order and without
    duplicates. A host batch contains the sequences of one update."""
    slices = []
    for micro in range(program.batch.accumulation):
        first = micro * program.batch.rows
        for start, stop in _local_row_ranges(program.eval_shapes["inputs"]):
            slices.append(slice(first + start, first + stop))
    return slices


def held_out_rows(program: Program) -> list[slice]:
    """Returns the rows (sequences) of each held-out micro-batch that this process's devices need."""
    rows = program.batch.rows
    return [piece for piece in local_rows(program) if piece.stop <= rows]


@hosted("put_on_devices")
def put(host: HostBatch, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Transfers this process's rows of a batch to its devices. Returns name -> global array. The transfer may still be
    running.

    Args:
      host: name -> this process's rows, in host memory.
      shapes: name -> the abstract global array to make.
    """
    return {name: _put_array(host[name], shape) for name, shape in shapes.items()}


def _put_array(array: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    places, rows = {}, 0  # first row of a part in the global batch -> its row in `array`
    for start, stop in _local_row_ranges(shape):
        places[start] = rows
        rows += stop - start

    def shard(index: Any) -> np.ndarray:  # a tuple of slices
        start, stop, _ = index[-2].indices(shape.shape[-2])
        return array[(*index[:-2], slice(places[start], places[start] + stop - start), index[-1])]

    return jax.make_array_from_callback(shape.shape, shape.sharding, shard)


def calls(program: Program, host: HostBatch) -> list[dict[str, jax.Array]]:
    """Transfers a host batch to the devices. Returns the device batches, one for each call of the step. The host batch
    contains the sequences of one update."""
    micro_steps = program.batch.accumulation
    split = {name: array.reshape(micro_steps, -1, array.shape[-1]) for name, array in host.items()}
    if program.scanned:
        return [put(split, program.batch_shapes)]
    batches = []
    for micro in range(micro_steps):
        batches.append(put({name: array[micro] for name, array in split.items()}, program.batch_shapes))
    return batches


def feed(program: Program, batches: Iterator[HostBatch]) -> Iterator[list[dict[str, Any]]]:
    """Yields the device batches of each update: a list with one batch for each call of the step.

    Ask for the next update while the devices compute the current one. Reading and transfer then overlap with the step.
    `batches`: batches in host memory, one for each update.
    """
    for host in batches:
        yield calls(program, host)


def held_out_loss(
    program: Program, data: Data, state: TrainState, stopping: Callable[[], bool], working: Callable[[], None]
) -> tuple[float, int] | None:
    """Evaluates on the held-out data. Returns (loss in nats per token, number of tokens), or None if the run is stopped
    before the end.

    Args:
      program: the training program.
      data: the training and held-out data.
      state: the training state.
      stopping: function that returns True if the run is to stop.
      working: function that is called before each batch.
    """
    total: Tally | None = None
    batches = heldout_batches(
        data,
        rows=program.batch.rows,
        row_slices=held_out_rows(program),
        sequences=program.config.train.eval_sequences or None,
    )
    for host in batches:
        if stopping():
            return None
        working()
        tally = program.evaluate(state.params, put(host, program.eval_shapes), state.frozen)
        # At most one batch is queued ahead of the devices: hundreds starved the threads of simulated devices.
        total = tally if total is None else jax.tree.map(jax.numpy.add, jax.block_until_ready(total), tally)
    assert total is not None  # held-out data is never empty
    loss, tokens = (float(x) for x in jax.device_get((total.loss, total.tokens)))
    return loss / max(tokens, 1.0), int(tokens)
