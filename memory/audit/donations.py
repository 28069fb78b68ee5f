"""Audits donations: whether a result reuses the memory of each donated argument, and why not."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from bytescope.memory.cost.host_transfers import HOST_SPACE
from bytescope.memory.devices.signature import Signature, SignatureLeaf
from bytescope.memory.findings.evidence import TOY, spec_words
from bytescope.memory.hlo.buffers import Allocation
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import DTYPES
from bytescope.memory.hlo.sources import OWN, kind_of
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.pairing import root_of
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram

# Dtype -> bits of an element. Other types are those of jax, such as random keys.
_BITS = dict(DTYPES.values())


def donations(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields rows for the donated arguments of a step. An argument is a pytree of arrays: it gets one row for all of
    its arrays whose memory a result reuses, and one row for each reason why memory of its other arrays is not reused.

    Without a signature (an HLO dump), it is unknown which arguments were donated. Then only reused arrays get rows,
    with `asked` = "unknown".

    Args:
        report: the report of the compiled step.
        program: the compiled step with its buffers, aliases and signature.
    """
    module, signature = program.module, program.signature or Signature()
    reused = {parameter for _, parameter, _ in module.aliases}
    copied = _copied_parameters(module)
    source = _line_of_step(program.jaxpr)
    rows: dict[tuple[str, str], AuditRow] = {}

    def add(path: str, size: int, asked: str, done: str, undone_by: str = "", message: str = "") -> None:
        root = root_of(path)
        row = rows.get((root, message)) or AuditRow("donation", root, source, asked, done, 0, 0, undone_by, message, 0)
        rows[root, message] = dataclasses.replace(row, bytes=row.bytes + size, count=row.count + 1)

    leaves = signature.by_parameter
    for allocation in program.allocations:
        number = allocation.parameter
        argument = program.arguments.by_number.get(number) if allocation.entry_parameter else None
        if argument is None:
            continue
        leaf = leaves.get(number)
        if leaf is not None and leaf.donation_off:
            add(argument.path, allocation.size, "donate", "copied", "tracing", _OFF)
        elif number in reused:
            if leaf is None:
                add(argument.path, allocation.size, "unknown", "reused")
            elif number in copied and allocation.size > TOY:
                add(argument.path, allocation.size, "donate", "copied", "copies", _READ_LATER)
            else:
                add(argument.path, allocation.size, "donate", "reused")
        elif argument.donated and leaf is not None:
            message = _reason(program, signature, leaf, reused, allocation)
            add(argument.path, allocation.size, "donate", "copied", "lowering", message)
    for leaf in signature.arguments:
        if leaf.donated and leaf.parameter < 0:
            size = math.prod(leaf.shape) * _BITS.get(leaf.dtype, 0) // 8 // module.devices
            add(leaf.path, size, "donate", "ignored", "tracing", _UNUSED)
    for row in rows.values():
        if row.done != "ignored" or row.bytes > TOY:  # unused counters and random keys waste nothing
            yield row


_OFF = (
    "jax donates no argument while the option jax_debug_nans is on: turn the option off, and call jax.clear_caches() "
    "if the step was compiled with the option"
)
_READ_LATER = (
    "XLA copies the donated array, because the step returns it or computes something from both the old and the new "
    "array: remove such results from the step, or compute them in a separate call of jax.jit"
)
_UNUSED = (
    "the step does not use the argument, so jax drops it from the compiled program and the call does not free its "
    "memory: remove the argument from the step, and delete the array if the memory is needed"
)


def _reason(
    program: PlacedProgram, signature: Signature, leaf: SignatureLeaf, reused: set[int], allocation: Allocation
) -> str:
    """Returns one sentence: why no result reuses the memory of a donated array, and what the user can change so that a
    result does.

    Args:
        program: the compiled step.
        signature: shapes, dtypes and shardings of the step's arguments and results.
        leaf: the donated array.
        reused: numbers of the entry parameters whose memory is reused by a result.
        allocation: the memory of the donated array.
    """
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    alike = [
        at for at, result in enumerate(signature.results) if (result.shape, result.dtype) == (leaf.shape, leaf.dtype)
    ]
    if not alike:
        return (
            f"no result has the shape and dtype {kind} of the donated array: return such a result, or do not donate "
            "the array"
        )
    own = program.layouts.get(leaf.parameter)
    others = [program.results[at] for at in alike if at < len(program.results)]
    if own is not None and others and all(other.local != own.local for other in others):
        return (
            f"the results with shape and dtype {kind} are sharded as {spec_words(others[0].spec)}, but the donated "
            f"array as {spec_words(own.spec)}: give both the same sharding, with out_shardings of jax.jit"
        )
    takers = [
        other.path
        for number, other in signature.by_parameter.items()
        if number in reused and (other.shape, other.dtype) == (leaf.shape, leaf.dtype)
    ]
    if len(takers) >= len(alike):
        return (
            f"every result with shape and dtype {kind} reuses another donated array, such as {takers[0]}: do not "
            "donate this array"
        )
    return f"no result with shape and dtype {kind} reuses the donated array: return the updated array from the step"


def _copied_parameters(module: Module) -> set[int]:
    """Returns the numbers of the donated entry parameters that XLA must copy, because the program returns both the old
    and the new value, or computes something from both. Copies that XLA makes for other reasons are not counted."""
    entry, root = module.computations.get(module.entry), module.root(module.entry)
    if entry is None or root is None:
        return set()
    copied = set()
    for index, parameter, _ in module.aliases:
        copies = list(_copies(module, module.instructions[entry.parameters[parameter]]))
        result = (module.operand(root, index[0]) if index else None) or root
        computed_from_new = Flow(module).dependent({result.id}) if copies else set()
        for copy in copies:
            if copy.id != result.id and not computed_from_new.isdisjoint(each.id for each in module.users(copy)):
                copied.add(parameter)
    return copied


def _copies(module: Module, parameter: Instruction) -> Iterator[Instruction]:
    """Yields the copies of an entry parameter in the main device memory. A TPU may copy an array in several steps,
    through its on-chip memory."""
    on_host = module.shape(parameter).memory_space == HOST_SPACE  # its copy is a move to the device
    pending = [] if on_host else [parameter]
    while pending:
        for user in module.users(pending.pop()):
            if user.opcode not in ("copy", "copy-start", "copy-done"):
                continue
            space = module.shape(user).memory_space
            if user.opcode != "copy-start" and space == 0:
                yield user
            elif space != HOST_SPACE:
                pending.append(user)


def _line_of_step(jaxpr: Any) -> str:
    """Returns "file.py:line" of the definition of the step function that was traced to this ClosedJaxpr; "" if the user
    did not write the function."""
    info = getattr(getattr(jaxpr, "jaxpr", None), "debug_info", None)
    place = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
    return place[1] if place and kind_of(place[1].rpartition(":")[0]) == OWN else ""
