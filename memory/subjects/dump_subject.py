"""A compiled program that XLA dumped to a file, as a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from bytescope.memory.subjects.subject import Subject

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.records.report_record import ReportRecord

_NEEDS_CONFIG = "because it needs a config: give a config instead"
_COMPILED = "because a dump is compiled already: leave it out"


class DumpSubject(Subject):
    """A file *after_optimizations.hlo.pb, or the folder of a dump, whose largest program is used."""

    kind = "dump"
    is_a = "an HLO dump, which is compiled already"
    has = ("program", "report")
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--formulas", "--run", "--generate"), _NEEDS_CONFIG),
        **dict.fromkeys(
            ("--try-remedies", "--passes"), "because a dump is not compiled again: give the step as MODULE:FUNCTION"
        ),
        "--xla": _COMPILED,
        "KEY=VALUE": "which is compiled already: leave it out",
    }

    def program(self, target: str) -> PreparedProgram:
        """Returns the program in the file. target: the devices whose memory limit applies."""
        from bytescope.memory.compare.prepared_program import prepare_dump

        return prepare_dump(self.path, self.devices(target))

    def ways_to_fit(self, report: ReportRecord, target: str) -> Sequence[Any]:
        """Returns nothing: the source of the program is unknown."""
        return ()
