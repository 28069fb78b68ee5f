"""Compiles a program with the remedies of its findings, and records in each finding the bytes with its remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.units import human


def try_remedies(
    report: ReportRecord,
    compile_with: Callable[[Finding], ReportRecord | None],
    show: Callable[[str], None] = lambda line: None,
) -> ReportRecord:
    """Compiles the program with each remedy that consists of flags or compiler options. Returns the report in which
    these findings contain the allocated bytes and the predicted seconds of the program with their remedy.

    compile_with: function that compiles the program with the remedy of a finding and returns its report; None if the
    program cannot be compiled with it. A remedy that several findings share is compiled once.
    show: function that shows the user a line of text; called before each compile.
    """
    compiled: dict[str, ReportRecord | None] = {}
    findings = []
    for finding in report.findings:
        remedy = finding.flags or finding.options
        if remedy and remedy not in compiled:
            show(f"compiling with {remedy}")
            compiled[remedy] = compile_with(finding)
        tried = compiled.get(remedy)
        if tried is not None:
            seconds = tried.prediction.get("seconds")
            finding = dataclasses.replace(finding, tried_bytes=tried.allocated_bytes, tried_seconds=seconds)
        findings.append(finding)
    return dataclasses.replace(report, findings=tuple(findings))


def tried_text(report: ReportRecord, finding: Finding) -> str:
    """Returns what the remedy of a finding changes, such as "compiled with this: 3.27 GiB allocated instead of 5.25
    GiB, 1.98 GiB less"; "" if the program was not compiled with the remedy."""
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
    """Returns name -> value of the compiler options in the remedy of a finding."""
    pairs = (option.partition("=") for option in finding.options.split())
    return {name: value for name, _, value in pairs}
