"""Tables of devices: the targets that programs can be compiled for, and the memory of this process's devices."""

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
    """Returns a table of the names that `target=` accepts: the devices of this machine, and chips for which programs
    can be compiled without having one.

    Keys of a row, for one device: target, device (jax's device_kind), platform, device_memory_bytes, hbm_bytes_per_s,
    bf16_flops (FLOP/s), peak_flops (dtype -> FLOP/s), note. Unknown values are None.
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
    """Returns the target with a name such as "h100:8". Programs can be compiled for it without having the devices.

    `memory.target("h100:8").mesh(data=2, model=4)` returns a mesh over which the arguments of a step can be sharded.

    "h100:8@0.9" sets the part (0 to 1) of each GPU's memory that is in jax's pool; otherwise it is the value of
    XLA_CLIENT_MEM_FRACTION, or jax's default of 0.75.

    Raises ReportError for an unknown name, for a number or shape of devices that does not exist, and for a fraction
    that is not valid.
    """
    if not isinstance(name, str):
        raise ReportError(f'target {name!r:.60} is not a name: give text such as "h200:8"; memory.targets() lists them')
    return target_names.parse(name)


def live() -> Table:
    """Returns a table of the memory in use on each device of this process, in bytes.

    Keys of a row: `id`, the number of the device, and the fields of `memory.LiveMemory`, such as in_use_bytes,
    peak_bytes and limit_bytes. The values come from jax's allocator, and from NVML for NVIDIA GPUs. Simulated CPU
    devices share one process, so they have one row. The call does not wait for running computations.
    """
    import jax

    rows: list[dict[str, Any]] = []
    for device in jax.local_devices():
        sample = live_memory.sample(device)
        if sample is None:
            continue
        shared = sample.source == "host"
        name = f"cpu, {sample.sharing} simulated" if shared and sample.sharing > 1 else f"{device.id} {sample.device}"
        rows.append({"id": device.id, **dataclasses.asdict(sample), "device": name})
        if shared:
            break
    note = "CPU devices share the memory of the process: the figures are for the process." if rows and shared else ""
    return Table(LIVE, tuple(rows), title="live memory", note=note)
