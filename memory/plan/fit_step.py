"""One variant that a fit tried, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Step:
    """One variant of the walk: `stage` and `what` in words, its keys, and the worker's answer."""

    stage: str
    what: str
    keys: Mapping[str, str]
    answer: Mapping[str, Any]
    fits: bool
    verdict: str
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        return self.answer["status"] == "ok"

    @property
    def allocated(self) -> int:
        return self.answer.get("allocated_bytes", 0)

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "what": self.what, "keys": dict(self.keys),
                **{key: self.answer.get(key) for key in ("allocated_bytes", "host_bytes", "recompute_flops_fraction")},
                "predicted_step_seconds": self.seconds, "fits": self.fits, "verdict": self.verdict}

    def certificate(self, flags: str, budget: int, host_budget: float) -> dict[str, Any]:
        """What a fit says of its tightest variant where nothing fits: what is in it, and what is missing."""
        return {"keys": dict(self.keys), "flags": flags, "what": self.what, "allocated_bytes": self.allocated,
                "missing_bytes": max(self.allocated - budget, 0), "host_bytes": self.answer["host_bytes"],
                "host_missing_bytes": int(max(self.answer["host_bytes"] - host_budget, 0)),
                "breakdown": dict(self.answer["breakdown"])}
