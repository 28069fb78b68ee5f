"""A rule about mixtures of experts: finds buffers of the experts that are mostly empty.

A device allocates a fixed number of rows for its experts. Each row holds one token for one expert. The number is
rounded up to whole tiles, or is the same number of slots for every expert, or suffices for all tokens that the devices
sharing the experts could send. If experts have equal loads, most rows may be empty.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from bytescope.memory.findings.evidence import NOTABLE, TOY, RuleResult
from bytescope.memory.formulas.expert_formulas import rows
from bytescope.memory.formulas.model_shape import ExpertShape
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human

# Scopes of a block whose arrays have a row for each pair of a token and a chosen expert.
_SCOPES = ("dispatch", "experts", "combine")
# Capacity factors to propose, from GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961).
FACTORS = (2.0, 1.25)


class Room(NamedTuple):
    """The size of the experts' buffers on a device, and the part that is used. A row of these buffers holds one token
    for one expert.

    rows: number of allocated rows. filled: number of rows that contain tokens if all experts get equally many.
    """

    rows: int
    filled: int

    @property
    def empty(self) -> float:
        """The fraction of rows that stay empty if all experts get equally many tokens."""
        return 1 - min(self.filled / self.rows, 1.0)


def room_for(experts: ExpertShape, tokens: int, ranks: int) -> Room:
    """Returns the number of rows that a device allocates for its experts, and the number that contain tokens if all
    experts get equally many. A row holds one token for one expert.

    tokens: number of tokens on the device. ranks: number of devices that share the experts.
    """
    return Room(rows(experts, tokens, ranks), tokens * experts.per_token)


def smaller_room(experts: ExpertShape, tokens: int, ranks: int) -> tuple[float, Room] | None:
    """Returns (capacity factor, size of the buffers) for the larger of the capacity factors 2.0 and 1.25 that makes the
    experts' buffers on a device smaller. A factor of 1.25 gives the experts room for 1.25 times the mean number of
    rows.

    Returns None if no factor makes them smaller. This is the case if one device has all experts, because their rows
    then fill whole tiles at any factor.

    tokens: number of tokens on the device. ranks: number of devices that share the experts.
    """
    if not experts.slots and ranks == 1:
        return None
    now = room_for(experts, tokens, ranks)
    for factor in FACTORS:
        room = room_for(dataclasses.replace(experts, capacity=factor), tokens, ranks)
        if room.rows < now.rows:
            return factor, room
    return None


def empty_expert_rows(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if many bytes at the peak are rows of the experts' buffers that stay empty when all experts
    get equally many tokens."""
    facts = program.facts
    question = facts.question if facts else None
    if facts is None or question is None or question.model.experts is None or not facts.expert_rows:
        return None
    tokens = int(question.batch * question.sequence) // facts.devices("sequence")
    shape = question.model.experts, tokens, facts.devices("expert")
    room = room_for(*shape)
    held = dict.fromkeys(_SCOPES, 0)
    for buffer in report.buffers:
        scope = next((scope for scope in _SCOPES if scope in buffer.module.split("/")), "")
        if scope and buffer.at_peak and buffer.memory == "device" and _has_rows(buffer, room.rows):
            held[scope] += buffer.bytes
    total = sum(held.values())
    empty = int(total * room.empty)
    if empty <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    parts = ", ".join(f"{scope} {human(size)}" for scope, size in held.items() if size)
    message = (
        f"expert rows take {human(total)} at the peak ({parts}), of which {human(empty)} is empty if experts "
        f"have equal loads: a device allocates {room.rows:,} rows and fills {room.filled:,}"
    )
    smaller = smaller_room(*shape)
    if smaller is None:
        return RuleResult(empty, message)
    factor, less = smaller
    remedy = (
        f"a capacity of {factor:g} times the mean load, {less.rows:,} rows, should free "
        f"{human(int(total * (1 - less.rows / room.rows)))}; tokens beyond the capacity are dropped and counted"
    )
    return RuleResult(empty, message, remedy)


def _has_rows(buffer: Buffer, count: int) -> bool:
    # One dimension, or adjacent dimensions such as (experts, slots).
    dims = buffer.shape
    return any(
        math.prod(dims[start : start + length]) == count
        for length in (1, 2, 3)
        for start in range(len(dims) - length + 1)
    )
