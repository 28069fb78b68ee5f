"""Audits calls of jax.checkpoint: whether the compiled module recomputes the values, or keeps them in memory.

XLA may undo a recomputation by common-subexpression elimination (CSE): if no optimization barrier separates the forward
pass from the recomputation, XLA merges equal instructions of both. The merged values stay alive from the forward pass
to the backward pass. A merged instruction may have the op_name of either pass, so its op_name does not show the merge.
A merged instruction is recognized by its users: instructions of the forward pass depend on it.

A "region" in this module is a `CheckpointRegion`: all calls of jax.checkpoint in one source line, with one function and
one policy.
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
_REGION = re.compile(r"/rematted_computation\b|\brematted_computation\b")


def region_rows(
    report: JudgedProgram, regions: Iterable[CheckpointRegion], outcome: CompiledOutcome
) -> Iterator[AuditRow]:
    """Yields one row for each region (the calls of jax.checkpoint in one source line): whether the compiled module
    recomputes its values or keeps them. If the module recomputes a region but keeps large values of the region that
    depend on no argument of the checkpointed function, such as dropout masks from a constant key, yields one more row
    for each source line of these values.

    Args:
        report: the report of the compiled step.
        regions: the differentiated calls of jax.checkpoint in the jaxpr.
        outcome: what the compiled module recomputes and keeps.
    """
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
    """Yields one row for each function whose values the compiled module recomputes in the backward pass. Used for HLO
    dumps, which do not show what the user's code asked for."""
    for function, count in outcome.recomputed_functions().items():
        yield AuditRow("checkpoint", function, done="recomputed", count=count)


def _row(
    region: CheckpointRegion, done: str, size: int, flops: int, undone_by: str = "", message: str = ""
) -> AuditRow:
    return AuditRow(
        "checkpoint", region.title, region.source, "recompute", done, size, flops, undone_by, message, region.count
    )


def _explain_kept(region: CheckpointRegion, size: int, merged: bool, platform: str | None) -> tuple[str, str]:
    """Returns (step, message) for a region (the jax.checkpoint calls in one source line) that is not recomputed. `step`
    is the step that undid the recomputation, "autodiff" or "cse". `message` is one sentence with the remedy.

    Args:
        region: the jax.checkpoint calls.
        size: bytes on one device of the values that are kept.
        merged: True if XLA merged the recomputation with the forward pass; False if the policy saves every value.
        platform: platform of the target, such as "cpu" or "cuda".
    """
    if not merged:
        name = getattr(region.policy, "__name__", "") or type(region.policy).__name__
        message = f"jax.checkpoint of {region.title} recomputes nothing, because its policy {name} saves every value"
        return "autodiff", f"{message}: use a policy that saves fewer values, or remove jax.checkpoint"
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
    """Yields one row for each source line at which a checkpointed function computes random bits or masks that XLA keeps
    until the backward pass, because they depend on no argument of the function. The reason: jax puts an optimization
    barrier only on the arguments, so XLA merges the recomputation of all other values with the forward pass. Values of
    at most 1 MiB (`TOY`) get no row."""
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
            message = (
                f"{human(size)} of random masks in {region.title} are kept and not recomputed, because their random "
                f"key is a constant: pass the key as an argument of {region.title}"
            )
        else:
            message = (
                f"{human(size)} of masks in {region.title} are kept and not recomputed, because they depend on no "
                f"argument of {region.title}: compute the masks outside of {region.title}"
            )
        yield AuditRow(
            "checkpoint",
            f"{region.title} ({'random bits' if drawn else 'masks'})",
            source,
            "recompute",
            "kept",
            size,
            undone_by="cse",
            message=message,
            count=len(buffers),
        )


# Types of random bits, and of the masks that are computed from them.
_MASKS = ("bool", "uint32", "uint8")


class CompiledOutcome:
    """Finds out whether the compiled module recomputes the values of a region or keeps them in memory. A region is a
    `CheckpointRegion`: all calls of jax.checkpoint in one source line.

    Attributes:
        residuals: the buffers that hold residuals (values that the backward pass reads) in device memory at the memory
            peak.
        devices: number of devices that the module runs on.
    """

    def __init__(self, report: JudgedProgram, module: Module):
        self.residuals = at_peak(report, "residuals")
        self.devices = module.devices
        self._report = report
        self._module = module

    def residual_bytes(self, region: CheckpointRegion) -> int:
        """Returns the bytes on one device of the residuals at the memory peak that belong to a region (the
        jax.checkpoint calls in one source line). A residual belongs to the region if the region recomputes an equation
        of the source line that computed the residual."""
        lines = region.lines
        return sum(buffer.bytes for buffer in self.residuals if buffer.source in lines)

    def is_merged(self, region: CheckpointRegion) -> bool:
        """Returns whether XLA merged the recomputation of a region (the jax.checkpoint calls in one source line) with
        the forward pass, so that nothing is recomputed.

        Returns True if the region's values stay alive from the forward pass to the backward pass and the compiled
        module does not compute them a second time. If the region has kernels, such as matrix products, only the kernels
        are counted: True if less than a quarter of them are in the module a second time.
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
        """Returns the bytes on one device that a region (the jax.checkpoint calls in one source line) wastes at the
        memory peak if XLA merged its recomputation with the forward pass: the values that the backward pass should
        recompute, but that are alive. Counts values that stay alive from the forward pass to the backward pass, and
        values of the recomputation itself, because XLA may run a merged recomputation at any time."""
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
        """Returns the bytes on one device, at the memory peak, of the values that the checkpointed function of a
        region computes in the forward pass and that stay alive until the backward pass. The function's results are
        counted too."""
        size = 0
        for buffer in self._kept:
            functions = {Function(frame.function, frame.file).title for frame in self._frames(buffer.name)}
            if region.title in functions:
                size += buffer.bytes
        return size

    @functools.cached_property
    def _recomputations(self) -> list[tuple[Key, str]]:
        """List of (key, instruction name) for the instructions whose op_name says that they belong to a recomputation.
        The key is ("file.py:line", primitive). If XLA merged forward pass and recomputation, some of these instructions
        belong to both."""
        module, found = self._module, []
        for instruction in module.in_phase("recompute"):
            if instruction.opcode not in _NO_WORK:
                key = source_line(module.metadata(instruction)), module.scope(instruction).operation
                found.append((key, instruction.name))
        return found

    @functools.cached_property
    def _needed_forward(self) -> frozenset[str]:
        """Names of all instructions whose results the forward pass needs, directly or through other instructions. Paths
        through instructions of the backward pass do not count."""
        module = self._module
        pending = list(module.in_phase("forward"))
        seen = {instruction.id for instruction in pending}
        while pending:
            for id in _dependencies(module, pending.pop()):
                instruction = module.instructions.get(id)
                if instruction is None or id in seen or module.scope(instruction).phase == "backward":
                    continue
                seen.add(id)
                pending.append(instruction)
        return frozenset(module.instructions[id].name for id in seen)

    def _frames(self, name: str) -> tuple[Frame, ...]:
        instruction = self._module.named(name)
        return self._module.metadata(instruction).frames if instruction else ()

    def recomputed_functions(self) -> Counter[str]:
        """Returns a Counter: name of the user's function -> number of places in the step where the compiled module
        recomputes values of this function in the backward pass. If the function is unknown, the key is the name of an
        operation."""
        stacks: dict[str, list[tuple[Frame, ...]]] = defaultdict(list)
        for buffer in self._report.buffers:
            if buffer.phase == "recompute":
                stacks[_REGION.split(buffer.op_name)[0]].append(self._frames(buffer.name))
        functions: Counter[str] = Counter()
        for op_name, frames in stacks.items():
            functions[common_function(frames) or scopes.parse(op_name + "/x").operation] += 1
        return functions


def _bytes_to_recompute(region: CheckpointRegion, buffers: Iterable[Buffer]) -> int:
    """Returns the total bytes of the `buffers` whose values the backward pass should recompute. A buffer is counted if
    `region` recomputes an equation with the buffer's source line and primitive, and the remat policy of the region does
    not save the buffer's checkpoint name."""
    size = 0
    for buffer in buffers:
        if _key(buffer) in region.keys and not region.saves(buffer.checkpoint_name):
            size += buffer.bytes
    return size


def _key(buffer: Buffer) -> Key:
    return buffer.source, scopes.parse(buffer.op_name).operation


def _dependencies(module: Module, instruction: Instruction) -> Iterator[int]:
    """Yields the ids of the instructions whose results `instruction` reads. Fusions and calls are looked through: a
    fusion depends on the root of its fused computation, and a parameter inside it depends on the matching operand of
    the fusion.
    """
    if instruction.opcode in ("fusion", "call"):
        root = module.root(instruction.called[0])
        yield from [root.id] if root else []
    elif instruction.opcode == "parameter":
        for caller in module.callers(instruction.computation):
            if caller.opcode in ("fusion", "call"):
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
