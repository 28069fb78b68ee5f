"""Searches for the change at which a bound is first exceeded: binary search in a sequence of versions, delta debugging
in a set of changes.

Both searches get a function that compiles one candidate. It returns True if the candidate exceeds the bound, False if
it is within the bound, and None if it cannot be compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Interval:
    """The result of a search in a sequence of versions.

    Fields:
        before: index of the last version before the change; this version is within the bound.
        after: index of the first version after the change; this version exceeds the bound. The versions between
            `before` and `after`, if there are any, could not be compiled.
    """

    before: int
    after: int


def search_sequence(
    count: int, exceeds: Callable[[int], bool | None], known: Mapping[int, bool | None] | None = None
) -> Interval:
    """Finds two neighbouring versions of which the older one is within the bound and the newer one exceeds the bound,
    by binary search, and returns their indices. The caller must know that the first version is within the bound and
    that the last version exceeds the bound.

    About log2(count) versions are compiled if all of them can be compiled. If a version cannot be compiled, its nearest
    neighbours are tried. Known versions are not compiled: the search begins between the first version that is known to
    exceed the bound and the last one before it that is known to be within the bound.

    Args:
        count: number of versions, at least 2.
        exceeds: function that compiles the version with an index. Returns True if the version exceeds the bound, False
            if it is within the bound, None if it cannot be compiled.
        known: index of a version that was compiled before -> what `exceeds` returns for it.
    """
    known = known or {}
    after = min((index for index, answer in known.items() if answer), default=count - 1)
    before = max((index for index, answer in known.items() if answer is False and index < after), default=0)
    unmeasured = {index for index, answer in known.items() if answer is None}
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
    """Returns the indices of a minimal set of changes with which the program exceeds the bound: without any one of
    these changes, the program is within the bound or cannot be compiled. The caller must know that the program with all
    changes exceeds the bound, and that the program without any change is within the bound.

    The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28,
    2002), section 3.

    Args:
        count: number of changes, at least 1.
        exceeds: function that compiles the program with the changes of a set of indices. Returns True if the program
            exceeds the bound, False if it is within the bound, None if it cannot be compiled.
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
