"""The base class of subjects. A subject is what the first word of a command names, such as a config or a function.

A kind of subject is a subclass of `Subject` and a row of `train.commands.subjects.KINDS`. A command asks its subject
for what it needs. If a kind does not have this, the error says in one line what to do instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from bytescope.memory.devices.platform import JAX_FRACTION, MemoryFraction
from bytescope.memory.devices.xla_flags import flags_text, parse_flags
from bytescope.memory.errors import ReportError

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.compare.program_factory import ProgramFactory
    from bytescope.memory.devices.compiler import Compilation
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.records.report_record import ReportRecord
    from bytescope.memory.report.report_object import Report


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a command looks at. A subclass has a method for each thing that its kind has; the others raise ReportError.

    Attributes:
        name: the path or name, without a prefix.
        keys: (key, value) for the keys that the command line sets. A value is text.
        xla: options of XLA to compile with, as FLAG=VALUE.
        kind: the name of the kind, which is also the prefix that selects it, such as "dump".
        is_a: the kind in an error message, such as "an XLA dump, which is compiled already".
        has: what the kind has of what commands need: "program" to compile, "report" (made or saved), "variants" of its
            program, "fit" (a search for what fits), "names" that a remat policy may save, "config" of the trainer,
            "trace" (a trace, or a report that is joined to one).
        lacks: a flag, or a command with a flag, such as "fit --vary" -> why a subject of this kind cannot have it, and
            what to do instead, in words that follow the subject's name.
        reported_by: the row of the table of commands that reports on this kind.
        parts: a row of the table of commands -> the module below `bytescope` whose `run(args)` does it for this kind.
        memory_fraction: the fraction of a GPU's memory in jax's pool, if neither the target nor the environment sets
            it.
    """

    kind: ClassVar[str]
    is_a: ClassVar[str]
    has: ClassVar[Collection[str]] = ()
    lacks: ClassVar[Mapping[str, str]] = {}
    reported_by: ClassVar[str] = "report"
    parts: ClassVar[Mapping[str, str]] = {}
    memory_fraction: ClassVar[MemoryFraction] = JAX_FRACTION

    name: str
    keys: Sequence[tuple[str, Any]] = ()
    xla: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """The name as a path, with ~ expanded."""
        return Path(os.path.expanduser(self.name))

    def part(self, row: str) -> ModuleType:
        """Returns the module that does a row of the table of commands for this kind of subject."""
        return importlib.import_module(f"bytescope.{self.parts[row]}")

    def check_flags(self, called: str, args: argparse.Namespace) -> None:
        """Raises ReportError if the command line has a flag that this kind of subject lacks.

        called: the command as the user calls it, such as "compare --levers".
        """
        for flag, why in self.lacks.items():
            command, _, name = flag.rpartition("--")
            if command.strip() in ("", called) and vars(args).get(name.replace("-", "_")):
                raise ReportError(f"--{name} cannot be used with {self.name}, {why}")
        if self.keys and "KEY=VALUE" in self.lacks:
            key, value = self.keys[0]
            raise ReportError(f"{key}={value} cannot be used with {self.name}, {self.lacks['KEY=VALUE']}")

    def _lack(self, what: str) -> ReportError:
        return ReportError(f"{self.name} is {self.is_a}: it has no {what}; give a config or MODULE:FUNCTION")

    def check(self, target: str) -> None:
        """Raises ReportError for mistakes in the name, the keys or the name of the target that can be found without
        starting jax."""
        if target != "local":
            self.devices(target)

    def start(self, target: str) -> str:
        """Sets the platform that jax uses, and the number of simulated CPU devices. Runs before jax is imported.
        Returns the platform, such as "cpu".

        target: the name of the target.
        """
        from bytescope.memory.devices.platform import choose_platform, simulate_devices

        own = self.memory_fraction is not JAX_FRACTION
        platform = choose_platform(fraction=self.memory_fraction.value if own else None)
        simulate_devices([target])
        return platform

    def devices(self, target: str) -> Target:
        """Returns the target of a name, such as "h100:8", with this kind's fraction of the memory.

        Raises ReportError if there is no such target.
        """
        from bytescope.memory.devices import targets

        return targets.parse(target, self.memory_fraction)

    # ---- one program ----

    def program(self, target: str) -> PreparedProgram:
        """Returns the program for a target, ready to be compiled. `start` was called before.

        Raises ReportError if there is no such program or target.
        """
        raise self._lack("program to compile")

    def report(self, target: str) -> ReportRecord:
        """Returns the memory report of the program on a target. Compiles it, if it is not compiled yet."""
        self.start(target)
        return make_report(self.program(target))[0]

    def analyze(self, target: str = "local") -> Report:
        """Returns the memory report on a target, such as "h100:8", as `memory.analyze` does.

        Raises ReportError if the subject has no program, if there is no such target, or for a mistake in a key.
        """
        from bytescope.memory.report.report_object import Report

        return Report.of(self.report(target))

    def with_flags(self, flags: str) -> Subject | None:
        """Returns the subject with the flags of a remedy, such as "--config.batch.micro=1"; None for "", or if this
        kind has no such flags."""
        return None

    def cache_name(self, target: str, more: Sequence[Any]) -> str:
        """Returns the name by which a finished report is cached. It depends on everything that the report depends on.
        "" if a report of this subject is not cached.

        target: the name of the target. more: values of the command line on which the report depends, too.
        """
        return ""

    def ways_to_fit(self, report: ReportRecord, target: str) -> Sequence[Any]:
        """Returns what to change in a program that does not fit, as rich renderables."""
        from bytescope.memory.messages.post_mortem import ways_out
        from bytescope.memory.units import human
        from bytescope.memory.view.text_layout import Prose

        return [Prose(f"{human(way.bytes)}  {way.words}", indent=2) for way in ways_out(report)]

    # ---- its variants ----

    def factory(self, target: str) -> ProgramFactory:
        """Returns what makes the program with other values of its keys. target: the name of the target.

        Raises ReportError if this kind has no keys.
        """
        raise self._lack("keys to vary")

    def fixed(self) -> dict[str, Any]:
        """Returns the keys that all variants share, as the factory takes them: key -> value."""
        return {**dict(parse_flags(self.xla)), **dict(self.keys)}

    def given(self) -> str:
        """Returns `fixed` as words of a command line."""
        options = [f"--xla={flags_text({name: value})}" for name, value in parse_flags(self.xla).items()]
        return shlex.join([*options, *(f"{key}={value}" for key, value in self.keys)])

    def policies(self, text: str) -> list[tuple[str, list[str]]]:
        """Returns the grid of `compare --remat=TEXT`: (key of the remat policy, policies)."""
        raise self._lack("key of a remat policy")


def make_report(program: PreparedProgram) -> tuple[ReportRecord, Compilation]:
    """Compiles a program. Returns its memory report and the compilation."""
    from bytescope.memory.cost import flops

    compilation, target = program.compile()
    compilation = dataclasses.replace(compilation, notes=(*compilation.notes, *program.notes))
    description = None
    if program.describe is not None:
        counted = flops.count(compilation.jaxpr).model_flops if compilation.jaxpr is not None else None
        description = program.describe(0 if counted is None else round(program.model_flops(counted)))
    report = program.report_of(compilation, target, subject=description, seconds=True, measure=True)
    return dataclasses.replace(report, findings=tuple(program.findings(report))), compilation


def with_program_host_memory(report: ReportRecord, jaxpr: Any) -> ReportRecord:
    """Returns the report of a program that is not the trainer's own with its predicted host memory. The report is
    unchanged if its target is unknown."""
    if not report.target:
        return report
    from bytescope.memory.devices import targets
    from bytescope.memory.findings.host_findings import with_host_memory
    from bytescope.memory.report.host_notice import program_host_memory

    target = targets.parse(report.target["name"])
    return with_host_memory(report, program_host_memory(report, jaxpr, target, "flax" in sys.modules))
