"""bytescope fit CONFIG: searches the keys of a config for the fastest program that fits a budget, by compiling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import check
from bytescope.memory.commands.fit_program import limits_of, show_and_write
from bytescope.memory.compare.compiling import Effort, compile_jobs
from bytescope.memory.compare.search_limits import CTRL_C
from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.errors import ReportError
from bytescope.train.commands.config_arguments import with_lora
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan import levers
from bytescope.train.plan.config_grid import given_flags
from bytescope.train.plan.fit import fit_space

if TYPE_CHECKING:
    from bytescope.train.plan.fit.fit_walk import Walk

# Number of the fastest candidates that --measure runs.
MAX_MEASURED = 3
# Explains "2 x 4" in the words of a variant.
BATCH_WORDS = '"2 x 4": micro-batches of 2 sequences on each rank, 4 of them accumulated per update'


def run(args: argparse.Namespace) -> int:
    """Searches for the fastest configuration that fits the memory budget; prints each step of the search and the
    result.

    Returns the exit code: 0 if a configuration fits, 3 if none fits, 130 after Ctrl-C. After Ctrl-C, the best
    configuration so far is printed and written.
    """
    from bytescope.memory.compare.fit_view import Lines
    from bytescope.memory.seconds.ranking import TIE
    from bytescope.train.plan.config_factory import check_config
    from bytescope.train.plan.fit import fit_result, fit_tables
    from bytescope.train.plan.fit.fit_reach import Reach
    from bytescope.train.plan.fit.fit_walk import Walk
    from bytescope.train.plan.trials import open_trials
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
    effort = Effort(args.jobs, not args.no_cache)
    trials_of = open_trials(
        name, target, overrides, effort, 2**10, lambda keys: fit_space.describe_trial(keys, space), limits_of(args)
    )
    with trials_of as (trials, bar):
        lines = Lines(bar)
        lines.show_head(
            target,
            budget,
            [f"{space.tokens:,} tokens per update;", f"levers: {', '.join(sorted(space.levers))}"],
            [
                f"seconds per update are predicted; variants that differ by less than {TIE:.0%} are a tie: the least "
                "recomputation wins, then the least memory",
                BATCH_WORDS,
            ],
        )
        walk = Walk(trials, space, budget, lines.show)
        walk.run()
        reach = Reach(walk) if args.lora else None
        if reach is not None:
            reach.run()
    wanted = args.measure and walk.best is not None and walk.stopped != CTRL_C
    measured = _measure_finalists(args, walk) if wanted else None

    def flags(keys: Mapping[str, str]) -> str:
        values = configs.load_flat(name, [*overrides, *keys.items()])
        return " ".join(filter(None, (given_flags(overrides), levers.changed_flags(keys, values, flat))))

    out = fit_result.to_json(walk, flags, measured, reach)
    return show_and_write(args, out, fit_tables.tables_of(out))


def _measure_finalists(args: argparse.Namespace, walk: Walk) -> Mapping[str, Any] | None:
    """Runs the fastest configurations of a search on this machine, one after the other. The one with the highest
    measured speed becomes the best configuration of the search, `walk.best`.

    Returns the measurements of that configuration, such as "tokens_per_s" -> number; None if no configuration could
    run.

    Args:
      walk: the finished search.
    """
    from bytescope.memory.compare.fit_view import show_measured

    finalists = sorted(walk.fitting, key=lambda step: step.seconds)[:MAX_MEASURED]
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
    show_measured(results)
    return measured
