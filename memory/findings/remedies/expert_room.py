"""Room for rows of experts on a device, and what makes it smaller, for a config of the trainer's. Pure.

A device has room for a number of rows that is known before they are: whole tiles, slots of one size, or the most that
can come from all devices that share the experts. Where experts have equal loads, most of that may stay empty.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from bytescope.memory.config_keys import BATCH_MICRO, DATA_SEQ_LEN, MODEL_MOE_EVERY, MODEL_MOE_KERNEL
from bytescope.memory.findings.remedies.case import Case
from bytescope.memory.formulas.config_formulas import experts_of
from bytescope.memory.formulas.expert_formulas import Experts, rows

# Values of model.capacity_factor to propose: those of GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961).
FACTORS = (2.0, 1.25)


class Room(NamedTuple):
    """The rows of a device: those that there is room for, and those that hold tokens where all loads are equal."""

    rows: int
    filled: int

    @property
    def empty(self) -> float:
        """The share of the room that stays empty then."""
        return 1 - min(self.filled / self.rows, 1.0)


def room_of(case: Case) -> Room | None:
    """The room of a case; None without experts, and for the kernel that has no rows."""
    experts = _experts(case)
    return None if experts is None else _room(case, experts)


def smaller(case: Case) -> tuple[float, Room] | None:
    """The largest of `FACTORS` that makes the room of a case smaller, and that room; None where none does, as on a
    device that has all experts: their rows fill whole tiles whatever the factor."""
    experts = _experts(case)
    if experts is None or not (experts.slots or case.axes["expert"] > 1):
        return None
    now = _room(case, experts)
    rooms = ((factor, _room(case, dataclasses.replace(experts, capacity=factor))) for factor in FACTORS)
    return next(((factor, room) for factor, room in rooms if room.rows < now.rows), None)


def _experts(case: Case) -> Experts | None:
    if MODEL_MOE_EVERY not in case.flat or case.flat[MODEL_MOE_KERNEL] == "dense":
        return None
    return experts_of(case.flat)


def _room(case: Case, experts: Experts) -> Room:
    tokens = case.flat[BATCH_MICRO] * case.flat[DATA_SEQ_LEN] // max(case.axes["context"], 1)
    return Room(rows(experts, tokens, case.axes["expert"]), tokens * experts.per_token)
