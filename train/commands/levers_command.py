"""bytescope compare --levers: shows the bytes that each memory saving saves and the time that it costs.

The savings are added one by one, and the program is compiled after each.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_compiling,
    check,
)
from bytescope.memory.commands.json_output import write_compiled
from bytescope.memory.compare.compiling import Effort, compile_jobs
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.errors import ReportError
from bytescope.memory.view.console import put
from bytescope.train.commands.config_arguments import add_subject, require_subject
from bytescope.train.plan import levers
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.config_grid import ConfigRow, given_flags
from bytescope.train.plan.levers import Level


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope compare --levers` to the parser."""
    add_subject(
        parser,
        "set a config key in all compared programs, such as batch.micro=4; savings that would change it are left out",
    )
    parser.add_argument(
        "--savings",
        metavar="S,S",
        help="memory savings to add one by one, in this order (default: "
        f"{', '.join(levers.DEFAULT)}; also available: {', '.join(levers.OPTIONAL)})",
    )
    add_compiling(parser, "the memory with each saving added")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace) -> int:
    """Applies memory savings such as bf16, remat or offload to a float32 program one after the other, and compiles the
    program after each. Prints the memory and time after each saving, and writes the requested files.

    Returns the exit code. It is 130 if Ctrl-C stopped the command; then only the savings compiled so far are printed
    and written.
    """
    require_subject(args)
    stages, target = levers.choose_stages(args.savings), args.target.strip().lower()
    check(args, [target])
    all_jobs, refused = Jobs(FACTORY), dict[str, str]()
    fixed = {CONFIG: args.subject.name, **dict(args.subject.keys)}
    config = FACTORY.resolve(fixed)
    FACTORY.check(fixed)
    while True:
        levels, left_out = levers.build_levels(stages, config, (key for key, _ in args.subject.keys), refused)
        if not levels:
            raise ReportError(
                f"no saving can be applied: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}"
            )
        jobs = [all_jobs.job({**fixed, **level.keys}, target, level.title) for level in levels]
        levels = [
            dataclasses.replace(level, flags=levers.changed_flags(level.keys, job.resolved, config))
            for level, job in zip(levels, jobs)
        ]
        found = compile_jobs(jobs, Effort(args.jobs, not args.no_cache))
        answers, interrupted = found.by_name, found.interrupted
        failed = [
            (level, answers[job.name]["status"])
            for level, job in zip(levels, jobs)
            if job.name in answers and answers[job.name]["status"] != "ok"
        ]
        if not failed or interrupted:
            break
        level, why = failed[0]
        if level is levels[0]:  # all other stages are built on the first
            raise ReportError(f"{level.title}, the first stage, does not compile: {why}")
        refused[level.stage] = why  # the stages after it included it, so they are compiled again without it
    done = [
        _add_compiled_row(level, answers[job.name])
        for level, job in zip(levels, jobs)
        if answers.get(job.name, {}).get("status") == "ok"
    ]
    _show_and_write(args, done, left_out, answers, interrupted, given_flags(args.subject.keys))
    return INTERRUPTED if interrupted else 0


def _add_compiled_row(level: Level, answer: Mapping[str, Any]) -> Level:
    keys = {key: text for key, text in level.keys.items() if text not in ("()", "false")}
    return dataclasses.replace(
        level, row=ConfigRow.from_answer(keys, answer), kernel=answer["settled"]["model.attention"]
    )


def _show_and_write(
    args: argparse.Namespace,
    levels: Sequence[Level],
    left_out: Mapping[str, str],
    answers: Mapping[str, Mapping[str, Any]],
    interrupted: bool,
    given: str,
) -> None:
    from bytescope.memory.devices.compiler import versions
    from bytescope.train.plan import levers_view

    done = [answer for answer in answers.values() if answer.get("status") == "ok"]
    about = done[0]["target"] if done else {"name": args.target.strip().lower()}
    out = levers.to_json(
        levels, left_out, about, done[0]["versions"] if done else versions(), interrupted, args.subject.name, given
    )
    put(levers_view.render_text(out))
    write_compiled(args, out, lambda: levers_view.render_page(out), (level.row.rates for level in levels))
