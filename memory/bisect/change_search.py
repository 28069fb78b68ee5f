"""Searches for the change at which a bound is first exceeded: by halving a sequence, or by delta debugging a set.

Both searches call a function that measures one candidate. It returns True if the candidate exceeds the bound, False if
it does not, and None if the candidate could not be measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Interval:
    """The result of a search in a sequence of versions.

    Fields:
        before: index of the last version before the change, which is within the bound.
        after: index of the first version after it, which exceeds the bound. The versions between the two could not be
            measured.
    """

    before: int
    after: int


def search_sequence(count: int, exceeds: Callable[[int], bool | None]) -> Interval:
    """Returns the first crossing of the bound between the first version, which must be within the bound, and the last
    one, which must exceed it.

    At most about log2(count) versions are measured if all of them can be measured. If a version cannot be measured,
    its neighbours are tried, nearest first.

    Args:
        count: number of versions, at least 2. exceeds: measures the version with an index.
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
    """Returns a smallest group of changes that exceeds the bound: without any one of them, the rest is within the bound
    or cannot be measured. All changes together must exceed the bound, and no change must be within it.

    This is the algorithm ddmin of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE
    TSE 28, 2002), section 3.

    Args:
        count: number of changes, at least 1. exceeds: measures the program with the changes of a set of indices.
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
