"""Rules on parameters, moments and the sums of gradients: what is held twice, whole, or is too large by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bytescope.memory.findings.evidence import LARGE, MIN_ARRAY, NOTABLE, SMALL, STATE, Found, arguments, spec_words
from bytescope.memory.formulas.model_facts import STATE_ROLES
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.pairing import root_of
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import MIB, human

# Bytes from which state that is whole is worth a line where all of it is; where other leaves are sharded, `MIN_ARRAY`.
_WHOLE = 64 * MIB
# So many leaves are named.
_NAMED = 3


def not_donated(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """State that comes back changed and whose old and new value each have memory of their own."""
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
    which = f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
    return Found(total, f"{human(total)} of state is not donated ({which}): the old and the new are held at once")


# ---- state that is larger than the device --------------------------------------------------------------------------


def state_too_large(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Parameters, moments and sums of gradients that alone exceed the limit: no batch and no remat policy helps."""
    size, limit = sum(report.breakdown.get(row, 0) for row in STATE), report.limit_bytes
    if not limit or size <= limit:
        return None
    message = (
        f"parameters and optimizer state alone take {human(size)} of {human(limit)}: no smaller batch and no "
        "recomputation makes it fit"
    )
    whole = sum(leaf.whole for leaf in _leaves(report, program)) or size
    remedy = (
        f"shard parameters and optimizer state over {math.ceil(whole / limit)} devices or more by a "
        "NamedSharding of each, or keep the optimizer state in 8 bits, or in host memory "
        "(memory_kind='pinned_host')"
    )
    return Found(size - limit, message, remedy)


# ---- state that every device holds whole ---------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A leaf of the state: its buffer, bytes of the whole array and on a device, and the mesh axes that replicate it
    ("" for all of a program whose axes are unknown) with their number of devices; stacked: its first dimension is that
    of the devices, as jax.pmap has it."""

    buffer: Buffer
    layout: ArgumentLayout | None
    whole: int
    axes: tuple[str, ...]
    copies: int
    stacked: bool = False

    @property
    def wasted(self) -> int:
        """Bytes of a device that sharding over those axes would free."""
        return self.buffer.bytes - self.buffer.bytes // self.copies


def whole_state(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Leaves of the state that devices of the mesh hold alike."""
    leaves = [leaf for leaf in _leaves(report, program) if leaf.copies > 1]
    if not leaves:
        return None
    by_axes = {leaf.axes: [each for each in leaves if each.axes == leaf.axes] for leaf in leaves}
    found = max(by_axes.values(), key=lambda group: sum(leaf.wasted for leaf in group))
    size, axes, copies = sum(leaf.wasted for leaf in found), found[0].axes, found[0].copies
    trains = any(report.breakdown.get(row) for row in ("optimizer", "gradients", "residuals"))
    if not trains and copies < program.module.devices:  # tensor-parallel inference, replicated to serve more requests
        return None
    others = len(found) < len(_leaves(report, program))
    share, least = (SMALL, MIN_ARRAY) if others and trains else (NOTABLE if trains else LARGE, _WHOLE)
    if size <= max(share * report.peak_bytes, least):
        return None
    found.sort(key=lambda leaf: -leaf.buffer.bytes)
    held, over = sum(leaf.buffer.bytes for leaf in found), f" of {' and '.join(axes)}" if axes else ""
    message = f"{human(held)} of state is whole on each of {copies} devices{over}: {_named(found)}"
    return Found(size, message, _sharding(found[0]))


def _leaves(report: JudgedProgram, program: PlacedProgram) -> list[_Leaf]:
    """The leaves of the state on a mesh of more than one device."""
    module, sizes = program.module, dict(program.mesh)
    out, stacked = [], _stacked(report, program)
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
        axes, copies = _replicas(program, module.devices if module.replicated(parameter) else 1)
        out.append(_Leaf(buffer, None, buffer.bytes * max(module.devices // copies, 1), axes, copies))
    return out


def _stacked(report: JudgedProgram, program: PlacedProgram) -> frozenset[int]:
    """Arguments that are a stack of one replica for each device: every device has one entry of the first dimension,
    and the gradient is summed over all of them. Without the sum each device has state of its own."""
    module = program.module
    summed = {item.name for item in report.collectives if item.kind == "all-reduce" and item.group == module.devices}
    paths = {
        path
        for (id, _), path in program.arguments.owners.items()
        if (one := module.instructions.get(id)) is not None and one.name in summed
    }
    entry = module.computations.get(module.entry)
    stacks = {
        number
        for number, argument in program.arguments.by_number.items()
        if entry
        and argument.shape[:1] == (module.devices,)
        and module.shape(module.instructions[entry.parameters[number]]).dims[:1] == (1,)
    }
    known = program.arguments.by_number
    # XLA sums small gradients as one array, in which each is no longer seen.
    roots = {root_of(known[number].path) for number in stacks if {known[number].path, known[number].owner} & paths}
    return frozenset(number for number in stacks if root_of(known[number].path) in roots)


def _replicas(program: PlacedProgram, known: int) -> tuple[tuple[str, ...], int]:
    """(mesh axes, devices) that hold the state alike, of a program without layouts: by its facts, else as `known`."""
    facts = program.facts
    if facts is None or facts.question is None:
        return (), known
    alike = facts.axes("replica", *(STATE_ROLES if facts.question.layout.zero == 0 else ()))
    return tuple(alike), math.prod(alike.values())


def _named(leaves: Sequence[_Leaf]) -> str:
    """The largest leaves, and how many more: "params['embed'] float32[50304, 768] 147.38 MiB and 3 more"."""
    named = [
        f"{leaf.buffer.name} {leaf.buffer.dtype}{list(leaf.buffer.shape)} {human(leaf.buffer.bytes)}"
        for leaf in leaves[:_NAMED]
    ]
    more = [f"{len(leaves) - _NAMED} more"] if len(leaves) > _NAMED else []
    return ", ".join(named) + (f" and {more[0]}" if more else "")


def _sharding(leaf: _Leaf) -> str:
    """How the largest leaf would be sharded, in JAX's words."""
    if leaf.stacked:
        return (
            "jax.pmap keeps a copy on each device: use jax.jit over a mesh instead, without the leading dimension, "
            "and give every leaf of the state a jax.sharding.NamedSharding over it"
        )
    if leaf.layout is None or not leaf.axes:
        return "give it a jax.sharding.NamedSharding over the mesh, in in_shardings or by jax.device_put"
    free = [(size, dim) for dim, size in enumerate(leaf.layout.local) if size % leaf.copies == 0]
    if not free:
        return (
            f"no dimension of {leaf.buffer.name}, {list(leaf.layout.local)}, is a multiple of {leaf.copies}: pad "
            "one, or shard it over fewer devices by a jax.sharding.NamedSharding of its own"
        )
    _, dim = max(free)
    known = (*leaf.layout.spec, *[()] * len(leaf.layout.local))
    spec = [(*known[at], *(leaf.axes if at == dim else ())) for at in range(len(leaf.layout.local))]
    return (
        f"shard it where the state is made and in in_shardings and out_shardings: {leaf.buffer.name} as "
        f"jax.sharding.NamedSharding(mesh, {spec_words(spec)})"
    )
