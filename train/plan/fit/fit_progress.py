"""A fit on the terminal: the walk line by line as it happens, then the choice or what is missing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.compare.compare_text import as_fast
from bytescope.memory.devices.targets import Target
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.report.report_text import limit_line
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human
from bytescope.memory.view.console import make_console, put, safe
from bytescope.memory.view.prediction_text import rounded, within
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, ignoring, wrap
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label
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
AT_LEAST = (
    '"at least" and "at best" are of meshes compiled with everything recomputed alone: what they would lose '
    "with nothing recomputed"
)
# What "2 x 4" stands for in the words of a variant.
BATCH_WORDS = '"2 x 4": micro-batches of 2 sequences on each rank, 4 of them accumulated per update'
# Variants that the table at the end lists at most.
_FINISHED = 8
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
        ignoring(Text.assemble(head if not number else " " * head.cell_len, line)) for number, line in enumerate(lines)
    ]


def _style(step: Step) -> str:
    if "fastest" in step.verdict or "thriftier" in step.verdict:
        return "bold green"
    return "green" if step.fits else "red"


def seconds(value: float | None) -> str:
    """Seconds in four digits: "0.6983 s"; "" for None."""
    return "" if value is None else f"{value:.4g} s"


def show_measured(found: Sequence[tuple[Step, Mapping[str, Any]]], console: Console | None = None) -> None:
    """Prints what the finalists took on the device at hand."""
    lines = [
        Prose(
            f"{measured['step_seconds']:10.4g} s  {measured['tokens_per_s']:12,.0f} tokens/s  "
            f"({_said(step.seconds, *step.spread)})  {step.what}"
        )
        for step, measured in found
    ]
    put(Group(Text("measured here", style="bold"), *lines), console)


def show(out: Mapping[str, Any], config: str, console: Console | None = None) -> None:
    """Prints the result of a fit's JSON: the flags to run, or what is missing."""
    put(render(out, config), console)


def render(out: Mapping[str, Any], config: str) -> RenderableType:
    """The choice with its flags, or the tightest configuration with what is missing (the certificate)."""
    effort = f"{out['programs']} programs compiled, {out['seconds']:.1f} s"
    stopped = f"; stopped early: {out['stopped']}" if out["stopped"] else ""
    if best := out["best"]:
        return _best(best, out, config, f"{effort}{stopped}")
    certificate = out["certificate"]
    if certificate is None:
        return Prose(Text.assemble(("nothing was found", "bold red"), f": no variant compiled; {effort}{stopped}"))
    return Group(_certificate(certificate, out, f"{effort}{stopped}"), *_reach(out))


def _certificate(certificate: Mapping[str, Any], out: Mapping[str, Any], effort: str) -> RenderableType:
    """The tightest configuration with what is missing."""
    parts = ", ".join(
        f"{row} {human(certificate['breakdown'][row])}"
        for row in ROWS
        if certificate["breakdown"].get(row, 0) > certificate["allocated_bytes"] / 100
    )
    missing = " and ".join(
        f"{human(certificate[key])} {where}"
        for key, where in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        if certificate[key]
    )
    return Group(
        Prose(Text.assemble(("does not fit: ", "bold red"), f"{missing} missing")),
        Prose(f"tightest: {certificate['what']}"),
        Prose(f"it takes {human(certificate['allocated_bytes'])} of {human(out['budget_bytes'])}: {parts}"),
        Text("its flags:"),
        CopyCommand(certificate["flags"], style=""),
        Prose(effort),
    )


def _reach(out: Mapping[str, Any]) -> list[RenderableType]:
    """What each rank of adapters reaches, a line each; none for a fit without adapters."""
    rows = out.get("reach") or ()
    if not rows:
        return []
    table = FigureTable(
        *map(figure, ("rank", "length", "at once")),
        fixed("base"),
        fixed("remat"),
        *map(figure, ("allocated", "host", "update", "tokens/s")),
        fixed(),
    )
    for row in rows:
        host = human(row["host_bytes"]) if row["host_bytes"] else ""
        table.add(
            f"{row['rank']}",
            f"{row['length']:,}",
            f"{row['micro']}",
            row["base"],
            row["policy"],
            human(row["allocated_bytes"]),
            host,
            seconds(row["predicted_seconds"]),
            f"{row['tokens_per_s']:,.0f}",
            row["verdict"],
            style="" if row["fits"] else "dim",
        )
    return [Text("what each rank reaches: the longest sequences, and the most at once", style="bold"), table]


def _said(seconds: float | None, low: float | None, high: float | None) -> str:
    """Seconds of an update in words: "predicted 0.721 s (0.65 to 0.81)"."""
    if seconds is None or low is None or high is None:
        return "no time is predicted"
    return f"predicted {rounded(seconds)} s ({within(low, high)})"


def _speed(best: Mapping[str, Any], out: Mapping[str, Any]) -> str:
    """What the choice is predicted to do: seconds, tokens/s with their spread and a device's share, MFU, the rates."""
    taken, low, high = (best[key] for key in ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high"))
    if not taken:
        return _said(taken, low, high)
    tokens, devices = out["batch_tokens"], (out.get("target") or {}).get("n_devices", 1)
    slow, fast = (f"{tokens / seconds:,.0f}" if seconds else "?" for seconds in (high, low))
    each = f", {tokens / taken / devices:,.0f} on each device" if devices > 1 else ""
    mfu = f", MFU {best['predicted_mfu']:.1%}" if best.get("predicted_mfu") else ""
    bound = best.get("least_seconds")
    least = f", at least {rounded(bound, 3)} s by the data sheet" if bound else ""
    return (
        f"{_said(taken, low, high)} per update, {tokens / taken:,.0f} tokens/s ({slow} to {fast}){each}{mfu}"
        f"{least}; {safe(best.get('rates') or '')}"
    )


def _best(best: Mapping[str, Any], out: Mapping[str, Any], config: str, effort: str) -> RenderableType:
    measured = best.get("measured") or {}
    timed = f"{measured['tokens_per_s']:,.0f} tokens/s measured" if measured else _speed(best, out)
    host = f", {human(best['host_bytes'])} on the host" if best["host_bytes"] else ""
    return Group(
        Prose(Text.assemble(("fits: ", "bold green"), safe(best["what"]))),
        *([Prose(text, "dim")] if (text := as_fast(out.get("ties", ()))) else []),
        Prose(
            f"{human(best['allocated_bytes'])} of {human(out['budget_bytes'])}{host}, "
            f"{best['recompute_flops_fraction']:.1%} of the model's FLOPs recomputed, {timed}; {effort}"
        ),
        Text("run it with:", style="bold"),
        CopyCommand(f"bytescope train --config={shlex.quote(config)} {best['flags']}".rstrip()),
        *_finished(out),
        *_layouts(out),
        *_reach(out),
    )


def _finished(out: Mapping[str, Any]) -> list[RenderableType]:
    """The fastest variants that fit, each beside the choice; none where a single one fits."""
    best = out["best"]
    rows = {row["what"]: row for row in out["walk"] if row["fits"] and row["predicted_seconds"] is not None}
    ranked = sorted(rows.values(), key=lambda row: (row["what"] != best["what"], row["predicted_seconds"]))
    if len(ranked) < 2 or not best.get("predicted_seconds"):
        return []
    table = FigureTable(label("variants that fit"), *map(figure, ("allocated", "update")), fixed())
    for row in ranked[:_FINISHED]:
        lost = row["predicted_seconds"] / best["predicted_seconds"] - 1
        words = f"{lost:.1%} slower" if lost >= TIE else "a tie"
        chosen = row["what"] == best["what"]
        table.add(
            row["what"],
            human(row["allocated_bytes"]),
            seconds(row["predicted_seconds"]),
            "chosen" if chosen else words,
            style="bold" if chosen else "",
        )
    left = len(ranked) - _FINISHED
    return [table, *([Text(f"and {left} slower ones", style="dim")] if left > 0 else [])]


def _layouts(out: Mapping[str, Any]) -> list[RenderableType]:
    """Each mesh beside the choice, a line each; none where one was tried."""
    rows = out.get("layouts") or ()
    if len(rows) < 2:
        return []
    table = FigureTable(label("mesh"), *map(figure, ("allocated", "update", "slower by")), fixed())
    for row in rows:
        ran = row["predicted_seconds"] is not None
        table.add(
            row["layout"],
            human(row["allocated_bytes"]) if ran else "",
            seconds(row["predicted_seconds"]),
            slower(row),
            "" if row["fits"] else _failed(row),
            style="" if row["fits"] else "dim",
        )
    reasons = [
        Prose(f"{row['layout']}: {safe(row['verdict'])}", "dim") for row in rows if row["predicted_seconds"] is None
    ]
    return [Text("each mesh, beside the choice", style="bold"), table, *reasons, Prose(AT_LEAST, "dim")]


def slower(row: Mapping[str, Any]) -> str:
    """By how much a mesh loses: "12%", "at least 34%", "a tie"; "" of the choice, and where it does not fit."""
    if row["slower"] is None or not row["fits"]:
        return ""
    bounded = row["least_seconds"]
    if row["slower"] < TIE:
        return "a tie at best" if bounded else "a tie" if row["slower"] else ""
    return f"{'at least ' if bounded else ''}{row['slower']:.1%}"


def _failed(row: Mapping[str, Any]) -> str:
    return row["verdict"] if row["predicted_seconds"] is not None else "cannot run"
