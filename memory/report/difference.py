"""Two reports against each other as an object: what grew and what shrank, at a prompt, in a notebook, as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.records import report_diff as plan_diff
from bytescope.memory.records.report_diff import Change
from bytescope.memory.records.report_record import ReportRecord, load

# Buffers that a prompt and a notebook list; `show` prints what the command prints.
_BUFFERS = 5


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """What changed from one report to another.

    Fields:
        before, after: the reports.
        changes: the totals first, then what grew or shrank: categories, residuals, workspace, buffers, each the
            largest change first; bytes on one device.
    """

    before: ReportRecord
    after: ReportRecord
    changes: tuple[Change, ...]

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The changes as plain data: kind, name, before, after, growth (bytes), percent (infinite for what is new)."""
        return tuple(
            {**dataclasses.asdict(change), "growth": change.growth, "percent": change.percent}
            for change in self.changes
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the two hard to compare, a sentence each: other targets, other versions of jax."""
        return plan_diff.warnings(self.before, self.after)

    def grew_above(self, percent: float) -> tuple[Change, ...]:
        """Of peak and allocated bytes, those that grew by more than `percent` per cent: a guard for a test."""
        return plan_diff.grew_above(self.changes, percent)

    def __repr__(self) -> str:
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(diff_view.render_text(self.before, self.after, self.changes, _BUFFERS), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.report import notebook_difference

        return notebook_difference.render(self.before, self.after, self.changes, _BUFFERS)

    def show(self) -> None:
        """Prints all that `bytescope diff` prints, as wide as the terminal; in a notebook it is displayed there."""
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.output_file import put_or_display

        put_or_display(self, diff_view.render_text(self.before, self.after, self.changes))

    def to_html(self, path: str | Path) -> None:
        """Writes the page that `bytescope diff --html` writes: both timelines, a waterfall of what grew, every change.

        Raises ReportError where it cannot be written.
        """
        from bytescope.memory.report import diff_view
        from bytescope.memory.view.output_file import write

        write(path, diff_view.render_page(self.before, self.after))


def diff(before: ReportRecord | str | Path, after: ReportRecord | str | Path) -> Difference:
    """What grew and shrank from one report to another; either may be the path of a saved one.

    Raises ReportError for what is neither, and for a file that cannot be read.
    """
    before, after = _report(before), _report(after)
    return Difference(before, after, plan_diff.diff(before, after))


def _report(given: Any) -> ReportRecord:
    if isinstance(given, ReportRecord):
        return given
    if isinstance(given, str | Path):
        return load(given)
    raise ReportError(
        f"{type_phrase(given)} is not a report: give what memory.analyze returns, or the path of one that was saved"
    )
