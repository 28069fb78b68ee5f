"""One variant of a config that `bytescope fit` tried, with its bytes and predicted seconds."""

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
    """A variant of a config (some keys changed) that `bytescope fit` tried, and the result of compiling it.

    Attributes:
        stage: the stage of the search, a key of `train.plan.fit.fit_progress.STAGES`.
        what: a description of the variant.
        keys: the config keys of the variant, dotted key -> text.
        answer: the JSON record of the compiled program that the worker process returned: bytes, FLOPs and schedule
            (`memory.compare.worker`). Its `status` is "ok", or the reason why the variant cannot run.
        fits: whether the variant is within the memory budgets of device and host.
        verdict: "fits", or the bytes by which it exceeds a budget, or the reason why it cannot run.
        prediction: the predicted seconds per update; None if the variant cannot run.
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
        """Returns whether the variant can run. Only then are its bytes and seconds known."""
        return self.answer["status"] == "ok"

    @property
    def seconds(self) -> float:
        """Predicted seconds per update; infinite if the variant cannot run."""
        return self.prediction.seconds if self.prediction else math.inf

    @property
    def spread(self) -> tuple[float | None, float | None]:
        """The lower and the upper end of the interval of predicted seconds per update; (None, None) if the variant
        cannot run."""
        return (self.prediction.low, self.prediction.high) if self.prediction else (None, None)

    @property
    def thrift(self) -> tuple[float, int, bool]:
        """The sort key for variants whose predicted seconds are about equal.

        The lowest key is best: first the least recomputation, then the least memory on device and host, then a named
        remat policy before a list of tensors.
        """
        names = ("recompute_flops_fraction", "allocated_bytes", "host_bytes")
        return thrift(ConfigRow.from_answer(self.keys, {name: self.answer.get(name) for name in names}))

    @property
    def allocated(self) -> int:
        """Allocated bytes on one device; 0 if the variant cannot run."""
        return self.answer.get("allocated_bytes", 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the variant with its bytes and predicted seconds as one entry of the list `walk` in the JSON result
        of `bytescope fit`."""
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
        """Returns the bytes of the variant, and by how much they exceed the budgets, as JSON values.

        They are the `certificate` in the JSON result of `bytescope fit` if nothing fits.

        Args:
            flags: the command-line flags that run the variant.
            budget: the bytes available on one device.
            host_budget: the bytes of host memory available per device.
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


def judge_variant(
    stage: str, what: str, keys: Mapping[str, str], answer: Mapping[str, Any], budget: int, trials: Trials
) -> Step:
    """Compares a compiled variant with the memory budgets of device and host, and returns it as a `Step`.

    Args:
        stage: the stage of the search.
        what: a description of the variant.
        keys: the config keys of the variant, dotted key -> text.
        answer: the JSON record of the compiled program that the worker process returned: bytes, FLOPs and schedule.
        budget: the bytes available on one device.
        trials: the object that compiled the variant; its target has the budget of host memory.
    """
    over, host_over = answer["allocated_bytes"] - budget, answer["host_bytes"] - trials.host_budget
    verdict = "fits"
    if over > 0:
        verdict = f"{human(over)} over"
    elif host_over > 0:
        verdict = f"host {human(int(host_over))} over"
    return Step(stage, what, keys, answer, over <= 0 and host_over <= 0, verdict, trials.predicted(answer))
