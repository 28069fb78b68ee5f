"""bytescope fit: from a budget to the configuration to run."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import (
    DOES_NOT_FIT,
    INTERRUPTED,
    NO_CONFIG,
    add_compiling,
    add_subject,
    check,
    progress,
    write,
)
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.errors import ReportError
from bytescope.memory.plan import cache as row_cache
from bytescope.memory.plan import fit, fit_space, levers
from bytescope.memory.plan import pool as worker_pool
from bytescope.memory.plan.variants import Trials
from bytescope.memory.text import fit as fit_text

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer

# Finalists that are run where the device is at hand.
MOST_MEASURED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "a key that holds in every variant")
    parser.add_argument("--budget", metavar="SIZE", default="", help="of a device, such as 72GiB (default: all that it "
                        "may hand out)")
    parser.add_argument("--batch-tokens", metavar="N", type=int, help="of one update (default: the config's)")
    parser.add_argument("--levers", metavar="L,L", help="what may change (default: all): "
                        + ", ".join(fit_space.LEVERS))
    parser.add_argument("--max-compiles", metavar="N", type=int, help="programs compiled at most; cached ones are free")
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds after which nothing more is compiled")
    parser.add_argument("--measure", action="store_true", help="run the finalists on this machine; the fastest wins")
    add_compiling(parser, "the fit's JSON, whatever comes of it")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the walk and what it came to; 3 where nothing fits, 130 after Ctrl-C, with the best so far."""
    if not args.config:
        raise ReportError(NO_CONFIG)
    check(args, [args.target.strip().lower()])
    _check_numbers(args)
    target = targets.to_compile_for(args.target)
    flat = trainer.config(args.config, overrides)
    if args.measure and target.is_described and args.target != "local":
        raise ReportError(f"--measure on {target.name}, which is not here: leave --target out to run on this machine")
    budget = budget_of(args.budget, target.limit_bytes, "--budget")
    space = fit_space.space_of(flat, [key for key, _ in overrides], fit_space.choose(args.levers), target.n_devices,
                               target.devices_per_host, args.batch_tokens, target.platform != "cpu")
    place = None if args.no_cache else row_cache.folder()
    workers = worker_pool.worker_count(2**10, args.jobs)
    lines = fit_text.Lines(target, space, budget)
    with worker_pool.Pool(workers, env=worker_pool.environment_for(target)) as pool, progress(0) as tell:
        trials = Trials(args.config, target, overrides, trainer, pool, place, tell, args.max_compiles or math.inf,
                        args.timeout or math.inf)
        walk = fit.Walk(trials, space, budget, lines.show)
        walk.run()
    wanted = args.measure and walk.best is not None and walk.stopped != "Ctrl-C"
    measured = _measured(args, walk, place) if wanted else None
    return _finish(args, walk, flat, overrides, trainer, measured)


def _check_numbers(args: argparse.Namespace) -> None:
    for flag, least in (("batch_tokens", 1), ("max_compiles", 1), ("timeout", 0.001)):
        value = getattr(args, flag)
        if value is not None and not value >= least:
            raise ReportError(f"--{flag.replace('_', '-')}={value}: give {least:g} or more")


def _measured(args: argparse.Namespace, walk: fit.Walk, place: Path | None) -> Mapping[str, Any] | None:
    """Runs the finalists here, one after the other; the fastest becomes the walk's best. What was measured of it."""
    finalists = sorted((step for step in walk.steps if step.fits), key=lambda step: step.seconds)[:MOST_MEASURED]
    jobs = [walk.trials.job(step.keys, target="local", measure=True) for step in finalists]
    with progress(len(jobs)) as tell:
        answers, _ = worker_pool.run(jobs, workers=1, env=worker_pool.environment(["local"]), measure=True,
                                     cache=place, progress=tell)
    found = [(step, answers[job.name]["measured"]) for step, job in zip(finalists, jobs)
             if answers.get(job.name, {}).get("status") == "ok"]
    if not found:
        return None
    walk.best, measured = max(found, key=lambda item: item[1]["tokens_per_s"])
    fit_text.show_measured(found)
    return measured


def _finish(args: argparse.Namespace, walk: fit.Walk, flat: Mapping[str, Any], overrides: Sequence[tuple[str, str]],
            trainer: Trainer, measured: Mapping[str, Any] | None) -> int:
    """Prints what the walk came to and writes the files."""
    from bytescope.memory.devices.compiler import versions

    def flags(keys: Mapping[str, str]) -> str:
        values = trainer.config(args.config, [*overrides, *keys.items()])
        given = shlex.join(f"--config.{key}={text}" for key, text in overrides)
        return " ".join(filter(None, (given, levers.differing(keys, values, flat))))

    out = walk.to_json(flags, versions(), measured)
    fit_text.show(out, args.config)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from bytescope.memory.pages import fit as fit_page

        write(args.html, fit_page.render(out, args.config))
    if walk.stopped == "Ctrl-C":
        return INTERRUPTED
    return 0 if walk.best is not None else DOES_NOT_FIT
