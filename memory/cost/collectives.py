"""Lists the collectives of a compiled step with their number of runs, bytes and mesh axes.

Bytes are those of one device and one execution. The payload is the unsharded array of a collective: the result of an
all-gather, and the operand of an all-reduce, reduce-scatter, all-to-all or permutation. By the ring algorithm over N
devices (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)), a device sends the payload times the factor in
`WIRE`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from bytescope.memory.cost.kernel_costs import IDLE
from bytescope.memory.formulas.communication_volume import Expected
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo import wire
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.loops import backend_config, runs, trip_count
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.records.report_record import Collective, Communication
from bytescope.memory.records.schedule_records import ATTENTION_BACKWARD

# Kind of collective -> function from the number of devices N to the bytes that a device sends per byte of payload.
WIRE: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}

RAGGED = "ragged-all-to-all"
_DONE = re.compile(r"-(done|update)$")
# Maximum number of updates between the start and the done of an asynchronous operation.
MAX_UPDATES = 24


def find(attribution: Attribution, mesh: hlo_mesh.Axes = (), per_host: int = 0) -> tuple[Collective, ...]:
    """Returns every collective that the step runs over more than one device, in the order of the schedule.

    Args:
        attribution: the compiled program, with its schedule and the phase and component of each value.
        mesh: names and sizes of the mesh axes, which are needed to name the axes that a collective spans.
        per_host: number of devices of a host, which is needed to count the hosts that a collective spans; 0 if unknown.
    """
    counts = runs(attribution.module)
    collectives: list[Collective] = []
    for id in attribution.order:
        instruction = attribution.module.instructions[id]
        times = counts.get(instruction.computation, 0)
        kind = instruction.opcode.removesuffix("-start")
        if kind in WIRE and times:
            collectives += _record_collective(attribution, mesh, per_host, instruction, kind, times)
    return tuple(collectives)


def _record_collective(
    attribution: Attribution, mesh: hlo_mesh.Axes, per_host: int, instruction: Instruction, kind: str, times: int
) -> Iterator[Collective]:
    module = attribution.module
    groups = hlo_mesh.groups_of(module.data, instruction.span, module.devices)
    sent, group = share(kind, groups, module.devices)
    if not sent:
        return
    # An async-start calls a computation that contains the collective. Use the start's name, position and users.
    callers = [c for c in attribution.module.callers(instruction.computation) if c.opcode == "async-start"]
    start = callers[0] if callers else instruction
    arrays = arrays_of(module, instruction)
    given = sum(shape.bytes for shape in arrays)
    payload = result = given
    if kind == "all-gather":
        payload = result = given * group
    elif kind == "reduce-scatter":
        result = given // group
    named, metadata, scope = attribution.best_named(start, ())
    asynchronous, overlapped, overlapped_flops = False, 0, 0
    if start.opcode.endswith("-start"):
        asynchronous, overlapped, overlapped_flops = _find_overlap(attribution, start)
    yield Collective(
        name=start.name,
        kind=kind,
        axes=hlo_mesh.spanned(groups, mesh),
        group=group,
        dtype=_join_dtypes(arrays),
        times=times,
        bytes=payload,
        wire_bytes=round(sent * payload),
        phase=attribution.phase(scope, named or start),
        component=scope.component,
        module="/".join(scope.path),
        op_name=metadata.op_name,
        asynchronous=asynchronous,
        overlapped=overlapped,
        overlapped_flops=overlapped_flops,
        in_flight_bytes=given + result,
        hosts=hlo_mesh.hosts_of(groups, per_host),
    )


def arrays_of(module: Module, instruction: Instruction) -> list[HloShape]:
    """Returns the shapes of the arrays that a collective instruction sends. A combined collective has several."""
    shapes = [
        shape for operand in module.operands(instruction) for _, shape in leaves(module.shape(operand)) if shape.dtype
    ]
    if instruction.opcode.removesuffix("-start") != RAGGED:
        return shapes
    # The operands are rows, the buffer that receives them, and offsets. The device sends at most the smaller array.
    return [min(shapes[:2], key=lambda shape: shape.bytes)]


def share(kind: str, groups: hlo_mesh.Groups, devices: int) -> tuple[float, int]:
    """Returns (bytes that a device sends per byte of payload, number of devices in a group). The first value is 0.0 if
    the collective sends nothing.

    kind: the collective, such as "all-gather". groups: the device numbers of each group. devices: number of devices of
    the program.
    """
    if kind == "collective-permute":
        moving = [pair for pair in groups if len(pair) == 2 and pair[0] != pair[1]]
        # The group is the cycle or chain of the permutation that contains the first pair.
        following = {pair[0]: pair[1] for pair in moving}
        ring: set[int] = set()
        device = moving[0][0] if moving else None
        while device is not None and device not in ring:
            ring.add(device)
            device = following.get(device)
        return len(moving) / max(devices, 1), len(ring)
    group = max(map(len, groups), default=1)
    return (WIRE[kind](group), group) if group > 1 else (0.0, group)


def _join_dtypes(arrays: Iterable[HloShape]) -> str:
    sizes: dict[str, int] = {}
    for shape in arrays:
        sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.bytes
    return "+".join(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def rows(collectives: Iterable[Collective], expected: Iterable[Expected] = ()) -> tuple[Communication, ...]:
    """Sums the collectives of each kind over the same mesh axes, in bytes per step and device, and compares the sums
    with published formulas. The rows are sorted by sent bytes, largest first.

    expected: the bytes that the formulas give. If the program has no collective for one of them, the formula gets a row
    with 0 sent bytes.
    """
    by_key: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for item in collectives:
        by_key.setdefault((item.kind, item.axes), []).append(item)
    formulas: dict[tuple[str, tuple[str, ...]], list[Expected]] = {}
    for entry in expected:
        formulas.setdefault((entry.kind, entry.axes), []).append(entry)
        by_key.setdefault((entry.kind, entry.axes), [])
    table = []
    for (kind, axes), items in by_key.items():
        known = formulas.get((kind, axes), [])
        groups = [item.group for item in items] or [known[0].group]
        table.append(
            Communication(
                kind=kind,
                axes=axes,
                group=max(groups),
                times=sum(item.times for item in items),
                bytes=sum(item.times * item.bytes for item in items),
                wire_bytes=sum(item.times * item.wire_bytes for item in items),
                exposed_bytes=sum(item.times * item.wire_bytes for item in items if item.exposed),
                formula_bytes=sum(round(entry.bytes * WIRE[kind](entry.group)) for entry in known) if known else None,
                formula="; ".join(entry.formula for entry in known),
                hosts=max((item.hosts for item in items), default=1),
            )
        )
    return tuple(sorted(table, key=lambda row: (-row.wire_bytes, -(row.formula_bytes or 0), row.kind, row.axes)))


# ---- the compute between the start and the done of a collective -------------------------------------------------


def _find_overlap(attribution: Attribution, start: Instruction) -> tuple[bool, int, int]:
    """Returns (whether a collective is asynchronous, number of compute operations that are scheduled between its start
    and its done, matrix-product FLOPs of these operations with all iterations of loops). A collective is asynchronous
    if it has separate start and done instructions and the runtime does not wait at the start.

    attribution: the compiled program with its schedule. start: the start instruction.
    """
    module = attribution.module
    settings = backend_config(module, start).get("collective_backend_config")
    if isinstance(settings, dict) and settings.get("is_sync") is True:
        return False, 0, 0
    computation = module.computations.get(start.computation)
    order = (computation.schedule if computation else None) or []
    positions = {id: position for position, id in enumerate(order)}
    done = _find_done(attribution, start)
    if start.id not in positions or done is None or done.id not in positions:
        return True, 0, 0
    count, total = 0, 0
    for id in order[positions[start.id] + 1 : positions[done.id]]:
        instruction = module.instructions.get(id)
        if instruction is None or instruction.opcode in IDLE or is_collective(instruction.opcode):
            continue
        count += 1
        total += product_flops(module, instruction)
    return True, count, total


def _find_done(attribution: Attribution, start: Instruction) -> Instruction | None:
    for _ in range(MAX_UPDATES):
        after = [user for user in attribution.module.users(start) if _DONE.search(user.opcode)]
        if not after:
            return None
        if after[0].opcode.endswith("-done"):
            return after[0]
        start = after[0]
    return None


def product_flops(module: Module, instruction: Instruction, known: dict[int, int] | None = None) -> int:
    """Returns the FLOPs of the matrix products in one execution of an instruction, including those inside its loops and
    fusions. Matrix products are dots, GEMM calls and attention calls.

    A multiply-add counts as two FLOPs. Elementwise work, convolutions and unknown custom kernels count as zero.

    `known`: computation id -> its FLOPs, a cache that the function fills.
    """
    known = {} if known is None else known
    total = _PRODUCTS[instruction.opcode](module, instruction) if instruction.opcode in _PRODUCTS else 0
    trips = (trip_count(module, instruction) or 1) if instruction.opcode == "while" else 1
    for called in instruction.called:
        if called not in known and called in module.computations:
            known[called] = 0  # ends the recursion if a damaged module calls itself
            known[called] = sum(product_flops(module, inner, known) for inner in module.inside(called))
        total += trips * known.get(called, 0)
    return total


def _dot_flops(module: Module, instruction: Instruction) -> int:
    contracted: list[int] = []
    for field, value in wire.fields(module.data, instruction.span):
        if field == 30:
            for part, item in wire.fields(module.data, wire.message(value)):
                contracted += wire.numbers(module.data, item) if part == 1 else []
    return _product(module, instruction, contracted)


def _product(module: Module, instruction: Instruction, contracted: list[int]) -> int:
    left, result = module.operand(instruction, 0), module.shape(instruction)
    if result.parts is not None:  # the second result of a GEMM call is its workspace
        result = result.leaf((0,))
    dims = module.shape(left).dims if left else ()
    return 2 * result.elements * math.prod(dims[axis] for axis in contracted if axis < len(dims))


def _library_call_flops(module: Module, instruction: Instruction) -> int:
    config = backend_config(module, instruction)
    gemm = config.get("gemm_backend_config", {}).get("dot_dimension_numbers")
    if gemm:
        return _product(module, instruction, list(map(int, gemm.get("lhs_contracting_dimensions", ()))))
    scores = config.get("cudnn_fmha_backend_config", {}).get("intermediate_tensor_shape")
    query = module.operand(instruction, 0)
    if not scores or query is None:
        return 0
    # Q K^T and P V forward; backward dP, dV, dQ, dK and Q K^T again (Dao et al. 2022, arXiv 2205.14135).
    products = 10 if instruction.call.kind == ATTENTION_BACKWARD else 4
    return products * math.prod(map(int, scores.get("dimensions", ()))) * (module.shape(query).dims or (0,))[-1]


_PRODUCTS = {"dot": _dot_flops, "custom-call": _library_call_flops}
