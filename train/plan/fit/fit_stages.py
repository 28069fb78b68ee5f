"""Meshes of a fit whose layers are cut into stages of a pipeline. Pure.

Several chunks a stage have the smallest bubble, a V the smallest stash (train/pipeline). 2, 4 and 8 stages are tried,
and one on each host; on several hosts these with tensor parallelism inside of each, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

SIZES = (2, 4, 8)
CHUNKS = 2


def stage_meshes(
    flat: Mapping[str, Any], given: Collection[str], n_devices: int, per_host: int
) -> Iterator[dict[str, str]]:
    """The keys of each mesh with stages; none where a config, or a key of the command line, cannot be combined with
    stages."""
    held = {"pipeline.schedule", "pipeline.virtual"}.intersection(given)
    if held or ("batch.mode" in given and flat["batch.mode"] != "scan") or not _allows_stages(flat):
        return
    hosts, layers = n_devices // per_host, flat["model.n_layers"]
    sizes = sorted(size for size in {*SIZES, hosts} - {1} if n_devices % size == 0 and size <= layers)
    for size in sizes:
        chunks = CHUNKS if CHUNKS * size <= layers else 1
        yield _mesh(size, "interleaved" if chunks > 1 else "1f1b", chunks)
    folded = [size for size in sizes if CHUNKS * size <= layers]
    if folded:
        yield _mesh(folded[-1], "v", CHUNKS)
    heads = math.gcd(flat["model.n_heads"], flat["model.n_kv_heads"])
    if hosts in folded and hosts > 1 and heads % per_host == 0:
        yield {**_mesh(hosts, "interleaved", CHUNKS), "mesh.tensor": str(per_host), "mesh.sequence_parallel": "true"}


def _mesh(size: int, schedule: str, chunks: int) -> dict[str, str]:
    return {
        "mesh.stage": str(size),
        "mesh.strategy": "zero3",
        "mesh.fsdp": "-1",
        "pipeline.schedule": schedule,
        "pipeline.virtual": str(chunks),
    }


def _allows_stages(flat: Mapping[str, Any]) -> bool:
    """Whether the trainer runs a config of these keys with stages."""
    refused = (
        flat["optimizer.fused_backward"],
        flat["offload.params"],
        flat["model.experts"] and flat["model.moe_every"] > 1,
    )
    return bool(flat["model.scan"]) and not any(refused)


def takes(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether a schedule runs so many micro-batches an update, and not mostly its bubble."""
    return micro_batches >= stages and (schedule != "interleaved" or micro_batches % stages == 0)
