"""The result of a fit as JSON values.

Its keys (sizes are bytes on ONE device):

- `best`: a row of `memory.compare.compare_rows` with `flags`, what to add to the command line; null where nothing fits.
- `walk`: what was tried, in order: `stage`, `what`, `keys`, `allocated_bytes`, `host_bytes`, `predicted_seconds` with
  `predicted_seconds_low` and `predicted_seconds_high`, `recompute_flops_fraction`, `fits` and `verdict`; null where a
  variant cannot run.
- `ties`: the `what` of variants that fit and are predicted to be as fast as the best. `rates`: the source of the rates
  behind the predicted seconds, in one line.
- `certificate`: if nothing fits, the variant nearest to the budget: `keys`, `flags`, `what`, `allocated_bytes`,
  `missing_bytes`, `host_bytes`, `host_missing_bytes`, `breakdown`; null if something fits.
- `reach`: for adapters, the longest sequences and the largest micro-batches that fit at each rank: `rank`, `length`,
  `micro`, `base`, `policy`, `most` (which one was raised: "length" or "micro"), `beyond` (its smallest value that was
  tried and does not fit, 0 if the model or the update has no more), `allocated_bytes`, `host_bytes`,
  `predicted_seconds`, `tokens_per_s`, `fits`, `verdict`, `flags`; [] without adapters.
- `layouts`: each mesh that was tried, the choice's first: `layout`, and of its best variant `what`, `allocated_bytes`,
  `predicted_seconds`, `fits`, `verdict`; `slower`: how much longer it takes than the choice, as a share of the choice's
  seconds; if `least_seconds`, a lower bound for every variant of the mesh, is known, `slower` is a lower bound too.
- `budget_bytes`, `host_budget_bytes`, `batch_tokens`. `config`, `given`, `target`, `versions`: as in a comparison; the
  flags above include the given ones. `programs`: number of programs compiled, without those in the cache. `seconds`.
  `stopped`: why the search ended early, "" if it did not.
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
    """Returns a walk that has ended as JSON values; see the module for the keys.

    flags: config keys -> the flags that set them. measured: figures of the best variant, if it was run. reach: the
    ranks and lengths that were tried for adapters.
    """
    best, certificate, host = None, None, walk.trials.host_budget
    if walk.best is not None:
        best = dataclasses.asdict(ConfigRow.from_answer(dict(walk.best.keys), walk.best.answer))
        best |= {"flags": flags(walk.best.keys), "what": walk.best.what}
        if measured:
            best["measured"] = dict(measured)
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


@dataclasses.dataclass(frozen=True)
class Standing:
    """One mesh, and its best variant.

    Fields:
        layout: the mesh in words.
        step: the fastest variant that fits; if none fits, the smallest; if none runs, one that cannot run.
        least: lower bound of seconds per update for every variant of the mesh; 0 if the search tried more policies than
            full recomputation, because then `step` has the seconds.
        slower: how much longer the mesh takes than the choice, as a share of the choice's seconds; a lower bound if
            `least` is one. None without a choice, or without seconds.
    """

    layout: str
    step: Step
    least: float = 0.0
    slower: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the row of `layouts`."""
        step = self.step.to_json()
        return {
            "layout": self.layout,
            "least_seconds": self.least or None,
            "slower": self.slower,
            **{key: step[key] for key in ("what", "allocated_bytes", "predicted_seconds", "fits", "verdict")},
        }


def standings(walk: Walk) -> list[Standing]:
    """Returns the meshes that a walk tried: the choice's first, then the fastest; those that do not fit come last."""
    by_layout: dict[str, list[Step]] = {}
    for step in walk.steps:
        by_layout.setdefault(layout(step.keys, walk.space), []).append(step)

    def order(standing: Standing) -> tuple[bool, bool, bool, float]:
        step = standing.step
        size = (standing.slower or 0.0) if step.fits else step.allocated
        return step is not walk.best, not step.ok, not step.fits, size

    return sorted((_standing(words, steps, walk) for words, steps in by_layout.items()), key=order)


def _standing(words: str, steps: list[Step], walk: Walk) -> Standing:
    ran = [step for step in steps if step.ok]
    fitting = [step for step in ran if step.fits]
    if not ran:
        return Standing(words, steps[0])
    if walk.best in fitting:
        return Standing(words, walk.best, slower=0.0)
    if fitting:
        step = min(fitting, key=lambda step: step.seconds)
    else:
        step = min(ran, key=lambda step: step.allocated)
    least = 0.0
    if "remat" in walk.space.levers and not any(step.stage in ("remat", "neighbour") for step in ran):
        least = min(walk.bound(step) for step in ran)
    slower = (least or step.seconds) / walk.best.seconds - 1 if walk.best else None
    return Standing(words, step, least, slower)
