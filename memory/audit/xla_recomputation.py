"""Finds saved values that XLA's own rematerialization pass computes again, because the program exceeds XLA's limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from bytescope.memory.hlo.module import Instruction, Metadata
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.checkpoint_names import Names, named_places
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.records.xla_records import RecomputedValue

_MESSAGE = (
    "the policy of jax.checkpoint saves the value, but XLA computes it again, because the program exceeds the memory "
    "limit of XLA: use a policy that saves less, or reduce the batch"
)


def with_xla_recomputation(
    report: JudgedProgram, program: PlacedProgram, rows: Sequence[AuditRow]
) -> Iterator[AuditRow]:
    """Yields the rows of an audit. The row of a checkpoint name that a policy saves is replaced if XLA's
    rematerialization pass computes a value with this name again.

    rows: the rows of the audit. report.xla_recomputed: the values that XLA computes again; the rows are unchanged if
    there are none.
    """
    saved = {row.subject for row in rows if row.kind == "name" and row.asked == "save"}
    again: dict[str, list[RecomputedValue]] = defaultdict(list)
    if saved and report.xla_recomputed and program.jaxpr is not None:
        names = Names((), named_places(program.jaxpr))
        by_name = {instruction.name: instruction for instruction in program.module.instructions.values()}
        for value in report.xla_recomputed:
            if value.name in by_name:
                again[names.find(_metadata_of(program, by_name[value.name]))].append(value)
    for row in rows:
        if row.kind != "name" or row.asked != "save" or row.subject not in again:
            yield row
            continue
        values = again[row.subject]
        yield AuditRow(
            "name",
            row.subject,
            row.source,
            "save",
            "recomputed",
            sum(value.bytes for value in values),
            sum(value.flops for value in values),
            "rematerialization",
            _MESSAGE,
            len(values),
        )


def _metadata_of(program: PlacedProgram, instruction: Instruction) -> list[Metadata]:
    """The metadata of an instruction, and of the instructions inside of it if it is a fusion, the last one first."""
    module = program.module
    found = [module.metadata(instruction)]
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.called[0]].instructions
        found += [module.metadata(module.instructions[id]) for id in reversed(inside)]
    return found
