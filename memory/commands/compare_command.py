"""bytescope compare: remat policies, or any other keys of a config, compared."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    NO_CONFIG,
    add_compiling,
    add_subject,
    check,
    progress,
    shares_accelerator,
    write,
)
from bytescope.memory.compare import compare_rows as plan_rows
from bytescope.memory.compare import grids, row_cache, worker_pool
from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.grids import CONFIG, OFFLOAD, POLICY, SAVE, TARGET
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.config_keys import REMAT_LAYERS
from bytescope.memory.errors import ReportError

if TYPE_CHECKING:
    from bytescope.memory.compare.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "set a config key in every combination")
    parser.add_argument(
        "--remat",
        metavar="P,P",
        help="remat policies to compare, short for --grid=remat.policy=P,P; "
        "policies of your own go in quotes: --remat='none,custom(v,up)+offload(block_in)'",
    )
    parser.add_argument(
        "--grid",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="values to compare of a config key, of config or of target; several grids are compared "
        "in every combination",
    )
    parser.add_argument("--measure", action="store_true", help="also run each step on this machine's devices, timed")
    parser.add_argument("--formulas", action="store_true", help="also show what the published formulas predict")
    add_compiling(parser, "the comparison")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the table and writes the files asked for; 130 when Ctrl-C stopped it, with what was finished."""
    jobs = make_jobs(args, overrides, Jobs(trainer))
    names = [job.target for job in jobs]
    check(args, names)
    env = worker_pool.environment(names)
    workers = 1 if args.measure or shares_accelerator(names) else worker_pool.worker_count(len(jobs), args.jobs)
    place = row_cache.folder()
    known = sum(1 for job in jobs if not args.no_cache and row_cache.read(place, job.name))
    with progress(len(jobs)) as tell:
        answers, interrupted = worker_pool.run(
            jobs, workers=workers, env=env, measure=args.measure, progress=tell, cache=None if args.no_cache else place
        )
    rows = plan_rows.mark_pareto([row_of(job, answers[job.name], args.formulas) for job in jobs if job.name in answers])
    finish(
        args,
        rows,
        answers,
        names,
        cached=known,
        missing=len(jobs) - len(rows),
        interrupted=interrupted,
        given=grids.given_flags(overrides),
    )
    if interrupted:
        return INTERRUPTED
    if not any(row.ok for row in rows):
        raise ReportError(f"no combination compiled: {rows[0].status}")
    return 0


def make_jobs(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], jobs: Jobs) -> list[worker_pool.Job]:
    """The combinations as jobs, in the order of the grid; combinations that resolve to the same program are one job.

    Raises:
      ReportError: no config, a grid or a list of policies that cannot be read.
      ValueError: the trainer's, for an unknown key, a value of the wrong type or one that is in no table.
    """
    asked = [grids.parse_grid(text) for text in args.grid]
    if args.remat is not None:  # last, so that policies of the same program are neighbouring rows
        policies = grids.split_values(args.remat)
        if not all(policies):
            raise ReportError(f"--remat={args.remat}: write --remat=P1,P2, such as --remat=none,full")
        asked.append((POLICY, policies))
    found: dict[str, worker_pool.Job] = {}
    for chosen in grids.expand(asked):
        config, target = chosen.get(CONFIG, args.config), chosen.get(TARGET, args.target).strip().lower()
        if not config:
            raise ReportError(f"{NO_CONFIG}, or --grid=config=A,B")
        if POLICY in chosen:
            chosen = _policy(chosen, jobs.resolve(config, overrides))
        pairs = (*overrides, *((key, text) for key, text in chosen.items() if key not in (CONFIG, TARGET)))
        jobs.check(config, pairs)
        job = jobs.job(config, target, pairs, measure=args.measure)
        values = {key: _plain(job.flat.get(key, text)) for key, text in chosen.items()}
        shown = [plan_rows.value_text(Row(values), key) for key in values if key not in (SAVE, OFFLOAD)]
        found.setdefault(job.name, dataclasses.replace(job, chosen=values, label=", ".join(shown)))
    return list(found.values())


def _policy(chosen: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, str]:
    """The choice with its policy spelled out as config keys; `flat` is the config without the choice.

    A config's own names for `custom` are an error under any other policy, so those rows clear them.
    """
    out = {**chosen, **grids.policy_keys(chosen[POLICY])}
    ranges = any(str(text).endswith(":custom") for text in flat.get(REMAT_LAYERS, ()))
    if out[POLICY] != "custom" and not ranges:
        out |= {key: "()" for key in (SAVE, OFFLOAD) if flat.get(key) and key not in out}
    return out


def row_of(job: worker_pool.Job, answer: Mapping[str, Any], formulas: bool) -> Row:
    """The row of a worker's answer; with `formulas`, also what the published formulas predict where they apply."""
    row = Row.of(job.chosen, answer)
    if not formulas or not row.ok:
        return row
    from bytescope.memory.formulas import reconcile

    found = reconcile.formula_of(job.flat, answer["settled"], answer["target"].get("platform", ""))
    return row if isinstance(found, str) else dataclasses.replace(row, formula=dataclasses.asdict(found))


def finish(
    args: argparse.Namespace,
    rows: Sequence[Row],
    answers: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    *,
    cached: int,
    missing: int,
    interrupted: bool,
    given: str = "",
) -> None:
    """Prints the rows and writes the files asked for.

    Args:
      names: the targets of all jobs. cached: rows that were in the cache. missing: jobs without an answer.
      given: the keys of the command line, as its flags.
    """
    from bytescope.memory.compare import compare_text
    from bytescope.memory.devices.compiler import versions

    done = [answer for answer in answers.values() if answer.get("status") == "ok"]
    stated = done[0]["versions"] if done else versions()
    target = done[0]["target"] if done and len(set(names)) == 1 else {"name": ", ".join(dict.fromkeys(names))}
    compare_text.show(rows, target, stated, cached=cached, missing=missing)
    if args.formulas:
        from bytescope.memory.compare import formulas_text

        formulas_text.show_rows(rows)
    out = plan_rows.to_json(rows, target, stated, interrupted, args.config or "", given)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from bytescope.memory.compare import compare_page

        write(args.html, compare_page.render(out))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
