"""Measured rows compiled, one file a row, so that a run goes on where it stopped and new rates need no compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.plan import pool as worker_pool
from bytescope.memory.plan.jobs import Jobs
from bytescope.memory.validation.rows import Row

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer

# Hex digits of a job's name that a file has after the row's: enough to tell what was compiled for it.
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Runs:
    """What became of rows, by `Row.id`.

    Fields:
        answers: those of workers (`plan.worker.answer_to`), with the schedule and the bytes of each program.
        failed: why a row has none. left: rows that were not compiled when Ctrl-C came, or for which nothing was asked.
        compiled: how many were compiled now; the others were found in the folder.
    """

    answers: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]
    left: tuple[str, ...] = ()
    compiled: int = 0


def jobs_of(rows: Sequence[Row], trainer: Trainer) -> tuple[dict[str, worker_pool.Job], dict[str, str]]:
    """(jobs, reasons why a config is refused), both by `Row.id`, of the rows without a reason of their own.

    A job's name, that of its file, is the row's with a digest of the resolved config, the target, the versions and the
    sources that make an answer.
    """
    jobs, refused = Jobs(trainer), {}
    found: dict[str, worker_pool.Job] = {}
    for row in rows:
        if row.reason:
            continue
        overrides = tuple(row.overrides.items())
        try:
            jobs.check(row.config, overrides)
            job = jobs.job(row.config, row.target, overrides, f"{row.model} on {row.target} {row.setup}".rstrip())
        except ValueError as error:
            if not hasattr(error, "exit_code"):
                raise
            refused[row.id] = " ".join(str(error).split())
            continue
        found[row.id] = dataclasses.replace(job, name=f"{row.set}-{row.id}-{job.name[:_DIGITS]}")
    return found, refused


def run(rows: Sequence[Row], trainer: Trainer, folder: Path, *, workers: int | None = None,
        progress: worker_pool.Progress = lambda labels, done: None) -> Runs:
    """Compiles the rows whose files are not in the folder yet, in worker processes; Ctrl-C keeps what is finished.

    Args:
        workers: how many processes; by default as many as cores and memory allow, two at most.
        progress: called with the labels of the rows under way and how many are done.
    """
    from bytescope.memory.plan import cache

    jobs, refused = jobs_of(rows, trainer)
    found = {key for key, job in jobs.items() if cache.read(folder, job.name)}
    targets = sorted({job.target for job in jobs.values()})
    answers, _ = worker_pool.run(
        list(jobs.values()), workers=worker_pool.worker_count(max(len(jobs), 1), workers),
        env=worker_pool.environment(targets), cache=folder, progress=progress) if jobs else ({}, False)
    done = {key: answers[job.name] for key, job in jobs.items() if job.name in answers}
    good = {key: answer for key, answer in done.items() if answer.get("status") == "ok"}
    failed = {key: str(answer.get("status", "no answer")) for key, answer in done.items() if key not in good}
    left = tuple(key for key in jobs if key not in done)
    return Runs(good, {**refused, **failed}, left, len(set(good) - found))
