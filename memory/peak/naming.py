"""Names the values of a program, from JAX's op_names and from source lines.

Few values have a name that describes them: compilers add copies, loops name their stacked arrays after the loop, and
some libraries open no scopes. A value without a name gets the name of an instruction nearby: one that computed it, one
whose result it copies, or one that reads it. An operation without scopes gets the name of the functions through which
it was called. `label` is the name under which a report sums buffers, such as "backward/CausalAttn", and `fold_labels`
adds the number of modules that share a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from bytescope.memory.hlo import scopes, sources
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Frame, Instruction, Metadata
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

    `displaced_marks`: source positions (file, line, column) at which jax may have marked several saved values. The name
    of a value with such a position is taken from the instruction that computed it.
    """

    def __init__(self, flow: Flow, displaced_marks: Collection[Place] = ()):
        self.module, self.flow, self.displaced_marks = flow.module, flow, displaced_marks
        self._scopes: dict[int, Scope] = {}
        self._best: dict[tuple[int, Index], tuple[Instruction | None, Metadata, Scope]] = {}
        self._code: dict[int, tuple[str, tuple[str, ...]]] = {}

    def scope(self, instruction: Instruction) -> Scope:
        """Returns the parsed op_name of an instruction. Parts that the op_name lacks are taken from the stack
        frames.
        """
        if instruction.id not in self._scopes:
            metadata = self.module.metadata(instruction)
            scope = self.module.scope(instruction)
            component, path = scope.component, scope.path
            if metadata.op_name and all(scopes.is_layer(scopes.plain(word)) for word in path):
                component, path = self._name_by_code(scope, metadata)
            elif path and all(word.startswith(scopes.EQUINOX) for word in path):  # scopes of Equinox, not of the user
                path = self._name_by_code(scope, metadata)[1]
            self._scopes[instruction.id] = Scope(scope.phase, path, component, scope.operation)
        return self._scopes[instruction.id]

    def _name_by_code(self, scope: Scope, metadata: Metadata) -> tuple[str, tuple[str, ...]]:
        key = id(metadata.frames)  # in a module's table, each chain of frames is one object
        if key not in self._code:
            component = sources.component_of_code(metadata.frames) or scope.component
            line = sources.source_line(metadata).rpartition("/")[2]
            self._code[key] = component or line, sources.modules_of_code(metadata.frames)
        component, modules = self._code[key]
        return component, modules or scope.path

    def best(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """Returns (instruction whose name describes a value best, its metadata, its parsed op_name). The instruction is
        None if no name was found. The value is the tuple element at `index` of the result of `instruction`.

        The choices, in this order:

        - the nearest instruction that computed or passed on the value and that names a part of the model
        - the instruction whose results a loop writes into the value, if it starts as a constant array
        - loop bookkeeping that passed on the value
        - the instructions that the value was computed from or that read it

        If only a loop names the value, and the value is a slice of an array or was gathered from shards, its scopes and
        source line are taken from the instruction that computed the array.
        """
        key = instruction.id, index
        if key not in self._best:
            self._best[key] = self._find(instruction, index)
        return self._best[key]

    def _find(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        rank, named = self._best_candidate(self.flow.makers(instruction, index))
        if rank:
            filled = self._maker_of_filled_array(instruction, index)
            if filled:
                rank, named = 0, filled
        if named is None:
            named = self._best_candidate(self._related_instructions(instruction, index), first=True)[1]
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
            copied = self._maker_of_sliced_array(instruction, index)
            if copied:
                source, frames = self.scope(copied), self.module.metadata(copied).frames
                return (
                    named,
                    Metadata(metadata.op_name, frames or metadata.frames),
                    Scope(scope.phase, source.path, source.component, scope.operation),
                )
        if not sources.source_line(metadata):
            metadata = Metadata(metadata.op_name, self._nearest_frames(instruction, index))
        if not scope.component:
            component, path = self._name_by_code(scope, metadata)
            scope = Scope(scope.phase, path, component, scope.operation)
        return named, metadata, scope

    def marked(self, instruction: Instruction, index: Index) -> Instruction | None:
        """Returns the named instruction that computed a value that `jax.checkpoint` saves, the tuple element at `index`
        of an instruction's result. Returns None for values that are not saved, and for values that have the same source
        position as jax's mark (a `reduce-precision` instruction), because the mark names these.
        """
        mark = self.flow.origin(instruction, index).instruction
        if mark is None or mark.opcode != "reduce-precision":
            return None
        frames = self.module.metadata(mark).frames
        if not frames or frames[0][:3] not in self.displaced_marks:
            return None
        return self._best_candidate(self.flow.makers(self.module.operand(mark, 0)))[1]

    def _best_candidate(self, candidates: Iterable[Instruction], first: bool = False) -> tuple[int, Instruction | None]:
        """Returns (rank, instruction) of the candidate with the best name: rank 0 for the name of a computation, 1 for
        control flow, 2 for the stacked arrays of a loop. Returns (3, None) if no candidate has a name.

        `first`: return the first candidate that has a name, whatever its rank.
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

    def _maker_of_sliced_array(self, instruction: Instruction, index: Index) -> Instruction | None:
        # A slice of an array, or the array gathered from its shards, is named after the computation of the array.
        maker = self.flow.origin(instruction, index).instruction
        for _ in range(4):
            if maker is None or maker.opcode not in _TAKING:
                return None
            operand = self.module.operand(maker, 0)
            if operand is None:
                return None
            rank, named = self._best_candidate(self.flow.makers(operand))
            if not rank:
                return named
            maker = self.flow.origin(operand).instruction
        return None

    def _maker_of_filled_array(self, instruction: Instruction, index: Index) -> Instruction | None:
        """Returns the named instruction whose results a loop writes, iteration by iteration, into an array that starts
        as a constant, such as zeros. The array is the tuple element at `index` of an instruction's result. Returns None
        for any other value.
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
            for user in self.module.users(value):
                if user.opcode == "while":
                    rank, named = self._best_candidate(self.flow.makers(user, at))
                    if not rank:
                        return named
                elif user.opcode == "tuple":
                    pending += [(user, (i, *at)) for i, operand in enumerate(user.operands) if operand == value.id]
                elif user.opcode in _MOVING:
                    pending.append((user, at))
        return None

    def _nearest_frames(self, instruction: Instruction, index: Index) -> tuple[Frame, ...]:
        for near in (*self.flow.makers(instruction, index), *self._related_instructions(instruction, index)):
            metadata = self.module.metadata(near)
            if sources.source_line(metadata):
                return metadata.frames
        return ()

    def _related_instructions(self, instruction: Instruction, index: Index) -> Iterator[Instruction]:
        maker = self.flow.origin(instruction, index).instruction or instruction
        sides = [self.flow.ancestors(maker), self.flow.readers(instruction)]
        # The readers of a loop's initial value say more than its sources.
        for side in reversed(sides) if maker.opcode in _FILLERS else sides:
            yield from side
        yield from self.module.callers(instruction.computation)


def label(buffer: Buffer, modules: int = 1) -> str:
    """Returns the name under which a report sums the bytes of a buffer. It is the checkpoint name or
    "(component/operation)" for a residual, and "phase/component", such as "backward/CausalAttn", for other buffers.

    `modules`: number of modules that share the name. If it is more than one, it is added to the component:
    "backward/CausalAttn x 6".
    """
    component = f"{buffer.component} x {modules}" if modules > 1 else buffer.component
    if buffer.category != "residuals":
        return "/".join(filter(None, (buffer.phase, component)))
    operation = parse(buffer.op_name.removesuffix(f"/{MARK}")).operation
    if operation in NOISE - _OPERATIONS:
        operation = "carry"  # the state that a loop or a block passes on
    return buffer.checkpoint_name or f"({'/'.join(filter(None, (component, operation)))})"


def fold_labels(buffers: Iterable[Buffer]) -> dict[str, str]:
    """Returns name of buffers (`label`) -> the same name with the number of modules that share it, such as
    "backward/CausalAttn" -> "backward/CausalAttn x 6". Names of only one module are left out.

    Modules are told apart by the numbers in the module paths of the buffers at the peak, for example `Attention_0` in
    six blocks, or `attn_0` to `attn_5`. Names whose paths contain no numbers are left out too.
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
