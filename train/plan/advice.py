"""Advice for a step that does not fit: the levers left to try, the cheapest one that fits, and the `fit` command. Pure.

In: a report with the program's config (`report.config`, keys of the trainer's configs/base.py). `open_levers` returns
the levers, `tried` calls the caller's compiler for the bytes of the promising ones, `lines` returns the text. For a
command that refuses a report (`report.fits is False`):

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

# Maximum number of variants to compile, and seconds after which no compile should end.
MAX_VARIANTS, MAX_SECONDS = 4, 30.0
# The share of a host's free memory that will most likely be free when the next command begins.
FREE_TO_STAY = 0.95


@dataclasses.dataclass(frozen=True)
class TriedLever:
    """A compiled variant: its lever, and its predicted bytes on one device; None, and why, if it cannot run."""

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
    """Compiles the promising levers, the cheapest first, until one fits; last, all levers that keep the loss curve.

    A lever is promising if the rows that it shrinks are larger than the missing memory.

    Args:
        bytes_of: the predicted bytes on one device of the program with some keys; ValueError if it cannot run.
        tell: called with a line before each compile.
        each_s: seconds that a compile takes, as far as known. No compile starts that would end after `MAX_SECONDS`.
    """
    if report.limit_bytes is None:
        return []
    missing = report.predicted_bytes - report.limit_bytes
    promising = [lever for lever in levers if lever.curve and lever.most(report) >= missing][: MAX_VARIANTS - 1]
    every = together(levers, report)
    if every is not None and every.most(report) >= missing and every.keys not in [lever.keys for lever in promising]:
        promising.append(every)
    began, results = time.monotonic(), list[TriedLever]()
    for lever in promising:
        since = time.monotonic()
        if since - began + each_s > MAX_SECONDS:
            break
        tell(f"does it fit with {lever.flags}?")
        try:
            size = bytes_of(lever.keys)
        except ValueError as error:
            results.append(TriedLever(lever, None, " ".join(str(error).split())))
        else:
            results.append(TriedLever(lever, size))
            if size <= report.limit_bytes:
                break
        each_s = max(each_s, time.monotonic() - since)
    return results


def lines(report: ReportRecord, levers: Sequence[Lever], found: Sequence[TriedLever], fit: str = "") -> list[str]:
    """Returns the advice, line by line: the compiled variants, the levers left to try, and the command that searches.

    found: the variants that were compiled. fit: the `bytescope fit` command; "" leaves it out.
    """
    out: list[str] = []
    limit = report.limit_bytes or 0
    compiled = [(each.bytes, each.lever) for each in found if each.bytes is not None]
    if compiled:
        out.append("compiled with one change, the cheapest first:")
    for size, lever in compiled:
        verdict = "fits" if size <= limit else f"{human(size - limit)} too much"
        out.append(f"  {human(size)}  {verdict}  {lever.flags}")
    known = any(report.breakdown.values())  # whether the report says what each row holds
    tried_levers = [each.lever for each in found]
    left = [lever for lever in levers if lever not in tried_levers and (lever.most(report) or not known)]
    if left and not any(size <= limit for size, _ in compiled):
        most = ", with the most that each can free" if known else ""
        out.append(f"{'not compiled' if compiled else 'left to try'}, the cheapest first{most}:")
        out += [_line_of(lever, report, known) for lever in left]
    if case_of(report) is not None and not levers:
        out.append(
            "the config has no memory lever left: take a smaller model, shorter sequences "
            "(--config.data.seq_len), or more devices"
        )
    if fit and levers:
        out.append(f"the fastest that fits, found by compiling: {fit}")
    return out


def _line_of(lever: Lever, report: ReportRecord, known: bool) -> str:
    """Returns the line of a lever that was not compiled."""
    line = "  "
    if known:
        frees, missing = lever.most(report), report.predicted_bytes - (report.limit_bytes or 0)
        line += f"{human(frees)}  may be enough  " if frees >= missing > 0 else f"{human(frees)}  "
    return f"{line}{lever.flags}  ({lever.costs})" if lever.costs else line + lever.flags


def fit_command(config: str, target: str, overrides: Sequence[tuple[str, str]], report: ReportRecord) -> str:
    """Returns the `bytescope fit` that searches for the fastest configuration of the same task, quoted for a shell; ""
    for a report without a config of the trainer or without a limit.

    Overrides that would fix a lever of the search are left out; the tokens of an update stay.

    Args:
        config, target: as the command line names them; target: "" or "local" for this machine's devices.
        overrides: (dotted key, text) as given.
    """
    case = case_of(report)
    if case is None or report.limit_bytes is None:
        return ""
    words = ["bytescope", "fit", config]
    if target not in ("", "local"):
        words.append(target)
    limit: float = report.limit_bytes
    if report.target.get("platform") == "cpu":
        limit *= FREE_TO_STAY
    # Rounded down to a tenth of a GiB, or below one GiB to a MiB.
    budget = f"{math.floor(10 * limit / GIB) / 10:g}GiB" if limit >= GIB else f"{max(int(limit / MIB), 1)}MiB"
    words.append(f"--budget={budget}")
    if any(key.startswith("batch.") for key, _ in overrides):
        words.append(f"--batch-tokens={case.tokens}")
    words += [f"--config.{key}={text}" for key, text in overrides if not key.startswith(("remat.", "batch."))]
    return shlex.join(words)
