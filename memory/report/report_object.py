"""`Report`, a report that prints, shows, saves and compares itself, and the public functions that return one.

    report = memory.analyze(step, state, batch, target="h200")
    report                        # at a prompt, one screen; in a notebook, the whole report
    report.show()                 # everything that `bytescope report` prints
    report.table()                # the ten largest buffers at the peak
    report.to_html("report.html"), report.save("report.json"), memory.diff("before.json", report)

`assert_fits` guards the memory of a program in a test; memory/pytest_guard.py provides it as a fixture of pytest.

    def test_step_fits():
        memory.assert_fits(step, state, batch, target="h100:8", donate_argnums=0)       # the target's limit
        memory.assert_fits(jax.jit(step).lower(state, batch), "72GiB")                  # or any size

Commands and the trainer use the plain `ReportRecord`. Modules that draw are imported only if something is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.analysis import judge, pool_notes, report_of
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import GuardError, ReportError, disk_remedy
from bytescope.memory.files import write_whole
from bytescope.memory.program.compilation import compiled_for, takes_arguments
from bytescope.memory.program.roles import checked_roles
from bytescope.memory.program.tracing import check_options
from bytescope.memory.records import report_record
from bytescope.memory.units import human, parse_bytes, reads_as_size

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.formulas.model_facts import ModelFacts
    from bytescope.memory.report.difference import Difference
    from bytescope.memory.view.object_table import Table


# Keyword arguments of `analyze` that are not options of jax.jit.
_KEYWORDS = ("target", "kwargs", "config", "facts", "roles", "names", "compiler_options")


class Report(report_record.ReportRecord):
    """The memory report of a compiled program: what every byte of device memory holds when memory use is highest (at
    the peak). It has the fields of `ReportRecord`, and methods that print, draw, save and compare them.

    Two reports are equal if their records are equal. Pickling, `dataclasses.replace` and `from_json` return a
    `Report`.
    """

    @classmethod
    def of(cls, record: report_record.ReportRecord) -> Report:
        """Returns the record as a `Report`. A `Report` is returned unchanged."""
        if isinstance(record, cls):
            return record
        return cls(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, report_record.ReportRecord):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]  # its mappings have none either

    def __repr__(self) -> str:
        """Returns what the command `bytescope report` prints, as wide as the terminal: the verdict, the findings with
        their remedies, and the breakdown."""
        from bytescope.memory.report.report_text import METHODS_OF_A_REPORT, render
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(render(self, verbose=False, more=METHODS_OF_A_REPORT), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.report.report_text import render
        from bytescope.memory.view.console import notebook_html

        return notebook_html(render(self))

    def show(self) -> None:
        """Prints the whole report, like the command `bytescope report --verbose`, in the width of the terminal."""
        from bytescope.memory.report import report_text

        report_text.show(self)

    def table(self, n: int = 10) -> Table:
        """Returns a table of the `n` largest buffers in device memory at the peak, with bytes, dtype, shape,
        description and source line of each. Equal buffers of several layers are one row.
        """
        from bytescope.memory.report.buffer_tables import largest_table

        return largest_table(self, n)

    def to_html(self, path: str | Path) -> None:
        """Writes the report as an HTML page, like `bytescope report --html`. The page is a single file that opens
        without a network.

        Raises ReportError if the file cannot be written.
        """
        from bytescope.memory.report import report_page

        page = report_page.render(self)
        with _one_line_errors(path):
            write_whole(Path(path), page)

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON, which `memory.load` and `bytescope diff` can read. If the name of the file ends
        with .html, writes the page of `to_html`.

        Raises ReportError if the file cannot be written.
        """
        if Path(path).suffix.lower() in (".html", ".htm"):
            return self.to_html(path)
        with _one_line_errors(path):
            super().save(path)

    def diff(self, other: report_record.ReportRecord | str | Path) -> Difference:
        """Returns the changes from this report to `other`, which is a report or the path of a saved report."""
        from bytescope.memory.report.difference import diff

        return diff(self, other)


@contextlib.contextmanager
def _one_line_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; {disk_remedy(error)}give another path") from error


def analyze(
    program: Any,
    *args: Any,
    target: Target | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Compiles a program without running it and returns its memory report: what every byte of one device's memory
    holds when memory use is highest.

    Args:
        program: a function, plain or jitted, which is traced and compiled for the target with the arguments in `args`
            and `kwargs`. Without arguments, `program` may also be a `jax.stages.Traced`; a `Lowered` or `Compiled`
            that was made for the target's devices; the bytes of a serialized HloProto; or the path of a dumped one.
            For a `Compiled` or a proto, the memory limit with which XLA compiled is unknown, so findings that compare
            with this limit are missing.
        args: arguments of the function: arrays, ShapeDtypeStructs, or pytrees of either.
        target: the devices to compile for: a `memory.Target`, or a name such as "h200:8". None: the devices of the
            arguments' shardings, or else the devices of this machine. The report of an HloProto without a target does
            not say whether the program fits.
        kwargs: keyword arguments of the function.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's description of the step (`memory.ModelFacts`): shapes, mesh, precision and remat. With it,
            the report also compares the training state with the ZeRO paper and the collectives with published
            formulas, counts the active parameters, and has findings on experts and pipeline stages.
        roles: (regular expression, role) pairs that give arguments their role by pytree path. They are tried before
            the built-in rules. A role is params, frozen, optimizer, accumulator, cache, rng, gradients or batch.
        names: the checkpoint names of the program. They are needed only if the program also uses them as named scopes.
        compiler_options: options of XLA, such as {"xla_gpu_memory_limit_slop_factor": 80}, for a program that is not
            compiled yet. They are added to the environment variable XLA_FLAGS.
        options: options of `jax.jit` for a function that is not jitted: in_shardings, out_shardings, donate_argnums,
            donate_argnames, static_argnums, static_argnames.

    Raises:
      ReportError: `program` is not a program, was lowered for other devices than the target's, or is a damaged proto;
          the target is unknown; or XLA does not know a compiler option.
      TypeError: an option is not an option of `jax.jit`.
    """
    check_options(options, "analyze", _KEYWORDS)
    roles = checked_roles(roles)
    compilation, compiled_target = compiled_for(
        program, args, kwargs, target=target, options=options, compiler_options=compiler_options
    )
    record = report_of(
        compilation, target=compiled_target, config=config, facts=facts, roles=roles, names=names, seconds=True
    )
    return Report.of(record)


def assert_fits(program: Any, *args: Any, budget: int | str | None = None, **options: Any) -> Report:
    """Raises GuardError unless a program fits into `budget` bytes of device memory, and returns the program's report.

    The predicted bytes of one device are compared: XLA's allocations and the memory that the runtime adds to them in
    the allocator's pool.

    Args:
        program: a function with its arguments, a lowered or compiled program, or a report.
        args: arguments of the function, with which it is compiled.
        options: keyword arguments of `memory.analyze`, such as `target` (the devices to compile for), and options of
            `jax.jit`.
        budget: the bytes that one device may use, as a number or as text such as "72GiB". If the program takes no
            arguments, `budget` may be the second positional argument. None: the bytes that are available on one
            device of the target. A number below 1 MiB needs a unit: "512B".

    Raises:
      GuardError: the program does not fit. It is also an AssertionError. Its message lists what takes the most memory.
      ReportError: neither `budget` nor the limit of a target is known, `budget` is not valid, or a size was given among
        the function's arguments.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, not this function
    check_options(set(options) - set(_KEYWORDS), "assert_fits", ("budget", *_KEYWORDS))
    if len(args) == 1 and budget is None and not takes_arguments(program):
        (budget,), args = args, ()
    if args and isinstance(args[-1], str) and reads_as_size(args[-1]):
        raise ReportError(
            f"{args[-1]!r} is a size, not an argument of the function: give it as a keyword, budget={args[-1]!r}"
        )
    limit = None if budget is None else parse_bytes(budget)  # an invalid size is refused before anything is compiled
    if isinstance(program, report_record.ReportRecord):
        report = Report.of(program)
    else:
        report = analyze(program, *args, **options)
    limit = report.limit_bytes if limit is None else limit
    if limit is None:
        raise ReportError(
            'no budget and no target is given: give the budget, as in assert_fits(program, "72GiB"), or a target'
        )
    excess = report.predicted_bytes - limit
    if excess <= 0 and (budget is not None or report.fits):
        return report
    notes = pool_notes(report) if budget is None else []
    words = "; ".join(filter(None, (limit_share(report.target, limit), *notes)))
    error = GuardError(
        f"{report.program or 'the program'} takes {human(report.predicted_bytes)}"
        f"{f', {human(excess)} more than' if excess > 0 else ' of'} {human(limit)}"
        f"{f', {words}' if words else ''}: {_largest_parts(report)}"
    )
    error.report = Report.of(judge(report, limit))
    raise error


def _largest_parts(report: Report) -> str:
    rows = sorted(report.breakdown.items(), key=lambda row: -row[1])[:4]
    overheads = [(row.name, row.bytes) for row in report.runtime_overheads if row.where == report_record.POOL]
    return ", ".join(f"{row} {human(count)}" for row, count in (*rows, *overheads) if count)


def load(path: str | Path) -> Report:
    """Returns a saved report.

    `path`: a file that `Report.save` or `bytescope report --json` wrote, or a run directory that contains a report.

    Raises ReportError if the file is missing or damaged, or is not a report.
    """
    return Report.of(report_record.load(path))
