"""Saves and restores checkpoints with Orbax: asynchronous, atomic, and verified by checksums when they are read.

Orbax renames a finished checkpoint into place, so an interruption leaves either the whole checkpoint or none. It does
not notice a flipped byte, so each checkpoint has one checksum per array, computed on the device and independent of the
mesh. A state that does not match its checksums is damaged. The first checkpoint of a run is read back before training
continues.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from bytescope.memory.errors import one_line
from bytescope.memory.host.process_memory import host_phase, release_free_memory
from bytescope.train.checkpoints.saved_state import GB, complete, portable, write_limit
from bytescope.train.checkpoints.stored_array import StoredArray
from bytescope.train.launch.failures import silence_library_log
from bytescope.train.launch.processes import ALONE, Processes
from bytescope.train.launch.runtime import captured_stderr
from bytescope.train.pipeline.stages import LAYERS, Order, describe_reordered, reorder
from bytescope.train.source import CHECKPOINTS
from bytescope.train.step.optimizer.host_offload import fetch
from bytescope.train.step.state import TrainState
from bytescope.train.user_errors import UserError

# Orbax's own metadata of a checkpoint. Orbax reads the metadata of all checkpoints before it lists one.
_METADATA = "_CHECKPOINT_METADATA"
_METADATA_SHAPE = {
    "item_handlers": (dict, str),
    "metrics": (dict,),
    "performance_metrics": (dict,),
    "init_timestamp_nsecs": (int,),
    "commit_timestamp_nsecs": (int,),
    "custom_metadata": (dict,),
}
_METRICS_SHAPE = {"eval_loss": (int, float)}
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# Maximum seconds for reading back the values of a run's first checkpoint. The remaining arrays are only opened.
READ_BACK_S = 10.0
_PIECE_BYTES = 64 * 2**20  # maximum bytes of an array that are read at once


def _checksum(x: jax.Array) -> jax.Array:
    """Returns the checksum of an array, a uint32: the sum modulo 2**32 of the elements' bit patterns, each multiplied
    by an odd number that depends on the element's position."""
    bits = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (place * jnp.uint32(2_654_435_762) + jnp.uint32(1)), dtype=jnp.uint32)


@jax.jit
def _checksum_on_device(leaf: jax.Array) -> jax.Array:
    return _checksum(fetch(leaf))


def checksums(state: Any) -> jax.Array:
    """Returns one uint32 checksum per leaf of `state`, [leaves] in tree order. Checksums do not depend on the
    mesh, nor on whether a leaf is in device or host memory.

    The leaves are summed one after the other. XLA for CPUs materializes the products of a sum, so that all leaves at
    once would need the bytes of the whole state; leaves in host memory may not fit the device together.
    """
    return jnp.stack([jax.block_until_ready(_checksum_on_device(leaf)) for leaf in jax.tree.leaves(state)])


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of a run.

    Fields:
      step: number of optimizer updates done.
      sequences: number of sequences consumed.
    """

    step: int
    sequences: int


def describe(state: Any) -> dict[str, str]:
    """Returns the dtype and shape of every leaf: path of the leaf in the tree -> text such as "float32[4,8]"."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "")
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _first_difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    path = min((path for path, _ in saved.items() ^ wanted.items()), default="")
    if not path:
        return ""
    if path not in saved:
        return f"{path} is missing"
    if path not in wanted:
        return f"{path} is not in this program"
    return f"{path} is {saved[path]}, not {wanted[path]}"


def _describe_damage(error: Exception) -> str:
    # Missing memory or file descriptors are no damage.
    if "RESOURCE_EXHAUSTED" in str(error):
        raise error
    return one_line(error) or type(error).__name__


def _held_out_loss(metrics: Any) -> float:
    # Infinity if the metrics are damaged: Orbax never finds this checkpoint to be the best.
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return loss if isinstance(loss, int | float) else math.inf


def _has_json_types(path: Path, shape: Mapping[str, tuple[type, ...]], required: bool = False) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    for key, types in shape.items():
        value = content.get(key)
        if type(value) not in types and (required or value is not None):
            return False
    return True


def _read_from_disk(folder: Path, seconds: float) -> None:
    """Checks a checkpoint for damage: compares values with checksums for at most `seconds`, then opens all arrays.

    Needs no device; host memory must have room for the largest array. Raises the errors of Orbax, tensorstore and json.
    """
    deadline = time.monotonic() + seconds
    meta = ocp.JsonCheckpointHandler().restore(folder / "meta")
    for (path, described), checksum in zip(meta["arrays"].items(), meta["checksums"], strict=True):
        name = ".".join(re.findall(r"[^.\[\]']+", path))  # .opt_state[0].mu['w_head']: opt_state.0.mu.w_head
        dtype, _, sizes = described.rstrip("]").partition("[")
        array = StoredArray(folder / "state", name, dtype, [int(size) for size in sizes.split(",") if size], checksum)
        if not array.shape:
            array.read([])
            continue
        rest = [(0, size) for size in array.shape[1:]]
        rows = max(_PIECE_BYTES // max(math.prod(array.shape[1:]) * array.dtype.itemsize, 1), 1)
        for first in range(0, array.shape[0], rows):
            if time.monotonic() > deadline:
                break
            array.read([(first, min(first + rows, array.shape[0])), *rest])
    # Opens every array like a restore. This is last, because its background tasks print errors later if it fails.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        handler.metadata(folder / "state")


class Checkpoints:
    """Saves and restores the checkpoints of the run in `workdir`. The newest `keep` checkpoints and the one with the
    lowest held-out loss are kept.

    Every process of the run calls every method, in the same order. Each process writes and reads its own shards.
    `processes`: the processes of the run. `state`: shapes and shardings of the training state, which limit the memory
    of a save (`write_limit`); without them, Orbax's own limit is used, 96 GB.

    Raises:
      UserError: `keep` is below 1.
    """

    def __init__(self, workdir: Path, keep: int, processes: Processes = ALONE, state: TrainState | None = None):
        if keep < 1:
            raise UserError(f"train.keep={keep}: keep at least 1 checkpoint, or a run cannot be resumed")
        self.root, self.aside, self._processes = workdir / CHECKPOINTS, workdir / "damaged", processes
        policies = [
            preservation_policy.LatestN(keep),
            preservation_policy.BestN(
                n=1, get_metric_fn=_held_out_loss, reverse=True, keep_checkpoints_without_metrics=False
            ),
        ]
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            best_fn=_held_out_loss,
            best_mode="min",
            enable_async_checkpointing=True,
            create=True,
        )
        # Done before Orbax lists the checkpoints.
        self._damage_notes = processes.from_first(self._repair_listing() if processes.first else None)
        silence_library_log()
        limit = {} if state is None else {"save_concurrent_gb": write_limit(state, jax.process_count()) // GB}
        self._manager = ocp.CheckpointManager(
            self.root.absolute(),
            options=self._options,
            item_handlers={"state": ocp.StandardCheckpointHandler(**limit), "meta": ocp.JsonCheckpointHandler()},
        )
        self._inode = self.root.stat().st_ino
        self._was_read = False  # True once a checkpoint of this run was read back

    def _require_same_folder(self, cause: Exception | None = None) -> None:
        if not self._processes.first:
            return
        steps = self._manager.all_steps()
        if self.root.is_dir() and (
            self.root.stat().st_ino == self._inode  # some network file systems change inodes
            or not steps
            or any((self.root / str(step)).is_dir() for step in steps)
        ):
            return
        # Orbax would create a new folder.
        raise UserError(
            f"{self.root} was deleted or moved during the run: nothing more can be saved. Move the run directory back "
            "and run the same command again, or choose another --workdir"
        ) from cause

    @contextlib.contextmanager
    def _checking_folder(self) -> Iterator[None]:
        self._require_same_folder()
        try:
            yield
        except Exception as error:
            self._require_same_folder(error)
            raise
        self._require_same_folder()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order. All processes use the list of process 0."""
        return self._processes.from_first(sorted(self._manager.all_steps()))

    @host_phase("save")
    def save(self, state: Any, position: Position, eval_loss: float | None = None, order: Order = LAYERS) -> None:
        """Starts writing a checkpoint of `state`. Returns once the arrays are copied from the device, so that `state`
        may be donated.

        The first checkpoint of a run is read back, and the method waits until that is done.

        Args:
          eval_loss: the held-out loss in nats per token, None if the step has no evaluation.
          position: number of updates done and sequences consumed.
          order: order of the rows of stacked layers: name of a stack -> layer index of each row, -1 for an unused row;
            {} for model order.

        Raises:
          UserError: the first checkpoint cannot be read back, or the checkpoint folder was deleted or moved.
        """
        if not self._manager.is_saving_in_progress():
            release_free_memory()  # memory freed after the previous checkpoint was written
        state = portable(state)
        meta = {
            **dataclasses.asdict(position),
            "checksums": np.asarray(checksums(state)).tolist(),
            "arrays": describe(state),
            "order": {stack: list(rows) for stack, rows in order.items()},
        }
        with self._checking_folder():
            self._manager.save(
                position.step,
                metrics=None if eval_loss is None else {"eval_loss": eval_loss},
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)),
            )
        if not self._was_read:
            self._read_back(position.step)

    def _read_back(self, step: int) -> None:
        """Waits until the checkpoint of a step is written, then reads it from disk. If that fails, moves the checkpoint
        aside and raises UserError.
        """
        self.wait()
        damage = ""
        if self._processes.first:
            with captured_stderr() as complaints:
                try:
                    _read_from_disk(self._manager.directory / str(step), READ_BACK_S)
                except Exception as error:  # Orbax, tensorstore and json raise many kinds
                    damage = _describe_damage(error)
                complaints.drop = bool(damage)
        damage = self._processes.from_first(damage)
        if damage:
            aside = self._processes.from_first(str(self._set_aside(step) if self._processes.first else ""))
            self._manager.reload()
            raise UserError(
                f"checkpoint {step} in {self.root} was written but cannot be read back ({damage}). The run stopped, "
                f"and no checkpoint was saved. The damaged one is in {aside}. Choose another --workdir, if possible "
                "on another disk"
            )
        self._was_read = True

    @host_phase("restore")
    def restore(self, abstract: Any, warn: Callable[[str], None], order: Order = LAYERS) -> tuple[Any, Position] | None:
        """Returns the state and position of the newest undamaged checkpoint; None if there is none.

        The checkpoint may have been written with another mesh, pipeline or accumulation. The only frozen parameters in
        the state are router biases. A damaged checkpoint is moved aside, never deleted. Then the previous checkpoint is
        tried.

        Args:
          abstract: shapes and shardings of the state to return.
          warn: function that is called with a line of text for each damaged checkpoint.
          order: the wanted order of the rows of stacked layers: name of a stack -> layer index of each row, -1 for an
            unused row; {} for model order.

        Raises:
          UserError: the newest checkpoint was written with another model or optimizer.
        """
        for note in self._damage_notes:
            warn(note)
        steps = self.steps()
        while steps:
            read = self._restore(steps[-1], portable(abstract), order)
            if not isinstance(read, str):
                self._was_read = True
                return complete(read[0], abstract), read[1]
            aside = self._processes.from_first(str(self._set_aside(steps[-1]) if self._processes.first else ""))
            self._manager.reload()
            warn(f"checkpoint {steps[-1]} is damaged ({read}); moved to {aside}, trying the previous one")
            steps = self.steps()
        return None

    def _restore(self, step: int, wanted: Any, order: Order) -> tuple[Any, Position] | str:
        """Restores the checkpoint of a step. Returns (state, number of updates and of sequences consumed). If any
        process finds the checkpoint damaged, returns a description of the damage instead.

        `wanted`: shapes and shardings of the saved part of the state. `order`: the order of the layers in stacks.

        Raises UserError if it was written with another model or optimizer.
        """
        # Reads without the manager, whose restore ends with a barrier: a process that can read would wait forever for
        # a process that cannot.
        folder = self._manager.directory / str(step)
        state, damage = None, ""
        with captured_stderr() as complaints:
            try:
                meta = ocp.JsonCheckpointHandler().restore(folder / "meta")
                position = Position(int(meta["step"]), int(meta["sequences"]))
                arrays, sums, written = dict(meta["arrays"]), meta["checksums"], meta.get("order", {})
                as_written = describe_reordered(wanted, order, written)
                difference = _first_difference(arrays, describe(as_written))
                if difference:
                    raise UserError(
                        f"checkpoint {step} in {self.root} was written with another model or optimizer ({difference}): "
                        "choose another --workdir"
                    )
                with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
                    state = handler.restore(folder / "state", args=ocp.args.StandardRestore(as_written))
            except UserError:
                raise
            except Exception as error:  # Orbax, tensorstore and json raise many kinds on damaged files
                damage = _describe_damage(error)
            complaints.drop = bool(damage)
        damages = [text for text in self._processes.gather(damage) if text]
        if damages:
            return damages[0]
        if position.step != step or np.asarray(checksums(state)).tolist() != sums:
            return "its arrays do not match their checksums"
        return reorder(state, written, order, wanted), position

    def _set_aside(self, step: int) -> Path:
        self.aside.mkdir(exist_ok=True)
        candidates = (self.aside / f"{step}.{number}" for number in itertools.count(1))
        target = next(path for path in candidates if not path.exists())
        (self.root / str(step)).rename(target)
        return target

    def _repair_listing(self) -> list[str]:
        """Removes damaged files that prevent Orbax from listing the checkpoints. Returns one line of text for each
        file."""
        notes = []
        for path in sorted(self.root.glob("[0-9]*/metrics/metrics")):
            if not _has_json_types(path, _METRICS_SHAPE, required=True):
                step = path.parts[-3]
                notes.append(
                    f"checkpoint {step} is damaged (its metrics cannot be read); moved to {self._set_aside(int(step))}"
                )
        for path in sorted(self.root.glob(f"[0-9]*/{_METADATA}")):
            if not _has_json_types(path, _METADATA_SHAPE):  # it contains no data of this run
                path.unlink()
                notes.append(
                    f"checkpoint {path.parts[-2]}: its {_METADATA} was damaged and is removed; its arrays are still "
                    "verified by their checksums"
                )
        return notes

    @host_phase("save")
    def wait(self) -> None:
        """Waits until every started save is complete.

        Raises the error of a failed save, or UserError if the checkpoint folder was deleted or moved.
        """
        with self._checking_folder():
            self._manager.wait_until_finished()
        release_free_memory()  # of compressed chunks
        self._processes.gather(None)  # process 0 renames the folder last

    @host_phase("save")
    def close(self) -> None:
        """Waits until every started save is complete, then ends the writer threads."""
        self._manager.close()
