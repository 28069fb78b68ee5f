"""bytescope fit --budgets: finds the remat plan with the least recomputation for each of several memory budgets.

By default the smallest budget is the peak memory with remat policy `full`, the largest the peak memory with `none`.
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_compiling,
    check,
)
from bytescope.memory.commands.json_output import write_compiled
from bytescope.memory.compare.compiling import Effort
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.remat.remat_problem import COSTS
from bytescope.memory.units import parse_bytes
from bytescope.memory.view.console import put
from bytescope.train.commands.config_arguments import add_lora, add_subject, require_subject, with_lora
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan import frontier
from bytescope.train.plan.config_factory import check_config
from bytescope.train.plan.config_grid import given_flags
from bytescope.train.plan.trials import open_trials

MAX_POINTS = 1000
# Config keys that the plans set, or that the command sets by its own flags.
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
    """Adds the command-line arguments of `bytescope fit --budgets` to the parser."""
    add_subject(parser, "set a config key in every program, except remat.* keys, which the plans set")
    parser.add_argument(
        "--budgets",
        metavar="N",
        type=int,
        default=10,
        help="number of memory budgets, evenly spaced between --from and --to (default: %(default)s)",
    )
    parser.add_argument(
        "--from",
        metavar="SIZE",
        dest="first",
        help="smallest memory budget per device, such as 20GiB (default: what full recomputation takes)",
    )
    parser.add_argument(
        "--to",
        metavar="SIZE",
        dest="last",
        help="largest memory budget per device, such as 40GiB (default: what the step takes without recomputation)",
    )
    parser.add_argument(
        "--cost",
        choices=COSTS,
        default="time",
        metavar="NAME",
        help="what a plan minimizes within each memory budget: time (predicted seconds per update) or flops "
        "(recomputed FLOPs); default: %(default)s",
    )
    parser.add_argument("--auto-offload", action="store_true", help="allow plans to move tensors to pinned host memory")
    add_lora(parser)
    add_compiling(parser, "the plan of each budget")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace) -> int:
    """Finds for each memory budget the remat plan with the least recomputation. A remat plan says which tensors are
    stored for the backward pass. Prints the plans and writes the requested files.

    Returns the exit code. It is 130 if Ctrl-C stopped the command; then only the finished budgets are printed and
    written.
    """
    target, ends = _check_arguments(args)
    overrides = with_lora(args.subject.name, args.subject.keys) if args.lora else args.subject.keys
    check_config(args.subject.name, overrides)  # mistakes in it are reported before a worker starts
    compiled_for = targets.to_compile_for(target, TRAIN_FRACTION)
    effort = Effort(args.jobs, not args.no_cache)
    with open_trials(args.subject.name, compiled_for, overrides, effort, args.budgets) as (trials, bar):

        def show(budget: float, plan: frontier.Fixed | None) -> None:
            from bytescope.train.plan import frontier_view

            with bar.aside():
                put(frontier_view.line(budget, plan))

        front = frontier.Front(trials, args.budgets, ends, args.cost, args.auto_offload, trials.pool.count, show)
        front.run()
    _show_and_write(args, front)
    return INTERRUPTED if front.stopped else 0


def _check_arguments(args: argparse.Namespace) -> tuple[str, tuple[int | None, int | None]]:
    """Checks the arguments before anything is compiled. Returns the target's name, and the smallest and the largest
    budget in bytes, each None if it is not given.

    Raises ReportError if an argument is wrong.
    """
    require_subject(args)
    if not 2 <= args.budgets <= MAX_POINTS:
        raise ReportError(f"--budgets={args.budgets} is out of range: give at least 2 and at most {MAX_POINTS}")
    for key, text in args.subject.keys:
        if key in OWN:
            raise ReportError(
                f"{key}={text} cannot be set, because this command chooses the remat plan: leave it out "
                "(--cost sets what to minimize, --auto-offload allows tensors in host memory)"
            )
    target = args.target.strip().lower()
    check(args, [target])
    first, last = _size("--from", args.first), _size("--to", args.last)
    if first and last and first > last:
        raise ReportError(f"--from={args.first} is more than --to={args.last}: give a smaller --from")
    return target, (first, last)


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{flag}: {error}") from error
    if size <= 0:
        raise ReportError(f"{flag}={text} is too small: give more than 0")
    return size


def _show_and_write(args: argparse.Namespace, front: frontier.Front) -> None:
    from bytescope.memory.devices.compiler import versions
    from bytescope.train.plan import frontier_view

    out = frontier.to_json(
        front.points,
        front.fixed,
        cost=args.cost,
        offload=args.auto_offload,
        programs=len(front.search.tried) if front.search else 0,
        compiled=front.trials.limits.compiles,
        missing=front.missing,
        target=front.trials.target.to_json(),
        versions=versions(),
        interrupted=bool(front.stopped),
        config=args.subject.name,
        given=given_flags(front.trials.overrides),
    )
    put(frontier_view.render_text(out))
    write_compiled(args, out, lambda: frontier_view.render_page(out), (point.row.rates for point in front.points))
