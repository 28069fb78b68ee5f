"""Sums the work of a compiled step for the roofline: FLOPs, bytes and messages of one device and one call, by phase.

Counts the FLOPs and bytes of the kernels that the compiler scheduled for one device: a replicated product counts fully
on every device, and the masked part of causal attention does not count. `memory.cost.roofline` lists the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.cost.host_transfers import TO_DEVICE, TO_HOST
from bytescope.memory.cost.roofline import LINKS
from bytescope.memory.records.report_record import STEP_PHASES, Collective, Transfer

_WAYS = {TO_HOST: "to_host_bytes", TO_DEVICE: "to_device_bytes"}


def by_phase(
    collectives: Iterable[Collective],
    transfers: Iterable[Transfer],
    kernel_bytes: Mapping[str, Mapping[str, int]],
    flops: Mapping[tuple[str, str], float],
) -> dict[str, dict[str, Any]]:
    """Returns phase -> FLOPs and bytes of one device and one call, under keys such as "flops", "product_bytes" and
    "collective_bytes". The docstring of `memory.cost.roofline` lists them.

    Args:
        collectives, transfers: the collectives and the host transfers of the program.
        kernel_bytes: phase -> {"product_bytes": bytes that kernels with a matrix product read and write, "other_bytes":
            bytes of the other kernels}.
        flops: (phase, dtype of the matrix products such as "bf16") -> FLOPs of one device.
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
        kind = "collective_bytes" if item.exposed else "hidden_collective_bytes"
        out[_step_phase(item.phase)][kind][LINKS[item.hosts > 1]] += item.times * round(_min_sent_bytes(item))
    for row in transfers:
        out[_step_phase(row.phase)][_WAYS[row.direction]] += row.bytes
    return out


def _step_phase(name: str) -> str:
    return name if name in STEP_PHASES else "forward"


# Kinds that send the same bytes to all devices of a group, so that the network cards of a host can share them.
_SHARED = frozenset(("all-gather", "reduce-scatter", "all-reduce", "collective-broadcast"))
_EACH_TO_EACH = frozenset(("all-to-all", "ragged-all-to-all"))


def _min_sent_bytes(item: Collective) -> float:
    """Returns the minimum bytes that a device sends over the slowest link of a collective: the network if the
    collective spans several hosts, otherwise the link inside a host.

    A ring over several hosts leaves each host once. NCCL runs one ring per network card, so the devices of a host share
    these bytes equally.
    """
    inside = max(item.group // item.hosts, 1)
    if item.hosts > 1 and item.kind in _SHARED:
        return WIRE[item.kind](item.hosts) * item.bytes / inside
    if item.hosts > 1 and item.kind in _EACH_TO_EACH:
        return item.bytes * (item.group - inside) / item.group
    return item.wire_bytes
