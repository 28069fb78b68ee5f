"""python -m memory levers: the staircase of memory savings of a config, each stage compiled with all before it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memory import compare_cache, compare_run, levers
from memory.compare import Row
from memory.compare_command import INTERRUPTED, add_compiling, add_subject, check, progress, shares_accelerator, write
from memory.errors import ReportError
from memory.levers import Level

if TYPE_CHECKING:
    from memory.__main__ import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "override a key in every stage; the stages that set it are left out")
    parser.add_argument("--stages", metavar="S,S", help="stages in their order, each with all before it (default: "
                        f"{','.join(levers.DEFAULT)}; there are {', '.join(levers.BEYOND)} too)")
    add_compiling(parser, "the staircase's JSON")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the stages and writes the files asked for; 130 when Ctrl-C stopped it, with what was finished."""
    if not args.config:
        raise ReportError("no config: give --config=FILE")
    stages, target = levers.choose(args.stages), args.target.strip().lower()
    check(args, [target])
    config, refused = trainer.config(args.config, overrides), {}
    sources = compare_cache.source_digest(trainer.sources())
    while True:
        levels, left_out = levers.climb(stages, config, (key for key, _ in overrides), refused)
        if not levels:
            raise ReportError(f"no stage is left: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
        levels, jobs = _jobs(args.config, target, overrides, levels, config, trainer, sources)
        answers, interrupted = _compile(args, target, jobs)
        wrong = next((level for level, job in zip(levels, jobs)
                      if answers.get(job.name, {"status": "ok"})["status"] != "ok"), None)
        if wrong is None or interrupted:
            break
        why = answers[jobs[levels.index(wrong)].name]["status"]
        if wrong is levels[0]:  # all others stand on it
            raise ReportError(f"{wrong.title}, the first stage, does not compile: {why}")
        refused[wrong.stage] = why
    done = [_settled(level, answers[job.name]) for level, job in zip(levels, jobs)
            if answers.get(job.name, {}).get("status") == "ok"]
    _finish(args, done, left_out, target, answers, interrupted)
    return INTERRUPTED if interrupted else 0


def _jobs(config: str, target: str, overrides: Sequence[tuple[str, str]], levels: Sequence[Level],
          base: Mapping[str, Any], trainer: Trainer, sources: str) -> tuple[list[Level], list[compare_run.Job]]:
    """The levels with their flags, and what compiles each."""
    from memory.compiler import versions

    stated, told, jobs = versions(), [], []
    for level in levels:
        pairs = (*overrides, *level.keys.items())
        flat = trainer.config(config, pairs)
        values = {key: flat[key] for key in level.keys}
        told.append(dataclasses.replace(level, flags=levers.differing(level.keys, values, base)))
        name = compare_cache.key(flat, target, stated, sources, False)
        jobs.append(compare_run.Job(config, target, pairs, values, name, level.title, flat))
    return told, jobs


def _compile(args: argparse.Namespace, target: str, jobs: Sequence[compare_run.Job]) -> tuple[dict[str, Any], bool]:
    """Answers by name, and whether Ctrl-C came; two stages that make one program are compiled once."""
    once = list({job.name: job for job in jobs}.values())
    workers = 1 if shares_accelerator([target]) else compare_run.worker_count(len(once), args.jobs)
    with progress(len(once)) as tell:
        return compare_run.run(once, workers=workers, env=compare_run.environment([target]), progress=tell,
                               cache=None if args.no_cache else compare_cache.folder())


def _settled(level: Level, answer: Mapping[str, Any]) -> Level:
    """The level with what came of it."""
    keys = {key: text for key, text in level.keys.items() if text not in ("()", "false")}
    return dataclasses.replace(level, row=Row.of(keys, answer), kernel=answer["settled"]["model.attention"])


def _finish(args: argparse.Namespace, levels: Sequence[Level], left_out: Mapping[str, str], target: str,
            answers: Mapping[str, Mapping[str, Any]], interrupted: bool) -> None:
    """Prints the levels and writes the files."""
    from memory import levers_text
    from memory.compiler import versions

    done = [answer for answer in answers.values() if answer.get("status") == "ok"]
    about = done[0]["target"] if done else {"name": target}
    out = levers.to_json(levels, left_out, about, done[0]["versions"] if done else versions(), interrupted)
    levers_text.show(levels, left_out, about, out["versions"], interrupted=interrupted)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from memory import levers_html

        write(args.html, levers_html.render(out, args.config))
