"""Compiles a list of jobs in worker processes, with a progress bar and the cache of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.worker_pool import Job
from bytescope.memory.view.progress_bar import progress


@dataclasses.dataclass(frozen=True)
class Effort:
    """How programs are compiled.

    Attributes:
        workers: number of programs compiled at the same time; None for one per core, within the free host memory.
        cached: whether finished rows are read from the cache and written to it.
        measured: whether each program also runs on this machine, one after the other.
    """

    workers: int | None = None
    cached: bool = True
    measured: bool = False


@dataclasses.dataclass(frozen=True)
class CompiledJobs:
    """What the workers answered.

    Attributes:
        by_name: `Job.name` -> answer, for the finished jobs.
        from_cache: number of answers that were in the cache.
        interrupted: whether Ctrl-C stopped the compilation.
    """

    by_name: Mapping[str, Mapping[str, Any]]
    from_cache: int
    interrupted: bool

    @property
    def compiled(self) -> list[Mapping[str, Any]]:
        """The answers of programs that could be compiled."""
        return [answer for answer in self.by_name.values() if answer.get("status") == "ok"]

    @property
    def has_dead_worker(self) -> bool:
        """Whether a worker process died."""
        return any(answer.get("dead") for answer in self.by_name.values())


DEFAULT = Effort()


def compile_jobs(jobs: Sequence[Job], effort: Effort = DEFAULT) -> CompiledJobs:
    """Compiles jobs, those with the same name once. A program of this machine's accelerator is compiled alone."""
    once = list({job.name: job for job in jobs}.values())
    names = [job.target for job in once]
    place = row_cache.folder() if effort.cached else None
    from_cache = sum(1 for job in once if place and row_cache.read(place, job.name))
    alone = effort.measured or shares_accelerator(names)
    with progress(len(once)) as tell:
        by_name, interrupted = worker_pool.run(
            once,
            workers=1 if alone else worker_pool.worker_count(len(once), effort.workers),
            env=worker_pool.environment(names),
            measure=effort.measured,
            progress=tell,
            cache=place,
        )
    return CompiledJobs(by_name, from_cache, interrupted)


def shares_accelerator(names: Sequence[str]) -> bool:
    """Returns True if compiling for one of the targets `names` opens this machine's accelerator. Then only one worker
    may run at a time, because all workers would share the accelerator's memory."""
    from bytescope.memory.devices.platform import choose_platform

    return "local" in names and choose_platform() != "cpu"
