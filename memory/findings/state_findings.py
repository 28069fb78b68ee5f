"""Rules about parameters, moments and gradient sums: state that is stored twice, replicated, larger than the device, on
one device before the call, or returned in another sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bytescope.memory.findings.evidence import (
    LARGE,
    MIN_ARRAY,
    NOTABLE,
    SMALL,
    STATE,
    TOY,
    RuleResult,
    arguments,
    at_peak,
    describe_buffer,
    spec_words,
    start_of_backward,
)
from bytescope.memory.formulas.model_facts import STATE_ROLES
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.ledger import COPY
from bytescope.memory.program.pairing import root_of
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import MIB, human, list_names, plural

# Minimum bytes of replicated state if no leaf is sharded. If other leaves are sharded, `MIN_ARRAY` applies.
_MIN_REPLICATED = 64 * MIB


def not_donated(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the step updates training state without donating it. The old and the new state are then in
    memory at the same time."""
    sizes: dict[str, int] = {}
    for allocation in program.allocations:
        argument = program.arguments.by_number.get(allocation.parameter) if allocation.entry_parameter else None
        if argument is None or allocation.live_out or allocation.color or argument.update < 0:
            continue
        root = root_of(argument.path)
        sizes[root] = sizes.get(root, 0) + allocation.size
    total = sum(sizes.values())
    if total <= SMALL * report.peak_bytes:
        return None
    names = sorted(sizes, key=lambda root: -sizes[root])
    lost = f"{human(total)} of state is not donated ({list_names(names)})"
    message = f"{lost}: old and new state are in memory at the same time"
    return RuleResult(total, message, _donation_remedy(program), subjects=tuple(names))


def _donation_remedy(program: PlacedProgram) -> str:
    if program.signature is not None and any(leaf.donation_off for leaf in program.signature.arguments):
        return "switch jax_debug_nans off, because jax donates nothing while it is on"
    if program.signature is not None and program.signature.by_nnx:
        return "pass donate_argnums for the state to nnx.jit"
    for equation in getattr(getattr(program.jaxpr, "jaxpr", None), "eqns", ()):
        info = getattr(getattr(equation.params.get("jaxpr"), "jaxpr", None), "debug_info", None)
        if "/equinox/_jit.py:" in (getattr(info, "func_src_info", None) or ""):
            return "pass donate='all' to eqx.filter_jit, or donate='all-except-first' and the batch as first argument"
    return ""


# ---- state that is larger than the device --------------------------------------------------------------------------


def state_too_large(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the sum of parameters, optimizer moments and accumulated gradients exceeds the memory
    limit. Neither a smaller batch nor recomputation can then make the program fit."""
    size, limit = sum(report.breakdown[row] for row in STATE), report.limit_bytes
    if not limit or size <= limit:
        return None
    message = (
        f"parameters and optimizer state take {human(size)} of {human(limit)}: neither a smaller batch nor "
        "recomputation makes the program fit"
    )
    whole = sum(leaf.whole for leaf in _state_arrays(report, program)) or size
    remedy = (
        f"shard parameters and optimizer state over {plural(math.ceil(whole / limit), 'device')} or more with "
        "NamedShardings, or store the optimizer state in 8 bits or in host memory (memory_kind='pinned_host')"
    )
    return RuleResult(size - limit, message, remedy)


# ---- replicated state ----------------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """An array of the training state.

    Fields:
        buffer: the array's buffer on one device.
        layout: its layout on the mesh, None if unknown.
        whole: bytes of the global array.
        axes: mesh axes over which the array is replicated, () if unknown.
        copies: number of devices that hold a copy, the product of the sizes of these axes.
        stacked: whether its first dimension is the number of devices, as under jax.pmap.
    """

    buffer: Buffer
    layout: ArgumentLayout | None
    whole: int
    axes: tuple[str, ...]
    copies: int
    stacked: bool = False

    @property
    def wasted_bytes(self) -> int:
        # Would be freed if the array were sharded over `axes`.
        return self.buffer.bytes - self.buffer.bytes // self.copies


def whole_state(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if arrays of the training state are replicated over several devices."""
    leaves = [leaf for leaf in _state_arrays(report, program) if leaf.copies > 1]
    if not leaves:
        return None
    by_axes: dict[tuple[str, ...], list[_Leaf]] = {}
    for leaf in leaves:
        by_axes.setdefault(leaf.axes, []).append(leaf)
    group = max(by_axes.values(), key=lambda group: sum(leaf.wasted_bytes for leaf in group))
    size, axes, copies = sum(leaf.wasted_bytes for leaf in group), group[0].axes, group[0].copies
    rows = report.breakdown
    trains = bool(rows["optimizer"] or rows["gradients"] or rows["residuals"])
    if not trains and copies < program.module.devices:  # tensor-parallel inference, replicated to serve more requests
        return None
    others = len(group) < len(_state_arrays(report, program))
    share, minimum = NOTABLE if trains else LARGE, _MIN_REPLICATED
    if others and trains:
        share, minimum = SMALL, MIN_ARRAY
    if size <= max(share * report.peak_bytes, minimum):
        return None
    group.sort(key=lambda leaf: -leaf.buffer.bytes)
    buffers = [leaf.buffer for leaf in group]
    named = list_names([f"{b.name} {b.dtype}{list(b.shape)} {human(b.bytes)}" for b in buffers])
    held, over = sum(b.bytes for b in buffers), f" of {' and '.join(axes)}" if axes else ""
    message = f"{human(held)} of state is replicated on each of {copies} devices{over}: {named}"
    return RuleResult(size, message, _sharding_remedy(group[0]))


def _state_arrays(report: JudgedProgram, program: PlacedProgram) -> list[_Leaf]:
    module, sizes = program.module, dict(program.mesh)
    out, stacked = [], _pmap_stacks(report, program)
    for number, (parameter, buffer) in arguments(report, program).items():
        if buffer.category not in STATE or buffer.memory != "device" or module.devices < 2:
            continue
        layout = program.layouts.get(number)
        if number in stacked:
            out.append(_Leaf(buffer, layout, buffer.bytes, (), module.devices, stacked=True))
            continue
        if layout is not None and sizes:
            axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in layout.axes)
            whole = buffer.bytes * layout.elements // max(math.prod(layout.local), 1)
            out.append(_Leaf(buffer, layout, whole, axes, math.prod(sizes[axis] for axis in axes)))
            continue
        axes, copies = _replica_axes(program, module.devices if module.replicated(parameter) else 1)
        out.append(_Leaf(buffer, None, buffer.bytes * max(module.devices // copies, 1), axes, copies))
    return out


def _pmap_stacks(report: JudgedProgram, program: PlacedProgram) -> frozenset[int]:
    """Returns the numbers of the compiled program's parameters that hold one copy of the state per device, stacked
    along the first dimension, as jax.pmap does. They are copies, not different data, if an all-reduce over all devices
    sums their gradients."""
    module, known = program.module, program.arguments.by_number
    summed = {item.name for item in report.collectives if item.kind == "all-reduce" and item.group == module.devices}
    paths = set()
    for (id, _), path in program.arguments.owners.items():
        instruction = module.instructions.get(id)
        if instruction is not None and instruction.name in summed:
            paths.add(path)
    stacks, parameters = [], module.parameters
    for number, argument in known.items():
        if argument.shape[:1] != (module.devices,) or number not in parameters:
            continue
        if module.shape(parameters[number]).dims[:1] == (1,):
            stacks.append(number)
    # XLA sums small gradients as one array, in which a single gradient cannot be found.
    roots = {root_of(known[number].path) for number in stacks if {known[number].path, known[number].owner} & paths}
    return frozenset(number for number in stacks if root_of(known[number].path) in roots)


def _replica_axes(program: PlacedProgram, known: int) -> tuple[tuple[str, ...], int]:
    """Returns (mesh axes, number of devices) over which the training state is replicated, as the trainer describes the
    step. Without such a description, returns ((), `known`).

    `known`: number of devices over which the compiled program replicates the array.
    """
    facts = program.facts
    if facts is None or facts.question is None:
        return (), known
    alike = facts.axes("replica", *(STATE_ROLES if facts.question.layout.zero == 0 else ()))
    return tuple(alike), math.prod(alike.values())


def _sharding_remedy(leaf: _Leaf) -> str:
    if leaf.stacked:
        return (
            "jax.pmap stores a copy on each device: use jax.jit with a mesh instead, without the leading dimension, "
            "and give every leaf of the state a jax.sharding.NamedSharding over the mesh"
        )
    if leaf.layout is None or not leaf.axes:
        return "give it a jax.sharding.NamedSharding over the mesh, in in_shardings or by jax.device_put"
    free = [(size, dim) for dim, size in enumerate(leaf.layout.local) if size % leaf.copies == 0]
    if not free:
        return (
            f"no dimension of {leaf.buffer.name}, {list(leaf.layout.local)}, is a multiple of {leaf.copies}: pad "
            "one, or shard the array over fewer devices with a separate jax.sharding.NamedSharding"
        )
    _, dim = max(free)
    known = (*leaf.layout.spec, *[()] * len(leaf.layout.local))
    spec = [(*known[at], *(leaf.axes if at == dim else ())) for at in range(len(leaf.layout.local))]
    return (
        f"shard it where the state is created, and in in_shardings and out_shardings: {leaf.buffer.name} as "
        f"jax.sharding.NamedSharding(mesh, {spec_words(spec)})"
    )


def weight_copies(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if copies of weights in the weights' own dtype, such as transposed weights, are held from the
    forward pass to the backward pass."""
    middle = start_of_backward(report)
    dtypes = {b.dtype for b in report.buffers if b.phase == "argument" and b.category == "params"}
    copies = [
        b
        for b in at_peak(report, "workspace")
        if b.component == COPY and b.phase == "forward" and b.dtype in dtypes and b.start < middle < b.end
    ]
    size = sum(b.bytes for b in copies)
    if size <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    largest = max(copies, key=lambda b: b.bytes)
    return RuleResult(
        size,
        f"{human(size)} of {largest.dtype} copies of weights are held from the forward to the backward pass, the "
        f"largest {describe_buffer(largest)}",
    )


# ---- devices and shardings before and after a call -------------------------------------------------------------------


def state_resharded(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a step returns updated state in another sharding than the state that it takes. The next call
    of the step is then compiled again for the new sharding. The bytes of the finding are the bytes that the new
    sharding adds on one device; 0 if it adds none."""
    root = program.module.root(program.module.entry)
    if root is None or not program.results:
        return None
    # A compiled program may first return HLO tokens, which are no results of the function.
    tokens = len(program.module.shape(root).parts or (root,)) - len(program.results)
    changed = []
    for number, (_, buffer) in arguments(report, program).items():
        argument, before = program.arguments.by_number[number], program.layouts.get(number)
        place = argument.update - tokens
        if before is None or not 0 <= place < len(program.results) or argument.role not in STATE:
            continue
        after, whole = program.results[place], _resized(buffer.bytes, before.local, before.dims)
        if before.dims == after.dims and before.local != after.local and whole >= MIN_ARRAY:
            added_bytes = _resized(buffer.bytes, before.local, after.local) - buffer.bytes
            changed.append((whole, added_bytes, argument, before, after))
    if not changed:
        return None
    added = sum(max(each[1], 0) for each in changed)
    _, _, argument, before, after = max(changed, key=lambda each: each[0])
    more = f"; {human(added)} more on each device from then on" if added else ""
    return RuleResult(
        added,
        f"{plural(len(changed), 'array')} of the state {'is' if len(changed) == 1 else 'are'} returned in another "
        f"sharding than passed in, the largest {argument.path}: {_sharding(before)} in, {_sharding(after)} out: the "
        f"next call compiles the step again{more}",
    )


def on_one_device(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if arrays of the state or the batch are on one device although the program runs on several. The
    first device then holds each whole array until the step has copied it. The bytes of the finding are the bytes of
    the whole arrays minus the bytes of the shards that the step keeps on the first device.

    For a described target, arrays of this machine may be given only for their shapes. For such a target, there is a
    finding only if other arguments are on several devices."""
    given = [argument.devices for argument in program.arguments.by_number.values()]
    described = bool(report.target.get("is_described"))
    if program.module.devices < 2 or (described and max(given, default=0) < 2):
        return None
    found = []
    for number, (_, buffer) in arguments(report, program).items():
        argument, layout = program.arguments.by_number[number], program.layouts.get(number)
        if argument.devices == 1 and layout is not None and argument.role in (*STATE, "batch"):
            found.append((_resized(buffer.bytes, layout.local, layout.dims), buffer.bytes, argument))
    whole = sum(each[0] for each in found)
    if whole < MIN_ARRAY:
        return None
    excess = whole - sum(each[1] for each in found)
    _, _, argument = max(found, key=lambda each: each[0])
    return RuleResult(
        excess,
        f"{plural(len(found), 'array')} of the arguments {'is' if len(found) == 1 else 'are'} on one device, the "
        f"largest {argument.path}: that device holds {human(excess)} more than its shards until the step has copied "
        "them",
    )


def _resized(size: int, dims: Sequence[int], other: Sequence[int]) -> int:
    # The bytes of an array of dimensions `other`, if an array of `dims` takes `size` bytes.
    return size * math.prod(other) // max(math.prod(dims), 1)


def _sharding(layout: ArgumentLayout) -> str:
    if any(layout.spec) or layout.dims == layout.local:
        return spec_words(layout.spec)
    return f"shards {list(layout.local)}"
