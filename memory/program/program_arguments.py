"""Finds the role of each argument of a program, from its signature, its names and its data flow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from bytescope.memory.devices.signature import Signature, SignatureLeaf
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.dataflow import Flow
from bytescope.memory.program import roles
from bytescope.memory.program.pairing import Keys, ResultPair, common_keys, keys_of, pairs, root_of
from bytescope.memory.program.roles import Evidence
from bytescope.memory.program.state_flow import SAME, StateFlow, Update, Value


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
    """

    path: str
    role: str
    owner: str = ""
    update: int = -1
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a compiled program.

    Fields:
        by_number: number of an entry parameter of the HLO module -> argument.
        owners: an HLO value from which a model parameter is updated, such as its gradient -> path of this parameter.
        results: position of a result that is a gradient -> path of its model parameter.
    """

    by_number: Mapping[int, Argument] = dataclasses.field(default_factory=dict)
    owners: Mapping[Value, str] = dataclasses.field(default_factory=dict)
    results: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def roles(self) -> dict[int, str]:
        """Maps the number of each entry parameter to its role, such as "params" or "optimizer"."""
        return {number: argument.role for number, argument in self.by_number.items()}

    def path(self, number: int) -> str:
        """Returns the pytree path of an entry parameter, "" if the number is unknown."""
        return self.by_number[number].path if number in self.by_number else ""

    def of_role(self, role: str) -> list[int]:
        """Returns the numbers of the entry parameters with a role, such as "params"."""
        return [number for number, argument in self.by_number.items() if argument.role == role]


def read(
    program: HloProgram,
    flow: Flow | None = None,
    signature: Signature | None = None,
    extra: Iterable[tuple[str, str]] = (),
) -> Arguments:
    """Returns the arguments of a compiled program, with their roles.

    Args:
        flow: the data flow between the instructions of the program's module, if it is already computed.
        signature: the names and shapes that jax provides. Without it, the names and shapes in the HLO module are used.
        extra: the caller's (regular expression, role) pairs. They take precedence over the rules.

    Raises ReportError for an unknown role or an invalid pattern.
    """
    state = StateFlow(flow or Flow(program.module))
    return _Reading(program, state, signature, tuple(extra)).arguments()


class _Reading:
    """Reads one program's arguments and results, and collects the evidence for the role of each argument."""

    def __init__(
        self, program: HloProgram, state: StateFlow, signature: Signature | None, extra: tuple[tuple[str, str], ...]
    ):
        self.module, self.state, self.extra = program.module, state, extra
        self.leaves = self._arguments(signature)
        self.values = state.results()
        self.results = self._results(signature)
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

    def _arguments(self, signature: Signature | None) -> list[SignatureLeaf]:
        """Returns the argument leaves that the program uses, in the order of their numbers. Names and shapes that the
        signature lacks are taken from the HLO module."""
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

    def _results(self, signature: Signature | None) -> list[SignatureLeaf]:
        """Returns the leaves of the program's results. A compiled program may first return HLO tokens, which order side
        effects and hold no data. The signature does not list them, so each token gets a leaf of dtype "token" before
        the others. Without a signature, the leaves have the shapes in the HLO module and no paths."""
        known = signature.results if signature is not None else ()
        if known and len(known) <= len(self.values):
            return [SignatureLeaf("", (), "token")] * (len(self.values) - len(known)) + list(known)
        shapes = [self.state.flow.shape(*value) for value in self.values]
        return [SignatureLeaf("", shape.dims, shape.dtype) for shape in shapes]

    def arguments(self) -> Arguments:
        """Returns the arguments with their roles. The roles are decided twice, because optimizer moments and gradients
        are recognized by the parameters that they resemble."""
        evidence = [self._evidence(place) for place in range(len(self.leaves))]
        weights = _weight_roots(evidence)
        evidence = [dataclasses.replace(one, weights=root_of(one.path) in weights) for one in evidence]
        first = self._decided(evidence)
        if "params" not in first:
            evidence = [dataclasses.replace(one, no_params=True) for one in evidence]
            first = self._decided(evidence)
        mirrored = self._mirrored([leaf for leaf, role in zip(self.leaves, first) if role == "params"])
        shaped = _shaped(evidence, first)
        evidence = [
            dataclasses.replace(one, mirrors=place in mirrored, shaped=root_of(one.path) in shaped)
            for place, one in enumerate(evidence)
        ]
        decided = self._decided(evidence)
        # Leaves that learn come first: a moment belongs to the parameters, not to a copy of them from earlier steps.
        ranked = sorted(range(len(decided)), key=lambda place: not evidence[place].learns)
        owner = _Owners([self.leaves[place] for place in ranked if decided[place] == "params"])
        by_number, results = {}, {}
        for place, (leaf, role) in enumerate(zip(self.leaves, decided)):
            pair, changed = self.pairs.get(place), self._changed_pair(place)
            update = changed.result if changed is not None else -1
            by_number[leaf.parameter] = Argument(leaf.path, role, owner.find_path(leaf, role), update, leaf.shape)
            if pair is not None and pair.gradient and role == "params":
                results[pair.result] = leaf.path
        return Arguments(by_number, self._values(by_number, results), results)

    def _decided(self, evidence: Sequence[Evidence]) -> list[str]:
        """Returns the role of each argument leaf. The caller's patterns decide first, then the evidence."""
        decided = roles.mark_frozen(evidence, roles.decide(evidence))
        return [roles.given(one.path, self.extra) or role for one, role in zip(evidence, decided)]

    def _evidence(self, place: int) -> Evidence:
        leaf, pair, reads = self.leaves[place], self.pairs.get(place), self.reads[place]
        changed = self._changed_pair(place)
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

    def _changed_pair(self, place: int) -> ResultPair | None:
        """Returns an argument and the result that is its updated value as a pair. Returns None if the program does not
        return the argument, or returns it unchanged.

        place: position of the argument in `self.leaves`."""
        pair = self.pairs.get(place)
        if pair is None or pair.gradient:
            return None
        update = self.updates[pair.result]
        return pair if update.changed or update.arguments.get(self.leaves[place].parameter) != SAME else None

    @functools.cached_property
    def _batch_dims(self) -> frozenset[tuple[int, ...]]:
        """Returns the likely batch dimensions, each as a tuple of one size: the first dimensions of integer arguments
        that are not returned, and of results that are paired with no argument. Arrays that begin with a batch dimension
        are data, not weights."""
        paired = {pair.result for pair in self.pairs.values()}
        batched = [leaf for place, leaf in enumerate(self.results) if place not in paired and leaf.dtype != "token"]
        for place, leaf in enumerate(self.leaves):
            if leaf.dtype in ("int16", "int32", "int64") and place not in self.pairs:
                batched.append(leaf)
        return frozenset(leaf.shape[:1] for leaf in batched if leaf.shape)

    def _mirrored(self, params: Sequence[SignatureLeaf]) -> frozenset[int]:
        """Returns the positions of argument leaves that look like an optimizer moment of a parameter: they have its
        shape and the last keys of its path. A state leaf whose path has no keys also counts if exactly one parameter
        has its shape.

        params: the leaves that are parameters.
        """
        owners = _Owners(params)
        mirrored = set()
        for place, leaf in enumerate(self.leaves):
            is_state = self._changed_pair(place) is not None
            if leaf not in params and owners.find(leaf, by_shape=is_state) is not None:
                mirrored.add(place)
        return frozenset(mirrored)

    def _values(self, arguments: Mapping[int, Argument], gradients: Mapping[int, str]) -> dict[Value, str]:
        """Maps HLO values to model parameters: a value from which an update or gradient is computed -> path of the
        parameter that is updated. If several updates use the value, the update that involves the fewest values decides.
        """
        out: dict[Value, str] = {}
        for place, update in sorted(enumerate(self.updates), key=lambda item: len(item[1].values)):
            path = gradients.get(place) or _updated_path(update, arguments)
            if path:
                for value in update.values:
                    out.setdefault(value, path)
        return out


def _updated_path(update: Update, arguments: Mapping[int, Argument]) -> str:
    """Returns the path of the model parameter to which an update belongs: the only parameter that the update reads or,
    if it reads none, the only parameter whose moments it reads. Returns "" if there are several."""
    sources = [arguments[number] for number in update.arguments if number in arguments]
    params = [argument.path for argument in sources if argument.role == "params"]
    owners = {argument.owner for argument in sources if argument.owner}
    if len(params) == 1:
        return params[0]
    return owners.pop() if not params and len(owners) == 1 else ""


def _by_root(evidence: Sequence[Evidence]) -> dict[str, list[Evidence]]:
    """Groups the arrays that can be frozen weights (float arrays that are not training state) by the function argument
    that contains them: name of the argument -> evidence of its arrays. Arguments with a single such array are left out.
    """
    leaves: dict[str, list[Evidence]] = {}
    for one in evidence:
        if one.floats and not one.state:
            leaves.setdefault(root_of(one.path), []).append(one)
    return {root: group for root, group in leaves.items() if len(group) > 1}


def _weight_roots(evidence: Sequence[Evidence]) -> frozenset[str]:
    """Returns the names of the function arguments in which more than half of the elements are in arrays that the
    program reads as weights."""
    roots = set()
    for root, group in _by_root(evidence).items():
        weights = sum(math.prod(one.shape) for one in group if one.weight)
        if 2 * weights > sum(math.prod(one.shape) for one in group):
            roots.add(root)
    return frozenset(roots)


def _shaped(evidence: Sequence[Evidence], decided: Sequence[str]) -> frozenset[str]:
    """Returns the names of the function arguments that are probably frozen weights, judged by shapes alone. In such an
    argument, more than half of the elements, or of the arrays, have only dimensions that also occur in trained
    parameters.

    A dimension divided by 2 or 64 counts too, because 4-bit codes are packed two per byte and have one scale per block
    of 64. Data, in contrast, have a batch dimension.
    """
    dims = {1}
    for one, role in zip(evidence, decided):
        if role == "params" and one.learns:
            for dim in one.shape:
                dims.update(dim // part for part in (1, 2, 64) if dim % part == 0)
    roots = set()
    for root, group in _by_root(evidence).items():
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
        """Returns the path of the model parameter that a leaf belongs to. Returns "" unless the leaf's role is
        optimizer, accumulator or gradients."""
        if role not in ("optimizer", "accumulator", "gradients"):
            return ""
        parameter = self.find(leaf, same_shape=False)
        return parameter.path if parameter is not None else ""

    def find(self, leaf: SignatureLeaf, *, same_shape: bool = True, by_shape: bool = True) -> SignatureLeaf | None:
        """Returns the model parameter whose path has the most last keys in common with the leaf's path. Returns None
        if they have no name in common.

        same_shape: only consider parameters of the leaf's shape. by_shape: if the leaf's path has no names, return the
        only parameter of its shape.
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
