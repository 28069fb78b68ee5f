"""The work of a compiled step for the roofline: FLOPs, bytes and messages of one device and one call, by phase.

FLOPs are the jaxpr's (`memory.costs.flops`), divided evenly by the devices: what several devices compute alike counts
once. Bytes are the compiled module's. `memory.costs.roofline` tells the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from bytescope.memory.costs.flops import FlopCount
from bytescope.memory.costs.host_transfers import TO_DEVICE, TO_HOST
from bytescope.memory.costs.roofline import LINKS
from bytescope.memory.hlo.mesh import Axes
from bytescope.memory.records import STEP_PHASES, Report

_WAYS = {TO_HOST: "to_host_bytes", TO_DEVICE: "to_device_bytes"}


def of(report: Report, kernels: Mapping[str, Mapping[str, int]], flops: FlopCount, devices: int, mesh: Axes,
       per_host: int) -> dict[str, dict[str, Any]]:
    """The work of a report's program: phase -> what `memory.costs.roofline` reads, of one device and one call.

    Args:
        report: its collectives and transfers. kernels: as `memory.costs.kernels.find` gives them.
        flops: of the global program. devices: over how many it runs.
        mesh: names and sizes of its axes, the last over neighbours. per_host: devices of a host, 0 for one host.
    """
    out: dict[str, dict[str, Any]] = {}
    for phase in STEP_PHASES:
        out[phase] = {"flops": {}, "product_bytes": 0, "other_bytes": 0, **kernels.get(phase, {}),
                      "collective_bytes": dict.fromkeys(LINKS, 0), "hidden_collective_bytes": dict.fromkeys(LINKS, 0),
                      "to_host_bytes": 0, "to_device_bytes": 0}
    for (phase, dtype), count in flops.by.items():
        out[phase]["flops"][dtype] = count / devices
    for item in report.collectives:
        link = LINKS[crosses(item.axes, item.group, mesh, per_host)]
        kind = "collective_bytes" if item.exposed else "hidden_collective_bytes"
        out[_phase(item.phase)][kind][link] += item.times * item.wire_bytes
    for row in report.transfers:
        out[_phase(row.phase)][_WAYS[row.direction]] += row.bytes
    return out


def _phase(name: str) -> str:
    """The phase of the work: what carries no mark of a transformation is done before and for the forward pass."""
    return name if name in STEP_PHASES else "forward"


def crosses(axes: tuple[str, ...], group: int, mesh: Axes, per_host: int) -> bool:
    """Whether a group of devices along `axes` of a mesh spans hosts of `per_host` devices, counted row by row.

    Without the mesh's axes, whether `group` devices are more than a host has.
    """
    if not per_host:
        return False
    if not axes or not set(axes) <= {name for name, _ in mesh}:
        return group > per_host
    hosts: dict[tuple[int, ...], set[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        others = tuple(at for at, (name, _) in zip(place, mesh) if name not in axes)
        hosts.setdefault(others, set()).add(device // per_host)
    return any(len(found) > 1 for found in hosts.values())
