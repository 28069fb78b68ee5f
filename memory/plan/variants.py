"""Configs of one search, compiled by workers: each once, cached, in parallel, until the search or its user is done."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.costs import roofline
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.plan import cache as row_cache
from bytescope.memory.plan import pool as worker_pool
from bytescope.memory.remat.block_graph import Block
from bytescope.memory.remat.ilp import Plan, remat_keys
from bytescope.memory.remat.problem import Compiled, Tried, problem_of
from bytescope.memory.remat.search import FULL, Search

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer

# Keys as the command line gives them: dotted key -> text.
Keys = Mapping[str, str]


class Stopped(Exception):
    """The search ends with what it has: Ctrl-C, its time or its compiles are over. The reason is its argument."""


@dataclasses.dataclass
class Trials:
    """Compiles variants of a config on a target.

    Fields:
        config, overrides: as the command line gives them; they hold in every variant but where it sets the same key.
        pool: the workers. cache: the folder of finished rows, None for none.
        progress: is told what is under way. most, seconds: after so many compiles (cached ones aside), or so many
            seconds, `Stopped` is raised instead of another one.
    """

    config: str
    target: Target
    overrides: Sequence[tuple[str, str]]
    trainer: Trainer
    pool: worker_pool.Pool
    cache: Path | None
    progress: worker_pool.Progress = lambda labels, done: None
    most: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        from bytescope.memory.devices.compiler import versions

        self.compiles, self._began = 0, time.monotonic()
        self._stated, self._sources = versions(), row_cache.source_digest(self.trainer.sources())
        self._done: dict[str, dict[str, Any]] = {}
        rates = roofline.figures(self.target)
        if rates is None:
            raise ReportError(f"target {self.target.name}: nothing is known of its rates, so no time can be predicted")
        self.rates = rates

    def flat(self, keys: Keys) -> dict[str, Any]:
        """The whole config of a variant, dotted key -> value. Raises the trainer's errors."""
        return self.trainer.config(self.config, [*self.overrides, *keys.items()])

    def compile(self, variants: Sequence[Keys]) -> list[dict[str, Any]]:
        """A worker's answer for each variant, `{"status": why}` for one that cannot run. Raises Stopped."""
        return self._ask([self.job(keys) for keys in variants])

    def done(self, keys: Keys) -> dict[str, Any] | None:
        """The answer for a variant that was compiled, None for one that was not."""
        return self._done.get(self.job(keys).name)

    def job(self, keys: Keys, *, describe: bool = False, target: str = "", measure: bool = False) -> worker_pool.Job:
        """What compiles a variant, for another target than the search's where one is given."""
        flat, target = self.flat(keys), target or self.target.name
        name = row_cache.key(flat, target, self._stated, self._sources, measure)
        pairs = (*self.overrides, *keys.items())
        label = ", ".join(f"{key.rpartition('.')[2]}={text}" for key, text in keys.items() if text not in ("()", ""))
        return worker_pool.Job(self.config, target, pairs, {}, name + "-block" * describe, label[:60], flat,
                               describe)

    def _ask(self, jobs: Sequence[worker_pool.Job]) -> list[dict[str, Any]]:
        new = list({job.name: job for job in jobs if job.name not in self._done}.values())
        cached = {job.name: found for job in new if self.cache and (found := row_cache.read(self.cache, job.name))}
        self._done |= cached
        left = [job for job in new if job.name not in cached]
        if left and self.compiles >= self.most:
            raise Stopped(self._enough())
        if left and time.monotonic() - self._began > self.seconds:
            raise Stopped(f"{self.seconds:g} s are over")
        if left:
            now = left[:int(min(self.most - self.compiles, len(left)))]
            answers, interrupted = worker_pool.ask(self.pool, now, cache=self.cache, progress=self.progress)
            self._done |= answers
            self.compiles += sum(not job.describe for job in now if job.name in answers)
            if interrupted:
                raise Stopped("Ctrl-C")
            if now != left:
                raise Stopped(self._enough())
        return [self._done[job.name] for job in jobs]

    def _enough(self) -> str:
        return f"{self.compiles} programs were compiled, and more are not allowed"

    # ---- the least recomputation of a variant ------------------------------------------------------------------

    def search(self, keys: Keys, *, cost: str = "time", offload: bool = False,
               tell: Callable[[Tried], None] = lambda tried: None) -> Search:
        """The search for the least recomputation of a variant. Raises ReportError for one that cannot run; Stopped."""
        whole = {**keys, **remat_keys(FULL)}
        full, told = self._ask([self.job(whole), self.job(whole, describe=True)])
        for answer in (told, full):
            if answer["status"] != "ok":
                raise ReportError(answer["status"])
        problem = problem_of(Block.from_json(told["block"]), full["work"], told["micro_steps"], self.rates, self.target,
                             cost=cost, offload=offload,
                             policies={**told["policies"], **(told["moving"] if offload else {})})

        def compile_plans(plans: Sequence[Plan]) -> list[Compiled]:
            variants = [{**keys, **plan.keys()} for plan in plans]
            try:
                return [self.compiled(answer) for answer in self.compile(variants)]
            except Stopped:  # what was finished is told all the same
                done = zip(plans, map(self.done, variants))
                for one in [Tried(plan, 0, self.compiled(answer)) for plan, answer in done if answer is not None]:
                    tell(one)
                raise

        return Search(problem, compile_plans, tell)

    @property
    def host_budget(self) -> float:
        """Bytes of host memory for one device."""
        return self.target.host_bytes_per_device

    def compiled(self, answer: Mapping[str, Any]) -> Compiled:
        """A worker's answer as a search takes it; seconds are of one update."""
        if answer["status"] != "ok":
            return Compiled(status=answer["status"])
        once = roofline.seconds(answer["work"], self.rates).total
        return Compiled(answer["allocated_bytes"], answer["host_bytes"], once * answer["calls_per_update"],
                        answer["recompute_flops_fraction"] * answer["model_flops"] * answer["calls_per_update"])

