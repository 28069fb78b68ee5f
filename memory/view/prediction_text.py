"""One-line texts about a step's predicted time and its lower bound."""

from __future__ import annotations

from collections.abc import Mapping

from bytescope.memory.cost.roofline import at_best
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.seconds.step_prediction import StepPrediction, missing
from bytescope.memory.view.console import one_line
from bytescope.memory.view.figures import rounded

# Terms of a prediction (`seconds.schedule_walk.TERMS`) whose names need explanation -> explanation.
WORDS = {"collectives": "waiting for collectives", "host_link": "waiting for the host link"}
# Terms below this fraction of the total are left out.
_SMALL = 0.001
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def predicted(report: ReportRecord) -> str:
    """Returns a line with the predicted seconds per update and their interval, tokens/s, MFU and the source of the
    device rates. Returns "" if there is no prediction."""
    prediction = StepPrediction.stated(report)
    if prediction is None:
        return ""
    ends = interval(prediction).rpartition(" ")[0]
    parts = [f"predicted {predicted_time(prediction)} per {call_name(report)} ({ends})"]
    if prediction.tokens_per_s:
        parts.append(f"{rounded(prediction.tokens_per_s)} tokens/s")
    if prediction.mfu:
        parts.append(f"MFU {prediction.mfu:.0%}")
    return f"{', '.join(parts)}, rates: {one_line(prediction.rates)}"


def unpredicted(report: ReportRecord) -> str:
    """Returns a line that says why a report has no predicted seconds. Returns "" if it has them, or if it has no
    target."""
    if report.prediction or not report.target:
        return ""
    why = missing(bool(report.schedule), report.target, measured=False)
    return f"no seconds are predicted: {one_line(why)}" if why else ""


def spent(report: ReportRecord) -> str:
    """Returns a line that splits the predicted seconds into terms, such as matrix products and collectives. Returns ""
    if there is no prediction."""
    prediction = StepPrediction.stated(report)
    if prediction is None:
        return ""
    by_words = {WORDS.get(term, term): seconds for term, seconds in prediction.by_term.items()}
    return f"spent on {_terms(by_words, prediction.seconds)}"


def unit(seconds: float) -> tuple[str, float]:
    """Chooses the unit in which a time is shown: the largest in which its value is at least 0.1. Returns (name, seconds
    of the unit), such as ("ms", 1e-3).
    """
    return next(((name, scale) for name, scale in _UNITS if seconds >= scale / 10), _UNITS[-1])


def predicted_time(prediction: StepPrediction) -> str:
    """Returns the predicted time with its unit, such as "0.721 s"."""
    name, scale = unit(prediction.seconds)
    return f"{rounded(prediction.seconds / scale)} {name}"


def interval(prediction: StepPrediction) -> str:
    """Returns the interval of a predicted time with two digits and a unit, such as "0.65 to 0.81 s"."""
    name, scale = unit(prediction.seconds)
    return f"{rounded(prediction.low / scale, 2)} to {rounded(prediction.high / scale, 2)} {name}"


def within(low: float | None, high: float | None) -> str:
    """Returns an interval with two digits, such as "0.65 to 0.81"; "" if one of its ends is None."""
    return "" if low is None or high is None else f"{rounded(low, 2)} to {rounded(high, 2)}"


def with_spread(seconds: float | None, low: float | None, high: float | None) -> str:
    """Returns predicted seconds and their interval, such as "0.721, 0.65 to 0.81"; "" if there is no prediction."""
    return "" if seconds is None else ", ".join(filter(None, (rounded(seconds), within(low, high))))


def call_name(report: ReportRecord) -> str:
    """Returns the name of the period that a report's seconds measure: "update" if the tokens per update are known,
    otherwise "call of the step"."""
    return "update" if report.subject.tokens else "call of the step"


def at_least(report: ReportRecord) -> str:
    """Returns a line with the lower bound of an update's time, from the data sheet's rates, or why there is none; "" if
    unknown. If there is no prediction, the line also has the resulting upper bounds of tokens/s and MFU."""
    best = at_best(report)
    if best is None:
        return one_line(str(report.roofline.get("unknown", "")))
    parts = [f"at least {best.update_seconds:.3g} s per {call_name(report)}"]
    if best.tokens_per_s and not report.prediction:
        parts.append(f"at most {best.tokens_per_s:,.0f} tokens/s")
    if best.mfu and not report.prediction:
        parts.append(f"MFU at most {best.mfu:.0%}")
    calls, by_term = report.subject.calls, report.roofline["by_term"].items()
    terms = _terms({term.replace("_", " "): calls * seconds for term, seconds in by_term}, best.update_seconds)
    return f"{', '.join(parts)}, by {best.source} ({terms})"


def _terms(by_term: Mapping[str, float], total: float) -> str:
    return ", ".join(f"{term} {seconds:.3g} s" for term, seconds in by_term.items() if seconds > _SMALL * total)
