"""bytescope front: the least recomputation at every budget, from `full` to `none`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    NO_CONFIG,
    add_compiling,
    add_subject,
    check,
    progress,
    write,
)
from bytescope.memory.config_keys import (
    REMAT_AUTO_OFFLOAD,
    REMAT_BUDGET,
    REMAT_COST,
    REMAT_LAYERS,
    REMAT_OFFLOAD,
    REMAT_POLICY,
    REMAT_SAVE,
)
from bytescope.memory.errors import ReportError
from bytescope.memory.plan import cache as row_cache
from bytescope.memory.plan import frontier
from bytescope.memory.plan import pool as worker_pool
from bytescope.memory.plan.frontier import Fixed, Point
from bytescope.memory.plan.rows import Row
from bytescope.memory.remat.ilp import COSTS
from bytescope.memory.units import parse_bytes

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer
    from bytescope.memory.plan.variants import Trials
    from bytescope.memory.remat.problem import Tried
    from bytescope.memory.remat.search import Search

# Keys that the plans of a front set, or that a front has flags of its own for.
OWN = (REMAT_POLICY, REMAT_LAYERS, REMAT_SAVE, REMAT_OFFLOAD, REMAT_BUDGET, REMAT_COST,
       REMAT_AUTO_OFFLOAD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "override a key in every program")
    parser.add_argument("--points", metavar="N", type=int, default=10,
                        help="budgets, in even steps from what full allocates to what none does (default: 10)")
    parser.add_argument("--from", metavar="SIZE", dest="first", help="the smallest budget instead: 20GiB")
    parser.add_argument("--to", metavar="SIZE", dest="last", help="the largest budget instead: 40GiB")
    parser.add_argument("--cost", choices=COSTS, default="time", help="what is least at each budget: the predicted "
                        "time of an update, or the FLOPs that are recomputed (default: time)")
    parser.add_argument("--offload", action="store_true", help="tensors may go to pinned host memory too")
    add_compiling(parser, "the front's JSON")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the points and writes the files asked for; 130 when Ctrl-C stopped it, with what was finished."""
    target, ends = _checked(args, overrides)
    trainer.config(args.config, overrides)  # its mistakes come before the first worker
    from bytescope.memory.devices import targets
    from bytescope.memory.plan.variants import Trials

    compiled_for = targets.to_compile_for(target)
    workers = worker_pool.worker_count(args.points, args.jobs)
    env = worker_pool.environment_for(compiled_for)
    with progress(None) as tell, worker_pool.Pool(workers, env=env) as pool:
        trials = Trials(args.config, compiled_for, overrides, trainer, pool,
                        None if args.no_cache else row_cache.folder(),
                        lambda labels, done: tell(labels, trials.compiles + done))
        found = Front(trials, args.points, ends, args.cost, args.offload, workers)
        found.fill()
    _finish(args, found)
    return INTERRUPTED if found.stopped else 0


class Front:
    """The points of a front, as far as they are found.

    Attributes: search: None before the first program is compiled. points, fixed: what is finished. missing: points
    that are not. stopped: whether it ended early.
    """

    def __init__(self, trials: Trials, points: int, ends: tuple[int | None, int | None], cost: str, offload: bool,
                 workers: int):
        self.trials, self.cost, self.offload = trials, cost, offload
        self._count, self._ends, self._workers = points, ends, workers
        self.search: Search | None = None
        self.points: list[Point] = []
        self.fixed: list[Fixed] = []
        self.missing, self.stopped = points, False

    def fill(self) -> None:
        """Finds all points, or those that are finished when it is stopped. Raises ReportError."""
        from bytescope.memory.plan.variants import Stopped

        budgets: list[int] = []
        programs: dict[float, int] = {}
        try:
            self.search = search = self.trials.search({}, cost=self.cost, offload=self.offload)
            search.compile(search.fixed)
            first, last = (given or found for given, found in zip(self._ends, frontier.ends_of(search)))
            budgets = frontier.budgets_of(first, last, self._count)
            self.missing = len(budgets)
            search.run_all(budgets, at_once=1, together=2 * self._workers, settled=programs.__setitem__)
        except Stopped:
            self.stopped = True
        if self.search is None:
            return
        done = [budget for budget in budgets if budget in programs]
        self.missing -= len(done)
        self.fixed = [self.told(self.search.tried[str(plan)]) for plan in self.search.fixed
                      if (tried := self.search.tried.get(str(plan))) and tried.ok]
        self.fixed.sort(key=lambda policy: policy.row.allocated_bytes or 0)
        self.points = frontier.points_of(self.search, done, programs, self.told)

    def told(self, tried: Tried) -> Fixed:
        """A compiled plan with its figures; a policy for all layers goes by its name, a plan by its words."""
        keys = tried.plan.keys()
        answer = self.trials.compile([keys])[0]  # it is compiled: this looks it up
        ranges = tried.plan.ranges
        words = ranges[0][0].policy if len(ranges) == 1 else ""
        flags = frontier.flags_of(keys, self.trials.flat(keys), self.trials.flat({}))
        return Fixed(words or str(tried.plan), flags, Row.of(keys, answer))


def _checked(args: argparse.Namespace, overrides: Sequence[tuple[str, str]],
             ) -> tuple[str, tuple[int | None, int | None]]:
    """The target's name, and the smallest and largest budget where they are given.

    Raises ReportError for what cannot be, before anything is compiled.
    """
    if not args.config:
        raise ReportError(NO_CONFIG)
    if args.points < 2:
        raise ReportError(f"--points={args.points}: give 2 or more")
    for key, text in overrides:
        if key in OWN:
            raise ReportError(f"--config.{key}={text}: the front chooses what is kept; leave it out (--cost and "
                              "--offload say what is least and what may move)")
    target = args.target.strip().lower()
    check(args, [target])
    first, last = ends = _size("--from", args.first), _size("--to", args.last)
    if first and last and first > last:
        raise ReportError(f"--from={args.first} is more than --to={args.last}")
    return target, ends


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{flag}: {error}") from error
    if size <= 0:
        raise ReportError(f"{flag}={text}: give more than nothing")
    return size


def _finish(args: argparse.Namespace, found: Front) -> None:
    """Prints the points and writes the files."""
    from bytescope.memory.devices.compiler import versions
    from bytescope.memory.text import frontier as frontier_text

    out = frontier.to_json(found.points, found.fixed, cost=args.cost, offload=args.offload,
                        programs=len(found.search.tried) if found.search else 0, compiled=found.trials.compiles,
                        missing=found.missing, target=found.trials.target.to_json(), versions=versions(),
                        interrupted=found.stopped)
    frontier_text.show(found.points, found.fixed, out)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from bytescope.memory.pages import frontier as frontier_page

        write(args.html, frontier_page.render(out, args.config))
