"""The state ledger: bytes per parameter by role and dtype, the accounting in which bf16 AdamW is 16 or 20.

State that lives through the step is counted from the arguments; copies of parameters, gradients and their sums over
micro-batches are those in the shape that the parameter is stored in, each role at the point where most parameters
have theirs. All of it is what ONE device holds, so bytes per parameter divide by the parameters it holds. Parameters
that are frozen, as under LoRA adapters, are rows of their own, part of no total: parameters are those that are trained.

A compiler may sum and drop some gradients before it makes the last ones; then no point has all of them, and the row
says what the fullest one has. llama_8b under `fp32_grads` with four micro-batches in a step on an H200 (jax 0.10.2):
the gradients of the MLP are gone before that of the token table is there, 1.87 bytes of gradients and 19.87 in all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from bytescope.memory.formulas.expert_formulas import idle_count
from bytescope.memory.formulas.model_facts import STATE_ROLES
from bytescope.memory.formulas.training_state import ZERO, state_bytes_per_parameter
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, LedgerRow, PeakAccount, ZeroRow
from bytescope.memory.units import human

# Arguments in these roles are state; data and outputs are not.
STATE = ("params", "gradients", "accumulator", "optimizer", "frozen")
# The named scope of a copy of all parameters that the step makes, and the order of the rows.
COPY = "param_copy"
ROLES = ("params", "copies", "gradients", "accumulator", "optimizer", "frozen")


def rows(buffers: Iterable[Buffer], elements: dict[int, int]) -> tuple[LedgerRow, ...]:
    """Ledger rows of a report's buffers, a total last.

    `elements`: position in `buffers` -> number of values the buffer holds.
    """
    buffers = tuple(buffers)
    stored: dict[tuple[int, ...], int] = {}
    for position, buffer in enumerate(buffers):
        if buffer.phase == "argument" and buffer.category == "params":
            stored[_without_ones(buffer.shape)] = stored.get(_without_ones(buffer.shape), 0) + elements.get(position, 0)
    state: dict[tuple[str, str], list[int]] = {}
    temporary: dict[str, list[tuple[Buffer, int]]] = {}
    parameters = 0
    for position, buffer in enumerate(buffers):
        count = elements.get(position, 0)
        if buffer.phase == "argument" and buffer.category in STATE:
            total = state.setdefault((buffer.category, buffer.dtype), [0, 0])
            total[0] += count
            total[1] += buffer.bytes
            parameters += count if buffer.category == "params" else 0
        elif (role := _temporary_role(buffer)) and _without_ones(buffer.shape) in stored:
            temporary.setdefault(role, []).append((buffer, count))
    for role, items in temporary.items():
        for buffer, count in _alive_together(items, stored):
            total = state.setdefault((role, buffer.dtype), [0, 0])
            total[0] += count
            total[1] += buffer.bytes
    out = [
        LedgerRow(role, dtype, count, size, _per_parameter(size, parameters) if role != "frozen" else 0.0)
        for (role, dtype), (count, size) in sorted(state.items(), key=_row_order)
    ]
    trained = [row for row in out if row.role != "frozen"]
    size = sum(row.bytes for row in trained)
    return (*out, LedgerRow("total", "", sum(row.elements for row in trained), size, _per_parameter(size, parameters)))


def _temporary_role(buffer: Buffer) -> str:
    """The role of what a step makes and frees again, "" for none."""
    if buffer.memory != "device" or buffer.phase in ("argument", "output"):
        return ""
    if buffer.category in ("gradients", "accumulator"):
        return buffer.category
    # The named scope around the cast of all of them; what a layer casts for itself is workspace.
    return "copies" if buffer.category == "workspace" and COPY in buffer.module.split("/") else ""


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions without ones, in no order."""
    return tuple(sorted(dim for dim in shape if dim != 1))


def _alive_together(items: list[tuple[Buffer, int]], stored: Mapping[tuple[int, ...], int]) -> list[tuple[Buffer, int]]:
    """Those alive at the last point where most parameters have one.

    What is being narrowed counts as what it becomes, from when it is made; and where a shape has more values than
    `stored`, one is made from another: the narrow ones count.
    """
    items, best, most = _narrowed(items), [], 0
    for point in sorted({buffer.start for buffer, _ in items}):
        alive, left = [], dict(stored)
        for buffer, count in sorted(items, key=lambda item: item[0].bytes / max(item[1], 1)):
            if buffer.start <= point <= buffer.end and left[_without_ones(buffer.shape)] >= count:
                left[_without_ones(buffer.shape)] -= count
                alive.append((buffer, count))
        values = sum(count for _, count in alive)
        if values >= most:
            best, most = alive, values
    return best


def _narrowed(items: list[tuple[Buffer, int]]) -> list[tuple[Buffer, int]]:
    """`items`, each wide one that a narrower one of its shape is made from left out: that one stands for both."""
    left = sorted(items, key=lambda item: item[0].start)
    for narrow, count in sorted(items, key=lambda item: item[0].start):
        dims = _without_ones(narrow.shape)
        wides = [
            other
            for other, values in left
            if values == count
            and other.bytes > narrow.bytes
            and _without_ones(other.shape) == dims
            and other.start <= narrow.start <= other.end
        ]
        if wides:
            wide = min(wides, key=lambda other: other.end)  # the one that is read for the last time
            left = [
                (dataclasses.replace(buffer, start=wide.start) if buffer is narrow else buffer, values)
                for buffer, values in left
                if buffer is not wide
            ]
    return left


def _row_order(item: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
    """Rows in the order of ROLES, then by dtype."""
    (role, dtype), _ = item
    return ROLES.index(role), dtype


def _per_parameter(size: int, parameters: int) -> float:
    return size / parameters if parameters else 0.0


# ---- ZeRO ---------------------------------------------------------------------------------------------------

# Role -> bytes per parameter of Adam in mixed precision: 2 of parameters and 2 of gradients in 16 bits, 12 of
# optimizer: master parameters and two moments in 32 (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1).
CLASSIC = state_bytes_per_parameter()
_CLOSE = 0.01


@dataclasses.dataclass(frozen=True)
class State:
    """The training state of one device.

    Fields:
        parameters: of the model that one tensor-parallel rank uses, the P of the paper; 0 when unknown.
        zero: stage of ZeRO, None without facts; degree: devices that shard state, Nd.
        tensor: devices of a tensor-parallel group.
        gradients: bytes per parameter of gradients by the paper, sums in float32 included.
        replicated: path -> bytes of the parameters and optimizer leaves that each device of the group holds in full,
            although the strategy shards them.
        routed: the share of routed experts in the parameters, which `expert` devices share whatever the strategy.
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
        """Devices over which a role is sharded, 1 where it is not; of a mixture a mean."""
        degree = self.degree if role in ZERO[self.zero or 0] else 1
        if degree >= self.expert:
            return degree
        return 1 / ((1 - self.routed) / degree + self.routed / self.expert)


def state_of(report: PeakAccount, program: PlacedProgram, roles: Mapping[int, str]) -> State:
    """The training state by the layouts of a program's arguments, else by its ledger and the trainer's facts.

    `roles`: entry parameter number -> role.
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
    if question and question.precision.gradients > question.precision.state:  # in 16 bits, and their float32 sums
        gradients = question.precision.gradients
    params = [layout for number, layout in program.layouts.items() if roles.get(number) == "params"]
    if params:
        count = sum(layout.elements for layout in params) // tensor
    else:
        held = sum(row.elements for row in report.ledger if row.role == "params")
        count = held * (degree if "params" in ZERO[zero or 0] else 1)
    replicated = _replicated(program, roles, shard) if zero else {}
    return State(count, zero, degree, tensor, gradients, replicated, routed, expert)


def parameter_counts(
    report: PeakAccount, program: PlacedProgram, roles: Mapping[int, str], state: State
) -> dict[str, int]:
    """`total` parameters of a program, frozen ones among them, and those `active` that one token meets: all of them
    unless the model has experts. {} if the parameters are unknown."""
    found = [layout.elements for number, layout in program.layouts.items() if roles.get(number) in ("params", "frozen")]
    frozen = sum(row.elements for row in report.ledger if row.role == "frozen")
    total = sum(found) or state.parameters * state.tensor + round(frozen * state.shards("params"))
    if not total:
        return {}
    idle = idle_count(program.facts.question.model) if program.facts and program.facts.question else 0
    return {"total": total, "active": total - idle}


def _replicated(program: PlacedProgram, roles: Mapping[int, str], shard: Mapping[str, int]) -> dict[str, int]:
    """Path -> bytes of the arrays of state that the axes of `shard` do not all shard, largest first."""
    module, found = program.module, {}
    entry = module.computations[module.entry]
    for number, layout in program.layouts.items():
        if roles.get(number) in ("params", "optimizer") and layout.elements > 1 and not set(shard) <= set(layout.axes):
            parameter = module.instructions[entry.parameters[number]]
            found[program.arguments.path(number)] = module.shape(parameter).bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def zero_rows(report: PeakAccount, state: State) -> tuple[ZeroRow, ...]:
    """ZeRO's accounting compared with what is held at the peak, bytes per parameter, a total last; () for a program
    without parameters, or whose stage of ZeRO nobody told.

    Held are the params, gradients (accumulator included) and optimizer rows of the breakdown; "gathered" are gathered
    or cast copies of parameters and the buffers of collectives.
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
    """Why a role takes other bytes than the paper gives it."""
    dtypes = " and ".join(sorted({row.dtype for row in report.ledger if row.role == role and "float" in row.dtype}))
    part = f", 1/{state.degree} on each device" if _params_are_sharded(report, state) else ""
    words = {
        "params": f"{dtypes} masters{part}",
        "gradients": _gradient_reason(report, state),
        "optimizer": "the masters are the params row",
        "gathered": "copies to compute with, and what collectives hold",
    }
    for role_away in {b.category for b in report.buffers if b.phase == "argument" and b.memory == "host"} & set(words):
        words[role_away] += "; in host memory"
    replicated = {path: size for path, size in state.replicated.items() if _role_of(path, report) == role}
    if replicated:
        named = ", ".join(f"{path} {human(size)}" for path, size in list(replicated.items())[:2])
        others, total = len(replicated) - 2, human(sum(replicated.values()))
        more = f" and {others} more, {total} in all" if others > 0 else ""
        words[role] += f"; replicated on every device: {named}{more}"
    return words[role]


def _params_are_sharded(report: PeakAccount, state: State) -> bool:
    """Whether a device holds fewer parameters than it uses."""
    held = sum(row.elements for row in report.ledger if row.role == "params")
    return state.degree > 1 and held < state.parameters


def _gradient_reason(report: PeakAccount, state: State) -> str:
    """Dtypes of the gradients that are alive at the peak, and whether they are fewer than the paper has."""
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


def _role_of(path: str, report: PeakAccount) -> str:
    return next((b.category for b in report.buffers if b.name == path and b.phase == "argument"), "")
