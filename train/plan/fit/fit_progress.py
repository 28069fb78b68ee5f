"""The search of a fit on the terminal, line by line as it happens; `fit_view` shows the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from bytescope.memory.devices.targets import Target
from bytescope.memory.report.report_text import limit_line
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human
from bytescope.memory.view.console import make_console, put, safe
from bytescope.memory.view.figures import rounded, seconds
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.text_layout import Items, Prose, unwrapped, wrap
from bytescope.train.plan.fit.fit_space import Space
from bytescope.train.plan.fit.fit_step import Step

# Stage -> what is done in it.
STAGES = {
    "baseline": "the smallest micro-batch, nothing recomputed",
    "mesh": "each mesh with everything recomputed: what fits, and how fast it can become",
    "remat": "the least recomputation that fits",
    "micro": "larger micro-batches, as long as they are predicted to be faster",
    "squeeze": "smaller state and activations, since recomputation is not enough",
    "neighbour": "one more name kept",
}
# What "2 x 4" stands for in the words of a variant.
BATCH_WORDS = '"2 x 4": micro-batches of 2 sequences on each rank, 4 of them accumulated per update'
# Columns of a verdict, such as "fits, fastest so far".
_VERDICT = 20


class Lines:
    """Prints steps as they come, each in one line, or under its words where both do not fit."""

    def __init__(self, target: Target, space: Space, budget: int, console: Console | None = None):
        self._console = console or make_console()
        self._stage, self._began = "", time.monotonic()
        put(
            Group(
                Items(
                    [
                        f"on {target.name}",
                        f"within {human(budget)} per device,",
                        f"{space.tokens:,} tokens per update;",
                        f"levers: {', '.join(sorted(space.levers))}",
                    ],
                    gap=1,
                    title="fit",
                ),
                *limit_line(target.to_json(), budget),
                Prose(
                    "seconds are predicted, of an update; those of variants closer than "
                    f"{TIE:.0%} are a tie: then the least recomputation is chosen, then the least memory",
                    "dim",
                ),
                Prose(BATCH_WORDS, "dim"),
            ),
            self._console,
        )

    def show(self, step: Step) -> None:
        """Prints one step, under a heading where a stage begins."""
        if step.stage != self._stage:
            self._stage = step.stage
            put(Prose(Text.assemble((step.stage, "bold"), (f"  {STAGES[step.stage]}", "dim"))), self._console)
        put(Line(step, time.monotonic() - self._began), self._console)


class Line:
    """One step of the walk; `at`: seconds since the walk began."""

    def __init__(self, step: Step, at: float) -> None:
        self._step, self._head = step, f"{at:6.1f} s  "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        step, head = self._step, Text(self._head, style="dim")
        left = options.max_width - len(self._head)
        what = Text(safe(step.what))
        if not step.ok:
            yield from _indented(
                head, [*wrap(what, left, console), *wrap(Text(safe(step.verdict), style="yellow"), left, console)]
            )
            return
        host = f" + {human(step.answer['host_bytes'])} host" if step.answer["host_bytes"] else ""
        figures = f"{human(step.allocated):>11}{host}  {seconds(step.seconds):>8}  "
        room = left - len(figures) - _VERDICT - 1
        if what.cell_len > room:  # words that are too long for their column have lines of their own above the figures
            lines, last = wrap(what, left, console), Text(" " * min(max(room, 0), 8))
        else:
            lines, last = [], Text.assemble(what, " " * (room - what.cell_len + 1))
        yield from _indented(head, [*lines, Text.assemble(last, figures, (step.verdict, _style(step)))])


def _indented(head: Text, lines: Sequence[Text]) -> list[Text]:
    """The lines behind the head, and under each other."""
    return [
        unwrapped(Text.assemble(head if not number else " " * head.cell_len, line)) for number, line in enumerate(lines)
    ]


def _style(step: Step) -> str:
    if "fastest" in step.verdict or "thriftier" in step.verdict:
        return "bold green"
    return "green" if step.fits else "red"


def said(seconds: float | None, low: float | None, high: float | None) -> str:
    """Seconds of an update in words: "predicted 0.721 s (0.65 to 0.81)"."""
    if seconds is None or low is None or high is None:
        return "no time is predicted"
    return f"predicted {rounded(seconds)} s ({within(low, high)})"


def show_measured(found: Sequence[tuple[Step, Mapping[str, Any]]], console: Console | None = None) -> None:
    """Prints what the finalists took on the device at hand."""
    lines = [
        Prose(
            f"{measured['step_seconds']:10.4g} s  {measured['tokens_per_s']:12,.0f} tokens/s  "
            f"({said(step.seconds, *step.spread)})  {step.what}"
        )
        for step, measured in found
    ]
    put(Group(Text("measured here", style="bold"), *lines), console)
