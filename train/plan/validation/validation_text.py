"""A validation on the terminal: scores by model and GPUs, the rows predicted worst, and those that are not compared."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, put
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, value
from bytescope.train.plan.validation import validation_score
from bytescope.train.plan.validation.cohorts import BYTES_WITHIN, Cohort
from bytescope.train.plan.validation.validation_result import ValidationResult
from bytescope.train.plan.validation.validation_score import Pairs, ScoredRun

_WORST = 10
# Pairs below which a share of them says nothing.
_FEW = 5


def show(found: ValidationResult, *, console: Console | None = None) -> None:
    """Prints a validation, to stdout when no console is given."""
    put(render(found), console)


def render(found: ValidationResult) -> RenderableType:
    """Head, scores over models where they are pooled, seconds and order by model and GPUs, bytes, the worst rows, rows
    that are known to differ, and what is not compared, with the reasons."""
    return blocks(
        _head(found),
        _cohorts(found.cohorts, "rows"),
        _cohorts(found.sources, "source"),
        _cohort_bytes(found),
        _seconds(found) if found.groups else None,
        _order(found),
        _across(found),
        None if found.cohorts else _bytes(found),
        _worst(found),
        _reasons(found) if found.cohorts else _differing(found),
        _unsaid(found),
    )


def _head(found: ValidationResult) -> RenderableType:
    title = Text.assemble(
        (f"{found.set}: {len(found.scored)} measured runs", "bold"), f", {found.compiled} compiled now"
    )
    lines: list[RenderableType] = [title]
    if found.rates:
        lines.append(Prose(f"rates: {one_line(found.rates)}", "dim"))
    for compiler, rows in found.elsewhere:
        lines.append(Prose(f"{rows} rows were compiled by another environment ({compiler})", "dim"))
    if found.left:
        lines.append(Prose(f"stopped: {len(found.left)} rows left; run the same command to continue", "yellow"))
    return Group(*lines)


def _cohorts(some: Sequence[Cohort], title: str) -> RenderableType | None:
    timed = [one for one in some if one.rows]
    if not timed:
        return None
    table = FigureTable(
        label(title, least=18),
        figure("runs"),
        figure("programs"),
        figure("within 15 %"),
        figure("median"),
        figure("least"),
        figure("most"),
    )
    for one in timed:
        table.add(
            one.name,
            str(one.rows),
            str(one.programs),
            _percent(one.within),
            _ratio(one.median),
            _ratio(one.least),
            _ratio(one.most),
        )
    return Group(
        Prose(
            "predicted seconds over measured ones, over all models; runs that are one program of ours "
            "weigh one together:"
        )
        if title == "rows"
        else Text("by source:"),
        table,
    )


def _cohort_bytes(found: ValidationResult) -> RenderableType | None:
    sized = [one for one in found.sources if one.bytes_rows]
    if not sized:
        return None
    table = FigureTable(
        label("source", least=18),
        fixed("measured"),
        figure("runs"),
        figure("programs"),
        figure("at or below"),
        *(figure(name) for name in BYTES_WITHIN),
        figure("median"),
        figure("least"),
        figure("most"),
    )
    for one in sized:
        table.add(
            one.name,
            one.bytes_are,
            str(one.bytes_rows),
            str(one.bytes_programs),
            _percent(one.bytes_below),
            *map(_percent, one.bytes_within),
            _ratio(one.bytes_median),
            _ratio(one.bytes_least),
            _ratio(one.bytes_most),
        )
    return Group(Prose("our allocated bytes over the measured ones, by source:"), table, *_doubted(found))


def _seconds(found: ValidationResult) -> RenderableType:
    hosts = any(one.row.host_bound for one in found.scored)
    table = FigureTable(
        label("model"),
        figure("GPUs"),
        figure("runs"),
        figure("least"),
        figure("10 %"),
        figure("median"),
        figure("90 %"),
        figure("most"),
        figure("within 15 %"),
        *((figure("free of host"), figure("runs")) if hosts else ()),
    )
    for group in found.groups:
        quantiles = [_ratio(one) for one in group.ratios] or [""] * 5
        free = (_ratio(group.free_median), str(group.free_rows) if group.free_median else "")
        table.add(
            group.name, str(group.gpus), str(group.rows), *quantiles, _percent(group.within), *(free if hosts else ())
        )
    return Group(
        Prose(
            "predicted seconds over measured ones"
            + ("; free of host: the median of runs that launches do not bind:" if hosts else ", by model and GPUs:")
        ),
        table,
    )


def _order(found: ValidationResult) -> RenderableType | None:
    """Of groups with pairs; where models are pooled, of those with a few of them."""
    groups = [group for group in found.groups if group.pairs.count >= (_FEW if found.cohorts else 0)]
    if not groups:
        return None
    table = FigureTable(
        label("model"),
        figure("GPUs"),
        figure("pairs"),
        figure("right"),
        figure("by tensor"),
        figure("near pairs"),
        figure("right"),
        figure("by tensor"),
        figure("rank corr."),
        figure("by tensor"),
    )
    for group in groups:
        table.add(
            group.name, str(group.gpus), *_pairs(group.pairs), _ratio(group.spearman), _ratio(group.spearman_by_tensor)
        )
    return Group(
        Prose(
            "order: pairs of runs that differ by more than 5 % (near: by less than 1.5x) and the share in "
            "the right order, of runs with as many stages, beside what sorting by the tensor split "
            "gives:"
        ),
        table,
    )


def _across(found: ValidationResult) -> RenderableType | None:
    """The order of runs that differ in their stages."""
    groups = [(group, group.across) for group in found.groups if group.across and group.across.count]
    if not groups:
        return None
    table = FigureTable(
        label("model"),
        figure("GPUs"),
        figure("pairs"),
        figure("right"),
        figure("by tensor"),
        figure("near pairs"),
        figure("right"),
        figure("by tensor"),
    )
    for group, across in groups:
        table.add(group.model, str(group.gpus), *_pairs(across))
    return Group(Prose("order across numbers of stages, none among them:"), table)


def _pairs(pairs: Pairs) -> tuple[str, ...]:
    return (
        str(pairs.count),
        _percent(pairs.right),
        _percent(pairs.by_tensor),
        str(pairs.near_count),
        _percent(pairs.near_right),
        _percent(pairs.near_by_tensor),
    )


def _bytes(found: ValidationResult) -> RenderableType | None:
    groups = [group for group in found.groups if group.bytes_rows]
    if not groups:
        return None
    table = FigureTable(label("model"), figure("GPUs"), figure("runs"), figure("median"), figure("at or below"))
    for group in groups:
        table.add(
            group.name, str(group.gpus), str(group.bytes_rows), _ratio(group.bytes_median), _percent(group.bytes_below)
        )
    kinds = {one.row.bytes_are for one in found.scored if one.bytes_ratio} - {""}
    what = f" ({' or '.join(sorted(kinds))})" if kinds else ""
    return Group(Prose(f"our allocated bytes over the measured ones{what}:"), table, *_doubted(found))


def _doubted(found: ValidationResult) -> list[Prose]:
    """Bytes that are not compared, and why."""
    apart: dict[str, list[ScoredRun]] = {}
    for one in found.scored:
        if one.row.bytes_reason:
            apart.setdefault(one.row.bytes_reason, []).append(one)
    return [
        Prose(f"{len(rows)} not compared: {one_line(why)} ({'; '.join(map(_named_bytes, rows))})")
        for why, rows in apart.items()
    ]


def _named_bytes(one: ScoredRun) -> str:
    held, measured = (human(count) if count else "unknown" for count in (one.allocated_bytes, one.row.measured_bytes))
    return f"{one.row.model} on {one.row.gpus}, {one.row.setup}: {held} for {measured}"


def _worst(found: ValidationResult) -> RenderableType | None:
    rows = validation_score.worst(found.scored, _WORST)
    if not rows:
        return None
    table = FigureTable(
        label("predicted worst"),
        figure("GPUs"),
        value("setup"),
        figure("measured s"),
        figure("predicted s"),
        figure("ratio"),
        figure("alloc"),
        figure("measured"),
        value("bound by"),
    )
    for one in rows:
        table.add(*_worst_cells(one))
    return table


def _worst_cells(one: ScoredRun) -> tuple[str, ...]:
    row = one.row
    held, measured = (human(count) if count else "" for count in (one.allocated_bytes, row.measured_bytes))
    return (
        row.model,
        str(row.gpus),
        row.setup,
        f"{row.measured_seconds:#.4g}",
        f"{one.predicted_seconds:#.4g}",
        _ratio(one.ratio),
        held,
        measured,
        one.bound_by,
    )


def _differing(found: ValidationResult) -> RenderableType | None:
    """Rows by what is known to set them apart."""
    why: dict[str, list[ScoredRun]] = {}
    for one in found.scored:
        if one.row.differs and one.ratio:
            why.setdefault(one.row.differs, []).append(one)
    lines = [
        Prose(
            f"{one_line(reason)}: "
            + "; ".join(f"{one.row.model} on {one.row.gpus}, {one.row.setup} ({_ratio(one.ratio)})" for one in rows)
        )
        for reason, rows in why.items()
    ]
    return (
        Group(Text("known to differ from what is predicted (predicted over measured)", style="bold"), *lines)
        if lines
        else None
    )


def _reasons(found: ValidationResult) -> RenderableType | None:
    """What is likely to part the rows predicted worst, outside `score.WITHIN`, from what was measured."""
    low, high = validation_score.WITHIN
    by_reason: dict[str, list[ScoredRun]] = {}
    for one in validation_score.worst(found.scored, len(found.scored)):
        if one.ratio and not low <= one.ratio <= high:
            by_reason.setdefault(one.row.differs or "no reason is known", []).append(one)
    if not by_reason:
        return None
    lines: list[RenderableType] = [Text("likely reasons of what is more than 15 % away", style="bold")]
    for why, some in sorted(by_reason.items(), key=lambda each: -len(each[1])):
        ratios = [one.ratio for one in some if one.ratio]
        models = ", ".join(sorted({f"{one.row.model} on {one.row.gpus}" for one in some})[:4])
        between = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(some) > 1 else f"{ratios[0]:.2f}"
        lines.append(Prose(f"{len(some)}: {one_line(why)} ({between}; {one_line(models)})"))
    return Group(*lines)


def _unsaid(found: ValidationResult) -> RenderableType | None:
    if not found.unsaid:
        return None
    lines: list[RenderableType] = [Text("not compared", style="bold")]
    for why, rows in found.unsaid:
        named = sorted({f"{row.model} on {row.gpus}" for row in rows})
        lines.append(Prose(f"{len(rows)}: {one_line(why)} ({', '.join(named[:6])}{', ...' if len(named) > 6 else ''})"))
    return Group(*lines)


def _ratio(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
