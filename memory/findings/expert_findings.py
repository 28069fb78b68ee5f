"""Rules on mixtures of experts, of a config of the trainer's: what their rows hold, and how much of it stays empty."""

from __future__ import annotations

import math

from bytescope.memory.config_keys import MODEL_CAPACITY_FACTOR
from bytescope.memory.findings.evidence import NOTABLE, TOY, Found
from bytescope.memory.findings.remedies.case import case_of
from bytescope.memory.findings.remedies.expert_room import room_of, smaller
from bytescope.memory.findings.remedies.open_levers import flags
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, ReportRecord
from bytescope.memory.units import human

# Scopes of a block in which arrays have a row for each choice.
_SCOPES = ("dispatch", "experts", "combine")


def empty_expert_rows(report: ReportRecord, program: PlacedProgram) -> Found | None:
    """Room at the peak for rows of experts that do not come where loads are equal."""
    case = case_of(report)
    room = room_of(case) if case is not None else None
    if case is None or room is None:
        return None
    held = dict.fromkeys(_SCOPES, 0)
    for buffer in report.buffers:
        scope = _scope(buffer)
        if scope and buffer.at_peak and buffer.memory == "device" and _has_rows(buffer, room.rows):
            held[scope] += buffer.bytes
    total = sum(held.values())
    empty = int(total * room.empty)
    if empty <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    parts = ", ".join(f"{scope} {human(size)}" for scope, size in held.items() if size)
    message = (
        f"rows of experts hold {human(total)} at the peak ({parts}), {human(empty)} of it empty where experts "
        f"have equal loads: a device has room for {room.rows:,} rows, of which {room.filled:,} come"
    )
    found = smaller(case)
    if found is None:
        return Found(empty, message)
    factor, less = found
    remedy = (
        f"room for {factor:g} times the mean, {less.rows:,} rows, should free "
        f"{human(int(total * (1 - less.rows / room.rows)))}; rows beyond it are dropped and counted"
    )
    return Found(empty, message, remedy, flags({MODEL_CAPACITY_FACTOR: f"{factor:g}"}))


def _scope(buffer: Buffer) -> str:
    """Which of the scopes made an array, "" for none."""
    path = buffer.module.split("/")
    return next((scope for scope in _SCOPES if scope in path), "")


def _has_rows(buffer: Buffer, count: int) -> bool:
    """Whether an array has `count` rows of experts, in one dimension or in two or three that follow each other: tiles
    and their rows; peers, experts and slots."""
    dims = buffer.shape
    return any(
        math.prod(dims[start : start + length]) == count
        for length in (1, 2, 3)
        for start in range(len(dims) - length + 1)
    )
