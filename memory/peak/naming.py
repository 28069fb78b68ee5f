"""Names the values of a program, from JAX's op_names and from source lines.

Few values have a name that describes them: compilers add copies, loops name their stacks after the loop, and some
libraries open no scopes. A value without a name gets the name of its makers, of the values that it is copied or
computed from, or of its readers. An operation without scopes gets the name of the functions through which it was
called. `label` is the key under which a report sums the buffers of one kind, and `fold_labels` adds the number of
modules that a key covers.
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

# Operations that only keep or move a value; functions by which a scan reads and writes its stacks.
_BOOKKEEPING = NOISE | {"reduce_precision"}
_STACKING = ("jit(dynamic_update_index_in_dim)", "jit(dynamic_index_in_dim)")
# Operations that return a part of their operand, or gather its parts.
_TAKING = frozenset(("dynamic-slice", "slice", "all-gather", "all-gather-start", "all-gather-done"))
# Operations whose result is their operand.
_MOVING = frozenset(("copy", "bitcast", "opt-barrier", "copy-done"))
# Operations that make initial values; a name comes from what is later written into the value or computed from it.
_FILLERS = frozenset(("broadcast", "constant", "iota", "partition-id", "replica-id", "rng-bit-generator"))

_NUMBERED = re.compile(r"\d$")
# Names of transformations that are also operations.
_OPERATIONS = frozenset(("transpose", ""))


class Naming:
    """Looks up the scopes and source lines of the instructions of one module. Results are cached.

    `displaced_marks`: source positions at which jax marks saved values although the values were computed elsewhere.
    """

    def __init__(self, module: Module, flow: Flow, displaced_marks: Collection[Place] = ()):
        self.module, self.flow, self.displaced_marks = module, flow, displaced_marks
        self._scopes: dict[int, Scope] = {}
        self._best: dict[tuple[int, Index], tuple[Instruction | None, Metadata, Scope]] = {}
        self._code: dict[int, tuple[str, tuple[str, ...]]] = {}

    def scope(self, instruction: Instruction) -> Scope:
        """Returns the parsed op_name of an instruction. Parts that the op_name lacks are taken from the stack
        frames.
        """
        if instruction.id not in self._scopes:
            metadata = self.module.metadata(instruction)
            scope = parse(metadata.op_name)
            component, path = scope.component, scope.path
            if metadata.op_name and all(scopes.is_layer(scopes.plain(word)) for word in path):
                component, path = self._by_code(scope, metadata)
            elif path and all(word.startswith(scopes.EQUINOX) for word in path):  # scopes of Equinox, not of the user
                path = self._by_code(scope, metadata)[1]
            self._scopes[instruction.id] = Scope(scope.phase, path, component, scope.operation)
        return self._scopes[instruction.id]

    def _by_code(self, scope: Scope, metadata: Metadata) -> tuple[str, tuple[str, ...]]:
        """Returns (component, module path) of an instruction whose op_name contains no module, according to its stack
        frames.
        """
        key = id(metadata.frames)  # in a module's table, each chain of frames is one object
        if key not in self._code:
            component = sources.component_of_code(metadata.frames) or scope.component
            line = sources.source_line(metadata).rpartition("/")[2]
            self._code[key] = component or line, sources.modules_of_code(metadata.frames)
        component, modules = self._code[key]
        return component, modules or scope.path

    def best(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """Returns the instruction whose name describes a value best, with its metadata and parsed op_name; None if
        there is no such instruction.

        The best name is that of the nearest instruction that computed or passed on the value and that names a part of
        the model. If there is none, the sources of the value are tried, then its readers. Names of loop bookkeeping
        are a last choice. A copy that a loop or the compiler made outside of a known component gets the scopes and the
        source line of the value that it copies.
        """
        key = instruction.id, index
        if key not in self._best:
            self._best[key] = self._find(instruction, index)
        return self._best[key]

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
        """Returns the named instruction that computed a value, if jax marks the value as saved at another source
        position; None for other values.
        """
        mark = self.flow.origin(instruction, index).instruction
        if mark is None or mark.opcode != "reduce-precision":
            return None
        frames = self.module.metadata(mark).frames
        if not frames or frames[0][:3] not in self.displaced_marks:
            return None
        return self._nearest(self.flow.makers(self.module.operand(mark, 0)))[1]

    def _nearest(self, candidates: Iterable[Instruction], first: bool = False) -> tuple[int, Instruction | None]:
        """Returns (rank, instruction) of the candidate with the best name, the first one of equal rank; (3, None) if
        no candidate has a name.

        Rank 0 is the name of a computation, rank 1 of control flow, and rank 2 of the stacked arrays of a loop. If
        `first` is True, returns the first candidate that has any name.
        """
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
        """Returns the named instruction that computed the array from which a value is sliced or gathered; None for
        other values.
        """
        maker = self.flow.origin(instruction, index).instruction
        for _ in range(4):
            if maker is None or maker.opcode not in _TAKING:
                return None
            operand = self.module.operand(maker, 0)
            if operand is None:
                return None
            rank, named = self._nearest(self.flow.makers(operand))
            if not rank:
                return named
            maker = self.flow.origin(operand).instruction
        return None

    def _filled(self, instruction: Instruction, index: Index) -> Instruction | None:
        """Returns the named instruction that computed the values that a loop writes into an initial array of, for
        example, zeros. Returns None if there is none.
        """
        maker = self.flow.origin(instruction, index).instruction
        if maker is None or maker.opcode not in _FILLERS:
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
        """Returns the stack frames of the nearest related instruction that has a source line. Used for a value without
        a source line of its own.
        """
        for near in (*self.flow.makers(instruction, index), *self._near(instruction, index)):
            metadata = self.module.metadata(near)
            if sources.source_line(metadata):
                return metadata.frames
        return ()

    def _near(self, instruction: Instruction, index: Index) -> Iterator[Instruction]:
        """Yields the instructions to which a value that the compiler added is related: its sources, its readers, and
        the loop around it. For the initial value of a loop, the readers come first.
        """
        maker = self.flow.origin(instruction, index).instruction or instruction
        sides = [self.flow.ancestors(maker), self.flow.readers(instruction)]
        for side in reversed(sides) if maker.opcode in _FILLERS else sides:
            yield from side
        yield from self.flow.callers.get(instruction.computation, ())


def label(buffer: Buffer, modules: int = 1) -> str:
    """Returns the key of a buffer in the report's `residuals_by_name`, if it is a residual, or in
    `workspace_by_scope`.

    `modules`: number of modules that share the name. It is appended if it is more than one.
    """
    component = f"{buffer.component} x {modules}" if modules > 1 else buffer.component
    if buffer.category != "residuals":
        return f"{buffer.phase}/{component}"
    operation = parse(buffer.op_name.removesuffix(f"/{MARK}")).operation
    if operation in NOISE - _OPERATIONS:
        operation = "carry"  # the state that a loop or a block passes on
    return buffer.checkpoint_name or f"({component}/{operation})"


def fold_labels(buffers: Iterable[Buffer]) -> dict[str, str]:
    """Returns name -> name with a count, such as "backward/CausalAttn x 6", for the names that several modules share.

    The modules are counted by the module paths of the buffers at the peak, for example `Attention_0` in six blocks, or
    `attn_0` to `attn_5`. Names whose paths contain no numbers, such as class names, are left out.
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
