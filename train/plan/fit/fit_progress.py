"""Prints the search of `bytescope fit` on the terminal while it runs. `fit_view` prints the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.targets import Target
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human
from bytescope.memory.view.console import make_console, put, safe
from bytescope.memory.view.figures import rounded, seconds
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.text_layout import Items, Prose, unwrapped, wrap
from bytescope.train.plan.fit.fit_space import Space
from bytescope.train.plan.fit.fit_step import Step

# Stage of the search -> what the search tries in it.
STAGES = {
    "baseline": "the smallest micro-batch without recomputation",
    "mesh": "each mesh with everything recomputed, to see which meshes fit and how fast each can become",
    "remat": "the least recomputation that fits",
    "micro": "larger micro-batches, as long as they are predicted to be faster",
    "squeeze": "smaller state and activations, because recomputation is not enough",
    "neighbour": "plans that save one more tensor than the best",
    "compiler": "options of XLA that need less memory, for variants that exceed the budget by little",
}
# Explains "2 x 4" in the words of a variant.
BATCH_WORDS = '"2 x 4": micro-batches of 2 sequences on each rank, 4 of them accumulated per update'
# Width in terminal columns of the longest verdict, such as "fits, fastest so far".
_VERDICT = 20


class Lines:
    """Prints each variant (config with changed keys) that `bytescope fit` compiles on one line of the terminal, as soon
    as it is compiled.

    A description that is too long for the line is printed above it.
    """

    def __init__(self, target: Target, space: Space, budget: int, console: Console | None = None):
        self._console = console or make_console()
        self._stage, self._began = "", time.monotonic()
        basis = limit_share(target.to_json(), budget)
        put(
            Group(
                Items(
                    [
                        f"on {target.name}",
                        f"within {human(budget)} per device,",
                        *([f"{basis},"] if basis else []),
                        f"{space.tokens:,} tokens per update;",
                        f"levers: {', '.join(sorted(space.levers))}",
                    ],
                    gap=1,
                    title="fit",
                ),
                Prose(
                    f"seconds per update are predicted; variants that differ by less than {TIE:.0%} are a tie: "
                    "the least recomputation wins, then the least memory",
                    "dim",
                ),
                Prose(BATCH_WORDS, "dim"),
            ),
            self._console,
        )

    def show(self, step: Step) -> None:
        """Prints a compiled variant of the config. If it is the first of a stage of the search, prints the stage's
        heading above it."""
        if step.stage != self._stage:
            self._stage = step.stage
            put(Prose(Text.assemble((step.stage, "bold"), (f"  {STAGES[step.stage]}", "dim"))), self._console)
        put(Line(step, time.monotonic() - self._began), self._console)


class Line:
    """A line of the terminal that describes one compiled variant of the config: its bytes, its predicted seconds and
    whether it fits.

    Args:
        step: the variant.
        at: seconds from the start of the search.
    """

    def __init__(self, step: Step, at: float) -> None:
        self._step, self._head = step, f"{at:6.1f} s  "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        step, head = self._step, Text(self._head, style="dim")
        left = options.max_width - len(self._head)
        what = Text(safe(step.what))
        if not step.ok:
            yield from _with_hanging_indent(
                head, [*wrap(what, left, console), *wrap(Text(safe(step.verdict), style="yellow"), left, console)]
            )
            return
        host = f" + {human(step.answer['host_bytes'])} host" if step.answer["host_bytes"] else ""
        figures = f"{human(step.allocated):>11}{host}  {seconds(step.seconds):>8}  "
        room = left - len(figures) - _VERDICT - 1
        if what.cell_len > room:  # long words are printed on lines of their own, above the figures
            lines, last = wrap(what, left, console), Text(" " * min(max(room, 0), 8))
        else:
            lines, last = [], Text.assemble(what, " " * (room - what.cell_len + 1))
        yield from _with_hanging_indent(head, [*lines, Text.assemble(last, figures, (step.verdict, _style(step)))])


def _with_hanging_indent(head: Text, lines: Sequence[Text]) -> list[Text]:
    return [
        unwrapped(Text.assemble(head if not number else " " * head.cell_len, line)) for number, line in enumerate(lines)
    ]


def _style(step: Step) -> str:
    if "fastest" in step.verdict or "thriftier" in step.verdict:
        return "bold green"
    return "green" if step.fits else "red"


def describe_prediction(seconds: float | None, low: float | None, high: float | None) -> str:
    """Returns the text for predicted seconds per update, such as "predicted 0.721 s (0.65 to 0.81)".

    Args:
        seconds: the prediction in seconds; None if there is none.
        low, high: the ends of its interval in seconds.
    """
    if seconds is None or low is None or high is None:
        return "no time is predicted"
    return f"predicted {rounded(seconds)} s ({within(low, high)})"


def show_measured(measurements: Sequence[tuple[Step, Mapping[str, Any]]], console: Console | None = None) -> None:
    """Prints the seconds per update and tokens/s of the fastest variants, which were run on this machine, beside their
    predictions.

    measurements: pairs (variant, measured values `step_seconds` and `tokens_per_s`).
    """
    lines = [
        Prose(
            f"{measured['step_seconds']:10.4g} s  {measured['tokens_per_s']:12,.0f} tokens/s  "
            f"({describe_prediction(step.seconds, *step.spread)})  {step.what}"
        )
        for step, measured in measurements
    ]
    put(Group(Text("measured on this machine", style="bold"), *lines), console)
