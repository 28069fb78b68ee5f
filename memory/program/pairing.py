"""Pairs each result with the argument that it updates: by path, shape and dtype first, then by data flow. Pure.

A path is split into a root and keys: `state.params['w']` has the root `state` and the keys params and w,
`args[0]['w']` the root `args[0]` and the key w. Paths of results have no root. Positions in tuples ("[0]") are weak
evidence: they count only if all leaves of an argument are returned together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bytescope.memory.devices.signature import SignatureLeaf
from bytescope.memory.program.state_flow import ELEMENTWISE, SAME, WRITTEN, Update

_KEY = re.compile(r"\.(\w+)|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]|\[([^\]]*)\]")
# Roots of positional arguments.
_PLACED = ("args", "flat_args")

Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ResultPair:
    """An argument of a program, paired with the result that is its updated value or its gradient.

    Fields:
        argument, result: positions in the lists of arguments and results.
        gradient: whether the result is the argument's gradient.
    """

    argument: int
    result: int
    gradient: bool = False


def keys_of(path: str) -> Keys:
    """Returns the keys of a pytree path, without the argument's name: `state.params['w'][0]` -> ("params", "w",
    "0")."""
    return tuple(next(filter(None, match), "") for match in _KEY.findall(path[len(root_of(path)) :]))


def root_of(path: str) -> str:
    """Returns the name of the argument in which a pytree path begins, such as "state" or "args[1]". Returns "" for the
    path of a result."""
    name = re.split(r"\W", path, maxsplit=1)[0]
    place = re.match(r"\[\d+\]", path[len(name) :])
    return name + place[0] if name in _PLACED and place else name


def pairs(
    arguments: Sequence[SignatureLeaf],
    results: Sequence[SignatureLeaf],
    updates: Sequence[Update],
    trained: bool,
    aliased: Mapping[int, int],
) -> list[ResultPair]:
    """Pairs arguments with the results that are their updated values or gradients. Each result is in at most one pair.

    Args:
        arguments, results: the arrays with their pytree paths. Results of an XLA dump have no paths.
        updates: for each result, the arguments from which it is computed element by element.
        trained: whether the program has a backward pass.
        aliased: position of a result -> position of the argument whose memory it reuses.
    """
    pairing = _Pairing(arguments, results, updates, trained)
    for candidates in (pairing.whole_arguments(), pairing.by_keys(), pairing.by_flow(), aliased.items()):
        pairing.add_unpaired(candidates)
    return [
        ResultPair(argument, result, pairing.is_gradient(argument, result))
        for result, argument in pairing.taken.items()
    ]


class _Pairing:
    """Pairs results of a program with arguments of the same shape and dtype. Each result and argument is in at most one
    pair.

    taken: position of a result -> position of the paired argument.
    """

    def __init__(
        self,
        arguments: Sequence[SignatureLeaf],
        results: Sequence[SignatureLeaf],
        updates: Sequence[Update],
        trained: bool,
    ):
        self.arguments, self.results, self.updates, self.trained = arguments, results, updates, trained
        self.taken: dict[int, int] = {}
        self.back: set[int] = set()
        self.inside = [keys_of(leaf.path) for leaf in arguments]
        self.outside = [keys_of(leaf.path) for leaf in results]
        self.by_array: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for place, leaf in enumerate(results):
            self.by_array.setdefault(_array(leaf), []).append(place)

    def add_unpaired(self, pairs: Iterable[tuple[int, int]]) -> None:
        for result, argument in pairs:
            if result not in self.taken and argument not in self.back and self._same(argument, result):
                self.taken[result] = argument
                self.back.add(argument)

    def is_gradient(self, argument: int, result: int) -> bool:
        update = self.updates[result]
        # A result that is computed elementwise from the argument is its update, not its gradient.
        return update.phase == "backward" and self.arguments[argument].parameter not in update.arguments

    def _same(self, argument: int, result: int) -> bool:
        return _array(self.arguments[argument]) == _array(self.results[result])

    def whole_arguments(self) -> Iterator[tuple[int, int]]:
        """Yields the positions (result, argument) of pairs that belong to an argument which the function returns as a
        whole, such as the train state. An argument is returned as a whole if every array in it has a result whose path
        ends in the same keys, and these results have a common path prefix. Updated arguments come before gradients.
        """
        roots: dict[str, list[int]] = {}
        for place, leaf in enumerate(self.arguments):
            roots.setdefault(root_of(leaf.path), []).append(place)
        below = {keys: place for place, keys in enumerate(self.outside)}
        for places in roots.values():
            if len(places) < 2 and not _has_name(self.inside[places[0]]):
                continue
            matches = []
            for result in self.by_array.get(_array(self.arguments[places[0]]), ()):
                own, mine = self.outside[result], self.inside[places[0]]
                if own[len(own) - len(mine) :] != mine:
                    continue
                trunk = own[: len(own) - len(mine)]
                results = [below.get(trunk + self.inside[place], -1) for place in places]
                if all(at >= 0 and self._same(place, at) for place, at in zip(places, results)):
                    matches.append((self.is_gradient(places[0], result), list(zip(results, places))))
            for _, matched in sorted(matches, key=lambda item: item[0]):
                yield from matched

    def by_keys(self) -> Iterator[tuple[int, int]]:
        """Yields the positions (result, argument) of pairs whose pytree paths end in equal keys. At least one of these
        keys must be a name, not a number. Pairs with more equal keys come first.
        """
        matches = []
        for argument, leaf in enumerate(self.arguments):
            for result in self.by_array.get(_array(leaf), ()):
                common = common_keys(self.inside[argument], self.outside[result])
                if _has_name(self.inside[argument][len(self.inside[argument]) - common :]):
                    matches.append((-common, result, argument))
        yield from ((result, argument) for _, result, argument in sorted(matches))

    def by_flow(self) -> Iterator[tuple[int, int]]:
        """Yields the positions (result, argument) of pairs in which the result is computed from the argument element by
        element. Results that depend on few arguments come first.
        """
        numbers = {leaf.parameter: place for place, leaf in enumerate(self.arguments)}
        for result in sorted(range(len(self.results)), key=lambda at: len(self.updates[at].arguments)):
            update = self.updates[result]
            for number, how in update.arguments.items():
                if number in numbers and self._is_update(how, update, self.results[result]):
                    yield result, numbers[number]
        # A result of the backward pass is the gradient of the first argument of its shape that has no gradient yet.
        for result, leaf in enumerate(self.results):
            is_gradient = self.updates[result].phase == "backward" and leaf.shape and "float" in leaf.dtype
            if self.trained and is_gradient:
                for place in range(len(self.arguments)):
                    if self._same(place, result):
                        yield result, place

    def _is_update(self, how: str, update: Update, result: SignatureLeaf) -> bool:
        if how == ELEMENTWISE:
            # Sums of activations depend on arguments too, so only values that the optimizer computes count.
            return self.trained and update.phase == "" and (bool(result.shape) or "int" in result.dtype)
        return how in (SAME, WRITTEN)


def _array(leaf: SignatureLeaf) -> tuple[tuple[int, ...], str]:
    return leaf.shape, leaf.dtype


def _has_name(keys: Keys) -> bool:
    return any(not key.isdigit() for key in keys)


def common_keys(one: Keys, other: Keys) -> int:
    """Returns the number of equal keys at the end of two pytree paths."""
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
