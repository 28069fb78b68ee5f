"""Every way in which a block can keep its tensors, and which of them are worth having. Pure.

A pattern says of each named tensor of a block whether it is kept on the device, kept in host memory, or recomputed.
What is kept in fact is what the backward pass then reads: a name that nothing reads costs nothing, and is dropped. All
choices of names are walked at once, as columns of one table, and only the Pareto-optimal ones in bytes, time and bytes
on the host stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from bytescope.memory.remat.layer_graph import CARRY, Block

# How often the bytes of a tensor are read or written because it is kept: copied into the stack of its loop and out of
# it; where it is offloaded, to the host and back; where a kernel recomputes it, written and read.
STACKED, OFFLOADED, RECOMPUTED = 4.0, 2.0, 2.0
# So many names are chosen freely; of more, the smallest are kept wherever the backward pass reads them.
MOST_NAMES = 18


class Rates(NamedTuple):
    """FLOP/s of one device by dtype (a key of `Target.peak_flops`), bytes/s of its memory. `devices`: how many."""

    flops: Mapping[str, float]
    memory: float
    devices: int = 1


@dataclasses.dataclass(frozen=True, order=True)
class Pattern:
    """What one block keeps: `bytes` on one device, `host_bytes` in host memory, its input included in one of them;
    `flops` that it recomputes, over all devices; `seconds` of that and of moving what it keeps. `save`, `offload`:
    names. `policy`: a row of the trainer's policies, "" for a choice of names."""

    bytes: int
    seconds: float
    host_bytes: int = 0
    flops: int = 0
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    policy: str = ""

    def text(self) -> str:
        """As `remat.layers` writes it: `q_rot+v+block_in@host`, or the name of a policy."""
        return self.policy or "+".join([*self.save, *(f"{name}@host" for name in self.offload)]) or "full"


def patterns_of(block: Block, rates: Rates, *, offload: bool = False, cost: str = "seconds") -> list[Pattern]:
    """The Pareto-optimal patterns of a block, fewest bytes first.

    Args:
        offload: whether tensors may go to host memory. cost: the field of a pattern that is to be small.
    """
    table = _Table(block, rates)
    found: dict[tuple[str, ...], tuple[float, int]] = {}
    kept = np.packbits(table.kept, axis=0).T.copy()
    _, first = np.unique(kept, axis=0, return_index=True)
    for column in first:
        names = tuple(name for name, row in zip(table.names, table.kept) if row[column])
        found[names] = float(table.seconds[column]), int(table.flops[column])
    out = []
    for names, (seconds, flops) in found.items():
        sizes = {name: table.bytes[name] for name in names}
        total = block.carry_bytes + sum(sizes.values())
        out += [
            Pattern(
                total - moved,
                seconds + _kept_seconds(total - moved, moved, rates),
                moved,
                flops,
                tuple(n for n in names if n not in offloaded),
                offloaded,
            )
            for offloaded, moved in _offloads(block, sizes, offload)
        ]
    return undominated(out, cost)


def _kept_seconds(on_device: int, offloaded: int, rates: Rates) -> float:
    """Seconds of the device's memory for moving the bytes that a block keeps."""
    return (STACKED * on_device + OFFLOADED * offloaded) / rates.memory


def _offloads(block: Block, sizes: Mapping[str, int], offload: bool) -> list[tuple[tuple[str, ...], int]]:
    """(names in host memory, their bytes), one choice for each sum of bytes."""
    stay = {other for name, others in block.bound.items() if name in sizes for other in (name, *others)}
    movable = {CARRY: block.carry_bytes, **{name: size for name, size in sizes.items() if name not in stay}}
    if not offload:
        return [((), 0)]
    sums: dict[int, tuple[str, ...]] = {0: ()}
    for name, size in movable.items():
        sums = {**{total + size: (*names, name) for total, names in sums.items()}, **sums}
    return [(names, total) for total, names in sums.items()]


def undominated(patterns: list[Pattern], cost: str = "seconds") -> list[Pattern]:
    """The Pareto-optimal patterns in bytes, cost and host bytes, sorted by bytes; one of each set of equals.

    `cost`: the field of a pattern that is to be small.
    """

    def costs(pattern: Pattern) -> float:
        return getattr(pattern, cost)

    ordered = sorted(patterns, key=lambda p: (p.bytes, costs(p), p.host_bytes, p.seconds, len(p.offload), p.text()))
    out: list[Pattern] = []
    least, host = np.empty(0), np.empty(0)
    for pattern in ordered:
        if not np.any((least <= costs(pattern)) & (host <= pattern.host_bytes)):
            out.append(pattern)
            least, host = np.append(least, costs(pattern)), np.append(host, pattern.host_bytes)
    return out


class _Table:
    """A column for every choice of names: which are kept, and what is recomputed.

    Attributes:
        names, bytes: the names that can matter, in order; name -> bytes kept for it on one device.
        kept: bool [names, choices]; seconds, flops: float [choices], of what is recomputed.
    """

    def __init__(self, block: Block, rates: Rates, wanted: Collection[str] | None = None):
        """`wanted`: the one choice to look at, None for every choice."""
        self.block = block
        self.bytes = _kept_bytes(block)
        read = _ever_needed(block)
        self.names = [name for name in block.names if name in read]
        self._walk(rates, self._all() if wanted is None else self._one(wanted))

    def _all(self) -> dict[str, np.ndarray]:
        """Every choice of names but those that keep a name and not what it is bound to."""
        fixed = set(sorted(self.names, key=self.bytes.get)[: max(len(self.names) - MOST_NAMES, 0)])
        free = [name for name in self.names if name not in fixed]
        choices = np.arange(2 ** len(free), dtype=np.uint32)
        chosen = {name: (choices >> bit & 1).astype(bool) for bit, name in enumerate(free)}
        chosen |= {name: np.ones(len(choices), bool) for name in fixed}
        good = np.ones(len(choices), bool)
        for name, others in self.block.bound.items():
            for other in others:
                if name in chosen and other in chosen:
                    good &= ~chosen[name] | chosen[other]
        return {name: row[good] for name, row in chosen.items()}

    def _one(self, wanted: Collection[str]) -> dict[str, np.ndarray]:
        """The choice of these names and of those bound to them."""
        with_bound = {*wanted, *(other for name in wanted for other in self.block.bound.get(name, ()))}
        return {name: np.array([name in with_bound]) for name in self.names}

    def _walk(self, rates: Rates, chosen: Mapping[str, np.ndarray]) -> None:
        count = len(next(iter(chosen.values()))) if chosen else 1
        none = np.zeros(count, bool)
        need = {value: np.ones(count, bool) for value in self.block.read}
        kept = {name: none.copy() for name in self.names}
        self.seconds, self.flops = np.zeros(count), np.zeros(count)
        makers = _bound_makers(self.block)
        for step in reversed(self.block.steps):
            wanted = [need.get(value, none) for value in step.outs]
            recomputed = np.logical_or.reduce(wanted)
            keeper = step.name or makers.get(step.outs, "")
            if keeper in chosen:
                if step.name:
                    kept[keeper] |= recomputed & chosen[keeper]
                wanted = [row & ~chosen[keeper] for row in wanted]
                recomputed = recomputed & ~chosen[keeper]
            if recomputed.any():
                self._charge(step, rates, wanted)
                for value in step.ins:
                    need[value] = need.get(value, none) | recomputed
        self.kept = np.array([kept[name] for name in self.names]).reshape(len(self.names), count)

    def _charge(self, step, rates: Rates, wanted: list[np.ndarray]) -> None:
        """Adds the step's cost where any of its values is wanted: products at the units' rate, and a named value
        written and read once; elementwise work between names is taken as part of the kernels around it."""
        made = sum(row * float(flops) for row, flops in zip(wanted, step.flops))
        for which, flops in step.shared:
            made = made - float(flops) * np.maximum(sum(wanted[number].astype(int) for number in which) - 1, 0)
        self.flops += made
        if step.all_flops:
            self.seconds += made / (rates.flops[step.dtype] * rates.devices)
        if step.name or step.all_flops:
            self.seconds += sum(row * (RECOMPUTED * size / rates.memory) for row, size in zip(wanted, step.bytes))


def _bound_makers(block: Block) -> dict[tuple[int, ...], str]:
    """Values made by what makes a bound name's tensor -> that name: keeping it keeps all of them."""
    named = {step.name: step for step in block.steps if step.name in block.bound}
    return {step.outs: name for name, tag in named.items() for step in block.steps if set(tag.ins) & set(step.outs)}


def _kept_bytes(block: Block) -> dict[str, int]:
    """Bytes on one device of keeping each name, with the other results of a bound name's kernel."""
    out: dict[str, int] = {}
    for step in block.steps:
        if step.name:
            out[step.name] = out.get(step.name, 0) + sum(step.bytes)
    for outs, name in _bound_makers(block).items():
        maker = next(step for step in block.steps if step.outs == outs)
        tag = next(step for step in block.steps if step.name == name)
        out[name] += sum(
            size for value, size in zip(maker.outs, maker.bytes) if value in block.read and value not in tag.ins
        )
    return out


def _ever_needed(block: Block) -> set[str]:
    """Names whose tensors are recomputed when nothing is kept."""
    need, found = set(block.read), set()
    for step in reversed(block.steps):
        if need.intersection(step.outs):
            need.update(step.ins)
            found.add(step.name)
    return found


def kept_under(block: Block, rates: Rates, policy: str, wanted: Collection[str]) -> Pattern:
    """What a block keeps and recomputes under a policy that keeps the names `wanted`."""
    table = _Table(block, rates, wanted)
    held = tuple(name for name, row in zip(table.names, table.kept) if row[0])
    size = block.carry_bytes + sum(table.bytes[name] for name in held)
    return Pattern(
        size, float(table.seconds[0]) + _kept_seconds(size, 0, rates), 0, int(table.flops[0]), held, policy=policy
    )


def everything(block: Block, rates: Rates, policy: str) -> Pattern:
    """What a block keeps without any checkpoint: everything that its backward pass reads."""
    return Pattern(block.none_bytes, _kept_seconds(block.none_bytes, 0, rates), policy=policy)
