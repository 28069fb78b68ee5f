"""Finds values that a remat policy saves but that XLA's own rematerialization pass recomputes, because the program
needs more memory than the limit that XLA compiles for."""

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
    "the policy of jax.checkpoint saves the value, but XLA recomputes the value, because the program exceeds XLA's "
    "memory limit: use a policy that saves fewer values, or reduce the batch size"
)


def with_xla_recomputation(
    report: JudgedProgram, program: PlacedProgram, rows: Sequence[AuditRow]
) -> Iterator[AuditRow]:
    """Yields all rows of an audit. If a remat policy saves a checkpoint name but XLA's rematerialization pass
    recomputes a value with this name, the row of the name is replaced by a row with `done` = "recomputed".

    Args:
        report: the report of the compiled step; `xla_recomputed` lists the values that XLA recomputes.
        program: the compiled step with its jaxpr. Without a jaxpr, all rows are unchanged.
        rows: the rows of all audits.
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
    """Returns a list with the metadata of an instruction. For a fusion, the list goes on with the metadata of the
    instructions inside the fusion, from the last to the first."""
    module = program.module
    found = [module.metadata(instruction)]
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.called[0]].instructions
        found += [module.metadata(module.instructions[id]) for id in reversed(inside)]
    return found
