"""What is in files already: a run directory, a saved report, a profiler trace; and a training script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from bytescope.memory.errors import ReportError
from bytescope.memory.records import report_record
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.subjects.subject import Subject


class ReportSubject(Subject):
    """A report that --json wrote."""

    kind = "report"
    is_a = "a saved report"
    has = ("report", "trace")
    lacks: ClassVar[Mapping[str, str]] = {"KEY=VALUE": "which is written already: leave it out"}
    reported_by: ClassVar[str] = "saved"

    def check(self, target: str) -> None:
        """Raises ReportError if the file is no report, or if a target is given."""
        self.report(target)

    def report(self, target: str) -> ReportRecord:
        """Returns the report in the file. Raises ReportError if the file is no report, or if a target is given."""
        self.refuse_target(target)
        return report_record.load(self.path)

    def refuse_target(self, target: str) -> None:
        """Raises ReportError if a target is given."""
        if target != "local":
            raise ReportError(f"{target} cannot be used with a saved report, which has a target: leave it out")


class RunSubject(ReportSubject):
    """The directory of a run, which has the report of its step."""

    kind = "run"
    is_a = "a run"


class TraceSubject(Subject):
    """A trace of jax's profiler: a file *.xplane.pb, or a folder with one."""

    kind = "trace"
    is_a = "a trace"
    has = ("trace",)
    reported_by: ClassVar[str] = "trace"


class ScriptSubject(Subject):
    """A training script, which is run up to its step without its data."""

    kind = "script"
    is_a = "a script"
    reported_by: ClassVar[str] = "init-program"
