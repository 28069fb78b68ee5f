"""Measures the rates of this machine's devices: compiles cases, runs them in turn until the time is used up, fits
rates.

Cases are compiled in order of importance during a first part of the time. Then all of them run in turn, so that a
falling clock or another program slows all of them equally. The seconds of a case are the median over the turns.
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

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.seconds.calibration.cases import (
    ATTENTION,
    COLLECTIVES,
    FLOOR,
    HOST_LINK,
    MEMORY,
    PRODUCTS,
    SHORT,
    CalibrationCase,
)
from bytescope.memory.seconds.rate_records import WAYS, CollectiveRate, Curve, DeviceRates

# Fraction of the time in which cases are compiled; seconds of one visit of a case.
_PREPARING, _VISIT_SECONDS = 0.7, 20e-3
# Needed cases may take this multiple of the time, or this number of seconds if that is more, because a shared machine
# compiles slowly.
OVER, MIN_SECONDS = 1.25, 30.0
NO_TIME = "no time: give more --seconds"
# Minimum fraction of a measured time that counts as work of the kernel, in case the floor was measured too high.
_MIN_SHARE = 0.1
_VERSIONS = ("bytescope", "jax", "jaxlib")
Tell = Callable[[Sequence[str], int], None]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The measured time of one calibration case, which is one kernel at one size.

    Fields:
        part: the kind of kernel, one of `cases.PARTS`, such as "attention".
        key: identifies the kernel within its part, such as (compute unit,) for matrix products.
        size: the side m = k = n of a matrix product, the number of keys of attention, or bytes.
        work: FLOPs or bytes of one run of the kernel.
        seconds: median seconds of one run of the kernel.
        spread: distance between the quartiles of the seconds, as a fraction of the median; None for fewer than two
            measurements.
    """

    part: str
    key: tuple[Any, ...]
    size: int
    work: float
    seconds: float
    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Fields:
        rates: the measured rates of one device.
        samples: the measured time of each case.
        left_out: label of a case -> the reason why it was not measured.
    """

    rates: DeviceRates
    samples: tuple[Sample, ...]
    left_out: Mapping[str, str]


@dataclasses.dataclass
class _Prepared:
    case: CalibrationCase
    run: Callable[[], Any]
    calls: int  # number of calls in one visit
    first: float = 0.0  # seconds of one link in a single call, used if there was no time for a turn
    seconds: list[float] = dataclasses.field(default_factory=list)

    def time_calls(self) -> float:
        began = time.perf_counter()
        for _ in range(self.calls):
            last = self.run()
        last.block_until_ready()
        return (time.perf_counter() - began) / (self.calls * self.case.links)


def measure(
    todo: Sequence[CalibrationCase],
    target: Target,
    devices: int,
    seconds: float = 60.0,
    tell: Tell = lambda labels, done: None,
) -> Calibration:
    """Measures kernels in about `seconds` seconds, and derives the rates of a device from their times.

    Args:
        todo: the kernels to measure, the most important ones first.
        target: the target that describes the devices, with the rates of their data sheet if known.
        devices: number of devices on which the cases run.
        tell: function that is called with the labels of the kernels that are being measured, and the whole seconds
            since the start.

    Raises ReportError if a rate that a prediction needs cannot be measured.
    """
    began = time.monotonic()
    # Cases that predictions need, and the first turn, may take longer than the given seconds.
    limit = max(OVER * seconds, MIN_SECONDS)
    prepared: list[_Prepared] = []
    left_out: dict[str, str] = {}

    def passed() -> float:
        return time.monotonic() - began

    def show(*labels: str) -> None:
        tell(labels, int(min(passed(), seconds)))

    for case in todo:
        show(case.label)
        if passed() > (limit if case.needed else _PREPARING * seconds):
            left_out[case.label] = NO_TIME
            continue
        try:
            prepared.append(_prepare(case))
        except Exception as error:  # compiler or device refuse the case: unsupported dtype or size, or out of memory
            left_out[case.label] = _reason(error)
    turn = 0
    while prepared and passed() <= (seconds if turn else limit):
        for each in list(prepared):
            if passed() > (seconds if turn else limit):
                break
            show(f"turn {turn + 1}", each.case.label)
            try:
                each.seconds.append(each.time_calls())
            except Exception as error:  # the cases that were prepared later left no memory
                prepared.remove(each)
                left_out[each.case.label] = _reason(error)
        turn += 1
    samples = tuple(_sample(each) for each in prepared)
    try:
        return Calibration(fit_rates(samples, target, _device_facts(target, devices)), samples, left_out)
    except ReportError as error:
        why = next((f"{label} failed: {reason}" for label, reason in left_out.items()), "run the calibration again")
        raise ReportError(f"the devices could not be measured ({error}); {why}") from error


def _reason(error: Exception) -> str:
    return in_one_line(str(error))[:200] or type(error).__name__


def _prepare(case: CalibrationCase) -> _Prepared:
    prepared = _Prepared(case, case.make().start(), 1)
    prepared.time_calls()  # the first run loads kernels
    prepared.first = prepared.time_calls()
    call = max(prepared.first * case.links, 1e-6)
    prepared.calls = min(max(int(_VISIT_SECONDS / call), 1), 1000)
    return prepared


def _sample(each: _Prepared) -> Sample:
    case, seconds, spread = each.case, each.seconds or [each.first], None
    median = statistics.median(seconds)
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4)
        spread = (high - low) / median
    return Sample(case.part, case.key, case.size, case.work, median, spread)


def _four_digits(value: float) -> float:
    # Clocks are not more precise, and the rates file stays small.
    return float(f"{value:.4g}")


def _device_facts(target: Target, devices: int) -> dict[str, str]:
    about = {
        "device": target.kind,
        "platform": target.platform,
        "devices": str(devices),
        "date": datetime.date.today().isoformat(),
    }
    for name in _VERSIONS:
        try:
            about[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return about


def fit_rates(samples: Iterable[Sample], target: Target, about: Mapping[str, str]) -> DeviceRates:
    """Derives the compute and transfer rates of a device from measured kernels.

    `samples`: the measured time of each kernel. `target`: the devices with their data-sheet rates. `about`: the device,
    the date and the versions of the calibration, which the result contains.

    Raises ReportError if a rate that a prediction needs was not measured.
    """
    parts: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        parts[sample.part].append(sample)
    floor = _four_digits(min((sample.seconds for sample in parts[FLOOR]), default=0.0))
    products = _rate_curves(parts[PRODUCTS], floor)
    peaks = {
        unit: max(target.peak_flops.get(unit, 0.0), *(rate for _, rate in products[unit,])) for (unit,) in products
    }
    attention: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), curve in sorted(_rate_curves(parts[ATTENTION], floor).items()):
        attention[way][width] = curve
    copies = [sample for sample in parts[HOST_LINK] if sample.size > SHORT]
    if not (copies and parts[MEMORY]):
        raise ReportError(
            "the rate of the device memory or of the host link was not measured: run bytescope calibrate again"
        )
    short = [sample.seconds for sample in parts[COLLECTIVES] if sample.size <= SHORT]
    chip = next((chip for chip in CHIPS.values() if chip.kind == target.kind), None)
    versions = ", ".join(f"{name} {about[name]}" for name in _VERSIONS if name in about)
    where = f"{about.get('devices', 1)} x {target.kind}"
    return DeviceRates(
        source=f"measured on {where} on {about.get('date', 'an unknown day')}, {versions}",
        peak_flops={**target.peak_flops, **peaks},
        products={unit: curve for (unit,), curve in products.items()},
        attention=attention,
        memory=_memory_bandwidth(parts[MEMORY], floor),
        floor_seconds=floor,
        host_link_bytes_per_s=_four_digits(min(sample.work / sample.seconds for sample in copies)),
        host_link_seconds=_four_digits(max((s.seconds for s in parts[HOST_LINK] if s.size <= SHORT), default=0.0)),
        collectives=_collective_rates(parts[COLLECTIVES]),
        hop_seconds=_four_digits(min(short, default=0.0)),
        cores=chip.gpu.cores if chip and chip.gpu else 0,
        measured=dict(about),
    )


def _work_seconds(sample: Sample, floor: float) -> float:
    # `floor` is the fixed seconds that every kernel takes.
    return max(sample.seconds - floor, _MIN_SHARE * sample.seconds)


def _rate_curves(samples: Iterable[Sample], floor: float) -> dict[tuple[Any, ...], Curve]:
    curves: dict[tuple[Any, ...], dict[float, float]] = defaultdict(dict)
    for sample in samples:
        curves[sample.key][float(sample.size)] = _four_digits(sample.work / _work_seconds(sample, floor))
    return {key: tuple(sorted(points.items())) for key, points in curves.items()}


def _memory_bandwidth(samples: Iterable[Sample], floor: float) -> Curve:
    # A copy and an addition of arrays of the same size are averaged to one point.
    by_size: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_size[sample.size].append(sample)
    points = {}
    for group in by_size.values():
        seconds = sum(_work_seconds(sample, floor) for sample in group)
        points[statistics.fmean(sample.work for sample in group)] = _four_digits(
            sum(sample.work for sample in group) / seconds
        )
    return tuple(sorted(points.items()))


def _collective_rates(samples: Iterable[Sample]) -> tuple[CollectiveRate, ...]:
    curves: dict[tuple[Any, ...], dict[float, float]] = defaultdict(dict)
    for sample in samples:
        # The time of a small payload is only latency.
        if sample.size > SHORT:
            kind, group = sample.key
            curves[sample.key][float(sample.size)] = _four_digits(WIRE[kind](group) * sample.work / sample.seconds)
    return tuple(
        CollectiveRate(kind, group, 1, tuple(sorted(points.items()))) for (kind, group), points in curves.items()
    )
