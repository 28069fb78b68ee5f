"""Compiles a program with the remedies of its findings, and adds to each finding what its remedy frees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.units import human


def try_remedies(
    report: ReportRecord,
    compile_with: Callable[[Finding], ReportRecord | None],
    tell: Callable[[str], None] = lambda line: None,
) -> ReportRecord:
    """Returns the report with the allocated bytes and the predicted seconds of the program under each remedy that is a
    set of flags or of compiler options. Equal remedies are compiled once.

    compile_with: compiles the program with the remedy of a finding and returns its report; None if it cannot run. tell:
    called with a line of text before each compile.
    """
    compiled: dict[str, ReportRecord | None] = {}
    findings = []
    for finding in report.findings:
        remedy = finding.flags or finding.options
        if remedy and remedy not in compiled:
            tell(f"compiling with {remedy}")
            compiled[remedy] = compile_with(finding)
        tried = compiled.get(remedy)
        if tried is not None:
            seconds = tried.prediction.get("seconds")
            finding = dataclasses.replace(finding, tried_bytes=tried.allocated_bytes, tried_seconds=seconds)
        findings.append(finding)
    return dataclasses.replace(report, findings=tuple(findings))


def tried_text(report: ReportRecord, finding: Finding) -> str:
    """Returns a sentence such as "compiled with this: 3.27 GiB allocated instead of 5.25 GiB, 1.98 GiB less"; "" if the
    remedy was not compiled."""
    if finding.tried_bytes is None:
        return ""
    change = finding.tried_bytes - report.allocated_bytes
    sign = "less" if change <= 0 else "more"
    words = (
        f"compiled with this: {human(finding.tried_bytes)} allocated instead of {human(report.allocated_bytes)}, "
        f"{human(abs(change))} {sign}"
    )
    seconds = report.prediction.get("seconds")
    if finding.tried_seconds and seconds:
        words += f"; an update takes {finding.tried_seconds:.4g} s instead of {seconds:.4g} s, predicted"
    return words


def options_of(finding: Finding) -> dict[str, str]:
    """Returns the compiler options of a finding's remedy, name -> value."""
    pairs = (option.partition("=") for option in finding.options.split())
    return {name: value for name, _, value in pairs}
