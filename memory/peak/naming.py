"""What the names that JAX wrote, and the lines of the source, say of the values of a program.

Few values carry a name that says what they are: compilers add copies, loops name their stacks for the loop, libraries
open no scopes. A value without one has the name of its makers, of what it is copied or computed from, or of its
readers; an operation without scopes that of the functions it was called through. `label` is what a report's sums call
the buffers of one kind, and `folded` tells how many modules such a name stands for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from bytescope.memory.hlo import scopes, sources
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Frame, Instruction, Metadata, Module
from bytescope.memory.hlo.scopes import NOISE, Scope, locate, parse
from bytescope.memory.hlo.shapes import Index
from bytescope.memory.peak.checkpoint_names import MARK
from bytescope.memory.records.report_record import Buffer

# What says how a value was kept, not what it is; and what only says how a loop reads and writes its stacks.
_BOOKKEEPING = NOISE | {"reduce_precision"}
_STACKING = ("jit(dynamic_update_index_in_dim)", "jit(dynamic_index_in_dim)")
# Operations that take a part of their operand, or bring its parts together.
_TAKING = frozenset(("dynamic-slice", "slice", "all-gather", "all-gather-start", "all-gather-done"))
# Operations whose result is their operand.
_MOVING = frozenset(("copy", "bitcast", "opt-barrier", "copy-done"))
# Values that stand for nothing of their own until something is written into them or made of them.
_FILLERS = frozenset(("broadcast", "constant", "iota", "partition-id", "replica-id", "rng-bit-generator"))

_NUMBERED = re.compile(r"\d$")
# Words of transformations that are operations too.
_OPERATIONS = frozenset(("transpose", ""))


class Naming:
    """Looks up scopes and lines in one module; what is found is remembered."""

    def __init__(self, module: Module, flow: Flow):
        self.module, self.flow = module, flow
        self._scopes: dict[int, Scope] = {}
        self._found: dict[tuple[int, Index], tuple[Instruction | None, Metadata, Scope]] = {}
        self._code: dict[int, tuple[str, tuple[str, ...]]] = {}

    def scope(self, instruction: Instruction) -> Scope:
        """The scope of an instruction by its op_name; what that does not tell, by the code it was written in."""
        if instruction.id not in self._scopes:
            metadata = self.module.metadata(instruction)
            scope = parse(metadata.op_name)
            if metadata.op_name and all(map(scopes.is_layer, map(scopes.plain, scope.path))):
                scope = self._by_code(scope, metadata)
            elif scope.path and all(word.startswith(scopes.EQUINOX) for word in scope.path):  # not the user's modules
                scope = dataclasses.replace(scope, path=self._by_code(scope, metadata).path)
            self._scopes[instruction.id] = scope
        return self._scopes[instruction.id]

    def _by_code(self, scope: Scope, metadata: Metadata) -> Scope:
        """A scope without a module, with the component and the modules of the frames it was called through."""
        key = id(metadata.frames)  # of one module's table, where a chain of frames is one object
        if key not in self._code:
            name = sources.component_of_code(metadata.frames) or scope.component
            line = sources.source_line(metadata).rpartition("/")[2]
            self._code[key] = name or line, sources.modules_of_code(metadata.frames)
        name, modules = self._code[key]
        return dataclasses.replace(scope, component=name, path=modules or scope.path)

    def best(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """The instruction whose name says best what a value is, with its metadata and scope; None for none.

        The nearest maker that names a part of the model; a loop's own bookkeeping only when nothing else
        does; when no maker is named, what the value is copied or computed from, and what reads it. A copy that a
        loop or the compiler makes outside of a known component has the scopes and the line of what it copies.
        """
        key = instruction.id, index
        if key not in self._found:
            self._found[key] = self._find(instruction, index)
        return self._found[key]

    def _find(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        rank, named = self._nearest(self.flow.makers(instruction, index))
        if rank and (filled := self._filled(instruction, index)):
            rank, named = 0, filled
        if named is None:
            named = self._nearest(self._near(instruction, index), first=True)[1]
        if named is None:
            return None, Metadata(), Scope()
        metadata, scope = self.module.metadata(named), self.scope(named)
        if rank and scope.component not in scopes.KNOWN and (copied := self._copied(instruction, index)):
            frames, other = self.module.metadata(copied).frames, self.scope(copied)
            scope = dataclasses.replace(scope, path=other.path, component=other.component)
            return named, dataclasses.replace(metadata, frames=frames or metadata.frames), scope
        if not sources.source_line(metadata):
            metadata = dataclasses.replace(metadata, frames=self._frames(instruction, index))
        if not scope.component:
            scope = self._by_code(scope, metadata)
        return named, metadata, scope

    def _nearest(self, candidates: Iterable[Instruction], first: bool = False) -> tuple[int, Instruction | None]:
        """The first candidate that JAX named for what it is (rank 0), else for control flow (1), else for the stacks
        of a loop (2); (3, None) for none. `first`: the first at all."""
        best: tuple[int, Instruction | None] = 3, None
        for candidate in candidates:
            op_name = self.module.metadata(candidate).op_name
            if candidate.opcode == "parameter" or not scopes.is_operation(op_name):
                continue
            rank = 0
            if any(mark in op_name for mark in _STACKING):
                rank = 2
            elif self.scope(candidate).operation in _BOOKKEEPING:
                rank = 1
            if rank < best[0]:
                best = rank, candidate
            if first or not rank:
                break
        return best

    def _copied(self, instruction: Instruction, index: Index) -> Instruction | None:
        """What is named best of the value that another is a part, or the gathered whole, of; None where it is not."""
        made = self.flow.origin(instruction, index).instruction
        for _ in range(4):
            if made is None or made.opcode not in _TAKING:
                return None
            operand = self.module.operand(made, 0)
            if operand is None:
                return None
            rank, named = self._nearest(self.flow.makers(operand))
            if not rank:
                return named
            made = self.flow.origin(operand).instruction
        return None

    def _filled(self, instruction: Instruction, index: Index) -> Instruction | None:
        """What is named best of the values that a loop writes over one that it starts with, such as zeros."""
        made = self.flow.origin(instruction, index).instruction
        if made is None or made.opcode not in _FILLERS:
            return None
        pending = [(instruction, index)]
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < 40:
            value, at = pending.pop(0)
            if (value.id, at) in seen:
                continue
            seen.add((value.id, at))
            for user in self.flow.users.get(value.id, ()):
                if user.opcode == "while":
                    rank, named = self._nearest(self.flow.makers(user, at))
                    if not rank:
                        return named
                elif user.opcode == "tuple":
                    pending += [(user, (i, *at)) for i, operand in enumerate(user.operands) if operand == value.id]
                elif user.opcode in _MOVING:
                    pending.append((user, at))
        return None

    def _frames(self, instruction: Instruction, index: Index) -> tuple[Frame, ...]:
        """The nearest frames with a line, for a value whose name has none: of makers, of what it is made from, of
        readers."""
        near = (*self.flow.makers(instruction, index), *self._near(instruction, index))
        found = (metadata.frames for metadata in map(self.module.metadata, near) if sources.source_line(metadata))
        return next(found, ())

    def _near(self, instruction: Instruction, index: Index) -> Iterator[Instruction]:
        """What a value that the compiler added belongs to: what it copies, then its readers, then the loop around it.

        What is only filled with one value belongs to its readers first.
        """
        made = self.flow.origin(instruction, index).instruction or instruction
        sides = [self.flow.ancestors(made), self.flow.readers(instruction)]
        for side in reversed(sides) if made.opcode in _FILLERS else sides:
            yield from side
        yield from self.flow.callers.get(instruction.computation, ())


def label(buffer: Buffer, modules: int = 1) -> str:
    """The key of a residual in `residuals_by_name`, of all else in `workspace_by_scope`.

    `modules`: how many of a kind the component is, told behind it where it is more than one.
    """
    component = f"{buffer.component} x {modules}" if modules > 1 else buffer.component
    if buffer.category != "residuals":
        return f"{buffer.phase}/{component}"
    return buffer.checkpoint_name or f"({component}/{_operation(buffer)})"


def _operation(buffer: Buffer) -> str:
    """The operation that made a residual; what a loop or a block hands on is its carry."""
    operation = parse(buffer.op_name.removesuffix(f"/{MARK}")).operation
    return "carry" if operation in NOISE - _OPERATIONS else operation


def folded(buffers: Iterable[Buffer]) -> dict[str, str]:
    """Key -> the key with the number of modules it stands for, "backward/CausalAttn x 6", where there are several.

    `Attention_0` of six blocks, or `attn_0` to `attn_5`, are six of a kind: the buffers at the peak tell them apart by
    their module paths, up to the scope that names the component. Paths without numbers, such as those of classes, do
    not tell how many there are.
    """
    modules: dict[str, set[tuple[str, ...]]] = {}
    examples: dict[str, Buffer] = {}
    for buffer in buffers:
        if not buffer.at_peak or buffer.memory != "device" or buffer.category not in ("residuals", "workspace"):
            continue
        path = tuple(buffer.module.split("/"))
        component, depth = locate(path)
        if component == buffer.component and not buffer.checkpoint_name:
            modules.setdefault(label(buffer), set()).add(path[:depth])
            examples[label(buffer)] = buffer
    return {
        key: label(examples[key], len(found))
        for key, found in modules.items()
        if len(found) > 1 and any(_NUMBERED.search(word) for path in found for word in path)
    }
