"""The post-mortem of a step that ran out of device memory: the explanation of its exception, with what its process
knows. Pure: records in, records out.

In: the exception's text, the report of the step, the arrays on the device, and the statistics of its allocator, which
`watching.reporting` collects. Out: an explanation, which is shown like the explanation of a log. The remedies, the
cheapest first: a larger memory pool, deleting arrays that the step does not need, the remedies of the report's
findings, flash attention, recomputing the module with the most residuals, computing the largest array in parts, a
smaller batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.devices.limits import fraction_variable
from bytescope.memory.devices.platform import MEMORY_FRACTION
from bytescope.memory.messages.causes import CAUSES
from bytescope.memory.messages.culprits import IDENTITIES, Culprit, describe_report
from bytescope.memory.messages.explanation import Explanation, explain
from bytescope.memory.messages.message_record import ArrayType
from bytescope.memory.messages.remedies import REMEDIES, Remedy
from bytescope.memory.messages.report_match import NOT_THE_SIZE
from bytescope.memory.records.report_record import ReportRecord, RowName
from bytescope.memory.records.result import plain
from bytescope.memory.units import human
from bytescope.memory.view.elements import row_name

# Maximum number of remedies; minimum fraction of the peak for arrays, findings and residuals; minimum fraction of the
# peak for a buffer to compute in parts; fraction of the GPU's memory below which the pool could be larger.
MAX_REMEDIES, MIN_SHARE, MIN_SHARE_IN_PARTS, LOW_FRACTION = 3, 0.01, 0.10, 0.85
# Kinds of findings whose remedy uses more memory, or is about XLA's limit instead of the device's.
_FREES_NOTHING = ("spare_memory", "arguments_above_limit", "xla_remat_falls_short")
# Maximum rows of the breakdown among the figures.
_ROWS = 3
# Name of a figure of an explanation -> the allocator's key (jax's `memory_stats`).
_ALLOCATOR = (
    ("in_use_now", "bytes_in_use"),
    ("peak_in_use", "peak_bytes_in_use"),
    ("largest", "largest_free_block_bytes"),
    ("largest_request", "largest_alloc_size"),
)
# Row of the breakdown -> the cause if this row is the largest; other rows are large tensors.
_CAUSE_OF_ROW: Mapping[RowName, str] = {
    "residuals": "saved_activations",
    "logits_loss": "logits",
    "outputs": "outputs",
    **dict.fromkeys(
        ("params", "frozen", "optimizer", "accumulator", "cache", "gradients", "rng", "batch"), "weights_and_state"
    ),
}
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
        return str(ArrayType(self.dtype, self.shape))


@dataclasses.dataclass(frozen=True)
class PostMortem:
    """A description of a step that ran out of memory. All bytes are on one device.

    Fields:
        step: name of the step. call: number of the failed call, starting at 1; 0 if unknown.
        error: the line of the exception that reports the failed allocation.
        device: jax's device_kind.
        held: the live arrays, grouped by shape and dtype, the group with the most bytes first.
        allocator: statistics of the allocator, with jax's keys (`memory_stats`); for a CPU, the memory of the process.
        report: report of the executable that failed; None if the compiler ran out of memory.
        text: the whole text of the exception and of its causes; "" if only `error` is known.
    """

    step: str
    call: int
    error: str
    device: str = ""
    held: tuple[HeldArrays, ...] = ()
    allocator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    report: ReportRecord | None = None
    text: str = ""

    @functools.cached_property
    def explanation(self) -> Explanation:
        """The explanation of the exception, with what the process knows: the buffers of the step, other live arrays,
        the statistics of the allocator, and remedies for this step."""
        return _explain_call(self)

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

    def to_json(self) -> dict[str, Any]:
        """Returns the post-mortem as JSON values. These are the values of its report, which `memory.load` and
        `bytescope diff` can read, and the other fields under the key `post_mortem`."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("report", "text")]
        own = {name: plain(getattr(self, name)) for name in names}
        own["explanation"] = self.explanation.to_json()
        own |= {"other_bytes": self.other_bytes, "needed_bytes": self.needed_bytes}
        return {**(self.report.to_json() if self.report else {}), "post_mortem": own}


def memory_sum(post_mortem: PostMortem) -> str:
    """Returns a sentence that adds the bytes of the step to those of the other arrays on the device, and compares the
    sum with the available bytes. "" if nothing is known.
    """
    report, limit = post_mortem.report, post_mortem.limit_bytes
    if report is None:
        held = sum(group.bytes for group in post_mortem.held)
        return f"The step could not be compiled; live arrays hold {human(held)}." if held else ""
    parts = f"The step takes {human(report.predicted_bytes)}"
    if post_mortem.other_bytes:
        parts += f", other arrays hold {human(post_mortem.other_bytes)}: together {human(post_mortem.needed_bytes)}"
    if not limit:
        return f"{parts}."
    missing = post_mortem.needed_bytes - limit
    if missing > 0:
        return f"{parts} of {human(limit)}, {human(missing)} too much."
    return (
        f"{parts} of {human(limit)}, {human(-missing)} should be left: fragmentation, other processes or runtime "
        "overheads take this memory."
    )


def _explain_call(post_mortem: PostMortem) -> Explanation:
    """Returns the explanation of an exception's text with what the process of the failed step knows."""
    report, limit = post_mortem.report, post_mortem.limit_bytes
    found = explain(post_mortem.text or post_mortem.error, report)
    figures = dict(found.figures)
    for name, key in _ALLOCATOR:
        if post_mortem.allocator.get(key):
            figures[name] = post_mortem.allocator[key]
    if post_mortem.held:
        figures["others"] = post_mortem.other_bytes
    if limit:
        figures["limit"] = limit
    if limit and post_mortem.needed_bytes > limit:
        figures["missing"] = post_mortem.needed_bytes - limit
    own_buffers: tuple[Culprit, ...] = ()
    if report is not None:
        figures |= {"step": report.predicted_bytes, "total": post_mortem.needed_bytes}
        if "temp" not in figures:  # the exception does not say what the program consists of
            rows = sorted(report.breakdown.items(), key=lambda row: -row[1])[:_ROWS]
            figures |= {f"peak_{name}": size for name, size in rows if size}
        own_buffers = describe_report(report)
    culprits = (*(found.culprits or own_buffers), *_describe_held(post_mortem.held, report is None))
    cause_kind, cause, evidence = _decide(post_mortem, found)
    ways = ways_out(report, post_mortem.held, post_mortem.allocator.get("bytes_limit", 0))
    match = found.match
    other_program = ""
    if match is not None and match.subject == "other_program":
        other_program = match.sentence
    device = f", on {post_mortem.device}" if post_mortem.device else ""
    return dataclasses.replace(
        found,
        failure=True,
        call=f"{post_mortem.step}{f', call {post_mortem.call:,}' if post_mortem.call else ''}{device}",
        quote=post_mortem.error,
        limit_bytes=limit or found.limit_bytes,
        total_bytes=post_mortem.needed_bytes if report else found.total_bytes,
        figures=figures,
        cause_kind=cause_kind,
        cause=cause,
        evidence=" ".join(filter(None, (evidence, other_program, memory_sum(post_mortem)))),
        culprits=tuple(sorted(culprits, key=lambda culprit: -(culprit.bytes or 0))),
        remedies=tuple(map(_as_sentence, ways)) if ways and cause_kind not in NOT_THE_SIZE else found.remedies,
    )


def _as_sentence(remedy: Remedy) -> Remedy:
    first = remedy.words.split(" ", 1)[0]
    words = remedy.words[:1].upper() + remedy.words[1:] if first.isalpha() and not remedy.flags else remedy.words
    return dataclasses.replace(remedy, words=words if words.endswith(".") else f"{words}.")


def _describe_held(held: Sequence[HeldArrays], arguments_too: bool) -> Iterator[Culprit]:
    """Yields live arrays as culprits: those that are not arguments of the step, and if `arguments_too`, all others."""
    for group in held:
        parts = [(group.others, group.other_bytes, "other", "")]
        if arguments_too:
            parts.append((group.arrays - group.others, group.bytes - group.other_bytes, "argument", "argument"))
        for count, size, identity, phase in parts:
            if count:
                yield Culprit(count, size, group.name, phase, "", (), "", "", "", identity, IDENTITIES[identity])


def _decide(post_mortem: PostMortem, found: Explanation) -> tuple[str, str, str]:
    """Returns the kind of the cause, its sentence, and the evidence of the exception's text. The text decides if it
    shows the cause, otherwise the figures of the process."""
    if found.cause_kind not in ("unknown", "no_memory_problem"):
        return found.cause_kind, found.cause, found.evidence
    report, limit = post_mortem.report, post_mortem.limit_bytes
    if report is None or not limit:
        return "unknown", "The exception does not contain the cause.", ""
    if post_mortem.needed_bytes <= limit:
        return "unknown", "The step and the other arrays should fit by their figures.", ""
    if report.predicted_bytes <= limit:
        return "device_full", "The step alone fits. Other arrays hold the rest of the device's memory.", ""
    sizes: Counter[str] = Counter()
    for row, size in report.breakdown.items():
        sizes[_CAUSE_OF_ROW.get(row, "large_tensor")] += size
    if not sizes.total():
        return "unknown", "The step is too large for the device.", ""
    kind, size = sizes.most_common(1)[0]
    if 2 * size > sizes.total():
        return kind, CAUSES[kind], ""
    row = max(report.breakdown, key=lambda row: report.breakdown[row])
    return kind, f"The step is too large for the device; its largest part is {row_name(row)}.", ""


def ways_out(report: ReportRecord | None, held: Sequence[HeldArrays] = (), pool: int = 0) -> tuple[Remedy, ...]:
    """Returns at most three remedies for a step that does not fit in memory. The cheapest remedy comes first.

    Args:
        report: report of the step; None if it could not be compiled.
        held: the live arrays on the device.
        pool: limit of the device's allocator in bytes; 0 if unknown.
    """
    remedies = []
    memory = int(report.target.get("device_memory_bytes") or 0) if report else 0
    if 0 < pool < LOW_FRACTION * memory:
        remedies.append(
            Remedy(
                f"set {fraction_variable(report.target if report else {})}={MEMORY_FRACTION} before jax "
                f"starts: its pool is {pool / memory:.0%} of the GPU's memory",
                bytes=int(MEMORY_FRACTION * memory) - pool,
            )
        )
    remedies += _propose_to_delete_arrays(report, held)
    if report is not None:
        for finding in sorted(report.findings, key=lambda finding: -finding.bytes):
            if finding.bytes >= MIN_SHARE * report.peak_bytes and finding.kind not in _FREES_NOTHING:
                words = f"{finding.remedy} ({finding.message})"
                remedies.append(Remedy(words, bytes=finding.bytes, flags=finding.flags))
        scores = [culprit for culprit in describe_report(report) if culprit.identity == "scores"]
        size = sum(culprit.bytes or 0 for culprit in scores)
        if scores and size >= MIN_SHARE_IN_PARTS * report.peak_bytes:
            remedies.append(dataclasses.replace(REMEDIES["flash"], bytes=size))
        remedies += [*_propose_checkpoint(report), *_propose_to_compute_in_parts(report, scores)]
        rows = report.breakdown
        size = (rows["residuals"] + rows["workspace"] + rows["logits_loss"] + rows["batch"]) // 2
        if size >= MIN_SHARE * report.peak_bytes and not any(remedy.flags for remedy in remedies):
            remedies.append(Remedy(_BATCH, bytes=size))
    return tuple(remedies[:MAX_REMEDIES])


def _propose_to_delete_arrays(report: ReportRecord | None, held: Sequence[HeldArrays]) -> Iterator[Remedy]:
    others = [group for group in held if group.others]
    size = sum(group.other_bytes for group in others)
    if not others or (report is not None and size < MIN_SHARE * report.peak_bytes):
        return
    largest = max(others, key=lambda group: group.other_bytes)
    count = sum(group.others for group in others)
    arrays, them = f"{count} live arrays that are not arguments of the step, {largest.others} of them", "them"
    if count == 1:
        arrays, them = "a live array that is not an argument of the step,", "it"
    yield Remedy(
        f"delete {arrays} {largest.name}: a variable, a list of metrics or a closure still refers to {them}", bytes=size
    )


def _propose_to_compute_in_parts(report: ReportRecord, scores: Sequence[Culprit]) -> Iterator[Remedy]:
    sources = {culprit.source for culprit in scores}
    buffers = [
        b
        for b in report.buffers
        if b.at_peak
        and b.memory == "device"
        and b.source
        and b.category in ("workspace", "logits_loss")
        # The remedy for attention scores is flash attention.
        and b.source not in sources
    ]
    largest = max(buffers, key=lambda b: b.bytes, default=None)
    if largest is not None and largest.bytes >= MIN_SHARE_IN_PARTS * report.peak_bytes:
        yield Remedy(
            f"compute {ArrayType(largest.dtype, largest.shape)} of {largest.source} in parts: use jax.lax.map with "
            "batch_size, or a scan over one of its axes",
            bytes=largest.bytes,
        )


def _propose_checkpoint(report: ReportRecord) -> Iterator[Remedy]:
    # The finding already names a function to checkpoint.
    if any(finding.kind == "checkpoint_saves" for finding in report.findings):
        return
    recomputed = {row.subject for row in report.audit if row.kind == "checkpoint" and row.done == "recomputed"}
    sizes: Counter[str] = Counter()
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device" and buffer.category == "residuals":
            sizes[buffer.module or buffer.component or buffer.source] += buffer.bytes
    for module, size in sizes.most_common(1):
        if size < MIN_SHARE * report.peak_bytes or module.removesuffix("()") in recomputed:
            return
        lines = [
            b
            for b in report.buffers
            if b.at_peak and b.category == "residuals" and module in (b.module, b.component, b.source) and b.source
        ]
        where = max(lines, key=lambda b: b.bytes).source if lines else ""
        line = f", most of it from {where}" if where and where != module else ""
        yield Remedy(
            f"use jax.checkpoint for {module or 'the layer'}, which saves this for the backward pass{line}", bytes=size
        )
