"""Compiles a program for each measured run, with the config that comes nearest to the run, and stores the compiler's
record of each program in a file. So an interrupted command can continue, and predictions with other FLOP/s and bytes/s
need no compile.

Runs with the same config share a program and its file. The name of a file contains digests of the program and of the
versions that compiled it. If this environment has no compiler for a chip (CUDA 13 dropped the V100), a file that
another environment wrote into the same folder is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measured_rows import MeasuredRow

from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.compare.program_factory import ProgramFactory

# Hex digits of a digest in a file name: enough to distinguish programs and versions.
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Runs:
    """The compiled programs of published measurements ("rows").

    Attributes:
        answers: row id -> the worker's JSON record of its program: bytes, FLOPs and schedule
            (`memory.compare.worker.answer_to`).
        failed: row id -> why the row has no record.
        left: ids of the rows that were not compiled before Ctrl-C.
        compiled: number of programs compiled in this call. The other records were read from files.
        programs: row id -> name of the file of its record. Rows with the same file have the same program.
        elsewhere: ids of the rows whose program was compiled with other library versions, because this environment
            has no compiler for the chip.
    """

    answers: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]
    left: tuple[str, ...] = ()
    compiled: int = 0
    programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()


def jobs_of(rows: Sequence[MeasuredRow], factory: ProgramFactory) -> tuple[dict[str, worker_pool.Job], dict[str, str]]:
    """Prepares the compilation of the program of each published measurement ("row"), without compiling.

    Returns row id -> job that compiles the row's program, and row id -> reason why the row's config is invalid. Rows
    that already have a reason not to be compared (`row.reason`) are in neither.

    The name of a job, which is also the name of its result file, is the set of measurements followed by two hashes. The
    first hash is of the whole config, the target and the source files that determine the program. The second hash also
    covers the versions of the libraries.

    factory: builds the programs.
    """
    jobs, programs, refused = Jobs(factory), Jobs(factory, {}), {}
    by_row: dict[str, worker_pool.Job] = {}
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
        by_row[row.id] = dataclasses.replace(job, name=f"{row.set}-{program[:_DIGITS]}-{job.name[:_DIGITS]}")
    return by_row, refused


def run(
    rows: Sequence[MeasuredRow],
    factory: ProgramFactory,
    folder: Path,
    *,
    workers: int | None = None,
    progress: worker_pool.Progress = lambda labels, done: None,
    expect: Callable[[int], None] = lambda programs: None,
) -> Runs:
    """Compiles the programs of published measurements in worker processes, and returns the worker's record of each
    (bytes, FLOPs and schedule).

    Programs that already have a file in `folder` are read, not compiled. After Ctrl-C, the records that are finished
    are returned.

    Args:
        rows: the published measurements.
        factory: builds the programs.
        folder: the folder with a file for each compiled program.
        workers: number of processes; None for as many as cores and memory allow, at most two.
        progress: called with the labels of the running jobs and the number of finished jobs.
        expect: called once with the number of different programs, before the first one is compiled.
    """
    jobs, refused = jobs_of(rows, factory)
    if not jobs:
        return Runs({}, refused)
    gpus = {row.id: row.gpus for row in rows}
    quickest_first = sorted(jobs, key=lambda key: _compile_effort(jobs[key], gpus[key]))
    distinct = {jobs[key].name: jobs[key] for key in quickest_first}
    expect(len(distinct))
    known = {name for name in distinct if row_cache.read(folder, name)}
    answers, _ = worker_pool.run(
        list(distinct.values()),
        workers=worker_pool.worker_count(len(distinct), workers),
        env=worker_pool.environment(sorted({job.target for job in jobs.values()})),
        cache=folder,
        progress=progress,
    )
    usable: dict[str, Mapping[str, Any]] = {}
    from_elsewhere: set[str] = set()
    for name, answer in answers.items():
        if answer.get("status") == "ok":
            usable[name] = answer
            continue
        other = _read_newest_of_other_versions(folder, name)
        if other:
            usable[name] = other
            from_elsewhere.add(name)
    names = {key: job.name for key, job in jobs.items()}
    failed = dict(refused)
    for key, name in names.items():
        if name in answers and name not in usable:
            failed[key] = str(answers[name].get("status", "no answer"))
    return Runs(
        {key: usable[name] for key, name in names.items() if name in usable},
        failed,
        tuple(key for key, name in names.items() if name not in answers),
        len(usable.keys() - from_elsewhere - known),
        names,
        tuple(key for key, name in names.items() if name in from_elsewhere),
    )


def finished(
    rows: Sequence[MeasuredRow], factory: ProgramFactory, folder: Path
) -> tuple[dict[str, str], dict[str, Mapping[str, Any]]]:
    """Reads the records (bytes, FLOPs and schedule) of programs that were compiled before. Compiles nothing.

    Returns row id -> name of the file of the row's program, and row id -> the record in this file. Rows whose file does
    not exist are missing from the second mapping.

    Args:
        rows: the published measurements.
        factory: builds the programs.
        folder: the folder with a file for each compiled program.
    """
    jobs, _ = jobs_of(rows, factory)
    answers: dict[str, Mapping[str, Any]] = {}
    for key, job in jobs.items():
        answer = row_cache.read(folder, job.name) or _read_newest_of_other_versions(folder, job.name)
        if answer:
            answers[key] = answer
    return {key: job.name for key, job in jobs.items()}, answers


def _compile_effort(job: worker_pool.Job, gpus: int) -> tuple[int, int]:
    layers = 1 if job.resolved.get("model.scan", True) else int(job.resolved["model.n_layers"])
    return layers, gpus


def _read_newest_of_other_versions(folder: Path, name: str) -> Mapping[str, Any] | None:
    # The part of a file name after the last "-" depends on the library versions.
    program = name.rpartition("-")[0]
    newest_first = sorted(folder.glob(f"{program}-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for file in newest_first:
        answer = row_cache.read(folder, file.stem)
        if answer:
            return answer
    return None
