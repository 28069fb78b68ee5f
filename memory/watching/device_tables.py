"""Devices as tables: the targets that programs are compiled for, and what the devices of this process hold now."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from bytescope.memory.devices import live as live_memory
from bytescope.memory.devices import targets as target_names
from bytescope.memory.devices.chips import CHIPS, lacks
from bytescope.memory.errors import ReportError
from bytescope.memory.view.object_table import Table
from bytescope.memory.view.table_model import ColumnView

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target

TARGETS = (
    ColumnView("target", "target", "text"),
    ColumnView("device", "device", "text"),
    ColumnView("device_memory_bytes", "GiB", "gib"),
    ColumnView("hbm_bytes_per_s", "TB/s", "tera"),
    ColumnView("bf16_flops", "bf16 TFLOP/s", "whole tera"),
    ColumnView("note", "note", "words"),
)
LIVE = (
    ColumnView("device", "device"),
    ColumnView("in_use_bytes", "in use", "bytes"),
    ColumnView("peak_bytes", "peak", "bytes"),
    ColumnView("limit_bytes", "limit", "bytes"),
    ColumnView("largest_free_block_bytes", "largest free block", "bytes"),
    ColumnView("fragmentation", "fragmentation", "share"),
    ColumnView("card_used_bytes", "card in use", "bytes"),
    ColumnView("card_total_bytes", "card", "bytes"),
)


def targets() -> Table:
    """Returns the values of `target=`: the devices of this machine, and the chips that need not be present.

    Keys of a row, of one device: target, device (jax' device_kind), device_memory_bytes, hbm_bytes_per_s, bf16_flops
    (per second), peak_flops (dtype -> FLOP/s), platform, note; None where nothing is known.
    """
    nothing = dict.fromkeys(("device_memory_bytes", "hbm_bytes_per_s", "bf16_flops"))
    own = [
        {"target": "local", "device": "the devices of this machine", "platform": "", **nothing},
        {"target": "cpu:8", "device": "eight simulated CPU devices", "platform": "cpu", **nothing},
    ]
    described = [
        {
            "target": chip.name,
            "device": chip.kind,
            "platform": chip.platform,
            "device_memory_bytes": chip.device_memory_bytes,
            "hbm_bytes_per_s": chip.hbm,
            "bf16_flops": chip.peak_flops.get("bf16"),
            "peak_flops": dict(chip.peak_flops),
            "note": lacks(chip),
        }
        for chip in CHIPS.values()
    ]
    rows = tuple({"note": "", "peak_flops": {}, **row} for row in (*own, *described))
    return Table(TARGETS, rows, note="A count or a shape follows a colon: h100:8, h100:2x8 (hosts x devices), v5e:4x4.")


def target(name: str) -> Target:
    """Returns a target with its devices: `memory.target("h100:8").mesh(data=2, model=4)` is a mesh to shard the
    arguments of a step over, with no such device in the machine.

    Raises ReportError for an unknown name, with the nearest one, and for a shape that does not exist.
    """
    if not isinstance(name, str):
        raise ReportError(f'target {name!r:.60}: give a name such as "h200:8"; memory.targets() lists them')
    return target_names.parse(name)


def live() -> Table:
    """Returns the bytes that each device of this process holds now: from the allocator, and from NVML for the GPU.

    Keys of a row: the fields of `memory.LiveMemory`, with the device's number as `id`. Simulated CPU devices share one
    process, so they are one row. Waits for no computation.
    """
    import jax

    rows: list[dict[str, Any]] = []
    for device in jax.local_devices():
        found = live_memory.sample(device)
        if found is None:
            continue
        shared = found.source == "host"
        name = f"cpu, {found.sharing} simulated" if shared and found.sharing > 1 else f"{device.id} {found.device}"
        rows.append({"id": device.id, **dataclasses.asdict(found), "device": name})
        if shared:
            break
    note = "CPU devices have no memory of their own: the figures are the process's." if rows and shared else ""
    return Table(LIVE, tuple(rows), title="live memory", note=note)
