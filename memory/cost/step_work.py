"""Sums the work of a compiled step for the roofline: FLOPs, bytes and messages of one device and one call, by phase.

Counts the FLOPs and bytes of the kernels that the compiler scheduled for one device: a replicated product counts fully
on every device, and the masked part of causal attention does not count. `memory.cost.roofline` lists the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.cost.host_transfers import TO_DEVICE, TO_HOST
from bytescope.memory.cost.roofline import LINKS
from bytescope.memory.hlo.mesh import Axes
from bytescope.memory.records.report_record import STEP_PHASES, Collective, Transfer

_WAYS = {TO_HOST: "to_host_bytes", TO_DEVICE: "to_device_bytes"}


def by_phase(
    collectives: Iterable[Collective],
    transfers: Iterable[Transfer],
    kernel_bytes: Mapping[str, Mapping[str, int]],
    flops: Mapping[tuple[str, str], float],
    mesh: Axes,
    per_host: int,
) -> dict[str, dict[str, Any]]:
    """Returns phase -> FLOPs and bytes of one device and one call, under keys such as "flops", "product_bytes" and
    "collective_bytes". The docstring of `memory.cost.roofline` lists them.

    Args:
        collectives, transfers: the collectives and the host transfers of the program.
        kernel_bytes: phase -> bytes that kernels read and write, from `memory.cost.kernel_costs.find`.
        flops: (phase, dtype of the matrix products such as "bf16") -> FLOPs of one device.
        mesh: names and sizes of the mesh axes. Consecutive devices are along the last axis.
        per_host: number of devices of a host, 0 if all are in one host.
    """
    out: dict[str, dict[str, Any]] = {}
    for phase in STEP_PHASES:
        out[phase] = {
            "flops": {},
            "product_bytes": 0,
            "other_bytes": 0,
            **kernel_bytes.get(phase, {}),
            "collective_bytes": dict.fromkeys(LINKS, 0),
            "hidden_collective_bytes": dict.fromkeys(LINKS, 0),
            "to_host_bytes": 0,
            "to_device_bytes": 0,
        }
    for (phase, unit), count in flops.items():
        out[phase]["flops"][unit] = count
    for item in collectives:
        hosts = hosts_of(item.axes, item.group, mesh, per_host)
        kind = "collective_bytes" if item.exposed else "hidden_collective_bytes"
        out[_step_phase(item.phase)][kind][LINKS[hosts > 1]] += item.times * round(_min_sent_bytes(item, hosts))
    for row in transfers:
        out[_step_phase(row.phase)][_WAYS[row.direction]] += row.bytes
    return out


def _step_phase(name: str) -> str:
    return name if name in STEP_PHASES else "forward"


# Kinds that send the same bytes to all devices of a group, so that the network cards of a host can share them.
_SHARED = frozenset(("all-gather", "reduce-scatter", "all-reduce", "collective-broadcast"))
_EACH_TO_EACH = frozenset(("all-to-all", "ragged-all-to-all"))


def _min_sent_bytes(item: Collective, hosts: int) -> float:
    """Returns the minimum bytes that a device sends over the slowest link of a collective: the network if the
    collective spans several hosts, otherwise the link inside a host.

    `hosts`: number of hosts that the collective spans. A ring over several hosts leaves each host once. NCCL runs one
    ring per network card, so the devices of a host share these bytes equally.
    """
    inside = max(item.group // hosts, 1)
    if hosts > 1 and item.kind in _SHARED:
        return WIRE[item.kind](hosts) * item.bytes / inside
    if hosts > 1 and item.kind in _EACH_TO_EACH:
        return item.bytes * (item.group - inside) / item.group
    return item.wire_bytes


def hosts_of(axes: tuple[str, ...], group: int, mesh: Axes, per_host: int) -> int:
    """Returns the number of hosts over which one device group of a collective is spread, the maximum over all groups.

    Args:
        axes: the mesh axes over which the collective communicates.
        group: number of devices in a group. If the axes or the mesh are unknown, the result is group / per_host,
            rounded up.
        mesh: names and sizes of the mesh axes. Consecutive devices are along the last axis.
        per_host: number of consecutive devices on a host, 0 if all are on one host.
    """
    if not per_host:
        return 1
    if not axes or not set(axes) <= {name for name, _ in mesh}:
        return max(-(-group // per_host), 1)
    hosts: dict[tuple[int, ...], set[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        others = tuple(at for at, (name, _) in zip(place, mesh) if name not in axes)
        hosts.setdefault(others, set()).add(device // per_host)
    return max(map(len, hosts.values()))
