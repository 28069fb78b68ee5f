"""Meshes of a fit whose layers are cut into stages of a pipeline. Pure.

Several chunks a stage have the smallest bubble, a V the smallest stash (memory/pipeline). 2, 4 and 8 stages are tried,
and one on each host; on several hosts these with tensor parallelism inside of each, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_MODE,
    MESH_FSDP,
    MESH_SEQUENCE_PARALLEL,
    MESH_STAGE,
    MESH_STRATEGY,
    MESH_TENSOR,
    MODEL_EXPERTS,
    MODEL_MOE_EVERY,
    MODEL_N_HEADS,
    MODEL_N_KV_HEADS,
    MODEL_N_LAYERS,
    MODEL_SCAN,
    OFFLOAD_PARAMS,
    OPTIMIZER_FUSED_BACKWARD,
    PIPELINE_SCHEDULE,
    PIPELINE_VIRTUAL,
)

SIZES = (2, 4, 8)
CHUNKS = 2


def stage_meshes(
    flat: Mapping[str, Any], given: Collection[str], n_devices: int, per_host: int
) -> Iterator[dict[str, str]]:
    """The keys of each mesh with stages; none where a config, or a key of the command line, cannot be combined with
    stages."""
    held = {PIPELINE_SCHEDULE, PIPELINE_VIRTUAL}.intersection(given)
    if held or (BATCH_MODE in given and flat[BATCH_MODE] != "scan") or not _allows_stages(flat):
        return
    hosts, layers = n_devices // per_host, flat[MODEL_N_LAYERS]
    sizes = sorted(size for size in {*SIZES, hosts} - {1} if n_devices % size == 0 and size <= layers)
    for size in sizes:
        chunks = CHUNKS if CHUNKS * size <= layers else 1
        yield _mesh(size, "interleaved" if chunks > 1 else "1f1b", chunks)
    folded = [size for size in sizes if CHUNKS * size <= layers]
    if folded:
        yield _mesh(folded[-1], "v", CHUNKS)
    heads = math.gcd(flat[MODEL_N_HEADS], flat[MODEL_N_KV_HEADS])
    if hosts in folded and hosts > 1 and heads % per_host == 0:
        yield {**_mesh(hosts, "interleaved", CHUNKS), MESH_TENSOR: str(per_host), MESH_SEQUENCE_PARALLEL: "true"}


def _mesh(size: int, schedule: str, chunks: int) -> dict[str, str]:
    return {
        MESH_STAGE: str(size),
        MESH_STRATEGY: "zero3",
        MESH_FSDP: "-1",
        PIPELINE_SCHEDULE: schedule,
        PIPELINE_VIRTUAL: str(chunks),
    }


def _allows_stages(flat: Mapping[str, Any]) -> bool:
    """Whether the trainer runs a config of these keys with stages."""
    refused = (flat[OPTIMIZER_FUSED_BACKWARD], flat[OFFLOAD_PARAMS], flat[MODEL_EXPERTS] and flat[MODEL_MOE_EVERY] > 1)
    return bool(flat[MODEL_SCAN]) and not any(refused)


def takes(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether a schedule runs so many micro-batches an update, and not mostly its bubble."""
    return micro_batches >= stages and (schedule != "interleaved" or micro_batches % stages == 0)
