"""What an instruction of a trace is of: its phase and component, by the compiled modules in the trace itself.

An instruction is looked up in its module by name; a kernel whose event has no instruction's name, as inside of a CUDA
graph, is looked up by its own. A fusion has the phase and component of its root. What the compiler added, without a
name of JAX, has those of what made its operands, or else of what reads it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.peak import assemble
from bytescope.memory.profile.xplane import HOST, Operation, ProfilerTrace

OTHER, OTHER_PROGRAMS = "other", "other programs"
COLLECTIVES, TRANSFERS, COPIES, LOOPS = "collectives", "transfers", "copies", "loops"
# Work of the host between updates, which is not part of any.
PAUSES = (f"{HOST}evaluation", f"{HOST}checkpoint")
COMPUTE, COLLECTIVE, TRANSFER, ENCLOSING = range(4)
_ENCLOSING = frozenset(("while", "call", "conditional"))
_COPYING = frozenset(("copy", "copy-start", "copy-done", "transpose", "bitcast"))
_TRANSFER_KERNEL = re.compile(r"memcpy|memset", re.I)
_COLLECTIVE_KERNEL = re.compile(r"nccl", re.I)


@dataclasses.dataclass(frozen=True, slots=True)
class OpScope:
    """What an instruction is of.

    phase: of `records.STEP_PHASES`, or other. component: in the words of the report. path: scopes joined by "/".
    """

    phase: str = OTHER
    component: str = OTHER
    path: str = ""
    opcode: str = ""


Key = tuple[tuple[int | None, str], str, str]


def key_of(operation: Operation) -> Key:
    """What all runs of one instruction have in common: program, instruction (else the kernel's name), op_name."""
    return operation.program, operation.name or operation.kernel, operation.op_name


class OpScopes:
    """Looks up what instructions are of, in the modules of the trace; `main`: the program that ran longest, pauses
    aside."""

    def __init__(self, trace: ProfilerTrace):
        self.trace = trace
        self._known: dict[Key, OpScope] = {}
        self._modules: dict[Any, _Module | None] = {}
        lengths: Counter[str] = Counter()
        pauses = [(span.start, span.stop) for span in trace.spans if span.name in PAUSES]
        paused: Counter[str] = Counter()
        for operation in trace.operations:
            inside = any(start <= operation.start < stop for start, stop in pauses)
            (paused if inside else lengths)[operation.program[1]] += operation.stop - operation.start
        named = [name for found in (lengths, paused) for name, _ in found.most_common() if name]
        self.main = named[0] if named else ""

    def of(self, key: Key) -> OpScope:
        """The scope of an instruction; where no module has it, what its op_name or its kernel tells."""
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def op_name(self, key: Key) -> str:
        """The op_name of an instruction by its module, else the event's own; "" for none."""
        module = self._module(key[0])
        if module is None:
            return key[2]
        instruction = module.instruction(key[1])
        return key[2] if instruction is None else module.op_name(instruction)

    def runs_once(self, key: Key) -> bool:
        """Whether an instruction of the main program runs once per call: it is in no loop and no branch."""
        module = self._module(key[0])
        if module is None or key[0][1] != self.main:
            return False
        instruction = module.instruction(key[1])
        return instruction is not None and instruction.computation == module.look.module.entry

    def _find(self, key: Key) -> OpScope:
        program, name, op_name = key
        module = self._module(program)
        instruction = module.instruction(name) if module is not None else None
        if program[1] and program[1] != self.main:
            return OpScope(OTHER, OTHER_PROGRAMS, program[1], instruction.opcode if instruction else "")
        if module is not None and instruction is not None:
            return module.scope(instruction)
        if _COLLECTIVE_KERNEL.search(name):
            return OpScope(OTHER, COLLECTIVES)
        if _TRANSFER_KERNEL.search(name):
            return OpScope(OTHER, TRANSFERS)
        scope = scopes.parse(op_name)
        return OpScope(scope.phase or OTHER, scope.component or OTHER, "/".join(scope.path))

    def _module(self, program: tuple[int | None, str]) -> _Module | None:
        """The module of a program, by its number; a kernel that names no program is looked up in the main one."""
        if program not in self._modules:
            number, name = program
            known = self.trace.programs
            protos = (
                [known[number][1]]
                if number is not None and number in known
                else [proto for title, proto in known.values() if title == (name or self.main)]
            )
            self._modules[program] = _Module(protos[0]) if len(protos) == 1 else None
        return self._modules[program]


class _Module:
    """The instructions of one compiled module, by name."""

    def __init__(self, proto: bytes):
        program = hlo_buffers.read(proto)
        module = program.module
        self.look = assemble.attribution_of(program)
        self._named = {instruction.name: instruction for instruction in module.instructions.values()}
        self._kernels = {_plain(name): instruction for name, instruction in self._named.items()}

    def instruction(self, name: str) -> Instruction | None:
        """An instruction by its name, or by that of its kernel, which has no dots and dashes."""
        return self._named.get(name) or self._kernels.get(_plain(name))

    def scope(self, instruction: Instruction) -> OpScope:
        """What an instruction is of."""
        look, opcode = self.look, instruction.opcode
        scope = look.scope(instruction)
        named = "/" in look.module.metadata(instruction).op_name
        if not named:  # added by the compiler: what made its operands, or reads it, tells
            scope = look.best_named(instruction, ())[2]
        phase = "optimizer" if "optimizer" in scope.path else look.phase(scope, instruction)
        component = scope.component or OTHER
        if opcode in _ENCLOSING:
            component = LOOPS
        elif is_collective(opcode):
            component = COLLECTIVES
        elif not named and self._copies(instruction):
            component = COPIES
        return OpScope(phase, component, "/".join((*scope.path, scope.operation)).strip("/"), opcode)

    def op_name(self, instruction: Instruction) -> str:
        """The op_name of an instruction, or else of the nearest one that has a name."""
        own = self.look.module.metadata(instruction).op_name
        return own if "/" in own else self.look.best_named(instruction, ())[1].op_name

    def _copies(self, instruction: Instruction) -> bool:
        """Whether an instruction only moves its operand."""
        if instruction.opcode == "fusion" and instruction.called:
            root = self.look.module.root(instruction.called[0])
            return root is not None and root.opcode in _COPYING
        return instruction.opcode in _COPYING


def priority(scope: OpScope) -> int:
    """Which of several instructions a moment counts for: compute first, then collectives, transfers, and what
    encloses others."""
    if scope.opcode in _ENCLOSING:
        return ENCLOSING
    return {COLLECTIVES: COLLECTIVE, TRANSFERS: TRANSFER}.get(scope.component, COMPUTE)


def _plain(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")
