"""bytescope fit CONFIG: searches the keys of a config for the fastest program that fits a budget, by compiling."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import (
    DOES_NOT_FIT,
    INTERRUPTED,
    check,
    write,
)
from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.compare.compiling import Effort, compile_jobs
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.errors import ReportError
from bytescope.memory.records.result_envelope import MemoryLimit
from bytescope.memory.view.progress_bar import ProgressBar, progress
from bytescope.train.commands.config_arguments import with_lora
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


def run(args: argparse.Namespace) -> int:
    """Searches for the fastest configuration that fits the memory budget; prints each step of the search and the
    result.

    Returns the exit code: 0 if a configuration fits, 3 if none fits, 130 after Ctrl-C. After Ctrl-C, the best
    configuration so far is printed and written.
    """
    from bytescope.train.plan.config_factory import check_config
    from bytescope.train.plan.fit import fit_progress
    from bytescope.train.plan.fit import fit_walk as walks
    from bytescope.train.plan.fit.fit_reach import Reach
    from bytescope.train.plan.trials import Trials
    from bytescope.train.program import config_files as configs

    check(args, [args.target.strip().lower()])
    name, given = args.subject.name, [key for key, _ in args.subject.keys]
    target = targets.to_compile_for(args.target, TRAIN_FRACTION)
    overrides = with_lora(name, args.subject.keys) if args.lora else args.subject.keys
    flat = configs.load_flat(name, overrides)
    check_config(name, overrides)
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
            name,
            target,
            overrides,
            pool,
            place,
            tell,
            lambda keys: fit_space.describe_trial(keys, space),
            args.max_compiles or math.inf,
            args.max_seconds or math.inf,
        )
        walk = walks.Walk(trials, space, budget, lambda step: _show_step(tell, lines, step))
        walk.run()
        reach = Reach(walk) if args.lora else None
        if reach is not None:
            reach.run()
    wanted = args.measure and walk.best is not None and walk.stopped != "Ctrl-C"
    measured = _measure_finalists(args, walk) if wanted else None
    return _show_and_write(args, walk, reach, flat, overrides, measured)


def _show_step(bar: ProgressBar, lines: fit_progress.Lines, step: Step) -> None:
    with bar.aside():
        lines.show(step)


def _measure_finalists(args: argparse.Namespace, walk: walks.Walk) -> Mapping[str, Any] | None:
    """Runs the fastest configurations of a search on this machine, one after the other. The one with the highest
    measured speed becomes the best configuration of the search, `walk.best`.

    Returns the measurements of that configuration, such as "tokens_per_s" -> number; None if no configuration could
    run.

    Args:
      walk: the finished search.
    """
    from bytescope.train.plan.fit import fit_progress

    finalists = sorted((step for step in walk.steps if step.fits), key=lambda step: step.seconds)[:MAX_MEASURED]
    jobs = [walk.trials.job(step.keys, target="local", measure=True) for step in finalists]
    answers = compile_jobs(jobs, Effort(cached=not args.no_cache, measured=True)).by_name
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
        values = configs.load_flat(args.subject.name, [*overrides, *keys.items()])
        return " ".join(filter(None, (given_flags(overrides), levers.changed_flags(keys, values, flat))))

    out = fit_result.to_json(walk, flags, versions(), measured, reach)
    fit_view.show(out, args.subject.name)
    limit = MemoryLimit(out["budget_bytes"], f"the budget, --budget={args.budget}") if args.budget else None
    write_json(args, out, limit=limit, caveats=(COMPILED, *predicted_caveat(out["rates"])))
    if args.html:
        write(args.html, fit_view.render_page(out))
    if walk.stopped == "Ctrl-C":
        return INTERRUPTED
    return 0 if walk.best is not None else DOES_NOT_FIT
