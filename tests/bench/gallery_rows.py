"""A row of the gallery: what a report says of a program on a target, and how it is shown."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gallery_list import PROGRAMS, accepted, expected

MIB = 2**20


@dataclasses.dataclass(eq=False)
class Row:
    """One program on one target. All sizes are bytes of one device; `failed` has a line where there is no report."""

    program: str
    target: str
    failed: str = ""
    seconds: float = 0.0
    peak: int = 0
    allocated: int = 0
    breakdown: dict[str, int] = dataclasses.field(default_factory=dict)
    adds_up: bool = False
    xprof: tuple[float, float] | None = None
    placed: float = 1.0
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    roles: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    largest: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    unplaced: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def equal(self) -> bool | None:
        """Whether XProf has the same peak and allocated bytes, to the byte; None where it was not asked."""
        return None if self.xprof is None else (self.peak, self.allocated) == self.xprof

    @property
    def unread(self) -> list[str]:
        """Kinds that were found and that nobody has read; none of a program that is not on the list."""
        if self.program not in PROGRAMS:
            return []
        read = {*expected(self.program, self.target), *accepted(self.program, self.target)}
        return sorted({one["kind"] for one in self.findings} - read)

    @property
    def missed(self) -> list[str]:
        """Kinds that a reader of the program expects and that were not found."""
        return sorted(set(expected(self.program, self.target)) - {one["kind"] for one in self.findings})

    @property
    def held(self) -> bool:
        return not (self.failed or not self.adds_up or self.equal is False or self.unread or self.missed)


def fill(row: Row, report: Any) -> None:
    """Writes what a report says into the row."""
    from bytescope.memory.hlo.sources import OUTSIDE, kind_of

    rows = {name: size for name, size in report.breakdown.items() if size}
    held: Counter[str] = Counter()
    live = sorted((b for b in report.buffers if b.at_peak and b.memory == "device"), key=lambda b: -b.bytes)
    for buffer in live:
        held[buffer.category] += buffer.bytes
    own = {name: size for name, size in rows.items() if name != "fragmentation"}
    row.peak, row.allocated, row.breakdown = report.peak_bytes, report.allocated_bytes, rows
    row.adds_up = (
        sum(own.values()) == report.peak_bytes
        and sum(rows.values()) == report.allocated_bytes
        and own == {name: size for name, size in held.items() if size}
    )
    made = [b for b in live if b.phase != "argument"]
    lost = [b for b in made if kind_of(b.source.rpartition(":")[0]) == OUTSIDE or not b.source]
    row.placed = 1 - sum(b.bytes for b in lost) / max(sum(b.bytes for b in made), 1)
    row.findings = [dataclasses.asdict(finding) for finding in report.findings]
    row.findings += [  # requests to jax and XLA that were not honored
        {
            "kind": f"audit_{asked.kind}",
            "bytes": asked.bytes,
            "message": f"{asked.subject}: {asked.message}",
            "remedy": "",
        }
        for asked in report.audit
        if asked.honored is False
    ]
    roles = defaultdict(list)
    for buffer in report.buffers:
        if buffer.phase == "argument":
            roles[buffer.category].append(buffer.name)
    row.roles = dict(roles)
    row.largest, row.unplaced = [told(b) for b in live[:10]], [told(b) for b in lost[:5]]
    row.notes = list(report.notes)


def told(buffer: Any) -> dict[str, Any]:
    keys = ("name", "bytes", "dtype", "shape", "category", "phase", "component", "module", "op_name", "source")
    return {key: getattr(buffer, key) for key in keys}


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| program | target | peak | rows of at least 1 % | adds up | XProf | placed | findings | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.failed:
            lines.append(f"| `{row.program}` | `{row.target}` | {row.failed.replace('|', ' ')} | | | | | | |")
            continue
        parts = ", ".join(
            f"{name} {size / row.peak:.0%}"
            for name, size in sorted(row.breakdown.items(), key=lambda item: -item[1])
            if size >= 0.01 * row.peak
        )
        equal = {True: "equal", False: "**differs**", None: "-"}[row.equal]
        kinds = [
            f"{one['kind']} {size(one['bytes'])}{' **unread**' if one['kind'] in row.unread else ''}"
            for one in row.findings
        ]
        kinds = ", ".join([*kinds, *(f"**missed** {kind}" for kind in row.missed)]) or "-"
        lines.append(
            f"| `{row.program}` | `{row.target}` | {size(row.peak)} | {parts} | "
            f"{'yes' if row.adds_up else '**no**'} | {equal} | {row.placed:.1%} | {kinds} | "
            f"{row.seconds:.1f} |"
        )
    return "\n".join(lines)


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.2f} MiB"


def details(row: Row) -> str:
    """What a person reads to judge a row: findings in full, roles of the arguments, what has no place."""
    lines = [f"\n{row.program} on {row.target}  peak {size(row.peak)}"]
    lines += [f"  {one['kind']}: {one['message']}. {one['remedy']}" for one in row.findings]
    lines += [f"  {role}: {', '.join(folded(names))}" for role, names in row.roles.items()]
    lines += [
        f"  at peak {size(b['bytes']):>11} {b['dtype']}{b['shape']} {b['category']} {b['phase']} "
        f"{b['module'] or b['component']} {b['name']} {'/'.join(b['source'].split('/')[-2:])}"
        for b in row.largest[:6]
    ]
    lines += [
        f"  without a place {size(b['bytes'])} {b['dtype']}{b['shape']} {b['name']} {b['op_name']}"
        for b in row.unplaced
    ]
    return "\n".join([*lines, *(f"  note: {note}" for note in row.notes)])


def folded(paths: Iterable[str]) -> list[str]:
    """Paths of arguments by their first two steps: `state.params[...] x 12`."""
    heads = Counter("".join(re.findall(r"^\w+|\.\w+|\[[^]]*\]", path)[:2]) for path in paths)
    return [f"{head} x {count}" if count > 1 else head for head, count in heads.items()]
