"""Advice for a step that does not fit: the memory savings ("levers") left to try, the cheapest that fits, and the
`fit` command.

The input is a report with the program's config (`report.config`, with the keys of configs/base.py). `open_levers`
returns the levers, `try_levers` asks the caller's compiler for the bytes of the promising ones, and `lines` returns
the text. This module compiles nothing itself. A command that refuses a report (`report.fits is False`) prints the
advice like this:

    levers = open_levers(report)
    tried = try_levers(report, levers, bytes_of)  # bytes_of: config keys -> predicted bytes; [] without a compiler
    for line in lines(report, levers, tried, fit_command(name, target, overrides, report)):
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
from bytescope.train.plan.open_levers import Lever, combine_levers, open_levers

__all__ = ["Lever", "TriedLever", "fit_command", "lines", "open_levers", "try_levers"]

# Maximum number of variants to compile, and the seconds within which every compile should end.
MAX_VARIANTS, MAX_SECONDS = 4, 30.0
# The fraction of a host's free memory that will most likely still be free when the next command begins.
LIKELY_FREE = 0.95


@dataclasses.dataclass(frozen=True)
class TriedLever:
    """A memory saving ("lever": config keys that reduce memory) whose program was compiled to see whether it fits on a
    device.

    Attributes:
        lever: the memory saving.
        bytes: the predicted bytes of the program on one device; None if the program cannot run.
        why: the reason why the program cannot run; "" if it can.
    """

    lever: Lever
    bytes: int | None
    why: str = ""


def try_levers(
    report: ReportRecord,
    levers: Sequence[Lever],
    bytes_of: Callable[[Keys], int],
    tell: Callable[[str], None] = lambda line: None,
    each_s: float = 0.0,
) -> list[TriedLever]:
    """Compiles a training step that does not fit on a device with one memory saving ("lever": config keys to change)
    after another, until one fits. Returns the compiled variants.

    Only levers that keep the loss curve and can free at least the missing memory are compiled, those with the lowest
    cost in time first. The last variant combines all levers that keep the loss curve and use no host memory.

    Args:
        report: the report of the step that does not fit.
        levers: the candidates, from `open_levers`.
        bytes_of: returns the predicted bytes on one device of the program with the given config keys. It raises
            ValueError if the program cannot run.
        tell: called with a line of text before each compile.
        each_s: the seconds that one compile is expected to take; 0 if unknown. A compile that would end later than
            `MAX_SECONDS` after the first one began is not started.
    """
    if report.limit_bytes is None:
        return []
    missing = report.predicted_bytes - report.limit_bytes
    promising = [lever for lever in levers if lever.curve and lever.max_freed_bytes(report) >= missing][
        : MAX_VARIANTS - 1
    ]
    every = combine_levers(levers, report)
    if (
        every is not None
        and every.max_freed_bytes(report) >= missing
        and every.keys not in [lever.keys for lever in promising]
    ):
        promising.append(every)
    began, results = time.monotonic(), list[TriedLever]()
    for lever in promising:
        since = time.monotonic()
        if since - began + each_s > MAX_SECONDS:
            break
        tell(f"compiling with {lever.flags}")
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


def lines(report: ReportRecord, levers: Sequence[Lever], tried: Sequence[TriedLever], fit: str = "") -> list[str]:
    """Returns the advice for a step that does not fit, line by line.

    The advice lists the compiled variants, the memory savings ("levers": config keys to change) left to try, and the
    `bytescope fit` command.

    Args:
        report: the report of the step that does not fit.
        levers: the memory savings that the config does not use yet, from `open_levers`.
        tried: the variants that were compiled.
        fit: the `bytescope fit` command; "" to print none.
    """
    out: list[str] = []
    limit = report.limit_bytes or 0
    compiled = [(each.bytes, each.lever) for each in tried if each.bytes is not None]
    if compiled:
        out.append("compiled with one change, the cheapest first:")
    for size, lever in compiled:
        verdict = "fits" if size <= limit else f"{human(size - limit)} too much"
        out.append(f"  {human(size)}  {verdict}  {lever.flags}")
    bytes_known = any(report.breakdown.values())  # whether the report has the bytes of each category
    tried_levers = [each.lever for each in tried]
    left = [
        lever for lever in levers if lever not in tried_levers and (lever.max_freed_bytes(report) or not bytes_known)
    ]
    if left and not any(size <= limit for size, _ in compiled):
        sizes = ", with the maximum that each can free" if bytes_known else ""
        out.append(f"{'not compiled' if compiled else 'left to try'}, the cheapest first{sizes}:")
        out += [_format_lever(lever, report, bytes_known) for lever in left]
    if case_of(report) is not None and not levers:
        out.append(
            "the config already uses all memory savings: use a smaller model, shorter sequences "
            "(--config.data.seq_len), or more devices"
        )
    if fit and levers:
        out.append(f"to find the fastest configuration that fits, by compiling: {fit}")
    return out


def _format_lever(lever: Lever, report: ReportRecord, bytes_known: bool) -> str:
    line = "  "
    if bytes_known:
        frees, missing = lever.max_freed_bytes(report), report.predicted_bytes - (report.limit_bytes or 0)
        line += f"{human(frees)}  may be enough  " if frees >= missing > 0 else f"{human(frees)}  "
    return f"{line}{lever.flags}  ({lever.costs})" if lever.costs else line + lever.flags


def fit_command(config: str, target: str, overrides: Sequence[tuple[str, str]], report: ReportRecord) -> str:
    """Returns the `bytescope fit` command that searches for the fastest configuration of the same task, quoted for a
    shell.

    The command has the overrides except `remat.*` and `batch.*`, which the search chooses. The number of tokens per
    update stays the same. Returns "" if the report is not about one of the trainer's configs, or has no memory limit.

    Args:
        config: the config as the command line names it.
        target: the target as the command line names it; "" or "local" for the devices of this machine.
        overrides: pairs (dotted key, text) as the command line gives them.
        report: the report of the step that does not fit.
    """
    case = case_of(report)
    if case is None or report.limit_bytes is None:
        return ""
    words = ["bytescope", "fit", config]
    if target not in ("", "local"):
        words.append(target)
    limit: float = report.limit_bytes
    if report.target.get("platform") == "cpu":
        limit *= LIKELY_FREE
    # The budget is rounded down to a tenth of a GiB, or to a MiB if it is less than one GiB.
    budget = f"{math.floor(10 * limit / GIB) / 10:g}GiB" if limit >= GIB else f"{max(int(limit / MIB), 1)}MiB"
    words.append(f"--budget={budget}")
    if any(key.startswith("batch.") for key, _ in overrides):
        words.append(f"--batch-tokens={case.tokens}")
    words += [f"--config.{key}={text}" for key, text in overrides if not key.startswith(("remat.", "batch."))]
    return shlex.join(words)
