"""bytescope fit: finds the fastest configuration that fits a memory budget, by compiling candidates.

This module searches the keys of a config; `memory.commands.fit_program` searches the remat policy of other programs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import fit_program
from bytescope.memory.commands.arguments import (
    DOES_NOT_FIT,
    INTERRUPTED,
    add_compiling,
    check,
    write,
)
from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.errors import ReportError
from bytescope.memory.records.result_envelope import MemoryLimit
from bytescope.memory.view.progress_bar import ProgressBar, progress
from bytescope.train.commands.config_arguments import add_lora, add_subject, require_config, with_lora
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan import levers
from bytescope.train.plan.config_grid import given_flags
from bytescope.train.plan.fit import fit_space

if TYPE_CHECKING:
    from bytescope.train.plan.fit import fit_progress
    from bytescope.train.plan.fit import fit_walk as walks
    from bytescope.train.plan.fit.fit_reach import Reach
    from bytescope.train.plan.fit.fit_step import Step

# Number of the fastest candidates that --measure runs.
MAX_MEASURED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope fit` to the parser."""
    add_subject(
        parser,
        "set a config key in all programs; the search does not change this key",
        others=fit_program.OTHER_SUBJECTS,
    )
    fit_program.add_only_names(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory budget per device, such as 72GiB (default: all memory that is available to programs)",
    )
    parser.add_argument(
        "--batch-tokens",
        metavar="N",
        type=int,
        help="tokens per optimizer update, summed over all devices (default: from the config)",
    )
    parser.add_argument(
        "--vary", metavar="L,L", help=f"settings that the search may change (default: {', '.join(fit_space.LEVERS)})"
    )
    add_lora(parser, "; also find the longest sequence and the largest micro-batch that fit at each rank")
    parser.add_argument(
        "--max-compiles",
        metavar="N",
        type=int,
        help="maximum number of programs to compile, not counting programs in the cache (default: no limit)",
    )
    parser.add_argument(
        "--max-seconds",
        metavar="SECONDS",
        type=float,
        help="seconds after which no new compilation starts (default: no limit)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help=f"run the {MAX_MEASURED} fastest configurations on this machine, and choose by measured speed",
    )
    add_compiling(parser, "the result of the search, whether or not anything fits,")


def run(args: argparse.Namespace) -> int:
    """Searches for the fastest configuration that fits the memory budget; prints each step of the search and the
    result.

    Returns the exit code: 0 if a configuration fits, 3 if none fits, 130 after Ctrl-C. After Ctrl-C, the best
    configuration so far is printed and written.
    """
    if is_adapted(args.config):
        from bytescope.memory.commands import fit_adapter

        _check_numbers(args)
        return fit_adapter.run(args)
    if args.program:
        return fit_program.run(args)
    require_config(args)
    from bytescope.train.plan.config_factory import check_config
    from bytescope.train.plan.fit import fit_progress
    from bytescope.train.plan.fit import fit_walk as walks
    from bytescope.train.plan.fit.fit_reach import Reach
    from bytescope.train.plan.trials import Trials
    from bytescope.train.program import config_files as configs

    check(args, [args.target.strip().lower()])
    _check_numbers(args)
    target = targets.to_compile_for(args.target, TRAIN_FRACTION)
    given, overrides = [key for key, _ in args.overrides], with_lora(args, args.overrides)
    flat = configs.load_flat(args.config, overrides)
    check_config(args.config, overrides)
    if args.measure and target.is_described and args.target != "local":
        raise ReportError(
            f"--measure cannot run on {target.name}, which is not this machine: leave the target out to run here"
        )
    budget = budget_of(args.budget or "", target.limit_bytes, "--budget")
    space = fit_space.space_of(
        flat,
        given,
        fit_space.choose_levers(args.vary),
        target.n_devices,
        target.devices_per_host,
        args.batch_tokens,
        target.platform != "cpu",
    )
    place = None if args.no_cache else row_cache.folder()
    workers = worker_pool.worker_count(2**10, args.jobs)
    lines = fit_progress.Lines(target, space, budget)
    with worker_pool.Pool(workers, env=worker_pool.environment_for(target)) as pool, progress(None) as tell:
        trials = Trials(
            args.config,
            target,
            overrides,
            pool,
            place,
            tell,
            args.max_compiles or math.inf,
            args.max_seconds or math.inf,
        )
        walk = walks.Walk(trials, space, budget, lambda step: _show_step(tell, lines, step))
        walk.run()
        reach = Reach(walk) if args.lora else None
        if reach is not None:
            reach.run()
    wanted = args.measure and walk.best is not None and walk.stopped != "Ctrl-C"
    measured = _measure_finalists(args, walk, place) if wanted else None
    return _show_and_write(args, walk, reach, flat, overrides, measured)


def _show_step(bar: ProgressBar, lines: fit_progress.Lines, step: Step) -> None:
    with bar.aside():
        lines.show(step)


def _check_numbers(args: argparse.Namespace) -> None:
    if args.budget == "":
        raise ReportError("--budget= has no value: give a size such as 72GiB, or leave it out")
    for flag, minimum in (("batch_tokens", 1), ("max_compiles", 1), ("max_seconds", 0.001)):
        value = getattr(args, flag)
        if value is not None and not value >= minimum:
            raise ReportError(f"--{flag.replace('_', '-')}={value} is too small: give {minimum:g} or more")


def _measure_finalists(args: argparse.Namespace, walk: walks.Walk, place: Path | None) -> Mapping[str, Any] | None:
    """Runs the fastest configurations of a search on this machine, one after the other. The one with the highest
    measured speed becomes the best configuration of the search, `walk.best`.

    Returns the measurements of that configuration, such as "tokens_per_s" -> number; None if no configuration could
    run.

    Args:
      walk: the finished search.
      place: the cache folder for results; None for no cache.
    """
    from bytescope.train.plan.fit import fit_progress

    finalists = sorted((step for step in walk.steps if step.fits), key=lambda step: step.seconds)[:MAX_MEASURED]
    jobs = [walk.trials.job(step.keys, target="local", measure=True) for step in finalists]
    with progress(len(jobs)) as tell:
        answers, _ = worker_pool.run(
            jobs, workers=1, env=worker_pool.environment(["local"]), measure=True, cache=place, progress=tell
        )
    results = []
    for step, job in zip(finalists, jobs):
        answer = answers.get(job.name, {})
        if answer.get("status") == "ok":
            results.append((step, answer["measured"]))
    if not results:
        return None
    walk.best, measured = max(results, key=lambda result: result[1]["tokens_per_s"])
    fit_progress.show_measured(results)
    return measured


def _show_and_write(
    args: argparse.Namespace,
    walk: walks.Walk,
    reach: Reach | None,
    flat: Mapping[str, Any],
    overrides: Sequence[tuple[str, str]],
    measured: Mapping[str, Any] | None,
) -> int:
    from bytescope.memory.devices.compiler import versions
    from bytescope.train.plan.fit import fit_result, fit_view
    from bytescope.train.program import config_files as configs

    def flags(keys: Mapping[str, str]) -> str:
        values = configs.load_flat(args.config, [*overrides, *keys.items()])
        return " ".join(filter(None, (given_flags(overrides), levers.changed_flags(keys, values, flat))))

    out = fit_result.to_json(walk, flags, versions(), measured, reach)
    fit_view.show(out, args.config)
    limit = MemoryLimit(out["budget_bytes"], f"the budget, --budget={args.budget}") if args.budget else None
    write_json(args, out, limit=limit, caveats=(COMPILED, *predicted_caveat(out["rates"])))
    if args.html:
        write(args.html, fit_view.render_page(out))
    if walk.stopped == "Ctrl-C":
        return INTERRUPTED
    return 0 if walk.best is not None else DOES_NOT_FIT
