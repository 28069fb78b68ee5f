"""Finds the buffers that the compiler's schedule keeps alive longer than memory requires.

XLA:GPU's latency-hiding scheduler orders instructions so that communication overlaps compute. It may run an instruction
long after its operands exist, and the operands stay alive until then. For example, it defers the weight-gradient
matmuls of unrolled layers to the end of the backward pass (openxla/xla#45753).

`find` starts from the compiler's order and looks for an order with a lower peak. First each instruction is moved to
just before its first reader, then each instruction to just after its last operand. A move is made only if the live
ranges that it shortens have more bytes than the live ranges that it lengthens. The peaks of both orders are computed in
the same model of live ranges, so their difference does not depend on the packing of buffers. The new order respects
data dependencies, control dependencies and in-place updates. The result is an estimate: an even lower peak may be
possible.

In this module, a *buffer* is a range of temporary memory that one or several values use (values that alias, or that are
updated in place), and the *best order* is the order with the lowest peak that was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak.live_schedule import OVERWRITING, AliasGroups

# Instructions that take no time and no memory. They are not part of an order.
_TRANSPARENT = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"))
# A move is made only if it lowers the live bytes by at least this fraction of the peak.
_MIN_GAIN = 0.001
# Maximum number of instructions that are moved together. Computations with more instructions than the second number are
# not reordered.
_MAX_CLUSTER, _MAX_INSTRUCTIONS = 8, 50_000


@dataclasses.dataclass(frozen=True)
class HeldValue:
    """A value that is alive at the peak of the compiler's order of instructions, although it need not be: in the order
    with the lowest peak that was found, the value is not alive while the same instruction runs.

    Fields:
        instruction: the instruction that computes the value.
        bytes: size of the value's memory.
        reader: the instruction that reads the value and that the compiler runs later than necessary. None if the
            compiler instead computes the value earlier than necessary.
    """

    instruction: Instruction
    bytes: int
    reader: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class OrderEstimate:
    """The peak of temporary memory in the compiler's order of instructions, and in a better order of the same
    instructions. Both are estimates from live ranges.

    Fields:
        compiled_bytes: the peak in the compiler's order.
        least_bytes: the peak in the order with the lowest peak that was found.
        held: the values that are alive at the peak only in the compiler's order, largest first.
    """

    compiled_bytes: int = 0
    least_bytes: int = 0
    held: tuple[HeldValue, ...] = ()

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the peak in the compiler's order exceeds the lowest peak that was found in another order."""
        return self.compiled_bytes - self.least_bytes


def find(module: Module) -> OrderEstimate:
    """Compares the peak of temporary memory in the compiler's schedule with the peak in a better order of instructions.

    The instructions of the entry computation and of loop bodies are reordered. Returns an empty estimate for a module
    without a schedule.
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

    def computation(self, computation: Computation, callers: set[int]) -> OrderEstimate:
        """Returns the peaks of one run of a computation, including the computations that it calls.

        callers: ids of the computations that call this one, directly or indirectly. They end the recursion if a
        computation of a damaged module calls itself.
        """
        if computation.id in self.known or computation.id in callers or not computation.schedule:
            return self.known.get(computation.id, OrderEstimate())
        inner: dict[int, OrderEstimate] = {}
        for id in computation.schedule:
            if id not in self.module.instructions:  # only in a damaged module
                continue
            called = self.called(self.module.instructions[id])
            estimates = [self.computation(body, callers | {computation.id}) for body in called]
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
        graph = _Dependencies(self.module, self.aliases, computation)
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
        held = list(graph.held_values(best, place)) if least < peak else []
        at_peak = inner.get(graph.order[place]) if graph.order else None
        held += at_peak.held if at_peak else ()
        return OrderEstimate(peak, least, tuple(sorted(held, key=lambda value: -value.bytes)))


@dataclasses.dataclass(frozen=True)
class _Order:
    """An order of the instructions of a computation.

    Fields:
        ids: ids of the instructions in this order.
        moved: ids of the instructions that were moved away from their place in the compiler's order.
    """

    ids: tuple[int, ...]
    moved: frozenset[int] = frozenset()


class _Dependencies:
    """The instructions of one computation, their dependencies, and the buffers that they use.

    A buffer is a range of temporary memory that one or several values use. It is identified by a number.

    Attributes:
        order: ids of the instructions in the compiler's order, without instructions that take no time.
        position: instruction id -> position in `order`.
        before, after: instruction id -> ids of the instructions that must run before or after this instruction.
        buffers_of: instruction id -> buffers that the instruction reads or writes.
        users: buffer -> ids of the instructions that read or write the buffer, in the compiler's order.
        sizes: buffer -> bytes.
        written: buffer -> id of the first instruction that writes the buffer.
    """

    def __init__(self, module: Module, aliases: AliasGroups, computation: Computation):
        self.module = module
        scheduled = [id for id in dict.fromkeys(computation.schedule or ()) if id in module.instructions]
        self.order = [id for id in scheduled if module.instructions[id].opcode not in _TRANSPARENT]
        self.before: dict[int, set[int]] = {id: set() for id in self.order}
        self.buffers_of: dict[int, list[int]] = {id: [] for id in self.order}
        self.users: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self._makers: dict[int, tuple[int, ...]] = {}
        permanent = aliases.permanent(computation)
        last_writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for id in self.order:
            instruction = module.instructions[id]
            for operand in (*instruction.operands, *instruction.predecessors):
                self.before[id].update(self.makers(operand))
            read = self.buffer_sizes(instruction.operands, aliases, permanent)
            written = self.buffer_sizes((id,), aliases, permanent)
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
                self.buffers_of[id].append(each)
                self.users.setdefault(each, []).append(id)
            self.before[id].discard(id)
        self.after: dict[int, set[int]] = {id: set() for id in self.order}
        for id, earlier in self.before.items():
            for other in earlier:
                self.after[other].add(id)
        self.position = {id: at for at, id in enumerate(self.order)}

    def makers(self, id: int) -> tuple[int, ...]:
        """Returns the ids of the instructions that compute the value of instruction `id`. If the instruction is a tuple
        or a bitcast, they are the instructions that compute its operands."""
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

    def buffer_sizes(self, ids: Iterable[int], aliases: AliasGroups, permanent: set[int]) -> dict[int, int]:
        """Returns buffer -> bytes for the temporary memory of the values of instructions. `permanent`: buffers that are
        alive during the whole computation, which are left out."""
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

    def peak(self, order: Sequence[int], called_bytes: dict[int, int]) -> tuple[int, int]:
        """Returns (the maximum of live bytes, the position in `order` of the instruction at which it occurs).

        order: ids of the instructions in the order in which they run. called_bytes: id of an instruction that calls
        another computation, such as a loop -> temporary bytes of one run of that computation.
        """
        left = {each: len(ids) for each, ids in self.users.items()}
        begun: set[int] = set()
        live = peak = place = 0
        for at, id in enumerate(order):
            made = ended = 0
            results, last_read = set[int](), set[int]()  # sizes of buffers
            for each in self.buffers_of[id]:
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
            # An elementwise kernel writes its result over an operand of the same size that no later instruction uses.
            overwrites = self.module.instructions[id].opcode in OVERWRITING
            shared = max(results & last_read, default=0) if overwrites else 0
            now = live + made - shared + called_bytes.get(id, 0)
            if now > peak:
                peak, place = now, at
            live += made - ended
        return peak, place

    def improved(self, order: _Order, min_gain: int, backwards: bool = False) -> _Order:
        """Returns an order in which groups of instructions run as soon as possible where this lowers the live bytes by
        at least `min_gain`. If `backwards` is True, they run as late as possible: the same problem in the reversed
        graph.
        """
        base = order.ids[::-1] if backwards else order.ids
        before, after = (self.after, self.before) if backwards else (self.before, self.after)
        walk = _EagerOrder(self, base, before, after, max(min_gain, 1))
        ids = walk.run()
        return _Order(ids[::-1] if backwards else ids, order.moved | walk.moved)

    def held_values(self, best: _Order, place: int) -> Iterator[HeldValue]:
        """Yields the values that are alive at position `place` of the compiler's order, but not when the instruction at
        this position runs in the order `best`."""
        now = {id: at for at, id in enumerate(best.ids)}
        # If this instruction was moved itself, the last instruction before it that was not moved takes its place.
        reference = next((now[id] for id in self.order[place::-1] if id not in best.moved), 0)
        for each, ids in self.users.items():
            places = [self.position[id] for id in ids]
            if not min(places) <= place <= max(places):
                continue
            moved = [now[id] for id in ids]
            if min(moved) <= reference <= max(moved):
                continue
            late = [id for id in ids[1:] if self.position[id] >= place and now[id] <= reference]
            reader = self.module.instructions[min(late, key=self.position.__getitem__)] if late else None
            first = self.written.get(each, ids[0])
            yield HeldValue(self.module.instructions[first], self.sizes[each], reader)


class _EagerOrder:
    """Builds a new order from the order `base`, in which a group of instructions runs earlier if this lowers the live
    bytes.

    Attributes:
        placed: ids of the instructions in the new order so far.
        moved: ids of the instructions that run earlier than in `base`.
        waiting: instruction id -> number of instructions that must run before it and are not placed.
        left: buffer -> ids of the instructions that use the buffer and are not placed.
        begun: buffers that a placed instruction uses.
    """

    def __init__(
        self,
        graph: _Dependencies,
        base: Sequence[int],
        before: dict[int, set[int]],
        after: dict[int, set[int]],
        min_gain: int,
    ):
        self.graph, self.base, self.after, self.min_gain = graph, base, after, min_gain
        self.waiting = {id: len(before[id]) for id in base}
        self.turn = {id: at for at, id in enumerate(base)}
        self.left = {each: set(ids) for each, ids in graph.users.items()}
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
                moves = {each: self.find_move(each) for each in concerned}
                concerned = {each: None for each, (_, ids) in moves.items() if ids}
                # The move that needs the fewest additional bytes while it runs comes first.
                _, best = min((move for move in moves.values() if move[1]), key=lambda move: move[0], default=(0, []))
                for other in best:
                    while self.base[following] in self.placed:
                        following += 1
                    if other != self.base[following]:
                        self.moved.add(other)
                    concerned |= self.place(other)
        return tuple(self.placed)

    def place(self, id: int) -> dict[int, None]:
        """Appends an instruction to the new order. Returns the buffers for which `find_move` may now find a move: the
        buffers that the instruction uses, and the buffers that instructions use which can run from now on."""
        self.placed[id] = None
        concerned = dict.fromkeys(self.graph.buffers_of[id])
        for each in self.graph.buffers_of[id]:
            self.begun.add(each)
            self.left[each].discard(id)
        for other in self.after[id]:
            self.waiting[other] -= 1
            if not self.waiting[other]:
                concerned.update(dict.fromkeys(self.graph.buffers_of[other]))
        return concerned

    def find_move(self, buffer: int) -> tuple[int, list[int]]:
        """Finds a group of instructions that frees a buffer if the group runs now: all remaining instructions that use
        the buffer, followed by instructions that the group makes ready, each of which is the only remaining successor
        of an instruction in the group. The group ends where the live bytes are lowest.

        Returns (the maximum bytes by which the live bytes rise while these instructions run, ids of the instructions);
        (0, []) if the live bytes would not fall by at least `min_gain`.
        """
        rest = self.left[buffer]
        is_open = buffer in self.begun and 0 < len(rest) <= _MAX_CLUSTER
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
            for each in self.graph.buffers_of[id]:
                if each not in touched and each not in self.begun:
                    change += self.graph.sizes[each]
                touched[each] = touched.get(each, 0) + 1
            highest = max(highest, change)
            for each in self.graph.buffers_of[id]:
                if touched[each] == len(self.left[each]):
                    change -= self.graph.sizes[each]
            if at >= len(rest) and change <= best:
                best, cut, rise = change, at, highest
            if at == len(chain):
                chain += self.next_of(chain)
        return rise, chain[:cut]

    def next_of(self, chain: list[int]) -> list[int]:
        """Returns [id] of an instruction that can run directly after the instructions in `chain`, and that is the only
        remaining successor of one of them; [] if there is none."""
        ahead = set(chain)
        for id in reversed(chain):
            later = [other for other in self.after[id] if other not in ahead and other not in self.placed]
            if len(later) == 1 and self.waiting[later[0]] == sum(later[0] in self.after[each] for each in chain):
                return later
        return []
