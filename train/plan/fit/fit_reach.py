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
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.fit_search import Step
from bytescope.memory.remat.remat_search import FULL
from bytescope.train.plan.config_grid import remat_keys
from bytescope.train.plan.fit.fit_walk import Walk

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
    beyond: int = 0

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
        own = ("rank", "length", "micro", "base", "policy", "most", "beyond", "verdict")
        row = {name: getattr(self, name) for name in own}
        row |= {"tokens_per_s": self.step.tokens_per_s, "flags": flags}
        for name in ("allocated_bytes", "host_bytes", "predicted_seconds", "fits"):
            row[name] = step[name]
        return row


class Reach:
    """Searches for the longest sequence and the largest micro-batch that fit, for LoRA adapters of several ranks.

    It continues a finished `Walk`, the search for the fastest configuration.

    Attributes:
        variants: all variants that were compiled.
        answers: for each rank, the longest length and the largest micro-batch, in the order in which they were found.
    """

    def __init__(self, walk: Walk):
        self.walk, self.trials, self.space = walk, walk.trials, walk.space
        self.variants: list[Reached] = []
        self.answers: list[Reached] = []

    def run(self) -> None:
        """Finds, for each rank of the LoRA adapters, the longest sequence and the largest micro-batch that fit the
        memory budget, and stores them in `answers`.

        Each variant of the config (rank, sequence length, micro-batch, remat policy) is compiled to learn its bytes.
        The search is a part of the walk: it ends early at the same limits, and the walk's `stopped` has the reason.
        """
        if not self.walk.stopped and self.walk.tightest is not None:
            self.walk.run_part(self._search)

    def _search(self) -> None:
        flat, smallest = self.space.flat, self._keys_of_smallest_variant()
        one = {"batch.micro": "1", "batch.tokens": "0", "batch.accumulation": "1"}
        length = flat["data.seq_len"]
        grain = min(GRAIN, length)
        lengths = range(grain, flat["model.max_seq_len"] + 1, grain)
        if not {"micro", "accumulation"} - self.space.levers:
            micros = self.space.micros(smallest)
            self._find_largest("micro", FULL, micros, len(micros) - 1, lambda size: self.space.batch(smallest, size))
        if "data.seq_len" not in self.space.given:
            for policy in (FULL, OFFLOAD) if "offload" in self.space.levers else (FULL,):
                self._find_largest(
                    "length", policy, lengths, length // grain - 1, lambda size: {**one, "data.seq_len": str(size)}
                )

    @property
    def rows(self) -> list[Reached]:
        """The largest lengths and micro-batches that were found, sorted by rank.

        For each rank, variants that fit come first, sorted by tokens per second, fastest first.
        """
        return sorted(self.answers, key=lambda row: (row.rank, not row.step.fits, -row.step.tokens_per_s))

    def to_json(self, flags: Callable[[Mapping[str, str]], str]) -> list[dict[str, Any]]:
        """Returns the longest sequences and largest micro-batches as JSON values, sorted by rank.

        flags: (config keys, dotted key -> text) -> the command-line flags that set them.
        """
        return [row.to_json(flags(row.step.keys)) for row in self.rows]

    def _find_largest(
        self, most: str, policy: str, sizes: Sequence[int], first: int, keys_of: Callable[[int], Mapping[str, str]]
    ) -> None:
        """Finds for each rank the largest of some sizes that fits, and appends it to `answers`.

        Args:
            most: which size is maximized, "length" or "micro".
            policy: the remat policy.
            sizes: the sizes, smallest first.
            first: index of the size that is tried first.
            keys_of: size -> the config keys that select it.
        """
        rank = self.space.flat["lora.rank"]
        ranks = [rank] if "lora.rank" in self.space.given else sorted({rank, *RANKS})
        base = {**self._keys_of_smallest_variant(), **remat_keys(policy)}
        end, slope = len(sizes), 0.0  # sizes[end:] do not fit; bytes that a size of 1 more takes, 0 if unknown
        for rank in ranks:
            index, fitting, tried = first, 0, dict[int, Reached]()  # sizes[:fitting] fit
            while fitting < end and len(tried) < MAX_TRIED:
                size = sizes[index]
                row = self._compile_variant({**base, "lora.rank": str(rank), **keys_of(size)}, policy, most)
                if row is None:
                    return
                step = row.step
                if tried:
                    before, other = list(tried.items())[-1]
                    slope = (step.allocated - other.step.allocated) / (size - before)
                tried[size] = row
                if step.fits:
                    fitting, guess = index + 1, 2 * size
                else:
                    below = sizes[fitting - 1] if fitting else 0
                    end, guess = index, (size + below) // 2
                over = step.allocated - self.walk.budget
                if slope > 0 and step.fits == (over <= 0):  # if they differ, host memory is the limit
                    guess = size - math.ceil(over / slope)
                index = min(max(bisect.bisect_right(sizes, guess) - 1, fitting), end - 1)
            if tried:
                answer = tried[sizes[fitting - 1] if fitting else min(tried)]
                self.answers.append(dataclasses.replace(answer, beyond=sizes[end] if end < len(sizes) else 0))
            first = max(fitting - 1, 0)  # the next rank fits no larger size

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
        step = self.walk.judge_answer("reach", "", dict(keys), answer)
        row = Reached(
            flat["lora.rank"],
            flat["data.seq_len"],
            flat["batch.micro"],
            flat["lora.base"],
            policy,
            most,
            step,
        )
        self.variants.append(row)
        return row
