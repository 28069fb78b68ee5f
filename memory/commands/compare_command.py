"""bytescope compare: compares variants of a program, one per combination of config values.

It compares the programs of a subject's factory. `train.commands.compare_configs` has the arguments of the command.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.commands.arguments import INTERRUPTED, check, shares_accelerator, write
from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
from bytescope.memory.compare import compare_rows, grids, row_cache, what_if, worker_pool
from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.grids import TARGET
from bytescope.memory.compare.jobs import Jobs, with_cpu_devices
from bytescope.memory.compare.program_factory import FunctionFactory, ProgramFactory
from bytescope.memory.errors import ReportError
from bytescope.memory.subjects.subject import Subject
from bytescope.memory.view.progress_bar import progress

# Subjects of bytescope compare that are not configs, as a part of a help text.
OTHER_SUBJECTS = (
    "or your own programs, MODULE:FUNCTION or FILE.py:FUNCTION, as for bytescope report; parameters of the function "
    "with defaults are the keys of --grid"
)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope compare` for the variants of `args.subject`. Returns the exit code."""
    subject: Subject = args.subject
    factory = subject.factory(args.target)
    if args.what_if:
        return compare_what_if(args, factory, subject.fixed(), subject.name, subject.given())
    return compare(args, factory, subject.fixed(), asked_grids(args), subject.name, subject.given())


def asked_grids(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Returns (key, values to compare) of each --grid flag, and of --remat, whose values are remat policies.

    Raises ReportError if a grid or a list of policies cannot be parsed.
    """
    asked = [grids.parse_grid(text) for text in args.grid]
    # Policies are last, so that those of the same program are neighbouring rows.
    return asked if args.remat is None else [*asked, *args.subject.policies(args.remat)]


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """Adds --what-if, which compares options of XLA instead of a grid."""
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="compile the program with other options of XLA (scheduler off, memory limit, optimization levels, fusion; "
        "for a config also with or without scan) and show what each changes, best first",
    )


def refuse_grid(args: argparse.Namespace) -> None:
    """Raises ReportError if --what-if is given together with a grid."""
    for flag in ("grid", "remat"):
        if args.what_if and getattr(args, flag):
            raise ReportError(
                f"--{flag} cannot be used with --what-if, which compares options of XLA for one program: leave one out"
            )


def compare(
    args: argparse.Namespace,
    factory: ProgramFactory,
    fixed: Mapping[str, Any],
    asked: Sequence[tuple[str, Sequence[str]]],
    source: str,
    given: str = "",
) -> int:
    """Compiles every combination of the values in a grid of config keys, prints the table and writes the requested
    files.

    Returns the exit code. If Ctrl-C stopped the comparison, the finished rows are shown and the exit code is 130. If a
    worker process died, the other rows are shown and the exit code is 1.

    Args:
        args: the parsed command line.
        factory: makes the program of a combination.
        fixed: keys and values that are the same in all combinations.
        asked: the grid, as (key, values) pairs.
        source: the name of the program, as stored in the JSON.
        given: the command-line flags that set keys outside the grid.
    """
    jobs = make_jobs(args, Jobs(factory), fixed, asked)
    answers, cached, interrupted = answer(args, factory, jobs)
    rows = compare_rows.mark_pareto(
        [row_of(job, answers[job.name], factory, args.formulas) for job in jobs if job.name in answers]
    )
    finish(
        args,
        rows,
        answers,
        [job.target for job in jobs],
        factory=factory,
        cached=cached,
        missing=len(jobs) - len(rows),
        interrupted=interrupted,
        source=source,
        given=given,
    )
    if interrupted:
        return INTERRUPTED
    if not any(row.ok for row in rows):
        raise ReportError(
            f"no combination of the grid could be compiled: fix the error of the first one: {rows[0].status}"
        )
    return _exit_code(answers)


def _exit_code(answers: Mapping[str, Mapping[str, Any]]) -> int:
    return 1 if any(answer.get("dead") for answer in answers.values()) else 0


def answer(
    args: argparse.Namespace, factory: ProgramFactory, jobs: Sequence[worker_pool.Job]
) -> tuple[dict[str, dict[str, Any]], int, bool]:
    """Compiles jobs in worker processes, with a progress bar and the cache of rows.

    Returns (name of a job -> the worker's answer, number of answers from the cache, whether Ctrl-C interrupted).
    """
    names = [job.target for job in jobs]
    check(args, names)
    if isinstance(factory, FunctionFactory):
        jobs = list(map(with_cpu_devices, jobs))
    workers = 1 if args.measure or shares_accelerator(names) else worker_pool.worker_count(len(jobs), args.jobs)
    place = row_cache.folder()
    cached = sum(1 for job in jobs if not args.no_cache and row_cache.read(place, job.name))
    with progress(len(jobs)) as report_progress:
        answers, interrupted = worker_pool.run(
            jobs,
            workers=workers,
            env=worker_pool.environment(names),
            measure=args.measure,
            progress=report_progress,
            cache=None if args.no_cache else place,
        )
    return answers, cached, interrupted


def compare_what_if(
    args: argparse.Namespace, factory: ProgramFactory, fixed: Mapping[str, Any], source: str, given: str = ""
) -> int:
    """Compiles one program with several options of XLA, prints what each changes, best first, and writes the requested
    files.

    Returns the exit code. The arguments are those of `compare`.
    """
    factory.check(fixed)
    variants = factory.what_if(fixed, _platform(args.target))
    left_out = {variant.change: variant.refused for variant in variants if variant.refused}
    jobs: dict[str, worker_pool.Job] = {}
    creator = Jobs(factory)
    for variant in variants:
        if not variant.refused:
            job = creator.job({**fixed, **variant.keys}, args.target, variant.change, measure=args.measure)
            jobs[variant.change] = dataclasses.replace(job, chosen=variant.keys)
    distinct = {job.name: job for job in reversed(jobs.values())}  # as given wins over a variant that changes no key
    answers, cached, interrupted = answer(args, factory, [*reversed(distinct.values())])
    base_job = jobs[what_if.AS_GIVEN]
    base = answers.get(base_job.name, {})
    base_row = row_of(base_job, base, factory, args.formulas) if base else None
    rows, unchanged, kept = list[Row](), list[str](), dict[str, Mapping[str, Any]]()
    for change, job in jobs.items():
        if job.name not in answers:
            continue
        found = answers[job.name]
        row = dataclasses.replace(row_of(job, found, factory, args.formulas), change=change)
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
    rows = what_if.ranked(compare_rows.mark_pareto(rows))
    finish(
        args,
        rows,
        answers,
        [args.target],
        factory=factory,
        cached=cached,
        missing=len(distinct) - len(answers),
        interrupted=interrupted,
        source=source,
        given=given,
        unchanged=unchanged,
        left_out=left_out,
    )
    return INTERRUPTED if interrupted else _exit_code(answers)


def _platform(target: str) -> str:
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.chips import base_name
    from bytescope.memory.devices.platform import choose_platform

    base = base_name(target)
    if base == "local":
        return choose_platform()
    return "cpu" if base == "cpu" else targets.parse(target).platform


def make_jobs(
    args: argparse.Namespace, jobs: Jobs, fixed: Mapping[str, Any], asked: Sequence[tuple[str, Sequence[str]]]
) -> list[worker_pool.Job]:
    """Returns one compile job per distinct program of the grid, in the order of the grid. Combinations of values that
    resolve to the same program share a job.

    Args:
        args: the parsed command line.
        jobs: creates the jobs.
        fixed: keys and values that are the same in all combinations.
        asked: the grid, as (key, values) pairs.

    Raises:
        ValueError: the factory does not know a key, or a value has the wrong type or is not a known name.
    """
    factory, unique = jobs.factory, dict[str, worker_pool.Job]()
    for combination in grids.expand(asked):
        target = combination.get(TARGET, args.target).strip().lower()
        chosen = factory.spell_out(combination, fixed)
        overrides = {**fixed, **{key: text for key, text in chosen.items() if key != TARGET}}
        factory.check(overrides)
        job = jobs.job(overrides, target, measure=args.measure)
        values = {key: _plain(job.resolved.get(key, text)) for key, text in chosen.items()}
        row = factory.row(values)
        label = compare_rows.label(row, [key for key in values if key not in row.policy_parts])
        unique.setdefault(job.name, dataclasses.replace(job, chosen=values, label=label))
    return list(unique.values())


def row_of(job: worker_pool.Job, answer: Mapping[str, Any], factory: ProgramFactory, formulas: bool) -> Row:
    """Returns the row of the comparison table for a compile job and the worker's answer to it.

    factory: the comparison's program factory. formulas: whether to add the memory and FLOPs that published formulas
    predict, if a formula applies.
    """
    row = factory.row.from_answer(job.chosen, answer)
    if not formulas or not row.ok:
        return row
    return dataclasses.replace(row, formula=factory.formula(job.resolved, answer))


def finish(
    args: argparse.Namespace,
    rows: Sequence[Row],
    answers: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    *,
    factory: ProgramFactory,
    cached: int,
    missing: int,
    interrupted: bool,
    source: str,
    given: str,
    unchanged: Sequence[str] = (),
    left_out: Mapping[str, str] = {},
) -> None:
    """Prints the compared rows and writes the requested files.

    Args:
        args: the parsed command line.
        rows: one row per compiled program.
        answers: name of a job -> the worker's answer.
        names: the targets of all jobs.
        factory: the program factory of the comparison.
        cached: number of rows that were read from the cache.
        missing: number of jobs without an answer, because the comparison was interrupted.
        interrupted: whether Ctrl-C stopped the comparison.
        source: the name of the program, as stored in the JSON.
        given: the command-line flags that set keys outside the grid.
        unchanged: variants of a what-if that are the same program as given.
        left_out: variant of a what-if -> the reason why it was not compiled.
    """
    from bytescope.memory.compare import compare_text
    from bytescope.memory.devices.compiler import versions

    done = [answer for answer in answers.values() if answer.get("status") == "ok"]
    stated = done[0]["versions"] if done else versions()
    target = done[0]["target"] if done and len(set(names)) == 1 else {"name": ", ".join(dict.fromkeys(names))}
    notes = dict.fromkeys(note for answer in done for note in answer.get("notes", ()))
    more = [*what_if.sentences(unchanged, left_out), *(f"note: {note}" for note in notes)]
    compare_text.show(rows, target, stated, cached=cached, missing=missing, more=more)
    if args.formulas:
        from bytescope.memory.compare import compare_text

        compare_text.show_row_formulas(rows)
    out = compare_rows.to_json(rows, target, stated, interrupted, source, given, unchanged, left_out)
    caveats = (COMPILED, *predicted_caveat(next((row.rates for row in rows if row.rates), "")))
    if args.measure:
        caveats += ("The values of `measured` were measured on this machine.",)
    write_json(args, out, caveats=caveats)
    if args.html:
        from bytescope.memory.compare import compare_page

        write(args.html, compare_page.render(out, factory.row))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
