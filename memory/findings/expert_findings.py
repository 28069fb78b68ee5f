"""A rule on mixtures of experts: what their rows hold, and how much of it stays empty.

A device has room for a number of rows that is known before they are: whole tiles, slots of one size, or the most that
can come from all devices that share the experts. If experts have equal loads, most of that may stay empty.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from bytescope.memory.findings.evidence import NOTABLE, TOY, Found
from bytescope.memory.formulas.expert_formulas import rows
from bytescope.memory.formulas.model_shape import ExpertShape
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human

# Scopes of a block in which arrays have a row for each choice.
_SCOPES = ("dispatch", "experts", "combine")
# Capacity factors to propose: those of GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961).
FACTORS = (2.0, 1.25)


class Room(NamedTuple):
    """The rows of a device: those that there is room for, and those that hold tokens if all loads are equal."""

    rows: int
    filled: int

    @property
    def empty(self) -> float:
        """The share of the room that stays empty then."""
        return 1 - min(self.filled / self.rows, 1.0)


def room_for(experts: ExpertShape, tokens: int, ranks: int) -> Room:
    """The room of a device of `tokens`, where `ranks` devices share the experts."""
    return Room(rows(experts, tokens, ranks), tokens * experts.per_token)


def smaller_room(experts: ExpertShape, tokens: int, ranks: int) -> tuple[float, Room] | None:
    """The largest of `FACTORS` that makes the room smaller, and that room.

    None if none does, as on a device that has all experts: their rows fill whole tiles whatever the factor.
    """
    if not experts.slots and ranks == 1:
        return None
    now = room_for(experts, tokens, ranks)
    for factor in FACTORS:
        room = room_for(dataclasses.replace(experts, capacity=factor), tokens, ranks)
        if room.rows < now.rows:
            return factor, room
    return None


def empty_expert_rows(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Room at the peak for rows of experts that do not come where loads are equal."""
    facts = program.facts
    question = facts.question if facts else None
    if facts is None or question is None or question.model.experts is None or not facts.expert_rows:
        return None
    tokens = int(question.batch * question.sequence) // facts.devices("sequence")
    shape = question.model.experts, tokens, facts.devices("expert")
    room = room_for(*shape)
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
    found = smaller_room(*shape)
    if found is None:
        return Found(empty, message)
    factor, less = found
    remedy = (
        f"room for {factor:g} times the mean, {less.rows:,} rows, should free "
        f"{human(int(total * (1 - less.rows / room.rows)))}; rows beyond it are dropped and counted"
    )
    return Found(empty, message, remedy)


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
