"""bytescope compare: policies and any other keys of a config against each other."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.errors import ReportError
from bytescope.memory.plan import cache as row_cache
from bytescope.memory.plan import pool as worker_pool
from bytescope.memory.plan import rows as plan_rows
from bytescope.memory.plan.rows import CONFIG, OFFLOAD, POLICY, SAVE, TARGET, Row

if TYPE_CHECKING:
    from bytescope.memory.__main__ import Trainer

# The exit code after Ctrl-C, as shells have it: 128 and the signal's number.
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "override a key in every combination")
    parser.add_argument("--remat", metavar="P,P", help="policies: short for --grid=remat.policy=P,P; names of one's "
                        "own in quotes: --remat='none,custom(v,context),custom(up)+offload(block_in)'")
    parser.add_argument("--grid", metavar="KEY=V,V", action="append", default=[],
                        help="values of any config key, of config (files) or target; several multiply")
    parser.add_argument("--measure", action="store_true", help="run each step on this machine's devices and time it")
    parser.add_argument("--formulas", action="store_true", help="the published formulas beside the compiler's figures")
    add_compiling(parser, "the comparison's JSON")


def add_subject(parser: argparse.ArgumentParser, overriding: str) -> None:
    """What a command that compiles is about. `overriding`: what a key of the command line does."""
    parser.add_argument("--config", metavar="FILE", help="a config file or shipped name")
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help=overriding)
    parser.add_argument("--target", metavar="T", default="local", help="what to compile for (default: local)")


def add_compiling(parser: argparse.ArgumentParser, result: str) -> None:
    """How it compiles and where the result goes."""
    parser.add_argument("--no-cache", action="store_true", help="compile again what is in the cache")
    parser.add_argument("--jobs", metavar="N", type=int, help="compiles at once (default: one per core, 20 GB in all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help=f"write {result}")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens offline")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the table and writes the files asked for; 130 when Ctrl-C stopped it, with what was finished."""
    jobs = make_jobs(args, overrides, trainer.config, row_cache.source_digest(trainer.sources()))
    names = [job.target for job in jobs]
    check(args, names)
    env = worker_pool.environment(names)
    workers = 1 if args.measure or shares_accelerator(names) else worker_pool.worker_count(len(jobs), args.jobs)
    place = row_cache.folder()
    known = sum(1 for job in jobs if not args.no_cache and row_cache.read(place, job.name))
    with progress(len(jobs)) as tell:
        answers, interrupted = worker_pool.run(
            jobs, workers=workers, env=env, measure=args.measure, progress=tell,
            cache=None if args.no_cache else place)
    rows = plan_rows.mark_pareto([row_of(job, answers[job.name], args.formulas) for job in jobs if job.name in answers])
    finish(args, rows, answers, names, cached=known, missing=len(jobs) - len(rows), interrupted=interrupted)
    if interrupted:
        return INTERRUPTED
    if not any(row.ok for row in rows):
        raise ReportError(f"no combination compiled: {rows[0].status}")
    return 0


def make_jobs(args: argparse.Namespace, overrides: Sequence[tuple[str, str]],
              resolve: Callable[..., Mapping[str, Any]], sources: str) -> list[worker_pool.Job]:
    """The combinations, each resolved by the trainer; two that resolve to one program are one.

    Raises ReportError, and the trainer's errors for an unknown key or a value of the wrong type.
    """
    from bytescope.memory.devices.compiler import versions

    grids = [plan_rows.parse_grid(text) for text in args.grid]
    if args.remat is not None:  # last: rivals stand together
        policies = plan_rows.split_values(args.remat)
        if not all(policies):
            raise ReportError(f"--remat={args.remat}: write --remat=P1,P2, such as --remat=none,full")
        grids.append((POLICY, policies))
    stated, jobs = versions(), {}
    for chosen in plan_rows.expand(grids):
        config, target = chosen.get(CONFIG, args.config), chosen.get(TARGET, args.target).strip().lower()
        if not config:
            raise ReportError("no config: give --config=FILE, or --grid=config=A,B")
        if POLICY in chosen:
            chosen = _policy(chosen, resolve(config, overrides))
        pairs = (*overrides, *((key, text) for key, text in chosen.items() if key not in (CONFIG, TARGET)))
        flat = resolve(config, pairs)
        values = {key: _plain(flat.get(key, text)) for key, text in chosen.items()}
        name = row_cache.key(flat, target, stated, sources, args.measure)
        shown = [plan_rows.value_text(Row(values), key) for key in values if key not in (SAVE, OFFLOAD)]
        jobs.setdefault(name, worker_pool.Job(config, target, pairs, values, name, ", ".join(shown), flat))
    return list(jobs.values())


def _policy(chosen: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, str]:
    """The choice with its policy as keys, of a config that resolves to `flat` without it.

    The names that a config gives its `custom` policy are refused under any other: those rows go without.
    """
    out = {**chosen, **plan_rows.policy_keys(chosen[POLICY])}
    ranges = any(str(text).endswith(":custom") for text in flat.get("remat.layers", ()))
    if out[POLICY] != "custom" and not ranges:
        out |= {key: "()" for key in (SAVE, OFFLOAD) if flat.get(key) and key not in out}
    return out


def row_of(job: worker_pool.Job, answer: Mapping[str, Any], formulas: bool) -> Row:
    """The row of a worker's answer, with the formulas' figures where asked for and known."""
    row = Row.of(job.chosen, answer)
    if not formulas or not row.ok:
        return row
    from bytescope.memory.formulas import reconcile

    found = reconcile.formula_of(job.flat, answer["settled"], answer["target"].get("platform", ""))
    return row if isinstance(found, str) else dataclasses.replace(row, formula=dataclasses.asdict(found))


def finish(args: argparse.Namespace, rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]],
           names: Sequence[str], *, cached: int, missing: int, interrupted: bool) -> None:
    """Prints the rows and writes the files."""
    from bytescope.memory.devices.compiler import versions
    from bytescope.memory.text import compare as compare_text

    done = [answer for answer in answers.values() if answer.get("status") == "ok"]
    stated = done[0]["versions"] if done else versions()
    target = done[0]["target"] if done and len(set(names)) == 1 else {"name": ", ".join(dict.fromkeys(names))}
    compare_text.show(rows, target, stated, cached=cached, missing=missing)
    if args.formulas:
        from bytescope.memory.text import formulas as formulas_text

        formulas_text.show_rows(rows)
    out = plan_rows.to_json(rows, target, stated, interrupted)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from bytescope.memory.pages import compare as compare_page

        write(args.html, compare_page.render(out, args.config or ""))


def write(path: Path, text: str) -> None:
    try:
        row_cache.write_whole(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises ReportError, before anything is compiled, for targets that do not exist or cannot be measured, for files
    that cannot be written, for a number of workers that is none."""
    from bytescope.memory.devices import targets

    for name in dict.fromkeys(names):
        base = name.partition(":")[0]
        if base not in ("local", "cpu"):  # those ask jax, which is for the workers to start
            targets.parse(name)
            if args.measure:
                raise ReportError(f"--measure on {name}, which is not here: leave --target out to run on this machine")
    for path in filter(None, (args.json, args.html)):
        if not path.absolute().parent.is_dir():
            raise ReportError(f"cannot write {path}: there is no folder {path.parent}")
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs}: give 1 or more")


def shares_accelerator(names: Sequence[str]) -> bool:
    """Whether workers would open the accelerator of this machine: one at a time then, it is one memory."""
    from bytescope.memory.devices.platform import choose_platform

    return "local" in names and choose_platform() != "cpu"


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[Sequence[str], int], None]]:
    """A bar on stderr, where that is a terminal: how many are done, of how many where that is known, which are under
    way."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda labels, done: bar.update(task, completed=done, description=" | ".join(labels))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
