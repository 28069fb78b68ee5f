"""Compiles variants of one config in parallel worker processes, with a cache. Each variant is compiled only once.

A limit on compiles or seconds, or Ctrl-C, stops the search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.compiling import Effort
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.compare.search_limits import Limits, Stopped
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.layer_graph import LayerGraph
from bytescope.memory.remat.remat_problem import CompiledPlan, LayerPlan, PlanFigures, RematProblem
from bytescope.memory.remat.remat_search import FULL, RematSearch
from bytescope.memory.seconds import ranking, step_prediction
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.view.console import shorten
from bytescope.memory.view.progress_bar import ProgressBar, progress
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.config_grid import describe_keys, plan_keys, remat_keys

# Config keys as the command line gives them: dotted key -> text.
Keys = Mapping[str, str]


@dataclasses.dataclass
class Trials:
    """Compiles variants of a config (some keys changed) for a target, which is a number of devices of one kind.

    Attributes:
        config: the name or file of the config, as on the command line.
        target: the target to compile for.
        overrides: pairs (dotted key, text) as the command line gives them. A key that a variant sets replaces the
            override of the same key.
        pool: the worker processes.
        cache: the folder with the results of finished compiles; None for no cache.
        progress: called with the labels of the running jobs and the number of jobs that are finished since the start.
        describe: function from the keys of a variant to its label.
        limits: the limits on compiles and seconds. At a limit, `Stopped` is raised.
        factory: builds the programs of configs.

    Raises:
        ReportError: the FLOP/s and bytes/s of the target's devices are unknown.
    """

    config: str
    target: Target
    overrides: Sequence[tuple[str, str]]
    pool: worker_pool.Pool
    cache: Path | None
    progress: worker_pool.Progress = lambda labels, done: None
    describe: Callable[[Keys], str] = describe_keys
    limits: Limits = dataclasses.field(default_factory=Limits)
    factory: ProgramFactory = FACTORY

    def __post_init__(self) -> None:
        self._jobs = Jobs(self.factory)
        self._runner = worker_pool.JobRunner(self.pool, self.cache, self.progress, self.limits)
        rates = ranking.large(self.target)
        if rates is None:
            raise ReportError(
                f"the time on target {self.target.name} cannot be predicted, because the FLOP/s and bytes/s of its "
                "devices are unknown: give the rates file of bytescope calibrate with --rates=FILE"
            )
        self.rates = rates

    def flat(self, keys: Keys) -> Mapping[str, Any]:
        """Returns the whole config of a variant, dotted key -> value. `keys`: the config keys that the variant sets,
        dotted key -> text.

        Raises:
            UserError: the variant is invalid.
        """
        return self.factory.resolve(self._overrides(keys))

    def compile(self, variants: Sequence[Keys]) -> list[dict[str, Any]]:
        """Compiles variants of the config in worker processes. Returns for each variant the worker's JSON record of its
        bytes, FLOPs and schedule.

        The record is `{"status": reason}` for a variant that cannot run. `memory.compare.worker` lists its keys.

        variants: the config keys that each variant sets, dotted key -> text.

        Raises:
            Stopped: a limit was reached or the user pressed Ctrl-C.
        """
        return self._runner.ask([self.job(keys) for keys in variants])

    def done(self, keys: Keys) -> dict[str, Any] | None:
        """Returns the worker's JSON record of bytes, FLOPs and schedule for a variant that was compiled before; None if
        it was not. `keys`: the config keys that the variant sets."""
        return self._runner.answers.get(self.job(keys).name)

    def job(self, keys: Keys, *, describe: bool = False, target: str = "", measure: bool = False) -> worker_pool.Job:
        """Returns the job that a worker process runs to compile a variant.

        Args:
            keys: the config keys that the variant sets, dotted key -> text.
            describe: whether the worker, instead of compiling, returns the graph of a block, which the search for remat
                plans needs.
            target: the target to compile for; "" for the target of the search.
            measure: whether the worker also runs and times the step.
        """
        label = shorten(self.describe(keys), 60)
        return self._jobs.job(
            self._overrides(keys),
            target or self.target.name,
            f"the layers of {label}" if describe else label,
            method="describe" if describe else "",
            measure=measure,
        )

    def _overrides(self, keys: Keys) -> dict[str, str]:
        return {CONFIG: self.config, **dict(self.overrides), **keys}

    # ---- the least recomputation of a variant -----------------------------------------------------------------

    def search(
        self,
        keys: Keys,
        *,
        cost: str = "time",
        offload: bool = False,
        tell: Callable[[CompiledPlan], None] = lambda tried: None,
    ) -> RematSearch:
        """Returns a search for the remat plan (which tensors each layer saves) with the least recomputation that fits a
        memory budget.

        Args:
            keys: the config keys that the variant sets, dotted key -> text.
            cost: the cost to minimize, "time" or "flops" (keys of `memory.remat.remat_problem.COSTS`).
            offload: whether tensors may be moved to host memory.
            tell: called with each compiled plan.

        Raises:
            ReportError: the variant cannot run, or its blocks cannot be described.
            Stopped: a limit was reached or the user pressed Ctrl-C.
        """
        full_keys = {**keys, **remat_keys(FULL)}
        full, described = self._runner.ask([self.job(full_keys), self.job(full_keys, describe=True)])
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
            except Stopped:  # the plans that were compiled before the stop still count
                for plan, variant in zip(plans, variants):
                    answer = self.done(variant)
                    if answer is not None:
                        tell(CompiledPlan(plan, 0, self.compiled(answer)))
                raise

        return RematSearch(problem, compile_plans, tell)

    def predicted(self, answer: Mapping[str, Any]) -> StepPrediction:
        """Returns the prediction of the seconds per update of a compiled variant.

        answer: the JSON record that the worker process returned for the variant.

        Raises:
            ReportError: the seconds cannot be predicted.
        """
        prediction = step_prediction.predict_answer(answer)
        if prediction is None:
            why = (
                step_prediction.missing(bool(answer.get("schedule")), self.target.to_json())
                or "nothing in this program takes time"
            )
            raise ReportError(f"the time on target {self.target.name} cannot be predicted: {why}")
        return prediction

    @property
    def host_budget(self) -> float:
        """Bytes of host memory that the target has for each device."""
        return self.target.host_bytes_per_device

    def compiled(self, answer: Mapping[str, Any]) -> PlanFigures:
        """Converts the worker's JSON record of a variant into the figures by which the search compares remat plans.

        They are the bytes on one device and in host memory, and the predicted seconds and recomputed FLOPs per update.
        """
        if answer["status"] != "ok":
            return PlanFigures(status=answer["status"])
        return PlanFigures(
            answer["allocated_bytes"],
            answer["host_bytes"],
            self.predicted(answer).seconds,
            answer["recompute_flops_fraction"] * answer["model_flops"] * answer["calls_per_update"],
        )


@contextmanager
def open_trials(
    config: str,
    target: Target,
    overrides: Sequence[tuple[str, str]],
    effort: Effort,
    programs: int,
    describe: Callable[[Keys], str] = describe_keys,
    limits: Limits | None = None,
) -> Iterator[tuple[Trials, ProgressBar]]:
    """Context manager with worker processes, a progress bar that says what they compile, and the trials of a config
    that use both.

    Args:
        config, target, overrides, describe, limits: as in `Trials`.
        effort: the number of worker processes, and whether the cache is used.
        programs: maximum number of programs that are compiled at the same time.
    """
    workers = worker_pool.worker_count(programs, effort.workers)
    place = row_cache.folder() if effort.cached else None
    with progress(None) as bar, worker_pool.Pool(workers, env=worker_pool.environment_for(target)) as pool:
        yield Trials(config, target, overrides, pool, place, bar, describe, limits or Limits()), bar
