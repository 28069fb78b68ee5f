"""The post-mortem of a step that ran out of device memory, with its cheapest remedies. Pure: records in, records out.

In: the report of the step, the arrays on the device, and the statistics of its allocator, which `watching.reporting`
collects. The remedies, the cheapest first: a larger memory pool, deleting arrays that the step does not need, the
remedies of the report's findings, recomputing the module with the most residuals, computing the largest array in
parts, a smaller batch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.devices.limits import fraction_variable
from bytescope.memory.devices.platform import MEMORY_FRACTION
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.records.report_json import plain
from bytescope.memory.records.report_record import ReportRecord

# Maximum number of remedies; minimum fraction of the peak for arrays, findings and residuals; minimum fraction of the
# peak for a buffer to compute in parts; fraction of the GPU's memory below which the pool could be larger.
MAX_REMEDIES, MIN_SHARE, MIN_SHARE_IN_PARTS, LOW_FRACTION = 3, 0.01, 0.10, 0.85
# Kinds of findings whose remedy uses more memory, or is about XLA's limit instead of the device's.
_FREES_NOTHING = ("spare_memory", "arguments_above_limit", "xla_remat_falls_short")
_BATCH = "reduce the batch, or accumulate gradients over parts of it"


@dataclasses.dataclass(frozen=True)
class HeldArrays:
    """The live arrays of one shape and dtype on one device.

    Fields:
        shape, dtype: shape on the device and dtype of each array.
        arrays, bytes: number of these arrays and their total bytes.
        others, other_bytes: number and total bytes of those arrays in the group that are not arguments of the step.
    """

    shape: tuple[int, ...]
    dtype: str
    arrays: int
    bytes: int
    others: int = 0
    other_bytes: int = 0

    @property
    def name(self) -> str:
        """The type of the arrays in jax's notation, such as "float32[1024,1024]"."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class WayOut:
    """A remedy for a step that does not fit in memory.

    Fields:
        bytes: bytes on one device that the remedy may free.
        words: the remedy, as an instruction.
        flags: the command-line flags that apply the remedy, "" if there are none.
    """

    bytes: int
    words: str
    flags: str = ""


@dataclasses.dataclass(frozen=True)
class PostMortem:
    """A description of a step that ran out of memory. All bytes are on one device.

    Fields:
        step: name of the step. call: number of the failed call, starting at 1.
        error: the line of the exception that reports the failed allocation.
        device: jax's device_kind.
        held: the live arrays, grouped by shape and dtype, the group with the most bytes first.
        allocator: statistics of the allocator, with jax's keys (`memory_stats`); for a CPU, the memory of the process.
        report: report of the executable that failed; None if the compiler ran out of memory.
        explanation: what the whole text of the exception says about memory; None if it was not read.
    """

    step: str
    call: int
    error: str
    device: str = ""
    held: tuple[HeldArrays, ...] = ()
    allocator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    report: ReportRecord | None = None
    explanation: ExplanationRecord | None = None

    @property
    def cause(self) -> str:
        """The cause in the words of the exception's explanation, with its evidence; "" if the exception has none."""
        found = self.explanation
        if found is None or found.cause_kind in ("unknown", "no_memory_problem"):
            return ""
        return " ".join(filter(None, (found.cause, found.evidence)))

    @property
    def other_bytes(self) -> int:
        """Bytes on the device of live arrays that are not arguments of the step."""
        return sum(group.other_bytes for group in self.held)

    @property
    def needed_bytes(self) -> int:
        """Predicted bytes of the step, plus the bytes of live arrays that are not its arguments."""
        return (self.report.predicted_bytes if self.report else 0) + self.other_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Bytes available on the device: the allocator's limit if it is known, otherwise the report's limit."""
        return self.allocator.get("bytes_limit") or (self.report.limit_bytes if self.report else None)

    @property
    def ways_out(self) -> tuple[WayOut, ...]:
        """Remedies for the step, the cheapest first, at most three."""
        return ways_out(self.report, self.held, self.allocator.get("bytes_limit", 0))

    def to_json(self) -> dict[str, Any]:
        """Returns the post-mortem as JSON values. These are the values of its report, which `memory.load` and
        `bytescope diff` can read, and the other fields under the key `post_mortem`."""
        records = ("report", "explanation")
        own = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in records}
        own["explanation"] = self.explanation.to_json() if self.explanation else None
        own |= {"other_bytes": self.other_bytes, "needed_bytes": self.needed_bytes, "ways_out": plain(self.ways_out)}
        return {**(self.report.to_json() if self.report else {}), "post_mortem": own}


def ways_out(report: ReportRecord | None, held: Sequence[HeldArrays] = (), pool: int = 0) -> tuple[WayOut, ...]:
    """Returns at most three remedies for a step that does not fit in memory. The cheapest remedy comes first.

    Args:
        report: report of the step; None if it could not be compiled.
        held: the live arrays on the device.
        pool: limit of the device's allocator in bytes; 0 if unknown.
    """
    remedies = [*_propose_larger_pool(report, pool), *_propose_to_delete_arrays(report, held)]
    if report is not None:
        remedies += [*_propose_remedies(report), *_propose_checkpoint(report), *_propose_to_compute_in_parts(report)]
        size = sum(report.breakdown.get(row, 0) for row in ("residuals", "workspace", "logits_loss", "batch")) // 2
        if size >= MIN_SHARE * report.peak_bytes and not any(remedy.flags for remedy in remedies):
            remedies.append(WayOut(size, _BATCH))
    return tuple(remedies[:MAX_REMEDIES])


def _propose_larger_pool(report: ReportRecord | None, pool: int) -> Iterator[WayOut]:
    memory = int(report.target.get("device_memory_bytes") or 0) if report else 0
    if 0 < pool < LOW_FRACTION * memory:
        yield WayOut(
            int(MEMORY_FRACTION * memory) - pool,
            f"set {fraction_variable(report.target if report else {})}={MEMORY_FRACTION} before jax "
            f"starts: its pool is {pool / memory:.0%} of the GPU's memory",
        )


def _propose_to_delete_arrays(report: ReportRecord | None, held: Sequence[HeldArrays]) -> Iterator[WayOut]:
    others = [group for group in held if group.others]
    size = sum(group.other_bytes for group in others)
    if not others or (report is not None and size < MIN_SHARE * report.peak_bytes):
        return
    largest = max(others, key=lambda group: group.other_bytes)
    count = sum(group.others for group in others)
    arrays, them = f"{count} live arrays that are not arguments of the step, {largest.others} of them", "them"
    if count == 1:
        arrays, them = "a live array that is not an argument of the step,", "it"
    yield WayOut(
        size, f"delete {arrays} {largest.name}: a variable, a list of metrics or a closure still refers to {them}"
    )


def _propose_remedies(report: ReportRecord) -> Iterator[WayOut]:
    for finding in sorted(report.findings, key=lambda finding: -finding.bytes):
        if finding.bytes >= MIN_SHARE * report.peak_bytes and finding.kind not in _FREES_NOTHING:
            yield WayOut(finding.bytes, f"{finding.remedy} ({finding.message})", finding.flags)


def _propose_to_compute_in_parts(report: ReportRecord) -> Iterator[WayOut]:
    buffers = [
        b
        for b in report.buffers
        if b.at_peak and b.memory == "device" and b.source and b.category in ("workspace", "logits_loss")
    ]
    largest = max(buffers, key=lambda b: b.bytes, default=None)
    if largest is not None and largest.bytes >= MIN_SHARE_IN_PARTS * report.peak_bytes:
        shape = f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
        yield WayOut(
            largest.bytes,
            f"compute {shape} of {largest.source} in parts: use jax.lax.map with batch_size, or a "
            "scan over one of its axes",
        )


def _propose_checkpoint(report: ReportRecord) -> Iterator[WayOut]:
    # The finding already names a function to checkpoint.
    if any(finding.kind == "checkpoint_saves" for finding in report.findings):
        return
    sizes: Counter[str] = Counter()
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device" and buffer.category == "residuals":
            sizes[buffer.module or buffer.component or buffer.source] += buffer.bytes
    for module, size in sizes.most_common(1):
        if size < MIN_SHARE * report.peak_bytes:
            return
        lines = [
            b
            for b in report.buffers
            if b.at_peak and b.category == "residuals" and module in (b.module, b.component, b.source) and b.source
        ]
        where = max(lines, key=lambda b: b.bytes).source if lines else ""
        line = f", most of it from {where}" if where and where != module else ""
        yield WayOut(
            size, f"use jax.checkpoint for {module or 'the layer'}, which saves this for the backward pass{line}"
        )
