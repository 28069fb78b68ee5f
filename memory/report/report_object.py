"""`Report`: the record of a report as an object that prints, shows, saves and compares itself, and the public functions
that return one.

    report = memory.analyze(step, state, batch, target="h200")
    report                        # at a prompt one screen; in a notebook its bar and its timeline
    print(report)                 # the same screen with the remedies of its findings
    report.show()                 # all that `bytescope report` prints
    report.table()                # the ten largest buffers at the peak
    report.to_html("report.html"), report.save("report.json"), memory.diff("before.json", report)

Commands and the trainer use the plain `ReportRecord`. Modules that draw are imported when something is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.analysis import analyze as analyzed
from bytescope.memory.analysis import with_seconds
from bytescope.memory.errors import GuardError, ReportError
from bytescope.memory.records import report_record
from bytescope.memory.report import guard

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.formulas.model_facts import ModelFacts
    from bytescope.memory.report.difference import Difference
    from bytescope.memory.view.object_table import Table


class Report(report_record.ReportRecord):
    """What every byte of a program's peak is, on one device: the fields of `ReportRecord`, and methods that draw them.

    Two reports are equal if their records are equal. Pickling, `dataclasses.replace` and `from_json` return a `Report`.
    """

    @classmethod
    def of(cls, record: report_record.ReportRecord) -> Report:
        """Returns the report of a record; a `Report` is returned as it is."""
        if isinstance(record, cls):
            return record
        return cls(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, report_record.ReportRecord):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]  # its mappings have none either

    def __repr__(self) -> str:
        """The summary in under 2,000 characters, of at most 80 columns."""
        from bytescope.memory.report import summary_text as summary

        return summary.plain(self)

    def __str__(self) -> str:
        """Returns the summary with uncut findings and their remedies, in at most 80 columns."""
        from bytescope.memory.report import summary_text as summary

        return summary.plain(self, remedies=True)

    def _repr_html_(self) -> str:
        """The output of a notebook: figures, bar, timeline, the largest buffers; under 300 KB for any program."""
        from bytescope.memory.report.notebook import notebook_summary as summary

        return summary.render(self)

    def show(self) -> None:
        """Prints what `bytescope report` prints, as wide as the terminal; in a notebook, displays it."""
        from bytescope.memory.report import report_text as report
        from bytescope.memory.view.output_file import put_or_display

        put_or_display(self, report.render(self))

    def table(self, n: int = 10) -> Table:
        """Returns the `n` largest buffers at the peak: bytes, dtype, shape, description and source line of each."""
        from bytescope.memory.report.largest import largest

        return largest(self, n)

    def to_html(self, path: str | Path) -> None:
        """Writes the page that `bytescope report --html` writes: one file that opens offline.

        Raises ReportError if it cannot be written.
        """
        from bytescope.memory.report import report_page as report
        from bytescope.memory.view.output_file import write

        write(path, report.render(self))

    def save(self, path: str | Path) -> None:
        """Writes the JSON that `memory.load` and `bytescope diff` read.

        Raises ReportError if it cannot be written.
        """
        try:
            super().save(path)
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror}") from error

    def diff(self, other: report_record.ReportRecord | str | Path) -> Difference:
        """Returns what grew and shrank from this report to `other`, a report or the path of a saved one."""
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
    return Report.of(
        with_seconds(
            analyzed(
                program,
                *args,
                target=target,
                kwargs=kwargs,
                config=config,
                facts=facts,
                roles=roles,
                names=names,
                **options,
            )
        )
    )


def assert_fits(program: Any, *args: Any, size: int | str | None = None, **options: Any) -> Report:
    __tracebackhide__ = True
    try:
        return Report.of(guard.assert_fits(program, *args, size=size, **options))
    except GuardError as error:
        error.report = Report.of(error.report)
        raise


# The documentation of the arguments stands with the functions that these call.
analyze.__doc__, assert_fits.__doc__ = analyzed.__doc__, guard.assert_fits.__doc__


def load(path: str | Path) -> Report:
    """Reads a report that `Report.save` or `bytescope report --json` wrote; a run directory's own too.

    Raises ReportError for a missing, damaged or foreign file.
    """
    return Report.of(report_record.load(path))
