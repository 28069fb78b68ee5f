"""What expert parallelism sends: rows of tokens to the devices of their experts and back, bytes per step and device.

Slots of fixed size by all-to-all after Lepikhin et al. 2020 (arXiv 2006.16668), rows of varying number after Gale et
al. 2022 (arXiv 2211.15841), tokens gathered by all as Megatron-Core's all-gather dispatcher. A layer moves rows there
and back, and so does its backward pass; a policy that does not keep the dispatched rows moves them there once more.
The router's weights go with the rows, one float32 each, and have one gradient. Left out: counts of rows, one number an
expert and device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bytescope.memory.formulas.expert_formulas import ExpertShape, slots

_NUMBER = 4


class Moved(NamedTuple):
    """Bytes of one move on a device: of the rows, and of a number for each."""

    rows: float
    numbers: float


class Sent(NamedTuple):
    """A kind of collective of one layer and micro-step: how often rows and numbers are moved by it in all, and the
    formula in words."""

    kind: str
    bytes: float
    formula: str


def _gathered(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    return Moved(tokens * size * width * itemsize, tokens * size * experts.per_token * _NUMBER)


def _slotted(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    rows = experts.count * slots(experts, tokens)
    return Moved(rows * width * itemsize, rows * _NUMBER)


def _chosen(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    rows = tokens * experts.per_token
    return Moved(rows * width * itemsize, rows * _NUMBER)


# How tokens reach their experts -> (bytes of one move, (kind, times that rows move, times that numbers do, both without
# recomputation, how often each of them is repeated with it, unit of the formula)). Tokens are gathered with their
# experts' numbers and weights.
EXCHANGES: dict[str, tuple[Callable[..., Moved], tuple[tuple[str, int, int, int, int, str], ...]]] = {
    "allgather": (
        _gathered,
        (("all-gather", 2, 2, 1, 2, "tokens of the group"), ("reduce-scatter", 2, 1, 0, 0, "tokens of the group")),
    ),
    "all_to_all": (_slotted, (("all-to-all", 4, 2, 1, 1, "slots"),)),
    "ragged_all_to_all": (_chosen, (("ragged-all-to-all", 4, 2, 1, 1, "k x tokens"),)),
}


def sent(
    exchange: str,
    experts: ExpertShape,
    *,
    tokens: int,
    width: int,
    itemsize: int,
    size: int,
    again: int = 0,
    redone: int = 0,
) -> list[Sent]:
    """What one layer sends in one micro-step, forward and backward.

    Args:
        exchange: a row of EXCHANGES. tokens: of a device. width: D; itemsize: bytes of an element of an activation.
        size: devices that share the experts. again: how often recomputation moves rows once more; redone: how often it
            moves their numbers.
    """
    measure, kinds = EXCHANGES[exchange]
    moved = measure(experts, tokens, width, itemsize, size)
    out = []
    for kind, rows, numbers, more_rows, more_numbers, unit in kinds:
        times, with_numbers = rows + more_rows * again, numbers + more_numbers * redone
        out.append(Sent(kind, times * moved.rows + with_numbers * moved.numbers, f"{times} x {unit} per layer"))
    return out
