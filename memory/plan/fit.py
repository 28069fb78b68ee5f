"""From a budget to the configuration to run: the tuning flow, walked by compiling.

A bf16 baseline; where it does not fit, the least recomputation; where that does not, tensors and then state in host
memory; last, if allowed, a narrower arithmetic. Of what fits, the micro-batch is raised while that is predicted to pay,
and micro-batches are accumulated to the asked batch. Meshes are judged by the step that recomputes everything: its
predicted time without the recomputation is what no plan on that mesh can beat.

The JSON of a fit has these keys (sizes are bytes on ONE device):

- `best`: null where nothing fits, else a row of `memory.plan.rows` with `flags`, what to add to the command line.
- `walk`: what was tried, in order: `stage`, `what`, `keys`, `allocated_bytes`, `host_bytes`, `predicted_step_seconds`,
  `recompute_flops_fraction`, `fits` and `verdict`; null where a variant cannot run.
- `certificate`: null where something fits, else the tightest variant: `keys`, `flags`, `what`, `allocated_bytes`,
  `missing_bytes`, `host_bytes`, `host_missing_bytes`, `breakdown`.
- `budget_bytes`, `host_budget_bytes`, `batch_tokens`; `target`, `versions`; `programs`: compiled, cached ones aside;
  `seconds`; `stopped`: why the search ended early, "" for one that came to its end.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.config_keys import REMAT
from bytescope.memory.costs import roofline
from bytescope.memory.errors import ReportError
from bytescope.memory.plan.fit_space import Keys, Space, Squeeze, words
from bytescope.memory.plan.fit_step import Step
from bytescope.memory.plan.rows import Row
from bytescope.memory.plan.variants import Stopped, Trials
from bytescope.memory.remat.ilp import Plan, remat_keys, with_name
from bytescope.memory.remat.search import EVEN, FULL, NONE, TIE, Search, Tried
from bytescope.memory.units import human

# Compiles of one search for a plan, and of neighbours of the choice that are looked at.
MOST_PLANS, MOST_NEIGHBOURS = 6, 4
# A mesh may save so much more of its recomputation's time than the one that saved least.
ALIKE = 1.05
# Meshes that are squeezed further where recomputation is not enough on any.
MOST_MESHES = 2


class Walk:
    """The search. `run` walks to the end or until it is stopped; `best` is then the choice.

    Args:
        trials: compiles. space: what may be tried. budget: bytes on one device. tell: is told each step as it is done.
    """

    def __init__(self, trials: Trials, space: Space, budget: int, tell: Callable[[Step], None] = lambda step: None):
        self.trials, self.space, self.budget, self._tell = trials, space, budget, tell
        self.steps: list[Step] = []
        self.best: Step | None = None
        self.tightest: Step | None = None
        self.stopped = ""
        self._saved = 1.0
        self._search: Search | None = None
        self._plan: Plan | None = None
        self._began, self.seconds = time.monotonic(), 0.0

    def run(self) -> None:
        """Walks; `stopped` says why it ended early."""
        try:
            self._walk()
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:  # between two compiles
            self.stopped = "Ctrl-C"
        self.seconds = time.monotonic() - self._began

    # ---- one variant -------------------------------------------------------------------------------------------

    def note(self, stage: str, keys: Mapping[str, str], answer: Mapping[str, Any], plan: str = "") -> Step:
        """Writes a variant into the walk, and down as the best or the tightest if it is."""
        known = next((step for step in self.steps if step.keys == keys), None)
        if known is not None:
            return known
        what = ", ".join(filter(None, (words(keys, self.space), plan)))
        if answer["status"] != "ok":
            step = Step(stage, what, keys, answer, False, f"cannot run: {answer['status']}")
        else:
            step = self._judged(stage, what, keys, answer)
        self.steps.append(step)
        self._tell(step)
        return step

    def _judged(self, stage: str, what: str, keys: Mapping[str, str], answer: Mapping[str, Any]) -> Step:
        over = answer["allocated_bytes"] - self.budget
        host = answer["host_bytes"] - self.trials.host_budget
        seconds = Row.of({}, answer).predicted_step_seconds
        fits = over <= 0 and host <= 0
        verdict = f"{human(over)} over" if over > 0 else f"host {human(int(host))} over" if host > 0 else ""
        step = Step(stage, what, keys, answer, fits, verdict, seconds)
        if fits:
            better = self.best is None or seconds < self.best.seconds
            step = dataclasses.replace(step, verdict="fits, fastest so far" if better else "fits")
            self.best = step if better else self.best
        if self.tightest is None or max(over, 0) + max(host, 0) < self._missing(self.tightest):
            self.tightest = step
        return step

    def _missing(self, step: Step) -> float:
        return (max(step.allocated - self.budget, 0)
                + max(step.answer["host_bytes"] - self.trials.host_budget, 0))

    def _try(self, stage: str, variants: Sequence[Mapping[str, str]], plan: str = "") -> list[Step]:
        return self._together([(stage, keys, plan) for keys in variants])

    def _together(self, tries: Sequence[tuple[str, Mapping[str, str], str]]) -> list[Step]:
        """Compiles variants at once, each with its stage and its plan in words. Of a search that is stopped, those
        that were finished are written down too."""
        try:
            self.trials.compile([keys for _, keys, _ in tries])
        finally:
            done = [(stage, keys, self.trials.done(keys), plan) for stage, keys, plan in tries]
            steps = [self.note(*one) for one in done if one[2] is not None]
        return steps

    # ---- the walk ----------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        space, base = self.space, self.space.baseline()
        meshes = space.meshes()
        first = {**base, **meshes[0], **space.batch(meshes[0], space.micros(meshes[0])[0])}
        if "remat" not in space.levers:
            self._without_remat(base, meshes)
            return
        least = [{**base, **mesh, **space.batch(mesh, space.micros(mesh)[0])} for mesh in meshes]
        self._together([("baseline", {**first, **remat_keys(NONE)}, NONE),
                        *(("mesh", {**keys, **remat_keys(FULL)}, FULL) for keys in least)])
        for squeeze in space.squeezes():
            self._squeezed(squeeze, base, meshes)
            if self.best is not None:
                self._neighbours()
                return
            # What a squeeze saves is least where least is held: the other meshes need not be tried again.
            held = [step for step in self.steps if step.ok and step.stage == "mesh"]
            small = sorted(held, key=lambda step: step.allocated)[:MOST_MESHES]
            meshes = [mesh for mesh in meshes if any(mesh.items() <= step.keys.items() for step in small)] or meshes

    def _squeezed(self, squeeze: Squeeze, base: Keys, meshes: Sequence[Keys]) -> None:
        """Looks for plans under a squeeze, on each mesh that can still win, the most promising first."""
        stage = "mesh" if squeeze is self.space.squeezes()[0] else "squeeze"
        starts = []
        for mesh in meshes:
            sizes = self._sizes(squeeze, mesh)
            if sizes:
                starts.append((mesh, {**base, **mesh, **self.space.batch(mesh, sizes[0]), **squeeze.keys}))
        steps = self._try(stage, [{**keys, **remat_keys(FULL)} for _, keys in starts], FULL)
        ranked = sorted((self._bound(step), number) for number, step in enumerate(steps)
                        if step.ok and self._can_fit(step, squeeze))
        # Meshes are compared at their smallest micro-batch: a larger one pays on all of them.
        even = math.inf if self.best is None else self.best.seconds
        for bound, number in ranked:
            mesh, start = starts[number]
            if bound < even * (1 - TIE) or (self.best is not None and _same(self.best.keys, start)):
                even = min(even, self._raise(squeeze, base, mesh, even))

    def _can_fit(self, step: Step, squeeze: Squeeze) -> bool:
        """Whether a plan may fit where this one, which recomputes everything, is: it does, or what it keeps can go."""
        over = step.allocated - self.budget
        room = self.trials.host_budget - step.answer["host_bytes"]
        return step.fits or (squeeze.activations and over <= step.answer["residual_bytes"] and max(over, 0) <= room)

    def _sizes(self, squeeze: Squeeze, mesh: Keys) -> list[int]:
        sizes = self.space.micros(mesh)
        return [size for size in sizes if self.space.sequences == size * self.space.ranks(mesh)] \
            if squeeze.whole else sizes

    def _bound(self, step: Step) -> float:
        """Seconds of an update that no plan on the same mesh with the same micro-batch is expected to beat: nothing
        recomputed, what is kept moved as elsewhere."""
        return step.seconds - min(self._saved * ALIKE, 1.0) * self._recomputed(step)

    def _recomputed(self, step: Step) -> float:
        by_phase = roofline.seconds(step.answer["work"], self.trials.rates).by_phase
        return by_phase["recompute"] * step.answer["calls_per_update"]

    def _learn(self, full: Step, least: Step) -> None:
        """Notes what share of the recomputation's time is saved where nothing is recomputed: keeping takes time too."""
        again = self._recomputed(full)
        if again and not least.answer["recompute_flops_fraction"]:
            self._saved = min(self._saved, (full.seconds - least.seconds) / again)

    def _raise(self, squeeze: Squeeze, base: Keys, mesh: Keys, even: float) -> float:
        """The least recomputation for one micro-batch after the other, while the larger one pays.

        even: seconds that the smallest one has to beat. Returns what that came to, infinity where nothing fits.
        """
        came_to: list[float] = []
        for size in self._sizes(squeeze, mesh):
            keys = {**base, **mesh, **self.space.batch(mesh, size), **squeeze.keys}
            full = self._try("micro", [{**keys, **remat_keys(FULL)}], FULL)[0]
            if not full.ok or not self._can_fit(full, squeeze):
                break
            best = self.best
            if self._bound(full) < (even if best is None or not came_to else best.seconds) * (1 - TIE):
                seconds = self._least(keys, squeeze.activations)
            else:  # no plan is better, but the best may be of this very micro-batch, with nothing recomputed
                seconds = best.seconds if best is not None and _same(best.keys, keys) else None
            if seconds is None or (came_to and seconds >= came_to[-1] * (1 - TIE)):
                break
            came_to.append(seconds)
        return came_to[0] if came_to else math.inf

    def _least(self, keys: Keys, activations: bool) -> float | None:
        """Predicted seconds of the least recomputation of a variant, None where no plan fits."""
        def tell(tried: Tried) -> None:
            asked = {**keys, **tried.plan.keys()}
            self.note("remat", asked, self.trials.compile([asked])[0], str(tried.plan))

        try:
            search = self.trials.search(keys, offload=activations, tell=tell)
        except ReportError as error:  # it compiles, but nothing is known of its blocks
            self.note("remat", keys, {"status": str(error)}, "what to keep")
            return None
        found = search.run(self.budget, most=MOST_PLANS, at_once=2).best
        if found is None:
            return None
        chosen = {**keys, **found.plan.keys()}
        # Predictions within TIE are even: the search prefers the plan that recomputes less, and so do we.
        step = next(step for step in self.steps if step.keys == chosen)
        if self.best is not None and step.seconds <= self.best.seconds * (1 + TIE) and _same(self.best.keys, keys):
            self.best = step
        if self.best is not None and self.best.keys == chosen:
            self._search, self._plan = search, found.plan
        self._learn(next(one for one in self.steps if one.keys == {**keys, **remat_keys(FULL)}), step)
        return step.seconds

    def _without_remat(self, base: Keys, meshes: Sequence[Keys]) -> None:
        """The same with the policy of the config: meshes and micro-batches alone."""
        for squeeze in self.space.squeezes():
            for mesh in meshes:
                before: float | None = None
                for size in self._sizes(squeeze, mesh):
                    keys = {**base, **mesh, **self.space.batch(mesh, size), **squeeze.keys}
                    step = self._try("micro", [keys])[0]
                    if not step.fits or (before is not None and step.seconds >= before * (1 - TIE)):
                        break
                    before = step.seconds
            if self.best is not None:
                return

    def _neighbours(self) -> None:
        """Looks whether one name more would fit and be faster; goes on from there if so."""
        for _ in range(MOST_NEIGHBOURS):
            before = self.best
            if self._search is None or not self._plan.keys().items() <= self.best.keys.items():
                return
            self._one_name_more(self._search, self._plan)
            if self.best is before:
                return

    def _one_name_more(self, search: Search, plan: Plan) -> None:
        keys = {key: text for key, text in self.best.keys.items() if not key.startswith(REMAT)}
        block, rates = search.problem.block, search.problem.rates
        more = []
        for name in block.names:
            other = with_name(plan, name, block, rates)
            if other.bytes > plan.bytes and search.cost(other) < search.cost(plan) * (1 - EVEN):
                more.append(other)
        more = [other for other in sorted(more, key=search.cost) if search.predict(other) <= self.budget]
        variants = [{**keys, **other.keys()} for other in more[:MOST_NEIGHBOURS]]
        for other, asked, answer in zip(more, variants, self.trials.compile(variants)):
            if self.note("neighbour", asked, answer, str(other)) is self.best:
                self._plan = other

    # ---- what it came to ---------------------------------------------------------------------------------------

    def to_json(self, flags: Callable[[Mapping[str, str]], str], versions: Mapping[str, str],
                measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The fit as JSON values (see the module). `flags`: the words of the command line for some keys."""
        best, certificate, host = None, None, self.trials.host_budget
        if self.best is not None:
            row = Row.of(dict(self.best.keys), self.best.answer)
            best = dataclasses.asdict(dataclasses.replace(row, measured=measured or row.measured)) | {
                "flags": flags(self.best.keys), "what": self.best.what}
        elif self.tightest is not None:
            certificate = self.tightest.certificate(flags(self.tightest.keys), self.budget, host)
        return {
            "best": best, "walk": [step.to_json() for step in self.steps], "certificate": certificate,
            "budget_bytes": self.budget, "host_budget_bytes": None if host == math.inf else int(host),
            "batch_tokens": self.space.tokens, "target": self.trials.target.to_json(), "versions": dict(versions),
            "programs": self.trials.compiles, "seconds": self.seconds, "stopped": self.stopped,
        }


def _same(keys: Mapping[str, str], variant: Mapping[str, str]) -> bool:
    """Whether two sets of keys differ in recomputation alone."""
    return {key: text for key, text in keys.items() if not key.startswith(REMAT)} == dict(variant)
