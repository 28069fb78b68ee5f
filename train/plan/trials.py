"""Compiles variants of one config in worker processes: each once, cached, in parallel, until a limit or Ctrl-C."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.layer_graph import LayerGraph
from bytescope.memory.remat.remat_problem import CompiledPlan, LayerPlan, PlanFigures, RematProblem
from bytescope.memory.remat.remat_search import FULL, RematSearch
from bytescope.memory.seconds import ranking, step_prediction
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.config_grid import plan_keys, remat_keys

# Keys as the command line gives them: dotted key -> text.
Keys = Mapping[str, str]


class Stopped(Exception):
    """Ends a search, which keeps its results. The argument says why: Ctrl-C, or a limit on time or compiles."""


@dataclasses.dataclass
class Trials:
    """Compiles variants of a config on a target.

    Fields:
        config, overrides: as the command line gives them. A variant that sets the same key replaces an override.
        pool: the workers. cache: the folder of finished rows, None for no cache.
        progress: called with the labels of the running jobs and the number of finished ones.
        most, seconds: maximum number of compiles, without rows from the cache, and seconds after which no compile
            starts; then `Stopped` is raised.
        factory: makes the programs of configs.
        compiles: number of programs compiled so far, without rows from the cache.

    Raises ReportError for a target whose rates are unknown.
    """

    config: str
    target: Target
    overrides: Sequence[tuple[str, str]]
    pool: worker_pool.Pool
    cache: Path | None
    progress: worker_pool.Progress = lambda labels, done: None
    most: float = math.inf
    seconds: float = math.inf
    factory: ProgramFactory = FACTORY

    def __post_init__(self) -> None:
        self.compiles, self._began = 0, time.monotonic()
        self._jobs = Jobs(self.factory)
        self._done: dict[str, dict[str, Any]] = {}
        rates = ranking.large(self.target)
        if rates is None:
            raise ReportError(f"target {self.target.name}: its rates are unknown, so no time can be predicted")
        self.rates = rates

    def flat(self, keys: Keys) -> Mapping[str, Any]:
        """Returns the whole config of a variant, dotted key -> value. Raises UserError for an invalid one."""
        return self.factory.resolve(self._overrides(keys))

    def compile(self, variants: Sequence[Keys]) -> list[dict[str, Any]]:
        """Returns a worker's answer for each variant, `{"status": why}` for one that cannot run. Raises Stopped."""
        return self._ask([self.job(keys) for keys in variants])

    def done(self, keys: Keys) -> dict[str, Any] | None:
        """Returns the answer for a variant, None if it has not been compiled."""
        return self._done.get(self.job(keys).name)

    def job(self, keys: Keys, *, describe: bool = False, target: str = "", measure: bool = False) -> worker_pool.Job:
        """Returns the job that compiles a variant; target: another one than the search's."""
        shown = [(key.rpartition(".")[2], text) for key, text in keys.items() if text not in ("()", "")]
        label = ", ".join(f"{name}={text}" for name, text in shown)
        return self._jobs.job(
            self._overrides(keys),
            target or self.target.name,
            label[:60],
            method="describe" if describe else "",
            measure=measure,
        )

    def _overrides(self, keys: Keys) -> dict[str, str]:
        return {CONFIG: self.config, **dict(self.overrides), **keys}

    def _ask(self, jobs: Sequence[worker_pool.Job]) -> list[dict[str, Any]]:
        new: dict[str, worker_pool.Job] = {}
        for job in jobs:
            if job.name in self._done:
                continue
            cached = row_cache.read(self.cache, job.name) if self.cache else None
            if cached:
                self._done[job.name] = cached
            else:
                new[job.name] = job
        if new:
            self._compile(list(new.values()))
        return [self._done[job.name] for job in jobs]

    def _compile(self, jobs: Sequence[worker_pool.Job]) -> None:
        """Compiles jobs into `_done`. Raises Stopped if a limit or Ctrl-C leaves some of them out."""
        if self.compiles >= self.most:
            raise Stopped(self._limit())
        if time.monotonic() - self._began > self.seconds:
            raise Stopped(f"the time limit ({self.seconds:g} s) was reached")
        allowed = jobs[: int(min(self.most - self.compiles, len(jobs)))]
        answers, interrupted = worker_pool.ask(self.pool, allowed, cache=self.cache, progress=self.progress)
        self._done |= answers
        self.compiles += sum(not job.method for job in allowed if job.name in answers)
        if interrupted:
            raise Stopped("Ctrl-C")
        if len(allowed) < len(jobs):
            raise Stopped(self._limit())

    def _limit(self) -> str:
        return f"the limit on compiles ({self.compiles}) was reached"

    # ---- the least recomputation of a variant -----------------------------------------------------------------

    def search(
        self,
        keys: Keys,
        *,
        cost: str = "time",
        offload: bool = False,
        tell: Callable[[CompiledPlan], None] = lambda tried: None,
    ) -> RematSearch:
        """Returns the search for the least recomputation of a variant.

        Args:
            cost: a row of `memory.remat.remat_problem.COSTS`. offload: whether tensors may go to host memory.
            tell: called with each compiled plan.

        Raises:
            ReportError: the variant cannot run, or nothing is known of its blocks.
            Stopped: no more compiles are allowed.
        """
        full_keys = {**keys, **remat_keys(FULL)}
        full, described = self._ask([self.job(full_keys), self.job(full_keys, describe=True)])
        for answer in (described, full):
            if answer["status"] != "ok":
                raise ReportError(answer["status"])
        policies = described["policies"]
        if offload:
            policies = {**policies, **described["moving"]}
        micro_steps = described["micro_steps"] * full["calls_per_update"]
        problem = RematProblem.on_target(
            LayerGraph.from_json(described["block"]),
            self.predicted(full).by_phase,
            micro_steps,
            self.rates,
            self.target,
            cost=cost,
            offload=offload,
            policies=policies,
            ranges=described["ranges"],
        )

        def compile_plans(plans: Sequence[LayerPlan]) -> list[PlanFigures]:
            variants = [{**keys, **plan_keys(plan)} for plan in plans]
            try:
                return [self.compiled(answer) for answer in self.compile(variants)]
            except Stopped:  # finished plans count all the same
                for plan, variant in zip(plans, variants):
                    answer = self.done(variant)
                    if answer is not None:
                        tell(CompiledPlan(plan, 0, self.compiled(answer)))
                raise

        return RematSearch(problem, compile_plans, tell)

    def predicted(self, answer: Mapping[str, Any]) -> StepPrediction:
        """Predicts the seconds of an update of a compiled variant. Raises ReportError if that is not possible."""
        found = step_prediction.predict_answer(answer)
        if found is None:
            why = (
                step_prediction.missing(bool(answer.get("schedule")), self.target.to_json())
                or "nothing in this program takes time"
            )
            raise ReportError(f"target {self.target.name}: no seconds are predicted: {why}")
        return found

    @property
    def host_budget(self) -> float:
        """Bytes of host memory for one device."""
        return self.target.host_bytes_per_device

    def compiled(self, answer: Mapping[str, Any]) -> PlanFigures:
        """Returns a worker's answer as the search takes it: bytes on one device, seconds and FLOPs of one update."""
        if answer["status"] != "ok":
            return PlanFigures(status=answer["status"])
        return PlanFigures(
            answer["allocated_bytes"],
            answer["host_bytes"],
            self.predicted(answer).seconds,
            answer["recompute_flops_fraction"] * answer["model_flops"] * answer["calls_per_update"],
        )
