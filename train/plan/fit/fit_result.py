"""Returns the result of `bytescope fit` for a config as JSON values.

The keys (sizes are bytes on ONE device):

- the keys of every search (`memory.compare.fit_search`).
- `reach`: for adapters, the longest sequence and the largest micro-batch that fit at each rank: `rank`, `length`,
  `micro`, `base`, `policy`, `most` (which one was maximized: "length" or "micro"), `beyond` (the smallest value of it
  that was tried and does not fit; 0 if the maximum of the model or the update fits), `allocated_bytes`, `host_bytes`,
  `predicted_seconds`, `tokens_per_s`, `fits`, `verdict`, `flags`; [] without adapters.
- `layouts`: each mesh that was tried, the choice's mesh first: `layout`, and for its best variant `what`,
  `allocated_bytes`, `predicted_seconds`, `fits`, `verdict`; `slower`: the additional seconds compared with the choice,
  as a fraction of the choice's seconds; `least_seconds`: a lower bound of the seconds of every variant of the mesh,
  null if unknown. If `least_seconds` is known, `slower` is a lower bound too.
- `batch_tokens`. `config`, `given`: as in the JSON of a comparison; the flags above include the given flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.compare.fit_search import Step
from bytescope.train.plan.config_grid import ConfigRow, given_flags
from bytescope.train.plan.fit.fit_reach import Reach
from bytescope.train.plan.fit.fit_space import describe_mesh
from bytescope.train.plan.fit.fit_walk import Walk


def to_json(
    walk: Walk,
    flags: Callable[[Mapping[str, str]], str],
    measured: Mapping[str, Any] | None = None,
    reach: Reach | None = None,
) -> dict[str, Any]:
    """Returns the result of `bytescope fit` as JSON values. The module docstring lists the keys.

    Args:
        walk: the finished search.
        flags: (config keys, dotted key -> text) -> the command-line flags that set them.
        measured: the measured seconds, tokens/s and bytes of the best variant; None if it was not run.
        reach: the longest sequences and largest micro-batches for LoRA adapters; None without adapters.
    """
    of_best: dict[str, Any] = {}
    if walk.best is not None:
        of_best = dataclasses.asdict(ConfigRow.from_answer(dict(walk.best.keys), walk.best.answer))
        if measured:
            of_best["measured"] = dict(measured)
    return {
        **walk.to_json(flags, of_best),
        "batch_tokens": walk.space.tokens,
        "config": walk.trials.config,
        "given": given_flags(walk.trials.overrides),
        "reach": reach.to_json(flags) if reach else [],
        "layouts": mesh_results(walk),
    }


def mesh_results(walk: Walk) -> list[dict[str, Any]]:
    """Returns the device meshes that `bytescope fit` tried as the list `layouts` of the JSON result. Each has its
    fastest variant that fits, or else its smallest.

    The chosen mesh comes first, then meshes that fit, fastest first, then meshes that do not fit.

    walk: the finished search.
    """
    by_layout: dict[str, list[Step]] = {}
    for step in walk.steps:
        by_layout.setdefault(describe_mesh(step.keys, walk.space), []).append(step)
    ordered = []
    for layout, steps in by_layout.items():
        ran = [step for step in steps if step.ok]
        fitting = [step for step in ran if step.fits]
        step, bound, slower = steps[0], 0.0, None
        if walk.best in fitting:
            step, slower = walk.best, 0.0
        elif ran:
            step = min(fitting, key=lambda step: step.seconds) if fitting else min(ran, key=lambda step: step.allocated)
            # The seconds of the mesh have a lower bound if only full recomputation was tried on it.
            if "remat" in walk.space.levers and not any(step.stage in ("remat", "neighbour") for step in ran):
                bound = min(walk.bound(step) for step in ran)
            if walk.best:
                slower = (bound or step.seconds) / walk.best.seconds - 1
        row = {"layout": layout, "least_seconds": bound or None, "slower": slower}
        variant = step.to_json()
        row |= {key: variant[key] for key in ("what", "allocated_bytes", "predicted_seconds", "fits", "verdict")}
        size = (slower or 0.0) if step.fits else step.allocated
        ordered.append(((step is not walk.best, not step.ok, not step.fits, size), row))
    return [row for _, row in sorted(ordered, key=lambda pair: pair[0])]
