"""The result of a fit as JSON values.

Its keys (sizes are bytes on ONE device):

- `best`: a row of `memory.compare.compare_rows` with `flags`, what to add to the command line; null where nothing fits.
- `walk`: what was tried, in order: `stage`, `what`, `keys`, `allocated_bytes`, `host_bytes`, `predicted_seconds` with
  `predicted_seconds_low` and `predicted_seconds_high`, `recompute_flops_fraction`, `fits` and `verdict`; null where a
  variant cannot run.
- `ties`: the `what` of variants that fit and are predicted to be as fast as the best. `rates`: where those of the
  predicted seconds are from, in one line.
- `certificate`: the variant nearest to the budget where nothing fits: `keys`, `flags`, `what`, `allocated_bytes`,
  `missing_bytes`, `host_bytes`, `host_missing_bytes`, `breakdown`; null where something does.
- `reach`: of adapters, the longest sequences and the largest micro-batches that fit at each rank: `rank`, `length`,
  `micro`, `base`, `policy`, `most` (what is the most here: "length" or "micro"), `beyond` (the least of it that does
  not fit, 0 where the model or the update has no more), `allocated_bytes`, `host_bytes`, `predicted_seconds`,
  `tokens_per_s`, `fits`, `verdict`, `flags`; [] without adapters.
- `layouts`: each mesh that was tried, the choice's first: `layout`, its best variant's `what`, `allocated_bytes`,
  `predicted_seconds`, `fits`, `verdict`; `slower`: the share of the choice's seconds that it takes more; at
  least so much where `least_seconds` is known, which no variant of the mesh is expected to beat.
- `budget_bytes`, `host_budget_bytes`, `batch_tokens`; `config`, `given`, `target`, `versions`: as in a comparison, but
  that the flags above hold the given ones; `programs`: how many were compiled, those
  in the cache left out; `seconds`; `stopped`: why the search ended early, "" for one that came to its end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.train.plan.config_grid import ConfigRow, given_flags
from bytescope.train.plan.fit.fit_reach import Reach
from bytescope.train.plan.fit.fit_space import layout
from bytescope.train.plan.fit.fit_step import Step
from bytescope.train.plan.fit.fit_walk import Walk


def to_json(
    walk: Walk,
    flags: Callable[[Mapping[str, str]], str],
    versions: Mapping[str, str],
    measured: Mapping[str, Any] | None = None,
    reach: Reach | None = None,
) -> dict[str, Any]:
    """A walk that has ended as JSON values; see the module for the keys.

    flags: config keys -> the flags that set them. measured: what was measured of the best, if it was run. reach: what
    was tried besides, of adapters.
    """
    best, certificate, host = None, None, walk.trials.host_budget
    if walk.best is not None:
        row = ConfigRow.from_answer(dict(walk.best.keys), walk.best.answer)
        best = dataclasses.asdict(dataclasses.replace(row, measured=measured or row.measured)) | {
            "flags": flags(walk.best.keys),
            "what": walk.best.what,
        }
    elif walk.tightest is not None:
        certificate = walk.tightest.certificate(flags(walk.tightest.keys), walk.budget, host)
    return {
        "best": best,
        "walk": [step.to_json() for step in walk.steps],
        "certificate": certificate,
        "budget_bytes": walk.budget,
        "host_budget_bytes": None if host == math.inf else int(host),
        "batch_tokens": walk.space.tokens,
        "config": walk.trials.config,
        "given": given_flags(walk.trials.overrides),
        "target": walk.trials.target.to_json(),
        "versions": dict(versions),
        "ties": [step.what for step in walk.ties],
        "rates": next((step.prediction.rates for step in walk.steps if step.prediction), ""),
        "programs": walk.trials.compiles,
        "seconds": walk.seconds,
        "stopped": walk.stopped or (reach.stopped if reach else ""),
        "reach": reach.to_json(flags) if reach else [],
        "layouts": [standing.to_json() for standing in standings(walk)],
    }


# ---- the meshes beside the choice -----------------------------------------------------------------------------------


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
