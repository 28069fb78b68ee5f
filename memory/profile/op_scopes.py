"""Looks up the phase and component of each instruction of a trace, in the compiled modules that the trace contains.

An instruction is looked up in its module by name. An event without the name of an instruction is looked up by the name
of its kernel; `kernel_owners` has named the instructions of kernels inside CUDA graphs before. A fusion has the phase
and component of its root. An instruction that the compiler added has no JAX name; it gets the phase and component of
the instructions that made its operands, or else of its readers.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from bytescope.memory.cost.host_transfers import HOST_SPACE
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo import kernels, scopes
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak import assemble
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.profile.xplane import HOST, Operation, ProfilerTrace

OTHER, OTHER_PROGRAMS = "other", "other programs"
COLLECTIVES, TRANSFERS, COPIES, LOOPS = "collectives", "transfers", "copies", "loops"
# Annotations of work between updates, which does not belong to an update.
PAUSES = (f"{HOST}evaluation", f"{HOST}checkpoint")
COMPUTE, COLLECTIVE, TRANSFER, ENCLOSING = range(4)
_ENCLOSING = frozenset(("while", "call", "conditional"))
_ASYNCHRONOUS_COPIES = frozenset(("copy-start", "copy-done"))
_COPYING = frozenset(("copy", "copy-start", "copy-done", "transpose", "bitcast"))
_TRANSFER_KERNEL = re.compile(r"memcpy|memset", re.I)
_COLLECTIVE_KERNEL = re.compile(r"nccl", re.I)


@dataclasses.dataclass(frozen=True, slots=True)
class OpScope:
    """The part of a model and of a step to which a traced instruction belongs.

    Fields:
        phase: one of `records.STEP_PHASES`, such as "backward", or "other".
        component: the part of the model, such as "attention", or a kind of work, such as "collectives"; "other" if
            unknown.
        path: the named scopes around the instruction, joined by "/".
        opcode: the HLO opcode, "" if unknown.
    """

    phase: str = OTHER
    component: str = OTHER
    path: str = ""
    opcode: str = ""


Key = tuple[tuple[int | None, str], str, str]


def key_of(operation: Operation) -> Key:
    """Returns a key that is the same for all runs of an instruction: (program, name of the instruction or else of the
    kernel, op_name).
    """
    return operation.program, operation.name or operation.kernel, operation.op_name


class OpScopes:
    """Looks up the phase and the component of traced instructions, which are identified by the keys of `key_of`.

    Attributes:
        main: name of the program with the longest total run time; evaluations and checkpoints do not count.
    """

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
        named = [name for counter in (lengths, paused) for name, _ in counter.most_common() if name]
        self.main = named[0] if named else ""

    def scope(self, key: Key) -> OpScope:
        """Returns the phase, component and scopes of an instruction, given its key. If no module in the trace contains
        the instruction, they are derived from its op_name or kernel name.
        """
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def main_attribution(self) -> Attribution | None:
        """Returns the compiled module of the main program with the phase and scope of its instructions; None if the
        trace does not contain it, or contains several modules of its name without saying which one ran.
        """
        programs = {operation.program for operation in self.trace.operations if operation.program[1] == self.main}
        found = [module for module in map(self._find_module, programs) if module is not None]
        return found[0].attribution if found else None

    def runs_once(self, key: Key) -> bool:
        """Returns whether an instruction runs once per call of the main program, because it is outside of loops and
        branches.
        """
        module = self._find_module(key[0])
        if module is None or key[0][1] != self.main:
            return False
        instruction = module.instruction(key[1])
        return instruction is not None and instruction.computation == module.attribution.module.entry

    def _find(self, key: Key) -> OpScope:
        program, name, op_name = key
        module = self._find_module(program)
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

    def _find_module(self, program: tuple[int | None, str]) -> _Module | None:
        if program not in self._modules:
            number, name = program
            title = name or self.main  # a kernel without a program is looked up in the main program
            protos = [proto for known, proto in self.trace.programs.values() if known == title]
            numbered = None if number is None else self.trace.programs.get(number)
            if numbered is not None and numbered[0] == title:
                protos = [numbered[1]]
            self._modules[program] = _Module(protos[0]) if len(protos) == 1 else None
        return self._modules[program]


class _Module:
    """The instructions of one compiled module, which are looked up by name."""

    def __init__(self, proto: bytes):
        program = hlo_buffers.read(proto)
        self.attribution = assemble.attribute_program(program)

    def instruction(self, name: str) -> Instruction | None:
        module = self.attribution.module
        return module.named(name) or module.labelled(kernels.kernel_label(name))

    def scope(self, instruction: Instruction) -> OpScope:
        attribution, opcode = self.attribution, instruction.opcode
        scope = attribution.scope(instruction)
        named = "/" in attribution.module.metadata(instruction).op_name
        if not named:  # added by the compiler
            scope = attribution.best_named(instruction, ())[2]
        phase = "optimizer" if "optimizer" in scope.path else attribution.phase(scope, instruction)
        component = scope.component or OTHER
        module, arrays = attribution.module, leaves(attribution.module.shape(instruction))
        root = module.root(instruction.called[0]) if opcode == "fusion" and instruction.called else None
        if opcode in _ENCLOSING:
            component = LOOPS
        elif is_collective(opcode):
            component = COLLECTIVES
        elif opcode in _ASYNCHRONOUS_COPIES and any(leaf.memory_space == HOST_SPACE for _, leaf in arrays):
            component = TRANSFERS
        elif not named and (root.opcode if root else opcode) in _COPYING:
            component = COPIES
        return OpScope(phase, component, "/".join((*scope.path, scope.operation)).strip("/"), opcode)


def priority(scope: OpScope) -> int:
    """Returns the rank by which traced time is divided among instructions that run at the same time: only those with
    the lowest rank get it. Computation has the lowest rank, then collectives, then transfers between device and host,
    last loops, branches and calls. These are last because the instructions in their bodies run at the same time.
    """
    if scope.opcode in _ENCLOSING:
        return ENCLOSING
    return {COLLECTIVES: COLLECTIVE, TRANSFERS: TRANSFER}.get(scope.component, COMPUTE)
