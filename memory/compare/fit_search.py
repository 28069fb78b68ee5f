"""The search of `bytescope fit`: compiles variants of a subject to find the best one that fits a memory budget.

`FitSearch` keeps the variants, the limits and the result. A subclass chooses the variants of one kind of subject: a
function (`memory.commands.fit_program`), a program of another trainer (`memory.commands.fit_adapter`) or a config
(`train.plan.fit.fit_walk`).

Keys of the JSON result (sizes are bytes on ONE device):

- `walk`: the variants that were tried, in order: `stage`, `what`, `keys` (the keys that the search set, {} for a
  function), `allocated_bytes`, `host_bytes`, `predicted_seconds` with `predicted_seconds_low` and
  `predicted_seconds_high`, `predicted_tokens_per_s`, `recomputed_flops`, `recompute_flops_fraction` (recomputed FLOPs
  divided by the model's FLOPs), `fits`, `verdict`. Figures are null if they are unknown, or if a variant cannot run.
- `best`: the row of `walk` that was chosen, with `flags` (the flags that select it, "" for a function) and
  `breakdown` (category -> bytes); null if nothing fits. For a config, it also has the fields of
  `memory.compare.compare_rows.Row`. For other subjects, it also has `policy` (the code of the policy, "" if the program
  needs no change), `policy_name` (the name in `jax.checkpoint_policies`, "" for other policies), `code` (lines of code
  for the source) and `kept`, the values that every layer keeps: `label`, `name` (the checkpoint name, "" for none),
  `type`, `count` and `bytes` in all layers, `where`.
- `certificate`: if nothing fits, the row of `walk` nearest to the budget, with `flags`, `breakdown`, `missing_bytes`
  and `host_missing_bytes`; null if something fits.
- `ties`: the `what` of the variants of a config that fit and are predicted to be as fast as the best.
- `program` (the name of the subject), `budget_bytes`, `host_budget_bytes` (null if there is none), `target`,
  `versions`, `programs` (number of programs compiled, not counting programs from the cache), `seconds` (duration of the
  search), `stopped` (why the search ended early; "" if it did not), `rates` (the source of the rates behind the
  predicted seconds).
- `layers`: for subjects other than configs, the layers that were found: `name`, `where`, `times`, `how`.

A config has further keys (`train.plan.fit.fit_result`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.search_limits import CTRL_C, Limits, Stopped
from bytescope.memory.devices.targets import Target
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.units import human


@dataclasses.dataclass(frozen=True)
class Step:
    """A variant that a search tried, and the result of compiling it.

    Attributes:
        stage: the stage of the search, a key of `fit_view.STAGES`.
        what: a description of the variant.
        keys: the keys that the search set, key -> text.
        answer: the figures of the compiled program, as a worker process returns them (`memory.compare.worker`). Its
            `status` is "ok", or the reason why the variant cannot run.
        fits: whether the variant is within the memory budgets of device and host.
        verdict: "fits", or the bytes by which it exceeds a budget, or the reason why it cannot run.
        prediction: the predicted seconds per update; None if they are unknown.
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
        """Whether the variant can run. Only then are its bytes and seconds known."""
        return self.answer["status"] == "ok"

    @property
    def seconds(self) -> float:
        """Predicted seconds per update; infinite if they are unknown."""
        return self.prediction.seconds if self.prediction else math.inf

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second over all devices; 0 if they are unknown."""
        return (self.prediction.tokens_per_s if self.prediction else None) or 0.0

    @property
    def allocated(self) -> int:
        """Allocated bytes on one device; 0 if the variant cannot run."""
        return self.answer.get("allocated_bytes", 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the variant as one entry of the list `walk` in the JSON result."""
        names = ("allocated_bytes", "host_bytes", "recomputed_flops", "recompute_flops_fraction")
        predicted = self.prediction
        return {
            "stage": self.stage,
            "what": self.what,
            "keys": dict(self.keys),
            **{name: self.answer.get(name) for name in names},
            "predicted_seconds": predicted.seconds if predicted else None,
            "predicted_seconds_low": predicted.low if predicted else None,
            "predicted_seconds_high": predicted.high if predicted else None,
            "predicted_tokens_per_s": predicted.tokens_per_s if predicted else None,
            "fits": self.fits,
            "verdict": self.verdict,
        }


class Search:
    """A search that can be stopped: by its limits, or with Ctrl-C. The results so far are kept.

    Attributes:
        stopped: why the search ended early; "" if it did not.
        seconds: the duration of the search in seconds.
    """

    def __init__(self) -> None:
        self.stopped, self.seconds = "", 0.0

    def run_part(self, part: Callable[[], None]) -> None:
        """Runs a part of the search, and adds its duration to `seconds`. If it ends early, sets `stopped`."""
        began = time.monotonic()
        try:
            part()
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:  # Ctrl-C between two compiles
            self.stopped = CTRL_C
        self.seconds += time.monotonic() - began


class FitSearch(Search):
    """A search over variants of a subject. A subclass implements `_search`, which compiles and records variants, and
    sets `best` there or in `_choose`.

    Args:
        name: the name of the subject.
        target: the devices to compile for.
        budget: the bytes available on one device; a subclass may set the attribute later.
        host_budget: the bytes of host memory available per device.
        limits: the limits of the search.
        show: called with each variant when it is recorded.

    Attributes:
        steps: the variants that were tried, in order.
        best: the chosen variant; None if none fits.
        tightest: the variant that exceeds the budgets of device and host by the fewest bytes; None before any variant
            is compiled.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        budget: int,
        host_budget: float = math.inf,
        limits: Limits | None = None,
        show: Callable[[Step], None] = lambda step: None,
    ):
        super().__init__()
        self.name, self.target, self.budget, self.host_budget = name, target, budget, host_budget
        self.limits, self._show = limits or Limits(), show
        self.steps: list[Step] = []
        self.best: Step | None = None
        self.tightest: Step | None = None

    def run(self) -> None:
        """Runs the search until it is finished, a limit is reached, or the user presses Ctrl-C."""
        self.run_part(self._search)
        self._choose()

    def _search(self) -> None:
        raise NotImplementedError

    def _choose(self) -> None:
        """Sets `best` when the search has ended, also early. By default the search has set it already."""

    def judge(
        self,
        stage: str,
        what: str,
        keys: Mapping[str, str],
        answer: Mapping[str, Any],
        prediction: StepPrediction | None,
    ) -> Step:
        """Compares a compiled variant with the memory budgets of device and host. The arguments are the fields of
        `Step`."""
        if answer["status"] != "ok":
            return Step(stage, what, keys, answer, False, f"cannot run: {answer['status']}")
        over, host_over = answer["allocated_bytes"] - self.budget, answer["host_bytes"] - self.host_budget
        verdict = "fits"
        if over > 0:
            verdict = f"{human(over)} over"
        elif host_over > 0:
            verdict = f"host {human(int(host_over))} over"
        return Step(stage, what, keys, answer, over <= 0 and host_over <= 0, verdict, prediction)

    def record(self, step: Step) -> Step:
        """Adds a variant to `steps`, updates `tightest`, and shows the variant. Returns it."""
        if step.ok and (self.tightest is None or self._excess_bytes(step) < self._excess_bytes(self.tightest)):
            self.tightest = step
        self.steps.append(step)
        self._show(step)
        return step

    @property
    def fitting(self) -> list[Step]:
        """The variants that fit, in the order in which they were tried."""
        return [step for step in self.steps if step.fits]

    @property
    def ties(self) -> Sequence[Step]:
        """The variants that fit and are predicted to be as fast as the best one, without the best one."""
        return ()

    def _missing_bytes(self, step: Step) -> tuple[int, int]:
        """Returns the bytes by which a variant exceeds the budgets of device and host."""
        return max(step.allocated - self.budget, 0), int(max(step.answer["host_bytes"] - self.host_budget, 0))

    def _excess_bytes(self, step: Step) -> int:
        return sum(self._missing_bytes(step))

    def to_json(self, flags: Callable[[Mapping[str, str]], str], of_best: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of the search as JSON values. The module docstring lists the keys.

        Args:
            flags: function from the keys of a variant to the flags that select it.
            of_best: further fields of `best`.
        """
        from bytescope.memory.devices.compiler import versions

        best, certificate = None, None
        chosen = self.best or self.tightest
        if chosen is not None:
            row = {**chosen.to_json(), "flags": flags(chosen.keys), "breakdown": dict(chosen.answer["breakdown"])}
            if self.best is not None:
                best = {**row, **of_best}
            else:
                missing, host_missing = self._missing_bytes(chosen)
                certificate = {**row, "missing_bytes": missing, "host_missing_bytes": host_missing}
        return {
            "program": self.name,
            "best": best,
            "walk": [step.to_json() for step in self.steps],
            "certificate": certificate,
            "ties": [step.what for step in self.ties],
            "budget_bytes": self.budget,
            "host_budget_bytes": None if self.host_budget == math.inf else int(self.host_budget),
            "target": self.target.to_json(),
            "versions": dict(versions()),
            "programs": self.limits.compiles,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "rates": next((step.prediction.rates for step in self.steps if step.prediction), ""),
        }
