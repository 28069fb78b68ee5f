"""Rates of this machine's devices, measured: cases are compiled, run by turns until the time is spent, and fitted.

Cases are prepared in the order of how much they are wanted, for so much of the time; then all of them run by turns, so
that a clock that falls or a neighbour that wakes reaches all alike. A case's seconds are the median over the turns.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from bytescope.memory.cost import roofline
from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.seconds.calibration import kernel_cases, links
from bytescope.memory.seconds.calibration.cases import (
    ACCELERATOR,
    ATTENTION,
    CALL,
    COLLECTIVES,
    FLOOR,
    HOST,
    HOST_LINK,
    MEMORY,
    PRODUCTS,
    SHORT,
    CalibrationCase,
    CalibrationSizes,
)
from bytescope.memory.seconds.rate_records import WAYS, CollectiveRate, Curve, DeviceRates

# The share of the time in which cases are compiled; what a visit of one takes.
_PREPARING, _VISIT_SECONDS = 0.7, 20e-3
# What is needed may take so much of the time asked for, or so many seconds where that is more, and no longer: a machine
# that others use too compiles slowly.
_OVER, _LEAST_SECONDS = 1.25, 30.0
NO_TIME = "no time: give more --seconds"
# Of a measured time, what its kernel is thought to take at least: a floor measured too high takes away no more.
_LEAST_SHARE = 0.1
# What an accelerator without a data sheet is thought to reach, until it is measured: FLOP/s, bytes per second.
_GUESS = (1e14, 1e12)
_VERSIONS = ("bytescope", "jax", "jaxlib")
Tell = Callable[[Sequence[str], int], None]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case measured: its `part`, `key`, `size` and `work` (see `cases.Case`), the median seconds of one link, and the
    spread of its turns, the distance of the quartiles over the median; None where it had one at most."""

    part: str
    key: tuple[Any, ...]
    size: int
    work: float
    seconds: float
    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured. rates: of one device. left_out: case in words -> why it was not measured."""

    rates: DeviceRates
    samples: tuple[Sample, ...]
    left_out: Mapping[str, str]


@dataclasses.dataclass
class _Prepared:
    case: CalibrationCase
    run: Callable[[], Any]
    calls: int  # of one visit
    first: float = 0.0  # seconds of one link in a single call, which stands where there was no time for a turn
    seconds: list[float] = dataclasses.field(default_factory=list)

    def visit(self) -> float:
        """Runs its calls one behind the other; seconds of one link."""
        began = time.perf_counter()
        for _ in range(self.calls):
            last = self.run()
        last.block_until_ready()
        return (time.perf_counter() - began) / (self.calls * self.case.links)


def sizes_of(target: Target) -> CalibrationSizes:
    """What is measured of a target's devices."""
    return HOST if target.platform == "cpu" else ACCELERATOR


def measure(
    todo: Sequence[CalibrationCase],
    target: Target,
    devices: int,
    seconds: float = 60.0,
    tell: Tell = lambda labels, done: None,
) -> Calibration:
    """The rates that cases tell (of `cases_of`), measured in about so many seconds.

    Args:
        target: with its data sheet, where there is one. devices: of this host, that the cases run on.
        tell: is called with what runs and how many whole seconds are gone.

    Raises ReportError where a part that a prediction needs cannot be measured.
    """
    clock = _TimeBudget(time.monotonic(), seconds, tell)
    prepared, left_out = _prepared(todo, clock)
    turn = 0
    while prepared and not clock.over(turn):
        turn += 1
        for each in list(prepared):
            if clock.over(turn - 1):
                break
            clock.tell(f"turn {turn}", each.case.label)
            try:
                each.seconds.append(each.visit())
            except Exception as error:  # no memory is left beside the cases that were prepared after it
                prepared.remove(each)
                left_out[each.case.label] = _reason(error)
    samples = tuple(_sample(each) for each in prepared)
    try:
        return Calibration(rates_of(samples, target, _about(target, devices)), samples, left_out)
    except ReportError as error:
        why = next(iter(left_out.items()), ("nothing", "left out"))
        raise ReportError(f"the devices could not be measured ({error}); {why[0]}: {why[1]}") from error


@dataclasses.dataclass(frozen=True)
class _TimeBudget:
    """When it began, how many seconds were asked for, and who is told."""

    began: float
    seconds: float
    teller: Tell

    def tell(self, *labels: str) -> None:
        self.teller(labels, int(min(self.gone, self.seconds)))

    @property
    def gone(self) -> float:
        return time.monotonic() - self.began

    def late(self, needed: bool) -> bool:
        """Whether no more cases are to be compiled."""
        return self.gone > (self._limit if needed else _PREPARING * self.seconds)

    def over(self, turns: int) -> bool:
        """Whether no more cases are to run, so many turns being done: the first is finished even past the time."""
        return self.gone > (self.seconds if turns else self._limit)

    @property
    def _limit(self) -> float:
        return max(_OVER * self.seconds, _LEAST_SECONDS)


def _prepared(todo: Sequence[CalibrationCase], clock: _TimeBudget) -> tuple[list[_Prepared], dict[str, str]]:
    """(cases ready to run, those left out with the reason)."""
    prepared, left_out = [], {}
    for case in todo:
        clock.tell(case.label)
        if clock.late(case.needed):
            left_out[case.label] = NO_TIME
            continue
        try:
            prepared.append(_prepare(case))
        except Exception as error:  # of the compiler or the device: a dtype or size that it has not, no memory left
            left_out[case.label] = _reason(error)
    return prepared, left_out


def _reason(error: Exception) -> str:
    return in_one_line(str(error))[:200] or type(error).__name__


def cases_of(devices: Sequence[JaxDevice], target: Target, sizes: CalibrationSizes) -> list[CalibrationCase]:
    """What to measure, the needed first, then by turns a case of each part."""
    units = [unit for unit in sizes.units if unit in target.peak_flops or not target.peak_flops]
    flops, moved = (
        (target.peak_flops[units[0]], target.hbm_bytes_per_s)
        if target.peak_flops
        else roofline.machine_rates()
        if target.platform == "cpu"
        else _GUESS
    )
    rows = [
        list(row)
        for row in (
            kernel_cases.floors(devices[0]),
            kernel_cases.products(devices[0], units, sizes, flops),
            kernel_cases.memory(devices[0], sizes, moved),
            kernel_cases.attention(devices[0], units[0], sizes, flops / 2),
            links.host_link(devices[0], sizes),
            links.collectives(devices, sizes, moved / 10),
            kernel_cases.thin(devices[0], units[0], sizes, flops),
        )
    ]
    turns = [row[turn] for turn in range(max(map(len, rows))) for row in rows if turn < len(row)]
    return sorted(turns, key=lambda case: not case.needed)


def _prepare(case: CalibrationCase) -> _Prepared:
    """Compiles a case, warms it up and chooses its calls of a visit."""
    found = _Prepared(case, case.make().start(), 1)
    found.visit()  # the first run loads kernels
    found.first = found.visit()
    call = max(found.first * case.links, 1e-6)
    found.calls = min(max(int(_VISIT_SECONDS / call), 1), 1000)
    return found


def _sample(each: _Prepared) -> Sample:
    case, seconds = each.case, each.seconds or [each.first]
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else None
    middle = statistics.median(seconds)
    return Sample(
        case.part, case.key, case.size, case.work, middle, (quarters[2] - quarters[0]) / middle if quarters else None
    )


def _rounded(value: float) -> float:
    """Four digits of it: no clock tells more, and the file stays small."""
    return float(f"{value:.4g}")


def _about(target: Target, devices: int) -> dict[str, str]:
    """What was measured, when and with which versions."""
    found = {
        "device": target.kind,
        "platform": target.platform,
        "devices": str(devices),
        "date": datetime.date.today().isoformat(),
    }
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def rates_of(samples: Iterable[Sample], target: Target, about: Mapping[str, str]) -> DeviceRates:
    """The rates that samples say. about: what was measured, when and with which versions.

    Raises ReportError where a part is missing that a prediction needs.
    """
    parts: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        parts[sample.part].append(sample)
    floor = _rounded(min((sample.seconds for sample in parts[FLOOR]), default=0.0))
    products = _curves(parts[PRODUCTS], floor)
    peaks = {
        unit: max(target.peak_flops.get(unit, 0.0), *(rate for _, rate in products[unit,])) for (unit,) in products
    }
    attention: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), curve in sorted(_curves(parts[ATTENTION], floor).items()):
        attention[way][width] = curve
    copies = [sample for sample in parts[HOST_LINK] if sample.size > SHORT]
    if not (copies and parts[MEMORY]):
        raise ReportError("no memory or no host link was measured")
    short = [sample.seconds for sample in parts[COLLECTIVES] if sample.size <= SHORT]
    chip = next((chip for chip in CHIPS.values() if chip.kind == target.kind), None)
    versions = ", ".join(f"{name} {about[name]}" for name in _VERSIONS if name in about)
    where = f"{about.get('devices', 1)} x {target.kind}"
    return DeviceRates(
        source=f"measured on {where} on {about.get('date', 'an unknown day')}, {versions}",
        peak_flops={**target.peak_flops, **peaks},
        products={unit: curve for (unit,), curve in products.items()},
        attention=attention,
        memory=_bandwidth(parts[MEMORY], floor),
        floor_seconds=floor,
        host_link_bytes_per_s=_rounded(min(sample.work / sample.seconds for sample in copies)),
        host_link_seconds=_rounded(max((s.seconds for s in parts[HOST_LINK] if s.size <= SHORT), default=0.0)),
        collectives=_collectives(parts[COLLECTIVES]),
        hop_seconds=_rounded(min(short, default=0.0)),
        cores=chip.gpu.cores if chip and chip.gpu else 0,
        measured=dict(about),
        sources={
            sample.part: f"{sample.seconds * 1e6:.1f} us from one call of a short program to the next"
            for sample in parts[CALL]
        },
    )


def _work_seconds(sample: Sample, floor: float) -> float:
    """What its work takes beside the floor of its kernel."""
    return max(sample.seconds - floor, _LEAST_SHARE * sample.seconds)


def _curves(samples: Iterable[Sample], floor: float) -> dict[tuple[Any, ...], Curve]:
    """Key -> work per second over the size."""
    found: dict[tuple[Any, ...], dict[float, float]] = defaultdict(dict)
    for sample in samples:
        found[sample.key][float(sample.size)] = _rounded(sample.work / _work_seconds(sample, floor))
    return {key: tuple(sorted(points.items())) for key, points in found.items()}


def _bandwidth(samples: Iterable[Sample], floor: float) -> Curve:
    """Bytes per second over the bytes of a kernel: a copy and an addition of arrays of one size are one point."""
    alike: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        alike[sample.size].append(sample)
    points = {
        statistics.fmean(s.work for s in found): _rounded(
            sum(s.work for s in found) / sum(_work_seconds(s, floor) for s in found)
        )
        for found in alike.values()
    }
    return tuple(sorted(points.items()))


def _collectives(samples: Iterable[Sample]) -> tuple[CollectiveRate, ...]:
    """Bus bandwidth over payload bytes by kind and group; the shortest payloads tell of hops alone."""
    found: dict[tuple[Any, ...], dict[float, float]] = defaultdict(dict)
    for sample in samples:
        if sample.size > SHORT:
            kind, group = sample.key
            found[sample.key][float(sample.size)] = _rounded(WIRE[kind](group) * sample.work / sample.seconds)
    return tuple(
        CollectiveRate(kind, group, 1, tuple(sorted(points.items()))) for (kind, group), points in found.items()
    )
