"""Compares two reports: categories and buffers that grew or shrank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar

from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord


@dataclasses.dataclass(frozen=True)
class Change:
    """A size in bytes that is compared between two reports.

    Fields:
        kind: what is compared: total, category (row of the breakdown), residual, workspace or buffer.
        name: the name of the total, breakdown row, checkpoint name, scope or buffer.
        before, after: bytes in the first and in the second report.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("growth",)

    kind: str
    name: str
    before: int
    after: int

    @property
    def growth(self) -> int:
        """Bytes that were added from the first to the second report; negative if memory was saved."""
        return self.after - self.before

    @property
    def percent(self) -> float:
        """Growth in per cent of the bytes in the first report; infinite if the first report has no such bytes."""
        if not self.before:
            return float("inf") if self.after else 0.0
        return 100.0 * self.growth / self.before

    @property
    def percent_text(self) -> str:
        """The growth in per cent as text, such as "+6.1". The text is "new" if the first report has no bytes of this
        name, and ">999" if the growth is 1000 % or more.
        """
        if self.percent == float("inf"):
            return "new"
        return f"{self.percent:+.1f}" if self.percent < 1000 else ">999"


def diff(before: ReportRecord, after: ReportRecord) -> tuple[Change, ...]:
    """Returns the changes between two reports: first the totals, then the changes of categories, residuals by name,
    workspace by scope and buffers at the peak, each kind with its largest change first.

    Buffers are matched by category, phase, module, operation, shape and dtype, because the compiler's names change
    from one compile to the next. Buffers without such a match (for example, if the programs are different) are matched
    by category, dtype and shape.
    """
    totals = [
        Change("total", name, getattr(before, name), getattr(after, name))
        for name in ("peak_bytes", "allocated_bytes", "host_bytes")
    ]
    parts = [
        *(Change("category", row, before.breakdown[row], after.breakdown[row]) for row in ROWS),
        *_changes("residual", before.residuals_by_name, after.residuals_by_name),
        *_changes("workspace", before.workspace_by_scope, after.workspace_by_scope),
        *_changes("buffer", *_matched_buffers(before, after)),
    ]
    changed = [change for change in parts if change.growth]
    order = ("category", "residual", "workspace", "buffer")
    return (*totals, *sorted(changed, key=lambda c: (order.index(c.kind), -abs(c.growth), c.name)))


@dataclasses.dataclass(frozen=True)
class Measure:
    """A quantity other than memory that is compared between two reports: seconds, FLOPs or bytes sent.

    Fields:
        name: what was measured or predicted, in words.
        unit: "seconds", "FLOPs", or "bytes" for bytes sent.
        before, after: the value in the first and in the second report.
    """

    name: str
    unit: str
    before: float
    after: float


def measures(before: ReportRecord, after: ReportRecord) -> tuple[Measure, ...]:
    """Returns the seconds, FLOPs and sent bytes of two reports. A quantity is left out if one report lacks it or if it
    is 0 in both.

    The seconds are those predicted for an update, in total and by term. The FLOPs (including recomputed ones) and the
    bytes are for one device in one call of the step. The bytes are summed by kind of collective and mesh axes.
    """
    rows: list[tuple[str, str, float, float]] = []
    if before.prediction and after.prediction:
        rows.append(("update, predicted", "seconds", *(side.prediction["seconds"] for side in (before, after))))
        for term in before.prediction["by_term"]:
            seconds = [side.prediction["by_term"].get(term, 0.0) for side in (before, after)]
            rows.append((f"spent on {term.replace('_', ' ')}", "seconds", *seconds))
    if before.work and after.work:
        rows.append(("FLOPs", "FLOPs", step_flops(before), step_flops(after)))
        rows.append(("recomputed FLOPs", "FLOPs", step_flops(before, "recompute"), step_flops(after, "recompute")))
    sent = [_bytes_sent_by_collective(side) for side in (before, after)]
    for name in dict.fromkeys((*sent[0], *sent[1])):
        rows.append((name, "bytes", sent[0].get(name, 0), sent[1].get(name, 0)))
    return tuple(Measure(*row) for row in rows if all(map(_is_figure, row[2:])) and (row[2] or row[3]))


def _is_figure(value: object) -> bool:
    # A damaged report file may contain other values.
    return isinstance(value, int | float) and 0 <= value < 1e300


def step_flops(report: ReportRecord, phase: str = "") -> float:
    """Returns the FLOPs of one device in one call of the step, including recomputed ones. phase: a phase of the step,
    such as "recompute"; "" for all phases."""
    phases = [report.work.get(phase, {})] if phase else report.work.values()
    counts = [work.get("flops") for work in phases if isinstance(work, Mapping)]
    numbers = [number for count in counts if isinstance(count, Mapping) for number in count.values()]
    return sum(number for number in numbers if _is_figure(number))


def _bytes_sent_by_collective(report: ReportRecord) -> dict[str, int]:
    out: dict[str, int] = {}
    for row in report.communication:
        name = f"sent by {row.kind} over {' x '.join(row.axes) or f'groups of {row.group}'}"
        out[name] = out.get(name, 0) + row.wire_bytes
    return out


@dataclasses.dataclass(frozen=True)
class DiffResult:
    """The differences between two reports.

    Fields:
        changes: the changes of bytes.
        measures: the seconds, FLOPs and sent bytes of both reports.
        version_changes: package whose version differs -> (version before, version after).
        failed: the names of the totals that grew above a limit.
    """

    changes: tuple[Change, ...]
    measures: tuple[Measure, ...]
    version_changes: Mapping[str, tuple[str, str]]
    failed: tuple[str, ...]


def grew_above(changes: Iterable[Change], percent: float) -> tuple[Change, ...]:
    """Returns those of the `changes` between two reports in which the peak or the allocated bytes grew by more than
    `percent` per cent.
    """
    return tuple(c for c in changes if c.kind == "total" and c.name != "host_bytes" and c.percent > percent)


def version_changes(before: ReportRecord, after: ReportRecord) -> tuple[tuple[str, str, str], ...]:
    """Returns (package, version before, version after) of each package whose version differs; a missing package has
    the version "none"."""
    names = dict.fromkeys((*before.versions, *after.versions))
    pairs = ((name, before.versions.get(name, "none"), after.versions.get(name, "none")) for name in names)
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def warnings(before: ReportRecord, after: ReportRecord) -> tuple[str, ...]:
    """Returns a sentence for each reason why two reports are hard to compare: different targets, versions of jax, or
    methods, or programs on different sides of XLA's memory limit."""
    sentences = []
    targets = [str(report.target.get("name") or "no target") for report in (before, after)]
    if targets[0] != targets[1]:
        sentences.append(
            f"Compiled for different targets, {targets[0]} and {targets[1]}: other compilers and other "
            "kernels are part of this difference."
        )
    for package in ("jax", "jaxlib"):
        versions = [str(report.versions.get(package) or "an unknown version") for report in (before, after)]
        if versions[0] != versions[1]:
            sentences.append(
                f"Compiled by different versions of {package}, {versions[0]} and {versions[1]}: the compiler "
                "is part of this difference."
            )
            break
    if before.xla_recomputes != after.xla_recomputes:
        which = "first" if before.xla_recomputes else "second"
        sentences.append(
            f"XLA's rematerialization pass recomputes values in the {which} program only, because that one exceeds "
            "XLA's memory limit: the pass is part of this difference. To compare without it, give both a larger pool "
            "(such as h100@0.92), or set jax_compiler_enable_remat_pass to False."
        )
    elif before.beyond_xla_limit != after.beyond_xla_limit:
        which = "first" if before.beyond_xla_limit else "second"
        sentences.append(
            f"Only the {which} program is above XLA's memory limit: XLA schedules it for less memory and less overlap, "
            "which is part of this difference. To compare without it, give both a larger pool (such as h100@0.92)."
        )
    if before.method != after.method:
        sentences.append(
            "One peak is from the compiler's own heap trace, the other is derived from the schedule: they may "
            "differ by some per cent for the same program."
        )
    return tuple(sentences)


def grown_buffers(changes: Iterable[Change]) -> list[Change]:
    """Returns the changes of buffers at the peak that became larger, largest growth first."""
    return sorted((c for c in changes if c.kind == "buffer" and c.growth > 0), key=lambda c: -c.growth)


def largest_buffers(before: ReportRecord | None, after: ReportRecord, count: int) -> list[Change]:
    """Returns the `count` largest buffers at the peak of the second report with their bytes in the first report,
    largest first. If `before` is None, the second report is used as the first one too."""
    old, new = _matched_buffers(before or after, after)
    changes = [Change("buffer", name, old.get(name, 0), size) for name, size in new.items()]
    return sorted(changes, key=lambda change: (-change.after, change.name))[:count]


def sources(report: ReportRecord) -> dict[str, str]:
    """Returns the source lines of buffers, to show them beside the changes: name of the buffer as in `Change.name` ->
    "file.py:line". Of several buffers at the peak with the same name, the largest decides.
    """
    lines: dict[str, str] = {}
    for b in report.alive_at(report.peak_index):  # the largest first
        if b.source:
            lines.setdefault(_stable_buffer_name(b), b.source)
    return lines


def _changes(kind: str, before: Mapping[str, int], after: Mapping[str, int]) -> list[Change]:
    keys = dict.fromkeys((*before, *after))
    return [Change(kind, key, before.get(key, 0), after.get(key, 0)) for key in keys]


def _matched_buffers(before: ReportRecord, after: ReportRecord) -> tuple[dict[str, int], dict[str, int]]:
    """Matches the buffers at the peak of two reports by name. Returns (name -> bytes in the first report, name -> bytes
    in the second report).

    A name that is only in the first report is replaced by a name that is only in the second report, if there is one
    with the same category, dtype and shape.
    """
    (old, old_roles), (new, new_roles) = _bytes_and_kind_by_identity(before), _bytes_and_kind_by_identity(after)
    only_new: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name in sorted(new.keys() - old.keys()):
        only_new.setdefault(new_roles[name], []).append(name)
    renamed = {}
    for name in sorted(old.keys() - new.keys()):
        if candidates := only_new.get(old_roles[name]):
            renamed[name] = candidates.pop(0)
    return {renamed.get(name, name): size for name, size in old.items()}, new


def _bytes_and_kind_by_identity(
    report: ReportRecord,
) -> tuple[dict[str, int], dict[str, tuple[str, str, tuple[int, ...]]]]:
    sizes: dict[str, int] = {}
    roles: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for b in report.alive_at(report.peak_index):
        name = _stable_buffer_name(b)
        sizes[name] = sizes.get(name, 0) + b.bytes
        roles[name] = (b.category, b.dtype, tuple(b.shape))
    return sizes, roles


def _stable_buffer_name(b: Buffer) -> str:
    if b.phase == "argument":
        words: tuple[str, ...] = (b.category, b.name)
    else:
        what = b.checkpoint_name or b.op_name.rsplit("/", 1)[-1] or b.name
        words = (b.category, b.phase, b.module, what)
    return f"{'/'.join(filter(None, words))} {b.dtype}{list(b.shape)}"
