"""Names the XLA compiler pass that undid a recomputation or an offload, from dumps of the HLO module after each pass.

XLA writes a dump for each pass that changes the module. The file name contains number, pipeline and pass, such as
`module_0001.jit_step.0012.simplification.after_cse.before_dce.hlo.pb`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bytescope.memory.audit.checkpoint_requests import KERNELS
from bytescope.memory.cost import host_transfers
from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import buffers, dumps, scopes
from bytescope.memory.hlo.module import Module
from bytescope.memory.records.audit_record import AuditRow

_DUMP = re.compile(r"module_(\d+)\..*\.(\d{4,})\.([^.]+)\.after_([^.]+?)(?:\.before_[^.]+)?\.hlo\.pb(?:\.gz)?$")


class PassDump(NamedTuple):
    """The dump of the HLO module after one compiler pass.

    Fields:
        number: position of the pass in the order in which XLA runs the passes.
        pipeline: name of the pass pipeline that the pass belongs to, such as "simplification".
        name: name of the pass, such as "cse".
        path: the file with the module as HloProto.
    """

    number: int
    pipeline: str
    name: str
    path: Path


def list_passes(folder: Path) -> list[PassDump]:
    """Returns the pass dumps of one module in a folder, in the order in which XLA ran the passes; [] if the folder
    has none. If the folder has dumps of several modules, the module with the most bytes of dumps is chosen."""
    modules: dict[str, list[PassDump]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for path in folder.iterdir():
        match = _DUMP.match(path.name)
        if match:
            modules[match[1]].append(PassDump(int(match[2]), match[3], match[4], path))
            sizes[match[1]] += path.stat().st_size
    return sorted(modules[max(sizes, key=lambda module: sizes[module])]) if sizes else []


def with_passes(rows: Iterable[AuditRow], folder: Path) -> tuple[AuditRow, ...]:
    """Returns the rows of an audit with the field `compiler_pass` filled in. For a recomputation that XLA merged with
    the forward pass, and for a move to host memory that XLA removed, this field names the compiler pass that did so.
    All other rows are unchanged.

    Args:
        rows: the rows of the audit.
        folder: the folder with the pass dumps that XLA wrote while it compiled the program (see `compiler.pass_dumps`).

    Raises ReportError if a dump is damaged.
    """
    history = list_passes(folder)
    return tuple(_with_pass(row, history) for row in rows)


def _with_pass(row: AuditRow, history: Sequence[PassDump]) -> AuditRow:
    if row.honored is not False or not row.source:
        return row
    if row.kind == "checkpoint" and row.undone_by == "cse":
        found = undoing_pass(history, lambda module: _computations(module, row.source))
    elif row.kind == "offload" and row.undone_by == "offloader":
        found = undoing_pass(history, _moves)
    else:
        return row
    return dataclasses.replace(row, compiler_pass=found) if found else row


def undoing_pass(history: Sequence[PassDump], count: Callable[[Module], int]) -> str:
    """Returns the compiler pass that removed the most of the instructions that `count` counts, as "pipeline/pass" such
    as "simplification/cse". If a pass ran several times, the instructions that it removed are added up. Returns "" if
    no pass removed any.

    Args:
        history: the pass dumps in the order in which XLA ran the passes.
        count: function from a module to the number of instructions that are of interest, such as moves to host memory.
    """
    removed: Counter[str] = Counter()
    before = None
    for dump in history:
        now = count(_read(dump.path))
        if before is not None and now < before:
            removed[f"{dump.pipeline}/{dump.name}"] += before - now
        before = now
    return removed.most_common(1)[0][0] if removed else ""


def _read(path: Path) -> Module:
    try:
        return buffers.read(dumps.unpacked(path.read_bytes(), path.name)).module
    except ValueError as error:
        raise ReportError(f"the dump {path.name} of a compiler pass is damaged: {error}") from error


def _computations(module: Module, source: str) -> int:
    """Returns the number of kernels, such as matrix products, that the jax.checkpoint calls in one source line have in
    the forward pass and the recomputation together; if they have no kernels, returns the number of all their
    instructions. The number falls when a compiler pass merges the two. `source`: "file.py:line" of the calls."""
    kernels, others = 0, 0
    for operation in _operations_at(module, source):
        kernels += operation in KERNELS
        others += 1
    return kernels or others


def _operations_at(module: Module, source: str) -> Iterator[str]:
    for instruction in module.instructions.values():
        if instruction.opcode in ("parameter", "constant", "tuple", "get-tuple-element", "fusion"):
            continue
        metadata = module.metadata(instruction)
        scope = scopes.parse(metadata.op_name)
        if scope.phase not in ("forward", "recompute"):
            continue
        if any(f"{frame.file}:{frame.line}" == source for frame in metadata.frames):
            yield scope.operation


def _moves(module: Module) -> int:
    """Returns the number of moves of values to host memory in a module, in each form that XLA uses: annotations,
    custom calls and copies. The moves of all source lines are counted, because XLA drops the source lines of moves
    in an early pass."""
    instructions = module.instructions.values()
    placed = sum(instruction.target == "annotate_device_placement" for instruction in instructions)
    to_host = sum(instruction.target == "MoveToHost" for instruction in instructions)
    copied = sum(
        direction == "to host"
        for instruction in instructions
        for direction, _, _ in host_transfers.moved(module, instruction)
    )
    return placed // 2 + to_host + copied  # annotations also mark the move back
