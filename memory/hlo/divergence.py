"""Finds collectives that some of their devices skip: a program with such a collective hangs.

If devices take different branches of a conditional, or run a loop a different number of times, a collective inside it
must not wait for all of them. For each loop and branch around a collective, `skipped_collectives` derives which
devices are certain to compute the same condition, and compares them with the devices that the collective waits for.

A collective waits for these devices (openxla/xla, 2026, the sources of jaxlib 0.10):

* All but permutes: the devices of its replica group.
* A permute on the CPU: all devices. The rendezvous of a collective has the devices in its replica groups
  (`CollectiveThunk::GetRendezvousKey`); a permute has no replica groups, so its rendezvous has all devices.
* A permute on a GPU: the devices that its source-target pairs connect, and all devices of the same process. The clique
  of a permute has all devices (`CollectivePermuteThunk::GetP2PConfig`), and the first call on a clique is a rendezvous
  of its devices in this process (`CollectiveThunk::FirstCallRendezvous`, pull request 38932). Not yet checked on
  hardware.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.dataflow import COLLECTIVES
from bytescope.memory.hlo.mesh import ArgumentLayout, Axes, Groups, coordinates, groups_key, groups_of
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import Index

Node = tuple[int, Index]
# Maximum number of elements of a constant that is read as a table with an entry per device.
_MAX_TABLE = 65536


@dataclasses.dataclass(frozen=True)
class SkippedCollective:
    """A collective that some devices may skip. The program then hangs, because the other devices wait for them forever.

    Fields:
        instruction: the HLO instruction of the collective.
        control: the loop or conditional that contains it, whose condition may differ between devices.
        op_name: JAX's op_name of the collective.
        links: the groups of devices that exchange data in the collective, as lists of device numbers.
        waits: numbers of devices in one group that wait for each other, although their conditions may differ.
    """

    instruction: Instruction
    control: Instruction
    op_name: str
    links: Groups
    waits: tuple[int, ...]


def skipped_collectives(
    module: Module, axes: Axes, parameters: Mapping[int, ArgumentLayout], platform: str, processes: Sequence[int]
) -> Iterator[SkippedCollective]:
    """Yields each collective that some devices may not execute although other devices wait for them.

    Args:
        axes: names and sizes of the mesh axes.
        parameters: number of a parameter of the entry computation -> its layout on the mesh.
        platform: the platform of the devices, such as "cpu".
        processes: the process index of each device.
    """
    agreement = _Agreement(module, axes, parameters)
    controls: dict[int, list[Instruction]] = {}
    waits: dict[tuple[object, ...], tuple[Groups, Groups]] = {}
    for computation in module.computations.values():
        for id in computation.instructions:
            instruction = module.instructions[id]
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            key = (kind, groups_key(module.data, instruction.span))
            if key not in waits:
                links = groups_of(module.data, instruction.span, module.devices)
                waits[key] = links, _waiting_groups(kind, links, platform, processes)
            links, groups = waits[key]
            for control in _controls_around(module, agreement.callers, computation.id, controls):
                labels = agreement.condition_labels(control)
                apart = next((group for group in groups if len(set(labels[group].tolist())) > 1), None)
                if apart is not None:
                    op_name = module.metadata(instruction).op_name
                    yield SkippedCollective(instruction, control, op_name, links, tuple(apart))
                    break


def _waiting_groups(kind: str, links: Groups, platform: str, processes: Sequence[int]) -> Groups:
    # The rules are in the module's docstring.
    if kind != "collective-permute":
        return links
    if platform == "cpu":
        return [list(range(len(processes)))]
    together = list(links)
    for process in dict.fromkeys(processes):
        together.append([device for device, owner in enumerate(processes) if owner == process])
    root = list(range(len(processes)))

    def find(device: int) -> int:
        while root[device] != device:
            device = root[device]
        return device

    for group in together:
        for device in group[1:]:
            root[find(device)] = find(group[0])
    merged: dict[int, list[int]] = {}
    for device in range(len(processes)):
        merged.setdefault(find(device), []).append(device)
    return list(merged.values())


def _controls_around(
    module: Module, callers: Mapping[int, list[Instruction]], computation: int, known: dict[int, list[Instruction]]
) -> list[Instruction]:
    if computation not in known:
        known[computation] = []  # ends the recursion if a damaged module calls itself
        around: dict[int, Instruction] = {}
        for caller in callers.get(computation, ()):
            if caller.opcode in ("while", "conditional"):
                around[caller.id] = caller
            around |= {outer.id: outer for outer in _controls_around(module, callers, caller.computation, known)}
        known[computation] = list(around.values())
    return known[computation]


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """Knowledge about one value of the program: which devices hold equal values.

    Fields:
        labels: a number for each device. Devices with equal numbers hold equal values.
        exact: whether the value is an integer and the labels are its value on each device.
        table: the elements, if the value is a constant list of integers.
    """

    labels: np.ndarray
    exact: bool = False
    table: np.ndarray | None = None

    @functools.cached_property
    def uniform(self) -> bool:
        return bool((self.labels == self.labels[0]).all())

    def same(self, other: _Value | None) -> bool:
        return (
            other is not None
            and self.exact == other.exact
            and self.table is other.table
            and bool((self.labels == other.labels).all())
        )


def _combine_inputs(values: Sequence[_Value]) -> _Value:
    """Returns which devices surely hold equal results of a function of `values`: the devices that agree on all of
    them."""
    apart = [value.labels for value in values if not value.uniform]
    if not apart:
        return _Value(np.zeros(len(values[0].labels), np.int64))
    if len(apart) == 1:
        return _Value(_numbered(apart[0]))
    return _Value(np.unique(np.stack(apart), axis=1, return_inverse=True)[1].reshape(-1))


def _numbered(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1].reshape(-1)


def _combine_alternatives(values: Sequence[_Value]) -> _Value:
    """Returns which devices surely hold equal results if the result is one of `values`, the same one on all devices.
    If the values differ, these are the devices that agree on all of them."""
    first = values[0]
    return first if all(value is first or value.same(first) for value in values) else _combine_inputs(values)


def _shift(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda value, by: np.where((by >= 0) & (by < 63), function(value, np.clip(by, 0, 62)), 0)


# Integer arithmetic on device numbers; operands are not negative (`_Agreement._arithmetic`).
_ARITHMETIC: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "divide": lambda a, b: a // np.maximum(b, 1),
    "remainder": lambda a, b: a % np.maximum(b, 1),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "clamp": lambda low, a, high: np.clip(a, low, high),
    "shift-right-logical": _shift(np.right_shift),
    "shift-right-arithmetic": _shift(np.right_shift),
    "shift-left": _shift(np.left_shift),
}
# Operations that return an integer unchanged.
_PASSING = frozenset(
    (
        "bitcast",
        "copy",
        "copy-start",
        "copy-done",
        "reshape",
        "convert",
        "broadcast",
        "transpose",
        "opt-barrier",
        "optimization-barrier",
        "domain",
        "add-dependency",
    )
)


class _Agreement:
    """Derives which devices are certain to hold equal values, for the values on which loop and branch conditions
    depend.

    A loop's state depends on itself, so values start as unknown and are computed again whenever one of their inputs
    changes, until nothing changes.
    """

    def __init__(self, module: Module, axes: Axes, parameters: Mapping[int, ArgumentLayout]):
        self._module, self._axes, self._parameters = module, axes, parameters
        self.callers: dict[int, list[Instruction]] = {}
        for instruction in module.instructions.values():
            for computation in instruction.called:
                self.callers.setdefault(computation, []).append(instruction)
        self._values: dict[Node, _Value] = {}
        self._users: dict[Node, set[Node]] = {}
        self._pending: list[Node] = []
        self._current: Node | None = None
        self._uniform = _Value(np.zeros(module.devices, np.int64))
        self._distinct = _Value(np.arange(module.devices))

    def condition_labels(self, control: Instruction) -> np.ndarray:
        """Returns one label per device for the condition of a loop or a conditional. Devices with equal labels run the
        same number of iterations or take the same branch.
        """
        condition = self._condition(control)
        if condition is None:
            return self._uniform.labels
        node = (condition.id, ())
        if node not in self._users:
            self._users[node] = set()
            self._pending.append(node)
        while self._pending:
            self._current = current = self._pending.pop()
            before, value = self._values.get(current), self._compute(*current)
            if value is None:
                continue
            if before is not None and not value.same(before):
                value = _combine_alternatives((before, value))
            if not value.same(before):
                self._values[current] = value
                self._pending += self._users[current]
        return self._values.get(node, self._uniform).labels

    def _condition(self, control: Instruction) -> Instruction | None:
        if control.opcode == "while":
            return self._module.root(control.called[1]) if len(control.called) > 1 else None
        return self._module.operand(control, 0)

    def _get(self, instruction: Instruction | None, index: Index = ()) -> _Value | None:
        """Returns what is known so far about which devices agree on a value; None if it has not been computed yet.

        A value that is requested for the first time is scheduled to be computed. The value that is being computed at
        the moment is recorded as depending on it, so that it is computed again after a change.
        """
        if instruction is None:
            return self._uniform
        node = (instruction.id, index)
        if node not in self._users:
            self._users[node] = set()
            self._pending.append(node)
        if self._current is not None:
            self._users[node].add(self._current)
        return self._values.get(node)

    def _compute(self, id: int, index: Index) -> _Value | None:
        module, instruction = self._module, self._module.instructions[id]
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            return self._get(module.operand(instruction, 0), (instruction.tuple_index, *index))
        if opcode == "tuple" and index:
            return self._get(module.operand(instruction, index[0]), index[1:])
        if opcode == "constant":
            return self._constant(instruction)
        if opcode in ("partition-id", "replica-id"):
            return _Value(np.arange(module.devices), exact=True)
        if opcode in ("infeed", "recv", "recv-done", "outfeed"):
            return self._distinct
        if opcode == "parameter":
            return self._parameter(instruction, index)
        if opcode == "while":
            return self._loop(instruction, index)
        if opcode == "conditional":
            results = [self._get(module.root(branch), index) for branch in instruction.called]
            known = [value for value in (*results, self._get(module.operand(instruction, 0))) if value]
            return _combine_inputs(known) if known else None
        if opcode in ("fusion", "call"):
            return self._get(module.root(instruction.called[0]), index) if instruction.called else self._uniform
        kind = opcode.removesuffix("-start")
        if opcode.endswith("-done") and instruction.operands:
            return self._get(module.operand(instruction, 0), () if kind != "async-done" else (1, *index))
        if opcode == "async-start":
            return self._get(module.root(instruction.called[0]), index[1:]) if instruction.called else self._uniform
        values = [self._get(module.instructions.get(operand)) for operand in instruction.operands]
        operands = [value for value in values if value is not None]
        if len(operands) < len(values):
            return None
        if kind in COLLECTIVES:
            if index and index[0] < len(operands) and kind == opcode:
                operands = [operands[index[0]]]
            return self._collective(kind, instruction, _combine_inputs(operands or [self._uniform]))
        return self._arithmetic(instruction, operands) or _combine_inputs(operands or [self._uniform])

    def _loop(self, loop: Instruction, index: Index) -> _Value | None:
        """Returns which devices agree on the element at tuple index `index` of a loop's state. The value is the initial
        value or the value after some iteration, so devices that run different numbers of iterations may disagree."""
        first, root = self._module.operand(loop, 0), self._module.root(loop.called[0]) if loop.called else None
        if index and root is not None and self._is_carried_unchanged(root, index[0]):
            return self._get(first, index)
        turns = [value for value in (self._get(first, index), self._get(root, index)) if value]
        if not turns:
            return None
        value, condition = _combine_alternatives(turns), self._get(self._condition(loop))
        return value if condition is None or condition.uniform else _combine_inputs((value, condition))

    def _is_carried_unchanged(self, root: Instruction, at: int) -> bool:
        value = self._module.operand(root, at) if root.opcode == "tuple" else None
        while value is not None and value.opcode in ("copy", "bitcast"):
            value = self._module.operand(value, 0)
        if value is None or value.opcode != "get-tuple-element" or value.tuple_index != at:
            return False
        source = self._module.operand(value, 0)
        return source is not None and source.opcode == "parameter"

    def _parameter(self, parameter: Instruction, index: Index) -> _Value | None:
        """Returns which devices agree on a parameter of a computation, from the values that the callers pass.

        A parameter of the entry computation differs along the mesh axes over which it is sharded. If it has no
        sharding, all devices are assumed to hold the same value.
        """
        module, callers = self._module, self.callers.get(parameter.computation, ())
        if not callers:
            layout = self._parameters.get(parameter.parameter)
            if layout is None or not layout.axes:
                return self._uniform
            sizes = [size for _, size in self._axes]
            along = [at for at, (name, _) in enumerate(self._axes) if name in layout.axes]
            places = np.array([coordinates(device, sizes) for device in range(module.devices)])[:, along]
            return _Value(np.unique(places, axis=0, return_inverse=True)[1].reshape(-1))
        passed = []
        for caller in callers:
            if caller.opcode == "while":
                passed.append(self._get(caller, index))
            elif caller.opcode == "conditional":
                passed.append(self._get(module.operand(caller, caller.called.index(parameter.computation) + 1), index))
            elif caller.opcode in ("fusion", "call", "async-start"):
                passed.append(self._get(module.operand(caller, parameter.parameter), index))
            else:  # the callers are reductions or sorts, which pass pairs of elements
                passed += [self._get(module.instructions.get(operand)) for operand in caller.operands]
        known = [value for value in passed if value]
        return _combine_alternatives(known) if known else None

    def _constant(self, constant: Instruction) -> _Value:
        """Reads a scalar integer constant, or a constant list of at most 65,536 integers. For other constants, returns
        only that all devices hold the same value."""
        shape = self._module.shape(constant)
        if "int" not in shape.dtype or len(shape.dims) > 1 or shape.elements > _MAX_TABLE:
            return self._uniform
        numbers: list[int] = []
        for field, value in wire.fields(self._module.data, constant.span):
            if field == 8:
                for part, item in wire.fields(self._module.data, wire.message(value)):
                    if part in (4, 5, 6, 7):
                        numbers += map(wire.signed, wire.numbers(self._module.data, item))
        if not numbers or len(numbers) != max(shape.elements, 1) or max(map(abs, numbers)) > 2**62:
            return self._uniform
        if shape.dims and shape.dims != (1,):
            return _Value(self._uniform.labels, table=np.array(numbers))
        return _Value(np.full(self._module.devices, numbers[0]), exact=True)

    def _arithmetic(self, instruction: Instruction, operands: Sequence[_Value]) -> _Value | None:
        """Computes the result of an operation on integers whose values are known on each device. Returns None if an
        operand is not known, or for other operations."""
        opcode = instruction.opcode
        if opcode in _PASSING and len(operands) == 1:
            return operands[0]
        if opcode == "dynamic-slice" and len(operands) == 2 and operands[0].table is not None and operands[1].exact:
            table = operands[0].table
            if self._module.shape(instruction).dims == (1,):
                return _Value(table[np.clip(operands[1].labels, 0, len(table) - 1)], exact=True)
        function = _ARITHMETIC.get(opcode)
        if function is None or not all(value.exact and (value.labels >= 0).all() for value in operands):
            return None
        return _Value(function(*(value.labels for value in operands)), exact=True)

    def _collective(self, kind: str, instruction: Instruction, operand: _Value) -> _Value:
        """Returns which devices agree on the result of a collective. `operand`: which devices agree on the operand. In
        an all-reduce, all-gather or broadcast, the devices of a group get the same result. In other collectives, each
        device of a group gets its own part. The target of a permute gets the value of its source."""
        groups = groups_of(self._module.data, instruction.span, self._module.devices)
        keys: list[object] = [None] * self._module.devices
        for group in groups:
            if kind == "collective-permute":
                keys[group[1]] = int(operand.labels[group[0]])
                continue
            members = tuple(operand.labels[group].tolist())
            whole = kind in ("all-reduce", "all-gather", "collective-broadcast")
            for place, device in enumerate(group):
                keys[device] = members if whole else (members, place)
        numbers: dict[object, int] = {}
        return _Value(np.array([numbers.setdefault(key, len(numbers)) for key in keys]))
