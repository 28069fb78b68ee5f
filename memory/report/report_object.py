"""`Report`, a report that prints, shows, saves and compares itself, and the public functions that return one.

    report = memory.analyze(step, state, batch, target="h200")
    report                        # at a prompt, one screen; in a notebook, the bar and the timeline
    print(report)                 # the same screen with the remedies of findings
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

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.analysis import judge, report_of
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import GuardError, ReportError
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


class Report(report_record.ReportRecord):
    """The report of a program: what every byte of device memory holds at the peak. A `ReportRecord` with methods that
    draw it.

    Two reports are equal if their records are equal. Pickling, `dataclasses.replace` and `from_json` return a
    `Report`.
    """

    @classmethod
    def of(cls, record: report_record.ReportRecord) -> Report:
        """Returns the report of a record. A `Report` is returned unchanged."""
        if isinstance(record, cls):
            return record
        return cls(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, report_record.ReportRecord):
            return NotImplemented
        fields = [field.name for field in dataclasses.fields(self) if field.compare]
        return all(getattr(self, name) == getattr(other, name) for name in fields)

    __hash__ = None  # type: ignore[assignment]  # its mappings have none either

    def __repr__(self) -> str:
        """Returns the summary in under 2,000 characters and at most 80 columns."""
        from bytescope.memory.report.report_text import summary

        return summary(self)

    def __str__(self) -> str:
        """Returns the summary with uncut findings and their remedies, in at most 80 columns."""
        from bytescope.memory.report.report_text import summary

        return summary(self, remedies=True)

    def _repr_html_(self) -> str:
        """Returns the output for a notebook: figures, bar, timeline, largest buffers; under 300 KB for any program."""
        from bytescope.memory.report import notebook_summary

        return notebook_summary.render(self)

    def show(self) -> None:
        """Prints the output of `bytescope report`, as wide as the terminal. In a notebook, displays it."""
        from bytescope.memory.report import report_text
        from bytescope.memory.view.output_file import put_or_display

        put_or_display(self, report_text.render(self))

    def table(self, n: int = 10) -> Table:
        """Returns the `n` largest buffers at the peak: bytes, dtype, shape, description and source line of each."""
        from bytescope.memory.report.buffer_tables import largest_table

        return largest_table(self, n)

    def to_html(self, path: str | Path) -> None:
        """Writes the page that `bytescope report --html` writes: one file that opens offline.

        Raises ReportError if the file cannot be written.
        """
        from bytescope.memory.report import report_page
        from bytescope.memory.view.output_file import write

        write(path, report_page.render(self))

    def save(self, path: str | Path) -> None:
        """Writes the JSON that `memory.load` and `bytescope diff` read.

        Raises ReportError if the file cannot be written.
        """
        try:
            super().save(path)
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror}") from error

    def diff(self, other: report_record.ReportRecord | str | Path) -> Difference:
        """Returns the difference from this report to `other`, a report or the path of a saved one."""
        from bytescope.memory.report.difference import diff

        return diff(self, other)


def analyze(
    program: Any,
    *args: Any,
    target: Target | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    **options: Any,
) -> Report:
    """Returns the report of a program: what every byte of device memory holds at the peak, on one device.

    Args:
        program: a step, plain or jitted, whose arguments are in `args` and `kwargs`: arrays, ShapeDtypeStructs, or
            pytrees of them. It is traced once and compiled for the target. Or, without arguments, a
            `jax.stages.Traced`, a `Lowered` or `Compiled` for the target's own devices, a serialized HloProto (bytes),
            or the path of one.
        target: a `memory.devices.targets.Target` or its name ("h200:8"). None: the devices of the arguments'
            shardings, or else the available devices. A proto without a target has no verdict.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's facts about the step (`memory.formulas.model_facts.ModelFacts`): shapes, mesh, precision,
            remat. With them, the report has ZeRO's accounting, collectives by formula, active parameters, and findings
            on experts and stages.
        roles: (regular expression, role) pairs for the pytree paths of arguments, which are tried before all other
            rules. Roles are params, frozen, optimizer, accumulator, cache, rng, gradients and batch.
        names: the program's checkpoint names, for programs that also use them as named scopes.
        options: options of `jax.jit` for a plain step: in_shardings, out_shardings, donate_argnums, donate_argnames,
            static_argnums, static_argnames.

    Raises:
      ReportError: `program` is not a program, was lowered for other devices than the target's, or is a damaged proto;
          or the target is unknown.
      TypeError: an option is not an option of `jax.jit`.
    """
    return _compile_and_report(
        program,
        args,
        predict=True,
        target=target,
        kwargs=kwargs,
        config=config,
        facts=facts,
        roles=roles,
        names=names,
        **options,
    )


def assert_fits(program: Any, *args: Any, size: int | str | None = None, **options: Any) -> Report:
    """Asserts that a program's predicted bytes are at most `size`, and returns its report.

    Args:
        program: a step with its arguments and a target, a lowered program, or a report.
        args, options: the arguments of `memory.analyze` with these names.
        size: bytes of one device, or text such as "72GiB". If the program takes no arguments, the size may follow it
            as a positional argument. None: the bytes that are available on one device of the target. A number below 1
            MiB needs a unit: "512B".

    Raises:
      GuardError (an AssertionError): the program does not fit. The message names the largest parts of the peak.
      ReportError: neither a size nor a limit is known, the size is not valid, or it is among the arguments of a step.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, not this function
    if len(args) == 1 and size is None and not takes_arguments(program):
        (size,), args = args, ()
    if args and isinstance(args[-1], str) and reads_as_size(args[-1]):
        raise ReportError(f"{args[-1]!r} is a size, not an argument of the step: give it by name, size={args[-1]!r}")
    limit = None if size is None else parse_bytes(size)  # an invalid size is refused before anything is compiled
    if isinstance(program, report_record.ReportRecord):
        report = Report.of(program)
    else:
        report = _compile_and_report(program, args, predict=False, **options)
    limit = report.limit_bytes if limit is None else limit
    if limit is None:
        raise ReportError(
            'there is no size to compare with: give one, as in assert_fits(program, "72GiB"), or a target'
        )
    if report.predicted_bytes <= limit:
        return report
    share = limit_share(report.target, limit)
    error = GuardError(
        f"{report.program or 'the program'} takes {human(report.predicted_bytes)}, "
        f"{human(report.predicted_bytes - limit)} more than {human(limit)}"
        f"{f' ({share})' if share else ''}: {_largest_parts(report)}"
    )
    error.report = Report.of(judge(report, limit))
    raise error


def _compile_and_report(
    program: Any,
    args: tuple[Any, ...],
    *,
    predict: bool,
    target: Target | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    **options: Any,
) -> Report:
    check_options(options, "analyze")
    roles = checked_roles(roles)
    compilation, compiled_target = compiled_for(program, args, kwargs, target=target, options=options)
    record = report_of(
        compilation, target=compiled_target, config=config, facts=facts, roles=roles, names=names, seconds=predict
    )
    return Report.of(record)


def _largest_parts(report: Report) -> str:
    """Returns the largest rows of the peak and the runtime overheads in the allocator's pool, as text."""
    rows = sorted(report.breakdown.items(), key=lambda row: -row[1])[:4]
    overheads = [(row.name, row.bytes) for row in report.runtime_overheads if row.where == report_record.POOL]
    return ", ".join(f"{row} {human(count)}" for row, count in (*rows, *overheads) if count)


def load(path: str | Path) -> Report:
    """Reads a report that `Report.save` or `bytescope report --json` wrote, or the report in a run directory.

    Raises ReportError if the file is missing or damaged, or is not a report.
    """
    return Report.of(report_record.load(path))
