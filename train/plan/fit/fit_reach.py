"""Finds the limits of LoRA adapters on a target: for each rank, the longest sequence and the largest micro-batch that
fit.

Every answer is compiled, with all blocks recomputed and the frozen weights stored in the smallest format that the
levers allow. Lengths are tried with one sequence at a time, with block inputs on the device and, if the lever
`offload` is allowed, in host memory. Micro-batches have the config's sequence length and divide the batch of an
update.

Ranks are tried smallest first. A larger rank or length never needs fewer bytes: adapters, their moments, their
gradients and the tensors that they save per token all grow linearly with the rank
(`memory.formulas.adapter_formulas`). So the longest length of a smaller rank is an upper bound for the next rank and
is tried first; if it fits, one compile is enough for the rank. Otherwise the compiled bytes per token predict the next
length to try, until a length fits and the next longer one does not.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.remat.remat_search import FULL
from bytescope.train.plan.config_grid import remat_keys
from bytescope.train.plan.fit.fit_step import Step, judge_variant
from bytescope.train.plan.fit.fit_walk import Walk
from bytescope.train.plan.trials import Stopped

# Ranks that are tried in addition to the config's.
RANKS = (8, 16, 64, 256)
# GRAIN: lengths are multiples of this number of tokens, or of the config's sequence length if it is shorter.
# MAX_TRIED: maximum number of lengths that are tried for one answer.
GRAIN, MAX_TRIED = 1024, 12
# The policy that keeps block inputs in host memory.
OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True)
class Reached:
    """The largest sequence length or micro-batch that fits when LoRA adapters of one rank are trained.

    If nothing fits, this is the smallest length or micro-batch that was tried.

    Attributes:
        rank: rank of the adapters.
        length: tokens per sequence.
        micro: sequences per micro-batch.
        base: the storage format of the frozen weights (`lora.base`).
        policy: the remat policy.
        most: which size was maximized, "length" or "micro".
        step: the compiled variant of the config, its bytes and predicted seconds, and whether it fits.
        tokens: tokens per update.
        beyond: the smallest value that was tried and does not fit; 0 if the model's maximum length or the whole update
            fits.
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
        """Predicted tokens per second over all devices; 0 if the seconds of an update are unknown."""
        return self.tokens / self.step.seconds if self.step.seconds else 0.0

    @property
    def verdict(self) -> str:
        """The reason why the size is not larger, such as "16,384 do not fit" or "the model's maximum". If nothing fits,
        the bytes by which the smallest variant exceeds a budget."""
        if not self.step.fits:
            return self.step.verdict
        if self.most == "micro":
            return f"{self.beyond} at once do not fit" if self.beyond else "the whole update at once"
        return f"{self.beyond:,} do not fit" if self.beyond else "the model's maximum"

    def to_json(self, flags: str) -> dict[str, Any]:
        """Returns the rank, the size that fits, the bytes and the predicted speed as JSON values.

        flags: the command-line flags that run the variant.
        """
        step = self.step.to_json()
        own = ("rank", "length", "micro", "base", "policy", "most", "beyond", "tokens_per_s", "verdict")
        row = {name: getattr(self, name) for name in own}
        row["flags"] = flags
        for name in ("allocated_bytes", "host_bytes", "predicted_seconds", "fits"):
            row[name] = step[name]
        return row


@dataclasses.dataclass
class Bracket:
    """The state of an interval search for the longest sequence length, in tokens, that fits on a device.

    Attributes:
        fits: the longest length that fits so far; 0 before any length fits.
        fails: the shortest length that does not fit so far. Before any length fails, the model's maximum plus `grain`.
        at: the length to try next; 0 if the search is finished.
        grain: lengths are multiples of this number of tokens.
        slope: allocated bytes per token of length; 0 if unknown.
        tried: length -> allocated bytes on one device.
    """

    fits: int
    fails: int
    at: int
    grain: int
    slope: float = 0.0
    tried: dict[int, int] = dataclasses.field(default_factory=dict)

    def learn(self, step: Step, budget: int) -> None:
        """Records the result for the length `at`, and sets `at` to the next length to try.

        Args:
            step: the compiled variant of this length.
            budget: the bytes available on one device.
        """
        length, size = self.at, step.allocated
        if self.tried:
            last_length, last_size = list(self.tried.items())[-1]
            self.slope = (size - last_size) / (length - last_length)
        self.tried[length] = size
        if step.fits:
            self.fits = length
        else:
            self.fails = length
        if self.fails - self.fits <= self.grain or len(self.tried) == MAX_TRIED:
            self.at = 0
            return
        guess = 2 * length if step.fits else (self.fits + length) // 2
        if self.slope > 0 and step.fits == (size <= budget):  # if they differ, host memory is the limit
            guess = length + int((budget - size) / self.slope)
        guess = guess // self.grain * self.grain
        self.at = min(max(guess, self.fits + self.grain), self.fails - self.grain)

    def larger(self) -> Bracket:
        """Returns the initial state of the search for the next larger rank of adapters.

        Its first length to try is the longest length that fits the current rank, which is also its upper bound.
        """
        return Bracket(0, self.fails, self.fits, self.grain, self.slope)


class Reach:
    """Searches for the longest sequence and the largest micro-batch that fit, for LoRA adapters of several ranks.

    It continues a finished `Walk`, the search for the fastest configuration.

    Attributes:
        variants: all variants that were compiled.
        answers: for each rank, the longest length and the largest micro-batch, in the order in which they were found.
        stopped: why the search ended early; "" if it did not.
    """

    def __init__(self, walk: Walk):
        self.walk, self.trials, self.space = walk, walk.trials, walk.space
        self.variants: list[Reached] = []
        self.answers: list[Reached] = []
        self.stopped = ""

    def run(self) -> None:
        """Finds, for each rank of the LoRA adapters, the longest sequence and the largest micro-batch that fit the
        memory budget, and stores them in `answers`.

        Each variant of the config (rank, sequence length, micro-batch, remat policy) is compiled to learn its bytes.
        The search ends early at a limit on compiles or time, or with Ctrl-C; `stopped` then has the reason.
        """
        if self.walk.stopped or self.walk.tightest is None:
            return
        own = self.space.flat["lora.rank"]
        ranks = [own] if "lora.rank" in self.space.given else sorted({own, *RANKS})
        try:
            if not {"micro", "accumulation"} - self.space.levers:
                self._find_max_micro_batches(ranks)
            if "data.seq_len" not in self.space.given:
                for policy in (FULL, OFFLOAD) if "offload" in self.space.levers else (FULL,):
                    self._find_max_lengths(ranks, policy)
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"

    @property
    def rows(self) -> list[Reached]:
        """The largest lengths and micro-batches that were found, sorted by rank.

        For each rank, variants that fit come first, sorted by tokens per second, fastest first.
        """
        return sorted(self.answers, key=lambda row: (row.rank, not row.step.fits, -row.tokens_per_s))

    def to_json(self, flags: Callable[[Mapping[str, str]], str]) -> list[dict[str, Any]]:
        """Returns the longest sequences and largest micro-batches as JSON values, sorted by rank.

        flags: (config keys, dotted key -> text) -> the command-line flags that set them.
        """
        return [row.to_json(flags(row.step.keys)) for row in self.rows]

    def _find_max_micro_batches(self, ranks: Sequence[int]) -> None:
        smallest = self._keys_of_smallest_variant()
        sizes, beyond = self.space.micros(smallest), 0
        for rank in ranks:
            tried: dict[int, Reached] = {}

            def fails(micro: int, rank: int = rank, tried: dict[int, Reached] = tried) -> bool:
                keys = {**smallest, "lora.rank": str(rank), **self.space.batch(smallest, micro), **remat_keys(FULL)}
                row = self._compile_variant(keys, FULL, "micro")
                if row is not None:
                    tried[micro] = row
                return row is None or not row.step.fits

            if sizes and fails(sizes[-1]):
                first = bisect.bisect_left(sizes, True, hi=len(sizes) - 1, key=fails)
                sizes, beyond = sizes[:first], sizes[first]
            self._add_largest_fitting(tried, beyond)

    def _find_max_lengths(self, ranks: Sequence[int], policy: str) -> None:
        own, maximum = self.space.flat["data.seq_len"], self.space.flat["model.max_seq_len"]
        grain = min(GRAIN, own)
        bracket = Bracket(0, maximum // grain * grain + grain, own // grain * grain, grain)
        keys = {
            **self._keys_of_smallest_variant(),
            "batch.micro": "1",
            "batch.tokens": "0",
            "batch.accumulation": "1",
            **remat_keys(policy),
        }
        for rank in ranks:
            tried = {}
            while bracket.at:
                variant = {**keys, "lora.rank": str(rank), "data.seq_len": str(bracket.at)}
                row = self._compile_variant(variant, policy, "length")
                if row is None:
                    return
                tried[bracket.at] = row
                bracket.learn(row.step, self.walk.budget)
            self._add_largest_fitting(tried, bracket.fails if bracket.fails <= maximum else 0)
            bracket = bracket.larger()

    def _keys_of_smallest_variant(self) -> dict[str, str]:
        # Without pipeline stages if possible, because stages need several micro-batches. Then with frozen weights in
        # NF4.
        ran = [step for step in self.walk.steps if step.ok]
        ran = [step for step in ran if not self.space.schedule(step.keys)] or ran
        candidates = [step for step in ran if step.keys.get("lora.base") == "nf4"] or ran
        keys = min(candidates, key=lambda step: step.allocated).keys
        return {key: text for key, text in keys.items() if not key.startswith("remat.")}

    def _compile_variant(self, keys: Mapping[str, str], policy: str, most: str) -> Reached | None:
        answer = self.trials.compile([keys])[0]
        if answer["status"] != "ok":
            return None
        flat = self.trials.flat(keys)
        step = judge_variant("reach", "", keys, answer, self.walk.budget, self.trials)
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
        self.variants.append(row)
        return row

    def _add_largest_fitting(self, tried: Mapping[int, Reached], beyond: int) -> None:
        # beyond: the smallest size that does not fit; 0 if the largest possible size fits.
        if not tried:
            return
        fitting = [size for size, row in tried.items() if row.step.fits]
        size = max(fitting) if fitting else min(tried)
        self.answers.append(dataclasses.replace(tried[size], beyond=beyond))
