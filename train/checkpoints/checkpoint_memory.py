"""Predicts the host memory of saving and restoring checkpoints, and finds restores that read the same bytes many times.

The predictions are computed from the shapes and shardings of the training state. No array is read, written or
allocated, so the devices need not be present. The functions named below are in Orbax 0.12
(orbax/checkpoint/_src/serialization).

Save: before `save` returns, `transfer_arrays_to_host` copies shards from the devices to host memory: the shards that
this process has to write. On a CPU, the function takes views instead of copies, except for a replicated array, of which
each replica copies and writes a slice. A thread then compresses the shards. The compressed chunks stay in host memory
until they are written to a file (`async_serialize_from_host`). `save_concurrent_gb` limits the bytes of these chunks
(`checkpoint.write_limit`).

Restore: `_read_and_create_array` reads each different shard of a process once, into a buffer in host memory
(`_read_shard`). The buffer is copied to all devices that hold this shard. All arrays are requested at once;
`restore_concurrent_gb` limits the bytes of these buffers. Each thread of tensorstore decodes one chunk at a time: the
part of an array that one device wrote. A decoded chunk stays in host memory until the process has copied its part of
the chunk. These copies wait until the other requested chunks are decoded, so if a process needs only a part of each
chunk, the decoded chunks add up.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bytescope.memory.host.host_ledger import expect, ledger
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_record import Finding
from bytescope.memory.report.host_notice import resident_term
from bytescope.memory.units import human
from bytescope.train.checkpoints.saved_state import portable, shard_bytes, write_limit
from bytescope.train.step.state import TrainState

# Orbax's `StandardCheckpointHandler`: maximum bytes that one process reads at once.
READ_LIMIT = 96 * 10**9
# Compressed bytes of a chunk, relative to the chunk: zstd on the mantissas of float32 parameters and moments.
_COMPRESSED = 0.92
# Chunks in memory during a save, relative to the limit of Orbax: malloc keeps a part of the chunks that are written and
# freed. Measured with the limit of 1 GB: 1.0 for a state of 1.6 GiB, 1.9 for 5.6 GiB.
_KEPT_CHUNKS = 1.4
# Bytes that the process takes after the compilation besides arrays, measured in runs of a model of 80M parameters on
# the CPU (Orbax 0.12, tensorstore 0.1.86, November 2026): by tensorstore's threads and caches, and by the input
# pipeline, metrics and logs of the updates before a save.
_TENSORSTORE, _TRAINING_LOOP = 60 * 2**20, 90 * 2**20
# Minimum bytes that a node reads too much, and minimum ratio to the bytes that it needs, of a finding.
_MIN_EXCESS, _MIN_RATIO = 2**30, 2

# Path of a saved array, such as "params.w_head" -> shape of its chunks on disk.
Chunks = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class ArrayShare:
    """The bytes of one array of a checkpoint that one process, and all processes of its node, hold, read and write. All
    fields except `path` and `sliced` are bytes.

    Fields:
      path: dotted path of the array, such as "params.w_head".
      shard: one shard.
      on_devices: all shards on the devices of the process; equal shards (replicas) count several times.
      read: the different shards on the devices of the process; a restore reads each of them once.
      chunk: one chunk on disk, without compression.
      decoded: all chunks on disk that overlap the shards of the process; a restore decodes whole chunks.
      written: the part of the array that the process writes in a save.
      sliced: True if the array is replicated and each replica writes a slice of it.
      read_by_node: sum of `read` over the processes of a node.
      needed_by_node: the different shards on the devices of a node, each counted once.
    """

    path: str
    shard: int
    on_devices: int
    read: int
    chunk: int
    decoded: int
    written: int
    sliced: bool
    read_by_node: int
    needed_by_node: int


def array_shares(
    saved: Any, processes: int = 1, per_node: int = 1, chunks: Chunks | None = None
) -> tuple[ArrayShare, ...]:
    """Returns, for each array of a checkpoint, the bytes that process 0 and its node hold, read and write. No other
    process needs more bytes.

    Args:
      saved: the arrays of the training state that are in a checkpoint, as ShapeDtypeStructs with shardings.
      processes: number of processes of the run. All have the same number of devices, in the order of the device ids.
      per_node: number of processes on one node.
      chunks: chunk shapes of the checkpoint to restore; None if the checkpoint was saved with the mesh of `saved`, so
        that each chunk is a shard.
    """
    shares = []
    leaves = jax.tree_util.tree_leaves_with_path(saved)
    # Shardings in host memory have a mesh without devices if the devices are described (`host_offload.on_host`).
    meshes = [mesh for _, leaf in leaves if isinstance(mesh := getattr(leaf.sharding, "mesh", None), jax.sharding.Mesh)]
    for path, leaf in leaves:
        name = ".".join(re.findall(r"[^.\[\]']+", jax.tree_util.keystr(path)))
        sharding = leaf.sharding
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            sharding = jax.sharding.NamedSharding(meshes[0], sharding.spec)
        placed = sharding.devices_indices_map(leaf.shape)
        boxes = [_box(placed[device], leaf.shape) for device in sorted(placed, key=lambda device: device.id)]
        count = max(len(boxes) // processes, 1)  # devices of a process
        own, shard = boxes[:count], shard_bytes(leaf)
        node = [set(boxes[first : first + count]) for first in range(0, count * per_node, count)]
        replicas = len(boxes) // len(set(boxes))
        sizes = leaf.sharding.shard_shape(leaf.shape)
        stored = (chunks or {}).get(name, sizes)
        chunk = math.prod(stored) * leaf.dtype.itemsize
        sliced = replicas > 1 and shard > 0 and any(size % replicas == 0 for size in sizes)
        shares.append(
            ArrayShare(
                path=name,
                shard=shard,
                on_devices=shard * count,
                read=shard * len(set(own)),
                chunk=chunk,
                decoded=chunk * _touched(set(own), stored),
                written=shard * count // replicas if sliced else shard * len(set(own)),
                sliced=sliced,
                read_by_node=shard * sum(len(boxes_of_process) for boxes_of_process in node),
                needed_by_node=shard * len(set().union(*node)),
            )
        )
    return tuple(shares)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _touched(boxes: set[tuple[tuple[int, int], ...]], chunk: Sequence[int]) -> int:
    """Returns the number of different chunks of an array that overlap at least one of the boxes. boxes: each box has
    (first index, end index) per axis. chunk: shape of a chunk."""
    touched: set[tuple[int, ...]] = set()
    for box in boxes:
        touched.update(
            itertools.product(*(range(a // max(size, 1), -(-b // max(size, 1))) for (a, b), size in zip(box, chunk)))
        )
    return len(touched)


def stored_chunks(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Returns the chunk shapes of a checkpoint from Orbax's metadata: dotted path of an array -> shape of its chunks.
    Returns None if the metadata cannot be read.

    folder: the folder of the checkpoint's arrays, with a file `array_metadatas/process_N` for each process that saved
    the checkpoint.
    """
    try:
        rows = [
            row["array_metadata"]
            for path in folder.glob("array_metadatas/process_*")
            for row in json.loads(path.read_bytes())["array_metadatas"]
        ]
        return {row["param_name"]: tuple(row["chunk_shape"]) for row in rows} or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_terms(state: TrainState, platform: str, processes: int = 1, overlaps: bool = False) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of host memory that one process holds while it saves a checkpoint, in the
    phase "save". Python and the libraries are not included.

    Args:
      state: shapes and shardings of the training state.
      platform: platform of the devices, such as "cuda" or "cpu".
      processes: number of processes of the run.
      overlaps: True if updates go on while a checkpoint is written. Terms for the phase "train" are then returned too.
    """
    shares = array_shares(portable(state), processes)
    written = sum(share.written for share in shares)
    sliced = sum(share.written for share in shares if share.sliced)
    limit = min(_KEPT_CHUNKS * write_limit(state, processes), written)
    terms = [
        HostTerm(
            "save",
            "compressed chunks that are not yet written",
            int(_COMPRESSED * limit),
            "Orbax async_serialize_from_host: at most save_concurrent_gb of chunks at once",
        )
    ]
    if platform == "cpu":
        terms.append(_state_on_cpu("save", state, processes))
        copied, why = sliced, "Orbax get_replica_slices: each replica of a replicated array copies one slice of it"
    else:
        copied, why = written, "Orbax transfer_arrays_to_host: all shards that this process writes"
    terms.append(HostTerm("save", "copy of the state for the checkpoint", copied, why))
    if overlaps:
        # A donated array whose view is being written is not overwritten: the update writes a new one.
        kept = sum(share.on_devices for share in shares) if platform == "cpu" else copied
        terms.append(HostTerm("train", "copy of the state for the checkpoint", kept, why))
        terms.append(dataclasses.replace(terms[0], phase="train"))
    return tuple(terms)


def saves_overlap(steps: int, every: int, done: int | None) -> bool:
    """Returns True if a run has at least one checkpoint that is written while updates go on. These are all checkpoints
    except the last one, and except the first one of a new run, which is read back before updates go on.

    Args:
      steps: number of updates of the run.
      every: number of updates between two checkpoints; 0 for a checkpoint at the end only.
      done: number of updates in the checkpoint from which the run continues; None for a new run.
    """
    if every <= 0:
        return False
    return (steps - 1) // every - (done or 0) // every > (0 if done else 1)


def restore_terms(
    state: TrainState, platform: str, processes: int = 1, chunks: Chunks | None = None, threads: int | None = None
) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of host memory that one process holds while it restores a checkpoint, in the
    phase "restore". Python and the libraries are not included.

    Args:
      state: shapes and shardings of the training state.
      platform: platform of the devices, such as "cuda" or "cpu".
      processes: number of processes of the run.
      chunks: chunk shapes of the checkpoint (`stored_chunks`); None if the checkpoint was saved with the mesh of
        `state`.
      threads: number of threads that decode chunks, which is the number of CPU cores of the node; None if unknown:
        the prediction then assumes that all arrays are decoded at once, with one chunk of each array.
    """
    shares = array_shares(portable(state), processes, chunks=chunks)
    largest = sorted((share.chunk for share in shares), reverse=True)[:threads]
    read, decoded = sum(share.read for share in shares), sum(share.decoded for share in shares)
    terms = [
        HostTerm(
            "restore",
            "chunks that are being decoded",
            max(int((1 + _COMPRESSED) * min(sum(largest), READ_LIMIT)), min(decoded, READ_LIMIT) - read),
            "tensorstore: each of its threads, one per CPU core, holds a chunk both compressed and decoded; decoded "
            "chunks stay until the process has copied its part of them",
        )
    ]
    if platform == "cpu":
        terms.append(_state_on_cpu("restore", state, processes))
    else:
        terms.append(
            HostTerm(
                "restore",
                "arrays on their way to the devices",
                min(read, READ_LIMIT),
                "Orbax _read_shard: each distinct shard of the process is read once, within restore_concurrent_gb",
            )
        )
    return tuple(terms)


def _state_on_cpu(phase: str, state: TrainState, processes: int) -> HostTerm:
    size = sum(share.on_devices for share in array_shares(state, processes))
    return HostTerm(phase, "training state", size, "shapes and shardings; the device is the CPU")


def restore_findings(
    state: TrainState, processes: int, per_node: int, chunks: Chunks | None = None
) -> tuple[Finding, ...]:
    """Returns findings if the processes of a node together read or decode far more bytes in a restore than the arrays
    on the node have; otherwise ().

    Args:
      state: shapes and shardings of the training state.
      processes: number of processes of the run. per_node: number of processes on one node.
      chunks: chunk shapes of the checkpoint to restore; None if the checkpoint was saved with the mesh of `state`.
    """
    shares = array_shares(portable(state), processes, per_node, chunks)
    needed = sum(share.needed_by_node for share in shares)
    read = sum(share.read_by_node for share in shares)
    found = []
    if read - needed >= _MIN_EXCESS and read >= _MIN_RATIO * needed:
        found.append(
            Finding(
                "replicated_restore",
                read - needed,
                f"restoring a checkpoint takes {human(read)} of host memory on each node: each of the {per_node} "
                f"processes holds {human(read // per_node)}, because the arrays are replicated over the processes; "
                f"one copy of these arrays takes {human(needed)} per node",
                "run one process per node, which reads each array once for all of its devices; or shard the state "
                "(mesh.strategy=zero3)",
            )
        )
    decoded = sum(share.decoded for share in shares)
    own = sum(share.read for share in shares)
    if (decoded - own) * per_node >= _MIN_EXCESS and decoded >= _MIN_RATIO * own:
        found.append(
            Finding(
                "whole_file_restore",
                (decoded - own) * per_node,
                f"restoring the checkpoint decodes {human(decoded * per_node)} of chunks on each node for "
                f"{human(own * per_node)} of arrays: the chunks are larger than the shards of this mesh, and each "
                f"process decodes {human(decoded)} of whole chunks but keeps only {human(own)}",
                "restore with fewer processes per node, or continue with the mesh that saved the checkpoint",
            )
        )
    return tuple(found)


def expect_saves(state: TrainState, platform: str, processes: int, overlaps: bool) -> None:
    """Predicts the host memory that saving a checkpoint takes, and records its parts (terms) with `expect`. Call this
    function after the step is compiled and before the training state exists, because the resident memory at the time of
    the call is one of the terms.

    Args:
      state: shapes and shardings of the training state.
      platform: platform of the devices, such as "cuda" or "cpu".
      processes: number of processes of the run.
      overlaps: True if updates go on while a checkpoint is written.
    """
    loop = HostTerm("save", "tensorstore and the training loop", _TENSORSTORE + _TRAINING_LOOP, "measured")
    expect([resident_term("save"), loop, *save_terms(state, platform, processes, overlaps)])


def expect_restore(state: TrainState, platform: str, processes: int, folder: Path) -> tuple[Finding, ...]:
    """Predicts the host memory that restoring a checkpoint takes, and records its parts (terms) with `expect`. Returns
    the findings about the restore (`restore_findings`). Call this function before the training state exists, because
    the resident memory at the time of the call is one of the terms.

    Args:
      state: shapes and shardings of the training state.
      platform: platform of the devices, such as "cuda" or "cpu".
      processes: number of processes of the run.
      folder: the folder of the checkpoint to restore.
    """
    chunks = stored_chunks(folder / "state")
    opened = HostTerm("restore", "tensorstore", _TENSORSTORE, "measured")
    expect([resident_term("restore"), opened, *restore_terms(state, platform, processes, chunks, os.cpu_count())])
    return restore_findings(state, processes, ledger().processes, chunks)
