"""The facts of programs and configs, for tests that make reports by hand or with `report_of`."""

import dataclasses

from bytescope.memory.findings import finding_rules
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.module import Module
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.train.plan.config_factory import settle
from bytescope.train.plan.config_facts import model_facts
from bytescope.train.plan.report_remedies import with_remedies
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import Program

NOTHING = PlacedProgram(HloProgram(Module()))


def facts_of(program: Program, platform: str = "cpu", **changes) -> ModelFacts:
    """The facts of a program of the trainer's; `changes`: of how it settled its config."""
    return model_facts(flatten(program.config), {**settle(program), **changes}, platform=platform)


def facts_in(report: ReportRecord) -> ModelFacts:
    """The facts of the config in a report."""
    target = report.target
    return model_facts(report.config, platform=target.get("platform", ""), devices=target.get("n_devices", 1))


def findings_of(report: ReportRecord, program: PlacedProgram = NOTHING) -> tuple[Finding, ...]:
    """The findings of a report on one of the trainer's configs, with the flags of their remedies."""
    found = finding_rules.find(report, dataclasses.replace(program, facts=facts_in(report)))
    return with_remedies(dataclasses.replace(report, findings=found)).findings


def finding(report: ReportRecord, kind: str, program: PlacedProgram = NOTHING) -> Finding | None:
    """The finding of a kind in `findings_of`, None for none."""
    return next((found for found in findings_of(report, program) if found.kind == kind), None)
