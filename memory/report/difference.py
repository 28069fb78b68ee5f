"""Compares two reports: an object that shows the changes at a prompt, in a notebook and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.records import report_diff as plan_diff
from bytescope.memory.records.report_diff import Change
from bytescope.memory.records.report_record import ReportRecord, load

# Number of buffers that a prompt and a notebook list. `show` prints as many as the command.
_BUFFERS = 5


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """The changes from one report to another.

    Fields:
        before, after: the reports.
        changes: the totals, then the changes of categories, residuals, workspace and buffers, each kind with its
            largest change first. Bytes are those of one device.
    """

    before: ReportRecord
    after: ReportRecord
    changes: tuple[Change, ...]

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The changes as plain data: kind, name, before, after, growth (bytes), percent (infinite if there were no
        bytes before)."""
        return tuple(
            {**dataclasses.asdict(change), "growth": change.growth, "percent": change.percent}
            for change in self.changes
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each reason why the two reports are hard to compare: other targets, other versions of jax."""
        return plan_diff.warnings(self.before, self.after)

    def grew_above(self, percent: float) -> tuple[Change, ...]:
        """Returns the changes of total peak and allocated bytes that are larger than `percent` per cent, for a test to
        check."""
        return plan_diff.grew_above(self.changes, percent)

    def __repr__(self) -> str:
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(diff_view.render_text(self.before, self.after, self.changes, _BUFFERS), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.report import notebook_difference

        return notebook_difference.render(self.before, self.after, self.changes, _BUFFERS)

    def show(self) -> None:
        """Prints the output of `bytescope diff`, as wide as the terminal. In a notebook, displays it."""
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.output_file import put_or_display

        put_or_display(self, diff_view.render_text(self.before, self.after, self.changes))

    def to_html(self, path: str | Path) -> None:
        """Writes the page that `bytescope diff --html` writes: both timelines, a waterfall of the changes, and a table
        of every change.

        Raises ReportError if the page cannot be written.
        """
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.output_file import write

        write(path, diff_view.render_page(self.before, self.after))


def diff(before: ReportRecord | str | Path, after: ReportRecord | str | Path) -> Difference:
    """Returns the difference from one report to another. Each may be the path of a saved report.

    Raises ReportError if an argument is neither a report nor a path, or if a file cannot be read.
    """
    before, after = _report(before), _report(after)
    return Difference(before, after, plan_diff.diff(before, after))


def _report(given: Any) -> ReportRecord:
    if isinstance(given, ReportRecord):
        return given
    if isinstance(given, str | Path):
        return load(given)
    raise ReportError(
        f"{type_phrase(given)} is not a report: give the result of memory.analyze, or the path of a saved report"
    )
