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
