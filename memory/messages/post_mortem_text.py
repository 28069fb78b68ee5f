"""Shows a step that ran out of memory on one screen: at most 40 lines at any width from 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.messages.explanation_text import culprit_table
from bytescope.memory.messages.post_mortem import PostMortem
from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, safe, shorten
from bytescope.memory.view.text_layout import Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, label

# Maximum groups of arrays, rows of the peak, characters of the error, characters of a remedy, and listed buffers.
_GROUPS, _ROWS, _ERROR, _WAY, _CULPRITS = 5, 4, 160, 210, 2
_ALLOCATOR = (
    ("in use", "bytes_in_use"),
    ("peak", "peak_bytes_in_use"),
    ("limit", "bytes_limit"),
    ("largest free block", "largest_free_block_bytes"),
    ("largest request", "largest_alloc_size"),
)


def render(post_mortem: PostMortem, files: tuple[str, ...] = ()) -> RenderableType:
    """Returns the explanation of why a step ran out of memory, as a rich renderable. `files`: paths of the files with
    more details.
    """
    return blocks(
        _head(post_mortem),
        culprit_table(post_mortem.explanation.culprits, _CULPRITS) if post_mortem.explanation else None,
        _held(post_mortem),
        _peak_summary(post_mortem),
        _ways(post_mortem),
        Items([f"written: {', '.join(files)}"], style="dim") if files else None,
    )


def _head(post_mortem: PostMortem) -> RenderableType:
    title = Text.assemble(
        ("out of memory", "bold red"),
        f" in {one_line(post_mortem.step)}, call {post_mortem.call:,}",
        f", on {one_line(post_mortem.device)}" if post_mortem.device else "",
    )
    lines: list[RenderableType] = [
        Prose(title),
        Prose(shorten(one_line(post_mortem.error[: 2 * _ERROR]), _ERROR), "dim"),
    ]
    if post_mortem.report:
        lines.append(Prose(memory_sum(post_mortem)))
    figures = [
        f"{name} {human(post_mortem.allocator[key])}" for name, key in _ALLOCATOR if post_mortem.allocator.get(key)
    ]
    if figures:
        lines.append(Items(figures, title="allocator"))
    if post_mortem.cause:
        lines.append(Prose(Text.assemble(("cause: ", "bold"), post_mortem.cause)))
    return Group(*lines)


def memory_sum(post_mortem: PostMortem) -> str:
    """Returns one line that adds the bytes of the step to those of the other arrays on the device, and compares the
    sum with the available bytes.
    """
    report, limit = post_mortem.report, post_mortem.limit_bytes
    parts = f"the step takes {human(report.predicted_bytes if report else None)}"
    if post_mortem.other_bytes:
        parts += f", other arrays hold {human(post_mortem.other_bytes)}: together {human(post_mortem.needed_bytes)}"
    if not limit:
        return parts
    missing = post_mortem.needed_bytes - limit
    verdict = (
        f"{human(missing)} too much"
        if missing > 0
        else (f"{human(-missing)} should be left: fragmentation, other processes or runtime overheads take this memory")
    )
    return f"{parts} of {human(limit)}, {verdict}"


def _held(post_mortem: PostMortem) -> RenderableType | None:
    if not post_mortem.held:
        return None
    table = FigureTable(
        label(Text("live arrays", style="bold")),
        figure("arrays"),
        figure("bytes"),
        figure("no arguments of the step"),
        heading="dim",
    )
    for group in post_mortem.held[:_GROUPS]:
        table.add(
            group.name,
            f"{group.arrays:,}",
            human(group.bytes),
            f"{group.others:,}, {human(group.other_bytes)}" if group.others else "",
        )
    rest = post_mortem.held[_GROUPS:]
    if rest:
        others = sum(group.others for group in rest)
        table.add(
            f"{len(rest)} more shape{'s' if len(rest) > 1 else ''}",
            f"{sum(group.arrays for group in rest):,}",
            human(sum(group.bytes for group in rest)),
            f"{others:,}, {human(sum(group.other_bytes for group in rest))}" if others else "",
            style="dim",
        )
    return table


def _peak_summary(post_mortem: PostMortem) -> RenderableType | None:
    report = post_mortem.report
    if report is None or not any(report.breakdown.values()):
        return None
    rows = sorted(((row, size) for row, size in report.breakdown.items() if size), key=lambda row: -row[1])
    kept = sorted(report.residuals_by_name.items(), key=lambda row: -row[1])
    lines = [
        Items(
            [f"{row} {human(size)}" for row, size in rows[:_ROWS]], title=f"at the peak of {human(report.peak_bytes)}"
        )
    ]
    if kept:
        lines.append(
            Items([f"{shorten(one_line(name), 30)} {human(size)}" for name, size in kept[:_ROWS]], title="residuals")
        )
    return Group(*lines)


def _ways(post_mortem: PostMortem) -> RenderableType | None:
    ways = post_mortem.ways_out
    if not ways:
        return None
    missing = post_mortem.needed_bytes - (post_mortem.limit_bytes or 0)
    lines: list[RenderableType] = [Text("the cheapest ways out, with the most that each can free", style="bold")]
    for number, way in enumerate(ways, 1):
        enough = ", may be enough" if post_mortem.report and way.bytes >= missing > 0 else ""
        words = ": ".join(filter(None, (safe(way.flags), shorten(one_line(way.words[: 2 * _WAY]), _WAY))))
        lines.append(Prose(Text.assemble(f"{number}. ", (human(way.bytes), "bold"), f"{enough}  {words}")))
    return Group(*lines)
