"""The state ledger: bytes per parameter by role and dtype, the accounting in which bf16 AdamW is 16 or 20.

State that lives through the step is counted from the arguments; gradients are those in the shape that the
parameter is stored in, at the point where most of them are alive together. All of it is what ONE device holds,
so bytes per parameter divide by the parameters it holds.
"""

from __future__ import annotations

from collections.abc import Iterable

from memory.records import Buffer, LedgerRow

# Arguments in these roles are state; data and outputs are not.
STATE = ("params", "gradients", "accumulator", "optimizer")


def rows(buffers: Iterable[Buffer], elements: dict[int, int]) -> tuple[LedgerRow, ...]:
    """Ledger rows of a report's buffers, a total last.

    `elements`: position in `buffers` -> number of values the buffer holds.
    """
    buffers = tuple(buffers)
    stored = {_core(b.shape) for b in buffers if b.phase == "argument" and b.category == "params"}
    state: dict[tuple[str, str], list[int]] = {}
    gradients: list[tuple[Buffer, int]] = []
    parameters = 0
    for position, buffer in enumerate(buffers):
        count = elements.get(position, 0)
        if buffer.phase == "argument" and buffer.category in STATE:
            total = state.setdefault((buffer.category, buffer.dtype), [0, 0])
            total[0] += count
            total[1] += buffer.bytes
            parameters += count if buffer.category == "params" else 0
        elif buffer.category == "gradients" and buffer.memory == "device" and _core(buffer.shape) in stored:
            gradients.append((buffer, count))
    for buffer, count in _together(gradients):
        total = state.setdefault(("gradients", buffer.dtype), [0, 0])
        total[0] += count
        total[1] += buffer.bytes
    out = [LedgerRow(role, dtype, count, size, _per(size, parameters))
           for (role, dtype), (count, size) in sorted(state.items(), key=_place)]
    size = sum(row.bytes for row in out)
    return (*out, LedgerRow("total", "", sum(row.elements for row in out), size, _per(size, parameters)))


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions without ones, in no order."""
    return tuple(sorted(dim for dim in shape if dim != 1))


def _together(items: list[tuple[Buffer, int]]) -> list[tuple[Buffer, int]]:
    """Those alive at the point where they take most."""
    best, most = [], 0
    for point in sorted({buffer.start for buffer, _ in items}):
        alive = [item for item in items if item[0].start <= point <= item[0].end]
        size = sum(buffer.bytes for buffer, _ in alive)
        if size > most:
            best, most = alive, size
    return best


def _place(item: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
    (role, dtype), _ = item
    return STATE.index(role), dtype


def _per(size: int, parameters: int) -> float:
    return size / parameters if parameters else 0.0
