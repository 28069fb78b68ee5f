"""Reads a module's compiled schedule into records (`step_schedule.Steps`), in the order in which one device runs
it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from bytescope.memory.cost import collectives, host_transfers, kernel_costs
from bytescope.memory.cost.flops import FlopCount
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.loops import backend_config, full_turns
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.records.report_record import STEP_PHASES
from bytescope.memory.records.schedule_records import InstructionSteps
from bytescope.memory.seconds import products
from bytescope.memory.seconds.step_schedule import (
    FOREIGN,
    GROUPED,
    MOVING,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    Loop,
    ScheduledKernel,
    Start,
    Step,
    Steps,
    Wait,
    merged,
    unit_of,
)
from bytescope.memory.seconds.step_schedule import kernels as every_kernel

# Maximum number of updates between the start and the done of an asynchronous operation, and maximum number of records
# of a step, because a damaged module may call the same computation over and over.
_MAX_UPDATES, _MAX_RECORDS = 24, 2**17
# FLOPs that a device computes in the time in which it moves one byte, here 989 / 3.35 of an H100. It is used to
# compare the branches of a conditional.
_FLOPS_PER_BYTE = 295
# Foreign kernels are the products that their arrays suggest if the FLOPs of these products differ from the jaxpr's
# count by less than 1 / _PRECISION.
_PRECISION = 100
_WAYS = {host_transfers.TO_HOST: TO_HOST, host_transfers.TO_DEVICE: TO_DEVICE}


@dataclasses.dataclass(frozen=True)
class CompiledSchedule:
    """The compiled schedule of a program, for one device and one call.

    Fields:
        steps: the kernels, collectives and copies in order; () if unknown.
        order: the schedule as one record per instruction, without the FLOPs that `settle` adds; loop bodies occur
            once.
        settle: function that adds FLOPs to the kernels whose work the compiled module does not contain.
    """

    steps: Steps = ()
    order: tuple[InstructionSteps, ...] = ()
    settle: Callable[[Steps], Steps] = lambda steps: steps


def read(
    attribution: Attribution,
    mesh: hlo_mesh.Axes = (),
    per_host: int = 0,
    flops: FlopCount | None = None,
    devices: int = 1,
) -> Steps:
    """Returns the kernels, collectives and copies of a program's compiled schedule. The arguments are those of
    `read_schedule`.
    """
    return read_schedule(attribution, mesh, per_host, flops, devices).steps


def read_schedule(
    attribution: Attribution,
    mesh: hlo_mesh.Axes = (),
    per_host: int = 0,
    flops: FlopCount | None = None,
    devices: int = 1,
) -> CompiledSchedule:
    """Returns the compiled schedule of a program, for one device and one call. The schedule is empty if it would have
    too many records.

    Kernels move the bytes of `cost.kernel_costs`. A loop without a known trip count runs once, and a conditional
    counts as its most expensive branch.

    FLOPs that the compiled module does not contain are added as follows:
    - Library kernels of unknown work (FOREIGN) share the FLOPs that `flops` counts in their phase and that no other
      kernel computes. If the products that the shapes of their arrays suggest add up to these FLOPs, they are these
      products (TILED if their operands have 8 bits). Otherwise, each kernel gets a share in proportion to its bytes.
    - Products of experts (GROUPED) get only the part of their rows' FLOPs that `flops` counts, because tiles without
      rows cost nothing.

    Args:
        mesh: names and sizes of the mesh axes (unused, because the module lists groups).
        per_host: number of devices of a host, 0 for one host.
        flops: FLOPs of the global program; None if it was not traced.
        devices: number of devices.
    """
    walk = _ScheduleReader(attribution, per_host)
    steps = walk.computation(attribution.module.entry, "")
    if walk.endless:
        return CompiledSchedule()
    settle = _settling(steps, _beyond(steps, flops, devices))
    return CompiledSchedule(settle(steps), walk.ordered[attribution.module.entry, ""], settle)


class _ScheduleReader:
    """One pass over the compiled schedule. `endless`: whether the schedule has more than `_MAX_RECORDS` records."""

    def __init__(self, attribution: Attribution, per_host: int):
        self.attribution, self.module, self.per_host = attribution, attribution.module, per_host
        self.endless = False
        self.begun: set[str] = set()
        self.known: dict[tuple[int, str], Steps] = {}
        self.ordered: dict[tuple[int, str], tuple[InstructionSteps, ...]] = {}
        self.sizes: dict[int, int] = {}  # id of a tuple in `known` -> number of its records
        self.groups: dict[tuple[tuple[int, bytes], ...], tuple[hlo_mesh.Groups, int]] = {}
        self.uncounted = host_transfers.uncounted(attribution.module)

    def computation(self, id: int, around: str) -> Steps:
        """Returns the steps of one run of a computation. `around` is the phase of the instruction that calls the
        computation.
        """
        if (id, around) not in self.known:
            self.known[id, around] = self.ordered[
                id, around
            ] = ()  # ends the recursion if a damaged module calls itself
            out: list[Step] = []
            order: list[InstructionSteps] = []
            for instruction in self.scheduled(id):
                steps = tuple(self.instruction(instruction, around))
                order.append(InstructionSteps(instruction.name, steps, self.called_order(instruction, around)))
                out += steps
                self.endless |= len(out) > _MAX_RECORDS
                if self.endless:
                    return ()
            self.known[id, around], self.ordered[id, around] = merged(out), tuple(order)
            self.endless = self.size(self.known[id, around]) > _MAX_RECORDS
        return self.known[id, around]

    def size(self, steps: Steps) -> int:
        """Returns the number of records in the steps, including those in loops. The number for equal loops is computed
        only once.
        """
        inside = [step.steps for step in steps if isinstance(step, Loop)]
        self.sizes[id(steps)] = len(steps) + sum(self.sizes.get(id(each), 0) for each in inside)
        return self.sizes[id(steps)]

    def scheduled(self, id: int) -> Iterator[Instruction]:
        """Yields the instructions of a computation in the order in which they run."""
        computation = self.module.computations.get(id)
        if computation is None:
            return
        for number in computation.schedule or computation.instructions:
            if number in self.module.instructions:
                yield self.module.instructions[number]

    def instruction(self, one: Instruction, around: str) -> Iterator[Step]:
        opcode = one.opcode
        if opcode in _NOTHING:
            return
        if is_collective(opcode.removesuffix("-update")):
            yield from self.collective(one, around)
        else:
            rule = _RULES.get(opcode, _ScheduleReader.kernel)
            yield from rule(self, one, around)

    def phase(self, one: Instruction, around: str) -> str:
        """Returns the phase of an operation, one of `STEP_PHASES`. If its name does not show the phase, it counts to
        the forward pass.
        """
        phase = kernel_costs.phase_of(self.attribution, one, around)
        return phase if phase in STEP_PHASES else "forward"

    # ---- operations that call computations
    # -----------------------------------------------------------------------------------------

    def loop(self, one: Instruction, around: str) -> Iterator[Step]:
        steps = self.computation(one.called[0], self.phase(one, around)) if one.called else ()
        if steps:
            yield Loop(full_turns(self.module, one) or 1, steps)

    def conditional(self, one: Instruction, around: str) -> Iterator[Step]:
        id = self.dearest_branch(one, around)
        yield from self.computation(id, self.phase(one, around)) if id is not None else ()

    def dearest_branch(self, one: Instruction, around: str) -> int | None:
        phase = self.phase(one, around)
        return max(one.called, key=lambda id: _cost(self.computation(id, phase)), default=None)

    def called_order(self, one: Instruction, around: str) -> tuple[InstructionSteps, ...]:
        """Returns the instructions, with their steps, of the computations that a loop, a call or a conditional
        runs.
        """
        called: Iterable[int] = ()
        if one.opcode == "while":
            called = one.called[:1]
        elif one.opcode == "call":
            called = one.called
        elif one.opcode == "conditional":
            branch = self.dearest_branch(one, around)
            called = () if branch is None else (branch,)
        orders = [self.ordered.get((id, self.phase(one, around)), ()) for id in called]
        return tuple(itertools.chain.from_iterable(orders))

    def call(self, one: Instruction, around: str) -> Iterator[Step]:
        phase = self.phase(one, around)
        for id in one.called:
            yield from self.computation(id, phase)

    def wrapped(self, one: Instruction, around: str) -> Iterator[Step]:
        """Yields the steps of an async-start instruction. If it starts a collective or a copy between device and host,
        this runs on a stream of its own.
        """
        phase = self.phase(one, around)
        for id in one.called[:1]:
            for instruction in self.scheduled(id):
                if is_collective(instruction.opcode):
                    yield from self.start(one, instruction, phase)
                elif self.crosses(instruction):
                    yield from self.crossing(instruction, phase, one.name)
                else:
                    yield from self.instruction(instruction, phase)

    # ---- operations beside compute ---------------------------------------------------------------------------

    def collective(self, one: Instruction, around: str) -> Iterator[Step]:
        if one.opcode.endswith(("-done", "-update")):
            yield from self.wait(one, around)
        else:
            yield from self.start(one, one, self.phase(one, around))

    def start(self, start: Instruction, one: Instruction, phase: str) -> Iterator[Step]:
        """Yields the start of a collective. Yields nothing if the collective sends nothing. The instruction `start` is
        the collective itself or the async-start around it.
        """
        kind = one.opcode.removesuffix("-start")
        groups, hosts = self.members(one)
        share, group = collectives.share(kind, groups, self.module.devices)
        if not share:
            return
        arrays = collectives.arrays_of(self.module, one)
        given = sum(shape.bytes for shape in arrays)
        settings = backend_config(self.module, start).get("collective_backend_config")
        synchronous = isinstance(settings, dict) and settings.get("is_sync") is True
        name = start.name if start.opcode.endswith("-start") and not synchronous else ""
        self.begun.add(name)
        yield Start(name, kind, phase, given * group if kind == "all-gather" else given, group, hosts, len(arrays))

    def members(self, one: Instruction) -> tuple[hlo_mesh.Groups, int]:
        """Returns (device groups of a collective, maximum number of hosts that a group spans)."""
        key = hlo_mesh.groups_key(self.module.data, one.span)
        if key not in self.groups:
            groups = hlo_mesh.groups_of(self.module.data, one.span, self.module.devices)
            self.groups[key] = groups, hlo_mesh.hosts_of(groups, self.per_host)
        return self.groups[key]

    def wait(self, one: Instruction, around: str) -> Iterator[Step]:
        """Yields the wait for the operation that a done instruction ends, if the operation is on a stream of its own.
        Update instructions between start and done are followed.
        """
        if one.opcode.endswith("-update"):
            return
        start: Instruction | None = one
        for _ in range(_MAX_UPDATES):
            start = self.module.operand(start, 0) if start else None
            if start is not None and start.opcode.endswith("-start"):
                break
        if start is not None and start.name in self.begun:
            yield Wait(start.name)

    def copy_start(self, one: Instruction, around: str) -> Iterator[Step]:
        if self.crosses(one):
            yield from self.crossing(one, around, one.name)
        else:
            yield from self.kernel(one, around)

    def crosses(self, one: Instruction) -> bool:
        """Returns whether an operation, or an operation fused into it, copies data between device and host."""
        operands = [self.module.operand(one, i) for i in range(len(one.operands))]
        shapes = [self.module.shape(item) for item in (one, *operands) if item]
        spaces = {leaf.memory_space for shape in shapes for _, leaf in leaves(shape)}
        if host_transfers.HOST_SPACE not in spaces:
            return False
        return any(next(host_transfers.moved(self.module, item), None) for item in self.parts(one))

    def parts(self, one: Instruction) -> Iterator[Instruction]:
        """Yields the operations inside a fusion. If the operation is not a fusion, yields the operation itself."""
        if one.opcode != "fusion":
            yield one
            return
        for id in one.called:
            yield from self.scheduled(id)

    def crossing(self, one: Instruction, around: str, name: str) -> Iterator[Start]:
        """Yields a `Start` for each copy between device and host that an operation makes. If the number of iterations
        of a loop around it is unknown, the whole array is assumed to be copied.
        """
        self.begun.add(name)
        around = self.phase(one, around)
        for item in self.parts(one):
            for way, size, array in host_transfers.moved(self.module, item):
                whole = item.computation in self.uncounted
                yield Start(name, _WAYS[way], self.phase(item, around), array if whole else size)

    # ---- kernels --------------------------------------------------------------------------------------------

    def kernel(self, one: Instruction, around: str) -> Iterator[Step]:
        if one.opcode in _CROSSING and self.crosses(one):
            yield from self.crossing(one, around, "")
            if one.opcode != "fusion":
                return
        size, product = kernel_costs.traffic(self.module, one)
        if not size:
            return
        phase = self.phase(one, around)
        work = products.find(self.module, one) if product else None
        if work is None:
            yield ScheduledKernel(MOVING, phase, size)
            return
        yield ScheduledKernel(work.kind, phase, size, work.flops, work.dtype, work.size, work.causal)


_NOTHING = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))
# Operations that may copy over the host link, and that compute waits for.
_CROSSING = frozenset((*host_transfers.CROSSING, "fusion"))
_Rule = Callable[[_ScheduleReader, Instruction, str], Iterator[Step]]
# Opcode -> method that yields its steps. Other opcodes, except collectives, are kernels or have no step.
_RULES: dict[str, _Rule] = {
    "while": _ScheduleReader.loop,
    "conditional": _ScheduleReader.conditional,
    "call": _ScheduleReader.call,
    "async-start": _ScheduleReader.wrapped,
    "async-update": _ScheduleReader.wait,
    "async-done": _ScheduleReader.wait,
    "copy-start": _ScheduleReader.copy_start,
    "copy-done": _ScheduleReader.wait,
}


def _cost(steps: Steps) -> int:
    """Returns the cost of a branch of a conditional, to find the most expensive branch: the bytes of all kernels and
    transfers, plus the bytes that a device could move in the time of the FLOPs.
    """
    own = sum(times * (kernel.bytes + kernel.flops // _FLOPS_PER_BYTE) for kernel, times in every_kernel(steps))
    return own + sum(step.bytes for step in steps if isinstance(step, Start))


def _beyond(steps: Steps, flops: FlopCount | None, devices: int) -> dict[str, int]:
    """Returns phase -> FLOPs per device that the jaxpr contains beyond the matrix products that are known from the
    module. FLOPs of masked attention pairs are included, as in the jaxpr.

    Every device computes all FLOPs of a replicated kernel, and an equal share of all other FLOPs.
    """
    if flops is None:
        return {}
    left: dict[str, int] = {}
    for (phase, _), count in flops.by.items():
        left[phase] = left.get(phase, 0) + round(count / devices)
    for phase, count in flops.replicated.items():
        left[phase] += count - round(count / devices)
    for kernel, times in every_kernel(steps):
        if kernel.kind not in (FOREIGN, GROUPED) and kernel.phase in left:
            left[kernel.phase] -= times * (products.unmasked_flops(kernel) if kernel.causal else kernel.flops)
    return {phase: max(count, 0) for phase, count in left.items()}


@dataclasses.dataclass
class _UnknownWork:
    """Sums over the kernels of a phase whose work is not known from the module."""

    foreign_flops: int = 0  # FLOPs of the products that the arrays suggest
    foreign_bytes: int = 0
    grouped_flops: int = 0  # FLOPs for the maximum number of rows of experts


def _settling(steps: Steps, beyond: Mapping[str, int]) -> Callable[[Steps], Steps]:
    """Returns a function that adds the missing FLOPs to the custom kernels and the products of experts in `steps`, or
    in a part of `steps`.

    `beyond`: phase -> missing FLOPs, the sum over all of these kernels (from `_beyond`).
    """
    sums: dict[str, _UnknownWork] = {}
    for kernel, times in every_kernel(steps):
        if kernel.kind == FOREIGN:
            work = sums.setdefault(kernel.phase, _UnknownWork())
            work.foreign_flops += times * kernel.flops
            work.foreign_bytes += times * kernel.bytes
        elif kernel.kind == GROUPED:
            sums.setdefault(kernel.phase, _UnknownWork()).grouped_flops += times * kernel.flops
    if not sums:
        return lambda steps: steps
    filled: dict[str, float] = {}  # phase -> fraction of the rows of experts that contain tokens
    left: dict[str, int] = {}  # phase -> FLOPs of foreign kernels
    are_products: set[str] = set()  # phases whose foreign kernels are the products that their arrays suggest
    for phase, work in sums.items():
        filled[phase] = 1.0
        # Tiles without rows cost nothing, and the jaxpr does not count them.
        if work.grouped_flops and phase in beyond:
            filled[phase] = min(max(beyond[phase] - work.foreign_flops, 0) / work.grouped_flops, 1.0)
        left[phase] = max(beyond.get(phase, 0) - round(filled[phase] * work.grouped_flops), 0)
        if work.foreign_flops and abs(left[phase] - work.foreign_flops) * _PRECISION <= work.foreign_flops:
            are_products.add(phase)

    def settle(kernel: ScheduledKernel) -> ScheduledKernel:
        phase = kernel.phase
        if kernel.kind == GROUPED:
            return dataclasses.replace(kernel, flops=round(filled[phase] * kernel.flops))
        if kernel.kind != FOREIGN:
            return kernel
        if phase not in are_products:
            share = left[phase] * kernel.bytes // max(sums[phase].foreign_bytes, 1)
            return dataclasses.replace(kernel, flops=share, size=())
        if kernel.flops:
            return dataclasses.replace(kernel, kind=TILED if unit_of(kernel.dtype) == "fp8" else PRODUCT)
        return dataclasses.replace(kernel, kind=MOVING, dtype="")  # the other kernels compute all FLOPs of the phase

    return lambda steps: _with_kernels(steps, settle)


def _with_kernels(steps: Steps, change: Callable[[ScheduledKernel], ScheduledKernel]) -> Steps:
    """Returns the steps of a schedule with `change` applied to every kernel, also to kernels in loops."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            step = Loop(step.trips, _with_kernels(step.steps, change))
        out.append(change(step) if isinstance(step, ScheduledKernel) else step)
    return merged(out)
