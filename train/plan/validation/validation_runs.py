"""Measured rows compiled, one file a program, so that a run goes on where it stopped and new rates need no compile.

Rows that differ in what was measured, but not in what a config of ours says, share a program and its file. A file is
named by the program and by the versions that compiled it. Where this environment has no compiler for a chip (CUDA 13
has left the V100), a file that another environment wrote into the same folder answers for the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.train.plan.validation.measured_rows import MeasuredRow

# Hex digits of a digest in a file's name: enough to tell programs and versions apart.
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Runs:
    """The results of measured rows, by `MeasuredRow.id`.

    Fields:
        answers: row -> the worker's answer (`memory.compare.worker.answer_to`), with schedule and bytes of its program.
        failed: row -> why it has no answer. left: rows that were not compiled before Ctrl-C, or were not asked for.
        compiled: number of programs compiled in this run; the other answers come from the cache folder.
        programs: row -> name of the answer's file; rows with the same file are the same program.
        elsewhere: rows compiled in another environment, because this one has no compiler for their chip.
    """

    answers: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]
    left: tuple[str, ...] = ()
    compiled: int = 0
    programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()


def jobs_of(rows: Sequence[MeasuredRow], factory: ProgramFactory) -> tuple[dict[str, worker_pool.Job], dict[str, str]]:
    """(jobs, reasons why a config is refused), both by `MeasuredRow.id`, of the rows without a reason of their own.

    A job's name, that of its file, is the set's with two digests: of the resolved config, the target and the sources
    that make an answer, and of these with the versions.
    """
    jobs, programs, refused = Jobs(factory), Jobs(factory, {}), {}
    found: dict[str, worker_pool.Job] = {}
    for row in rows:
        if row.reason:
            continue
        overrides = {CONFIG: row.config, **row.overrides}
        try:
            factory.check(overrides)
            job = jobs.job(overrides, row.target, f"{row.model} on {row.target} {row.setup}".rstrip())
        except ValueError as error:
            if not hasattr(error, "exit_code"):
                raise
            refused[row.id] = " ".join(str(error).split())
            continue
        program = programs.job(overrides, row.target).name
        found[row.id] = dataclasses.replace(job, name=f"{row.set}-{program[:_DIGITS]}-{job.name[:_DIGITS]}")
    return found, refused


def run(
    rows: Sequence[MeasuredRow],
    factory: ProgramFactory,
    folder: Path,
    *,
    workers: int | None = None,
    progress: worker_pool.Progress = lambda labels, done: None,
) -> Runs:
    """Compiles the rows whose files are not in the folder yet, in worker processes; Ctrl-C keeps what is finished.

    Args:
        factory: makes the programs.
        workers: how many processes; by default as many as cores and memory allow, two at most.
        progress: called with the labels of the rows under way and how many are done.
    """
    jobs, refused = jobs_of(rows, factory)
    gpus = {row.id: row.gpus for row in rows}
    distinct = {jobs[key].name: jobs[key] for key in sorted(jobs, key=lambda key: _effort(jobs[key], gpus[key]))}
    found = {name for name in distinct if row_cache.read(folder, name)}
    targets = sorted({job.target for job in jobs.values()})
    answers, _ = (
        worker_pool.run(
            list(distinct.values()),
            workers=worker_pool.worker_count(max(len(distinct), 1), workers),
            env=worker_pool.environment(targets),
            cache=folder,
            progress=progress,
        )
        if jobs
        else ({}, False)
    )
    good = {name: answer for name, answer in answers.items() if answer.get("status") == "ok"}
    others = {name: answer for name in answers if name not in good and (answer := _elsewhere(folder, name))}
    names = {key: job.name for key, job in jobs.items()}
    usable = good | others
    failed = {
        key: str(answers[name].get("status", "no answer"))
        for key, name in names.items()
        if name in answers and name not in usable
    }
    return Runs(
        {key: usable[name] for key, name in names.items() if name in usable},
        refused | failed,
        tuple(key for key, name in names.items() if name not in answers),
        len(set(good) - found),
        names,
        tuple(key for key, name in names.items() if name in others),
    )


def finished(
    rows: Sequence[MeasuredRow], factory: ProgramFactory, folder: Path
) -> tuple[dict[str, str], dict[str, Mapping[str, Any]]]:
    """(names of the programs, answers), both by `MeasuredRow.id`, of what the folder has; nothing is compiled."""
    jobs, _ = jobs_of(rows, factory)
    answers = {key: row_cache.read(folder, job.name) or _elsewhere(folder, job.name) for key, job in jobs.items()}
    return {key: job.name for key, job in jobs.items()}, {key: answer for key, answer in answers.items() if answer}


def _effort(job: worker_pool.Job, gpus: int) -> tuple[int, int]:
    """What sorts programs by the time that they take: layers that are compiled one by one, then devices."""
    return 1 if job.resolved.get("model.scan", True) else int(job.resolved["model.n_layers"]), gpus


def _elsewhere(folder: Path, name: str) -> Mapping[str, Any] | None:
    """The answer for a program that other versions compiled, the newest of those that can be read."""
    program = name.rpartition("-")[0]
    files = sorted(folder.glob(f"{program}-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((answer for file in files if (answer := row_cache.read(folder, file.stem))), None)
