"""Reads from JAX's names and from source lines what the values of a program are.

Few values carry a name that says what they are: compilers add copies, loops name their stacks after the loop, libraries
open no scopes. A value without a name takes that of its makers, of the values it is copied or computed from, or of its
readers. An operation without scopes takes the name of the functions it was called through. `label` is the key under
which a report sums the buffers of one kind, and `folded` adds the number of modules that such a key covers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from bytescope.memory.hlo import scopes, sources
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Frame, Instruction, Metadata, Module
from bytescope.memory.hlo.scopes import NOISE, Scope, locate, parse
from bytescope.memory.hlo.shapes import Index
from bytescope.memory.peak.checkpoint_names import MARK, Place
from bytescope.memory.records.report_record import Buffer

# Operations that say how a value was kept, not what it is; marks of a loop that reads and writes its stacks.
_BOOKKEEPING = NOISE | {"reduce_precision"}
_STACKING = ("jit(dynamic_update_index_in_dim)", "jit(dynamic_index_in_dim)")
# Operations that take a part of their operand, or bring its parts together.
_TAKING = frozenset(("dynamic-slice", "slice", "all-gather", "all-gather-start", "all-gather-done"))
# Operations whose result is their operand.
_MOVING = frozenset(("copy", "bitcast", "opt-barrier", "copy-done"))
# Initial values, which have no meaning until something is written into them or computed from them.
_FILLERS = frozenset(("broadcast", "constant", "iota", "partition-id", "replica-id", "rng-bit-generator"))

_NUMBERED = re.compile(r"\d$")
# Words of transformations that are operations too.
_OPERATIONS = frozenset(("transpose", ""))


class Naming:
    """Looks up scopes and source lines in one module, with a cache.

    displaced_marks: positions of marks on saved values that are not the positions of the values.
    """

    def __init__(self, module: Module, flow: Flow, displaced_marks: Collection[Place] = ()):
        self.module, self.flow, self.displaced_marks = module, flow, displaced_marks
        self._scopes: dict[int, Scope] = {}
        self._found: dict[tuple[int, Index], tuple[Instruction | None, Metadata, Scope]] = {}
        self._code: dict[int, tuple[str, tuple[str, ...]]] = {}

    def scope(self, instruction: Instruction) -> Scope:
        """The scope of an instruction, from its op_name; parts that the op_name lacks come from its stack frames."""
        if instruction.id not in self._scopes:
            metadata = self.module.metadata(instruction)
            scope = parse(metadata.op_name)
            component, path = scope.component, scope.path
            if metadata.op_name and all(scopes.is_layer(scopes.plain(word)) for word in path):
                component, path = self._by_code(scope, metadata)
            elif path and all(word.startswith(scopes.EQUINOX) for word in path):  # not the user's modules
                path = self._by_code(scope, metadata)[1]
            self._scopes[instruction.id] = Scope(scope.phase, path, component, scope.operation)
        return self._scopes[instruction.id]

    def _by_code(self, scope: Scope, metadata: Metadata) -> tuple[str, tuple[str, ...]]:
        """Component and module path of a scope without a module, from the frames it was called through."""
        key = id(metadata.frames)  # of one module's table, where a chain of frames is one object
        if key not in self._code:
            component = sources.component_of_code(metadata.frames) or scope.component
            line = sources.source_line(metadata).rpartition("/")[2]
            self._code[key] = component or line, sources.modules_of_code(metadata.frames)
        component, modules = self._code[key]
        return component, modules or scope.path

    def best(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """The instruction whose name describes a value best, with its metadata and scope; None if there is none.

        That is the nearest maker that names a part of the model. The bookkeeping of a loop is used only if no other
        maker has a name; without a named maker, what the value is copied or computed from, then its readers. A copy
        that a loop or the compiler makes outside a known component has the scopes and the source line of its source.
        """
        key = instruction.id, index
        if key not in self._found:
            self._found[key] = self._find(instruction, index)
        return self._found[key]

    def _find(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        rank, named = self._nearest(self.flow.makers(instruction, index))
        if rank:
            filled = self._filled(instruction, index)
            if filled:
                rank, named = 0, filled
        if named is None:
            named = self._nearest(self._near(instruction, index), first=True)[1]
        if named is None:
            return None, Metadata(), Scope()
        metadata, scope = self.module.metadata(named), self.scope(named)
        marked = self.marked(instruction, index)
        if marked:
            source, saved = self.scope(marked), self.module.metadata(marked)
            return (
                named,
                Metadata(f"{saved.op_name.rpartition('/')[0]}/{MARK}", saved.frames),
                Scope(scope.phase, source.path, source.component, scope.operation),
            )
        if rank and scope.component not in scopes.KNOWN:
            copied = self._copied(instruction, index)
            if copied:
                source, frames = self.scope(copied), self.module.metadata(copied).frames
                return (
                    named,
                    Metadata(metadata.op_name, frames or metadata.frames),
                    Scope(scope.phase, source.path, source.component, scope.operation),
                )
        if not sources.source_line(metadata):
            metadata = Metadata(metadata.op_name, self._frames(instruction, index))
        if not scope.component:
            component, path = self._by_code(scope, metadata)
            scope = Scope(scope.phase, path, component, scope.operation)
        return named, metadata, scope

    def marked(self, instruction: Instruction, index: Index) -> Instruction | None:
        """The named maker of a saved value whose mark has another position than the value; None for other values."""
        mark = self.flow.origin(instruction, index).instruction
        if mark is None or mark.opcode != "reduce-precision":
            return None
        frames = self.module.metadata(mark).frames
        if not frames or frames[0][:3] not in self.displaced_marks:
            return None
        return self._nearest(self.flow.makers(self.module.operand(mark, 0)))[1]

    def _nearest(self, candidates: Iterable[Instruction], first: bool = False) -> tuple[int, Instruction | None]:
        """The first candidate that is named after what it computes (rank 0), else after control flow (1), else after
        the stacks of a loop (2); (3, None) for none. `first`: the first candidate of any rank."""
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
        """The named maker of the array that a value is a slice of or is gathered from; None if it is neither."""
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
        """The named maker of the values that a loop writes over an initial value, such as zeros; None for none."""
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
        """The nearest frames with a source line, for a value whose name has none: of its makers, of what it is made
        from, of its readers."""
        for near in (*self.flow.makers(instruction, index), *self._near(instruction, index)):
            metadata = self.module.metadata(near)
            if sources.source_line(metadata):
                return metadata.frames
        return ()

    def _near(self, instruction: Instruction, index: Index) -> Iterator[Instruction]:
        """Instructions that a value added by the compiler belongs to: what it copies, its readers, the loop around it.

        For an initial value the readers come first.
        """
        made = self.flow.origin(instruction, index).instruction or instruction
        sides = [self.flow.ancestors(made), self.flow.readers(instruction)]
        for side in reversed(sides) if made.opcode in _FILLERS else sides:
            yield from side
        yield from self.flow.callers.get(instruction.computation, ())


def label(buffer: Buffer, modules: int = 1) -> str:
    """The key of a residual in `residuals_by_name`, of another buffer in `workspace_by_scope`.

    `modules`: number of modules that the component covers, appended if it is more than one.
    """
    component = f"{buffer.component} x {modules}" if modules > 1 else buffer.component
    if buffer.category != "residuals":
        return f"{buffer.phase}/{component}"
    operation = parse(buffer.op_name.removesuffix(f"/{MARK}")).operation
    if operation in NOISE - _OPERATIONS:
        operation = "carry"  # of a loop or a block
    return buffer.checkpoint_name or f"({component}/{operation})"


def folded(buffers: Iterable[Buffer]) -> dict[str, str]:
    """Key -> the key with its number of modules, "backward/CausalAttn x 6", for keys that cover several modules.

    `Attention_0` of six blocks, or `attn_0` to `attn_5`, are six of a kind: the module paths of the buffers at the peak
    differ, up to the scope that names the component. Paths without numbers, such as those of classes, do not give the
    number of modules.
    """
    paths: dict[str, set[tuple[str, ...]]] = {}
    examples: dict[str, Buffer] = {}
    for buffer in buffers:
        if not buffer.at_peak or buffer.memory != "device" or buffer.category not in ("residuals", "workspace"):
            continue
        path = tuple(buffer.module.split("/"))
        component, depth = locate(path)
        if component == buffer.component and not buffer.checkpoint_name:
            paths.setdefault(label(buffer), set()).add(path[:depth])
            examples[label(buffer)] = buffer
    counted = {}
    for key, modules in paths.items():
        words = [word for path in modules for word in path]
        if len(modules) > 1 and any(_NUMBERED.search(word) for word in words):
            counted[key] = label(examples[key], len(modules))
    return counted
