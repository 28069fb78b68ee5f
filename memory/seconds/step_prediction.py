"""Predicts the seconds of a step on a target, with the spread of such predictions around measured runs.

The prediction walks the compiled schedule (`schedule_walk`) at the rates that the target's devices reach (`rates`).
`cost.roofline` computes the bound by the data sheet, which no program reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.cost import roofline
from bytescope.memory.errors import ReportError
from bytescope.memory.records import schedule_records
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.schedule_records import Steps, unit_of
from bytescope.memory.seconds import chip_rates, intervals, run_fit
from bytescope.memory.seconds import rates as device_rates
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.seconds.schedule_walk import TERMS, walk

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """The predicted seconds of a training update, which may consist of several calls of the compiled step.

    Fields:
        seconds: the predicted seconds.
        low, high: the interval of seconds in which four of five measured runs are expected: from the user's
            own runs if the rates have them (`run_fit.interval`), else from published runs (`intervals.around`).
        by_phase: phase (`records.STEP_PHASES`) -> seconds, which add up to `seconds`.
        by_term: term (`schedule_walk.TERMS`) -> seconds, which add up to `seconds`.
        bound_by: the term with the most seconds, such as "collectives".
        rates: the source of the compute and transfer rates.
        tokens_per_s: tokens per second over all devices; None if the trainer did not give the tokens.
        mfu: MFU, the fraction of the peak rate that the model's own FLOPs use; None if the trainer did not give the
            FLOPs.
    """

    seconds: float
    low: float
    high: float
    by_phase: Mapping[str, float]
    by_term: Mapping[str, float]
    bound_by: str
    rates: str
    tokens_per_s: float | None = None
    mfu: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns every field as plain JSON values. The keys of `low` and `high` are `seconds_low` and
        `seconds_high`.
        """
        fields = dataclasses.asdict(self)
        return {_KEY.get(name, name): value for name, value in fields.items()}

    @classmethod
    def stated(cls, report: ReportRecord) -> StepPrediction | None:
        """Returns the predicted seconds that are stored in a report; None if the report has no prediction."""
        if not report.prediction:
            return None
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values[field.name] = report.prediction.get(_KEY.get(field.name, field.name))
        return cls(**values)


# Field -> its key in JSON, if they differ.
_KEY = {"low": "seconds_low", "high": "seconds_high"}


def predict(
    steps: Steps,
    target: Target | Mapping[str, Any],
    calls: int = 1,
    tokens: int | None = None,
    model_flops: int | None = None,
    network: str = "",
    attention: str = "",
    rates: DeviceRates | None = None,
) -> StepPrediction | None:
    """Returns the predicted seconds of a training update on a target; None if the schedule or the rates of the target
    are unknown, or if the schedule takes no time.

    Args:
        steps: the compiled schedule of one device and one call.
        target: a Target or its JSON.
        calls: number of calls of the program per update.
        tokens: tokens of an update, over all devices.
        model_flops: FLOPs of one call, over all devices, without recomputation.
        network: a name in `achieved.NETWORKS` of the network to assume between hosts; "" for the usual network of the
            chip.
        attention: a name in `achieved.ATTENTION_KERNELS` of the attention kernel to assume; "" for the usual kernel of
            the chip.
        rates: the rates of one device; None for the rates of `rates.select`.

    Raises ReportError if the schedule takes infinitely long or contains values that no program has.
    """
    known = target if isinstance(target, Mapping) else target.to_json()
    if steps and rates is None:
        rates = device_rates.select(known)
    if not steps or rates is None:
        return None
    rates = chip_rates.with_network(rates, network) if network else rates
    rates = chip_rates.with_attention(rates, attention, str(known.get("kind"))) if attention else rates
    try:
        once = walk(steps, rates)
    except (
        ArithmeticError,
        KeyError,
        ValueError,
    ) as error:  # the schedule has a kind, a group or a number that no program has
        raise ReportError(f"the report is damaged (its schedule contains {error!s:.40}): write it again") from error
    update = calls * once.seconds
    if not update:
        return None
    if not 0 < update < math.inf:
        raise ReportError(
            f"the report is damaged (its schedule takes {update:.3g} s at the target's rates): write it again"
        )
    low, high = intervals.around(update, known, intervals.kind_of(steps, once.by_term))
    if rates.run_ratios:
        low, high = run_fit.interval(update, rates.run_ratios, low, high)
    return StepPrediction(
        seconds=update,
        low=low,
        high=high,
        by_phase={phase: calls * taken for phase, taken in once.by_phase.items()},
        by_term={term: calls * taken for term, taken in once.by_term.items()},
        bound_by=max(TERMS, key=lambda term: once.by_term[term]),
        rates=rates.source,
        tokens_per_s=tokens / update if tokens else None,
        mfu=_mfu(steps, known, rates, model_flops, once.seconds) if model_flops else None,
    )


def _mfu(steps: Steps, target: Mapping[str, Any], rates: DeviceRates, model_flops: int, taken: float) -> float | None:
    """Returns the MFU (model FLOPs utilization) of one call, a fraction of 0 to 1: the model's FLOPs per second divided
    by the peak FLOP/s of the dtypes in which the schedule computes. Returns None if the peak is unknown.

    `model_flops`: FLOPs of one call over all devices, without recomputation. `taken`: seconds of the call. The peak of
    a CPU is the highest rate that was measured on it.
    """
    if target.get("platform") == "cpu":
        link = rates.host_link_bytes_per_s
        peaks: roofline.Figures | None = roofline.Figures(
            rates.peak_flops, link, link, dict.fromkeys(roofline.LINKS, link), rates.source
        )
    else:
        peaks = roofline.figures(target)
    counts: Counter[str] = Counter()
    for kernel, times in schedule_records.kernels(steps):
        if kernel.flops:
            counts[unit_of(kernel.dtype)] += kernel.flops * times
    if peaks is None or not counts:
        return None
    return roofline.mfu(model_flops / max(target.get("n_devices", 1), 1), {"": {"flops": counts}}, peaks, taken)


def bound(answer: Mapping[str, Any], predicted: StepPrediction | None = None) -> roofline.Prediction | None:
    """Returns the minimum seconds of one call by the roofline model, in which every device works at its peak rates
    (`roofline.bound_of_answer`).

    Returns None for a CPU whose rates come from a file. Its peak rates would have to be measured now, while other
    programs run, so they would not be a bound. Returns None if the predicted seconds are less (`contradiction`).

    Args:
        answer: the JSON of a compiled program, with its target and the calls per update.
        predicted: the predicted seconds of an update; None if they are unknown.

    Raises ReportError if the answer is damaged.
    """
    on_cpu = (answer.get("target") or {}).get("platform") == "cpu"
    found = None if on_cpu and device_rates.chosen() else roofline.bound_of_answer(answer)
    return None if contradiction(found, predicted, answer.get("calls_per_update") or 1) else found


def contradiction(bound: roofline.Prediction | None, predicted: StepPrediction | None, calls: int) -> str:
    """Returns a sentence that says why the roofline is no lower bound of the predicted seconds: which rates exceed the
    peak rates. Returns "" if it is at most the predicted seconds. `calls`: number of calls of the step per update."""
    if bound is None or predicted is None or calls * bound.total <= predicted.seconds * (1 + 1e-6):
        return ""
    at_peak = {term: calls * seconds for term, seconds in bound.by_term.items()}
    reached = {term: predicted.by_term.get(term, 0.0) for term in at_peak}
    reached["products"] += predicted.by_term.get("attention", 0.0)
    term = max(at_peak, key=lambda term: at_peak[term] - reached[term])
    return (
        f"no lower bound: {term.replace('_', ' ')} would take {at_peak[term]:.3g} s by {bound.source}, but are "
        f"predicted in {reached[term]:.3g} s: the rates of the prediction ({predicted.rates}) exceed these peaks"
    )


def missing(known_schedule: bool, target: Mapping[str, Any], measured: bool = True) -> str:
    """Returns why the seconds of a program cannot be predicted, and what to do; "" if they can be predicted.

    Args:
        known_schedule: whether the compiled schedule of the program is known.
        target: the JSON of the target.
        measured: whether the calling command measures the rates of a CPU, which has no data sheet.
    """
    if device_rates.chosen() is None:
        if target.get("platform") == "cpu":
            if not measured:
                return (
                    "the rates of a CPU are measured by bytescope report, and by bytescope calibrate for --rates=FILE"
                )
        elif chip_rates.rates_of_kind(str(target.get("kind"))) is None:
            kind = str(target.get("kind") or target.get("name"))
            return f"no rates of {kind} are known: give --rates=FILE, written by bytescope calibrate there"
    return "" if known_schedule else "the schedule of this program is not known, or has too many operations"


def predict_report(report: ReportRecord) -> StepPrediction | None:
    """Returns the predicted seconds of an update for a report's program and target; None if the schedule or the rates
    are unknown.
    """
    subject = report.subject
    if not report.target:
        return None
    return predict(report.schedule, report.target, subject.calls, subject.tokens or None, subject.model_flops or None)


def predict_answer(answer: Mapping[str, Any], network: str = "", attention: str = "") -> StepPrediction | None:
    """Returns the predicted seconds of an update from the answer of the process that compiled the program. Returns None
    if the schedule or the target's rates are unknown.

    Args:
        answer: JSON with the keys `schedule`, `target`, `calls_per_update`, `tokens_per_update` and `model_flops`.
        network: a name in `achieved.NETWORKS` of the network to assume between hosts; "" for the usual network of the
            chip.
        attention: a name in `achieved.ATTENTION_KERNELS` of the attention kernel to assume; "" for the usual kernel of
            the chip.

    Raises ReportError if the schedule or the rates are damaged.
    """
    if not answer.get("schedule") or not answer.get("target"):
        return None
    try:
        steps = schedule_records.from_json(answer["schedule"])
    except ValueError as error:
        raise ReportError(f"the report is damaged ({error}): write it again") from error
    return predict(
        steps,
        answer["target"],
        answer.get("calls_per_update") or 1,
        answer.get("tokens_per_update"),
        answer.get("model_flops"),
        network,
        attention,
    )
