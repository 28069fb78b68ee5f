"""Audits the SPMD partitioner: arrays that the program shards and that XLA gathers in full on every device.

Three kinds of gathers get a row, each with the bytes of the gathered array and the bytes that one device sends per
step: arrays that are replicated only to change their sharding (XLA's log calls this "involuntary full
rematerialization"), parameters that one use gathers more than once, and activations that are gathered in full. Fully
sharded data parallelism gathers each parameter once for its use in the forward pass and once for its use in the
backward pass; such gathers get no row.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bytescope.memory.audit.gathers import Gather, read_gathers
from bytescope.memory.devices.compiler_log import FullRemat
from bytescope.memory.findings.evidence import SMALL, TOY, spec_words
from bytescope.memory.findings.sharding_findings import GATHER_REMEDY, data_axes, unintended_replicas
from bytescope.memory.findings.user_functions import line_of
from bytescope.memory.hlo.loops import trip_count
from bytescope.memory.hlo.module import Metadata
from bytescope.memory.hlo.sharding_text import ParsedSharding, mesh_axes_of, parse_sharding
from bytescope.memory.hlo.sources import short_place, source_line
from bytescope.memory.jaxprs import bodies, distinct_jaxprs
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.buffer_rules import without_ones
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.records.audit_record import UNKNOWN, AuditRow
from bytescope.memory.records.report_record import JudgedProgram

# Passes of a training step that compute activations and their gradients.
_PASSES = ("forward", "backward", "recompute")
# Last words of op_names of gathers that the program asks for itself.
_ASKED = ("all_gather", "all_gather_invariant", "reshard", "device_put")
# Prefixes of dtypes in HLO text, and in a report.
_DTYPES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def gathered_arrays(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields one row for each array that the program shards and that XLA gathers in full on every device. Arrays with
    the same name, source line and cause, such as the arrays of unrolled layers, share one row. Yields nothing for a
    program on one device.

    Args:
        report: the report with the collectives of the step.
        program: the compiled step with its jaxpr and XLA's log lines.
    """
    if program.module.devices < 2:
        return
    gathers = read_gathers(report, program)
    rows: dict[tuple[str, str, str], AuditRow] = {}
    listed: set[int] = set()
    for find_rows in (_resharded, _gathered_often, _whole_activations):
        for gather, row in find_rows(report, program, [each for each in gathers if id(each) not in listed]):
            listed.add(id(gather))
            if program.jaxpr is None:
                row = dataclasses.replace(row, asked=UNKNOWN)
            key = row.subject, row.source, row.message
            first = rows.get(key)
            if first is not None:
                row = dataclasses.replace(
                    first,
                    bytes=first.bytes + row.bytes,
                    count=first.count + row.count,
                    wire_bytes=first.wire_bytes + row.wire_bytes,
                )
            rows[key] = row
    yield from rows.values()


_Found = Iterator[tuple[Gather, AuditRow]]


def _row(subject: str, source: str, bytes: int, wire_bytes: int, message: str) -> AuditRow:
    return AuditRow(
        "sharding", subject, source, "divide", "replicated", bytes, 0, "partitioner", message, wire_bytes=wire_bytes
    )


def _array_text(dtype: str, dims: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


# ---- arrays that are gathered only to change their sharding ---------------------------------------------------------


def _resharded(report: JudgedProgram, program: PlacedProgram, gathers: Sequence[Gather]) -> _Found:
    """Yields (gather, row) for each array that every device gathers in full only to change the array's sharding: the
    device then keeps only its part in the new sharding. XLA's log names both shardings; without a log (an HLO dump),
    such gathers are recognized by their uses. `gathers`: all gathered arrays of the step."""
    rest = list(gathers)
    constraints = list(_constraints(program.jaxpr)) if program.full_remats and program.jaxpr is not None else []
    for remat in dict.fromkeys(program.full_remats):
        source, target = parse_sharding(remat.source), parse_sharding(remat.target)
        if source is None:
            continue
        tiles = source.tiles or (1,) * len(remat.dims)
        dims = tuple(dim * tile for dim, tile in zip(remat.dims, tiles))
        dtype = re.sub(r"^[a-z]+(?=\d)", lambda match: _DTYPES.get(match[0], match[0]), remat.dtype)
        same = [each for each in rest if each.shape.elements == math.prod(dims)]
        same = [each for each in same if each.shape.dtype == dtype] or same  # a cast may move across the gather
        same = [each for each in same if each.metadata.op_name == remat.op_name] or same[:1]
        if not same:  # later passes of the compiler removed the gather
            continue
        # Calls of one function, such as unrolled layers, have the same op_name: the log has one line for each.
        times = sum(each == remat for each in program.full_remats)
        specs = [_spec(each, program) for each in (source, target)]
        asked = _constraint_line(constraints, dims, specs[1])
        place = _operation_line(program, remat) or asked or source_line(same[0].metadata)
        words = " to ".join(spec_words(spec) if spec is not None else "another sharding" for spec in specs)
        where = f" at {short_place(asked)}" if asked and asked != place else ""
        message = (
            f"XLA replicates the array on every device to reshard it from {words}{where}: use one sharding before and "
            "after this operation, or add with_sharding_constraint with an intermediate sharding, so that each change "
            "of sharding moves only one mesh axis"
        )
        operation = remat.op_name.rpartition("/")[2] or remat.operation
        for gather in same[:times]:
            rest = [each for each in rest if each is not gather]
            subject = f"{operation} {_array_text(gather.shape.dtype, dims)}"
            yield gather, _row(subject, place, gather.shape.bytes, gather.wire_bytes, message)
    for gather in rest:
        if gather.is_sliced and gather.shape.bytes > TOY and not _is_asked(gather):
            subject = _subject(gather)
            message = (
                "every device gathers the whole array but uses only a part of it: give the operation that computes the "
                "array and the operation that reads the array the same sharding"
            )
            place = source_line(gather.metadata)
            yield gather, _row(subject, place, gather.shape.bytes, gather.wire_bytes, message)


def _spec(sharding: ParsedSharding | None, program: PlacedProgram) -> tuple[tuple[str, ...], ...] | None:
    return mesh_axes_of(sharding, program.mesh) if sharding is not None and program.mesh else None


def _subject(gather: Gather) -> str:
    operation = gather.metadata.op_name.rpartition("/")[2] or gather.item.name
    return f"{operation} {_array_text(gather.shape.dtype, gather.shape.dims)}"


def _operation_line(program: PlacedProgram, remat: FullRemat) -> str:
    """Returns "file.py:line" of the operation that XLA's log names in the line `remat`. Returns "" if the log names an
    argument instead of an operation, or if the operation is not in the compiled program."""
    module, best = program.module, ""
    if "/" not in remat.op_name:
        return ""
    for instruction in module.with_op_name(remat.op_name):
        line = source_line(module.metadata(instruction))
        if line and module.shape(instruction).dims == remat.dims:
            return line
        best = best or line
    return best


def _constraint_line(constraints: Iterable[Any], dims: Sequence[int], spec: tuple[tuple[str, ...], ...] | None) -> str:
    """Returns "file.py:line" of the first sharding constraint in the user's code that gives an array with the shape
    `dims` the sharding `spec`; "" if there is none.

    Args:
        constraints: the sharding_constraint equations of the jaxpr.
        dims: global shape of the array.
        spec: mesh axes for each dimension; None if unknown, for which "" is returned.
    """
    for equation in constraints:
        if spec is not None and tuple(equation.invars[0].aval.shape) == tuple(dims):
            own = getattr(equation.params["sharding"], "spec", ())
            axes = tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in own)
            if axes + ((),) * (len(dims) - len(axes)) == spec:
                return line_of(equation)
    return ""


def _constraints(jaxpr: Any) -> Iterator[Any]:
    for inside in distinct_jaxprs(jaxpr):
        for equation in inside.eqns:
            if equation.primitive.name == "sharding_constraint":
                yield equation


# ---- parameters that are gathered more than once per use ------------------------------------------------------------


def _gathered_often(report: JudgedProgram, program: PlacedProgram, gathers: Sequence[Gather]) -> _Found:
    """Yields (gather, row) for each model parameter that is gathered more often than its use needs: several times by
    one source line in the forward pass (or in the backward pass), or in each iteration of a loop that does not change
    the parameter. `gathers`: the gathered
    arrays that have no row yet."""
    roles = program.arguments.roles
    minimum = max(SMALL * report.peak_bytes, TOY)
    uses: dict[tuple[Any, ...], list[Gather]] = {}
    for gather in gathers:
        if gather.argument is None or roles.get(gather.argument.parameter) not in WEIGHTS or _is_asked(gather):
            continue
        forward = gather.item.phase == "forward"
        for line in {source_line(program.module.metadata(use)) for use in gather.uses} - {""}:
            key = gather.argument.parameter, gather.part, gather.computation, forward, line
            uses.setdefault(key, []).append(gather)
    for (number, *_, line), same in uses.items():
        extra = [gather for gather in same[1:] if gather.shape.bytes > minimum]
        message = (
            f"this line gathers the parameter {len(same)} times in the {same[0].item.phase} pass: before all uses, "
            "cast the parameter to one dtype, and give it one sharding with with_sharding_constraint"
        )
        for gather in extra:
            yield gather, _row(program.arguments.path(number), line, gather.shape.bytes, gather.wire_bytes, message)
        trips = _loop_trips(program, same[0])
        if not extra and trips > 1 and same[0].shape.bytes > minimum:
            message = (
                f"each of {trips} iterations of a loop gathers the parameter again, although the loop does not change "
                "it: replicate the parameter before the loop with with_sharding_constraint, if the memory suffices"
            )
            sent = same[0].wire_bytes * (trips - 1) // trips
            yield same[0], _row(program.arguments.path(number), line, same[0].shape.bytes, sent, message)


def _loop_trips(program: PlacedProgram, gather: Gather) -> int:
    """Returns the number of iterations if each iteration of the loop around `gather` gathers the same array again; else
    1. Loops that run both the forward and the backward pass, such as a loop over micro-batches, also give 1."""
    module = program.module
    if gather.loop is None or gather.looped:
        return 1
    phases = {module.scope(instruction).phase for instruction in module.inside(gather.computation)}
    return 1 if {"forward", "backward"} <= phases else trip_count(module, gather.loop) or 1


# ---- activations that are gathered in full --------------------------------------------------------------------------


def _whole_activations(report: JudgedProgram, program: PlacedProgram, gathers: Sequence[Gather]) -> _Found:
    """Yields (gather, row) for each large activation, or gradient of an activation, that every device gathers in full
    although mesh axes should shard its batch dimension. Arrays that the user's code replicates explicitly are left
    out. `gathers`: the gathered arrays that have no row yet."""
    minimum = max(SMALL * report.peak_bytes, TOY)
    large = [
        gather
        for gather in gathers
        if gather.argument is None
        and gather.uses  # otherwise the gathered array is a result of the program
        and gather.shape.bytes > minimum
        and gather.item.phase in _PASSES
        and "float" in gather.shape.dtype
        and not _is_asked(gather)
    ]
    if not large:
        return
    replicas = {array.name for array in unintended_replicas(report, program)}
    data = data_axes(report, program)
    weights = {
        without_ones(dims)
        for number, layout in program.layouts.items()
        if program.arguments.roles.get(number) in WEIGHTS
        for dims in (layout.dims, layout.dims[1:])
    }
    # Sizes of the arrays that the user's code replicates explicitly.
    requested = {
        math.prod(equation.invars[0].aval.shape)
        for equation in (_constraints(program.jaxpr) if program.jaxpr is not None else ())
        if equation.params["sharding"].is_fully_replicated
    }
    for gather in large:
        dims = without_ones(gather.shape.dims)
        if gather.item.name not in replicas and (
            not data & gather.axes
            or dims in weights  # a gradient
            or math.prod(dims) in requested
            or math.prod(dims) not in _global_sizes(program, gather.metadata)
        ):
            continue
        message = f"every device gathers the whole array, although the program shards it: {GATHER_REMEDY}"
        place = source_line(gather.metadata)
        yield gather, _row(_subject(gather), place, gather.shape.bytes, gather.wire_bytes, message)


def _is_asked(gather: Gather) -> bool:
    return gather.metadata.op_name.rpartition("/")[2] in _ASKED


def _global_sizes(program: PlacedProgram, metadata: Metadata) -> set[int]:
    """Returns the number of elements (of the global array) of each array that one source line reads or computes in the
    jaxpr; an empty set without a jaxpr. `metadata`: metadata of an HLO instruction, which names the source line."""
    sizes: set[int] = set()
    line = source_line(metadata)
    if program.jaxpr is None or not line:
        return sizes
    for inside in distinct_jaxprs(program.jaxpr, _global_bodies):
        for equation in inside.eqns:
            if line_of(equation) == line:
                sizes |= {math.prod(getattr(atom.aval, "shape", ())) for atom in (*equation.invars, *equation.outvars)}
    return sizes


def _global_bodies(equation: Any) -> Iterable[Any]:
    return () if equation.primitive.name in ("shard_map", "pallas_call") else bodies(equation)
