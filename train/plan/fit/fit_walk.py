"""From a budget to the configuration to run: the usual tuning steps, each variant compiled.

The walk begins with a bf16 baseline. Where that does not fit, it looks for the least recomputation that does; where
none does, it moves tensors and then state to host memory; last, if allowed, it narrows the arithmetic. Of what fits it
raises the micro-batch while that is predicted to pay, and accumulates micro-batches to the batch asked for. Meshes are
compared by the step that recomputes everything: without the recomputation, its predicted time is a lower bound for
every plan on that mesh. Of variants that tie (`ranking.TIE`) the one that recomputes less is the choice, then the one
that takes less memory.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.remat.layer_graph import LayerGraph
from bytescope.memory.remat.remat_problem import CompiledPlan, KeepPattern, LayerPlan, RecomputeRates
from bytescope.memory.remat.remat_search import EVEN, FULL, NONE, RematSearch
from bytescope.memory.remat.remat_solver import pattern_keeping
from bytescope.memory.seconds import ranking
from bytescope.memory.seconds.ranking import TIE
from bytescope.train.plan.config_grid import plan_keys, remat_keys
from bytescope.train.plan.fit.fit_space import Keys, Space, Squeeze, words
from bytescope.train.plan.fit.fit_step import Step, judged
from bytescope.train.plan.trials import Stopped, Trials

# At most so many compiles in one search for a plan, and so many plans with one more name around the choice.
MOST_PLANS, MOST_NEIGHBOURS = 6, 4
# Meshes differ at most by this factor in the share of the recomputation's time that keeping tensors saves.
ALIKE = 1.05
# So many meshes are squeezed further where recomputation is not enough on any.
MOST_MESHES = 2


class Walk:
    """The search. `run` walks to the end or until it is stopped; `best` is then the choice.

    Args:
        trials: compiles the variants. space: what may be tried. budget: bytes on one device.
        show: called with each step as it is done.

    Attributes:
        steps: what was tried, in order. best: the fastest that fits, of ties the thriftiest; None for none.
        tightest: the step nearest to the budgets. stopped: why the walk ended early, "". seconds: how long it took.
    """

    def __init__(self, trials: Trials, space: Space, budget: int, show: Callable[[Step], None] = lambda step: None):
        self.trials, self.space, self.budget, self._show = trials, space, budget, show
        self.steps: list[Step] = []
        self.best: Step | None = None
        self.tightest: Step | None = None
        self.stopped = ""
        self._saved_share = 1.0  # of the recomputation's time, where nothing is recomputed; the least seen so far
        self._search: RematSearch | None = None
        self._plan: LayerPlan | None = None
        self._began, self.seconds = time.monotonic(), 0.0

    def run(self) -> None:
        """Walks to the end; `stopped` says why it ended early."""
        try:
            self._walk()
        except Stopped as reason:
            self.stopped = str(reason)
        except KeyboardInterrupt:  # between two compiles
            self.stopped = "Ctrl-C"
        self.seconds = time.monotonic() - self._began

    # ---- one variant -------------------------------------------------------------------------------------------

    def record(self, stage: str, keys: Mapping[str, str], answer: Mapping[str, Any], plan: str = "") -> Step:
        """Adds a variant to the walk, once; it becomes `best` or `tightest` if it is. Returns its step.

        answer: the worker's. plan: what it keeps, in words.
        """
        known = next((step for step in self.steps if step.keys == keys), None)
        if known is not None:
            return known
        what = ", ".join(filter(None, (words(keys, self.space), plan)))
        if answer["status"] != "ok":
            step = Step(stage, what, keys, answer, False, f"cannot run: {answer['status']}")
        else:
            step = self._judged(stage, what, keys, answer)
        self.steps.append(step)
        self._show(step)
        return step

    def _judged(self, stage: str, what: str, keys: Mapping[str, str], answer: Mapping[str, Any]) -> Step:
        """The step of a variant that runs, compared with the budgets and with the best so far."""
        step = judged(stage, what, keys, answer, self.budget, self.trials)
        if step.fits:
            step = self._against_the_best(step)
        if self.tightest is None or self._missing(step) < self._missing(self.tightest):
            self.tightest = step
        return step

    def _against_the_best(self, step: Step) -> Step:
        """A step that fits, with its verdict; it becomes the best if it is."""
        fitting = [*(other for other in self.steps if other.fits), step]
        tied, chosen = ranking.ties(fitting, _seconds), preferred(fitting)
        verdict = "fits, a tie" if len(tied) > 1 and any(other is step for other in tied) else "fits"
        if chosen is step:
            verdict = "fits, fastest so far" if len(tied) == 1 else f"{verdict}, thriftier"
        told = dataclasses.replace(step, verdict=verdict)
        self.best = told if chosen is step else chosen
        return told

    @property
    def ties(self) -> list[Step]:
        """The variants that fit and are predicted to be as fast as the choice, itself left out."""
        fitting = [step for step in self.steps if step.fits]
        return [step for step in ranking.ties(fitting, _seconds) if step is not self.best]

    def _missing(self, step: Step) -> float:
        """Bytes that a step lacks, on the device and on the host together."""
        return max(step.allocated - self.budget, 0) + max(step.answer["host_bytes"] - self.trials.host_budget, 0)

    def _try(self, stage: str, variants: Sequence[Mapping[str, str]], plan: str = "") -> list[Step]:
        """Compiles variants of one stage and plan together."""
        return self._try_all([(stage, keys, plan) for keys in variants])

    def _try_all(self, tries: Sequence[tuple[str, Mapping[str, str], str]]) -> list[Step]:
        """Compiles (stage, keys, plan in words) together. When the search is stopped, those that were finished are
        recorded too."""
        steps = []
        try:
            self.trials.compile([keys for _, keys, _ in tries])
        finally:
            for stage, keys, plan in tries:
                answer = self.trials.done(keys)
                if answer is not None:
                    steps.append(self.record(stage, keys, answer, plan))
        return steps

    # ---- the walk ----------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        space, base = self.space, self.space.baseline()
        meshes = space.meshes()
        first = {**base, **meshes[0], **space.batch(meshes[0], space.micros(meshes[0])[0])}
        if "remat" not in space.levers:
            self._without_remat(base, meshes)
            return
        smallest = [{**base, **mesh, **space.batch(mesh, space.micros(mesh)[0])} for mesh in meshes]
        self._try_all(
            [
                ("baseline", {**first, **remat_keys(NONE)}, NONE),
                *(("mesh", {**keys, **remat_keys(FULL)}, FULL) for keys in smallest),
            ]
        )
        for number, squeeze in enumerate(space.squeezes()):
            if number and self.best is not None and not squeeze.beside:
                break
            self._squeezed(squeeze, base, meshes)
            if self.best is not None:
                continue
            # Only the smallest meshes are squeezed further: the others hold more.
            ran = [step for step in self.steps if step.ok and step.stage == "mesh"]
            small = sorted(ran, key=lambda step: step.allocated)[:MOST_MESHES]
            meshes = [mesh for mesh in meshes if any(mesh.items() <= step.keys.items() for step in small)] or meshes
        if self.best is not None:
            self._neighbours()

    def _squeezed(self, squeeze: Squeeze, base: Keys, meshes: Sequence[Keys]) -> None:
        """Looks for plans under a squeeze, on each mesh that can still win, the most promising first."""
        stage = "mesh" if squeeze is self.space.squeezes()[0] else "squeeze"
        starts = []
        for mesh in meshes:
            sizes = self._sizes(squeeze, mesh)
            if sizes:
                starts.append((mesh, {**base, **mesh, **self.space.batch(mesh, sizes[0]), **squeeze.keys}))
        steps = self._try(stage, [{**keys, **remat_keys(FULL)} for _, keys in starts], FULL)
        ranked = sorted(
            (self.bound(step), number) for number, step in enumerate(steps) if step.ok and self._can_fit(step, squeeze)
        )
        # Meshes are compared at their smallest micro-batch: a larger one pays on all of them.
        to_beat = math.inf if self.best is None else self.best.seconds
        for bound, number in ranked:
            mesh, start = starts[number]
            if bound < to_beat * (1 - TIE) or (self.best is not None and _same(self.best.keys, start)):
                to_beat = min(to_beat, self._grow_micro_batch(squeeze, base, mesh, to_beat))

    def _can_fit(self, step: Step, squeeze: Squeeze) -> bool:
        """Whether a plan may fit on the mesh of `step`, which recomputes everything: it fits itself, or it would with
        the block inputs it keeps in host memory."""
        if step.fits:
            return True
        over = step.allocated - self.budget
        room = self.trials.host_budget - step.answer["host_bytes"]
        moves = squeeze.activations and not self.space.schedule(step.keys)
        return moves and over <= step.answer["residual_bytes"] and max(over, 0) <= room

    def _sizes(self, squeeze: Squeeze, mesh: Keys) -> list[int]:
        """Micro-batches to try on a mesh, smallest first."""
        sizes = self.space.micros(mesh)
        if self.space.schedule(mesh) and squeeze.activations and not squeeze.keys:
            return []  # stages keep their stash on the device
        if squeeze.whole:
            sizes = [size for size in sizes if self.space.sequences == size * self.space.ranks(mesh)]
        return sizes

    def bound(self, step: Step) -> float:
        """Seconds per update that no plan with the same mesh and micro-batch is expected to beat: those of `step`,
        which recomputes everything, without its recomputation."""
        return step.seconds - min(self._saved_share * ALIKE, 1.0) * self._recompute_seconds(step)

    def _recompute_seconds(self, step: Step) -> float:
        return step.prediction.by_phase.get("recompute", 0.0) if step.prediction else 0.0

    def _update_saved_share(self, full: Step, plan: Step) -> None:
        """Learns from a plan that recomputes nothing what share of `full`'s recomputation time that saved: keeping
        tensors takes time too."""
        recompute = self._recompute_seconds(full)
        if recompute and not plan.answer["recompute_flops_fraction"]:
            self._saved_share = min(self._saved_share, (full.seconds - plan.seconds) / recompute)

    def _grow_micro_batch(self, squeeze: Squeeze, base: Keys, mesh: Keys, to_beat: float) -> float:
        """The least recomputation for one micro-batch after the other, as long as the larger one pays.

        to_beat: seconds per update that the smallest micro-batch has to beat. Returns what that took, infinity where
        nothing fits.
        """
        found: list[float] = []  # seconds per update, one for each micro-batch
        for size in self._sizes(squeeze, mesh):
            keys = {**base, **mesh, **self.space.batch(mesh, size), **squeeze.keys}
            full = self._try("micro", [{**keys, **remat_keys(FULL)}], FULL)[0]
            if not full.ok or not self._can_fit(full, squeeze):
                break
            best = self.best
            limit = best.seconds if found and best is not None else to_beat
            if self.bound(full) < limit * (1 - TIE):
                seconds = self._least_recomputation(keys, squeeze.activations)
            elif best is not None and _same(best.keys, keys):  # the best has this very micro-batch already
                seconds = best.seconds
            else:
                break
            if seconds is None or (found and seconds >= found[-1] * (1 - TIE)):
                break
            found.append(seconds)
        return found[0] if found else math.inf

    def _least_recomputation(self, keys: Keys, activations: bool) -> float | None:
        """Predicted seconds per update of a variant with the least recomputation that fits, None where no plan does.

        activations: whether tensors of blocks may go to host memory.
        """

        def record(tried: CompiledPlan) -> None:
            variant = {**keys, **plan_keys(tried.plan)}
            self.record("remat", variant, self.trials.compile([variant])[0], str(tried.plan))

        try:
            moves = activations and not self.space.schedule(keys)
            search = self.trials.search(keys, offload=moves, tell=record)
        except ReportError as error:  # it compiles, but nothing is known of its blocks
            self.record("remat", keys, {"status": str(error)}, "what to keep")
            return None
        found = search.run(self.budget, most=MOST_PLANS, at_once=2).best
        if found is None:
            return None
        chosen = {**keys, **plan_keys(found.plan)}
        step = next(step for step in self.steps if step.keys == chosen)
        best = self.best.keys if self.best else None
        of_best = [tried.plan for tried in search.tried.values() if {**keys, **plan_keys(tried.plan)} == best]
        if of_best:
            self._search, self._plan = search, of_best[0]
        full = next(one for one in self.steps if one.keys == {**keys, **remat_keys(FULL)})
        self._update_saved_share(full, step)
        return step.seconds

    def _without_remat(self, base: Keys, meshes: Sequence[Keys]) -> None:
        """The walk without the lever `remat`: meshes and micro-batches, under the config's own policy."""
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
        """Tries plans that keep one more name than the best; goes on from there if one fits and is faster."""
        for _ in range(MOST_NEIGHBOURS):
            before, plan = self.best, self._plan
            if (
                self._search is None
                or plan is None
                or before is None
                or not plan_keys(plan).items() <= before.keys.items()
            ):
                return
            self._try_one_more_name(self._search, plan, before)
            if self.best is before:
                return

    def _try_one_more_name(self, search: RematSearch, plan: LayerPlan, best: Step) -> None:
        keys = {key: text for key, text in best.keys.items() if not key.startswith("remat.")}
        graph, rates = search.problem.graph, search.problem.rates
        more = []
        for name in graph.names:
            other = _with_name(plan, name, graph, rates)
            if other.bytes > plan.bytes and search.cost(other) < search.cost(plan) * (1 - EVEN):
                more.append(other)
        more = [other for other in sorted(more, key=search.cost) if search.predict(other) <= self.budget]
        variants = [{**keys, **plan_keys(other)} for other in more[:MOST_NEIGHBOURS]]
        for other, variant, answer in zip(more, variants, self.trials.compile(variants)):
            if self.record("neighbour", variant, answer, str(other)) is self.best:
                self._plan = other


def preferred(steps: Sequence[Step]) -> Step | None:
    """Returns the fastest step that fits; of ties, the one that recomputes and allocates less (`rows.thrift`); None if
    there is no step."""
    return ranking.preferred(steps, _seconds, lambda step: step.thrift)


def _seconds(step: Step) -> float:
    return step.seconds


def _same(keys: Mapping[str, str], variant: Mapping[str, str]) -> bool:
    """Whether `keys` are those of a variant, but for remat."""
    return {key: text for key, text in keys.items() if not key.startswith("remat.")} == dict(variant)


def _with_name(plan: LayerPlan, name: str, graph: LayerGraph, rates: RecomputeRates) -> LayerPlan:
    """The plan with one more name kept on the device by every layer; ranges that offload tensors stay as they are."""
    ranges: list[tuple[KeepPattern, int]] = []
    for pattern, count in plan.ranges:
        if not pattern.offload and name not in pattern.save:
            pattern = pattern_keeping(graph, rates, "", (*pattern.save, name))
        if ranges and ranges[-1][0] == pattern:
            ranges[-1] = pattern, ranges[-1][1] + count
        else:
            ranges.append((pattern, count))
    return LayerPlan(tuple(ranges))
