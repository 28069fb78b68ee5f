"""Elements that several pages share, as plain data for the macros of `templates/elements.html`: figures, bars,
tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.records.report_record import ROWS, ReportRecord, RowName
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human
from bytescope.memory.view.figures import count, exact, percent, rounded, seconds, shares
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.text_layout import mixture

# The page's explanation of its predicted seconds.
PREDICTED = (
    "Predicted: seconds of an update, from a walk through the compiled schedule at measured device rates. The interval "
    f"is the spread of earlier predictions against measured runs. Predictions within {TIE:.0%} are a tie. Rates:"
)


class HeaderFigure(NamedTuple):
    """A number shown large in a page's header.

    Fields:
        name: the caption.
        value: the number as text.
        note: a line below it.
        exact: the exact value, shown on hover.
    """

    name: str
    value: str
    note: str = ""
    exact: str = ""


class Cell(NamedTuple):
    """A cell of a table on a page.

    Fields:
        text: the text; a newline starts a new line.
        title: the text shown on hover.
        kind: the CSS class that colours the cell.
        value: the number by which a sortable table orders the cell; if None, the text is used.
        command: a command that the cell's button copies.
        note: a line below the text.
    """

    text: str
    title: str = ""
    kind: str = ""
    value: float | None = None
    command: str = ""
    note: str = ""


class Head(NamedTuple):
    """The heading of a table column on a page.

    Fields:
        title: the text of the heading.
        kind: the CSS class: "name" for the column with the rows' names, "num" for right-aligned numbers, "text" for
            left-aligned text.
    """

    title: str
    kind: str


class PageRow(NamedTuple):
    """A row of a table on a page.

    Fields:
        cells: one cell per column.
        kind: "total" or "winner" if the row is emphasized, else "".
        title: the text shown on hover.
    """

    cells: list[Cell]
    kind: str = ""
    title: str = ""


class PageTable(NamedTuple):
    """A table on a page: its headings and rows."""

    heads: list[Head]
    lines: list[PageRow]


class BreakdownPart(NamedTuple):
    """A category of the memory breakdown, drawn as a part of a bar.

    Fields:
        row: the key of the category, such as "params".
        name: the name shown for it.
        bytes: its size in bytes.
        share: its percentage of the total.
        width: the percentage of the bar's length that it takes.
    """

    row: RowName
    name: str
    bytes: int
    share: float
    width: float


class RankedBar(NamedTuple):
    """A bar of a bar chart with its name.

    Fields:
        name: the name shown.
        title: the tooltip.
        bytes: the size in bytes.
        width: the width of the bar in per cent of the largest bar.
        row: the category that colours the bar; "" for the colour of the chart.
    """

    name: str
    title: str
    bytes: int
    width: float
    row: str = ""


class Section(NamedTuple):
    """A section of a page's "About" part: a title and (name, value) pairs."""

    title: str
    entries: list[tuple[str, str]]


def row_name(row: RowName) -> str:
    """Returns the display name of a category of the memory breakdown."""
    return {"frozen": "frozen params", "logits_loss": "logits and loss", "rng": "random keys"}.get(row, row)


def where(target: Mapping[str, Any]) -> str:
    """Returns a line that describes the devices for which a program was compiled, such as "h200:8 · NVIDIA H200 · per
    device".
    """
    name, kind = str(target.get("name") or "no target"), str(target.get("kind") or "")
    return " · ".join((name, kind, "per device") if kind and kind != name else (name, "per device"))


def title(config: str, target: Mapping[str, Any], what: str) -> str:
    """Returns the title of a page, such as "llama_8b on h100:8 · levers".

    config: the name of the config. target: the JSON of the devices. what: the last part of the title.
    """
    name = str(target.get("name") or "")
    return f"{config or 'a config'}{f' on {name}' if name else ''} · {what}"


def facts(rows: Sequence[Mapping[str, Any]], given: str = "") -> list[str]:
    """Returns header lines for a page that compares programs: the batch and the remat policy if they are equal in all
    rows, and the config flags.

    rows: one JSON row per program. given: the config flags of the command line as text.
    """
    batches, policies = ({row.get(key) for row in rows if row.get(key)} for key in ("batch", "policy"))
    tokens = sorted({row["tokens_per_update"] for row in rows if row.get("tokens_per_update")})
    out = [f"batch: {batches.pop()}"] if len(batches) == 1 else []
    if len(batches) > 1 and tokens:
        out.append(
            f"batch: {' to '.join(f'{count:,}' for count in dict.fromkeys((tokens[0], tokens[-1])))} tokens per update"
        )
    if len(policies) == 1:
        out.append(f"policy: {policies.pop()}")
    return [*out, f"with {given}"] if given else out


def subject(report: ReportRecord) -> str:
    """Describes a report's program and target in one line, such as "llama_8b · h100:8 · NVIDIA H100 80GB HBM3 · per
    device"."""
    return " · ".join((report.subject.name or report.program or "a program", where(report.target)))


def program_facts(report: ReportRecord) -> list[str]:
    """Returns lines that describe the program of a report, such as its batch and policy. Facts that are unknown are
    left out."""
    subject = report.subject
    layers = " · ".join(
        filter(
            None,
            (
                f"policy: {subject.policy}" if subject.policy else "",
                f"program: {report.program}" if subject.name and report.program else "",
            ),
        )
    )
    lines = (
        f"batch: {subject.batch}" if subject.batch else "",
        layers,
        mixture(report.parameters),
        f"with {' '.join(subject.changes)}" if subject.changes else "",
    )
    return [line for line in lines if line]


def command(config: str, target: Mapping[str, Any], *flags: str, fits: bool | None = True) -> str:
    """Returns the shell command for a config: `bytescope report` if the config does not fit (`fits` is False),
    otherwise `bytescope train`.

    config: the name of the config. target: the JSON of the devices. flags: flags that are already quoted for a shell.
    If a key is given twice, the last value is used.
    """
    verb = "report" if fits is False else "train"
    words = [config]
    if fits is False and target.get("name"):
        words.append(target["name"])
    return " ".join(filter(None, ["bytescope", verb, shlex.join(words), *flags]))


def versions(by_package: Mapping[str, str]) -> str:
    """Returns package versions in one line, such as "jax 0.10.2 · python 3.11.7"."""
    return " · ".join(f"{name} {version}" for name, version in by_package.items())


def figure(name: str, count: int | None, note: str = "") -> HeaderFigure:
    """Returns a header figure that shows a number of bytes."""
    return HeaderFigure(name, human(count), note, exact(count))


def predictions(row: Mapping[str, Any], whose: str = "") -> list[HeaderFigure]:
    """Returns the header figures of a page for the program in one row of a comparison: predicted seconds per update
    with their interval, tokens/s and MFU.

    whose: which program the figures belong to, such as "of the first that fits"; added to the note below each figure.
    """
    within = spread(row)
    figures = (
        HeaderFigure(
            "step, predicted",
            seconds(row["predicted_seconds"]),
            ", ".join(filter(None, (within, whose))),
            at_least(row),
        ),
        HeaderFigure("tokens/s, predicted", count(row["predicted_tokens_per_s"]), whose or "over all devices"),
        HeaderFigure("MFU, predicted", percent(row["predicted_mfu"]), whose or "of the peak FLOP/s"),
    )
    return [one for one in figures if one.value]


def spread(row: Mapping[str, Any]) -> str:
    """Returns the interval of a row's predicted seconds, such as "0.65 to 0.81 s"; "" if there is none."""
    low, high = row.get("predicted_seconds_low"), row.get("predicted_seconds_high")
    if low is None or high is None:
        return ""
    in_ms = row["predicted_seconds"] < 0.1
    return f"{within(1000 * low, 1000 * high)} ms" if in_ms else f"{within(low, high)} s"


def at_least(row: Mapping[str, Any]) -> str:
    """Returns a hover text with the lower bound of a row's seconds, such as "at least 0.462 s by the data sheet".
    Returns "" if the bound is unknown."""
    bound = row.get("least_seconds")
    return f"at least {rounded(bound, 3)} s by the data sheet" if bound else ""


def rates_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns notes on the predicted seconds of a comparison: the sources of the device rates in one note, and why some
    rows have no prediction."""
    reasons = dict.fromkeys(row["unpredicted"] for row in rows if row.get("unpredicted"))
    sources = "; ".join(dict.fromkeys(row["rates"].rstrip(".") for row in rows if row.get("rates")))
    return [
        *([f"{PREDICTED} {sources}."] if sources else []),
        *(f"Rows without predicted seconds: {why}." for why in reasons),
    ]


def limit_notes(target: Mapping[str, Any], limit: int | None) -> list[str]:
    """Returns a one-line note that shows a memory limit as a fraction of the GPU's memory. Returns [] if the limit was
    not set as a fraction of the memory.

    target: the JSON of the devices. limit: bytes on one device.
    """
    share = limit_share(target, limit)
    return [f"Limit: {share}."] if share else []


def parts(breakdown: Mapping[RowName, int], total: int, scale: int = 0) -> list[BreakdownPart]:
    """Returns the categories of a memory breakdown that have bytes, in the order of `ROWS`. Their shares add up to 100.

    breakdown: category -> bytes. total: bytes of all categories. scale: bytes that the full length of the bar
    represents (default: the total).
    """
    sizes = {row: breakdown[row] for row in ROWS if breakdown.get(row, 0) > 0}
    full = scale or max(total, 1)
    return [
        BreakdownPart(row, row_name(row), size, share, 100 * size / full)
        for (row, size), share in zip(sizes.items(), shares([*sizes.values()]))
    ]
