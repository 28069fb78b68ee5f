"""Searches for the change at which a bound is first exceeded: binary search in a sequence of versions, delta debugging
in a set of changes.

Both searches get a function that compiles one candidate. It returns True if the candidate exceeds the bound, False if
it is within the bound, and None if it cannot be compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Interval:
    """The result of a search in a sequence of versions.

    Fields:
        before: index of the last version before the change; this version is within the bound.
        after: index of the first version after the change; this version exceeds the bound. If it is larger than before
            + 1, the versions between the two could not be compiled.
    """

    before: int
    after: int


def search_sequence(count: int, exceeds: Callable[[int], bool | None]) -> Interval:
    """Finds two neighbouring versions of which the older one is within the bound and the newer one exceeds it, by
    binary search. The first version must be within the bound, and the last version must exceed it.

    About log2(count) versions are compiled if all of them can be compiled. If a version cannot be compiled, its nearest
    neighbours are tried.

    Args:
        count: number of versions, at least 2.
        exceeds: function from the index of a version to whether it exceeds the bound; None if it cannot be compiled.
    """
    before, after = 0, count - 1
    unmeasured: set[int] = set()
    while True:
        middle = (before + after) / 2
        between = [index for index in range(before + 1, after) if index not in unmeasured]
        if not between:
            return Interval(before, after)
        index = min(between, key=lambda index: abs(index - middle))
        answer = exceeds(index)
        if answer is None:
            unmeasured.add(index)
        elif answer:
            after = index
        else:
            before = index


def minimal_set(count: int, exceeds: Callable[[frozenset[int]], bool | None]) -> frozenset[int]:
    """Returns a minimal set of changes, as indices, that exceeds the bound: if any one of these changes is removed, the
    program is within the bound or cannot be compiled. The program with all changes must exceed the bound, and the
    program without any change must be within it.

    The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28,
    2002), section 3.

    Args:
        count: number of changes, at least 1.
        exceeds: function from a set of indices to whether the program with these changes exceeds the bound; None if it
            cannot be compiled.
    """
    current, parts = list(range(count)), 2
    while len(current) > 1:
        groups = [frozenset(group) for group in _split(current, parts)]
        if group := next((group for group in groups if exceeds(group)), None):
            current, parts = sorted(group), 2
            continue
        # With two parts, the complement of one is the other.
        rests = [frozenset(current) - group for group in groups] if parts > 2 else []
        if rest := next((rest for rest in rests if exceeds(rest)), None):
            current, parts = sorted(rest), max(parts - 1, 2)
        elif parts >= len(current):
            break
        else:
            parts = min(2 * parts, len(current))
    return frozenset(current)


def _split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]
