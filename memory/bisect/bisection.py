"""Runs a bisection: compiles the first and the last candidate, searches between them, and explains the measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bytescope.memory.bisect.change_axes import Axis
from bytescope.memory.bisect.change_search import minimal_set, search_sequence
from bytescope.memory.bisect.measurements import QUANTITIES, Bound, Measurement
from bytescope.memory.bisect.measuring import Candidate, check_measured

# A rise or fall below this fraction of the largest difference from the first candidate is ignored.
_SMALL_STEP = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a bisection.

    Fields:
        good: bytes, FLOPs or seconds of the first program, which is the oldest version or the unchanged program.
        measured: the measurement of every compiled program; versions and commits are listed from old to new.
        change: the change at which the bound is first exceeded: one version, commit, flag, key or line. () if no change
            was found. Flags, keys or lines: several if the bound is only exceeded with all of them together. Versions
            or commits: several if all but the last of them could not be compiled, so that each of them may be the
            first one that exceeds the bound.
        before, after: the measurements without and with the change; None if no change was found.
        notes: sentences that say why the result is uncertain, or why no change was found.
    """

    good: float
    measured: tuple[Measurement, ...]
    change: tuple[str, ...] = ()
    before: Measurement | None = None
    after: Measurement | None = None
    notes: tuple[str, ...] = ()


def run_bisection(
    axis: Axis,
    bound: Bound,
    measure: Callable[[Candidate], Measurement],
    measure_all: bool = False,
    is_recorded: Callable[[str], bool] = lambda point: False,
) -> Outcome:
    """Finds the change at which a program first exceeds a bound, and returns it with all measurements. A candidate is
    the program with one version, or with some of the changes. The first candidate is the oldest version or the
    unchanged program; the last candidate is the newest version or the program with all changes.

    Args:
        axis: the changes to search, such as the versions of jax.
        bound: the bound on bytes, FLOPs or seconds.
        measure: function that compiles a candidate and returns its measurement.
        measure_all: if True, every version or commit is compiled; if False, binary search chooses which are compiled.
            Not used for flags, keys and lines.
        is_recorded: function from the name of a candidate to whether `measure` has its measurement already. The binary
            search begins between recorded versions or commits.

    Raises ReportError if the first or the last candidate cannot be compiled, or if its report lacks the bounded
    quantity.
    """
    measured: dict[str, Measurement] = {}
    quantity = QUANTITIES[bound.quantity]

    def value_of(candidate: Candidate) -> float | None:
        if candidate.point not in measured:
            measured[candidate.point] = measure(candidate)
        return measured[candidate.point].value(bound.quantity)

    ends = axis.good, axis.bad
    good = value_of(axis.candidate(ends[0]))
    good = check_measured(measured[axis.point(ends[0])], bound.quantity, "the first candidate")
    value_of(axis.candidate(ends[1]))
    bad = check_measured(measured[axis.point(ends[1])], bound.quantity, "the last candidate")
    limit = bound.text(good)

    def exceeds(state: frozenset[int]) -> bool | None:
        value = value_of(axis.candidate(state))
        return None if value is None else bound.is_exceeded(value, good)

    def answer(change: Sequence[str] = (), states: Sequence[frozenset[int]] = (), notes: Sequence[str] = ()) -> Outcome:
        order = axis.points() if axis.is_sequence else tuple(measured)
        rows = tuple(measured[point] for point in order if point in measured)
        sides = [measured[axis.point(state)] for state in states]
        before, after = sides or (None, None)
        return Outcome(good, rows, tuple(change), before, after, tuple(notes))

    if bound.is_exceeded(good, good):
        return answer(notes=[f"the first candidate, {axis.point(ends[0])}, already exceeds the bound of {limit}"])
    last = len(axis.changes) - 1
    known: dict[int, bool | None] = {0: False, last: bound.is_exceeded(bad, good)}
    for index in range(1, last) if axis.is_sequence else ():
        if measure_all or is_recorded(axis.point(frozenset([index]))):
            known[index] = exceeds(frozenset([index]))
    if not any(known.values()):
        words = f"the last candidate, {axis.point(ends[1])}, is"
        if axis.is_sequence and measure_all:
            words = "every measured version is"
        return answer(notes=[f"no change found: {words} within the bound of {limit}"])
    if axis.is_sequence:
        found = search_sequence(last + 1, lambda index: exceeds(frozenset([index])), known)
        change = axis.changes[found.before + 1 : found.after + 1]
        notes = _sequence_notes(axis, bound, good, measured, quantity.text)
        if len(change) > 1:
            notes.append(
                f"{', '.join(change[:-1])} could not be compiled, so the first one that exceeds the bound is one of "
                f"these or {change[-1]}"
            )
        return answer(change, [frozenset([found.before]), frozenset([found.after])], notes)
    minimal = minimal_set(len(axis.changes), exceeds)
    # Without one of the changes, the rest was measured and is within the bound, unless it could not be measured.
    rests = [minimal - {index} for index in sorted(minimal, reverse=True)]
    rest = next((rest for rest in rests if exceeds(rest) is False), frozenset())
    names = [axis.changes[index] for index in sorted(minimal)]
    notes = []
    if len(names) > 1:
        notes.append(f"the bound is only exceeded by these {len(names)} changes together")
    within = [
        point
        for point, state in axis.states().items()
        if state > minimal and point in measured and exceeds(state) is False
    ]
    if within:
        notes.append(
            f"not monotonic: the program with {within[0]} is within the bound, although {' + '.join(names)} alone "
            "exceeds the bound: the other changes save at least as much as this change adds"
        )
    return answer(names, [rest, minimal], notes)


def _sequence_notes(
    axis: Axis, bound: Bound, good: float, measured: dict[str, Measurement], text: Callable[[float], str]
) -> list[str]:
    """Returns a list with one sentence if the values of the measured versions or commits cross the bound more than
    once, or may do so because they both rise and fall; else [].

    Args:
        axis: the versions or commits.
        bound: the bound.
        good: bytes, FLOPs or seconds of the first version or commit.
        measured: name of a version or commit -> its measurement.
        text: function that returns a value with its unit.
    """
    values = [(point, measured[point].value(bound.quantity)) for point in axis.points() if point in measured]
    known = [(point, value) for point, value in values if value is not None]
    crossings = [
        new
        for (new, value), (_, old) in zip(known[1:], known[:-1], strict=True)
        if bound.is_exceeded(value, good) != bound.is_exceeded(old, good)
    ]
    if len(crossings) > 1:
        return [f"not monotonic: the bound is crossed at {', '.join(crossings)}; the first crossing is shown"]
    least = _SMALL_STEP * max(abs(value - good) for _, value in known)
    steps = {new > old for (_, new), (_, old) in zip(known[1:], known[:-1], strict=True) if abs(new - old) > least}
    if len(steps) > 1:
        listed = ", ".join(f"{text(value)} ({point})" for point, value in known)
        return [
            "not monotonic: the values rise and fall, so the bound may be crossed more than once (use --all to measure "
            f"every version): {listed}"
        ]
    return []
