"""Finds the buffers that the compiler's schedule keeps alive longer than memory requires.

XLA:GPU's latency-hiding scheduler orders instructions so that communication overlaps compute. It may run an instruction
long after its operands exist, and the operands stay alive until then. An example are the weight-gradient products of
unrolled layers, which it defers to the end of the backward pass (openxla/xla#45753).

`find` starts from the compiler's order and moves instructions that lower the live bytes: first every instruction to
just before its first reader, then every instruction to just after its last operand, each only if this shortens more
bytes than it prolongs. Both orders are replayed in the same model of live ranges, so the difference of their peaks does
not depend on the packing of buffers. The result is an estimate. It respects data and control dependencies and in-place
updates, but no order is known to be the smallest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak.live_schedule import OVERWRITING, AliasGroups

# Instructions that take no time and no memory: they run as soon as their operands exist.
_TRANSPARENT = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"))
# Moves that lower the live bytes by less than this fraction of the peak are not made.
_MIN_GAIN = 0.001
# Maximum number of instructions that are moved together, and maximum number of instructions of a computation.
_MAX_CLUSTER, _MAX_INSTRUCTIONS = 8, 50_000


@dataclasses.dataclass(frozen=True)
class HeldValue:
    """A range of memory that is alive at the peak in the compiler's order, and not in the order of least memory.

    Fields:
        instruction: the instruction that defines the value.
        bytes: size of the memory.
        reader: the instruction that the compiler runs late, and that reads the value. None if the value is computed
            earlier than needed.
    """

    instruction: Instruction
    bytes: int
    reader: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class OrderEstimate:
    """The peak of temporary memory in two orders of the same instructions.

    Fields:
        compiled_bytes: the peak in the compiler's order, in this module's model of live ranges.
        least_bytes: the peak in the order of least memory.
        held: the values that are alive at the peak only in the compiler's order, the largest first.
    """

    compiled_bytes: int = 0
    least_bytes: int = 0
    held: tuple[HeldValue, ...] = ()

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the compiler's order exceeds the order of least memory."""
        return self.compiled_bytes - self.least_bytes


def find(module: Module) -> OrderEstimate:
    """Compares the compiler's order of a scheduled module with an order that needs less memory.

    The entry computation and the bodies of loops are reordered. Returns an empty estimate for a module without a
    schedule.
    """
    entry = module.computations.get(module.entry)
    if entry is None or not entry.schedule:
        return OrderEstimate()
    return _Estimate(module).computation(entry, set())


class _Estimate:
    def __init__(self, module: Module):
        self.module = module
        self.aliases = AliasGroups(module)
        self.known: dict[int, OrderEstimate] = {}

    def computation(self, computation: Computation, around: set[int]) -> OrderEstimate:
        """Returns the peaks of one run of a computation. `around`: ids of the computations that call it, which end the
        recursion if a damaged module calls itself.
        """
        if computation.id in self.known or computation.id in around or not computation.schedule:
            return self.known.get(computation.id, OrderEstimate())
        inner: dict[int, OrderEstimate] = {}
        for id in computation.schedule:
            if id not in self.module.instructions:  # a damaged module
                continue
            called = self.called(self.module.instructions[id])
            estimates = [self.computation(body, around | {computation.id}) for body in called]
            if estimates:
                inner[id] = max(estimates, key=lambda each: each.compiled_bytes)
        estimate = self.compare(computation, inner)
        self.known[computation.id] = estimate
        return estimate

    def called(self, instruction: Instruction) -> Iterator[Computation]:
        if instruction.opcode in ("while", "call", "conditional"):
            for id in instruction.called:
                if id in self.module.computations:
                    yield self.module.computations[id]

    def compare(self, computation: Computation, inner: dict[int, OrderEstimate]) -> OrderEstimate:
        graph = _Graph(self.module, self.aliases, computation)
        before = {id: each.compiled_bytes for id, each in inner.items()}
        after = {id: each.least_bytes for id, each in inner.items()}
        peak, place = graph.peak(graph.order, before)
        if len(graph.order) > _MAX_INSTRUCTIONS:
            return OrderEstimate(peak, graph.peak(graph.order, after)[0])
        gain = int(_MIN_GAIN * peak)
        compiled = _Order(tuple(graph.order))
        late = graph.improved(compiled, gain, backwards=True)
        candidates = (compiled, late, graph.improved(late, gain))
        best = min(candidates, key=lambda order: graph.peak(order.ids, after)[0])
        least = graph.peak(best.ids, after)[0]
        held = list(graph.held(best, place)) if least < peak else []
        at_peak = inner.get(graph.order[place]) if graph.order else None
        held += at_peak.held if at_peak else ()
        return OrderEstimate(peak, least, tuple(sorted(held, key=lambda value: -value.bytes)))


@dataclasses.dataclass(frozen=True)
class _Order:
    """An order of the instructions of a computation: their ids, and the ids of the instructions that were moved."""

    ids: tuple[int, ...]
    moved: frozenset[int] = frozenset()


class _Graph:
    """The instructions of one computation, their dependencies, and the ranges of memory that they touch.

    Attributes:
        order: ids of the instructions in the compiler's order, without those that take no time.
        before, after: id -> ids that must run before or after it.
        touched: id -> ranges of temporary memory that it reads or writes.
        touching: range -> ids that read or write it.
        sizes: range -> bytes.
    """

    def __init__(self, module: Module, aliases: AliasGroups, computation: Computation):
        self.module = module
        scheduled = [id for id in dict.fromkeys(computation.schedule or ()) if id in module.instructions]
        self.order = [id for id in scheduled if module.instructions[id].opcode not in _TRANSPARENT]
        self.before: dict[int, set[int]] = {id: set() for id in self.order}
        self.touched: dict[int, list[int]] = {id: [] for id in self.order}
        self.touching: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        self.written: dict[int, int] = {}  # range -> the first instruction that writes it
        self._makers: dict[int, tuple[int, ...]] = {}
        permanent = aliases.permanent(computation)
        last_writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for id in self.order:
            instruction = module.instructions[id]
            for operand in (*instruction.operands, *instruction.predecessors):
                self.before[id].update(self.makers(operand))
            read = self.ranges(instruction.operands, aliases, permanent)
            written = self.ranges((id,), aliases, permanent)
            for each in read.keys() - written.keys():
                if each in last_writer:
                    self.before[id].add(last_writer[each])
                readers.setdefault(each, []).append(id)
            for each in written:
                self.before[id].update(readers.pop(each, ()))
                if each in last_writer:
                    self.before[id].add(last_writer[each])
                last_writer[each] = id
                self.written.setdefault(each, id)
            for each, size in (read | written).items():
                self.sizes[each] = size
                self.touched[id].append(each)
                self.touching.setdefault(each, []).append(id)
            self.before[id].discard(id)
        self.after: dict[int, set[int]] = {id: set() for id in self.order}
        for id, earlier in self.before.items():
            for other in earlier:
                self.after[other].add(id)
        self.position = {id: at for at, id in enumerate(self.order)}

    def makers(self, id: int) -> tuple[int, ...]:
        """Returns the instructions of the order that compute a value, looked up through tuples and bitcasts."""
        if id not in self._makers:
            self._makers[id] = ()
            instruction = self.module.instructions.get(id)
            if id in self.before:
                self._makers[id] = (id,)
            elif instruction is not None and instruction.opcode in _TRANSPARENT:
                found: dict[int, None] = {}
                for operand in instruction.operands:
                    found.update(dict.fromkeys(self.makers(operand)))
                self._makers[id] = tuple(found)
        return self._makers[id]

    def ranges(self, ids: Iterable[int], aliases: AliasGroups, permanent: set[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for id in ids:
            instruction = self.module.instructions.get(id)
            if instruction is None:
                continue
            for index, shape in leaves(self.module.shape(instruction)):
                number, size = aliases.temporary(instruction.id, index)
                if size and number not in permanent and shape.bytes:
                    found[number] = size
        return found

    def peak(self, order: Sequence[int], inside: dict[int, int]) -> tuple[int, int]:
        """Returns (the maximum of live bytes, the position of the instruction at which it occurs) of an order.
        `inside`: id of an instruction that calls a computation -> the temporary bytes of one run of the computation.
        """
        left = {each: len(ids) for each, ids in self.touching.items()}
        begun: set[int] = set()
        live = peak = place = 0
        for at, id in enumerate(order):
            made = ended = 0
            results, last_read = set[int](), set[int]()  # sizes
            for each in self.touched[id]:
                size, is_new = self.sizes[each], each not in begun
                left[each] -= 1
                if is_new:
                    begun.add(each)
                    made += size
                    results.add(size)
                if not left[each]:
                    ended += size
                    if not is_new:
                        last_read.add(size)
            # An elementwise kernel writes over an operand of the same size that ends with it.
            overwrites = self.module.instructions[id].opcode in OVERWRITING
            shared = max(results & last_read, default=0) if overwrites else 0
            now = live + made - shared + inside.get(id, 0)
            if now > peak:
                peak, place = now, at
            live += made - ended
        return peak, place

    def improved(self, order: _Order, min_gain: int, backwards: bool = False) -> _Order:
        """Returns an order in which instructions run as soon as possible, if this ends more live bytes than it begins.
        With `backwards`, they run as late as possible, which is the same problem in the reversed graph.
        """
        base = order.ids[::-1] if backwards else order.ids
        before, after = (self.after, self.before) if backwards else (self.before, self.after)
        walk = _EagerOrder(self, base, before, after, max(min_gain, 1))
        ids = walk.run()
        return _Order(ids[::-1] if backwards else ids, order.moved | walk.moved)

    def held(self, best: _Order, place: int) -> Iterator[HeldValue]:
        """Yields the ranges that are alive at a position of the compiler's order, and not at the same instruction in
        the order `best`."""
        now = {id: at for at, id in enumerate(best.ids)}
        # The instruction at the peak may have moved itself: look at the last one before it that did not.
        anchor = next((now[id] for id in self.order[place::-1] if id not in best.moved), 0)
        for each, ids in self.touching.items():
            places = [self.position[id] for id in ids]
            if not min(places) <= place <= max(places):
                continue
            moved = [now[id] for id in ids]
            if min(moved) <= anchor <= max(moved):
                continue
            late = [id for id in ids[1:] if self.position[id] >= place and now[id] <= anchor]
            reader = self.module.instructions[min(late, key=self.position.__getitem__)] if late else None
            first = self.written.get(each, ids[0])
            yield HeldValue(self.module.instructions[first], self.sizes[each], reader)


class _EagerOrder:
    """Rebuilds an order and runs instructions ahead of their turn if this lowers the live bytes."""

    def __init__(
        self,
        graph: _Graph,
        base: Sequence[int],
        before: dict[int, set[int]],
        after: dict[int, set[int]],
        min_gain: int,
    ):
        self.graph, self.base, self.after, self.min_gain = graph, base, after, min_gain
        self.waiting = {id: len(before[id]) for id in base}
        self.turn = {id: at for at, id in enumerate(base)}
        self.left = {each: set(ids) for each, ids in graph.touching.items()}
        self.begun: set[int] = set()
        self.placed: dict[int, None] = {}
        self.moved: set[int] = set()

    def run(self) -> tuple[int, ...]:
        for at, id in enumerate(self.base):
            if id in self.placed:
                continue
            concerned = self.place(id)
            following = at + 1
            while concerned:
                moves = {each: self.worthwhile(each) for each in concerned}
                concerned = {each: None for each, (_, ids) in moves.items() if ids}
                # The cluster that needs the least memory on its way comes first.
                _, best = min((move for move in moves.values() if move[1]), key=lambda move: move[0], default=(0, []))
                for other in best:
                    while self.base[following] in self.placed:
                        following += 1
                    if other != self.base[following]:
                        self.moved.add(other)
                    concerned |= self.place(other)
        return tuple(self.placed)

    def place(self, id: int) -> dict[int, None]:
        """Runs an instruction next. Returns the ranges of memory that may now be worth ending."""
        self.placed[id] = None
        concerned = dict.fromkeys(self.graph.touched[id])
        for each in self.graph.touched[id]:
            self.begun.add(each)
            self.left[each].discard(id)
        for other in self.after[id]:
            self.waiting[other] -= 1
            if not self.waiting[other]:
                concerned.update(dict.fromkeys(self.graph.touched[other]))
        return concerned

    def worthwhile(self, range_number: int) -> tuple[int, list[int]]:
        """Returns (the rise of the live bytes on the way, the instructions to run now so that a range of memory ends).
        These are the unplaced instructions that touch it and the chain of their only successors, cut where the live
        bytes are lowest. Returns (0, []) if this gains too little.
        """
        rest = self.left[range_number]
        is_open = range_number in self.begun and 0 < len(rest) <= _MAX_CLUSTER
        if not is_open or any(self.waiting[id] for id in rest):
            return 0, []
        chain = sorted(rest, key=self.turn.__getitem__)
        touched: dict[int, int] = {}
        change, best, cut = 0, -self.min_gain, 0
        highest, rise = 0, 0
        at = 0
        while at < len(chain) and at < _MAX_CLUSTER + len(rest):
            id = chain[at]
            at += 1
            for each in self.graph.touched[id]:
                if each not in touched and each not in self.begun:
                    change += self.graph.sizes[each]
                touched[each] = touched.get(each, 0) + 1
            highest = max(highest, change)
            for each in self.graph.touched[id]:
                if touched[each] == len(self.left[each]):
                    change -= self.graph.sizes[each]
            if at >= len(rest) and change <= best:
                best, cut, rise = change, at, highest
            if at == len(chain):
                chain += self.next_of(chain)
        return rise, chain[:cut]

    def next_of(self, chain: list[int]) -> list[int]:
        """Returns an instruction that could run after a chain, and is the only successor of one of its instructions;
        [] if there is none."""
        ahead = set(chain)
        for id in reversed(chain):
            later = [other for other in self.after[id] if other not in ahead and other not in self.placed]
            if len(later) == 1 and self.waiting[later[0]] == sum(later[0] in self.after[each] for each in chain):
                return later
        return []
