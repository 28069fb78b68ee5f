"""Audits calls of jax.checkpoint: whether the compiled module recomputes the values, or keeps them.

XLA undoes a recomputation by common-subexpression elimination (CSE): if nothing separates the forward pass from the
recomputation, equal instructions of both are merged, and their values stay alive from one to the other. A merged
instruction may have the op_name of either of the two. It is found by its users: the forward pass depends on it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from bytescope.memory.audit.checkpoint_requests import (
    RANDOM,
    CheckpointRegion,
    Key,
    common_function,
)
from bytescope.memory.findings.evidence import TOY, at_peak, start_of_backward
from bytescope.memory.findings.user_functions import Function
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.module import Frame, Instruction, Module
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.buffer_records import Buffer
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human

# Opcodes that compute nothing, which may have the op_name of a kernel, and fusions, whose instructions are counted.
_NO_WORK = frozenset(
    (
        "bitcast",
        "bitcast-convert",
        "broadcast",
        "constant",
        "convert",
        "copy",
        "copy-done",
        "copy-start",
        "fusion",
        "get-tuple-element",
        "iota",
        "parameter",
        "reshape",
        "slice",
        "transpose",
        "tuple",
    )
)
# A region is recomputed if at least this fraction of its kernels is in the compiled module a second time. XLA may
# merge kernels with a common operand, so fewer kernels than equations are expected.
_RECOMPUTED = 1 / 4
# The word in an op_name that separates the call of jax.checkpoint from the operations that it computes again.
_MARK = b"rematted_computation"
_REGION = re.compile(r"/rematted_computation\b|\brematted_computation\b")


def region_rows(
    report: JudgedProgram, regions: Iterable[CheckpointRegion], outcome: CompiledOutcome
) -> Iterator[AuditRow]:
    """Yields a row for each region, and a row for values of a recomputed region that XLA keeps nevertheless, such as
    dropout masks. The bytes of a row are those of the region's residuals that are alive at the peak."""
    total = sum(region.flops for region in regions)
    compiled = sum(report.work.get("recompute", {}).get("flops", {}).values())
    for region in regions:
        merged = outcome.is_merged(region)
        if merged or not region.recomputes:
            size = outcome.merged_bytes(region) if merged else outcome.bytes_of_function(region)
            yield _row(region, "kept", size, 0, *_explain_kept(region, size, merged, report.target.get("platform")))
        else:
            share = compiled * region.flops // total if total else 0
            yield _row(region, "recomputed", outcome.residual_bytes(region), int(share))
            yield from _kept_constants(region, outcome)


def rows_without_jaxpr(outcome: CompiledOutcome) -> Iterator[AuditRow]:
    """Yields a row for each function whose values the compiled module computes again."""
    for function, count in outcome.recomputed_functions().items():
        yield AuditRow("checkpoint", function, done="recomputed", count=count)


def _row(
    region: CheckpointRegion, done: str, size: int, flops: int, undone_by: str = "", message: str = ""
) -> AuditRow:
    return AuditRow(
        "checkpoint", region.title, region.source, "recompute", done, size, flops, undone_by, message, region.count
    )


def _explain_kept(region: CheckpointRegion, size: int, merged: bool, platform: str | None) -> tuple[str, str]:
    """Returns (the step that undid the recomputation, a sentence with the remedy)."""
    if not merged:
        name = getattr(region.policy, "__name__", "") or type(region.policy).__name__
        message = f"jax.checkpoint of {region.title} recomputes nothing, because its policy {name} saves every value"
        return "autodiff", f"{message}: use a policy that saves less, or no jax.checkpoint"
    what = f"{human(size)} of values that jax.checkpoint of {region.title} should recompute are kept"
    if region.prevent_cse and platform == "cpu":
        why = "XLA's CPU compiler merges the recomputation with the forward pass; run the layers in jax.lax.scan"
    elif region.prevent_cse:
        why = "XLA merges the recomputation with the forward pass; run the layers in jax.lax.scan"
    else:
        why = (
            "XLA merges the recomputation with the forward pass; remove prevent_cse=False, which is safe only inside "
            "jax.lax.scan"
        )
    return "cse", f"{what}: {why}"


def _kept_constants(region: CheckpointRegion, outcome: CompiledOutcome) -> Iterator[AuditRow]:
    """Yields a row for large values that depend on no argument of the checkpointed function, and that XLA keeps. No
    optimization barrier separates the two computations of these values."""
    sizes: dict[str, set[int]] = defaultdict(set)  # dtype -> numbers of elements
    for each in region.constant:
        for result in each.equation.outvars:
            sizes[str(getattr(result.aval, "dtype", ""))].add(getattr(result.aval, "size", 0))
    drawn = any(each.equation.primitive.name in RANDOM for each in region.constant)
    lines = region.lines if drawn else {each.line for each in region.constant}
    kept: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in outcome.residuals:
        if buffer.dtype in _MASKS and buffer.source in lines and buffer.bytes > TOY:
            elements = math.prod(buffer.shape)
            # a device holds a part of the array
            if any(size % elements == 0 and size // elements <= outcome.devices for size in sizes[buffer.dtype]):
                kept[buffer.source].append(buffer)
    for source, buffers in kept.items():
        size = sum(buffer.bytes for buffer in buffers)
        if size <= TOY:
            continue
        if drawn:
            what = f"{human(size)} of random masks in {region.title} are kept, because their key is the same constant"
            remedy = f"in both passes: pass the random key as an argument of {region.title}"
        else:
            what = f"{human(size)} of masks in {region.title} are kept, because they depend on none of its arguments"
            remedy = f"and XLA computes them only once: compute them outside of {region.title}"
        yield AuditRow(
            "checkpoint",
            f"{region.title} ({'random bits' if drawn else 'masks'})",
            source,
            "recompute",
            "kept",
            size,
            undone_by="cse",
            message=f"{what} {remedy}",
            count=len(buffers),
        )


# Types of random bits, and of the masks that are computed from them.
_MASKS = ("bool", "uint32", "uint8")


class CompiledOutcome:
    """Compares the regions of a jaxpr with the compiled module.

    Attributes:
        residuals: the residuals that are alive in device memory at the peak.
        devices: number of devices that the module runs on.
    """

    def __init__(self, report: JudgedProgram, module: Module):
        self.residuals = at_peak(report, "residuals")
        self.devices = module.devices
        self._report = report
        self._module = module

    def residual_bytes(self, region: CheckpointRegion) -> int:
        """Returns the bytes of the residuals at the peak that the source lines of a region computed."""
        lines = region.lines
        return sum(buffer.bytes for buffer in self.residuals if buffer.source in lines)

    def is_merged(self, region: CheckpointRegion) -> bool:
        """Returns whether XLA merged the recomputation of a region with the forward pass.

        The answer is yes if the region's values stay alive from the forward pass to the backward pass, and the compiled
        module lacks their second computation. If the region has kernels, such as matrix products, their number
        decides.
        """
        if not region.recomputed or not self._may_be_merged(region) or self.merged_bytes(region) <= TOY:
            return False
        again: Counter[Key] = Counter()
        for key, name in self._recomputations:
            if key in region.keys and not (self._is_unprotected(region) and name in self._needed_forward):
                again[key] += 1
        if not region.kernels:
            return not again
        return sum(again[key] for key in set(region.kernels)) < _RECOMPUTED * len(region.kernels)

    def _may_be_merged(self, region: CheckpointRegion) -> bool:
        unprotected = self._is_unprotected(region) and region.unrolled > 1
        return unprotected or _bytes_to_recompute(region, self.residuals) > TOY

    def _is_unprotected(self, region: CheckpointRegion) -> bool:
        # Optimization barriers separate the passes, but XLA's CPU compiler removes them early.
        return not region.prevent_cse or self._report.target.get("platform") == "cpu"

    def merged_bytes(self, region: CheckpointRegion) -> int:
        """Returns the bytes at the peak of the values of a region that the jaxpr computes again. It counts the values
        that stay alive from the forward pass to the backward pass, and the values of the recomputation, which XLA may
        compute at any time if the passes are merged."""
        return _bytes_to_recompute(region, self._kept)

    @functools.cached_property
    def _kept(self) -> list[Buffer]:
        backward = start_of_backward(self._report)
        kept = list(self.residuals)
        for buffer in at_peak(self._report, "workspace"):
            if buffer.phase == "recompute" or (buffer.phase == "forward" and buffer.start < backward <= buffer.end):
                kept.append(buffer)
        return kept

    def bytes_of_function(self, region: CheckpointRegion) -> int:
        """Returns the bytes at the peak of the values that the region's function computes in the forward pass and that
        stay alive until the backward pass, with its results."""
        size = 0
        for buffer in self._kept:
            functions = {Function(frame.function, frame.file).title for frame in self._frames(buffer.name)}
            if region.title in functions:
                size += buffer.bytes
        return size

    @functools.cached_property
    def _recomputations(self) -> list[tuple[Key, str]]:
        """(key, name) of the instructions with the op_name of a recomputation. If XLA merged the passes, some of them
        belong to both."""
        module, found = self._module, []
        for instruction in module.instructions.values():
            # Most metadata is never read, so the bytes are searched before they are decoded.
            if instruction.opcode in _NO_WORK or module.data.find(_MARK, *instruction.metadata) < 0:
                continue
            metadata = module.metadata(instruction)
            if self._has_same_name_inside(instruction, metadata.op_name):
                continue
            scope = scopes.parse(metadata.op_name)
            if scope.phase == "recompute":
                found.append(((source_line(metadata), scope.operation), instruction.name))
        return found

    def _has_same_name_inside(self, instruction: Instruction, op_name: str) -> bool:
        """Returns whether an instruction is a fusion with the op_name of an instruction inside of it, which is counted
        instead."""
        if instruction.opcode != "fusion":
            return False
        module = self._module
        body = module.computations[instruction.called[0]].instructions
        return any(
            module.instructions[id].opcode not in _NO_WORK
            and module.metadata(module.instructions[id]).op_name == op_name
            for id in body
        )

    @functools.cached_property
    def _needed_forward(self) -> frozenset[str]:
        """Names of the instructions on which instructions of the forward pass depend, through no instruction of the
        backward pass."""
        module = self._module
        phases = {
            instruction.id: scopes.parse(module.metadata(instruction).op_name).phase
            for instruction in module.instructions.values()
        }
        callers: dict[int, list[Instruction]] = defaultdict(list)
        for instruction in module.instructions.values():
            if instruction.opcode in ("fusion", "call"):
                callers[instruction.called[0]].append(instruction)
        pending = [id for id, phase in phases.items() if phase == "forward"]
        seen = set(pending)
        while pending:
            for id in _dependencies(module, module.instructions[pending.pop()], callers):
                if id in phases and id not in seen and phases[id] != "backward":
                    seen.add(id)
                    pending.append(id)
        return frozenset(module.instructions[id].name for id in seen)

    def _frames(self, name: str) -> tuple[Frame, ...]:
        instruction = self._by_name.get(name)
        return self._module.metadata(instruction).frames if instruction else ()

    @functools.cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self._module.instructions.values()}

    def recomputed_functions(self) -> Counter[str]:
        """Returns the functions whose values the compiled module computes again: name -> number of such buffers."""
        stacks: dict[str, list[tuple[Frame, ...]]] = defaultdict(list)
        for buffer in self._report.buffers:
            if buffer.phase == "recompute":
                stacks[_REGION.split(buffer.op_name)[0]].append(self._frames(buffer.name))
        functions: Counter[str] = Counter()
        for op_name, frames in stacks.items():
            functions[common_function(frames) or scopes.parse(op_name + "/x").operation] += 1
        return functions


def _bytes_to_recompute(region: CheckpointRegion, buffers: Iterable[Buffer]) -> int:
    """Returns the bytes of the buffers that the jaxpr computes again in a region, without the values that the policy
    saves."""
    size = 0
    for buffer in buffers:
        if _key(buffer) in region.keys and not region.saves(buffer.checkpoint_name):
            size += buffer.bytes
    return size


def _key(buffer: Buffer) -> Key:
    return buffer.source, scopes.parse(buffer.op_name).operation


def _dependencies(module: Module, instruction: Instruction, callers: dict[int, list[Instruction]]) -> Iterator[int]:
    """Yields the ids of the instructions whose results an instruction reads. The computation of a fusion is part of its
    caller: its parameters are the caller's operands."""
    if instruction.opcode in ("fusion", "call"):
        root = module.root(instruction.called[0])
        yield from [root.id] if root else []
    elif instruction.opcode == "parameter":
        for caller in callers.get(instruction.computation, ()):
            yield from caller.operands[instruction.parameter : instruction.parameter + 1]
    elif instruction.opcode == "get-tuple-element":
        source = module.operand(instruction, 0)
        root = module.root(source.called[0]) if source and source.opcode == "fusion" else None
        if root is not None and root.opcode == "tuple":
            yield from root.operands[instruction.tuple_index : instruction.tuple_index + 1]
        else:
            yield from instruction.operands
    else:
        yield from instruction.operands
