"""Builds the report of any compiled JAX program (`report_of`).

Each stage returns a complete record: `ReadProgram`, `PeakAccount`, `Verdict`, `JudgedProgram`, `FormulaRows`,
`StepSeconds`. The last statement of `report_of` builds the report from these records.

The report of a `jax.stages.Traced` or `Lowered`, and of an HloProto, is exact, because it is read from the compiler's
own buffers and heap trace. A finished `Compiled` keeps neither on most backends. Then live ranges are derived from its
schedule, totals are XLA's, and the report's `method` and `notes` say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from bytescope.memory.audit import audit_program
from bytescope.memory.cost import collectives, flops, host_transfers, step_work
from bytescope.memory.devices import limits
from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.findings import finding_rules
from bytescope.memory.formulas import communication_volume
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo import kernels
from bytescope.memory.hlo.module import Module
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.peak import (
    assemble,
    ledger,
    memory_order,
    runtime_overheads,
    xla_passes,
)
from bytescope.memory.peak.buffer_placement import PlacedProgram, place
from bytescope.memory.peak.checkpoint_names import Names, named_places
from bytescope.memory.peak.live_schedule import derive
from bytescope.memory.peak.memory_order import OrderEstimate
from bytescope.memory.program import program_arguments
from bytescope.memory.program.roles import checked_roles
from bytescope.memory.records import schedule_records
from bytescope.memory.records.buffer_records import CARD, POOL, Buffer, PeakAccount, overhead_bytes
from bytescope.memory.records.parallel_records import Collective, Communication, ZeroRow
from bytescope.memory.records.report_record import Description, JudgedProgram, ReportRecord, RowName, Transfer, XlaStats
from bytescope.memory.records.schedule_records import Steps
from bytescope.memory.records.verdicts import verdict_word
from bytescope.memory.records.xla_records import HeldBuffer, RecomputedValue
from bytescope.memory.seconds import rates, reading, step_prediction
from bytescope.memory.seconds.reading import CompiledSchedule

# Rows of the breakdown, beginning with the rows whose derived bytes are most probably too high.
_DOUBTFUL: tuple[RowName, ...] = (
    "workspace",
    "logits_loss",
    "collectives",
    "gradients",
    "residuals",
    "outputs",
    "unattributed",
    "accumulator",
    "batch",
    "rng",
    "cache",
    "optimizer",
    "frozen",
    "params",
)


@host_phase("analyze")
def report_of(
    compilation: Compilation,
    *,
    target: Target | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    loop: runtime_overheads.LoopOverhead | None = None,
    subject: Description | None = None,
    seconds: bool = False,
    measure: bool = False,
) -> ReportRecord:
    """Returns the memory report of a program that is already compiled.

    Args:
        compilation: the compiled program, as `memory.devices.compiler` returns it.
        target: the devices whose memory limit and rates are used; None leaves the verdict unknown.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's description of the step (shapes, mesh, precision), for comparisons with published formulas.
        roles: (regular expression, role) pairs. An argument whose pytree path matches gets the role, such as
            "optimizer".
        names: the checkpoint names of the program.
        loop: arrays that the training loop keeps on the device while the program runs.
        subject: the trainer's description of the program; its calls, tokens and model FLOPs are used for the predicted
            seconds.
        seconds: whether to predict the seconds of an update.
        measure: whether to measure the speed of this machine for the prediction, if the target is a CPU.

    Raises ReportError if the compiled program is damaged.
    """
    per_host = target.devices_per_host if target else 0
    # Only XLA:GPU has a scheduler that trades memory for time.
    on_gpu = target is not None and target.platform == "cuda"
    read = _read_program(compilation, facts, checked_roles(roles), names, per_host, reorder=on_gpu)
    module = read.placed.module
    stats = compilation.stats or _stats_from_allocations(compilation.program)
    account = read.account
    if account.method == "schedule":
        account = _with_xla_totals(account, compilation.program, stats)

    transfers = host_transfers.find(module, target.host_link_bytes_per_s if target else 0.0)
    overheads = runtime_overheads.find(_runtime_overhead_facts(account, read, stats, target, loop))
    predicted = account.allocated_bytes + overhead_bytes(overheads, POOL)
    judged = JudgedProgram(
        **vars(account),
        **vars(_verdict(predicted, target, overhead_bytes(overheads, CARD))),
        collectives=read.collectives,
        work=_roofline_work(read, transfers),
        target=target.to_json() if target else {},
        runtime_overheads=overheads,
        xla=stats,
        xla_budget=xla_passes.find_budget(
            stats, target, compilation.budget, compilation.remat_log, read.order.excess_bytes
        ),
        xla_recomputed=read.recomputed,
        scheduler_held=read.held,
    )
    subject = subject or Description()
    step_seconds = StepSeconds()
    if seconds:
        step_seconds = seconds_of_step(judged.work, judged.target, read.schedule.steps, subject, measure)
    return ReportRecord(
        **vars(judged),
        **vars(_formula_rows(account, read)),
        **vars(step_seconds),
        findings=finding_rules.find(judged, read.placed),
        audit=audit_program.audit(judged, read.placed),
        transfers=transfers,
        schedule=read.schedule.steps,
        subject=subject,
        versions=compilation.versions,
        compiler_options=dict(compilation.options),
        config=dict(config or {}),
    )


# ---- the stages of a report ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReadProgram:
    """The parts of a compiled program that a report reads, to which it adds XLA's totals, target and formulas.

    Fields:
        placed: the parsed module with its device mesh.
        roles: number of a parameter of the compiled program -> its role, such as "optimizer".
        account: the bytes in device memory at the peak, and the live range of every buffer.
        collectives: every collective of the step.
        counted: FLOPs of the traced program; None if the program was not traced.
        schedule: the kernels, collectives and transfers that one device runs, in order.
        recomputed: the values that XLA's rematerialization pass computes again.
        order: the estimated peak in an order of least memory, compared with the compiler's order.
        held: the buffers that are alive at the peak only in the compiler's order.
    """

    placed: PlacedProgram
    roles: Mapping[int, str]
    account: PeakAccount
    collectives: tuple[Collective, ...]
    counted: flops.FlopCount | None
    schedule: CompiledSchedule
    recomputed: tuple[RecomputedValue, ...]
    order: OrderEstimate
    held: tuple[HeldBuffer, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a program and the memory of a device.

    Fields:
        limit_bytes: memory limit of one device in bytes; None if there is no target.
        fits: whether the program fits; None if there is no target.
        verdict: the outcome in a word: "fits", "tight", "exceeds" or "unknown".
    """

    limit_bytes: int | None = None
    fits: bool | None = None
    verdict: str = "unknown"


@dataclasses.dataclass(frozen=True)
class FormulaRows:
    """The parts of a report that are compared with published formulas.

    Fields:
        parameters: number of parameters over all devices: `total`, and `active`, the parameters that one token uses; {}
            if unknown.
        communication: one row per kind of collective and mesh axes: its bytes as compiled and by the formulas.
        zero: one row per part of the training state: its bytes per parameter on a device, as compiled and by the ZeRO
            paper.
    """

    parameters: Mapping[str, int]
    communication: tuple[Communication, ...]
    zero: tuple[ZeroRow, ...]


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """The seconds of an update. Each field is a JSON object, {} if the seconds are unknown.

    Fields:
        roofline: the minimum seconds by the roofline model; {"unknown": reason} if they exceed the prediction.
        prediction: the predicted seconds.
    """

    roofline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prediction: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _read_program(
    compilation: Compilation,
    facts: ModelFacts | None,
    roles: Iterable[tuple[str, str]],
    names: Iterable[str],
    per_host: int,
    reorder: bool,
) -> ReadProgram:
    program, jaxpr = compilation.program, compilation.jaxpr
    known = Names(names, named_places(jaxpr) if jaxpr is not None else None)
    # The allocations of a proto are complete with or without a heap trace. A Compiled has allocations without a trace.
    derived = not program.traces and not (program.allocations and (compilation.proto or _needs_no_trace(program)))
    try:
        source = derive(program.module) if derived else program
        inputs = program_arguments.read(source, compilation.signature, roles)
        placed = place(source, compilation, facts, inputs)
        attribution = assemble.attribute_program(source, inputs, known)
        counted = flops.count(jaxpr) if jaxpr is not None else None
        schedule = reading.read_schedule(attribution, per_host, counted, source.module.devices)
        order = memory_order.find(source.module) if reorder else OrderEstimate()
        return ReadProgram(
            placed=placed,
            roles=attribution.roles,
            account=assemble.build_account(attribution, "schedule" if derived else "heap_trace", compilation.notes),
            collectives=collectives.find(attribution, placed.mesh, per_host),
            counted=counted,
            schedule=schedule,
            recomputed=xla_passes.recomputed_values(attribution, schedule.flops_of),
            order=order,
            held=xla_passes.held_buffers(attribution, order),
        )
    except RecursionError as error:
        raise ReportError(
            "the program is nested too deeply to be read: the dump is damaged; dump the program again"
        ) from error


def _formula_rows(account: PeakAccount, read: ReadProgram) -> FormulaRows:
    placed = read.placed
    state = ledger.read_state(account, placed, read.roles)
    parameters = state.parameters * state.tensor
    expected = communication_volume.expected_collectives(placed.facts, dict(placed.mesh), parameters)
    return FormulaRows(
        parameters=ledger.parameter_counts(account, placed, read.roles, state),
        communication=collectives.rows(read.collectives, expected),
        zero=ledger.zero_rows(account, state),
    )


def _roofline_work(read: ReadProgram, transfers: Iterable[Transfer]) -> Mapping[str, Any]:
    # Without a trace the FLOPs of custom kernels are unknown: a compiled module does not contain them. A schedule with
    # too many records is unknown too.
    if read.counted is None or not read.schedule.order:
        return {}
    # The loops and branches of the predicted seconds, so that these cannot be below the bound.
    steps, runs = read.schedule.steps, schedule_records.runs_by_name(read.schedule.order)
    sent = [dataclasses.replace(item, times=runs[item.name]) for item in read.collectives]
    kernel_bytes, flops = schedule_records.bytes_by_phase(steps), schedule_records.flops_by_phase(steps)
    return step_work.by_phase(sent, transfers, kernel_bytes, flops)


def _runtime_overhead_facts(
    account: PeakAccount,
    read: ReadProgram,
    stats: XlaStats,
    target: Target | None,
    loop: runtime_overheads.LoopOverhead | None,
) -> runtime_overheads.Facts:
    module = read.placed.module
    arguments = [b.bytes for b in account.buffers if b.phase == "argument" and b.memory == "device"]
    outputs = [b for b in account.buffers if b.phase == "output" and b.category == "outputs"]
    results = [b.bytes for b in outputs if b.memory == "device"]
    groups = {(item.axes, item.group) for item in read.collectives if item.group > 1}
    untuned = attention = 0
    if target and target.is_described and target.platform == "cuda":
        untuned = _untuned_product_bytes(module)
        attention = runtime_overheads.attention_beyond_peak(module, account)
    chip = CHIPS.get(base_name(target.name)) if target else None
    return runtime_overheads.Facts(
        loop=loop or runtime_overheads.LoopOverhead(),
        results=tuple(b.bytes for b in outputs if b.dtype),
        requests=(*arguments, *results, stats.temp_bytes or 0),
        communicators=len(groups),
        code=stats.generated_code_bytes or 0,
        platform=target.platform if target else "",
        context=target.reserved_bytes if target else 0,
        attention=attention,
        untuned_product=untuned,
        hopper=bool(chip and chip.gpu and chip.gpu.capability >= (9, 0)),
    )


def _untuned_product_bytes(module: Module) -> int:
    # The largest operands limit the cuBLAS workspace at run time. If the program calls cuBLAS, XLA chose the workspaces
    # when it compiled the program.
    if any(each.call.library == kernels.CUBLAS for each in module.of_opcode("custom-call")):
        return 0
    sizes = [0]
    for product in module.of_opcode(*kernels.PRODUCTS):
        arrays = [leaf for operand in module.operands(product) for _, leaf in leaves(module.shape(operand))]
        sizes.append(sum(array.bytes for array in arrays))
    return max(sizes)


def judge(report: ReportRecord, limit: int | None) -> ReportRecord:
    """Returns the report with a verdict for this memory limit: "fits", "tight" or "exceeds". If the limit is None,
    returns the report unchanged.

    `limit`: bytes that are available on one device.
    """
    if limit is None:
        return report
    return dataclasses.replace(report, **vars(verdict_of(report.predicted_bytes, limit)))


def pool_notes(report: ReportRecord) -> list[str]:
    """Returns advice about the fraction of the GPU's memory for jax's memory pool, at most one sentence: a fraction
    with which the program would fit, or that too little memory is left outside of the pool. Returns [] if neither
    applies."""
    return limits.pool_notes(report.target, report.limit_bytes, report.predicted_bytes, report.overhead(CARD))


def _verdict(predicted: int, target: Target | None, outside: int) -> Verdict:
    """Returns whether a program fits a target. A program also exceeds a GPU if the memory outside of jax's allocator
    does not suffice.

    predicted: bytes that the program needs from the allocator. outside: bytes that the runtime needs outside of it.
    """
    if target is None:
        return Verdict()
    verdict = verdict_of(predicted, target.limit_bytes)
    if limits.outside_excess(target.to_json(), verdict.limit_bytes, predicted, outside):
        return Verdict(verdict.limit_bytes, False, "exceeds")
    return verdict


def verdict_of(predicted: int, limit: int) -> Verdict:
    """Returns the verdict on a program that needs `predicted` bytes where `limit` bytes are available."""
    return Verdict(int(limit), predicted <= limit, verdict_word(predicted, limit))


def seconds_of_step(
    work: Mapping[str, Any], target: Mapping[str, Any], schedule: Steps, subject: Description, measure: bool
) -> StepSeconds:
    """Returns the predicted seconds of an update and their lower bound by the roofline model. Either is left out if the
    target's rates or the program's schedule are unknown.

    Args:
        work, target, schedule, subject: fields of a report. The subject gives the calls and tokens of an update.
        measure: whether to measure the speed of this machine, if the target is a CPU. Measuring takes time, and the
            result differs between processes. If False, the seconds of a CPU are predicted only from a measured rates
            file of `bytescope calibrate`, and without a lower bound.
    """
    if target.get("platform") == "cpu" and not measure and rates.chosen() is None:
        return StepSeconds()
    bound = step_prediction.bound({"work": work, "target": target})
    prediction = None
    if target:
        tokens, model_flops = subject.tokens or None, subject.model_flops or None
        prediction = step_prediction.predict(schedule, target, subject.calls, tokens, model_flops)
    minimum = bound.to_json() if bound else {}
    if why := step_prediction.contradiction(bound, prediction, subject.calls):
        minimum = {"unknown": why}
    return StepSeconds(minimum, prediction.to_json() if prediction else {})


def _needs_no_trace(program: hlo_buffers.HloProgram) -> bool:
    # No two temporary values share memory, so every live range is known.
    return bool(program.allocations) and all(
        a.indefinite or a.thread_local or len(a.assigned) <= 1 for a in program.allocations
    )


def _stats_from_allocations(program: hlo_buffers.HloProgram) -> XlaStats:
    # An HloProto has no executable that could report these sizes.
    main = [a for a in program.allocations if not a.thread_local and a.color == 0]
    alias = sum(a.size for a in main if a.entry_parameter and a.live_out)
    return XlaStats(
        argument_bytes=sum(a.size for a in main if a.entry_parameter),
        output_bytes=alias + sum(a.size for a in main if a.live_out and not a.entry_parameter),
        alias_bytes=alias,
        temp_bytes=sum(a.size for a in main if not a.indefinite),
        host_temp_bytes=sum(
            a.size for a in program.allocations if a.color == hlo_buffers.HOST_COLOR and not a.indefinite
        ),
    )


def _with_xla_totals(account: PeakAccount, program: hlo_buffers.HloProgram, stats: XlaStats) -> PeakAccount:
    """Returns the account of device memory with XLA's own peak and allocated bytes. They replace the totals that were
    computed from derived live ranges of the buffers.

    If the derived peak is lower than XLA's, the missing bytes become the row "unattributed" of the breakdown. It can be
    higher, because XLA lets several values share memory. The excess is then subtracted from rows of the breakdown,
    beginning with the rows whose bytes are least certain (`_DOUBTFUL`).
    """
    allocated = sum(a.size for a in program.allocations if not a.thread_local and a.color == 0)
    if not allocated and stats.argument_bytes is not None:
        allocated = (
            stats.argument_bytes + (stats.output_bytes or 0) - (stats.alias_bytes or 0) + (stats.temp_bytes or 0)
        )
    if not allocated:
        return account
    argument_and_output_bytes = sum(
        b.bytes for b in account.buffers if b.memory == "device" and b.start == 0 and b.phase in ("argument", "output")
    )
    # XLA's peak is not used if it leaves out temporaries (as on the CPU) or includes host memory.
    stated = (
        stats.peak_bytes if stats.peak_bytes and argument_and_output_bytes < stats.peak_bytes <= allocated else None
    )
    if stats.temp_bytes and stated is not None and stated <= argument_and_output_bytes + stats.temp_bytes // 100:
        stated = None
    peak = min(stated if stated is not None else account.peak_bytes, allocated)
    rows = dict(account.breakdown)
    missing = peak - account.peak_bytes
    buffers, notes = account.buffers, list(account.notes)
    if missing >= 0:
        rows["unattributed"] += missing
        if missing:
            last = len(account.timeline) - 1
            buffers += (Buffer("difference to XLA's peak", missing, end=last, at_peak=True),)
    else:
        excess = -missing
        for row in _DOUBTFUL:
            taken = min(rows[row], excess)
            rows[row], excess = rows[row] - taken, excess - taken
    rows["fragmentation"] = allocated - peak
    notes.append(
        f"lifetimes are derived from the schedule: their peak is {account.peak_bytes} bytes, XLA's totals give {peak}"
    )
    return dataclasses.replace(
        account, peak_bytes=peak, allocated_bytes=allocated, breakdown=rows, buffers=buffers, notes=tuple(notes)
    )
