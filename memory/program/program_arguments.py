"""Finds the role of each argument of a program, from its signature, its names and its data flow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from bytescope.memory.devices.signature import Signature, SignatureLeaf
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.program import roles
from bytescope.memory.program.pairing import Keys, ResultPair, common_keys, keys_of, pairs, root_of
from bytescope.memory.program.roles import Evidence
from bytescope.memory.program.state_flow import SAME, StateFlow, Update, Value
from bytescope.memory.records.buffer_records import RowName


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that is passed to a compiled program (an entry parameter of its HLO module).

    Fields:
        path: the pytree path in the arguments of the user's function.
        role: what the array is used for, such as "params" or "optimizer".
        owner: the path of the model parameter that an optimizer moment or a gradient accumulator belongs to, "" for
            none.
        update: position of the result that is the updated array, -1 for none.
        shape: shape over all devices if jax provides it, otherwise the shape on one device.
        donated: whether the program may reuse the argument's memory.
        devices: number of devices that hold the array before the call, 0 if it is unknown.
    """

    path: str
    role: RowName
    owner: str = ""
    update: int = -1
    shape: tuple[int, ...] = ()
    donated: bool = False
    devices: int = 0


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a compiled program.

    Fields:
        by_number: number of an entry parameter of the HLO module -> argument.
        owners: HLO value, as (instruction id, tuple index), from which a model parameter is updated -> path of this
            parameter. An example of such a value is the gradient.
        results: position of a result that is a gradient -> path of its model parameter.
    """

    by_number: Mapping[int, Argument] = dataclasses.field(default_factory=dict)
    owners: Mapping[Value, str] = dataclasses.field(default_factory=dict)
    results: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def roles(self) -> dict[int, RowName]:
        """Maps the number of each entry parameter to its role, such as "params" or "optimizer"."""
        return {number: argument.role for number, argument in self.by_number.items()}

    def path(self, number: int) -> str:
        """Returns the pytree path of an entry parameter, "" if the number is unknown."""
        return self.by_number[number].path if number in self.by_number else ""

    def of_role(self, role: RowName) -> list[int]:
        """Returns the numbers of the entry parameters with a role, such as "params"."""
        return [number for number, argument in self.by_number.items() if argument.role == role]


def read(program: HloProgram, signature: Signature | None = None, extra: Iterable[tuple[str, str]] = ()) -> Arguments:
    """Returns the arguments of a compiled program, with their roles.

    Args:
        signature: the names and shapes that jax provides. Without it, the names and shapes in the HLO module are used.
        extra: the caller's pairs (regular expression for pytree paths, role). They take precedence over the built-in
            rules.

    Raises ReportError for an unknown role or an invalid pattern.
    """
    return _Reading(program, StateFlow(program.module), signature, tuple(extra)).arguments()


class _Reading:
    """Reads one program's arguments and results, and collects the evidence for the role of each argument."""

    def __init__(
        self, program: HloProgram, state: StateFlow, signature: Signature | None, extra: tuple[tuple[str, str], ...]
    ):
        self.module, self.state, self.extra = program.module, state, extra
        self.leaves = self._argument_leaves(signature)
        self.values = state.results()
        self.results = self._result_leaves(signature)
        self.updates = [state.update(*value) for value in self.values]
        numbers = {leaf.parameter: place for place, leaf in enumerate(self.leaves)}
        aliased: dict[int, int] = {}
        for output, number, index in self.module.aliases:
            if number in numbers and not index:
                aliased[output[0] if output else 0] = numbers[number]
        self.pairs: dict[int, ResultPair] = {
            pair.argument: pair for pair in pairs(self.leaves, self.results, self.updates, state.trained, aliased)
        }
        self.reads = [state.reads(leaf.parameter) for leaf in self.leaves]

    def _argument_leaves(self, signature: Signature | None) -> list[SignatureLeaf]:
        known = signature.by_parameter if signature is not None else {}
        aliased = {number for _, number, _ in self.module.aliases}
        leaves = []
        for number, parameter in sorted(self.module.parameters.items()):
            leaf = known.get(number)
            if leaf is None:
                shape = self.module.shape(parameter)
                path = self.module.metadata(parameter).op_name or parameter.name
                leaf = SignatureLeaf(path, shape.dims, shape.dtype, number in aliased, number)
            leaves.append(leaf)
        return leaves

    def _result_leaves(self, signature: Signature | None) -> list[SignatureLeaf]:
        known = signature.results if signature is not None else ()
        if known and len(known) <= len(self.values):
            # A compiled program may first return HLO tokens, which order side effects and hold no data.
            return [SignatureLeaf("", (), "token")] * (len(self.values) - len(known)) + list(known)
        shapes = [self.module.shape(*value) for value in self.values]
        return [SignatureLeaf("", shape.dims, shape.dtype) for shape in shapes]

    def arguments(self) -> Arguments:
        """Returns the arguments with their roles. The roles are decided twice, because optimizer moments and gradients
        are recognized by the parameters that they resemble."""
        evidence = [self._evidence(place) for place in range(len(self.leaves))]
        weights = _weight_argument_names(evidence)
        evidence = [dataclasses.replace(one, weights=root_of(one.path) in weights) for one in evidence]
        first = self._decide_roles(evidence)
        if "params" not in first:
            evidence = [dataclasses.replace(one, no_params=True) for one in evidence]
            first = self._decide_roles(evidence)
        mirrored = self._moment_like_leaves([leaf for leaf, role in zip(self.leaves, first) if role == "params"])
        repeats = self._leaves_that_repeat_params(evidence, first)
        shaped = _weight_like_argument_names(evidence, first)
        evidence = [
            dataclasses.replace(
                one, mirrors=place in mirrored, repeats=place in repeats, shaped=root_of(one.path) in shaped
            )
            for place, one in enumerate(evidence)
        ]
        decided = self._decide_roles(evidence)
        # Leaves that learn come first: a moment belongs to the parameters, not to a copy of them from earlier steps.
        ranked = sorted(range(len(decided)), key=lambda place: not evidence[place].learns)
        owner = _Owners([self.leaves[place] for place in ranked if decided[place] == "params"])
        by_number, results = {}, {}
        for place, (leaf, role) in enumerate(zip(self.leaves, decided)):
            pair, changed = self.pairs.get(place), self._find_update_pair(place)
            update = changed.result if changed is not None else -1
            by_number[leaf.parameter] = Argument(
                leaf.path,
                role,
                owner.find_path(leaf, role),
                update,
                leaf.shape,
                leaf.donated,
                leaf.devices,
            )
            if pair is not None and pair.gradient and role == "params":
                results[pair.result] = leaf.path
        return Arguments(by_number, self._path_by_value(by_number, results), results)

    def _decide_roles(self, evidence: Sequence[Evidence]) -> list[RowName]:
        decided = roles.mark_frozen(evidence, roles.decide(evidence))
        # The caller's patterns have priority over the evidence.
        return [roles.given(one.path, self.extra) or role for one, role in zip(evidence, decided)]

    def _evidence(self, place: int) -> Evidence:
        leaf, pair, reads = self.leaves[place], self.pairs.get(place), self.reads[place]
        changed = self._find_update_pair(place)
        state = changed is not None
        learns = changed is not None and self.state.trained and self.state.from_backward(*self.values[changed.result])
        return Evidence(
            leaf.path,
            leaf.shape,
            leaf.dtype,
            self.state.trained,
            state,
            any((leaf.shape, leaf.dtype) == (result.shape, result.dtype) for result in self.results),
            bool(pair is not None and pair.gradient),
            learns,
            # Read by the model, not only by the update. A matrix product without a name is assumed to be the model's.
            reads.by_model or (reads.unnamed if self.state.trained else reads.products),
            "forward" in reads.phases,
            reads.products,
            reads.random,
            batch_dim=not state and leaf.shape[:1] in self._batch_dims,
        )

    def _find_update_pair(self, place: int) -> ResultPair | None:
        pair = self.pairs.get(place)
        if pair is None or pair.gradient:
            return None
        update = self.updates[pair.result]
        return pair if update.changed or update.arguments.get(self.leaves[place].parameter) != SAME else None

    @functools.cached_property
    def _batch_dims(self) -> frozenset[tuple[int, ...]]:
        # Arrays that begin with a batch dimension are data, not weights.
        paired = {pair.result for pair in self.pairs.values()}
        batched = [leaf for place, leaf in enumerate(self.results) if place not in paired and leaf.dtype != "token"]
        for place, leaf in enumerate(self.leaves):
            if leaf.dtype in ("int16", "int32", "int64") and place not in self.pairs:
                batched.append(leaf)
        return frozenset(leaf.shape[:1] for leaf in batched if leaf.shape)

    def _moment_like_leaves(self, params: Sequence[SignatureLeaf]) -> frozenset[int]:
        owners = _Owners(params)
        mirrored = set()
        for place, leaf in enumerate(self.leaves):
            is_state = self._find_update_pair(place) is not None
            # A leaf with the shape and the last keys of a parameter, or, if it has no keys, with its shape alone.
            if leaf not in params and owners.find(leaf, by_shape=is_state) is not None:
                mirrored.add(place)
        return frozenset(mirrored)

    def _leaves_that_repeat_params(self, evidence: Sequence[Evidence], decided: Sequence[str]) -> frozenset[int]:
        """Returns the positions of the leaves for which `Evidence.repeats` is true, such as moments whose paths end in
        `['params']['w']`, like the path of their parameter."""
        params = [
            leaf
            for leaf, one, role in zip(self.leaves, evidence, decided)
            if role == "params" and one.read and one.learns
        ]
        owners, numbers = _Owners(params), {leaf.parameter for leaf in params}
        repeats = set()
        for place, (leaf, one) in enumerate(zip(self.leaves, evidence)):
            pair = self._find_update_pair(place)
            if pair is None or one.container != "params" or one.read or not one.learns:
                continue
            param = owners.find(leaf, by_shape=False)
            # A copy of a parameter, such as a moving average, is computed from the parameter. A moment is not.
            if param is None or not numbers.isdisjoint(self.updates[pair.result].arguments):
                continue
            keys = keys_of(leaf.path)
            if roles.names_group(keys[len(keys) - common_keys(keys, keys_of(param.path)) :]):
                repeats.add(place)
        return frozenset(repeats)

    def _path_by_value(self, arguments: Mapping[int, Argument], gradients: Mapping[int, str]) -> dict[Value, str]:
        out: dict[Value, str] = {}
        # Of several updates that use a value, the update with the fewest values decides.
        for place, update in sorted(enumerate(self.updates), key=lambda item: len(item[1].values)):
            path = gradients.get(place) or _updated_path(update, arguments)
            if path:
                for value in update.values:
                    out.setdefault(value, path)
        return out


def _updated_path(update: Update, arguments: Mapping[int, Argument]) -> str:
    sources = [arguments[number] for number in update.arguments if number in arguments]
    params = [argument.path for argument in sources if argument.role == "params"]
    owners = {argument.owner for argument in sources if argument.owner}
    if len(params) == 1:
        return params[0]
    return owners.pop() if not params and len(owners) == 1 else ""


def _frozen_candidates_by_argument(evidence: Sequence[Evidence]) -> dict[str, list[Evidence]]:
    leaves: dict[str, list[Evidence]] = {}
    for one in evidence:
        if one.floats and not one.state:
            leaves.setdefault(root_of(one.path), []).append(one)
    return {root: group for root, group in leaves.items() if len(group) > 1}


def _weight_argument_names(evidence: Sequence[Evidence]) -> frozenset[str]:
    roots = set()
    for root, group in _frozen_candidates_by_argument(evidence).items():
        weights = sum(math.prod(one.shape) for one in group if one.weight)
        if 2 * weights > sum(math.prod(one.shape) for one in group):
            roots.add(root)
    return frozenset(roots)


def _weight_like_argument_names(evidence: Sequence[Evidence], decided: Sequence[str]) -> frozenset[str]:
    dims = {1}
    for one, role in zip(evidence, decided):
        if role == "params" and one.learns:
            # 4-bit codes are packed two per byte and have one scale per block of 64.
            for dim in one.shape:
                dims.update(dim // part for part in (1, 2, 64) if dim % part == 0)
    roots = set()
    for root, group in _frozen_candidates_by_argument(evidence).items():
        alike = [one for one in group if len(one.shape) > 1 and one.forward and dims.issuperset(one.shape)]
        elements = sum(math.prod(one.shape) for one in alike)
        if 2 * elements > sum(math.prod(one.shape) for one in group) or 2 * len(alike) > len(group):
            roots.add(root)
    return frozenset(roots)


class _Owners:
    """Finds the model parameter that an optimizer moment or a gradient belongs to, by the last keys of the pytree
    paths."""

    def __init__(self, params: Sequence[SignatureLeaf]):
        self.by_last: dict[str, list[tuple[Keys, SignatureLeaf]]] = {}
        self.by_shape: dict[tuple[int, ...], list[SignatureLeaf]] = {}
        for leaf in params:
            keys = keys_of(leaf.path)
            self.by_last.setdefault(keys[-1] if keys else "", []).append((keys, leaf))
            self.by_shape.setdefault(leaf.shape, []).append(leaf)

    def find_path(self, leaf: SignatureLeaf, role: str) -> str:
        if role not in ("optimizer", "accumulator", "gradients"):
            return ""
        parameter = self.find(leaf, same_shape=False)
        return parameter.path if parameter is not None else ""

    def find(self, leaf: SignatureLeaf, *, same_shape: bool = True, by_shape: bool = True) -> SignatureLeaf | None:
        """Returns the model parameter whose path has the most last keys in common with the leaf's path. Returns None if
        they have no name in common.

        leaf: the optimizer moment or gradient. same_shape: only consider parameters of the leaf's shape. by_shape: if
        the leaf's path has no names, return the only parameter of its shape; None if there are several.
        """
        keys = keys_of(leaf.path)
        most_common, best = 0, None
        for own, param in self.by_last.get(keys[-1] if keys else "", ()) if leaf.shape else ():
            common = common_keys(keys, own)
            if common > most_common and (param.shape == leaf.shape or not same_shape):
                most_common, best = common, param
        if best is not None and not all(key.isdigit() for key in keys[len(keys) - most_common :]):
            return best
        shaped = self.by_shape.get(leaf.shape, ()) if leaf.shape and by_shape else ()
        return shaped[0] if len(shaped) == 1 and all(key.isdigit() for key in keys) else None
