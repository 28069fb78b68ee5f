"""Reads a module's compiled schedule into records (`schedule_records.Steps`), in the order in which one device runs
it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

from bytescope.memory.cost import collectives, host_transfers, kernel_costs
from bytescope.memory.cost.flops import FlopCount
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.loops import backend_config, full_turns
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.records.report_record import STEP_PHASES
from bytescope.memory.records.schedule_records import (
    FOREIGN,
    GROUPED,
    MOVING,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    InstructionSteps,
    Loop,
    ScheduledKernel,
    Start,
    Step,
    Steps,
    Wait,
    merged,
    unit_of,
)
from bytescope.memory.records.schedule_records import kernels as every_kernel
from bytescope.memory.seconds import products

# Maximum number of records of a step, because a damaged module may call the same computation over and over.
_MAX_RECORDS = 2**17
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
        steps: the kernels, collectives and copies in the order in which they run; () if unknown.
        order: the same schedule with one record per HLO instruction, to compute when each instruction starts. The body
            of a loop is listed once. Kernels of unknown work have no FLOPs yet; `settle` adds them.
        settle: function that returns a copy of its steps in which kernels of unknown work, such as custom calls, have
            their FLOPs. The compiled module does not contain these FLOPs, so they are derived from the jaxpr.
    """

    steps: Steps = ()
    order: tuple[InstructionSteps, ...] = ()
    settle: Callable[[Steps], Steps] = lambda steps: steps

    def flops_of(self, names: Collection[str]) -> dict[str, int]:
        """Returns the FLOPs of one run of each instruction with one of these names. Instructions without a kernel are
        left out.
        """
        found: dict[str, int] = {}
        pending = list(self.order) if names else []
        while pending:
            each = pending.pop()
            pending += each.inside
            if each.name in names and not each.inside:
                found[each.name] = sum(times * kernel.flops for kernel, times in every_kernel(self.settle(each.steps)))
        return found


def read_schedule(
    attribution: Attribution,
    per_host: int = 0,
    flops: FlopCount | None = None,
    devices: int = 1,
) -> CompiledSchedule:
    """Returns the compiled schedule of a program, for one device and one call. The schedule is empty if it would have
    more than `_MAX_RECORDS` records.

    Kernels move the bytes of `cost.kernel_costs`. A loop without a known trip count runs once, and a conditional counts
    as its most expensive branch.

    The compiled module does not contain the FLOPs of two kinds of kernels. They are derived from the FLOPs of the jaxpr
    (`flops`), separately for each phase:
    - Library kernels (kind FOREIGN) share the FLOPs of the jaxpr that no other kernel computes. If matrix products of
      the shapes of their arrays would have the same total FLOPs, each kernel becomes its product (kind TILED if its
      operands have 8 bits, else PRODUCT). Otherwise, the FLOPs are divided in proportion to the bytes of the kernels.
    - Matrix products of experts (kind GROUPED) have room for the maximum number of rows. Their FLOPs are reduced to the
      FLOPs of the jaxpr, because tiles without rows cost nothing.

    Args:
        attribution: the compiled module, with the phase of each instruction.
        per_host: number of devices of a host, 0 for one host.
        flops: FLOPs of the global program, counted in its jaxpr; None if it was not traced.
        devices: number of devices.
    """
    walk = _ScheduleReader(attribution, per_host)
    steps = walk.computation(attribution.module.entry, "")
    if walk.too_long:
        return CompiledSchedule()
    settle = _make_settle(steps, _missing_flops(steps, flops, devices))
    return CompiledSchedule(settle(steps), walk.ordered[attribution.module.entry, ""], settle)


class _ScheduleReader:
    """Converts the instructions of a compiled module to records of kernels, collectives and copies, in the order in
    which they run. `too_long`: True if reading stopped because there are more than `_MAX_RECORDS` records.
    """

    def __init__(self, attribution: Attribution, per_host: int):
        self.attribution, self.module, self.per_host = attribution, attribution.module, per_host
        self.too_long = False
        self.begun: set[str] = set()
        self.known: dict[tuple[int, str], Steps] = {}
        self.ordered: dict[tuple[int, str], tuple[InstructionSteps, ...]] = {}
        self.sizes: dict[int, int] = {}  # id of a tuple in `known` -> number of its records
        self.groups: dict[tuple[tuple[int, bytes], ...], tuple[hlo_mesh.Groups, int]] = {}
        self.uncounted = host_transfers.uncounted(attribution.module)

    def computation(self, id: int, around: str) -> Steps:
        """Returns the kernels, collectives and copies of one run of an HLO computation, such as a loop body.

        `around`: the phase of the training step, such as "backward", of the instruction that calls the computation; ""
        for the entry computation.
        """
        if (id, around) not in self.known:
            self.known[id, around] = self.ordered[
                id, around
            ] = ()  # ends the recursion if a damaged module calls itself
            out: list[Step] = []
            order: list[InstructionSteps] = []
            for instruction in self.scheduled_instructions(id):
                steps = tuple(self.instruction(instruction, around))
                inside, turns = self.called_order(instruction, around), self.turns(instruction)
                order.append(InstructionSteps(instruction.name, steps, inside, turns))
                out += steps
                self.too_long |= len(out) > _MAX_RECORDS
                if self.too_long:
                    return ()
            self.known[id, around], self.ordered[id, around] = merged(out), tuple(order)
            self.too_long = self.count_records(self.known[id, around]) > _MAX_RECORDS
        return self.known[id, around]

    def count_records(self, steps: Steps) -> int:
        # The records of a loop body were counted before the loop that contains it.
        inside = [step.steps for step in steps if isinstance(step, Loop)]
        self.sizes[id(steps)] = len(steps) + sum(self.sizes.get(id(each), 0) for each in inside)
        return self.sizes[id(steps)]

    def scheduled_instructions(self, id: int) -> Iterator[Instruction]:
        computation = self.module.computations.get(id)
        if computation is None:
            return
        for number in computation.schedule or computation.instructions:
            if number in self.module.instructions:
                yield self.module.instructions[number]

    def instruction(self, one: Instruction, around: str) -> Iterator[Step]:
        opcode = one.opcode
        collective = is_collective(opcode.removesuffix("-update"))
        if opcode in _NOTHING or opcode == "async-update" or (collective and opcode.endswith("-update")):
            return
        phase = self.phase(one, around)
        if opcode in ("async-done", "copy-done") or (collective and opcode.endswith("-done")):
            yield from self.wait(one)
        elif collective:
            yield from self.start(one, one, phase)
        elif opcode == "while":
            steps = self.computation(one.called[0], phase) if one.called else ()
            if steps:
                yield Loop(self.turns(one), steps)
        elif opcode in ("conditional", "call"):
            for id in self.called(one, phase):
                yield from self.computation(id, phase)
        elif opcode == "async-start":
            yield from self.async_start(one, phase)
        elif opcode == "copy-start" and self.copies_host_data(one):
            yield from self.host_copies(one, around, one.name)
        else:
            yield from self.kernel(one, around)

    def phase(self, one: Instruction, around: str) -> str:
        phase = kernel_costs.phase_of(self.attribution, one, around)
        return phase if phase in STEP_PHASES else "forward"

    # ---- operations that call computations ---------------------------------------------------------------------

    def turns(self, one: Instruction) -> int:
        return (full_turns(self.module, one) or 1) if one.opcode == "while" else 1

    def called(self, one: Instruction, phase: str) -> list[int]:
        """Returns the ids of the computations that an instruction calls: the body of a loop, a called function, or the
        most expensive branch of a conditional. Returns [] for other opcodes. `phase`: the phase of the instruction.
        """
        if one.opcode == "while":
            return one.called[:1]
        if one.opcode == "conditional":
            return sorted(one.called, key=lambda id: -_branch_cost(self.computation(id, phase)))[:1]
        return one.called if one.opcode == "call" else []

    def called_order(self, one: Instruction, around: str) -> tuple[InstructionSteps, ...]:
        """Returns one record (its name and the operations that it runs) for each instruction of the computations that
        an instruction calls (`called`). `around`: the phase of the step in which the caller runs.
        """
        if one.opcode not in ("while", "call", "conditional"):
            return ()
        phase = self.phase(one, around)
        orders = [self.ordered.get((id, phase), ()) for id in self.called(one, phase)]
        return tuple(itertools.chain.from_iterable(orders))

    def async_start(self, one: Instruction, phase: str) -> Iterator[Step]:
        for id in one.called[:1]:
            for instruction in self.scheduled_instructions(id):
                if is_collective(instruction.opcode):
                    yield from self.start(one, instruction, phase)
                elif self.copies_host_data(instruction):
                    yield from self.host_copies(instruction, phase, one.name)
                else:  # counted as if it were synchronous
                    yield from self.instruction(instruction, phase)

    # ---- operations beside compute ---------------------------------------------------------------------------

    def start(self, start: Instruction, one: Instruction, phase: str) -> Iterator[Step]:
        """Yields the record that the collective `one` starts, with its payload and devices; nothing if the collective
        sends no bytes.

        `phase`: the phase of the step. `start`: the instruction that starts the collective: `one` itself, or the
        async-start instruction that contains it.
        """
        kind = one.opcode.removesuffix("-start")
        groups, hosts = self.groups_and_hosts(one)
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

    def groups_and_hosts(self, one: Instruction) -> tuple[hlo_mesh.Groups, int]:
        key = hlo_mesh.groups_key(self.module.data, one.span)
        if key not in self.groups:
            groups = hlo_mesh.groups_of(self.module.data, one.span, self.module.devices)
            self.groups[key] = groups, hlo_mesh.hosts_of(groups, self.per_host)
        return self.groups[key]

    def wait(self, one: Instruction) -> Iterator[Step]:
        start: Instruction | None = one
        # -update instructions may be between start and done.
        for _ in range(collectives.MAX_UPDATES):
            start = self.module.operand(start, 0) if start else None
            if start is not None and start.opcode.endswith("-start"):
                break
        if start is not None and start.name in self.begun:
            yield Wait(start.name)

    def copies_host_data(self, one: Instruction) -> bool:
        operands = [self.module.operand(one, i) for i in range(len(one.operands))]
        shapes = [self.module.shape(item) for item in (one, *operands) if item]
        spaces = {leaf.memory_space for shape in shapes for _, leaf in leaves(shape)}
        if host_transfers.HOST_SPACE not in spaces:
            return False
        return any(next(host_transfers.moved(self.module, item), None) for item in self.fused_instructions(one))

    def fused_instructions(self, one: Instruction) -> Iterator[Instruction]:
        if one.opcode != "fusion":
            yield one
            return
        for id in one.called:
            yield from self.scheduled_instructions(id)

    def host_copies(self, one: Instruction, around: str, name: str) -> Iterator[Start]:
        self.begun.add(name)
        around = self.phase(one, around)
        for item in self.fused_instructions(one):
            for way, size, array in host_transfers.moved(self.module, item):
                # A loop of unknown trip count copies an array slice by slice: the whole array is counted.
                whole = item.computation in self.uncounted
                yield Start(name, _WAYS[way], self.phase(item, around), array if whole else size)

    # ---- kernels --------------------------------------------------------------------------------------------

    def kernel(self, one: Instruction, around: str) -> Iterator[Step]:
        if one.opcode in _CROSSING and self.copies_host_data(one):
            yield from self.host_copies(one, around, "")
            if one.opcode != "fusion":
                return
        size = kernel_costs.moved(self.module, one)
        if not size:
            return
        phase = self.phase(one, around)
        work = products.find(self.module, one)
        if work is None:
            yield ScheduledKernel(MOVING, phase, size)
            return
        yield ScheduledKernel(work.kind, phase, size, work.flops, work.dtype, work.size, work.causal)


_NOTHING = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"))
# Operations that may copy over the host link, and that compute waits for.
_CROSSING = frozenset((*host_transfers.CROSSING, "fusion"))


def _branch_cost(steps: Steps) -> int:
    # In bytes: FLOPs are converted at one byte for every _FLOPS_PER_BYTE.
    own = sum(times * (kernel.bytes + kernel.flops // _FLOPS_PER_BYTE) for kernel, times in every_kernel(steps))
    return own + sum(step.bytes for step in steps if isinstance(step, Start))


def _missing_flops(steps: Steps, flops: FlopCount | None, devices: int) -> dict[str, int]:
    """Returns the FLOPs on one device that the jaxpr counts, but no kernel of known work in the schedule computes, as
    phase -> FLOPs. The kernels of unknown work must compute them.

    The jaxpr counts masked pairs of causal attention, so they are counted for known attention kernels too. Each device
    computes all replicated FLOPs, and an equal share of the other FLOPs.
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
    foreign_flops: int = 0  # FLOPs of the products that the arrays suggest
    foreign_bytes: int = 0
    grouped_flops: int = 0  # FLOPs for the maximum number of rows of experts


def _make_settle(steps: Steps, missing: Mapping[str, int]) -> Callable[[Steps], Steps]:
    """Returns a function that sets the FLOPs of kernels of unknown work (library calls and matrix products of experts),
    such that they add up to `missing`. It accepts `steps`, the whole schedule, or a part of it.

    `missing`: phase -> FLOPs of all these kernels together (from `_missing_flops`).
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
        if work.grouped_flops and phase in missing:
            filled[phase] = min(max(missing[phase] - work.foreign_flops, 0) / work.grouped_flops, 1.0)
        left[phase] = max(missing.get(phase, 0) - round(filled[phase] * work.grouped_flops), 0)
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

    return lambda steps: _map_kernels(steps, settle)


def _map_kernels(steps: Steps, change: Callable[[ScheduledKernel], ScheduledKernel]) -> Steps:
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            step = Loop(step.trips, _map_kernels(step.steps, change))
        out.append(change(step) if isinstance(step, ScheduledKernel) else step)
    return merged(out)
