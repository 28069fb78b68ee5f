"""Audits offloads: whether the values that a program asks to move to host memory are there in the compiled program.

A program asks for host memory in three ways: with a remat policy that offloads names or matrix products, with
`jax.device_put` to a host memory kind, or with an argument whose sharding has a host memory kind. In the jaxpr, the
first two are `device_put` equations whose result has the memory space Host. If a policy offloads a value that is an
input of the checkpointed function, jax makes no such equation and keeps the value in device memory.

XLA's scheduler may delay a move to host memory until just before the value is moved back. The value then is in device
memory all the time, so the two moves free no device memory: they are idle. XLA for GPUs (jax 0.10.2 and 0.12) and for
TPUs (jax 0.10.2) schedules the moves of unrolled layers in this way. In a loop over layers, moves cannot be delayed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bytescope.memory.audit.checkpoint_requests import request_for
from bytescope.memory.cost import host_transfers
from bytescope.memory.findings.evidence import TOY
from bytescope.memory.findings.user_functions import line_of
from bytescope.memory.hlo import loops
from bytescope.memory.hlo.buffers import HOST_COLOR
from bytescope.memory.hlo.dataflow import PASSING, Flow
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.hlo.sources import short_place, source_line
from bytescope.memory.jaxprs import bodies, checkpoint_name_of, checkpoint_of, inner_jaxpr, parameters
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.pairing import root_of
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram

# Primitives whose results are the same values as their operands, in the same order.
_SAME = frozenset(("reduce_precision", "sharding_constraint", "optimization_barrier", "copy", "copy_p", "device_put"))
# A kernel, whose jaxpr has references instead of its operands.
_KERNEL = "pallas_call"
# HLO operations whose computations may allocate memory that their result does not show.
_CALLING = ("while", "call", "conditional")
# HLO operations that allocate no memory.
_FREE = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "constant",
    *(PASSING - {"copy", "copy-start", "transpose", "convert"}),
)

_ON_CPU = (
    "the CPU backend has no separate host memory, so jax drops the move to host memory: compile for a GPU target, such "
    "as h200, to see the move"
)
_ROUND_TRIP = (
    "the array is moved to host memory and directly back, and XLA removes both moves: pass the array in host memory "
    "through jax.lax.optimization_barrier before it is moved back"
)


_IDLE = (
    "XLA starts the move to host memory only just before the value is moved back, so that the value stays in device "
    "memory and the move frees nothing: use jax.lax.scan over the layers without unroll, or save the value in device "
    "memory"
)


class _Named(NamedTuple):
    """A checkpoint name of a value in device memory, and "file.py:line" of the call of checkpoint_name."""

    name: str
    line: str


# The checkpoint names of a value in device memory.
Labels = frozenset[_Named]


class _Request(NamedTuple):
    """A value that the program asks to move to host memory.

    Fields:
        subject: the checkpoint name of the value; if it has no name, the primitive that computes it.
        line: "file.py:line" where the program asks for the move; "" if unknown.
        type: the type (aval) of the value, with its global shape.
        times: how often one step computes the value.
        kept: True if the value is an input of a checkpointed function. jax then keeps the value in device memory.
    """

    subject: str
    line: str
    type: Any
    times: int
    kept: bool = False


def offloads(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields one row for each argument that the program asks to keep in host memory, and one row for each checkpoint
    name or source line whose values the program asks to move to host memory.

    If a policy offloads a name that no value has, the row comes from `checkpoints` instead. Without a jaxpr (an HLO
    dump), it is unknown what the program asks for; the rows then list what the compiled program keeps in host memory or
    moves there.

    Args:
        report: the report of the compiled step.
        program: the compiled step with its buffers and its jaxpr.
    """
    yield from _argument_rows(report, program)
    if program.jaxpr is None:
        yield from _unknown_requests(program.module)
        return
    outcome = _HostArrays(program.module)
    rows: dict[tuple[str, str, str, str], AuditRow] = {}
    requests = _Walk().requests(program.jaxpr)
    idle = _idle_values(program.module, requests, outcome)
    for request in requests:
        elements, size = outcome.moved_array(request)
        done, undone_by, message = "offloaded", "", ""
        if request.kept:
            size, done, undone_by = outcome.size_on_device(request), "kept", "autodiff"
            message = (
                f"{request.subject} is the name of an input of jax.checkpoint, and jax keeps inputs in device memory: "
                "call checkpoint_name on the input inside the checkpointed function, before the input is used"
            )
        elif not size:
            size, done = outcome.size_on_device(request), "kept"
            on_cpu = report.target.get("platform", "cpu") == "cpu"
            undone_by, message = ("lowering", _ON_CPU) if on_cpu else ("offloader", _ROUND_TRIP)
        elif idle[request.type.dtype.name, elements] >= request.times:
            idle[request.type.dtype.name, elements] -= request.times
            done, undone_by, message = "kept", "scheduler", _IDLE
        key = request.subject, request.line, done, undone_by
        row = rows.get(key) or AuditRow(
            "offload", request.subject, request.line, "offload", done, 0, 0, undone_by, message, 0
        )
        rows[key] = dataclasses.replace(row, bytes=row.bytes + size, count=row.count + request.times)
    yield from rows.values()


def _idle_values(module: Module, requests: Sequence[_Request], outcome: _HostArrays) -> Counter[tuple[str, int]]:
    """Returns (dtype, elements on one device) -> number of values whose move to host memory frees no device memory. If
    only some of the values with this dtype and size are idle, and the values belong to several requests, it is unknown
    which of them are idle; they are left out."""
    subjects: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    for request in requests:
        elements, _ = outcome.moved_array(request)
        subjects[request.type.dtype.name, elements].add((request.subject, request.line))
    moved, idle = _count_moves(module)
    return Counter({key: idle[key] for key in moved if idle[key] == moved[key] or len(subjects[key]) == 1})


def _count_moves(module: Module) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Returns two counters of the values that an HLO computation of the module moves to host memory and back: all moved
    values, and those whose move is idle. The keys are (dtype, number of elements on one device). A value that one step
    computes several times, such as in a loop, counts that often.

    A move is idle if it frees nothing that is needed: while the value is in host memory only, no instruction allocates
    more than TOY bytes of device memory. This time begins after the last instruction that reads the value on the
    device, which can be the move to host memory itself, and ends at the move back. Moves of values of TOY bytes or less
    never count as idle.
    """
    flow = Flow(module)
    moved: Counter[tuple[str, int]] = Counter()
    idle: Counter[tuple[str, int]] = Counter()
    for computation, times in loops.runs(module).items():
        body = module.computations.get(computation)
        order = (body.schedule or body.instructions) if body is not None else []
        places = {id: place for place, id in enumerate(order)}
        seen: set[int] = set()  # a value may be moved back several times
        for place, id in enumerate(order):
            back = module.instructions[id]
            on_host = module.operand(back, 0)
            if on_host is None or not _moves(module, back, host_transfers.TO_DEVICE):
                continue
            chain = (on_host, *flow.origin(on_host).chain)
            away = next((each for each in chain if _moves(module, each, host_transfers.TO_HOST)), None)
            value = module.operand(away, 0) if away is not None and away.id in places else None
            if away is None or value is None or away.id in seen:  # e.g. moved in the forward loop, and back in another
                continue
            seen.add(away.id)
            uses = list(module.users(value))
            if away.opcode == "copy-start":  # the move ends at the copy-done
                uses += module.users(away)
            last = max(places[use.id] for use in uses if use.id in places)
            shape = module.shape(value)
            key = shape.dtype, shape.elements
            moved[key] += times
            between = [module.instructions[each] for each in order[last + 1 : place]]
            if shape.bytes > TOY and not any(_allocates(module, each) for each in between):
                idle[key] += times
    return moved, idle


def _moves(module: Module, instruction: Instruction, direction: str) -> bool:
    return any(each == direction for each, _, _ in host_transfers.moved(module, instruction))


def _allocates(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in (*_CALLING, *_FREE):
        return instruction.opcode in _CALLING
    return any(
        shape.memory_space != host_transfers.HOST_SPACE and shape.bytes > TOY
        for _, shape in leaves(module.shape(instruction))
    )


def _argument_rows(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    asked = set()
    if program.jaxpr is not None and program.signature is not None:
        for leaf, aval in zip(program.signature.arguments, program.jaxpr.in_avals):
            if _is_on_host(aval):
                asked.add(leaf.parameter)
    rows: dict[tuple[str, str], AuditRow] = {}
    for allocation in program.allocations:
        on_host = allocation.color == HOST_COLOR
        if not allocation.entry_parameter or not (on_host or allocation.parameter in asked):
            continue
        root = root_of(program.arguments.path(allocation.parameter))
        done, undone_by, message = "offloaded", "", ""
        if not on_host:
            done, undone_by, message = "kept", "lowering", _ON_CPU
        request = "unknown" if program.jaxpr is None else "offload"
        row = rows.get((root, done)) or AuditRow("offload", root, "", request, done, 0, 0, undone_by, message, 0)
        rows[root, done] = dataclasses.replace(row, bytes=row.bytes + allocation.size, count=row.count + 1)
    yield from rows.values()


def _unknown_requests(module: Module) -> Iterator[AuditRow]:
    """Yields one row for each source line whose values the compiled module copies to host memory, with the bytes on one
    device. Used for HLO dumps, which do not show what the user's code asked for."""
    moved: dict[str, tuple[int, int]] = {}
    for computation, times in loops.runs(module).items():
        for instruction in module.inside(computation):
            for direction, size, _ in host_transfers.moved(module, instruction):
                if direction == host_transfers.TO_HOST:
                    line = source_line(module.metadata(instruction))
                    total, count = moved.get(line, (0, 0))
                    moved[line] = total + size * times, count + times
    for line, (size, count) in moved.items():
        yield AuditRow("offload", short_place(line) or "copy", line, done="offloaded", bytes=size, count=count)


# ---- the requests in the jaxpr -----------------------------------------------------------------------------------


def _is_on_host(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


class _Walk:
    """Follows checkpoint names through a jaxpr, and collects the values that the program asks to move to host
    memory."""

    def __init__(self) -> None:
        self._relevant: dict[int, tuple[Any, bool]] = {}

    def requests(self, jaxpr: Any) -> list[_Request]:
        """Returns the values that a ClosedJaxpr asks to move to host memory, in the order of its equations."""
        inside = inner_jaxpr(jaxpr)
        return self._walk(inside, [frozenset()] * len(inside.invars))[1]

    def _walk(self, jaxpr: Any, given: Sequence[Labels]) -> tuple[list[Labels], list[_Request]]:
        """Returns two lists for a Jaxpr: the checkpoint names of each result, and the values that the Jaxpr asks to
        move to host memory. `given`: the checkpoint names of each input of the Jaxpr."""
        known: dict[Any, Labels] = dict(zip(jaxpr.invars, given))
        makers: dict[Any, Any] = {}
        used: set[Any] = set()
        found: list[_Request] = []

        def labels_of(atoms: Iterable[Any]) -> list[Labels]:
            return [known.get(atom, frozenset()) if not hasattr(atom, "val") else frozenset() for atom in atoms]

        for equation in jaxpr.eqns:
            labels, primitive = labels_of(equation.invars), equation.primitive.name
            results: list[Labels] = [frozenset()] * len(equation.outvars)
            name, checkpoint = checkpoint_name_of(equation), checkpoint_of(equation)
            if name:
                results = [labels[0] | {_Named(name, line_of(equation))}]
            elif primitive == "device_put":
                used = used or {atom for each in jaxpr.eqns for atom in each.invars if not hasattr(atom, "val")}
                for source, target, own in zip(equation.invars, equation.outvars, labels):
                    # jax may send a value to host memory that the backward pass does not need.
                    if target in used or target in jaxpr.outvars:
                        found += _put(equation, makers, source, target, own)
                results = [
                    own if not _is_on_host(to.aval) else frozenset() for to, own in zip(equation.outvars, labels)
                ]
            elif primitive in _SAME:
                results = labels[: len(results)] if len(labels) >= len(results) else results
            elif primitive != _KERNEL and (any(labels) or self._is_relevant(equation)):
                if checkpoint is not None and parameters(equation).get("differentiated", True):
                    found += _kept_inputs(equation, checkpoint.policy, labels)
                inner, requests = self._walk_bodies(equation, labels)
                results = inner if len(inner) == len(results) else results
                found += requests
            for variable, own in zip(equation.outvars, results):
                makers[variable] = equation
                if own:
                    known[variable] = own
        return labels_of(jaxpr.outvars), found

    def _walk_bodies(self, equation: Any, labels: list[Labels]) -> tuple[list[Labels], list[_Request]]:
        given, primitive = parameters(equation), equation.primitive.name
        if primitive == "scan":
            body = inner_jaxpr(given["jaxpr"])
            # Stacked inputs and results have one dimension more outside of the loop. The inputs are constants, the
            # carry and stacked inputs, the results are the carry and stacked results.
            end = sum(_rank(outer) == _rank(inner) for outer, inner in zip(equation.invars, body.invars))
            first = end - sum(_rank(outer) == _rank(inner) for outer, inner in zip(equation.outvars, body.outvars))
            results, requests = self._walk(body, labels)
            carried = [own | after for own, after in zip(labels[first:end], results[: end - first])]
            if carried != labels[first:end]:  # a later iteration gets the names of the carry
                results, requests = self._walk(body, [*labels[:first], *carried, *labels[end:]])
            return results, [each._replace(times=each.times * given["length"]) for each in requests]
        if primitive == "while":
            body = inner_jaxpr(given["body_jaxpr"])
            return self._walk(body, labels[len(labels) - len(body.invars) :])
        if primitive == "cond":
            branches = [self._walk(inner_jaxpr(branch), labels[1:]) for branch in given["branches"]]
            merged = [frozenset().union(*each) for each in zip(*(results for results, _ in branches))]
            return merged, [request for _, requests in branches for request in requests]
        for body in bodies(equation):
            if len(body.invars) == len(labels):
                return self._walk(body, labels)
        found = []
        for body in bodies(equation):
            found += self._walk(body, [frozenset()] * len(body.invars))[1]
        return [], found

    def _is_relevant(self, equation: Any) -> bool:
        """Returns whether a jaxpr inside `equation` contains a checkpoint name or a `device_put`."""
        return any(map(self._has_requests, bodies(equation)))

    def _has_requests(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._relevant:
            relevant = any(
                equation.primitive.name == "device_put" or checkpoint_name_of(equation) or self._is_relevant(equation)
                for equation in jaxpr.eqns
            )
            self._relevant[id(jaxpr)] = jaxpr, relevant
        return self._relevant[id(jaxpr)][1]


def _put(equation: Any, makers: dict[Any, Any], source: Any, target: Any, labels: Labels) -> Iterator[_Request]:
    """Yields a `_Request` if the `device_put` equation moves a value from device memory to host memory; else nothing.

    Args:
        equation: the device_put equation.
        makers: variable -> the equation that computes it.
        source: the variable that is moved.
        target: the result, whose aval has the memory space Host for a move to host memory.
        labels: the checkpoint names of `source`.
    """
    if not _is_on_host(target.aval) or _is_on_host(source.aval):
        return
    maker, atom = None, source
    while not hasattr(atom, "val"):
        maker = makers.get(atom)
        if maker is None or maker.primitive.name not in _SAME:
            break
        atom = maker.invars[0]
    # A device_put that an offload policy inserts has no line of its own. It is recognized by its copy semantics, which
    # users rarely request.
    by_policy = "ALWAYS_COPY" in str(parameters(equation).get("copy_semantics"))
    lines = [line_of(each) for each in (equation, maker) if each is not None]
    line = next(filter(None, reversed(lines) if by_policy else lines), "")
    subject = "device_put"
    if maker is not None:
        subject = checkpoint_name_of(maker) or maker.primitive.name
        line = line_of(maker) if checkpoint_name_of(maker) else line
    elif labels:
        subject, line = min(labels)
    yield _Request(subject, line, target.aval, 1)


def _kept_inputs(equation: Any, policy: Any, labels: Sequence[Labels]) -> Iterator[_Request]:
    """Yields a `_Request` with kept=True for each input of a checkpointed function whose checkpoint name the policy
    offloads. jax ignores the policy for inputs and keeps the inputs in device memory.

    Args:
        equation: the jax.checkpoint equation.
        policy: its remat policy.
        labels: the checkpoint names of each input.
    """
    for variable, own in zip(equation.invars, labels):
        for label in sorted(own):
            if request_for(policy, label.name) == "offload":
                yield _Request(label.name, label.line, variable.aval, 1, kept=True)


# ---- the outcome in the compiled module --------------------------------------------------------------------------


class _HostArrays:
    """The arrays in host memory of a compiled module. XLA's copies to host memory have no op_name, so an array is
    matched with a value of the jaxpr by its dtype and its number of elements."""

    def __init__(self, module: Module):
        self._devices = module.devices
        self._sizes: dict[str, dict[int, int]] = {}  # dtype -> elements of one array -> bytes
        for computation in loops.runs(module):
            for instruction in module.inside(computation):
                for _, shape in leaves(module.shape(instruction)):
                    if shape.memory_space == host_transfers.HOST_SPACE:
                        self._sizes.setdefault(shape.dtype, {})[math.prod(shape.dims)] = shape.bytes

    def moved_array(self, request: _Request) -> tuple[int, int]:
        """Returns (elements of the array in host memory that matches the value of `request`, bytes that one device
        moves to host memory in one step for the value). The bytes are the bytes of the value on one device, multiplied
        by the number of times that one step computes the value. Returns (0, 0) if no array in host memory of the module
        matches the value."""
        whole = math.prod(request.type.shape)
        for elements, size in sorted(self._sizes.get(request.type.dtype.name, {}).items(), reverse=True):
            for times in {1, request.times}:  # one array, or the stack of a loop's arrays
                parts, rest = divmod(whole * times, max(elements, 1))
                if not rest and 1 <= parts <= self._devices:
                    return elements, size * request.times // times
        return 0, 0

    def size_on_device(self, request: _Request) -> int:
        """Returns the bytes of a value on one device, multiplied by the number of times that one step computes the
        value (`request.times`). Assumes that the value is sharded evenly over all devices."""
        size = math.prod(request.type.shape) * request.type.dtype.itemsize
        return size * request.times // self._devices
