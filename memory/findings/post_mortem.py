"""The post-mortem of a step that ran out of device memory, and its cheapest remedies. Pure: records in, records out.

In: the report of the step, the arrays that the device held and the statistics of its allocator, which
`watching.reporting` collects. The remedies from the cheapest on: a larger pool, deleting arrays that the step does not
need, the remedies of the report's findings, recomputing the module with most residuals, computing the largest array in
parts, a smaller batch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.devices.platform import MEMORY_FRACTION
from bytescope.memory.records.report_json import plain
from bytescope.memory.records.report_record import ReportRecord

# Maximum number of remedies; minimum share of the peak for arrays, findings and residuals; minimum share of the peak
# for a buffer that is computed in parts; share of a card below which a pool could be larger.
WAYS, WORTH, WORTH_PARTS, FRACTION_IS_LOW = 3, 0.01, 0.10, 0.85
# Findings that say how to use more memory.
_NO_WAY_OUT = ("spare_memory",)
_BATCH = "make the batch smaller, or accumulate gradients over parts of it"


@dataclasses.dataclass(frozen=True)
class HeldArrays:
    """Live arrays of one shape and dtype on one device.

    Fields:
        arrays, bytes: number of arrays and their bytes; others, other_bytes: those that are not arguments of the step.
    """

    shape: tuple[int, ...]
    dtype: str
    arrays: int
    bytes: int
    others: int = 0
    other_bytes: int = 0

    @property
    def name(self) -> str:
        """The type as jax writes it: "float32[1024,1024]"."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class WayOut:
    """A remedy: the bytes of one device that it may free, the instruction in words, and as flags of a command line if
    the finding has some."""

    bytes: int
    words: str
    flags: str = ""


@dataclasses.dataclass(frozen=True)
class PostMortem:
    """The facts about a step that ran out of memory, all bytes of one device.

    Fields:
        step: its name; call: number of the call that failed, from 1; error: the line of the exception about memory.
        device: jax' device_kind; held: live arrays, the largest group first.
        allocator: its statistics by jax' names (`memory_stats`); for a CPU, which has no allocator, of the process.
        report: of the executable that failed; None if the compiler ran out of memory.
    """

    step: str
    call: int
    error: str
    device: str = ""
    held: tuple[HeldArrays, ...] = ()
    allocator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    report: ReportRecord | None = None

    @property
    def other_bytes(self) -> int:
        """Bytes of live arrays that are not arguments of the step."""
        return sum(group.other_bytes for group in self.held)

    @property
    def needed_bytes(self) -> int:
        """Predicted bytes of the step plus the bytes of other arrays."""
        return (self.report.predicted_bytes if self.report else 0) + self.other_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Available bytes by the allocator's statistics, else by the report."""
        return self.allocator.get("bytes_limit") or (self.report.limit_bytes if self.report else None)

    @property
    def ways_out(self) -> tuple[WayOut, ...]:
        """The cheapest remedies, at most `WAYS`."""
        return ways_out(self.report, self.held, self.allocator.get("bytes_limit", 0))

    def to_json(self) -> dict[str, Any]:
        """The report's JSON, which `memory.load` and `bytescope diff` read, with the other fields under
        `post_mortem`."""
        own = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "report"}
        own |= {"other_bytes": self.other_bytes, "needed_bytes": self.needed_bytes, "ways_out": plain(self.ways_out)}
        return {**(self.report.to_json() if self.report else {}), "post_mortem": own}


def ways_out(report: ReportRecord | None, held: Sequence[HeldArrays] = (), pool: int = 0) -> tuple[WayOut, ...]:
    """The cheapest remedies for a step that does not fit, at most `WAYS`, the cheapest first.

    Args:
        report: of the step; None if it could not be compiled.
        held: the live arrays of its device.
        pool: maximum bytes of the device's allocator; 0 if unknown.
    """
    found = [*_pool(report, pool), *_unneeded(report, held)]
    if report is not None:
        found += [*_of_findings(report), *_recomputed(report), *_in_parts(report)]
        size = sum(report.breakdown.get(row, 0) for row in ("residuals", "workspace", "logits_loss", "batch")) // 2
        if size >= WORTH * report.peak_bytes and not any(way.flags for way in found):
            found.append(WayOut(size, _BATCH))
    return tuple(found[:WAYS])


def _pool(report: ReportRecord | None, pool: int) -> Iterator[WayOut]:
    """Proposes a larger pool, because jax takes three quarters of a GPU by default."""
    card = int(report.target.get("device_memory_bytes") or 0) if report else 0
    if 0 < pool < FRACTION_IS_LOW * card:
        yield WayOut(
            int(MEMORY_FRACTION * card) - pool,
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={MEMORY_FRACTION} before jax "
            f"starts: its pool is {pool / card:.0%} of the card",
        )


def _unneeded(report: ReportRecord | None, held: Sequence[HeldArrays]) -> Iterator[WayOut]:
    """Proposes to delete arrays on the device that are not arguments of the step."""
    others = [group for group in held if group.others]
    size = sum(group.other_bytes for group in others)
    if not others or (report is not None and size < WORTH * report.peak_bytes):
        return
    largest = max(others, key=lambda group: group.other_bytes)
    count = sum(group.others for group in others)
    arrays, them = f"{count} live arrays that are no arguments of the step, {largest.others} of them", "them"
    if count == 1:
        arrays, them = "a live array that is no argument of the step,", "it"
    yield WayOut(size, f"delete {arrays} {largest.name}: a name, a list of metrics or a closure still refers to {them}")


def _of_findings(report: ReportRecord) -> Iterator[WayOut]:
    """The remedies of a report's findings, in order of decreasing bytes."""
    for finding in sorted(report.findings, key=lambda finding: -finding.bytes):
        if finding.bytes >= WORTH * report.peak_bytes and finding.kind not in _NO_WAY_OUT:
            yield WayOut(finding.bytes, f"{finding.remedy} ({finding.message})", finding.flags)


def _in_parts(report: ReportRecord) -> Iterator[WayOut]:
    """Proposes to compute the largest workspace array at the peak in parts."""
    found = [
        b
        for b in report.buffers
        if b.at_peak and b.memory == "device" and b.source and b.category in ("workspace", "logits_loss")
    ]
    largest = max(found, key=lambda b: b.bytes, default=None)
    if largest is not None and largest.bytes >= WORTH_PARTS * report.peak_bytes:
        shape = f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
        yield WayOut(
            largest.bytes,
            f"compute {shape} of {largest.source} in parts: jax.lax.map with batch_size, or a "
            "scan over one of its axes",
        )


def _recomputed(report: ReportRecord) -> Iterator[WayOut]:
    """Proposes to checkpoint the module with most residuals, unless a finding names a function to checkpoint."""
    if any(finding.kind == "checkpoint_saves" for finding in report.findings):
        return
    sizes: Counter[str] = Counter()
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device" and buffer.category == "residuals":
            sizes[buffer.module or buffer.component or buffer.source] += buffer.bytes
    for module, size in sizes.most_common(1):
        if size < WORTH * report.peak_bytes:
            return
        lines = [
            b
            for b in report.buffers
            if b.at_peak and b.category == "residuals" and module in (b.module, b.component, b.source) and b.source
        ]
        where = max(lines, key=lambda b: b.bytes).source if lines else ""
        line = f", most of it from {where}" if where and where != module else ""
        yield WayOut(
            size, f"jax.checkpoint around {module or 'the layer'}, which keeps this for the backward pass{line}"
        )
