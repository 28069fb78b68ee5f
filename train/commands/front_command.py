"""bytescope front: the plan of least recomputation at every budget, from `full` to `none`."""

from __future__ import annotations

import argparse
import json

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_compiling,
    check,
    keep_old_flag,
    write,
)
from bytescope.memory.compare import row_cache, worker_pool
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.remat_problem import COSTS
from bytescope.memory.units import parse_bytes
from bytescope.memory.view.console import put
from bytescope.memory.view.progress_bar import progress
from bytescope.train.commands.config_arguments import add_lora, add_subject, require_config, with_lora
from bytescope.train.plan import frontier
from bytescope.train.plan.config_factory import check_config
from bytescope.train.plan.config_grid import given_flags
from bytescope.train.plan.trials import Trials

# Keys that the plans of a front set, or that a front has flags of its own for.
OWN = (
    "remat.policy",
    "remat.layers",
    "remat.save",
    "remat.offload",
    "remat.budget",
    "remat.cost",
    "remat.auto_offload",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "set a config key in every program; not those of remat.*, which the plans set")
    parser.add_argument(
        "--points",
        metavar="N",
        type=int,
        default=10,
        help="how many budgets, in even steps from what the policy full allocates to what none allocates (default: 10)",
    )
    parser.add_argument(
        "--from", metavar="SIZE", dest="first", help="set the smallest budget, such as 20GiB per device"
    )
    parser.add_argument("--to", metavar="SIZE", dest="last", help="set the largest budget, such as 40GiB per device")
    parser.add_argument(
        "--cost",
        choices=COSTS,
        default="time",
        metavar="NAME",
        help="what to minimize at each "
        "budget: time, which is predicted per update, or flops, which are recomputed (default: time)",
    )
    parser.add_argument("--auto-offload", action="store_true", help="plans may also move tensors to pinned host memory")
    keep_old_flag(parser, "--offload", "--auto-offload")
    add_lora(parser)
    add_compiling(parser, "the front")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace) -> int:
    """Prints the points and writes the files asked for; 130 when Ctrl-C stopped it, with what was finished."""
    target, ends = _checked(args)
    overrides = with_lora(args, args.overrides)
    check_config(args.config, overrides)  # mistakes in it are reported before a worker starts
    compiled_for = targets.to_compile_for(target)
    workers = worker_pool.worker_count(args.points, args.jobs)
    env = worker_pool.environment_for(compiled_for)
    with progress(None) as tell, worker_pool.Pool(workers, env=env) as pool:
        trials = Trials(
            args.config,
            compiled_for,
            overrides,
            pool,
            None if args.no_cache else row_cache.folder(),
            lambda labels, done: tell(labels, trials.compiles + done),
        )

        def show(budget: float, plan: frontier.Fixed | None) -> None:
            from bytescope.train.plan import frontier_view

            with tell.aside():
                put(frontier_view.line(budget, plan))

        found = frontier.Front(trials, args.points, ends, args.cost, args.auto_offload, workers, show)
        found.run()
    _finish(args, found)
    return INTERRUPTED if found.stopped else 0


def _checked(args: argparse.Namespace) -> tuple[str, tuple[int | None, int | None]]:
    """The target's name, and the smallest and the largest budget in bytes, None where they are not given.

    Raises ReportError for a mistake in the arguments, before anything is compiled.
    """
    require_config(args)
    if args.points < 2:
        raise ReportError(f"--points={args.points}: give 2 or more")
    for key, text in args.overrides:
        if key in OWN:
            raise ReportError(
                f"--config.{key}={text}: a front chooses the remat plan itself, so leave it out (--cost "
                "says what to minimize, --auto-offload whether tensors may go to host memory)"
            )
    target = args.target.strip().lower()
    check(args, [target])
    first, last = _size("--from", args.first), _size("--to", args.last)
    if first and last and first > last:
        raise ReportError(f"--from={args.first} is more than --to={args.last}")
    return target, (first, last)


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{flag}: {error}") from error
    if size <= 0:
        raise ReportError(f"{flag}={text}: give more than 0")
    return size


def _finish(args: argparse.Namespace, found: frontier.Front) -> None:
    """Prints the points and writes the files."""
    from bytescope.memory.devices.compiler import versions
    from bytescope.train.plan import frontier_view

    out = frontier.to_json(
        found.points,
        found.fixed,
        cost=args.cost,
        offload=args.auto_offload,
        programs=len(found.search.tried) if found.search else 0,
        compiled=found.trials.compiles,
        missing=found.missing,
        target=found.trials.target.to_json(),
        versions=versions(),
        interrupted=found.stopped,
        config=args.config,
        given=given_flags(found.trials.overrides),
    )
    frontier_view.show(found.points, found.fixed, out)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        write(args.html, frontier_view.render_page(out))
