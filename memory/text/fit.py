"""A fit on the terminal: the walk line by line as it happens, then the choice or what is missing; 100 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from bytescope.memory.devices.targets import Target
from bytescope.memory.plan.fit_space import Space
from bytescope.memory.plan.fit_step import Step
from bytescope.memory.records import ROWS
from bytescope.memory.text.report import WIDTH
from bytescope.memory.units import human

# Stage -> what is done in it.
STAGES = {
    "baseline": "the smallest micro-batch, nothing recomputed",
    "mesh": "each mesh with everything recomputed: what fits, and how fast it can become",
    "remat": "the least recomputation that fits",
    "micro": "larger micro-batches, as long as they are predicted to be faster",
    "squeeze": "smaller state and activations, since recomputation is not enough",
    "neighbour": "one more name kept",
}
# Columns of a verdict, such as "fits, fastest so far".
_VERDICT = 20


class Lines:
    """Prints steps as they come, each in one line, or in one of words and one of figures where both do not fit."""

    def __init__(self, target: Target, space: Space, budget: int, console: Console | None = None):
        self._console = console or Console(width=WIDTH, highlight=False)
        self._stage, self._began = "", time.monotonic()
        self._console.print(Text.assemble(
            ("fit", "bold"), f" on {target.name} within {human(budget)} per device, {space.tokens:,} tokens per "
            f"update; levers: {', '.join(sorted(space.levers))}"))
        self._console.print(Text("seconds are predicted by a roofline of the target: for ranking only; not a timing",
                                 "dim"))

    def show(self, step: Step) -> None:
        """Prints one step, under a heading where a stage begins."""
        if step.stage != self._stage:
            self._stage = step.stage
            self._console.print(Text.assemble((step.stage, "bold"), (f"  {STAGES[step.stage]}", "dim")))
        self._console.print(line(step, time.monotonic() - self._began))


def line(step: Step, at: float) -> Text:
    """One step of the walk; `at`: seconds since the walk began."""
    head = f"{at:6.1f} s  "
    if not step.ok:
        return Text.assemble((head, "dim"), step.what, (f"\n{'':10}{step.verdict}", "yellow"))
    host = f" + {human(step.answer['host_bytes'])} host" if step.answer["host_bytes"] else ""
    figures = f"{human(step.allocated):>11}{host}  {seconds(step.seconds):>8}  "
    style = "green" if step.fits else "red"
    if "fastest" in step.verdict:
        style = "bold green"
    room = WIDTH - len(head) - len(figures) - _VERDICT - 1
    # Words that are too long for their column have lines of their own above the figures.
    *above, last = [""] if len(step.what) > room else [step.what]
    if not last:
        above = textwrap.wrap(step.what, WIDTH - len(head), break_on_hyphens=False)
    lines = [*above, f"{last:{room}} {figures}"]
    return Text.assemble((head, "dim"), f"\n{'':{len(head)}}".join(lines), (step.verdict, style))


def seconds(value: float | None) -> str:
    """Seconds in four digits: "0.6983 s"; "" for None."""
    return "" if value is None else f"{value:.4g} s"


def show_measured(found: Sequence[tuple[Step, Mapping[str, Any]]], console: Console | None = None) -> None:
    """Prints what the finalists took on the device at hand."""
    console = console or Console(width=WIDTH, highlight=False)
    console.print(Text("measured here", "bold"))
    for step, measured in found:
        console.print(f"{measured['step_seconds']:10.4g} s  {measured['tokens_per_s']:12,.0f} tokens/s  "
                      f"(predicted {seconds(step.seconds)})  {step.what}", soft_wrap=True)


def show(out: Mapping[str, Any], config: str, console: Console | None = None) -> None:
    """Prints the result of a fit's JSON: the flags to run, or what is missing."""
    (console or Console(width=WIDTH, highlight=False)).print(render(out, config), soft_wrap=True)


def render(out: Mapping[str, Any], config: str) -> Text:
    """The choice with its flags, or the tightest configuration with what is missing (the certificate)."""
    effort = f"{out['programs']} programs compiled, {out['seconds']:.1f} s"
    stopped = f"; stopped early: {out['stopped']}" if out["stopped"] else ""
    if best := out["best"]:
        share = best["recompute_flops_fraction"]
        measured = best.get("measured") or {}
        rate = out["batch_tokens"] / best["predicted_step_seconds"] if best["predicted_step_seconds"] else 0
        timed = (f"{measured['tokens_per_s']:,.0f} tokens/s measured" if measured else
                 f"predicted {seconds(best['predicted_step_seconds'])} per update, {rate:,.0f} tokens/s")
        host = f", {human(best['host_bytes'])} on the host" if best["host_bytes"] else ""
        return Text.assemble(
            ("fits: ", "bold green"), f"{best['what']}\n",
            f"{human(best['allocated_bytes'])} of {human(out['budget_bytes'])}{host}, "
            f"{share:.1%} of the model's FLOPs recomputed, {timed}; {effort}{stopped}\n",
            ("run it with: ", "bold"), f"bytescope train --config={config} {best['flags']}")
    certificate = out["certificate"]
    if certificate is None:
        return Text.assemble(("nothing was found", "bold red"), f": no variant compiled; {effort}{stopped}")
    parts = ", ".join(f"{row} {human(certificate['breakdown'][row])}" for row in ROWS
                      if certificate["breakdown"].get(row, 0) > certificate["allocated_bytes"] / 100)
    missing = " and ".join(f"{human(certificate[key])} {where}" for key, where in
                           (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
                           if certificate[key])
    return Text.assemble(
        ("does not fit: ", "bold red"), f"{missing} missing\n", f"tightest: {certificate['what']}\n",
        f"it takes {human(certificate['allocated_bytes'])} of {human(out['budget_bytes'])}: {parts}\n",
        f"its flags: {certificate['flags']}\n{effort}{stopped}")
