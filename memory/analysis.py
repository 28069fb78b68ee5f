"""`analyze`: any compiled JAX program in, a report out.

From a `jax.stages.Traced` or `Lowered`, and from an HloProto, everything is exact: the compiler's own buffers
and heap trace are read. A finished `Compiled` keeps neither on most backends; then lifetimes are derived from
its schedule, totals are XLA's, and the report's `method` and `notes` say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from bytescope.memory.cost import collectives, flops, host_transfers, kernel_costs, step_work
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.findings import finding_rules
from bytescope.memory.formulas import communication_volume
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Module
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak import assemble, ledger, runtime_overheads
from bytescope.memory.peak.buffer_placement import PlacedProgram, place
from bytescope.memory.peak.checkpoint_names import Names, named_places
from bytescope.memory.peak.live_schedule import derive
from bytescope.memory.program import program_arguments
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.program.roles import checked_roles
from bytescope.memory.program.tracing import check_options
from bytescope.memory.records.report_record import Buffer, ReportRecord, XlaStats
from bytescope.memory.seconds import rates, reading, step_prediction, step_schedule

# Above this share of the limit a program fits, but tightly.
TIGHT = 0.95
# Rows in the order in which a derivation may have too many bytes in them.
_DOUBTFUL = (
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


def analyze(
    program: Any,
    *args: Any,
    target: Target | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    **options: Any,
) -> ReportRecord:
    """What every byte of a program's peak is, on one device.

    Args:
        program: a step, plain or jitted, and in `args` and `kwargs` its arguments: arrays, ShapeDtypeStructs, or
            pytrees of them. It is traced once and compiled for the target. Or, without arguments, a
            `jax.stages.Traced`, a `Lowered` or `Compiled` for the target's own devices, a serialized HloProto (bytes),
            or the path of one.
        target: what it is compiled for, a `memory.devices.targets.Target` or its name ("h200:8"); None: the devices
            of the arguments' shardings, else those at hand. A proto without one is not judged.
        config: goes into the report as it is.
        facts: what the trainer knows of the step (`memory.formulas.model_facts.ModelFacts`): shapes, mesh, precision,
            remat. With them the report has ZeRO's accounting, the collectives by formula, active parameters, and
            findings on experts and stages.
        roles: (regular expression, role) pairs for the pytree paths of arguments, tried before all else;
            roles are params, frozen, optimizer, accumulator, cache, rng, gradients and batch.
        names: the program's checkpoint names, for programs that put them into named scopes too.
        options: of `jax.jit` for a plain step: in_shardings, out_shardings, donate_argnums, donate_argnames,
            static_argnums, static_argnames.

    Raises:
      ReportError: what is not a program, or one for other devices than the target's; a damaged proto; a target that
          does not exist.
      TypeError: an option that `jax.jit` does not know.
    """
    check_options(options, "analyze")
    roles = checked_roles(roles)
    compilation, found = compiled_for(program, args, kwargs, target=target, options=options)
    return report_of(compilation, target=found, config=config, facts=facts, roles=roles, names=names)


def report_of(
    compilation: Compilation,
    *,
    target: Target | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    loop: runtime_overheads.LoopOverhead | None = None,
) -> ReportRecord:
    """The report of a finished compilation (`memory.devices.compiler`), without compiling anything.

    `loop`: what the loop around the program keeps on the device; the other arguments are those of `analyze`.

    Raises ReportError for a damaged program.
    """
    roles = checked_roles(roles)
    known = Names(names, named_places(compilation.jaxpr) if compilation.jaxpr is not None else None)
    program = compilation.program
    # A proto with allocations says all there is to say, trace or not; a Compiled's leaves the trace out.
    derived = not program.traces and not (program.allocations and (compilation.proto or _needs_no_trace(program)))
    source = derive(program.module) if derived else program
    try:
        flow = Flow(source.module)
        inputs = program_arguments.read(source, flow, compilation.signature, roles)
        placed = place(source, compilation, facts, inputs)
        look = assemble.attribution_of(source, inputs, known, flow)
        report = assemble.report(look, "schedule" if derived else "heap_trace")
        per_host = target.devices_per_host if target else 0
        report = dataclasses.replace(
            report, collectives=collectives.find(look, placed.mesh, per_host), work=kernel_costs.find(look)
        )
        counted = flops.count(compilation.jaxpr) if compilation.jaxpr is not None else None
        steps = reading.read(look, placed.mesh, per_host, counted, source.module.devices)
        report = dataclasses.replace(report, schedule=steps)
    except RecursionError as error:
        raise ReportError("a program nested too deeply to read: dump it again") from error
    stats = compilation.stats or _stats(program)
    if derived:
        report = _with_xla_totals(report, program, stats)
    report = dataclasses.replace(
        report,
        xla=stats,
        versions=compilation.versions,
        target=target.to_json() if target else {},
        config=dict(config or {}),
        notes=(*compilation.notes, *report.notes),
    )
    asked = _runtime_facts(report, source.module, target, loop or runtime_overheads.LoopOverhead())
    report = dataclasses.replace(report, unseen=runtime_overheads.find(asked))
    report = _with_formulas(judge(report, target.limit_bytes if target else None), placed, look.roles)
    moved = host_transfers.find(source.module, target.host_link_bytes_per_s if target else 0.0)
    report = dataclasses.replace(report, transfers=moved)
    report = dataclasses.replace(report, work=_work(report, placed, counted, target))
    return dataclasses.replace(report, findings=finding_rules.find(report, placed))


def _with_formulas(report: ReportRecord, program: PlacedProgram, roles: Mapping[int, str]) -> ReportRecord:
    """The report with what the formulas expect of its step, where the trainer's facts have what they need."""
    state = ledger.state_of(report, program, roles)
    parameters = state.parameters * state.tensor
    expected = communication_volume.expected_collectives(program.facts, dict(program.mesh), parameters)
    return dataclasses.replace(
        report,
        parameters=ledger.parameter_counts(report, program, roles, state),
        communication=collectives.rows(report.collectives, expected),
        zero=ledger.zero_rows(report, state),
    )


def _work(
    report: ReportRecord, program: PlacedProgram, counted: flops.FlopCount | None, target: Target | None
) -> Mapping[str, Any]:
    """Returns the work of a program for the roofline; {} if the program was not traced, because a module does not give
    the FLOPs of foreign kernels.

    Counts the FLOPs of the scheduled kernels. Without a schedule, each device is assumed to compute an equal share.
    """
    if counted is None:
        return {}
    per_host = target.devices_per_host if target else 0
    on_device: Mapping[tuple[str, str], float] = step_schedule.flops_by_phase(report.schedule)
    if not report.schedule:
        on_device = {key: count / program.module.devices for key, count in counted.by.items()}
    return step_work.by_phase(report, report.work, on_device, program.mesh, per_host)


def _runtime_facts(
    report: ReportRecord, module: Module, target: Target | None, loop: runtime_overheads.LoopOverhead
) -> runtime_overheads.Facts:
    """What the table of runtime overheads asks of a program; without a target nothing is known of an allocator."""
    arguments = [b.bytes for b in report.buffers if b.phase == "argument" and b.memory == "device"]
    outputs = [b for b in report.buffers if b.phase == "output" and b.category == "outputs"]
    results = [b.bytes for b in outputs if b.memory == "device"]
    groups = {(item.axes, item.group) for item in report.collectives if item.group > 1}
    facts = runtime_overheads.Facts(
        loop=loop,
        results=tuple(b.bytes for b in outputs if b.dtype),
        requests=(*arguments, *results, report.xla.temp_bytes or 0),
        communicators=len(groups),
        code=report.xla.generated_code_bytes or 0,
    )
    if target is None:
        return facts
    chip = CHIPS.get(target.name.partition(":")[0])
    untuned = _untuned_product(module) if target.is_described and target.platform == "cuda" else 0
    return dataclasses.replace(
        facts,
        platform=target.platform,
        context=target.reserved_bytes,
        untuned_product=untuned,
        hopper=bool(chip and chip.gpu and chip.gpu.capability >= (9, 0)),
    )


def _untuned_product(module: Module) -> int:
    """Operand bytes of the largest matrix product of a program without any call of cuBLAS, else 0."""
    if any("cublas" in instruction.target for instruction in module.instructions.values()):
        return 0
    products = (i for i in module.instructions.values() if i.opcode in kernel_costs.PRODUCTS)
    return max(
        (
            sum(
                leaf.bytes
                for id in product.operands
                if id in module.instructions
                for _, leaf in leaves(module.shape(module.instructions[id]))
            )
            for product in products
        ),
        default=0,
    )


def judge(report: ReportRecord, limit: int | None) -> ReportRecord:
    """The report with its verdict on the predicted bytes: fits, tight (above 95 % of the limit), exceeds; unknown
    without a limit. `limit`: bytes that are available on one device."""
    if limit is None:
        return report
    predicted, verdict = report.predicted_bytes, "fits"
    if predicted > limit:
        verdict = "exceeds"
    elif predicted > TIGHT * limit:
        verdict = "tight"
    return dataclasses.replace(report, limit_bytes=int(limit), fits=predicted <= limit, verdict=verdict)


def with_seconds(report: ReportRecord, measure: bool = False) -> ReportRecord:
    """The report with the seconds that are predicted of an update, and the roofline's bound, where enough is known of
    program and target. Its `subject` tells calls and tokens of an update.

    `measure`: of a CPU too, whose rates are measured for it: they take time, and differ from one process to the next.
    Where a file of rates is chosen it has the CPU's seconds, with no bound.
    """
    if report.target.get("platform") == "cpu" and not (measure or rates.chosen()):
        return report
    bound = step_prediction.bound({"work": report.work, "target": report.target})
    found = step_prediction.of_report(report)
    return dataclasses.replace(
        report, roofline=bound.to_json() if bound else {}, prediction=found.to_json() if found else {}
    )


def _needs_no_trace(program: hlo_buffers.HloProgram) -> bool:
    """Whether allocations alone tell every lifetime: there are some, and none of them is temporary memory in parts."""
    return bool(program.allocations) and all(
        a.indefinite or a.thread_local or len(a.assigned) <= 1 for a in program.allocations
    )


def _stats(program: hlo_buffers.HloProgram) -> XlaStats:
    """The statistics that follow from allocations alone, for a proto without a Compiled."""
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


def _with_xla_totals(report: ReportRecord, program: hlo_buffers.HloProgram, stats: XlaStats) -> ReportRecord:
    """A derived report with totals as XLA states them; what the derivation lacks is the unattributed row.

    What it has too much, values that XLA puts in one place and the derivation does not, is taken off the
    workspace, then off the other temporary rows.
    """
    allocated = sum(a.size for a in program.allocations if not a.thread_local and a.color == 0)
    if not allocated and stats.argument_bytes is not None:
        allocated = (
            stats.argument_bytes + (stats.output_bytes or 0) - (stats.alias_bytes or 0) + (stats.temp_bytes or 0)
        )
    if not allocated:
        return report
    held = sum(
        b.bytes for b in report.buffers if b.memory == "device" and b.start == 0 and b.phase in ("argument", "output")
    )
    # A peak that leaves temporaries out (the CPU's) or counts host memory in is not one.
    stated = stats.peak_bytes if stats.peak_bytes and held < stats.peak_bytes <= allocated else None
    if stats.temp_bytes and stated is not None and stated <= held + stats.temp_bytes // 100:
        stated = None
    peak = min(stated if stated is not None else report.peak_bytes, allocated)
    rows = dict(report.breakdown)
    missing = peak - report.peak_bytes
    buffers, notes = report.buffers, list(report.notes)
    if missing >= 0:
        rows["unattributed"] += missing
        if missing:
            last = len(report.timeline) - 1
            buffers += (Buffer("difference to XLA's peak", missing, end=last, at_peak=True),)
    else:
        excess = -missing
        for row in _DOUBTFUL:
            taken = min(rows[row], excess)
            rows[row], excess = rows[row] - taken, excess - taken
    rows["fragmentation"] = allocated - peak
    notes.append(
        f"lifetimes are derived from the schedule: their peak is {report.peak_bytes} bytes, XLA's totals say {peak}"
    )
    return dataclasses.replace(
        report, peak_bytes=peak, allocated_bytes=allocated, breakdown=rows, buffers=buffers, notes=tuple(notes)
    )
