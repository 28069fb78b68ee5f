"""How far adapters go on a target: for each rank the longest sequences and the largest micro-batch that fit, compiled.

Everything is recomputed, and the frozen weights are as small as the levers allow. Lengths are tried with one sequence
at a time, with block inputs on the device and, if that lever is free, in host memory; micro-batches have the config's
length and divide its update. Ranks are tried smallest first. A larger rank or length never needs fewer bytes: adapters,
their moments, their gradients and the tensors that they keep per token are all linear in the rank
(`memory.formulas.adapter_formulas`). So the length that fits a smaller rank bounds the next rank and is tried first; if
it fits, one compile settles the next rank. Otherwise the compiled bytes per token lead to the length that fits, until
the next longer one has been compiled and does not fit.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.remat.remat_search import FULL
from bytescope.train.plan.config_grid import remat_keys
from bytescope.train.plan.fit.fit_step import Step, judged
from bytescope.train.plan.fit.fit_walk import Walk
from bytescope.train.plan.trials import Stopped

# Ranks that are tried in addition to the config's.
RANKS = (8, 16, 64, 256)
# Lengths are multiples of this number of tokens, or of the config's length if that is shorter. Maximum number of
# lengths that are tried for one answer.
GRAIN, MAX_TRIED = 1024, 12
# The policy that keeps block inputs in host memory.
OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True)
class Reached:
    """The largest length or micro-batch that fits at a rank, and its figures; if none fits, the smallest.

    Fields:
        rank: of the adapters. length: tokens of a sequence. micro: sequences at a time. base: how frozen weights are
            stored. policy: of remat. most: which of "length" and "micro" was raised.
        step: the variant as the walk judges it. tokens: of its update.
        beyond: the smallest value that was tried and does not fit, 0 if the model or the update has no more.
    """

    rank: int
    length: int
    micro: int
    base: str
    policy: str
    most: str
    step: Step
    tokens: int
    beyond: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second over all devices."""
        return self.tokens / self.step.seconds if self.step.seconds else 0.0

    @property
    def verdict(self) -> str:
        """The limit in a few words; the missing bytes if the variant does not fit."""
        if not self.step.fits:
            return self.step.verdict
        if self.most == "micro":
            return f"{self.beyond} at once do not fit" if self.beyond else "the whole update at once"
        return f"{self.beyond:,} do not fit" if self.beyond else "the longest of the model"

    def to_json(self, flags: str) -> dict[str, Any]:
        """Returns the row as JSON values. flags: set its keys."""
        step = self.step.to_json()
        own = ("rank", "length", "micro", "base", "policy", "most", "beyond", "tokens_per_s", "verdict")
        row = {name: getattr(self, name) for name in own}
        row["flags"] = flags
        for name in ("allocated_bytes", "host_bytes", "predicted_seconds", "fits"):
            row[name] = step[name]
        return row


@dataclasses.dataclass
class Bracket:
    """The longest length that fits and the shortest that does not, in tokens, and the length to try next.

    Fields:
        fits, fails: these two lengths; before any trial 0, and one step beyond the model's maximum.
        at: the length to try next, 0 if the two are neighbours. grain: the step. slope: bytes per token, 0 if unknown.
        tried: length -> bytes.
    """

    fits: int
    fails: int
    at: int
    grain: int
    slope: float = 0.0
    tried: dict[int, int] = dataclasses.field(default_factory=dict)

    def learn(self, step: Step, budget: int) -> None:
        """Records the variant of length `at`, and sets `at` to the next length."""
        length, size = self.at, step.allocated
        if self.tried:
            last, before = list(self.tried.items())[-1]
            self.slope = (size - before) / (length - last)
        self.tried[length] = size
        if step.fits:
            self.fits = length
        else:
            self.fails = length
        if self.fails - self.fits <= self.grain or len(self.tried) == MAX_TRIED:
            self.at = 0
            return
        guess = 2 * length if step.fits else (self.fits + length) // 2
        if self.slope > 0 and step.fits == (size <= budget):  # otherwise host memory is the limit
            guess = length + int((budget - size) / self.slope)
        guess = guess // self.grain * self.grain
        self.at = min(max(guess, self.fits + self.grain), self.fails - self.grain)

    def larger(self) -> Bracket:
        """Returns the start for a larger rank: the longest length that fits here."""
        return Bracket(0, self.fails, self.fits, self.grain, self.slope)


class Reach:
    """Tries ranks, lengths and micro-batches after a walk: `found` has all compiled variants, `rows` the answers."""

    def __init__(self, walk: Walk):
        self.walk, self.trials, self.space = walk, walk.trials, walk.space
        self.found: list[Reached] = []
        self.answers: list[Reached] = []
        self.stopped = ""

    def run(self) -> None:
        """Tries as much as the limits on compiles and time allow."""
        if self.walk.stopped or self.walk.tightest is None:
            return
        own = self.space.flat["lora.rank"]
        ranks = [own] if "lora.rank" in self.space.given else sorted({own, *RANKS})
        try:
            if not {"micro", "accumulation"} - self.space.levers:
                self._micros(ranks)
            if "data.seq_len" not in self.space.given:
                for policy in (FULL, OFFLOAD) if "offload" in self.space.levers else (FULL,):
                    self._lengths(ranks, policy)
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"

    @property
    def rows(self) -> list[Reached]:
        """The answers by rank, variants that fit first, the fastest of them first."""
        return sorted(self.answers, key=lambda row: (row.rank, not row.step.fits, -row.tokens_per_s))

    def to_json(self, flags: Callable[[Mapping[str, str]], str]) -> list[dict[str, Any]]:
        """Returns the rows as JSON values."""
        return [row.to_json(flags(row.step.keys)) for row in self.rows]

    def _micros(self, ranks: Sequence[int]) -> None:
        """Finds the largest micro-batch of each rank that divides the update."""
        smallest = self._smallest()
        sizes, beyond = self.space.micros(smallest), 0
        for rank in ranks:
            tried: dict[int, Reached] = {}

            def fails(micro: int, rank: int = rank, tried: dict[int, Reached] = tried) -> bool:
                keys = {**smallest, "lora.rank": str(rank), **self.space.batch(smallest, micro), **remat_keys(FULL)}
                row = self._compiled(keys, FULL, "micro")
                if row is not None:
                    tried[micro] = row
                return row is None or not row.step.fits

            if sizes and fails(sizes[-1]):
                first = bisect.bisect_left(sizes, True, hi=len(sizes) - 1, key=fails)
                sizes, beyond = sizes[:first], sizes[first]
            self._answer(tried, beyond)

    def _lengths(self, ranks: Sequence[int], policy: str) -> None:
        """Finds the longest sequences of each rank, one at a time."""
        own, most = self.space.flat["data.seq_len"], self.space.flat["model.max_seq_len"]
        grain = min(GRAIN, own)
        bracket = Bracket(0, most // grain * grain + grain, own // grain * grain, grain)
        keys = {
            **self._smallest(),
            "batch.micro": "1",
            "batch.tokens": "0",
            "batch.accumulation": "1",
            **remat_keys(policy),
        }
        for rank in ranks:
            tried = {}
            while bracket.at:
                variant = {**keys, "lora.rank": str(rank), "data.seq_len": str(bracket.at)}
                row = self._compiled(variant, policy, "length")
                if row is None:
                    return
                tried[bracket.at] = row
                bracket.learn(row.step, self.walk.budget)
            self._answer(tried, bracket.fails if bracket.fails <= most else 0)
            bracket = bracket.larger()

    def _smallest(self) -> dict[str, str]:
        """Returns the keys, without remat, of the smallest variant that was tried with the smallest frozen weights, if
        possible without stages, which need several micro-batches."""
        ran = [step for step in self.walk.steps if step.ok]
        ran = [step for step in ran if not self.space.schedule(step.keys)] or ran
        narrow = [step for step in ran if step.keys.get("lora.base") == "nf4"] or ran
        keys = min(narrow, key=lambda step: step.allocated).keys
        return {key: text for key, text in keys.items() if not key.startswith("remat.")}

    def _compiled(self, keys: Mapping[str, str], policy: str, most: str) -> Reached | None:
        """Compiles a variant and returns its figures; None if it cannot run."""
        answer = self.trials.compile([keys])[0]
        if answer["status"] != "ok":
            return None
        flat = self.trials.flat(keys)
        step = judged("reach", "", keys, answer, self.walk.budget, self.trials)
        row = Reached(
            flat["lora.rank"],
            flat["data.seq_len"],
            flat["batch.micro"],
            flat["lora.base"],
            policy,
            most,
            step,
            answer["tokens_per_update"],
        )
        self.found.append(row)
        return row

    def _answer(self, tried: Mapping[int, Reached], beyond: int) -> None:
        """Adds the largest size of a rank that fits; if none fits, the smallest that was tried."""
        if not tried:
            return
        fitting = [size for size, row in tried.items() if row.step.fits]
        size = max(fitting) if fitting else min(tried)
        self.answers.append(dataclasses.replace(tried[size], beyond=beyond))
