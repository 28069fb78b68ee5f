"""One variant that a fit tried, and its result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.compare.compare_rows import thrift
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.units import human
from bytescope.train.plan.config_grid import ConfigRow
from bytescope.train.plan.trials import Trials


@dataclasses.dataclass(frozen=True)
class Step:
    """One variant of the walk.

    Fields:
        stage: a key of `train.plan.fit.fit_progress.STAGES`. what: the variant in words. keys: dotted key -> text.
        answer: the worker's (`memory.compare.worker`); its `status` is "ok", or why the variant cannot run.
        fits: whether it is within the budgets of device and host. verdict: the same, or the missing bytes, in words.
        prediction: of its seconds; None for a variant that cannot run.
    """

    stage: str
    what: str
    keys: Mapping[str, str]
    answer: Mapping[str, Any]
    fits: bool
    verdict: str
    prediction: StepPrediction | None = None

    @property
    def ok(self) -> bool:
        """Returns whether the variant runs, and so has figures."""
        return self.answer["status"] == "ok"

    @property
    def seconds(self) -> float:
        """Predicted seconds per update; infinite for a variant that cannot run."""
        return self.prediction.seconds if self.prediction else math.inf

    @property
    def spread(self) -> tuple[float | None, float | None]:
        """The interval of the predicted seconds; (None, None) for a variant that cannot run."""
        return (self.prediction.low, self.prediction.high) if self.prediction else (None, None)

    @property
    def thrift(self) -> tuple[float, int, bool]:
        """The order of variants that are predicted to be equally fast, smallest first (`compare_rows.thrift`)."""
        names = ("recompute_flops_fraction", "allocated_bytes", "host_bytes")
        return thrift(ConfigRow.from_answer(self.keys, {name: self.answer.get(name) for name in names}))

    @property
    def allocated(self) -> int:
        """Allocated bytes on one device; 0 for a variant that cannot run."""
        return self.answer.get("allocated_bytes", 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the step as a row of a fit's `walk` (see `train.plan.fit.fit_result`)."""
        low, high = self.spread
        return {
            "stage": self.stage,
            "what": self.what,
            "keys": dict(self.keys),
            **{key: self.answer.get(key) for key in ("allocated_bytes", "host_bytes", "recompute_flops_fraction")},
            "predicted_seconds": self.seconds if self.prediction else None,
            "predicted_seconds_low": low,
            "predicted_seconds_high": high,
            "fits": self.fits,
            "verdict": self.verdict,
        }

    def certificate(self, flags: str, budget: int, host_budget: float) -> dict[str, Any]:
        """Returns the step as a fit's `certificate`, which shows that nothing fits: its memory, and the missing bytes.

        flags: run the step. budget, host_budget: bytes of one device and of its share of host memory.
        """
        return {
            "keys": dict(self.keys),
            "flags": flags,
            "what": self.what,
            "allocated_bytes": self.allocated,
            "missing_bytes": max(self.allocated - budget, 0),
            "host_bytes": self.answer["host_bytes"],
            "host_missing_bytes": int(max(self.answer["host_bytes"] - host_budget, 0)),
            "breakdown": dict(self.answer["breakdown"]),
        }


def judged(
    stage: str, what: str, keys: Mapping[str, str], answer: Mapping[str, Any], budget: int, trials: Trials
) -> Step:
    """Returns the step of a variant that runs, compared with the budgets of device and host."""
    over, host_over = answer["allocated_bytes"] - budget, answer["host_bytes"] - trials.host_budget
    verdict = "fits"
    if over > 0:
        verdict = f"{human(over)} over"
    elif host_over > 0:
        verdict = f"host {human(int(host_over))} over"
    return Step(stage, what, keys, answer, over <= 0 and host_over <= 0, verdict, trials.predicted(answer))
