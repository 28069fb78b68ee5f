"""The texts that a run prints before its first step and at its end: lines with a title and a text, such as parameters,
predicted memory and speed, and the commands to continue with.

Long texts are wrapped, never cut.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.live import LiveMemory, predicted_against_measured
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import put
from bytescope.memory.view.text_layout import CopyCommand, Prose, as_text, unwrapped, wrap

TITLE = 11  # columns of a title and the gap after it
BAR = 16
VERDICT_STYLE = {"fits": "green", "tight": "yellow", "exceeds": "red"}


class SummaryLines:
    """A table of titles and texts to print. Texts are wrapped within their column, never between a number and its
    unit."""

    def __init__(self, rows: Iterable[tuple[str, str | Text]]):
        self.rows = [(title, text) for title, text in rows if text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for title, text in self.rows:
            for number, line in enumerate(wrap(as_text(text), max(options.max_width - TITLE, 20), console)):
                head = Text(f"{title if not number else '':<{TITLE}}", style="bold")
                yield unwrapped(Text.assemble(head, line))


def count(number: int) -> str:
    """Formats a number of parameters, for example "8.03 billion (8,030,261,248)" or "67,776"."""
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= scale:
            return f"{number / scale:.3g} {name} ({number:,})"
    return f"{number:,}"


def memory(report: ReportRecord) -> Text:
    """Returns a text bar of the step's predicted bytes relative to the device's limit, with the bytes and the
    headroom."""
    predicted, limit = report.predicted_bytes, report.limit_bytes
    elsewhere = f", and {human(report.host_bytes)} in host memory" if report.host_bytes else ""
    if not limit:
        return Text(f"{human(predicted)} per device{elsewhere}; the limit is unknown")
    share = predicted / limit
    style = VERDICT_STYLE.get(report.verdict, "")
    full = min(max(round(BAR * share), 1), BAR)
    room = f"{human(limit - predicted)} free" if predicted <= limit else f"{human(predicted - limit)} TOO MUCH"
    basis = limit_share(report.target, limit)
    on_cpu = report.target.get("platform") == "cpu"
    return Text.assemble(
        ("█" * full, style),
        ("░" * (BAR - full), "dim"),
        f" {human(predicted)} of {human(limit)} ({share:,.1%}), {room}{elsewhere}",
        f"; the limit is {basis}" if basis else "",
        "; XLA's buffers, without Python, jax and its compiler (host)" if on_cpu else "",
    )


def speed(report: ReportRecord) -> str:
    """Returns text with the predicted time of an update and a lower bound, computed from the speeds in the device's
    data sheet. Returns "" if the device's speed is unknown."""
    return "; ".join(filter(None, (times.predicted(report), times.at_least(report))))


def clock(seconds: float) -> str:
    """Formats seconds as h:mm:ss, such as "1:02:05". Fractions of a second are dropped."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def end_rows(
    *,
    first: int,
    last: int,
    steps: int,
    seconds: float,
    evaluated: tuple[int, float] | None,
    tokens_per_s: float,
    report: ReportRecord,
    before: LiveMemory | None,
    live: LiveMemory | None,
    checkpoint: Path | None,
    page: Path | None = None,
) -> list[tuple[str, str]]:
    """Returns the lines of the summary that is printed when one start of a run ends, as (title, text).

    Args:
      first, last: numbers of the first and the last update of this start.
      steps: number of updates of the whole run.
      seconds: duration of this start, in seconds.
      evaluated: (step, held-out loss) of the last evaluation of this start, None without one.
      tokens_per_s: tokens per second, 0.0 if no steps were measured.
      report: the memory report of the step.
      before, live: the device's memory before the state was created, and at the end; None if unknown.
      checkpoint: path of the newest checkpoint, None without one.
      page: path of the run directory's HTML page, None without one.
    """
    loss = ""
    if evaluated is not None:
        step, value = evaluated
        after = f" after update {step}" if step != last else ""
        loss = f"held-out loss {value:.4f}{after} (perplexity {math.exp(min(value, 700.0)):.4g} per token), "
    rate = f", {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""
    updates = f"updates {first} to {last}" if last >= first else "no update"
    return [
        ("done" if last >= steps else "stopped", f"{loss}{updates} of {steps} in {clock(seconds)}{rate}"),
        ("memory", predicted_against_measured(report, live, before)),
        ("checkpoint", str(checkpoint or "none")),
        ("page", str(page or "")),
    ]


def show(console: Console, rows: Iterable[tuple[str, Any]]) -> None:
    """Prints the lines of a run's summary, (title, text) each, as a table. Lines without text are left out."""
    put(SummaryLines(rows), console)


def say(console: Console, text: str) -> None:
    """Prints a sentence, wrapped to the width of the console."""
    put(Prose(text), console)


def show_commands(console: Console, commands: Mapping[str, str]) -> None:
    """Prints commands to copy, title -> command. Each is below its title."""
    for title, text in commands.items():
        put(Prose(title, style="bold"), console)
        put(CopyCommand(text), console)
