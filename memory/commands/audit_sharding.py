"""bytescope audit --fix-sharding: tries sharding constraints on the arrays that XLA gathers in full on every device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bytescope.memory.compare.program_factory import load_factory
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.fixes import equal_results
from bytescope.memory.fixes.constraint_trials import ConstraintTrial, try_constraints
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.program import user_program
from bytescope.memory.program.user_program import UserProgram
from bytescope.memory.view.console import put
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.text_layout import Prose

COLUMNS = (
    ColumnView("spec", "constraint", "text"),
    ColumnView("array", "on", "name"),
    ColumnView("source", "at", "place", read=lambda trial: short_place(trial.source)),
    ColumnView("allocated_after", "allocated", "bytes"),
    ColumnView("wire_after", "sent", "bytes"),
    ColumnView("seconds_after", "seconds", "duration", skip_zero=True),
    ColumnView("numerics", "results at small sizes", "text", short="results"),
)


def fix_sharding(args: argparse.Namespace) -> tuple[ConstraintTrial, ...]:
    """Compiles the program of --program with different sharding constraints, one at a time, and prints a table with the
    bytes and seconds of each, lowest allocated bytes first. Returns the rows of the table: one for each constraint that
    compiles; () if XLA gathers no array in full that a constraint could keep sharded.

    Raises ReportError if the function of --program does not return (step, arguments), or if the step cannot be
    compiled.
    """
    function = user_program.load_function(args.program)
    target = targets.parse(args.target)
    program = _step(function.make(target=target))
    small = None
    if args.small:
        values = equal_results.parse_small(args.small)
        resolved = load_factory(args.program).resolve(values)
        little = _step(function.make({key: resolved[key] for key in values}, target))
        small = little.program, little.args
    options = {key: value for key, value in program.options.items() if key not in user_program.OWN_OPTIONS}
    trials = try_constraints(
        program.program,
        program.args,
        program.options.get("kwargs"),
        target=target,
        options=options,
        small=small,
        progress=lambda number, count, words: put(Prose(f"{number} of {count}: {words}", "dim")),
    )
    show(trials)
    return trials


def _step(program: UserProgram) -> UserProgram:
    if not program.args:
        raise ReportError(
            f"{program.name} returns a traced program, but --fix-sharding has to trace the step itself: return (step, "
            "(state, batch))"
        )
    return program


def show(trials: Sequence[ConstraintTrial]) -> None:
    """Prints a table of the sharding constraints that were compiled, in the given order (best first). If the first one
    saves memory or communication, also prints the line of Python to insert."""
    from bytescope.memory.units import human
    from bytescope.memory.view.table_views import terminal_table

    if not trials:
        put(Prose("no sharding constraint to try: XLA gathers no array in full that a constraint could keep sharded"))
        return
    best = trials[0]
    put(Prose("sharding constraints, with bytes on one device", "bold"))
    put(terminal_table(TableView(COLUMNS, trials)))
    before = f"without a constraint: {human(best.allocated_before)} allocated, {human(best.wire_before)} sent"
    put(Prose(before))
    if best.improves:
        put(Prose(f"to insert by hand at {best.source}, for {best.array}: {best.code}"))
    else:
        put(Prose("no sharding constraint lowers the allocated bytes or the bytes sent: leave the program as it is"))
