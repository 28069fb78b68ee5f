"""Records of the rates that one device reaches, as curves over sizes, and their JSON."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from bytescope.memory.cost import roofline
from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.host.host_terms import RATES
from bytescope.memory.records.result import JsonForm, is_number, json_keys, plain, read

FORMAT = 1
WAYS = ("forward", "forward_causal", "backward", "backward_causal")


def _one_line(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} must be a string")
    return in_one_line(value)


# A text of a file, which messages show in one line.
Line = Annotated[str, JsonForm(str, str, _one_line)]
# Points (size, rate) with ascending sizes.
Curve = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class CollectiveRate:
    """The measured bandwidth of a collective.

    Fields:
        kind: a key of `cost.collectives.WIRE`.
        group: number of devices that exchange data.
        hosts: number of hosts with these devices.
        bus: payload in bytes (of the unsharded array) -> bytes per second that one device sends.
    """

    kind: Line
    group: int
    hosts: int
    bus: Curve


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """The compute and transfer rates that one device reaches in practice. A curve is a tuple of points (size, rate).

    Fields:
        source: the source of the rates, in one line.
        peak_flops: compute unit (one of `cost.roofline.UNITS`) -> maximum FLOP/s of a matrix product.
        products: compute unit -> curve of FLOP/s of a matrix product with m = n = k, over m.
        attention: one of `WAYS` -> head dimension -> curve of FLOP/s over the number of keys. Causal attention counts
            only FLOPs below the diagonal.
        memory: curve of bytes per second over the bytes that a kernel reads and writes, without `floor_seconds`.
        floor_seconds: fixed seconds that each kernel takes in addition to its work.
        host_link_bytes_per_s: bytes per second of the host link in each direction.
        host_link_seconds: latency of a copy over the host link in seconds.
        collectives: measured collectives, within one host and over hosts.
        hop_seconds, network_hop_seconds: latency in seconds from one device to the next, within a host and between
            hosts.
        cores: number of cores that share the work of a matrix product; 0 if unknown.
        sources: name of a part of the rates -> source of its values.
        measured: where and when `bytescope calibrate` measured the rates: device (jax's device_kind), platform,
            devices, date and versions; {} for the built-in table.
        host: constants of the host ledger that `bytescope calibrate --host` measured: name of a field of
            `host.host_terms.HostRates` -> value; {} if they were not measured.
        attention_slowdown: seconds of an attention kernel in a training step divided by its seconds alone; None for
            `constants.ATTENTION`.
        memory_slowdown: the same ratio for a kernel that moves memory; None for `constants.MEMORY`.
        run_factors: part of the rates (`run_fit.PARTS`) -> factor by which `bytescope calibrate --runs` multiplied
            its seconds; {} without such runs. The curves above already contain the factors.
        run_ratios: predicted/measured seconds of the programs of these runs, each predicted without its own runs. The
            interval of predicted seconds is made of them (`run_fit.interval`).

    Raises ReportError if a figure is not a positive number or a part is missing.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("format",)

    source: Line
    peak_flops: Mapping[str, float]
    products: Mapping[Line, Curve]
    attention: Mapping[Line, Mapping[int, Curve]]
    memory: Curve
    floor_seconds: float
    host_link_bytes_per_s: float
    host_link_seconds: float = 0.0
    collectives: tuple[CollectiveRate, ...] = ()
    hop_seconds: float = 0.0
    network_hop_seconds: float = 0.0
    cores: int = 0
    sources: Mapping[Line, Line] = dataclasses.field(default_factory=dict)
    measured: Mapping[Line, Line] = dataclasses.field(default_factory=dict)
    host: Mapping[str, float] = dataclasses.field(default_factory=dict)
    attention_slowdown: float | None = None
    memory_slowdown: float | None = None
    run_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    run_ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        RATES.replaced(self.host)  # refuses unknown names and values
        fault = self._fault()
        if fault:
            raise ReportError(f"the rates are not valid: {fault}: run bytescope calibrate again")

    def _fault(self) -> str:
        for name, curve in self._curves():
            if not _is_curve(curve):
                return f"{name} is {curve!s:.60}, which is no curve of [size, rate] pairs above 0 with ascending sizes"
        for name, positive in _NUMBERS.items():
            value = getattr(self, name)
            optional = value is None and name in ("attention_slowdown", "memory_slowdown")
            if not optional and (not is_number(value) or value < 0 or (positive and not value)):
                return f"{name} is {value!r:.40}, but must be a number {'above 0' if positive else 'of 0 or more'}"
        for name, values in (("run_factors", self.run_factors.values()), ("run_ratios", self.run_ratios)):
            for value in values:
                if not is_number(value) or not 1e-3 <= value <= 1e3:
                    return f"{name} has {value!r:.40}, but needs numbers from 0.001 to 1000"
        for unit in (*self.peak_flops, *self.products):
            peak = self.peak_flops.get(unit, 1.0)
            if unit not in roofline.UNITS or not is_number(peak) or peak <= 0:
                return f"{unit!r:.40} has no peak rate above 0 or is not one of {', '.join(roofline.UNITS)}"
        if not self.products:
            return "products is empty"
        if set(self.attention) != set(WAYS) or not all(self.attention.values()):
            return (
                f"attention contains {', '.join(self.attention) or 'nothing'}, but needs curves for {', '.join(WAYS)}"
            )
        for row in self.collectives:
            if row.kind not in WIRE or not row.group >= 2 or not 1 <= row.hosts <= row.group:
                return f"the collective {row.kind!r:.40} of {row.group} devices on {row.hosts} hosts does not exist"
        return ""

    def _curves(self) -> list[tuple[str, Any]]:
        curves: list[tuple[str, Any]] = [("memory", self.memory)]
        curves += [(f"products.{unit}", curve) for unit, curve in self.products.items()]
        for way, table in self.attention.items():
            curves += [(f"attention.{way}.{width}", curve) for width, curve in table.items()]
        return curves + [(f"the bus bandwidth of {row.kind}", row.bus) for row in self.collectives]

    def unit(self, wanted: str) -> str:
        """Returns the compute unit whose measured rates apply to matrix products of the unit `wanted`, such as "bf16"
        (one of `cost.roofline.UNITS`). It is the first of these that has rates: `wanted` itself, the units of larger
        dtypes, the units of smaller dtypes.
        """
        order = roofline.UNITS
        wider = order[order.index(wanted) :]
        return next(unit for unit in (*wider, *reversed(order)) if unit in self.products)

    def passes(self, wanted: str) -> int:
        """Returns the number of passes by which the device multiplies operands of the unit `wanted`: more than one if
        it has only units of smaller dtypes (`cost.roofline.PASSES`)."""
        narrower = roofline.UNITS.index(self.unit(wanted)) < roofline.UNITS.index(wanted)
        return roofline.PASSES.get(wanted, 1) if narrower else 1

    def completed(self, listed: DeviceRates, hosts: int = 1) -> DeviceRates:
        """Fills the gaps of a calibration: returns a copy of these rates in which collectives and hop latencies that
        were not measured are taken from `listed`, the built-in rates of the same chip.

        A calibration on one device measures no collectives, and a calibration on one machine measures none between
        hosts. Collectives between hosts are only added if the target has several hosts (`hosts`).
        """
        inside = any(row.hosts == 1 for row in self.collectives)
        between = any(row.hosts > 1 for row in self.collectives)
        taken = []
        for row in listed.collectives:
            lacking = (not between and hosts > 1) if row.hosts > 1 else not inside
            if lacking:
                taken.append(row)
        if not taken:
            return self
        source = "the network as published" if inside else f"collectives: {listed.source}"
        return dataclasses.replace(
            self,
            collectives=(*self.collectives, *taken),
            source=f"{self.source}; {source}",
            hop_seconds=self.hop_seconds if inside else listed.hop_seconds,
            network_hop_seconds=self.network_hop_seconds if between else listed.network_hop_seconds,
        )

    def shared(self, devices: int) -> DeviceRates:
        """Divides the rates of a CPU among `devices` simulated devices, which share its cores and its memory. Returns
        the rates of one simulated device.
        """
        if devices < 2:
            return self

        def part(curve: Curve) -> Curve:
            return tuple((size, rate / devices) for size, rate in curve)

        attention = {}
        for way, table in self.attention.items():
            attention[way] = {width: part(curve) for width, curve in table.items()}
        return dataclasses.replace(
            self,
            peak_flops={unit: peak / devices for unit, peak in self.peak_flops.items()},
            products={unit: part(curve) for unit, curve in self.products.items()},
            attention=attention,
            memory=part(self.memory),
            host_link_bytes_per_s=self.host_link_bytes_per_s / devices,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the rates as plain JSON values. `from_json` reads this JSON."""
        return plain(self)

    @property
    def format(self) -> int:
        """The version of the format."""
        return FORMAT


# Numeric field -> whether it must be above 0.
_NUMBERS = {
    "floor_seconds": False,
    "host_link_bytes_per_s": True,
    "host_link_seconds": False,
    "hop_seconds": False,
    "network_hop_seconds": False,
    "cores": False,
    "attention_slowdown": True,
    "memory_slowdown": True,
}


def _is_curve(points: Curve) -> bool:
    numbers = [value for point in points for value in point]
    if not numbers or not all(is_number(value) and value > 0 for value in numbers):
        return False
    return all(one < other for (one, _), (other, _) in itertools.pairwise(points))


def at(curve: Curve, size: float) -> float:
    """Returns the rate for a size from a curve of points (size, rate). Between points, the interpolation is linear on
    logarithmic axes. Outside of the points, the rate of the first or the last point is returned.
    """
    place = bisect.bisect_left(curve, (size, 0.0))
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (left, low), (right, high) = curve[place - 1], curve[place]
    share = math.log(size / left) / math.log(right / left)
    return low * (high / low) ** share


def from_json(value: Any) -> DeviceRates:
    """Returns the rates from the JSON of `DeviceRates.to_json`. Raises ReportError for any other value."""
    version = value.get("format") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or version != FORMAT:
        raise ReportError(
            f"the rates have format {version!r:.40}, but this version reads format {FORMAT}: "
            "run bytescope calibrate again"
        )
    unknown = value.keys() - json_keys(DeviceRates).keys() - {"runs"}  # `calibrate --runs --json` adds the runs
    try:
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r:.40}")
        return read(DeviceRates, value)
    except ReportError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ReportError(
            f"the rates are damaged ({in_one_line(str(error)):.80}): run bytescope calibrate again"
        ) from error
