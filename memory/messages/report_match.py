"""Compares a failed allocation with the memory report of a program: is it this program, and what was predicted?"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.records.report_record import Buffer, ReportRecord
from bytescope.memory.units import human

# The part of the run that failed -> the sentence that the text and the page show.
SUBJECTS: Mapping[str, str] = {
    "step": "The program of the report failed.",
    "initialization": "Another program failed, an initialization by its name: {names}.",
    "evaluation": "Another program failed, an evaluation or generation by its name: {names}.",
    "other_program": "Another program failed: {names}.",
    "fragmentation": "The step did not fail for its size: the memory was fragmented.",
    "other_process": "The step did not fail for its size: the pool was smaller than the report's.",
    "outside_pool": "The step did not fail for its size: memory outside the pool was missing.",
    "host_memory": "The step did not fail for its size: memory of the computer was missing.",
    "other_arrays": "The step alone fits. Other arrays, another process or fragmentation take the rest of the memory.",
    "unknown": "The log does not show whether the program of the report failed.",
}
# Relative difference up to which a size in the log is that of the report. Sizes in the log have two decimals, and
# another version of the compiler places buffers differently.
_SAME = 0.02
_PROGRAM = re.compile(r"^(?:p?jit|pmap|xla_call)\(([^()]{1,200})\)")
_BY_NAME = (
    ("initialization", re.compile(r"init|create|load|restore|convert", re.I)),
    ("evaluation", re.compile(r"eval|valid|test|predict|sampl|generat|decode|infer", re.I)),
)
# Causes of failures for which the size of the program does not matter.
NOT_THE_SIZE = ("fragmentation", "other_process", "outside_pool", "host_memory")


@dataclasses.dataclass(frozen=True)
class MatchedBuffer:
    """A buffer that is in the log and in the report.

    Fields:
        shape: dtype and dimensions. bytes: bytes of one buffer in the report. count: number of them at the peak.
        category: row of the report's breakdown. module: named scopes around it. source: its line of code. The last two
            are "" if unknown.
    """

    shape: str
    bytes: int
    count: int
    category: str
    module: str
    source: str


@dataclasses.dataclass(frozen=True)
class ReportMatch:
    """A failed allocation compared with a report.

    Fields:
        title: name of the report's program.
        predicted_bytes: bytes that the report predicts for one device. limit_bytes: bytes available there, None if
            unknown.
        subject: what failed, a key of `SUBJECTS`. sentence: the same in words, with the evidence.
        rows: (name, bytes in the report, bytes in the log) of the figures that both have.
        buffers: the listed buffers that are in the report too.
    """

    title: str
    predicted_bytes: int
    limit_bytes: int | None
    subject: str
    sentence: str
    rows: tuple[tuple[str, int, int], ...] = ()
    buffers: tuple[MatchedBuffer, ...] = ()


def match_report(
    report: ReportRecord, form: str, cause: str, figures: Mapping[str, int | None], culprits: Sequence[Culprit]
) -> ReportMatch:
    """Compares a failed allocation with a report.

    form, cause: form and cause of the explained message. figures: name -> bytes of its figures, also "requested",
    "limit" and "total". culprits: its buffers.
    """
    predicted = {
        "temporary memory" if "temp" in figures else "temporary memory; the request": (
            report.xla.temp_bytes,
            figures.get("temp", figures.get("requested")),
        ),
        "arguments": (report.xla.argument_bytes, figures.get("parameters", figures.get("arguments"))),
        "results": (report.xla.output_bytes, figures.get("outputs")),
        "limit": (report.limit_bytes, None if form.startswith("remat") else figures.get("limit")),
    }
    rows = [(name, own, logged) for name, (own, logged) in predicted.items() if own and logged]
    buffers = tuple(found for culprit in culprits if (found := _in_report(culprit, report)))
    subject, evidence, names = _decide(report, cause, figures, culprits, buffers)
    sentence = " ".join(filter(None, (SUBJECTS[subject].format(names=names), evidence)))
    if form == "remat" and report.xla.argument_bytes is not None and figures.get("total"):
        need = (figures["total"] or 0) + report.xla.argument_bytes - (report.xla.alias_bytes or 0)
        sentence += f" With the report's arguments, the warning means a need of {human(need)} on the device."
    return ReportMatch(
        report.title, report.predicted_bytes, report.limit_bytes, subject, sentence, tuple(rows), buffers
    )


def _decide(
    report: ReportRecord,
    cause: str,
    figures: Mapping[str, int | None],
    culprits: Sequence[Culprit],
    buffers: Sequence[MatchedBuffer],
) -> tuple[str, str, str]:
    """Returns (key of `SUBJECTS`, evidence, names of the failed programs)."""
    if cause in NOT_THE_SIZE:
        return cause, "", ""
    requested, temp = figures.get("requested"), report.xla.temp_bytes
    if requested and temp and abs(requested - temp) <= _SAME * temp:
        return "step", f"The request of {human(requested)} is its temporary memory.", ""
    own = report.program.removeprefix("jit_")
    programs = {match[1] for culprit in culprits if (match := _PROGRAM.match(culprit.op_name))}
    names = ", ".join(sorted(programs)[:3])
    if own and own in programs:
        return "step", "The listed buffers have its name.", names
    shaped = [culprit for culprit in culprits if culprit.shape]
    if shaped and 2 * len(buffers) >= len(shaped):
        return "step", f"{len(buffers)} of the {len(shaped)} listed shapes are in its peak.", names
    if programs:
        for subject, words in _BY_NAME:
            if all(words.search(name) for name in programs):
                return subject, "", names
        return "other_program", "", names
    if report.fits is False:
        return "step", "It does not fit, as predicted.", ""
    if requested and report.fits and report.limit_bytes:
        if temp and requested > (1 + _SAME) * temp:
            return "unknown", f"The request is larger than all temporary memory of the program, {human(temp)}.", ""
        return "other_arrays", f"{human(report.predicted_bytes)} of {human(report.limit_bytes)} are predicted.", ""
    return "unknown", "", ""


def _in_report(culprit: Culprit, report: ReportRecord) -> MatchedBuffer | None:
    """Returns the buffers at the report's peak that have the culprit's dtype and shape, as one record. Buffers of the
    same operation are preferred."""
    found = [buffer for buffer in report.buffers if buffer.at_peak and culprit.shape and _type(buffer) == culprit.shape]
    same = [buffer for buffer in found if culprit.op_name and buffer.op_name.endswith(culprit.operation)]
    chosen = same or found
    if not chosen:
        return None
    first = next((buffer for buffer in chosen if buffer.source), chosen[0])
    return MatchedBuffer(culprit.shape, first.bytes, len(chosen), first.category, first.module, first.source)


def _type(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"
