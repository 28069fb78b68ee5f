"""Compares two reports: an object that shows the changes at a prompt and in a notebook."""

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
    """The changes from one memory report to another. At a prompt and in a notebook, it is shown as a table.

    Fields:
        before, after: the two reports.
        changes: changed sizes in bytes of one device, ordered by kind: totals, categories, residuals by name,
            workspace by scope, buffers. In each kind, the largest change comes first.
    """

    before: ReportRecord
    after: ReportRecord
    changes: tuple[Change, ...]

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The changes as mappings with the keys kind, name, before, after (bytes), growth (bytes) and percent. The
        percentage is infinite if the first report has no bytes of that name.
        """
        return tuple(
            {**dataclasses.asdict(change), "growth": change.growth, "percent": change.percent}
            for change in self.changes
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each reason why the two reports are hard to compare, such as different targets or versions of
        jax.
        """
        return plan_diff.warnings(self.before, self.after)

    def grew_above(self, percent: float) -> tuple[Change, ...]:
        """Returns the totals (peak and allocated bytes) that grew by more than `percent` per cent; () if none did. A
        test can assert that none did.
        """
        return plan_diff.grew_above(self.changes, percent)

    def __repr__(self) -> str:
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(diff_view.render_text(self.before, self.after, self.changes, _BUFFERS), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.report import notebook_difference

        return notebook_difference.render(self.before, self.after, self.changes, _BUFFERS)

    def show(self) -> None:
        """Prints the changes, like the command `bytescope diff`, in the width of the terminal. In a notebook, displays
        them.
        """
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.output_file import put_or_display

        put_or_display(self, diff_view.render_text(self.before, self.after, self.changes))


def diff(before: ReportRecord | str | Path, after: ReportRecord | str | Path) -> Difference:
    """Returns the changes in device memory from the report `before` to the report `after`.

    Each argument is a report, or the path of a saved report.

    Raises ReportError if an argument is neither, or if a file cannot be read.
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
