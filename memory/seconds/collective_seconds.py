"""Seconds of one collective, or of one copy over the host link, at the rates that devices reach.

A measured row gives the bus bandwidth of a kind by bytes for one group over so many hosts, latency within it (NCCL's
definition: bytes on the wire of one device over seconds; github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A group of
another size takes its own bytes on the wire at the nearest row's bandwidth, and the hops by which its ring or tree is
longer. Over hosts the rings of a group share the network cards beside its devices: a group with fewer devices a host
has as much less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.seconds import constants
from bytescope.memory.seconds.rate_records import CollectiveRate, DeviceRates, at
from bytescope.memory.seconds.step_schedule import TO_DEVICE, TO_HOST, Start

# Kind -> kinds whose rows stand for it where it has none, nearest first.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("reduce-scatter", "all-gather"),
    "all-gather": ("reduce-scatter", "all-reduce"),
    "reduce-scatter": ("all-gather", "all-reduce"),
    "all-to-all": ("all-gather", "reduce-scatter", "all-reduce"),
    "ragged-all-to-all": ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"),
    "collective-permute": ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"),
    "collective-broadcast": ("all-gather", "reduce-scatter", "all-reduce"),
}
# Devices of a full host: a group with one device a host is limited by its network, not by links in a host.
_FULL = 8
# Payloads up to this size take the latency of a collective, and little else.
_SMALL = 2**17


def seconds(start: Start, rates: DeviceRates) -> float:
    """Seconds from its begin to its end with its stream to itself. Raises KeyError for a kind that neither
    `cost.collectives.WIRE` nor the host link has."""
    if start.kind in (TO_HOST, TO_DEVICE):
        return rates.host_link_seconds + start.bytes / rates.host_link_bytes_per_s
    if start.group < 2:
        return 0.0
    sent = WIRE[start.kind](start.group) * start.bytes
    if not rates.collectives:
        return sent / at(rates.memory, max(start.bytes, 1))
    bandwidth, longer, least = _bus(start, rates)
    return constants.COLLECTIVES * (max(sent / bandwidth, least) + longer)


def _bus(start: Start, rates: DeviceRates) -> tuple[float, float, float]:
    """(bytes per second on the wire, seconds of the hops that the measured row has not, the least seconds)."""
    per_host = start.group / start.hosts
    inside = _nearest(start.kind, per_host if per_host > 1 else _FULL, 1, rates)
    over = _nearest(start.kind, start.group, start.hosts, rates) if start.hosts > 1 else None
    if inside is None or over is None:
        row = inside or over or rates.collectives[0]
        return at(row.bus, start.bytes), _longer(start, row, rates), _least(row)
    # Network cards that this group has for each of the row's; a row of large sizes alone does not show latency.
    share = per_host / (over.group / over.hosts)
    shown = over if over.bus[0][0] <= start.bytes / share else inside
    bandwidth = min(at(over.bus, start.bytes / share) * share, at(inside.bus, start.bytes))
    return bandwidth, _longer(start, shown, rates), _least(inside)


def _least(row: CollectiveRate) -> float:
    """Seconds of the smallest payload that was measured: smaller ones take no less. 0 where that is a large one."""
    size, bandwidth = row.bus[0]
    return WIRE[row.kind](row.group) * size / bandwidth if size <= _SMALL else 0.0


def _nearest(kind: str, group: float, hosts: int, rates: DeviceRates) -> CollectiveRate | None:
    """The measured row of a kind, or one like it, of the nearest number of hosts, then of the nearest group; a group
    over hosts has one over hosts, where there is one, and a group of one host none but those of one."""
    for each in (kind, *_ALIKE[kind]):
        rows = [row for row in rates.collectives if row.kind == each and (row.hosts > 1) == (hosts > 1)]
        if rows:
            return min(rows, key=lambda row: (abs(math.log2(row.hosts / hosts)), abs(math.log2(row.group / group))))
    return None


def _longer(start: Start, row: CollectiveRate, rates: DeviceRates) -> float:
    """Seconds of the hops that a group has beyond those of a measured row's."""
    return max(_hops(start.kind, start.group, start.hosts, rates) - _hops(row.kind, row.group, row.hosts, rates), 0.0)


def _hops(kind: str, group: int, hosts: int, rates: DeviceRates) -> float:
    """Seconds that the first byte takes through a ring, of an all-reduce through a tree where that is shorter (NCCL's
    own model, github.com/NVIDIA/nccl, src/graph/tuning.cc)."""
    inside, between = rates.hop_seconds, rates.network_hop_seconds
    if kind in ("collective-permute", "all-to-all", "ragged-all-to-all"):
        return between if hosts > 1 else inside
    once = (group - hosts) * inside + (hosts - 1) * between
    if kind != "all-reduce":
        return once
    return min(2 * once, 2 * ((group / hosts - 1) * inside + math.log2(hosts) * between))
