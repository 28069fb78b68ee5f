"""Replays a run on models of jax's GPU allocators, and shows in a table which allocators have enough memory for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.allocators.program_events import ProgramCall, call_of
from bytescope.memory.allocators.replay import AllocatorKind, Device, Replay, replay_all
from bytescope.memory.analysis import verdict_of
from bytescope.memory.devices.chips import GPU_PLATFORMS
from bytescope.memory.devices.limits import pool_bytes
from bytescope.memory.devices.platform import JAX_FRACTION
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import CARD, ReportRecord
from bytescope.memory.units import GIB, human
from bytescope.memory.view.object_table import Table
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import Prose

# Default number of calls of each program in a replay. From the third call on, the addresses of the arrays repeat.
CALLS = 3
COLUMNS = (
    ColumnView("allocator", "allocator", "text"),
    ColumnView("peak_in_use_bytes", "peak in use", "bytes", short="peak"),
    ColumnView("reserved_bytes", "reserved", "bytes"),
    ColumnView("largest_block_bytes", "largest block", "bytes", short="max block"),
    ColumnView("largest_free_bytes", "largest free", "bytes", short="max free"),
    ColumnView("fragmentation", "fragmentation", "share", short="fragm."),
    ColumnView("outside_bytes", "outside the pool", "bytes", short="outside"),
    ColumnView("verdict", "verdict", "text", verdict=lambda row: row["verdict"]),
)


def replay(programs: ReportRecord | Iterable[ReportRecord | tuple[ReportRecord, int]]) -> Table:
    """Replays a run on models of jax's allocators for GPUs: BFC with a preallocated pool (jax's default) and with a
    growing pool, `cuda_async` (not on AMD GPUs) and `platform`. Returns a table with one row per allocator.

        memory.replay([(init, 1), (step, 3), (evaluation, 2)])

    Args:
        programs: the reports of the programs in the order in which the run calls them, or one report. A report may be
            paired with its number of calls; the default is 3. If earlier programs left arrays of the same sizes on the
            device, these become the program's arguments. Arguments with the role "batch" are allocated for each call.
            If a program donates no argument, each of its results replaces the argument of the same size after a call.

    Keys of a row, with sizes in bytes on one device:

    - allocator, setting: the name, and the environment variable that chooses the allocator ("" for the default).
    - peak_in_use_bytes, peak_program: maximum of the bytes in use, and the program that ran at this maximum.
    - reserved_bytes: maximum of the bytes that the allocator took from the device.
    - largest_block_bytes: the largest contiguous block that the run requests.
    - largest_free_bytes, fragmentation: the largest free block, and the fraction (0 to 1) of the free bytes outside of
      it, when the first request failed; at the peak if no request failed.
    - outside_bytes: memory outside of the allocator, such as the CUDA context and NCCL buffers.
    - limit_bytes, verdict: bytes that the allocator may use; "fits", "tight" or "exceeds".
    - reason: why the run does not fit, such as the request that failed; "" if it fits.
    - occupancy: a drawing of the pool when a request failed, as XLA prints it; "" otherwise.

    Raises:
      ReportError: there is no report, a number of calls is not a positive integer, or the programs were not compiled
          for the same GPU.
    """
    pairs = [_checked(item) for item in ([programs] if isinstance(programs, ReportRecord) else programs)]
    if not pairs:
        raise ReportError("replay needs the report of a program: give one report or a list of reports")
    device = device_of(*(report for report, _ in pairs))
    rows = rows_of([(call_of(report), count) for report, count in pairs], device)
    return Table(COLUMNS, rows, title="allocators", note=" ".join(sentences(rows)))


def device_of(*reports: ReportRecord) -> Device:
    """Returns the memory of the GPU for which the programs of the reports were compiled, and the size of jax's pool.

    Raises ReportError if the programs were not compiled for the same GPU.
    """
    target = reports[0].target
    names = {str(report.target.get("name", "")) for report in reports}
    if len(names) > 1:
        raise ReportError(f"the programs are compiled for {' and '.join(sorted(names))}: compile them for one target")
    check_target(target)
    memory, pool = target["device_memory_bytes"], target["limit_bytes"]
    if target.get("is_described"):  # with `cuda_async` or `platform`, the target's limit is not the size of the pool
        pool = pool_bytes(memory, target.get("memory_fraction") or JAX_FRACTION.value)
    outside = max(call_of(report).outside for report in reports)
    # jaxlib 0.10.2 does not have XLA's flag for a partitioned pool. In jaxlib 0.12.0.1, the flag is on by default.
    partitions = _version(reports[0]) >= (0, 11)
    return Device(memory, pool, outside, partitions, is_cuda=target["platform"] == "cuda")


def _version(report: ReportRecord) -> tuple[int, int]:
    # The first two numbers of jaxlib's version. If the version is unknown, the program is replayed as with the newest.
    found = re.match(r"(\d+)\.(\d+)", report.versions.get("jaxlib", ""))
    return (int(found[1]), int(found[2])) if found else (1, 0)


def check_target(target: Mapping[str, Any]) -> None:
    """Raises ReportError if the target is not a GPU. jax uses the allocators that are modelled here only on GPUs.
    `target`: the target of a report as JSON."""
    if target.get("platform") not in GPU_PLATFORMS or not target.get("device_memory_bytes"):
        raise ReportError(
            f"{target.get('name') or 'no target'} has none of jax's GPU allocators: compile for a GPU, such as h100"
        )


def rows_of(calls: Sequence[tuple[ProgramCall, int]], device: Device) -> tuple[dict[str, Any], ...]:
    """Replays the calls of programs on each allocator. Returns the rows of the table; `replay` describes their keys."""
    return tuple(_row(kind, result, device) for kind, result in replay_all(calls, device))


def render(
    rows: Sequence[dict[str, Any]], calls: Sequence[tuple[ProgramCall, int]], report: ReportRecord
) -> RenderableType:
    """Returns the table of allocators for the terminal, with the reason for each failure.

    rows: the rows of the table. calls: the programs of the run, each with its number of calls. report: the report of
    the training step.
    """
    order = ", ".join(f"{count} x {call.name}" if count > 1 else call.name for call, count in calls)
    outside = ", ".join(f"{row.name} {human(row.bytes)}" for row in report.runtime_overheads if row.where == CARD)
    parts: list[RenderableType] = [Text("allocators, GiB", style="bold"), terminal_table(TableView(COLUMNS, rows), GIB)]
    parts += [Prose(line) for line in sentences(rows)]
    parts += [Text(f"{row['allocator']}: {row['occupancy']}") for row in rows if row["occupancy"]]
    parts.append(Prose(f"replayed: {order}; outside the pool: {outside or 'nothing known'}", "dim"))
    return Group(*parts)


def _checked(item: ReportRecord | tuple[ReportRecord, int]) -> tuple[ReportRecord, int]:
    report, count = item if isinstance(item, tuple) and len(item) == 2 else (item, CALLS)
    if not isinstance(report, ReportRecord):
        raise ReportError(f"replay takes reports, not {type(report).__name__}: make one with memory.analyze")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ReportError(f"{count!r} is not a number of calls of {report.title}: give an integer of 1 or more")
    return report, count


def _row(kind: AllocatorKind, result: Replay, device: Device) -> dict[str, Any]:
    limit = kind.limit(device)
    excess = device.pool + device.outside - device.memory if kind.is_preallocated else 0
    reason = ""
    if result.failure:
        reason = _reason(result)
    elif excess > 0:
        reason = (
            f"the GPU's memory is {human(excess)} too small: the pool takes {human(device.pool)}, and "
            f"{human(device.outside)} are needed outside of the pool"
        )
    return {
        "allocator": kind.name,
        "setting": kind.setting,
        "peak_in_use_bytes": result.peak_in_use,
        "peak_program": result.peak_program,
        "reserved_bytes": result.peak_reserved,
        "largest_block_bytes": result.largest_request,
        "largest_free_bytes": result.largest_free,
        "fragmentation": result.fragmentation,
        "outside_bytes": device.outside,
        "limit_bytes": limit,
        "verdict": "exceeds" if reason else verdict_of(result.peak_in_use, limit).verdict,
        "reason": reason,
        "occupancy": result.failure.occupancy if result.failure else "",
    }


def _reason(result: Replay) -> str:
    assert result.failure is not None
    event, free, _ = result.failure
    size = event.bytes or 0
    asked = f"{event.program} requests {human(size)} ({event.label})"
    if free >= size:
        return (
            f"{asked}, and {human(free)} are free, but the largest free block has only {human(result.largest_free)} "
            "(fragmentation)"
        )
    return f"{asked}, but only {human(free)} are free"


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each allocator on which the run fails. If jax's default allocator is one of them, also
    returns a sentence with the setting that chooses an allocator on which the run fits."""
    sentences = [f"{row['allocator']}: {row['reason']}." for row in rows if row["reason"]]
    others = [row for row in rows if row["setting"] and not row["reason"]]
    if rows[0]["reason"] and others:
        sentences.append(
            f"{others[0]['allocator']} has enough memory for the run: set {others[0]['setting']} before jax starts."
        )
    return sentences
