"""A config of the trainer as a subject of the commands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bytescope.memory.compare import grids, row_cache
from bytescope.memory.devices.platform import MemoryFraction
from bytescope.memory.devices.xla_flags import parse_flags
from bytescope.memory.errors import ReportError
from bytescope.memory.subjects.subject import Subject
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan.config_grid import POLICY, given_flags

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram, RunPrograms
    from bytescope.memory.compare.program_factory import ProgramFactory
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.records.report_record import ReportRecord
    from bytescope.train.program.program import Program

_XLA_FLAGS = "xla.flags"
# The packages whose code makes a report.
_SOURCES = ("bytescope.configs", "bytescope.memory", "bytescope.model", "bytescope.train")


class ConfigSubject(Subject):
    """A config file, the name of a shipped config, or a folder of weights as hf:FOLDER. The empty name is no config,
    whose variants name one each."""

    kind = "config"
    is_a = "a config"
    has = ("program", "report", "variants", "fit", "names", "config")
    lacks: ClassVar[Mapping[str, str]] = {"fit --only-names": "because all its values have names: leave it out"}
    parts: ClassVar[Mapping[str, str]] = {"fit": "train.commands.fit_config", "names": "train.commands.names_config"}
    memory_fraction: ClassVar[MemoryFraction] = TRAIN_FRACTION

    @functools.cached_property
    def overrides(self) -> list[tuple[str, str]]:
        """The keys that the command line sets, (dotted key, text), with the options of --xla in the key xla.flags.

        Raises ReportError if an option is not of the form FLAG=VALUE.
        """
        if not self.xla:
            return list(self.keys)
        from bytescope.train.program.config_files import load_flat

        parse_flags(self.xla)
        given = dict(self.keys).get(_XLA_FLAGS) or (load_flat(self.name, self.keys)[_XLA_FLAGS] if self.name else "")
        flags = " ".join(filter(None, [given, *self.xla]))
        return [*(pair for pair in self.keys if pair[0] != _XLA_FLAGS), (_XLA_FLAGS, flags)]

    def check(self, target: str) -> None:
        """Raises ReportError if the config cannot be read, a key is wrong, or there is no such target."""
        from bytescope.train.program import config_files

        config_files.load(self.name, self.keys)
        super().check(target)

    # ---- one program ----

    def program(self, target: str) -> PreparedProgram:
        """Returns the training step of the config for a target."""
        from bytescope.train.plan.config_factory import build_program, describe, prepare_program
        from bytescope.train.program import config_files

        devices = self.devices(target)
        program = build_program(self.name, self.overrides, devices)
        prepared = prepare_program(program, devices, config_files.load_flat(self.name, self.overrides))
        return dataclasses.replace(
            prepared,
            describe=functools.partial(describe, self.name, self.overrides, prepared),
            complete=functools.partial(_complete, program, devices),
            run_programs=functools.partial(_run_programs, program),
        )

    def with_flags(self, flags: str) -> Subject | None:
        """Returns the config with the flags of a remedy; None for ""."""
        from bytescope.train.plan.advice import parse_flags as parse_keys

        return ConfigSubject(self.name, [*self.overrides, *parse_keys(flags)]) if flags else None

    def cache_name(self, target: str, more: Sequence[Any]) -> str:
        """Returns the name by which the report is cached: of the whole config, the target, versions, environment, rates
        and all of this package's source files. "" for devices of this machine, and for configs that name files."""
        from bytescope.memory.compare.jobs import Jobs
        from bytescope.memory.seconds import rates
        from bytescope.train.plan.config_factory import FACTORY, names_files
        from bytescope.train.program import config_files

        devices = self.devices(target)
        if not devices.is_described:
            return ""
        resolved = config_files.load_flat(self.name, self.overrides)
        if names_files(resolved):
            return ""
        sources = row_cache.digest_files(row_cache.source_files(_SOURCES))
        place = Path(row_cache.__file__).parents[2]  # a report shows the paths of source files
        given = [str(place), self.name, self.overrides, *more, rates.digest()]
        jobs = Jobs(FACTORY, more_sources=f"{sources} {given}")
        return f"{jobs.name(resolved, devices.name)}-report"

    def ways_to_fit(self, report: ReportRecord, target: str) -> Sequence[Any]:
        """Returns the savings that the config does not use, and the call of bytescope fit."""
        from rich.text import Text

        from bytescope.memory.view.text_layout import CopyCommand, Prose
        from bytescope.train.plan import advice

        parts: list[Any] = [Prose(line) for line in advice.lines(report, advice.open_levers(report), [])]
        if command := advice.fit_command(self.name, target, self.overrides, report):
            title = Text("find the fastest configuration that fits, by compiling:", style="bold")
            parts += [title, CopyCommand(command)]
        return parts

    # ---- its variants ----

    def factory(self, target: str) -> ProgramFactory:
        """Returns what builds the steps of configs. It starts no jax: worker processes compile."""
        from bytescope.train.plan.config_factory import FACTORY

        return FACTORY

    def fixed(self) -> dict[str, Any]:
        """Returns the name of the config under the key `config`, and the keys of the command line: dotted key ->
        text."""
        return {**({grids.CONFIG: self.name} if self.name else {}), **dict(self.overrides)}

    def given(self) -> str:
        """Returns the keys as flags --config.KEY=VALUE."""
        return given_flags(self.overrides)

    def policies(self, text: str) -> list[tuple[str, list[str]]]:
        """Returns the key of the remat policy, and the policies of the text. Raises ReportError if one is empty."""
        policies = grids.split_values(text)
        if not all(policies):
            raise ReportError(f"--remat={text} has an empty policy: write --remat=P1,P2, such as --remat=none,full")
        return [(POLICY, policies)]


def _complete(program: Program, target: Target, report: ReportRecord, jaxpr: Any) -> ReportRecord:
    """Adds remedies in the config's keys, the host memory of a run, and findings about its checkpoints to a report."""
    from bytescope.memory.findings.host_findings import with_host_memory
    from bytescope.train.plan.report_remedies import with_remedies
    from bytescope.train.plan.run_memory import checkpoint_findings, run_host_memory

    report = with_remedies(report)
    if jaxpr is None:
        return report
    report = with_host_memory(report, run_host_memory(program, report, target, jaxpr))
    return dataclasses.replace(report, findings=(*report.findings, *checkpoint_findings(program, target)))


def _run_programs(program: Program) -> RunPrograms:
    from bytescope.memory.compare.prepared_program import RunPrograms
    from bytescope.train.plan import run_memory

    others = run_memory.other_programs(program)
    return RunPrograms(run_memory.peaks(program, others), lambda report: run_memory.run_calls(report, others))
