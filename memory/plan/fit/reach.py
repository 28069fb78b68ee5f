"""How far adapters go on a target: other ranks of a fit's choice, and the longest sequences that fit, each compiled.

Lengths are doubled, or halved where not even the config's fits, one sequence at once, everything recomputed and the
frozen weights as small as the levers allow; where that does not fit, with the inputs of blocks in host memory. Between
the last that fits and the first that does not, lengths are halved a few times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_ACCUMULATION,
    BATCH_MICRO,
    BATCH_TOKENS,
    DATA_SEQ_LEN,
    LORA_BASE,
    LORA_RANK,
    MODEL_MAX_SEQ_LEN,
    REMAT,
)
from bytescope.memory.plan.fit.step import Step, judged
from bytescope.memory.plan.fit.walk import Walk
from bytescope.memory.plan.variants import Stopped
from bytescope.memory.remat.ilp import remat_keys
from bytescope.memory.remat.search import FULL

# Ranks that are tried with the choice of a fit.
RANKS = (8, 64, 256)
# Lengths are multiples of this, in tokens, and no shorter; so many are tried between what fits and what does not.
GRAIN, BETWEEN = 1024, 3
# The policy that keeps the inputs of blocks in host memory.
OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True)
class Reached:
    """A variant at another rank or length, and its figures.

    Fields:
        rank, length, micro, base: its adapters, tokens of a sequence, sequences at once and how frozen weights are
        stored. policy: what it recomputes. step: the variant as the walk judges one; tokens: of its update.
    """

    rank: int
    length: int
    micro: int
    base: str
    policy: str
    step: Step
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all devices."""
        return self.tokens / self.step.seconds if self.step.seconds else 0.0

    def to_json(self, flags: str) -> dict[str, Any]:
        """The row as JSON values; `flags`: what sets its keys."""
        found = self.step.to_json()
        own = {key: getattr(self, key) for key in ("rank", "length", "micro", "base", "policy", "tokens_per_s")}
        return {**own, "flags": flags, **{key: found[key] for key in (
            "allocated_bytes", "host_bytes", "predicted_seconds", "fits", "verdict")}}


class Reach:
    """Tries ranks and lengths after a walk has ended; `rows` has what was compiled, the fastest that fit first."""

    def __init__(self, walk: Walk):
        self.walk, self.trials, self.space = walk, walk.trials, walk.space
        self.found: list[Reached] = []
        self.stopped = ""

    def run(self) -> None:
        """Tries what the limits on compiles and time allow."""
        if self.walk.stopped or self.walk.tightest is None:
            return
        try:
            if self.walk.best is not None:
                self._ranks(self.walk.best)
            self._lengths()
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"

    @property
    def rows(self) -> list[Reached]:
        """Those that fit by tokens/s, then those that do not, by length."""
        return sorted(self.found, key=lambda row: (not row.step.fits,
                                                   -row.tokens_per_s if row.step.fits else row.length))

    def to_json(self, flags: Callable[[Mapping[str, str]], str]) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [row.to_json(flags(row.step.keys)) for row in self.rows]

    def _ranks(self, best: Step) -> None:
        own = self.space.flat[LORA_RANK]
        if LORA_RANK in self.space.given:
            return
        variants = [{**best.keys, LORA_RANK: str(rank)} for rank in RANKS if rank != own]
        for keys, answer in zip(variants, self.trials.compile(variants)):
            self._record(keys, answer)

    def _lengths(self) -> None:
        if DATA_SEQ_LEN in self.space.given:
            return
        own, most = self.space.flat[DATA_SEQ_LEN], self.space.flat[MODEL_MAX_SEQ_LEN]
        fits, fails = 0, 0
        length = own
        while GRAIN <= length <= most and not (fits and fails):
            if self._fits(length):
                fits, length = length, 2 * length
            else:
                fails, length = length, length // 2
        for _ in range(BETWEEN if fits and fails else 0):
            middle = (fits + fails) // 2 // GRAIN * GRAIN
            if middle <= fits:
                return
            fits, fails = (middle, fails) if self._fits(middle) else (fits, middle)

    def _fits(self, length: int) -> bool:
        """Whether a length fits with everything recomputed, else with block inputs in host memory."""
        keys = {key: text for key, text in self._smallest().items() if not key.startswith(REMAT)}
        keys |= {DATA_SEQ_LEN: str(length), BATCH_MICRO: "1", BATCH_TOKENS: "0", BATCH_ACCUMULATION: "1"}
        policies = (FULL, OFFLOAD) if "offload" in self.space.levers else (FULL,)
        for policy in policies:
            variant = {**keys, **remat_keys(policy)}
            if self._record(variant, self.trials.compile([variant])[0], policy):
                return True
        return False

    def _smallest(self) -> dict[str, str]:
        """The keys of the variant with the smallest frozen weights that was tried."""
        ran = [step for step in self.walk.steps if step.ok]
        narrow = [step for step in ran if step.keys.get(LORA_BASE) == "nf4"] or ran
        return dict(min(narrow, key=lambda step: step.allocated).keys)

    def _record(self, keys: Mapping[str, str], answer: Mapping[str, Any], policy: str = "") -> bool:
        """Adds a variant; whether it fits. One that cannot run has no row."""
        if answer["status"] != "ok":
            return False
        flat = self.trials.flat(keys)
        step = judged("reach", "", keys, answer, self.walk.budget, self.trials)
        self.found.append(Reached(flat[LORA_RANK], flat[DATA_SEQ_LEN], flat[BATCH_MICRO], flat[LORA_BASE],
                                  policy or "as chosen", step, answer["tokens_per_update"]))
        return step.fits
