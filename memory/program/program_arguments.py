"""The arguments of a program with their roles: what its signature, its names and the flow of its values tell."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from bytescope.memory.devices.signature import Signature, SignatureLeaf
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import Index
from bytescope.memory.program import roles
from bytescope.memory.program.pairing import Keys, ResultPair, common_keys, keys_of, pairs, root_of
from bytescope.memory.program.roles import Evidence
from bytescope.memory.program.state_flow import SAME, Reads, StateFlow, Update, Value


@dataclasses.dataclass(frozen=True)
class Argument:
    """One entry parameter.

    Fields:
        path: as the caller named it; role: a row of the breakdown.
        owner: path of the parameter that a moment or a sum of gradients belongs to, "" for none.
        update: place of the result that is its update, -1 for none. shape: over all devices, where jax told it.
    """

    path: str
    role: str
    owner: str = ""
    update: int = -1
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a program.

    Fields:
        by_number: entry parameter number -> argument.
        owners: a value on the way to an update -> path of the parameter that is updated: gradients among them.
        results: place of a result -> path of the parameter whose gradient it is.
    """

    by_number: Mapping[int, Argument] = dataclasses.field(default_factory=dict)
    owners: Mapping[Value, str] = dataclasses.field(default_factory=dict)
    results: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def roles(self) -> dict[int, str]:
        """Entry parameter number -> role."""
        return {number: argument.role for number, argument in self.by_number.items()}

    def path(self, number: int) -> str:
        """The path of an entry parameter, "" for an unknown one."""
        return self.by_number[number].path if number in self.by_number else ""

    def of_role(self, role: str) -> list[int]:
        """Numbers of the entry parameters in a role."""
        return [number for number, argument in self.by_number.items() if argument.role == role]


def read(
    program: HloProgram,
    flow: Flow | None = None,
    signature: Signature | None = None,
    extra: Iterable[tuple[str, str]] = (),
) -> Arguments:
    """The arguments of a program.

    Args:
        flow: of its module, where there is one already. signature: what jax tells of it; without it the module's
            names and shapes are what there is.
        extra: (pattern, role) pairs, which go before all else.

    Raises ReportError for a role or a pattern that is not valid.
    """
    state = StateFlow(flow or Flow(program.module))
    return _Reading(program, state, signature, tuple(extra)).arguments()


class _Reading:
    """One program's leaves, and what is known of each."""

    def __init__(
        self, program: HloProgram, state: StateFlow, signature: Signature | None, extra: tuple[tuple[str, str], ...]
    ):
        self.module, self.state, self.extra = program.module, state, extra
        self.leaves = self._arguments(signature)
        outside = state.results()
        self.results = self._results(signature, outside)
        self.updates = [state.update(*value) for value in outside]
        self.values = outside
        numbers = {leaf.parameter: place for place, leaf in enumerate(self.leaves)}
        aliased = {
            output[0] if output else 0: numbers[number]
            for output, number, index in self.module.aliases
            if number in numbers and not index
        }
        self.pairs: dict[int, ResultPair] = {
            pair.argument: pair for pair in pairs(self.leaves, self.results, self.updates, state.trained, aliased)
        }
        self.reads = [state.reads(leaf.parameter) for leaf in self.leaves]

    def _arguments(self, signature: Signature | None) -> list[SignatureLeaf]:
        """The leaves that the program uses, by number; those of the module where jax does not tell."""
        told = signature.by_parameter if signature is not None else {}
        aliased = {number for _, number, _ in self.module.aliases}
        return [
            told.get(number) or self._leaf(number, parameter, number in aliased)
            for number, parameter in sorted(self.module.parameters.items())
        ]

    def _leaf(self, number: int, parameter: Instruction, donated: bool) -> SignatureLeaf:
        shape = self.module.shape(parameter)
        path = self.module.metadata(parameter).op_name or parameter.name
        return SignatureLeaf(path, shape.dims, shape.dtype, donated, number)

    def _results(
        self, signature: Signature | None, outside: Sequence[tuple[Instruction, Index]]
    ) -> list[SignatureLeaf]:
        """The leaves of the results; tokens, which come first in the module, have none."""
        told = signature.results if signature is not None else ()
        if told and len(told) <= len(outside):
            return [SignatureLeaf("", (), "token")] * (len(outside) - len(told)) + list(told)
        shapes = [self.state.flow.shape(*value) for value in outside]
        return [SignatureLeaf("", shape.dims, shape.dtype) for shape in shapes]

    def arguments(self) -> Arguments:
        """Decides on the parameters first: what mirrors them is seen then."""
        evidence = self._all_evidence()
        first = self._decided(evidence)
        if "params" not in first:
            evidence = [dataclasses.replace(one, alone=True) for one in evidence]
            first = self._decided(evidence)
        mirrored = self._mirrored([leaf for leaf, role in zip(self.leaves, first) if role == "params"])
        shaped = _shaped(evidence, first)
        evidence = [
            dataclasses.replace(one, mirrors=place in mirrored, shaped=root_of(one.path) in shaped)
            for place, one in enumerate(evidence)
        ]
        found = self._decided(evidence)
        # What learns comes first: a moment is of the parameters, not of their copy of some steps ago.
        ranked = sorted(range(len(found)), key=lambda place: not evidence[place].learns)
        owner = _Owners([self.leaves[place] for place in ranked if found[place] == "params"])
        by_number, results = {}, {}
        for place, (leaf, role) in enumerate(zip(self.leaves, found)):
            pair, changed = self.pairs.get(place), self._update_of(place)
            update = changed.result if changed is not None else -1
            by_number[leaf.parameter] = Argument(leaf.path, role, owner.of(leaf, role), update, leaf.shape)
            if pair is not None and pair.gradient and role == "params":
                results[pair.result] = leaf.path
        return Arguments(by_number, self._values(by_number, results), results)

    def _decided(self, evidence: Sequence[Evidence]) -> list[str]:
        told = [roles.given(one.path, self.extra) for one in evidence]
        return [given or role for given, role in zip(told, roles.frozen(evidence, roles.decide(evidence)))]

    def _all_evidence(self) -> list[Evidence]:
        evidence = [self._evidence(place) for place in range(len(self.leaves))]
        weights = _by_argument(evidence)
        return [dataclasses.replace(one, weights=root_of(one.path) in weights) for one in evidence]

    def _evidence(self, place: int) -> Evidence:
        leaf, pair, reads = self.leaves[place], self.pairs.get(place), self.reads[place]
        changed = self._update_of(place)
        state = changed is not None
        learns = changed is not None and self.state.trained and self.state.from_backward(*self.values[changed.result])
        return Evidence(
            leaf.path,
            leaf.shape,
            leaf.dtype,
            self.state.trained,
            state,
            self._returned(leaf),
            bool(pair is not None and pair.gradient),
            learns,
            self._is_read(reads),
            "forward" in reads.phases,
            reads.products,
            reads.random,
            batch_dim=not state and leaf.shape[:1] in self._batch_dims,
        )

    def _update_of(self, place: int) -> ResultPair | None:
        """Returns the pair of an argument that is returned with other values; None for any other argument."""
        pair = self.pairs.get(place)
        if pair is None or pair.gradient:
            return None
        update = self.updates[pair.result]
        return pair if update.changed or update.arguments.get(self.leaves[place].parameter) != SAME else None

    def _is_read(self, reads: Reads) -> bool:
        """Whether the model reads an argument, not the update alone: a product whose name is lost is the model's."""
        return reads.by_model or (reads.unnamed if self.state.trained else reads.products)

    def _returned(self, leaf: SignatureLeaf) -> bool:
        return any((leaf.shape, leaf.dtype) == (result.shape, result.dtype) for result in self.results)

    @functools.cached_property
    def _batch_dims(self) -> frozenset[tuple[int, ...]]:
        """First dimensions of results that are no state, and of data that are whole numbers."""
        taken = {pair.result for pair in self.pairs.values()}
        free = [leaf for place, leaf in enumerate(self.results) if place not in taken]
        data = [
            leaf
            for place, leaf in enumerate(self.leaves)
            if leaf.dtype in ("int16", "int32", "int64") and leaf.shape and place not in self.pairs
        ]
        return frozenset(leaf.shape[:1] for leaf in (*free, *data) if leaf.shape and leaf.dtype != "token")

    def _mirrored(self, params: Sequence[SignatureLeaf]) -> frozenset[int]:
        """Places of leaves, no parameters, with the shape and the last keys of one; of state without keys, with the
        shape of the only one."""
        owners = _Owners(params)
        return frozenset(
            place
            for place, leaf in enumerate(self.leaves)
            if leaf not in params and owners.alike(leaf, alone=self._update_of(place) is not None) is not None
        )

    def _values(self, arguments: Mapping[int, Argument], gradients: Mapping[int, str]) -> dict[Value, str]:
        """Every value on the way to the update of a parameter, or to its gradient, that of the fewest ways first."""
        out: dict[Value, str] = {}
        for place, update in sorted(enumerate(self.updates), key=lambda item: len(item[1].values)):
            path = gradients.get(place) or _updated(update, arguments)
            if path:
                for value in update.values:
                    out.setdefault(value, path)
        return out


def _updated(update: Update, arguments: Mapping[int, Argument]) -> str:
    """The parameter that an update is for: the one that it is made of, else the one whose moment it is made of."""
    made = [arguments[number] for number in update.arguments if number in arguments]
    params = [argument.path for argument in made if argument.role == "params"]
    owners = {argument.owner for argument in made if argument.owner}
    if len(params) == 1:
        return params[0]
    return owners.pop() if not params and len(owners) == 1 else ""


def _by_argument(evidence: Sequence[Evidence]) -> frozenset[str]:
    """Roots of several leaves most of whose bytes, as far as they are unnamed numbers with a fraction, are weights."""
    leaves: dict[str, list[Evidence]] = {}
    for one in evidence:
        if one.floats and not one.state:
            leaves.setdefault(root_of(one.path), []).append(one)
    return frozenset(
        root
        for root, group in leaves.items()
        if len(group) > 1
        and 2 * sum(math.prod(one.shape) for one in group if one.weight) > sum(math.prod(one.shape) for one in group)
    )


def _shaped(evidence: Sequence[Evidence], found: Sequence[str]) -> frozenset[str]:
    """Roots of several leaves most of which, by elements or by number, have dimensions of what learns, or parts of
    them: 4-bit codes are two a byte, their scales one a block of 64. Data have a batch."""
    known = {dim for one, role in zip(evidence, found) if role == "params" and one.learns for dim in one.shape}
    parts = {dim // part for dim in known for part in (1, 2, 64) if dim % part == 0} | {1}
    leaves: dict[str, list[tuple[int, bool]]] = {}
    for one in evidence:
        if one.floats and not one.state:
            alike = len(one.shape) > 1 and one.forward and parts.issuperset(one.shape)
            leaves.setdefault(root_of(one.path), []).append((math.prod(one.shape), alike))
    return frozenset(
        root
        for root, group in leaves.items()
        if len(group) > 1
        and (
            2 * sum(size for size, alike in group if alike) > sum(size for size, _ in group)
            or 2 * sum(alike for _, alike in group) > len(group)
        )
    )


class _Owners:
    """Parameters by their last keys: which of them a leaf of another argument belongs to."""

    def __init__(self, params: Sequence[SignatureLeaf]):
        self.by_last: dict[str, list[tuple[Keys, SignatureLeaf]]] = {}
        self.by_shape: dict[tuple[int, ...], list[SignatureLeaf]] = {}
        for leaf in params:
            keys = keys_of(leaf.path)
            self.by_last.setdefault(keys[-1] if keys else "", []).append((keys, leaf))
            self.by_shape.setdefault(leaf.shape, []).append(leaf)

    def of(self, leaf: SignatureLeaf, role: str) -> str:
        """The path of the parameter that a leaf in the optimizer's or the gradients' rows belongs to, "" for none."""
        if role not in ("optimizer", "accumulator", "gradients"):
            return ""
        found = self.alike(leaf, same_shape=False)
        return found.path if found is not None else ""

    def alike(self, leaf: SignatureLeaf, *, same_shape: bool = True, alone: bool = True) -> SignatureLeaf | None:
        """The parameter with most of the last keys of a leaf; with `alone`, the only one of its shape where a leaf has
        no names."""
        keys = keys_of(leaf.path)
        found = [
            (common_keys(keys, own), param)
            for own, param in self.by_last.get(keys[-1] if keys else "", ())
            if (param.shape == leaf.shape or not same_shape) and leaf.shape
        ]
        best = max(found, key=lambda item: item[0], default=(0, None))
        if best[0] and not all(key.isdigit() for key in keys[len(keys) - best[0] :]):
            return best[1]
        shaped = self.by_shape.get(leaf.shape, ()) if leaf.shape and alone else ()
        return shaped[0] if len(shaped) == 1 and all(key.isdigit() for key in keys) else None
