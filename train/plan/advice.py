"""Advice for a step that does not fit: the levers left to try, the cheapest that fits by compiled bytes, `fit`. Pure.

In: a report whose `config` is that of the program (the keys of the trainer's configs/base.py). `open_levers` has the
levers; `tried` asks a caller's compiler for the bytes of the promising ones; `lines` puts it in words. Nothing here
compiles. For a command that refuses a report (`report.fits is False`):

    levers = open_levers(report)
    found = tried(report, levers, bytes_of)  # predicted bytes of the program with these keys; [] without a compiler
    for line in lines(report, levers, found, fit_command(name, target, overrides, report)):
        print(line)
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Sequence

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import GIB, MIB, human
from bytescope.train.plan.config_case import Keys, case_of
from bytescope.train.plan.open_levers import Lever, open_levers, together

__all__ = ["Lever", "TriedLever", "fit_command", "lines", "open_levers", "tried"]

# At most so many variants are compiled, and none begun that would end after so many seconds.
MOST, SECONDS = 4, 30.0
# The share of a host's free memory that will most likely be free when the next command begins.
FREE_TO_STAY = 0.95


@dataclasses.dataclass(frozen=True)
class TriedLever:
    """A variant that was compiled: its lever, and its predicted bytes on one device; None and why for one that cannot
    run."""

    lever: Lever
    bytes: int | None
    why: str = ""


def tried(
    report: ReportRecord,
    levers: Sequence[Lever],
    bytes_of: Callable[[Keys], int],
    tell: Callable[[str], None] = lambda line: None,
    each_s: float = 0.0,
) -> list[TriedLever]:
    """Compiles the promising levers, the cheapest first, until one fits; then all that keep the curve together.

    A lever is promising if the rows that it shrinks are larger than what is missing.

    Args:
        bytes_of: the predicted bytes on one device of the program with some keys; ValueError for one that cannot run.
        tell: called with a line before each compile.
        each_s: seconds that a compile takes, as far as known: none is begun that would end after `SECONDS`.
    """
    if report.limit_bytes is None:
        return []
    missing = report.predicted_bytes - report.limit_bytes
    promising = [lever for lever in levers if lever.curve and lever.most(report) >= missing][: MOST - 1]
    whole = together(levers, report)
    if whole is not None and whole.most(report) >= missing and whole.keys not in [each.keys for each in promising]:
        promising.append(whole)
    began, found = time.monotonic(), []
    for lever in promising:
        if time.monotonic() - began + each_s > SECONDS:
            break
        tell(f"does it fit with {lever.flags}?")
        since = time.monotonic()
        try:
            found.append(TriedLever(lever, bytes_of(lever.keys)))
        except ValueError as error:
            found.append(TriedLever(lever, None, " ".join(str(error).split())))
        each_s = max(each_s, time.monotonic() - since)
        if found[-1].bytes is not None and found[-1].bytes <= report.limit_bytes:
            break
    return found


def lines(report: ReportRecord, levers: Sequence[Lever], found: Sequence[TriedLever], fit: str = "") -> list[str]:
    """The advice, line by line: what was compiled, else what is left to try, and the command that searches.

    fit: that command; "" leaves it out.
    """
    out: list[str] = []
    compiled = [(each.bytes, each.lever) for each in found if each.bytes is not None]
    if compiled:
        out.append("compiled with one change, the cheapest first:")
        out += [f"  {human(size)}  {_verdict(size, report)}  {lever.flags}" for size, lever in compiled]
    fits = any(size <= (report.limit_bytes or 0) for size, _ in compiled)
    known = any(report.breakdown.values())
    left = [
        lever for lever in levers if lever not in [each.lever for each in found] and (lever.most(report) or not known)
    ]
    if not fits and left:
        most = ", with the most that each can free" if known else ""
        out.append(f"{'not compiled' if compiled else 'left to try'}, the cheapest first{most}:")
        out += [_untried(lever, report, known) for lever in left]
    if case_of(report) is not None and not levers:
        out.append(
            "the config has no memory lever left: take a smaller model, shorter sequences "
            "(--config.data.seq_len), or more devices"
        )
    if fit and levers:
        out.append(f"the fastest that fits, found by compiling: {fit}")
    return out


def _untried(lever: Lever, report: ReportRecord, known: bool) -> str:
    """A line on a lever that nobody compiled; `known`: whether the report says what each row holds."""
    missing = report.predicted_bytes - (report.limit_bytes or 0)
    enough = "  may be enough" if known and lever.most(report) >= missing > 0 else ""
    size = f"{human(lever.most(report))}{enough}  " if known else ""
    return f"  {size}{lever.flags}{f'  ({lever.costs})' if lever.costs else ''}"


def _verdict(size: int, report: ReportRecord) -> str:
    missing = size - (report.limit_bytes or 0)
    return "fits" if missing <= 0 else f"{human(missing)} too much"


def fit_command(config: str, target: str, overrides: Sequence[tuple[str, str]], report: ReportRecord) -> str:
    """The `bytescope fit` that searches for the fastest configuration of the same task, quoted for a shell; "" for a
    report that has no config of the trainer's or no limit.

    Overrides that would hold a lever of the search are left out; the tokens of an update stay.

    Args:
        config: as the command line names it. target: likewise, "" or "local" for the devices at hand.
        overrides: (dotted key, text) as given.
    """
    case = case_of(report)
    if case is None or report.limit_bytes is None:
        return ""
    held = [key for key, _ in overrides if key.startswith(("remat.", "batch."))]
    words = [
        "bytescope",
        "fit",
        config,
        *([target] if target not in ("", "local") else []),
        f"--budget={_budget(report)}",
        *([f"--batch-tokens={case.tokens}"] if any(key.startswith("batch.") for key in held) else []),
        *(f"--config.{key}={text}" for key, text in overrides if key not in held),
    ]
    return shlex.join(words)


def _budget(report: ReportRecord) -> str:
    """The limit as text, rounded down to a tenth of a GiB, or to a MiB below one. What is free of a host's memory
    changes: there it is a little less."""
    limit = (report.limit_bytes or 0) * (1.0 if report.target.get("platform") != "cpu" else FREE_TO_STAY)
    return f"{math.floor(10 * limit / GIB) / 10:g}GiB" if limit >= GIB else f"{max(int(limit / MIB), 1)}MiB"
