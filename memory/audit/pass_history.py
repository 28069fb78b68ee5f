"""Names the XLA compiler pass that undid a request of the program, from dumps of the HLO module after each pass.

XLA writes a dump for each pass that changes the module. The file name contains number, pipeline and pass, such as
`module_0001.jit_step.0012.simplification.after_cse.before_dce.hlo.pb`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bytescope.memory.audit.checkpoint_requests import KERNELS
from bytescope.memory.cost import host_transfers
from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import buffers, dumps, kernels
from bytescope.memory.hlo.dataflow import ALL_GATHERS
from bytescope.memory.hlo.module import Metadata, Module
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.records.audit_record import AuditRow

_DUMP = re.compile(r"module_(\d+)\..*\.(\d{4,})\.([^.]+)\.after_([^.]+?)(?:\.before_[^.]+)?\.hlo\.pb(?:\.gz)?$")
# Name of the dump that XLA writes before the first pass of a pipeline.
_START = "pipeline-start"


class PassDump(NamedTuple):
    """The dump of the HLO module after one compiler pass.

    Fields:
        number: number of the dump; dumps are numbered in the order in which XLA runs the passes.
        pipeline: name of the pass pipeline that the pass belongs to, such as "simplification".
        name: name of the pass, such as "cse".
        path: the dump, a file with the module after the pass as HloProto.
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


def with_passes(rows: Sequence[AuditRow], folder: Path) -> tuple[AuditRow, ...]:
    """Returns copies of the rows of an audit. Each row is something that the user's program asks for, such as a
    recomputation, a checkpoint name or a sharding. If the dumps show which compiler pass undid it, the field
    `compiler_pass` names this pass; otherwise the field is "".

    For a recomputation that XLA merged with the forward pass, it is the pass that removed most of the kernels of the
    recomputation. For an array that XLA replicated, it is the pass that added most of the all-gathers. If XLA keeps the
    values of a checkpoint name because it merged jax.checkpoint calls, the row names the pass that merged them,
    provided that one pass merged all of them. What jax undoes before XLA runs (in tracing, autodiff or lowering) has no
    pass.

    Args:
        rows: the rows of the audit.
        folder: the folder with the pass dumps that XLA wrote while it compiled the program (see `compiler.pass_dumps`).

    Raises ReportError if a dump is damaged.
    """
    counted = {at: found for at, row in enumerate(rows) if (found := _counted(row)) is not None}
    passes = dict(zip(counted, changing_passes(list_passes(folder), list(counted.values()))))
    merging = {passes[at] for at in passes if rows[at].kind == "checkpoint"}
    for at, row in enumerate(rows):
        if row.kind == "name" and row.honored is False and row.undone_by == "cse" and len(merging) == 1:
            passes[at] = next(iter(merging))
    return tuple(dataclasses.replace(row, compiler_pass=passes.get(at, "")) for at, row in enumerate(rows))


class _Counted(NamedTuple):
    """A kind of HLO instructions whose number in the module changes when XLA undoes a request of the program.

    Fields:
        count: function that returns the number of these instructions in a module.
        added: True if the number rises when XLA undoes the request, False if it falls.
    """

    count: Callable[[Module], int]
    added: bool = False


def _counted(row: AuditRow) -> _Counted | None:
    """Returns the kind of instructions whose number shows in which pass XLA undid a request. Returns None if the
    request was honored, if jax and not XLA undid it, or if no instructions show the pass."""
    if row.honored is not False:
        return None
    match row.kind, row.undone_by:
        case "checkpoint", "cse" if row.source:
            return _Counted(_RegionKernels(row.source))
        case "offload", "offloader":
            return _Counted(_moves)
        case "name", "rematerialization":
            return _Counted(_rematerialized, added=True)
        case "donation", "copies":
            return _Counted(_parameter_copies, added=True)
        case "sharding", "partitioner":
            return _Counted(_gathers, added=True)
    return None


def changing_passes(history: Sequence[PassDump], counted: Sequence[_Counted]) -> list[str]:
    """Returns, for each kind of instructions in `counted`, the compiler pass that removed the most of them, or that
    added the most of them if the field `added` of the kind is True. A pass is named as "pipeline/pass", such as
    "simplification/cse". If a pass ran several times, its changes are added up. Returns "" for a kind that no pass
    removed (or added).

    A pass may run a pipeline of its own. The first dump of this inner pipeline already shows changes that the outer
    pass has made. XLA dumps the outer pass after its inner pipeline ends, so these changes are credited to the first
    later dump whose pipeline began before the inner pipeline.

    Args:
        history: the pass dumps in the order in which XLA ran the passes. Each file is read once.
        counted: the kinds of instructions that are counted in each dump.
    """
    changes = [Counter[str]() for _ in counted]
    before: list[int] = []
    begun: set[str] = set()
    for at, dump in enumerate(history if counted else ()):
        module = _read(dump.path)
        now = [kind.count(module) for kind in counted]
        owner = dump
        if dump.name == _START and dump.pipeline not in begun:
            owner = next((other for other in history[at + 1 :] if other.pipeline in begun), dump)
        begun.add(dump.pipeline)
        for kind, changed, old, new in zip(counted, changes, before, now):
            difference = new - old if kind.added else old - new
            if difference > 0:
                changed[f"{owner.pipeline}/{owner.name}"] += difference
        before = now
    return [changed.most_common(1)[0][0] if changed else "" for changed in changes]


def _read(path: Path) -> Module:
    try:
        return buffers.read(dumps.unpacked(path.read_bytes(), path.name)).module
    except ValueError as error:
        raise ReportError(f"the dump {path.name} of a compiler pass is damaged: {error}") from error


class _RegionKernels:
    """Counts the kernels (matrix products, convolutions, custom calls) that the jax.checkpoint calls in one source line
    have in the forward pass and in the recomputation together. If the calls have no kernels, counts all their
    instructions. The number falls when a compiler pass merges a recomputed instruction with an equal one of the forward
    pass.

    Only instructions of the recomputation have the source line of the calls in their metadata. Therefore the first
    module that is counted is searched for the source lines of the recomputed instructions, and in all modules the
    instructions with these source lines are counted. When XLA merges two instructions, it may keep the metadata of
    either of them.

    source: "file.py:line" of the jax.checkpoint calls.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: set[str] = set()

    def __call__(self, module: Module) -> int:
        found = list(_computations(module))
        if not self._lines:
            for metadata, _ in found:
                if any(f"{frame.file}:{frame.line}" == self._source for frame in metadata.frames):
                    self._lines.add(source_line(metadata))
        operations = [operation for metadata, operation in found if source_line(metadata) in self._lines]
        return sum(operation in KERNELS for operation in operations) or len(operations)


def _computations(module: Module) -> Iterator[tuple[Metadata, str]]:
    """Yields (metadata, name of the jax primitive) for each instruction of the forward pass or of a recomputation,
    except parameters, constants, tuples, and calls of fusions."""
    for instruction in module.in_phase("forward", "recompute"):
        if instruction.opcode not in ("parameter", "constant", "tuple", "get-tuple-element", "fusion"):
            yield module.metadata(instruction), module.scope(instruction).operation


def _moves(module: Module) -> int:
    """Returns the number of instructions in a module that move a value to host memory. Such a move is first an
    annotation, then a custom call, and at the end a copy. The moves of all source lines are counted together, because
    XLA drops the source lines of moves in an early pass."""
    marks = Counter(call.target for call in module.of_opcode("custom-call"))
    copied = sum(
        direction == host_transfers.TO_HOST
        for instruction in module.of_opcode("copy-start", *host_transfers.CROSSING)
        for direction, _, _ in host_transfers.moved(module, instruction)
    )
    # Annotations also mark the move back.
    return marks[kernels.DEVICE_PLACEMENT] // 2 + marks[kernels.MOVE_TO_HOST] + copied


def _rematerialized(module: Module) -> int:
    """Returns the number of instructions that XLA's rematerialization pass has added to the module. Their names contain
    ".remat"."""
    return sum(".remat" in name for name in module.names)


def _parameter_copies(module: Module) -> int:
    """Returns the number of copy instructions in the entry computation that copy one of its parameters."""
    sources = [module.operand(each, 0) for each in module.inside(module.entry) if each.opcode == "copy"]
    return sum(source is not None and source.opcode == "parameter" for source in sources)


def _gathers(module: Module) -> int:
    return len(module.of_opcode(*ALL_GATHERS))
