"""Compares the variants of a program: one per combination of values, or one per option of XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.compare import compare_rows, grids, what_if
from bytescope.memory.compare.compare_rows import CompareResult, Row
from bytescope.memory.compare.compiling import DEFAULT, CompiledJobs, Effort, compile_jobs
from bytescope.memory.compare.grids import TARGET
from bytescope.memory.compare.jobs import Jobs, with_cpu_devices
from bytescope.memory.compare.program_factory import FunctionFactory, ProgramFactory
from bytescope.memory.compare.worker_pool import Job
from bytescope.memory.errors import ReportError


@dataclasses.dataclass(frozen=True)
class Compared:
    """What is compared: a program and how it is compiled.

    Attributes:
        factory: makes the program of a combination.
        fixed: keys and values that all combinations share.
        target: the name of the target, if the combination has none.
        source: the name of the program.
        given: `fixed` as words of a command line.
        effort: how the programs are compiled.
        formulas: whether rows also have the memory and FLOPs of published formulas.
    """

    factory: ProgramFactory
    fixed: Mapping[str, Any]
    target: str
    source: str
    given: str = ""
    effort: Effort = DEFAULT
    formulas: bool = False


@dataclasses.dataclass(frozen=True)
class FinishedComparison:
    """A comparison with the facts about its run.

    Attributes:
        result: the compared rows.
        factory: the factory that made the programs.
        from_cache: number of rows that were in the cache.
        missing: number of programs without a row, because Ctrl-C stopped the comparison.
        has_dead_worker: whether a worker process died.
        notes: sentences about the programs.
    """

    result: CompareResult
    factory: ProgramFactory
    from_cache: int
    missing: int
    has_dead_worker: bool
    notes: Sequence[str]


def compare(what: Compared, asked: Sequence[tuple[str, Sequence[str]]]) -> FinishedComparison:
    """Compiles every combination of the values in a grid. Combinations of the same program are compiled once.

    asked: the grid, as (key, values) pairs.

    Raises:
        ValueError: the factory does not know a key, or a value has the wrong type or is not a known name. The error has
            an `exit_code`.
    """
    jobs = make_jobs(what, Jobs(what.factory), asked)
    answers = _compile(what, jobs)
    rows = [_row_of(what, job, answers.by_name[job.name]) for job in jobs if job.name in answers.by_name]
    return _finish(what, rows, answers, jobs)


def make_jobs(what: Compared, jobs: Jobs, asked: Sequence[tuple[str, Sequence[str]]]) -> list[Job]:
    """Returns one compile job per distinct program of a grid, in the order of the grid.

    jobs: creates the jobs. asked: the grid, as (key, values) pairs. Raises the errors of the factory.
    """
    factory, unique = what.factory, dict[str, Job]()
    for combination in grids.expand(asked):
        target = combination.get(TARGET, what.target).strip().lower()
        chosen = factory.spell_out(combination, what.fixed)
        overrides = {**what.fixed, **{key: text for key, text in chosen.items() if key != TARGET}}
        factory.check(overrides)
        job = jobs.job(overrides, target, measure=what.effort.measured)
        values = {key: _plain(job.resolved.get(key, text)) for key, text in chosen.items()}
        row = factory.row(values)
        label = compare_rows.label(row, [key for key in values if key not in row.policy_parts])
        unique.setdefault(job.name, dataclasses.replace(job, chosen=values, label=label))
    return list(unique.values())


def compare_what_if(what: Compared) -> FinishedComparison:
    """Compiles one program with several options of XLA. The rows are ranked, the best first.

    Raises ReportError if the program as given cannot be compiled.
    """
    what.factory.check(what.fixed)
    variants = what.factory.what_if(what.fixed, _platform(what.target))
    left_out = {variant.change: variant.refused for variant in variants if variant.refused}
    jobs: dict[str, Job] = {}
    creator = Jobs(what.factory)
    for variant in variants:
        if not variant.refused:
            overrides = {**what.fixed, **variant.keys}
            job = creator.job(overrides, what.target, variant.change, measure=what.effort.measured)
            jobs[variant.change] = dataclasses.replace(job, chosen=variant.keys)
    distinct = {job.name: job for job in reversed(jobs.values())}  # as given wins over a variant that changes no key
    answers = _compile(what, [*reversed(distinct.values())])
    base_job = jobs[what_if.AS_GIVEN]
    base = answers.by_name.get(base_job.name, {})
    base_row = _row_of(what, base_job, base) if base else None
    rows, unchanged, kept = list[Row](), list[str](), dict[str, Mapping[str, Any]]()
    for change, job in jobs.items():
        if job.name not in answers.by_name:
            continue
        found = answers.by_name[job.name]
        row = dataclasses.replace(_row_of(what, job, found), change=change)
        if change == what_if.AS_GIVEN:
            rows.append(row)
        elif found.get("status") != "ok":
            left_out[change] = row.status
        elif base_row and (what_if.is_same_program(found, base) or what_if.is_alike(row, base_row)):
            unchanged.append(change)
        elif alike := next((name for name, other in kept.items() if what_if.is_same_program(found, other)), ""):
            left_out[change] = f"the same program as {alike}"
        else:
            rows.append(row)
            kept[change] = found
    given_row = next((row for row in rows if row.change == what_if.AS_GIVEN), None)
    if given_row is not None and not given_row.ok:
        raise ReportError(f"the program as given could not be compiled: fix its error: {given_row.status}")
    if given_row is not None:
        rows = [dataclasses.replace(row, effect=what_if.effect(row, given_row)) for row in rows]
    ranked = what_if.ranked(compare_rows.mark_pareto(rows))
    return _finish(what, ranked, answers, list(distinct.values()), unchanged, left_out)


def _compile(what: Compared, jobs: Sequence[Job]) -> CompiledJobs:
    if isinstance(what.factory, FunctionFactory):
        jobs = list(map(with_cpu_devices, jobs))
    return compile_jobs(jobs, what.effort)


def _row_of(what: Compared, job: Job, answer: Mapping[str, Any]) -> Row:
    row = what.factory.row.from_answer(job.chosen, answer)
    if not what.formulas or not row.ok:
        return row
    return dataclasses.replace(row, formula=what.factory.formula(job.resolved, answer))


def _finish(
    what: Compared,
    rows: Sequence[Row],
    answers: CompiledJobs,
    jobs: Sequence[Job],
    unchanged: Sequence[str] = (),
    left_out: Mapping[str, str] = {},
) -> FinishedComparison:
    from bytescope.memory.devices.compiler import versions

    done, names = answers.compiled, dict.fromkeys(job.target for job in jobs)
    result = compare_rows.make_result(
        rows,
        done[0]["target"] if done and len(names) == 1 else {"name": ", ".join(names)},
        done[0]["versions"] if done else versions(),
        answers.interrupted,
        what.source,
        what.given,
        unchanged,
        left_out,
    )
    return FinishedComparison(
        result,
        what.factory,
        from_cache=answers.from_cache,
        missing=len({job.name for job in jobs}) - len(answers.by_name),
        has_dead_worker=answers.has_dead_worker,
        notes=list(dict.fromkeys(note for answer in done for note in answer.get("notes", ()))),
    )


def _platform(target: str) -> str:
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.chips import base_name
    from bytescope.memory.devices.platform import choose_platform

    base = base_name(target)
    if base == "local":
        return choose_platform()
    return "cpu" if base == "cpu" else targets.parse(target).platform


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
