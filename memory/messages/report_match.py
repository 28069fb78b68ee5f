"""Compares a failed allocation with the memory report of a program: did this program fail, and what was predicted?"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.messages.message_record import ArrayType
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human, plural

# What failed -> the sentence that the user reads.
SUBJECTS: Mapping[str, str] = {
    "step": "The program of the report failed.",
    "other_program": "Another program failed: {names}.",
    "fragmentation": "The size of the step is not the cause: the memory was fragmented.",
    "other_process": "The size of the step is not the cause: the pool was smaller than the report assumes.",
    "outside_pool": "The size of the step is not the cause: too little memory was left outside the pool.",
    "host_memory": "The size of the step is not the cause: the computer had too little host memory.",
    "other_arrays": "The step alone fits. Other arrays, another process or fragmentation take the rest of the memory.",
    "unknown": "The log does not show whether the program of the report failed.",
}
# A size in the log and a size in the report are equal up to this relative difference. Sizes in the log have two
# decimals, and another version of the compiler places buffers differently.
_SAME = 0.02
_PROGRAM = re.compile(r"^(?:p?jit|pmap|xla_call)\(([^()]{1,200})\)")
# Causes of failures for which the size of the program does not matter.
NOT_THE_SIZE = ("fragmentation", "other_process", "outside_pool", "host_memory")


@dataclasses.dataclass(frozen=True)
class MatchedBuffer:
    """Buffers of the report that have the dtype and shape of a buffer in the log.

    Fields:
        shape: dtype and dimensions, such as "float32[8,1024]".
        bytes: size of one buffer in the report.
        count: number of these buffers that are alive at the program's peak.
        category: row of the report's breakdown to which the buffers belong, such as "residuals".
        module: named scopes of the operation that creates the buffers; "" if unknown.
        source: file and line of this operation, such as "model.py:12"; "" if unknown.
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
        predicted_bytes: bytes that the report predicts for one device.
        limit_bytes: bytes that are available on the device according to the report; None if unknown.
        subject: what failed, a key of `SUBJECTS`, such as "step" or "other_program".
        sentence: what failed, as a sentence with the evidence.
        rows: (name, bytes in the report, bytes in the log) for each size that both contain.
        buffers: buffers of the report that have the dtype and shape of a buffer in the log.
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
    """Compares a failed allocation in a log with the memory report of a program. Returns what failed and the sizes and
    buffers that both contain.

    form: the form of the explained message, such as "gpu_request" (`message_forms.FORMS`).
    cause: the cause of the failure, a key of `causes.CAUSES`.
    figures: name -> bytes of the sizes in the log, such as "requested", "limit", "total" and "temp".
    culprits: the buffers that the message lists.
    """
    predicted = {
        "temporary memory" if "temp" in figures else "temporary memory (log: the request)": (
            report.xla.temp_bytes,
            figures.get("temp", figures.get("requested")),
        ),
        "arguments": (report.xla.argument_bytes, figures.get("parameters", figures.get("arguments"))),
        "results": (report.xla.output_bytes, figures.get("outputs")),
        "limit": (report.limit_bytes, None if form.startswith("remat") else figures.get("limit")),
    }
    rows = [(name, own, logged) for name, (own, logged) in predicted.items() if own and logged]
    buffers = tuple(found for culprit in culprits if (found := _in_report(culprit, report)))
    subject, evidence, names = _find_subject(report, cause, figures, culprits, buffers)
    sentence = " ".join(filter(None, (SUBJECTS[subject].format(names=names), evidence)))
    if form == "remat" and report.xla.argument_bytes is not None and figures.get("total"):
        need = (figures["total"] or 0) + report.xla.argument_bytes - (report.xla.alias_bytes or 0)
        sentence += (
            f" Together with the arguments in the report, the warning means that the program needs {human(need)}."
        )
    return ReportMatch(
        report.title, report.predicted_bytes, report.limit_bytes, subject, sentence, tuple(rows), buffers
    )


def _find_subject(
    report: ReportRecord,
    cause: str,
    figures: Mapping[str, int | None],
    culprits: Sequence[Culprit],
    buffers: Sequence[MatchedBuffer],
) -> tuple[str, str, str]:
    """Decides what failed. Returns (a key of `SUBJECTS`, such as "step"; the evidence as a sentence, "" if there is
    none; the names of the programs that created the listed buffers, "" if unknown). The arguments are those of
    `match_report`; `buffers` are the report's buffers that match a buffer in the log."""
    if cause in NOT_THE_SIZE:
        return cause, "", ""
    requested, temp = figures.get("requested"), report.xla.temp_bytes
    if requested and temp and abs(requested - temp) <= _SAME * temp:
        return "step", f"The request of {human(requested)} is the temporary memory of the program.", ""
    own = report.program.removeprefix("jit_")
    programs = {match[1] for culprit in culprits if (match := _PROGRAM.match(culprit.op_name))}
    names = ", ".join(sorted(programs)[:3])
    if own and own in programs:
        return "step", "The listed buffers belong to a program of this name.", names
    shaped = [culprit for culprit in culprits if culprit.shape]
    if shaped and 2 * len(buffers) >= len(shaped):
        count = f"{len(buffers)} of the {plural(len(shaped), 'shape')} in the log"
        return "step", f"{count} are in memory at the peak of the report's program.", names
    if programs:
        return "other_program", "", names
    if report.fits is False:
        return "step", "The report predicts that this program does not fit.", ""
    if requested and report.fits and report.limit_bytes:
        if temp and requested > (1 + _SAME) * temp:
            return (
                "unknown",
                f"The request is larger than the whole temporary memory of the program, {human(temp)}.",
                "",
            )
        return (
            "other_arrays",
            f"The report predicts {human(report.predicted_bytes)} of {human(report.limit_bytes)}.",
            "",
        )
    return "unknown", "", ""


def _in_report(culprit: Culprit, report: ReportRecord) -> MatchedBuffer | None:
    """Returns the report's buffers that are alive at the peak and have the dtype and shape of the listed buffer
    `culprit`, as one record; None if there are none. If some of the report's buffers come from the same operation as
    `culprit`, only these are counted."""
    alive = [buffer for buffer in report.buffers if buffer.at_peak and culprit.shape]
    found = [buffer for buffer in alive if str(ArrayType(buffer.dtype, buffer.shape)) == culprit.shape]
    same = [buffer for buffer in found if culprit.op_name and buffer.op_name.endswith(culprit.operation)]
    chosen = same or found
    if not chosen:
        return None
    first = next((buffer for buffer in chosen if buffer.source), chosen[0])
    return MatchedBuffer(culprit.shape, first.bytes, len(chosen), first.category, first.module, first.source)
