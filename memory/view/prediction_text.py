"""What a step is predicted to take, and the least that it can take, in a line each."""

from __future__ import annotations

from collections.abc import Mapping

from bytescope.memory.cost.roofline import at_best
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.seconds.step_prediction import StepPrediction, missing
from bytescope.memory.view.console import one_line
from bytescope.memory.view.figures import rounded

# Terms of a prediction (`seconds.walk.TERMS`) whose names do not say it all.
WORDS = {"collectives": "waiting for collectives", "host_link": "waiting for the host link"}
# Terms of less than this share of the total are left out.
_SMALL = 0.001
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def predicted(report: ReportRecord) -> str:
    """The seconds of an update with their spread, tokens/s, MFU and the source of the rates, in one line; "" where
    nothing is predicted."""
    found = StepPrediction.stated(report)
    if found is None:
        return ""
    parts = [f"predicted {taken(found)} per {once(report)} ({interval(found).rpartition(' ')[0]})"]
    if found.tokens_per_s:
        parts.append(f"{rounded(found.tokens_per_s)} tokens/s")
    if found.mfu:
        parts.append(f"MFU {found.mfu:.0%}")
    return f"{', '.join(parts)}, rates: {one_line(found.rates)}"


def unpredicted(report: ReportRecord) -> str:
    """Returns why no seconds are predicted, in one line; "" if they are or can be predicted, or without a target."""
    if report.prediction or not report.target:
        return ""
    why = missing(bool(report.schedule), report.target, measured=False)
    return f"no seconds are predicted: {one_line(why)}" if why else ""


def spent(report: ReportRecord) -> str:
    """What the predicted seconds are spent on, in one line; "" where nothing is predicted."""
    found = StepPrediction.stated(report)
    if found is None:
        return ""
    return f"spent on {_terms({WORDS.get(term, term): taken for term, taken in found.by_term.items()}, found.seconds)}"


def unit(seconds: float) -> tuple[str, float]:
    """(name, seconds) of the unit that a time is written in: below a tenth of a second one that is smaller."""
    return next(((name, scale) for name, scale in _UNITS if seconds >= scale / 10), _UNITS[-1])


def taken(found: StepPrediction) -> str:
    """The predicted seconds with their unit: "0.721 s"."""
    name, scale = unit(found.seconds)
    return f"{rounded(found.seconds / scale)} {name}"


def interval(found: StepPrediction) -> str:
    """The spread of a prediction, in two digits, with the unit: "0.65 to 0.81 s"."""
    name, scale = unit(found.seconds)
    return f"{rounded(found.low / scale, 2)} to {rounded(found.high / scale, 2)} {name}"


def within(low: float | None, high: float | None) -> str:
    """From the least to the most seconds that are to be expected, in two digits; "" where nothing is predicted."""
    return "" if low is None or high is None else f"{rounded(low, 2)} to {rounded(high, 2)}"


def with_spread(seconds: float | None, low: float | None, high: float | None) -> str:
    """Predicted seconds with their spread: "0.721, 0.65 to 0.81"; "" where nothing is predicted."""
    return "" if seconds is None else ", ".join(filter(None, (rounded(seconds), within(low, high))))


def once(report: ReportRecord) -> str:
    """What seconds are of: an update, where the trainer told one."""
    return "update" if report.subject.tokens else "call of the step"


def at_least(report: ReportRecord) -> str:
    """The least that an update can take, in one line; "" where unknown. "At least", since no program reaches a data
    sheet's rates; the most of tokens/s and MFU is told where nothing is predicted of them."""
    best = at_best(report)
    if best is None:
        return ""
    parts = [f"at least {best.update_seconds:.3g} s per {once(report)}"]
    if best.tokens_per_s and not report.prediction:
        parts.append(f"at most {best.tokens_per_s:,.0f} tokens/s")
    if best.mfu and not report.prediction:
        parts.append(f"MFU at most {best.mfu:.0%}")
    calls, by_term = report.subject.calls, report.roofline["by_term"].items()
    terms = _terms({term.replace("_", " "): calls * taken for term, taken in by_term}, best.update_seconds)
    return f"{', '.join(parts)}, by {best.source} ({terms})"


def _terms(by_term: Mapping[str, float], total: float) -> str:
    return ", ".join(f"{term} {taken:.3g} s" for term, taken in by_term.items() if taken > _SMALL * total)
