"""The ledger of the training state: bytes per parameter by role and dtype. AdamW in bf16 takes 16 or 20 bytes per
parameter.

State that lives through the step is counted from the arguments. Copies of parameters, gradients and gradient sums are
temporary buffers with the shape of a stored parameter. Each of these roles is counted at the point of the timeline at
which most parameters have a buffer of the role. All figures are those of ONE device: bytes per parameter divide by the
number of trained parameters on that device. Frozen parameters, such as those under LoRA adapters, have rows of their
own and are in no total.

A compiler may sum and free some gradients before it computes the last ones. Then no point has all gradients, and the
row shows the point with most of them. Example: in a step of llama_8b under `fp32_grads` with four micro-batches on an
H200 (jax 0.10.2), the gradients of the MLP are freed before that of the token table exists, so the row shows 1.87
bytes of gradients, and the total is 19.87.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from bytescope.memory.formulas.expert_formulas import idle_count
from bytescope.memory.formulas.model_facts import STATE_ROLES
from bytescope.memory.formulas.training_state import ZERO, state_bytes_per_parameter
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.buffer_rules import without_ones
from bytescope.memory.records.report_record import Buffer, LedgerRole, LedgerRow, PeakAccount, RowName, ZeroRow
from bytescope.memory.units import human

# Roles of arguments that are training state.
STATE: tuple[RowName, ...] = ("params", "gradients", "accumulator", "optimizer", "frozen")
# The named scope in which the step copies all parameters, and the order of the ledger's rows.
COPY = "param_copy"
ROLES: tuple[LedgerRole, ...] = ("params", "copies", "gradients", "accumulator", "optimizer", "frozen")


def rows(buffers: Sequence[Buffer]) -> tuple[LedgerRow, ...]:
    """Returns the rows of the training-state table: one for each role (such as gradients) and dtype, then a total."""
    stored: dict[tuple[int, ...], int] = {}
    for buffer in buffers:
        if buffer.phase == "argument" and buffer.category == "params":
            dims = without_ones(buffer.shape)
            stored[dims] = stored.get(dims, 0) + _elements(buffer)
    sums: dict[tuple[str, str], list[int]] = {}  # (role, dtype) -> [elements, bytes]
    temporary: dict[str, list[_Temporary]] = {}
    parameters = 0
    for buffer in buffers:
        count, role = _elements(buffer), _temporary_role(buffer)
        if buffer.phase == "argument" and buffer.category in STATE:
            _add(sums, buffer.category, buffer, count)
            if buffer.category == "params":
                parameters += count
        elif role and without_ones(buffer.shape) in stored:
            temporary.setdefault(role, []).append(_Temporary(buffer, count, buffer.start))
    for role, items in temporary.items():
        for item in _alive_together(items, stored):
            _add(sums, role, item.buffer, item.count)
    ledger, total_elements, total_bytes = [], 0, 0
    for role in ROLES:
        for dtype in sorted(dtype for each, dtype in sums if each == role):
            count, size = sums[role, dtype]
            ledger.append(
                LedgerRow(role, dtype, count, size, _per_parameter(size, parameters) if role != "frozen" else 0.0)
            )
            if role != "frozen":
                total_elements, total_bytes = total_elements + count, total_bytes + size
    total = LedgerRow("total", "", total_elements, total_bytes, _per_parameter(total_bytes, parameters))
    return (*ledger, total)


@dataclasses.dataclass(slots=True, eq=False)
class _Temporary:
    """A temporary buffer that is part of the training state, such as a gradient.

    Fields:
        buffer: the buffer in the report.
        count: number of array elements in the buffer.
        start: first timeline point at which its values exist. If it was cast from a larger buffer, this is the start of
            the larger buffer.
    """

    buffer: Buffer
    count: int
    start: int


def _elements(buffer: Buffer) -> int:
    return math.prod(buffer.shape) if buffer.dtype else 0


def _add(sums: dict[tuple[str, str], list[int]], role: str, buffer: Buffer, count: int) -> None:
    total = sums.setdefault((role, buffer.dtype), [0, 0])
    total[0] += count
    total[1] += buffer.bytes


def _temporary_role(buffer: Buffer) -> str:
    if buffer.memory != "device" or buffer.phase in ("argument", "output"):
        return ""
    if buffer.category in ("gradients", "accumulator"):
        return buffer.category
    # Only the cast of all parameters at once is a copy; a cast inside a layer is workspace.
    return "copies" if buffer.category == "workspace" and COPY in buffer.module.split("/") else ""


def _alive_together(items: list[_Temporary], stored: Mapping[tuple[int, ...], int]) -> list[_Temporary]:
    """Returns the buffers of one role (such as gradients) that are counted: the buffers that are alive at one point of
    the memory timeline. It is the point at which they cover the most parameters, or the last of several such points.

    A buffer that was cast to a smaller dtype counts only as the smaller buffer. A parameter is counted once: if two
    buffers are alive for it, the one with fewer bytes per element counts.

    `items`: all buffers of the role. `stored`: dimensions -> number of parameter elements with these dimensions.
    """
    items, best, most = _without_cast_sources(items), [], 0
    by_width = sorted(items, key=lambda item: item.buffer.bytes / max(item.count, 1))
    for point in sorted({item.start for item in items}):
        alive, left = [], dict(stored)
        for item in by_width:
            dims = without_ones(item.buffer.shape)
            if item.start <= point <= item.buffer.end and left[dims] >= item.count:
                left[dims] -= item.count
                alive.append(item)
        values = sum(item.count for item in alive)
        if values >= most:
            best, most = alive, values
    return best


def _without_cast_sources(items: list[_Temporary]) -> list[_Temporary]:
    """Returns `items` without buffers that were cast to a smaller dtype. The smaller buffer replaces the larger one and
    gets its start.
    """
    left = sorted(items, key=lambda item: item.start)
    for narrow in list(left):
        dims = without_ones(narrow.buffer.shape)
        sources = [
            other
            for other in left
            if other.count == narrow.count
            and other.buffer.bytes > narrow.buffer.bytes
            and without_ones(other.buffer.shape) == dims
            and other.start <= narrow.start <= other.buffer.end
        ]
        if sources:
            source = min(sources, key=lambda other: other.buffer.end)  # the source that is freed first
            left.remove(source)
            narrow.start = source.start
    return left


def _per_parameter(size: int, parameters: int) -> float:
    return size / parameters if parameters else 0.0


# ---- ZeRO ---------------------------------------------------------------------------------------------------

# Role -> bytes per parameter of Adam in mixed precision: 2 of parameters and 2 of gradients in 16 bits, 12 of the
# optimizer for master parameters and two moments in 32 bits (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1).
CLASSIC = state_bytes_per_parameter()
_CLOSE = 0.01


@dataclasses.dataclass(frozen=True)
class State:
    """How the training state is sharded over the devices.

    Fields:
        parameters: number of parameters that one tensor-parallel rank uses (Ψ in the ZeRO paper); 0 if unknown.
        zero: stage of ZeRO, 0 to 3; None if unknown.
        degree: number of devices that share the state (Nd in the paper).
        tensor: number of devices of a tensor-parallel group.
        gradients: bytes per parameter of the gradients and their float32 sums, by the rules of the ZeRO paper.
        replicated: pytree path -> bytes of each parameter or optimizer array that every device holds in full although
            the sharding strategy should shard it.
        routed: fraction of the parameters that are in routed experts, 0 to 1.
        expert: number of devices that share the routed experts.
    """

    parameters: int = 0
    zero: int | None = None
    degree: int = 1
    tensor: int = 1
    gradients: float = CLASSIC["gradients"]
    replicated: Mapping[str, int] = dataclasses.field(default_factory=dict)
    routed: float = 0.0
    expert: int = 1

    def shards(self, role: str) -> float:
        """Returns the number of devices that share the arrays of a role (such as "optimizer"), 1 if they are not
        sharded. If the model has routed experts, the number is a mean weighted by parameters.
        """
        degree = self.degree if role in ZERO[self.zero or 0] else 1
        if degree >= self.expert:
            return degree
        return 1 / ((1 - self.routed) / degree + self.routed / self.expert)


def read_state(report: PeakAccount, program: PlacedProgram, roles: Mapping[int, str]) -> State:
    """Returns how the training state is sharded, according to the layouts of the program's arguments. If these are
    unknown, uses the state table of `report` and the trainer's description of the step.

    `report`: the memory report of the program. `roles`: number of a parameter of the compiled program -> its role, such
    as "params".
    """
    facts, mesh = program.facts, dict(program.mesh)
    shard: dict[str, int] = {}
    zero, degree, tensor, expert, routed, gradients = None, 1, 1, 1, 0.0, CLASSIC["gradients"]
    question = facts.question if facts else None
    if facts and question and any(facts.roles.get(axis) in ("replica", "state") for axis in mesh):
        shard = facts.axes(*STATE_ROLES, mesh=mesh)
        zero = question.layout.zero if shard else 0
        degree = math.prod(shard.values()) if zero else 1
        tensor, expert = facts.devices("tensor", mesh=mesh), facts.devices("expert", mesh=mesh)
        routed = question.routed if expert > 1 else 0.0
    if question and question.precision.gradients > question.precision.state:  # 16-bit gradients with float32 sums
        gradients = question.precision.gradients
    params = [layout for number, layout in program.layouts.items() if roles.get(number) == "params"]
    if params:
        count = sum(layout.elements for layout in params) // tensor
    else:
        held = sum(row.elements for row in report.ledger if row.role == "params")
        count = held * (degree if "params" in ZERO[zero or 0] else 1)
    replicated = _replicated_state_bytes(program, roles, shard) if zero else {}
    return State(count, zero, degree, tensor, gradients, replicated, routed, expert)


def parameter_counts(
    report: PeakAccount, program: PlacedProgram, roles: Mapping[int, str], state: State
) -> dict[str, int]:
    """Returns the numbers of the model's parameters, over all devices; {} if unknown.

    The key `total` includes frozen parameters. The key `active` is the number of parameters that one token uses, which
    is less than the total only if the model has experts.

    `roles`: number of a parameter of the compiled program -> its role, such as "params". `state`: how the training
    state is sharded.
    """
    sizes = [layout.elements for number, layout in program.layouts.items() if roles.get(number) in ("params", "frozen")]
    frozen = sum(row.elements for row in report.ledger if row.role == "frozen")
    total = sum(sizes) or state.parameters * state.tensor + round(frozen * state.shards("params"))
    if not total:
        return {}
    idle = idle_count(program.facts.question.model) if program.facts and program.facts.question else 0
    return {"total": total, "active": total - idle}


def _replicated_state_bytes(
    program: PlacedProgram, roles: Mapping[int, str], shard: Mapping[str, int]
) -> dict[str, int]:
    module, sizes = program.module, {}
    entry = module.computations[module.entry]
    for number, layout in program.layouts.items():
        if roles.get(number) in ("params", "optimizer") and layout.elements > 1 and not set(shard) <= set(layout.axes):
            parameter = module.instructions[entry.parameters[number]]
            sizes[program.arguments.path(number)] = module.shape(parameter).bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def zero_rows(report: PeakAccount, state: State) -> tuple[ZeroRow, ...]:
    """Returns the bytes per parameter of each part of the training state, as the ZeRO paper predicts them and as the
    compiled program holds them at the peak. The last row is the total.

    The held bytes are the params, gradients (including accumulator) and optimizer rows of the memory breakdown. The row
    "gathered" contains gathered or cast copies of parameters and the buffers of collectives. Returns () if the program
    has no parameters or its stage of ZeRO is unknown.

    `state`: how the training state is sharded.
    """
    if not state.parameters or state.zero is None:
        return ()
    live = [b for b in report.buffers if b.at_peak and b.memory == "device"]
    copies = sum(b.bytes for b in live if b.component == "param_copy" or b.category == "collectives")
    rows = report.breakdown
    held = {
        "params": rows["params"],
        "gradients": rows["gradients"] + rows["accumulator"],
        "optimizer": rows["optimizer"],
        "gathered": copies,
    }
    out = []
    for role, size in held.items():
        classic = (CLASSIC | {"gradients": state.gradients}).get(role, 0) / state.shards(role)
        each = size / state.parameters
        near = abs(each - classic) <= _CLOSE * max(classic, _CLOSE)
        out.append(ZeroRow(role, classic, each, "" if near else _reason(role, report, state)))
    return (*out, ZeroRow("total", sum(row.classic for row in out), sum(row.held for row in out)))


def _reason(role: str, report: PeakAccount, state: State) -> str:
    """Returns the reason why the arrays of a role (such as gradients) take another number of bytes per parameter than
    the ZeRO paper predicts, in words.
    """
    dtypes = " and ".join(sorted({row.dtype for row in report.ledger if row.role == role and "float" in row.dtype}))
    stored = sum(row.elements for row in report.ledger if row.role == "params")
    part = f", 1/{state.degree} on each device" if state.degree > 1 and stored < state.parameters else ""
    words = {
        "params": f"{dtypes} masters{part}",
        "gradients": _gradient_reason(report, state),
        "optimizer": "the masters are the params row",
        "gathered": "copies to compute with, and what collectives hold",
    }
    offloaded = {b.category for b in report.buffers if b.phase == "argument" and b.memory == "host"}
    if role in offloaded:
        words[role] += "; in host memory"
    of_role = {b.name for b in report.buffers if b.phase == "argument" and b.category == role}
    replicated = {path: size for path, size in state.replicated.items() if path in of_role}
    if replicated:
        named = ", ".join(f"{path} {human(size)}" for path, size in list(replicated.items())[:2])
        others, total = len(replicated) - 2, human(sum(replicated.values()))
        more = f" and {others} more, {total} in all" if others > 0 else ""
        words[role] += f"; replicated on every device: {named}{more}"
    return words[role]


def _gradient_reason(report: PeakAccount, state: State) -> str:
    sizes: dict[str, int] = {}
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device" and buffer.category in ("gradients", "accumulator"):
            sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + buffer.bytes
    total = sum(sizes.values())
    if not total:
        return "none is alive at the peak"
    dtypes = " and ".join(sorted(dtype for dtype, size in sizes.items() if size > _CLOSE * total))
    fewer = total < state.parameters * state.gradients / state.shards("gradients")
    if state.gradients > CLASSIC["gradients"] and "float32" not in dtypes:
        return f"{dtypes}, and no sum: one micro-batch"
    return f"{dtypes}, part of them at the peak" if fewer else dtypes
