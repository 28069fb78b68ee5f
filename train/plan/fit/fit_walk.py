"""Searches for the fastest configuration that fits a memory budget. Every variant that it tries is compiled.

The walk starts from a bf16 baseline. If the baseline does not fit, the walk looks for the least recomputation that
fits. If full recomputation does not fit, it moves activations and then state to host memory, and finally, if allowed,
reduces the precision. While larger micro-batches are predicted to be faster, it raises the micro-batch of a variant
that fits, and accumulates micro-batches to the requested batch.

If a variant exceeds the budget by little and nothing cheaper fits, options of XLA that need less memory are tried
(`COMPILER_SAVINGS`).

Meshes are compared by the step that recomputes everything. Its predicted time without the recomputation is a lower
bound for every plan on the mesh. If predicted times tie (`ranking.TIE`), the variant that recomputes least is chosen,
then the variant that needs the least memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_rows import thrift
from bytescope.memory.compare.fit_search import FitSearch, Step
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.layer_graph import LayerGraph
from bytescope.memory.remat.remat_problem import CompiledPlan, KeepPattern, LayerPlan, RecomputeRates
from bytescope.memory.remat.remat_search import EVEN, FULL, NONE, RematSearch
from bytescope.memory.remat.remat_solver import pattern_keeping
from bytescope.memory.seconds import ranking
from bytescope.memory.seconds.ranking import TIE
from bytescope.train.plan.config_grid import ConfigRow, plan_keys, remat_keys
from bytescope.train.plan.fit.fit_space import Keys, Space, Squeeze, describe_variant
from bytescope.train.plan.lever_catalogue import SAVINGS
from bytescope.train.plan.trials import Trials

# MAX_PLANS: maximum number of compiles in one search for a plan. MAX_NEIGHBOURS: maximum number of plans that save one
# more tensor than the best plan.
MAX_PLANS, MAX_NEIGHBOURS = 6, 4
# The fraction of recomputation time that a plan can save is assumed to differ between meshes by at most this factor.
ALIKE = 1.05
# Savings of the catalogue that set options of XLA. They are tried with at most MAX_NEAR variants that exceed the budget
# by at most the fraction NEAR, because they free little: 1.3 % of the temporary bytes of llama_8b with
# remat.policy=minimal, batch.micro=2 on h100:8.
COMPILER_SAVINGS = ("memory_slop", "scheduler_off")
NEAR, MAX_NEAR = 0.02, 2
# Number of meshes on which further memory savings are tried if recomputation is not enough on any mesh.
MAX_MESHES = 2


class Walk(FitSearch):
    """Searches for the fastest variant of a config that fits a memory budget. `run` starts the search.

    Args:
        trials: the object that compiles variants of the config (some keys changed).
        space: which meshes, micro-batches and memory savings may be tried.
        budget: the bytes available on one device.
        show: called with each variant when it has been compiled.
    """

    def __init__(self, trials: Trials, space: Space, budget: int, show: Callable[[Step], None] = lambda step: None):
        super().__init__(trials.config, trials.target, budget, trials.host_budget, trials.limits, show)
        self.trials, self.space = trials, space
        # The smallest fraction of the recomputation time that a plan without recomputation has saved so far.
        self._saved_fraction = 1.0
        self._remat: RematSearch | None = None
        self._plan: LayerPlan | None = None

    # ---- one variant -------------------------------------------------------------------------------------------

    def judge_answer(self, stage: str, what: str, keys: Keys, answer: Mapping[str, Any]) -> Step:
        """Returns a compiled variant as a `Step`, with its predicted seconds.

        answer: the JSON record of the compiled program that the worker process returned: bytes, FLOPs and schedule.
        """
        prediction = self.trials.predicted(answer) if answer["status"] == "ok" else None
        return self.judge(stage, what, keys, answer, prediction)

    def add(self, stage: str, keys: Keys, answer: Mapping[str, Any], plan: str = "") -> Step:
        """Records a compiled variant and updates `best`. A variant that is in `steps` already is not added again.
        Returns the variant.

        Args:
            stage: the stage of the search, a key of `fit_view.STAGES`.
            keys: the config keys of the variant, dotted key -> text.
            answer: the JSON record of the compiled program that the worker process returned.
            plan: a description of the tensors that the variant saves.
        """
        known = next((step for step in self.steps if step.keys == keys), None)
        if known is not None:
            return known
        what = ", ".join(filter(None, (describe_variant(keys, self.space), plan)))
        step = self.judge_answer(stage, what, keys, answer)
        if step.fits:
            fitting = [*self.fitting, step]
            tied, chosen = ranking.ties(fitting, _seconds), preferred(fitting)
            verdict = "fits, a tie" if len(tied) > 1 and any(other is step for other in tied) else "fits"
            if chosen is step:
                verdict = "fits, fastest so far" if len(tied) == 1 else f"{verdict}, thriftier"
            judged = dataclasses.replace(step, verdict=verdict)
            self.best = judged if chosen is step else chosen
            step = judged
        return self.record(step)

    @property
    def ties(self) -> list[Step]:
        """The variants that fit and are predicted to be as fast as the best one. The best one is not included."""
        return [step for step in ranking.ties(self.fitting, _seconds) if step is not self.best]

    def _compile_and_record(self, tries: Sequence[tuple[str, Keys, str]]) -> list[Step]:
        # If the search is stopped, the variants that are finished are still recorded.
        steps = []
        try:
            self.trials.compile([keys for _, keys, _ in tries])
        finally:
            for stage, keys, plan in tries:
                answer = self.trials.done(keys)
                if answer is not None:
                    steps.append(self.add(stage, keys, answer, plan))
        return steps

    # ---- the walk ----------------------------------------------------------------------------------------------

    def _search(self) -> None:
        space, base = self.space, self.space.baseline()
        meshes = space.meshes()
        first = {**base, **meshes[0], **space.batch(meshes[0], space.micros(meshes[0])[0])}
        if "remat" not in space.levers:
            self._search_without_remat_lever(base, meshes)
            return
        tries = [("baseline", {**first, **remat_keys(NONE)}, NONE)]
        for mesh in meshes:
            smallest = {**base, **mesh, **space.batch(mesh, space.micros(mesh)[0])}
            tries.append(("mesh", {**smallest, **remat_keys(FULL)}, FULL))
        self._compile_and_record(tries)
        for number, squeeze in enumerate(space.squeezes()):
            if number and self.best is not None and not squeeze.always:
                break
            self._search_with_squeeze(squeeze, base, meshes)
            if number == 0 and self.best is None:
                self._try_compiler_savings()
            if self.best is not None:
                continue
            # Further savings are tried only on the meshes that need the least memory.
            ran = [step for step in self.steps if step.ok and step.stage == "mesh"]
            small = sorted(ran, key=lambda step: step.allocated)[:MAX_MESHES]
            meshes = [mesh for mesh in meshes if any(mesh.items() <= step.keys.items() for step in small)] or meshes
        if self.best is not None:
            self._try_neighbour_plans()
        self._try_compiler_savings()

    def _try_compiler_savings(self) -> None:
        """Compiles variants that exceed the budget by little, and would be faster than the best, with options of XLA
        that need less memory. The fastest variant comes first, and the first one that fits ends the search."""
        if "xla" not in self.space.levers or self.trials.target.platform != "cuda":
            return
        to_beat = math.inf if self.best is None else self.best.seconds * (1 - TIE)
        near = []
        for step in self.steps:
            over = step.allocated / self.budget - 1
            on_host = step.ok and step.answer["host_bytes"] <= self.trials.host_budget
            if on_host and 0 < over <= NEAR and step.seconds < to_beat and step.stage != "compiler":
                near.append(step)
        for step in sorted(near, key=_seconds)[:MAX_NEAR]:
            plan = step.what.removeprefix(describe_variant(step.keys, self.space)).removeprefix(", ")
            variants = [{**step.keys, **SAVINGS[name].keys} for name in COMPILER_SAVINGS]
            if any(made.fits for made in self._compile_and_record([("compiler", keys, plan) for keys in variants])):
                return

    def _search_with_squeeze(self, squeeze: Squeeze, base: Keys, meshes: Sequence[Keys]) -> None:
        """Searches with one set of memory savings (`squeeze`). It tries each mesh that can still be faster than the
        best, the most promising first.

        base: the config keys that all variants share.
        """
        stage = "mesh" if squeeze is self.space.squeezes()[0] else "squeeze"
        starts = []
        for mesh in meshes:
            sizes = self._micro_batch_sizes(squeeze, mesh)
            if sizes:
                starts.append((mesh, {**base, **mesh, **self.space.batch(mesh, sizes[0]), **squeeze.keys}))
        steps = self._compile_and_record([(stage, {**keys, **remat_keys(FULL)}, FULL) for _, keys in starts])
        ranked = []
        for number, step in enumerate(steps):
            if step.ok and self._can_fit(step, squeeze):
                ranked.append((self.bound(step), number))
        # Meshes are compared at their smallest micro-batch, because a larger micro-batch is faster on every mesh.
        to_beat = math.inf if self.best is None else self.best.seconds
        for bound, number in sorted(ranked):
            mesh, start = starts[number]
            if bound < to_beat * (1 - TIE) or (self.best is not None and _same_without_remat(self.best.keys, start)):
                to_beat = min(to_beat, self._grow_micro_batch(squeeze, base, mesh, to_beat))

    def _can_fit(self, step: Step, squeeze: Squeeze) -> bool:
        # `step` recomputes everything. If it does not fit, only saved activations in host memory can help.
        if step.fits:
            return True
        over = step.allocated - self.budget
        room = self.trials.host_budget - step.answer["host_bytes"]
        moves = squeeze.activations and not self.space.schedule(step.keys)
        return moves and over <= step.answer["residual_bytes"] and max(over, 0) <= room

    def _micro_batch_sizes(self, squeeze: Squeeze, mesh: Keys) -> list[int]:
        sizes = self.space.micros(mesh)
        if self.space.schedule(mesh) and squeeze.activations and not squeeze.keys:
            return []  # pipeline stages cannot move their saved activations to host memory
        if squeeze.one_micro_batch:
            sizes = [size for size in sizes if self.space.sequences == size * self.space.ranks(mesh)]
        return sizes

    def bound(self, step: Step) -> float:
        """Returns a lower bound of the seconds per update for a mesh and micro-batch size, over all choices of the
        tensors that layers save.

        The bound is the predicted time with full recomputation, minus the most recomputation time that saved tensors
        can avoid.

        step: the variant with this mesh and micro-batch size that recomputes everything.
        """
        return step.seconds - min(self._saved_fraction * ALIKE, 1.0) * self._recompute_seconds(step)

    def _recompute_seconds(self, step: Step) -> float:
        return step.prediction.by_phase.get("recompute", 0.0) if step.prediction else 0.0

    def _grow_micro_batch(self, squeeze: Squeeze, base: Keys, mesh: Keys, to_beat: float) -> float:
        """Searches one mesh with larger and larger micro-batches, as long as a larger one is faster. For each, finds
        the least recomputation that fits.

        Returns the predicted seconds per update with the smallest micro-batch; infinity if it does not fit, or cannot
        be faster than `to_beat` seconds per update.

        Args:
            squeeze: the set of memory savings.
            base: the config keys that all variants share.
            mesh: the config keys that select the mesh.
        """
        seconds_by_size: list[float] = []  # seconds per update of each micro-batch so far
        for size in self._micro_batch_sizes(squeeze, mesh):
            keys = {**base, **mesh, **self.space.batch(mesh, size), **squeeze.keys}
            full = self._compile_and_record([("micro", {**keys, **remat_keys(FULL)}, FULL)])[0]
            if not full.ok or not self._can_fit(full, squeeze):
                break
            best = self.best
            limit = best.seconds if seconds_by_size and best is not None else to_beat
            if self.bound(full) < limit * (1 - TIE):
                seconds = self._find_least_recomputation(keys, squeeze.activations)
            elif best is not None and _same_without_remat(best.keys, keys):
                # The best variant already has this micro-batch.
                seconds = best.seconds
            else:
                break
            if seconds is None or (seconds_by_size and seconds >= seconds_by_size[-1] * (1 - TIE)):
                break
            seconds_by_size.append(seconds)
        return seconds_by_size[0] if seconds_by_size else math.inf

    def _find_least_recomputation(self, keys: Keys, activations: bool) -> float | None:
        """Finds the remat plan (which tensors each layer saves) with the least recomputation that fits, and returns its
        predicted seconds per update.

        Returns None if no plan fits.

        Args:
            keys: the config keys of the variant without remat keys.
            activations: whether saved activations may be moved to host memory.
        """

        def record(tried: CompiledPlan) -> None:
            variant = {**keys, **plan_keys(tried.plan)}
            self.add("remat", variant, self.trials.compile([variant])[0], str(tried.plan))

        try:
            moves = activations and not self.space.schedule(keys)
            search = self.trials.search(keys, offload=moves, tell=record)
        except ReportError as error:  # the variant compiles, but its blocks cannot be described
            self.add("remat", keys, {"status": str(error)}, "search for a plan")
            return None
        cheapest = search.run(self.budget, most=MAX_PLANS, at_once=2).best
        if cheapest is None:
            return None
        chosen = {**keys, **plan_keys(cheapest.plan)}
        step = next(step for step in self.steps if step.keys == chosen)
        best = self.best.keys if self.best else None
        for tried in search.tried.values():
            if {**keys, **plan_keys(tried.plan)} == best:
                self._remat, self._plan = search, tried.plan
                break
        full = next(one for one in self.steps if one.keys == {**keys, **remat_keys(FULL)})
        recompute = self._recompute_seconds(full)
        if recompute and not step.answer["recompute_flops_fraction"]:
            # Less than 1, because saving tensors takes time too.
            self._saved_fraction = min(self._saved_fraction, (full.seconds - step.seconds) / recompute)
        return step.seconds

    def _search_without_remat_lever(self, base: Keys, meshes: Sequence[Keys]) -> None:
        for squeeze in self.space.squeezes():
            for mesh in meshes:
                before: float | None = None
                for size in self._micro_batch_sizes(squeeze, mesh):
                    keys = {**base, **mesh, **self.space.batch(mesh, size), **squeeze.keys}
                    step = self._compile_and_record([("micro", keys, "")])[0]
                    if not step.fits or (before is not None and step.seconds >= before * (1 - TIE)):
                        break
                    before = step.seconds
            if self.best is not None:
                return

    def _try_neighbour_plans(self) -> None:
        # A neighbour saves one more tensor than the best plan.
        for _ in range(MAX_NEIGHBOURS):
            before, search, plan = self.best, self._remat, self._plan
            if search is None or plan is None or before is None:
                return
            if not plan_keys(plan).items() <= before.keys.items():
                return
            self._try_one_more_name(search, plan, before)
            if self.best is before:
                return

    def _try_one_more_name(self, search: RematSearch, plan: LayerPlan, best: Step) -> None:
        keys = {key: text for key, text in best.keys.items() if not key.startswith("remat.")}
        graph, rates = search.problem.graph, search.problem.rates
        candidates = []
        for name in graph.names:
            other = _save_one_more_tensor(plan, name, graph, rates)
            if other.bytes > plan.bytes and search.cost(other) < search.cost(plan) * (1 - EVEN):
                candidates.append(other)
        cheapest = sorted(candidates, key=search.cost)
        fitting = [other for other in cheapest if search.predict(other) <= self.budget][:MAX_NEIGHBOURS]
        variants = [{**keys, **plan_keys(other)} for other in fitting]
        for other, variant, answer in zip(fitting, variants, self.trials.compile(variants)):
            if self.add("neighbour", variant, answer, str(other)) is self.best:
                self._plan = other


def preferred(steps: Sequence[Step]) -> Step | None:
    """Returns the fastest variant; None if there are no variants.

    If predicted seconds tie, the variant with less recomputation is returned, then the variant with less memory.
    """
    return ranking.preferred(steps, _seconds, _thrift)


def _seconds(step: Step) -> float:
    return step.seconds


def _thrift(step: Step) -> tuple[float, int, bool]:
    """Returns the sort key for variants whose predicted seconds are about equal, the best one first
    (`compare_rows.thrift`)."""
    names = ("recompute_flops_fraction", "allocated_bytes", "host_bytes")
    return thrift(ConfigRow.from_answer(step.keys, {name: step.answer.get(name) for name in names}))


def _same_without_remat(keys: Mapping[str, str], variant: Mapping[str, str]) -> bool:
    return {key: text for key, text in keys.items() if not key.startswith("remat.")} == dict(variant)


def _save_one_more_tensor(plan: LayerPlan, name: str, graph: LayerGraph, rates: RecomputeRates) -> LayerPlan:
    # Ranges of layers that move tensors to host memory stay unchanged.
    ranges: list[tuple[KeepPattern, int]] = []
    for pattern, count in plan.ranges:
        if not pattern.offload and name not in pattern.save:
            pattern = pattern_keeping(graph, rates, "", (*pattern.save, name))
        if ranges and ranges[-1][0] == pattern:
            ranges[-1] = pattern, ranges[-1][1] + count
        else:
            ranges.append((pattern, count))
    return LayerPlan(tuple(ranges))
