"""The meshes of a fit beside its choice: by how much each loses."""

from __future__ import annotations

import dataclasses
from typing import Any

from bytescope.train.plan.fit.fit_space import layout
from bytescope.train.plan.fit.fit_step import Step
from bytescope.train.plan.fit.fit_walk import Walk


@dataclasses.dataclass(frozen=True)
class Standing:
    """One mesh, and its best variant.

    Fields:
        layout: the mesh in words. step: the fastest of its variants that fit; the smallest where none does; one that
        cannot run where none runs. least: seconds per update that no variant of the mesh is expected to beat, where the
        search went no further than to recompute everything; 0 where it did. slower: the share by which it is slower
        than the choice, at least so much where `least` is known; None without a choice, or without seconds.
    """

    layout: str
    step: Step
    least: float = 0.0
    slower: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        found = self.step.to_json()
        return {
            "layout": self.layout,
            "least_seconds": self.least or None,
            "slower": self.slower,
            **{key: found[key] for key in ("what", "allocated_bytes", "predicted_seconds", "fits", "verdict")},
        }


def standings(walk: Walk) -> list[Standing]:
    """The meshes that a walk tried, the choice's first, then the fastest; those that do not fit come last."""
    by_layout: dict[str, list[Step]] = {}
    for step in walk.steps:
        by_layout.setdefault(layout(step.keys, walk.space), []).append(step)
    found = [_standing(words, steps, walk) for words, steps in by_layout.items()]
    return sorted(found, key=lambda one: (one.step is not walk.best, *_rank(one)))


def _standing(words: str, steps: list[Step], walk: Walk) -> Standing:
    ran = [step for step in steps if step.ok]
    fits = [step for step in ran if step.fits]
    if not ran:
        return Standing(words, steps[0])
    if walk.best in fits:
        return Standing(words, walk.best, slower=0.0)
    step = min(fits, key=lambda one: one.seconds) if fits else min(ran, key=lambda one: one.allocated)
    searched = any(one.stage in ("remat", "neighbour") for one in ran) or "remat" not in walk.space.levers
    least = 0.0 if searched else min(map(walk.bound, ran))
    slower = (least or step.seconds) / walk.best.seconds - 1 if walk.best else None
    return Standing(words, step, least, slower)


def _rank(one: Standing) -> tuple[bool, bool, float]:
    step = one.step
    return not step.ok, not step.fits, (one.slower or 0.0) if step.fits else step.allocated
