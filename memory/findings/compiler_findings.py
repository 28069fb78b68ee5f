"""Rules about peaks that XLA:GPU's own passes raise, and about programs near or above the memory that XLA plans with.

XLA schedules a program for a memory budget (`peak.xla_passes`). Above its limit the rematerialization pass recomputes
values, if it is on. The latency-hiding scheduler reads the same limit, but keeps buffers alive to overlap collectives
with compute. Copy fusion computes the copies of one value in one kernel, so that all of them are alive from then on
(openxla/xla#27322; seen with jaxlib 0.10, not with 0.12). Layers that a Python loop unrolls let the compiler mix their
temporaries.

A rule's options are compiler options. `bytescope report --try-remedies` compiles the program with them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from bytescope.memory.devices.compiler import COPY_FUSION_PASS, DISABLED_PASSES, REMAT_PASS, SCHEDULER_PASS
from bytescope.memory.findings.evidence import LARGE, NOTABLE, TOY, RuleResult, describe_buffer
from bytescope.memory.hlo.dataflow import flatten
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human, list_names, plural

REMAT_SETTING = "jax_compiler_enable_remat_pass"
# Minimum number of equal temporaries that count as those of unrolled layers.
_MIN_LAYERS = 4
_NUMBERS = re.compile(r"\d+")
# Minimum fraction of the scheduler's bytes that are operands of deferred weight gradients.
_MOST = 0.5
# Phases in which each layer has temporaries of its own that no later layer reads.
_RECOMPUTED = ("recompute", "backward")
_PASSING = frozenset(("get-tuple-element", "bitcast", "tuple"))


def scheduler_peak(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if XLA's latency-hiding scheduler defers weight gradients past the peak, so that their operands
    stay alive, and an order of least memory would need fewer bytes. The bytes are an estimate.

    Only operands of weight gradients count: XLA often keeps other buffers alive without this scheduler too.
    """
    budget = report.xla_budget
    size = budget.scheduler_bytes or 0
    if size <= max(NOTABLE * report.peak_bytes, TOY) or SCHEDULER_PASS in budget.disabled_passes:
        return None
    operands = [held for held in report.scheduler_held if held.weight_gradient]
    if sum(held.bytes for held in operands) < _MOST * size:
        return None
    readers = list(dict.fromkeys(held.reader for held in operands))
    parameters = list(dict.fromkeys(held.parameter for held in operands))
    message = (
        f"XLA's latency-hiding scheduler defers {plural(len(readers), 'weight gradient')} past the peak, of "
        f"{list_names(parameters)}: their operands, such as {describe_buffer(operands[0])}, stay alive, {human(size)} "
        "more than in an order of least memory"
    )
    passes = _disabled(report, SCHEDULER_PASS)
    remedy = (
        f"loop over unrolled layers with jax.lax.scan, whose iterations the scheduler cannot mix; or compile with "
        f"{passes}, which overlaps less communication"
    )
    return RuleResult(size, message, remedy, f"{DISABLED_PASSES}={SCHEDULER_PASS}")


def fused_copies(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if one kernel computes several copies of a value long before most of them are read, because
    XLA's copy fusion merged the kernels of the copies."""
    if report.target.get("platform") != "cuda" or COPY_FUSION_PASS in report.xla_budget.disabled_passes:
        return None
    early = _early_copies(report, program.module)
    size = sum(buffer.bytes for buffer in early)
    if size <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    message = (
        f"XLA's copy fusion computes {len(early)} copies of a value in one kernel, {early[0].name}, and they stay "
        f"alive until each is read after the peak: {human(size)}, each {describe_buffer(early[0])}"
    )
    remedy = f"compile with {_disabled(report, COPY_FUSION_PASS)}"
    return RuleResult(size, message, remedy, f"{DISABLED_PASSES}={COPY_FUSION_PASS}")


def unrolled_layers(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the temporaries of many unrolled layers are alive at the peak. A loop over the layers would
    hold the temporaries of one layer at a time."""
    looped = _looped_instructions(program.module)
    # A gathered weight, or a gradient before it is scattered, is not a temporary of one layer.
    weights = {argument.shape for argument in program.arguments.by_number.values()}
    groups: dict[tuple[object, ...], list[Buffer]] = defaultdict(list)
    for b in report.buffers:
        temporary = b.at_peak and b.memory == "device" and b.category == "workspace" and b.source
        if temporary and b.phase in _RECOMPUTED and b.name not in looped and b.shape not in weights:
            groups[b.phase, b.dtype, b.shape, b.source, _NUMBERS.sub("#", b.op_name)].append(b)
    # Layers without names have one temporary of a kind each, as far as is known.
    counted = [(group, _numbered_layers(group)) for group in groups.values()]
    repeated = [(group, layers) for group, layers in counted if (layers or len(group)) >= _MIN_LAYERS]
    size = 0
    for group, layers in repeated:
        whole = sum(b.bytes for b in group)
        size += whole - whole // (layers or len(group))
    if size <= max(LARGE * report.peak_bytes, TOY):
        return None
    largest = max((group for group, _ in repeated), key=lambda group: sum(b.bytes for b in group))
    layers = max(layers for _, layers in repeated)
    subject = f"temporaries of {layers} unrolled layers" if layers else f"{len(largest)} temporaries of unrolled layers"
    return RuleResult(
        size,
        f"{subject} are alive together, {human(size)} more than those of one layer, such as {len(largest)} x "
        f"{describe_buffer(largest[0])}",
    )


def _numbered_layers(group: list[Buffer]) -> int:
    """Returns the number of layers that equal temporaries come from: the number of different layer numbers in their
    op_names; 0 if no number differs. If several numbers differ, such as a second number for several temporaries of one
    layer, the number with the most values counts."""
    numbers = [_NUMBERS.findall(b.op_name) for b in group]
    layers = max((len(set(column)) for column in zip(*numbers, strict=True)), default=0)
    return layers if layers > 1 else 0


def xla_remat(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if XLA's rematerialization pass recomputes values because the program would not fit otherwise.
    Returns None if the pass misses its limit; then `xla_remat_falls_short` returns a finding."""
    values = report.xla_recomputed
    if not values or _missed_bytes(report):
        return None
    size = sum(value.bytes for value in values)
    return RuleResult(size, f"XLA's rematerialization pass recomputes {_describe_recomputed(report)}")


def xla_remat_falls_short(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if XLA's rematerialization pass logged that it does not reduce the program to XLA's limit. The
    finding also says what the pass recomputes."""
    missed = _missed_bytes(report)
    if not missed:
        return None
    budget = report.xla_budget
    need, before = budget.need_bytes or 0, ""
    if (budget.unreduced_bytes or 0) > need:
        before = f", from {human(budget.unreduced_bytes)}"
    recomputed = f"; it recomputes {_describe_recomputed(report)}" if report.xla_recomputed else ""
    return RuleResult(
        missed,
        f"XLA's rematerialization pass does not reach its limit: temporary values and results take {human(need)}"
        f"{before}, and XLA allows {human(need - missed)}{recomputed}",
    )


def _missed_bytes(report: JudgedProgram) -> int:
    """Returns the bytes by which XLA's rematerialization pass misses its limit; 0 if it reaches its limit, or if the
    limit is unknown or 0."""
    budget = report.xla_budget
    if not budget.limit_bytes or budget.margin_bytes is None or budget.unreduced_bytes is None:
        return 0
    return max(-budget.margin_bytes, 0)


def _describe_recomputed(report: JudgedProgram) -> str:
    values = report.xla_recomputed
    flops = sum(value.flops for value in values)
    work = f" and {flops / 1e12:.3g} TFLOP in each call" if flops else ""
    where = f" at {short_place(values[0].source)}" if values[0].source else ""
    size = human(sum(value.bytes for value in values))
    return f"{plural(len(values), 'value')} of {size}{work}, the largest {values[0].name}{where}"


def xla_remat_off(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a program that does not fit is above XLA's limit, and XLA's rematerialization pass, which
    could reduce it, is switched off."""
    budget = report.xla_budget
    if not budget.limit_bytes or budget.margin_bytes is None or budget.margin_bytes >= 0:
        return None
    if REMAT_PASS not in budget.disabled_passes or report.fits is not False:
        return None
    return RuleResult(
        -budget.margin_bytes,
        f"temporary values are {human(-budget.margin_bytes)} above XLA's limit of {human(budget.limit_bytes)}, and "
        "XLA's rematerialization pass is off",
        options=f"{REMAT_SETTING}=True",
    )


def arguments_above_limit(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if arguments and results alone exceed the memory that XLA plans with, so that XLA schedules for
    a limit of 0 bytes of temporary values."""
    budget = report.xla_budget
    if budget.io_bytes is None or budget.base_bytes is None or budget.io_bytes <= budget.base_bytes:
        return None
    return RuleResult(
        budget.io_bytes - budget.base_bytes,
        f"arguments and results take {human(budget.io_bytes)}, more than the {human(budget.base_bytes)} that XLA plans "
        "with: XLA's limit for temporary values is 0",
    )


# ---- words -----------------------------------------------------------------------------------------------------


def _disabled(report: JudgedProgram, name: str) -> str:
    # The compiler option replaces the list that jax sets for jax_compiler_enable_remat_pass=False, so it repeats the
    # list.
    passes = [*report.xla_budget.disabled_passes, name]
    return f'compiler_options={{"{DISABLED_PASSES}": "{",".join(passes)}"}} of jax.jit'


# ---- the schedule ----------------------------------------------------------------------------------------------


def _early_copies(report: JudgedProgram, module: Module) -> list[Buffer]:
    """Returns copies of values that one kernel computes too early: they are alive at the peak, but read only after
    the peak. If several kernels compute such copies, returns the copies of the kernel with the most bytes."""
    if not report.timeline:
        return []
    order = flatten(module)
    at_peak = report.timeline[report.peak_index].instruction
    peak = max((at for id, at in order.items() if module.instructions[id].name == at_peak), default=-1)
    best: list[Buffer] = []
    for fusion in _copy_kernels(module):
        if fusion.id not in order or peak < 0:
            continue
        readers = {user.tuple_index: _first_read(module, user, order) for user in module.users(fusion)}
        late = sum(first > peak for first in readers.values())
        buffers = [b for b in report.buffers if b.name == fusion.name and b.at_peak and b.memory == "device"]
        if late and order[fusion.id] < peak:
            buffers = sorted(buffers, key=lambda b: -b.end)[:late]
            best = max(best, buffers, key=lambda found: sum(b.bytes for b in found))
    return best


def _copy_kernels(module: Module) -> Iterator[Instruction]:
    for fusion in module.of_opcode("fusion"):
        root = module.root(fusion.called[0]) if fusion.called else None
        if root is None or root.opcode != "tuple":
            continue
        if sum(operand.opcode == "copy" for operand in module.operands(root)) >= 2:
            yield fusion


def _first_read(module: Module, value: Instruction, order: dict[int, int]) -> int:
    """Returns the first position in the schedule at which a kernel reads `value`; -1 if none does. order: instruction
    id -> position in the schedule."""
    pending, seen, found = [value], set[int](), list[int]()
    while pending:
        for user in module.users(pending.pop()):
            if user.opcode in _PASSING and user.id not in seen:
                seen.add(user.id)
                pending.append(user)
            elif user.opcode not in _PASSING and user.id in order:
                # The position of a loop is after its body, but the loop begins with the first instruction of the body.
                bodies = [inner for computation in user.called for inner in module.inside(computation)]
                inside = [order[inner.id] for inner in bodies if inner.id in order]
                found.append(min([order[user.id], *inside]))
    return min(found, default=-1)


def _looped_instructions(module: Module) -> set[str]:
    looped = module.reachable(called for loop in module.of_opcode("while") for called in loop.called)
    return {instruction.name for computation in looped for instruction in module.inside(computation)}
