"""Bounds the seconds of a step by a roofline: its work over the peak rates of the target (Williams, Waterman and
Patterson 2009, "Roofline", Communications of the ACM 52(4)).

`memory.seconds` predicts the actual seconds. `cost.step_work` computes the work of a step, for one device and one call,
as a mapping from phase (`records.STEP_PHASES`) to:

- `flops`: dtype (a key of `Target.peak_flops`) -> FLOPs of matrix products.
- `product_bytes`: bytes that kernels with a matrix product read and write in device memory.
- `other_bytes`: bytes that all other kernels read and write.
- `collective_bytes`: "in_host" and "between_hosts" -> minimum bytes that the device sends over that link in collectives
  that no compute overlaps.
- `hidden_collective_bytes`: the same for collectives with compute between start and done.
- `to_host_bytes`, `to_device_bytes`: bytes over the host link.

The time of a phase is the sum of three times: matrix products (their FLOPs or their bytes, whichever takes longer), the
bytes of all other kernels, and the collectives that no compute overlaps. The other collectives and the host transfers
run at the same time as the phase, in both directions of the host link at once. If one of them takes longer than the
phase, the difference is added as waiting time. For this comparison, recompute and backward are one phase.

Not modelled: kernel launches, power limits and clocks below boost, latency, kernels that do not reach the peak, reads
that a cache saves, overlap that falls short of the schedule, elementwise FLOPs, and waiting for other devices. Rates
are peaks, so no program reaches this bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.host.host_ledger import expect
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_record import STEP_PHASES, ReportRecord
from bytescope.memory.records.result import is_count, is_number

TERMS = ("products", "memory", "collectives", "host_link")
LINKS = ("in_host", "between_hosts")
# Groups of phases whose compute overlaps the same transfers.
_WINDOWS = (("forward",), ("recompute", "backward"), ("optimizer",))
# Keys of `Target.peak_flops`. If a chip has no unit for a dtype, the next one in this order computes it.
UNITS = ("fp8", "bf16", "fp16", "tf32", "fp32")
# Number of passes by which a chip that has only bfloat16 units computes float32 (jax.lax.Precision.HIGHEST on a TPU,
# bf16_6x).
PASSES = {"fp32": 6}
DATA_SHEET, MEASURED = "data-sheet rates", "rates measured here"
# The rates of a machine are measured by a product of matrices of _SIDE rows and a copy of _COPY bytes, each the best of
# _TIMES runs.
_SIDE, _COPY, _TIMES = 1024, 2**26, 3


@dataclasses.dataclass(frozen=True)
class Figures:
    """The compute and transfer rates of one device.

    Fields:
        peak_flops: dtype -> peak FLOP/s of matrix products.
        hbm_bytes_per_s: bandwidth of the device memory in bytes per second.
        host_link_bytes_per_s: bandwidth of the host link in each direction, in bytes per second.
        interconnect_bytes_per_s: link to other devices ("in_host" or "between_hosts") -> bytes per second.
        source: where the rates come from: "data-sheet rates", "rates measured here", or a sentence.

    Raises ReportError if a rate is not a positive number, or if `peak_flops` is empty.
    """

    peak_flops: Mapping[str, float]
    hbm_bytes_per_s: float
    host_link_bytes_per_s: float
    interconnect_bytes_per_s: Mapping[str, float]
    source: str = DATA_SHEET

    def __post_init__(self) -> None:
        rates = {
            **self.peak_flops,
            **{link: self.interconnect_bytes_per_s.get(link, 0) for link in LINKS},
            "memory": self.hbm_bytes_per_s,
            "host link": self.host_link_bytes_per_s,
        }
        wrong = [name for name, rate in rates.items() if not (is_number(rate) and rate > 0)]
        if wrong or not any(unit in self.peak_flops for unit in UNITS):
            raise ReportError(
                f"the target has no positive rate for {wrong[0] if wrong else 'any dtype'}: "
                "give a positive rate for every dtype, the memory and every link"
            )

    def flops_per_s(self, dtype: str) -> float:
        """Returns the FLOP/s of matrix products in a dtype ("fp8", "bf16", "fp16", "tf32" or "fp32").

        If the device has no compute unit for the dtype, the rate of the next larger dtype is returned. If there is no
        larger one, the rate is derived from the largest smaller dtype, which needs several passes per product.
        """
        for unit in UNITS[UNITS.index(dtype) :]:
            if unit in self.peak_flops:
                return self.peak_flops[unit]
        narrower = next(unit for unit in reversed(UNITS) if unit in self.peak_flops)
        return self.peak_flops[narrower] / PASSES.get(dtype, 1)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The minimum seconds of one call of a step, by the roofline model.

    Fields:
        total: seconds of the call.
        by_phase: phase of the step, such as "backward" -> seconds, which add up to `total`.
        by_term: what takes the time ("products", "memory", "collectives" or "host_link") -> seconds, which add up to
            `total`. The seconds of "host_link" are only the time by which host transfers outlast the computation beside
            them.
        bound_by: the key of `by_term` with the most seconds.
        source: the source of the rates, such as "data-sheet rates".
    """

    total: float
    by_phase: Mapping[str, float]
    by_term: Mapping[str, float]
    bound_by: str
    source: str = DATA_SHEET

    def to_json(self) -> dict[str, Any]:
        """Returns field -> value as plain JSON values, times in seconds."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class AtBest:
    """The best possible speed of an optimizer update, which may take several calls of the step, by the roofline model.

    Fields:
        update_seconds: minimum seconds of an update.
        tokens_per_s: maximum tokens per second over all devices; None if the trainer did not give the tokens.
        mfu: maximum MFU, the fraction of the peak rate that the model's own FLOPs use; None if the trainer did not give
            the FLOPs.
        source: the source of the rates, such as "data-sheet rates".
    """

    update_seconds: float
    tokens_per_s: float | None
    mfu: float | None
    source: str


def at_best(report: ReportRecord) -> AtBest | None:
    """Returns the best possible speed of an optimizer update, from the roofline in a report; None if the report has no
    roofline.
    """
    call, subject = report.roofline.get("total"), report.subject
    if not call or not call > 0:
        return None
    share = None
    rates = figures(report.target) if subject.model_flops and report.work else None
    if rates:
        share = mfu(subject.model_flops / max(report.target.get("n_devices", 1), 1), report.work, rates, call) or None
    update = call * subject.calls
    tokens_per_s = subject.tokens / update if subject.tokens else None
    return AtBest(update, tokens_per_s, share, report.roofline.get("source", DATA_SHEET))


def seconds(work: Mapping[str, Mapping[str, Any]], figures: Figures) -> Prediction:
    """Returns the minimum seconds of one call of a step, by the roofline model.

    `work`: phase -> {"flops": dtype -> FLOPs, "product_bytes": bytes, ...}, of one device. The module's docstring lists
    all keys. `figures`: the rates of the device.
    """
    by_phase, by_term = dict.fromkeys(STEP_PHASES, 0.0), dict.fromkeys(TERMS, 0.0)
    for window in _WINDOWS:
        parts = [work[phase] for phase in window if phase in work]
        for phase in window:
            for term, value in _min_phase_seconds(work.get(phase, {}), figures).items():
                by_term[term] += value
                by_phase[phase] += value
        overlapped = _min_overlapped_seconds(parts, figures)
        longest = max(overlapped, key=lambda term: overlapped[term])
        wait = max(overlapped[longest] - sum(by_phase[phase] for phase in window), 0.0)
        by_term[longest] += wait
        by_phase[window[-1]] += wait
    bound_by = max(TERMS, key=lambda term: by_term[term])
    return Prediction(sum(by_phase.values()), by_phase, by_term, bound_by, figures.source)


def _min_phase_seconds(part: Mapping[str, Any], figures: Figures) -> dict[str, float]:
    # Without the transfers that overlap the phase.
    flops = sum(count / figures.flops_per_s(dtype) for dtype, count in part.get("flops", {}).items())
    return {
        "products": max(flops, part.get("product_bytes", 0) / figures.hbm_bytes_per_s),
        "memory": part.get("other_bytes", 0) / figures.hbm_bytes_per_s,
        "collectives": _sent(part.get("collective_bytes", {}), figures),
    }


def _min_overlapped_seconds(parts: Collection[Mapping[str, Any]], figures: Figures) -> dict[str, float]:
    moved = [sum(part.get(way, 0) for part in parts) for way in ("to_host_bytes", "to_device_bytes")]
    return {
        "collectives": sum(_sent(part.get("hidden_collective_bytes", {}), figures) for part in parts),
        # The two directions do not share the link's rate.
        "host_link": max(moved) / figures.host_link_bytes_per_s,
    }


def _sent(sizes: Mapping[str, float], figures: Figures) -> float:
    return sum(size / figures.interconnect_bytes_per_s[link] for link, size in sizes.items())


def mfu(model_flops: float, work: Mapping[str, Mapping[str, Any]], figures: Figures, taken: float) -> float:
    """Returns the MFU: the fraction of the device's peak rate that the model's own FLOPs use (Chowdhery et al. 2022,
    arXiv 2204.02311).

    The peak rate is the rate of the dtypes in which the step multiplies. If `taken` is the roofline's minimum time, the
    result is the maximum MFU.

    Args:
        model_flops: FLOPs of one device and one call, without recomputation.
        work: phase -> {"flops": dtype -> FLOPs, ...} of one device and one call. The module's docstring lists all keys.
        figures: the rates of the device.
        taken: seconds of the call.
    """
    counts = [item for part in work.values() for item in part.get("flops", {}).items()]
    executed = sum(count for _, count in counts)
    at_peak = sum(count / figures.flops_per_s(dtype) for dtype, count in counts)
    return model_flops / executed * at_peak / taken if executed and taken > 0 else 0.0


def figures(target: Any) -> Figures | None:
    """Returns the compute and transfer rates of a target; None for an accelerator without known rates.

    The rates of a CPU are measured once per process. The simulated devices of a CPU share them, and their collectives
    and transfers are copies in memory.

    `target`: the devices to compile for, as a `memory.devices.targets.Target` or its JSON.
    """
    known = target if isinstance(target, Mapping) else target.to_json()
    if known.get("platform") == "cpu":
        sharing = known.get("n_devices", 1)
        if not is_count(sharing):
            raise ReportError(f"the report is damaged (target.n_devices is {sharing!r:.40}): write it again")
        flops, copied = (rate / max(sharing, 1) for rate in machine_rates())
        return Figures({"fp32": flops}, copied, copied, dict.fromkeys(LINKS, copied), MEASURED)
    rates: dict[str, Any] = {
        key: known.get(key)
        for key in ("peak_flops", "hbm_bytes_per_s", "host_link_bytes_per_s", "interconnect_bytes_per_s")
    }
    for key in ("peak_flops", "interconnect_bytes_per_s"):
        if rates[key] and not isinstance(rates[key], Mapping):
            raise ReportError(f"the report is damaged (target.{key} is {rates[key]!r:.40}): write it again")
    return Figures(**rates) if all(rates.values()) else None


@functools.lru_cache(maxsize=1)
def machine_rates() -> tuple[float, float]:
    """Measures this machine with numpy. Returns (float32 FLOP/s of a matrix product, bytes per second that a copy
    reads and writes).
    """
    import numpy as np

    size = 2 * _COPY + 3 * 4 * _SIDE**2
    expect([HostTerm("analyze", "arrays to measure this machine", size, "cost/roofline.py, machine_rates")])
    left, right = np.ones((2, _SIDE, _SIDE), np.float32)
    source = np.ones(_COPY // 4, np.float32)
    copy = np.zeros_like(source)
    product = np.empty_like(left)
    return (
        2 * _SIDE**3 / _fastest_run_seconds(lambda: np.matmul(left, right, out=product)),
        2 * _COPY / _fastest_run_seconds(lambda: np.copyto(copy, source)),
    )


def _fastest_run_seconds(run: Callable[[], Any]) -> float:
    run()
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)


def bound_of_answer(answer: Mapping[str, Any]) -> Prediction | None:
    """Returns the minimum seconds of one call of a step by the roofline model, from saved JSON; None if the program was
    not traced or the rates of the target are unknown.

    `answer`: the JSON of a report, or of the answer of a worker process that compiled one row of a comparison. Its key
    `work` has the FLOPs and bytes by phase, its key `target` the device.

    Raises ReportError if the values do not have the form that `step_work` and `Target.to_json` write.
    """
    if not answer.get("work") or not answer.get("target"):
        return None
    rates = figures(answer["target"])
    if rates is None:
        return None
    prediction = seconds(_check_work(answer["work"]), rates)
    if not math.isfinite(prediction.total):
        raise ReportError(
            "the report is damaged (its work takes infinitely long at the target's rates): write it again"
        )
    return prediction


# Key of a phase's work -> the names of its parts, () for a single number.
_WORK = {
    "flops": UNITS,
    "collective_bytes": LINKS,
    "hidden_collective_bytes": LINKS,
    "product_bytes": (),
    "other_bytes": (),
    "to_host_bytes": (),
    "to_device_bytes": (),
}


def _check_work(work: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    for phase, part in work.items():
        if not isinstance(part, Mapping):
            raise ReportError(f"the report is damaged (work.{phase} is {part!r:.40}): write it again")
        for key, names in _WORK.items():
            amounts = part.get(key, {} if names else 0)
            if names:
                right = isinstance(amounts, Mapping) and set(amounts) <= set(names)
            else:
                right, amounts = True, {key: amounts}
            if not right or not all(is_number(amount) and amount >= 0 for amount in amounts.values()):
                raise ReportError(f"the report is damaged (work.{phase}.{key} is {part[key]!r:.40}): write it again")
    return work
