"""Lists the values that a layer of any model can keep for its backward pass, and the keys by which a remat policy
recognizes them. A key is the primitive of an equation with its operand shapes and parameters.

The values are read from jax's derivative of the layer with everything kept, which returns the layer's result and the
values that the backward pass reads. A value can be kept if jax asks a policy about its equation, which jax does outside
of loops.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bytescope.memory.jaxprs import NAME, bodies, checkpoint_name_of, checkpoint_of, parameters
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding
from bytescope.memory.remat.layer_discovery import INLINED, Layer, input_specs, where_of
from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph, build_step, size_of
from bytescope.memory.remat.recognition import Value, Wanted, key_of, type_of

# Functions with a custom derivative rule. If such a function remains in a derivative, because the rule of another
# function calls it, jax asks a policy about the function as a whole.
_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))
# Calls whose bodies jax walks with the policy, or inlines when it differentiates.
_INLINED_CALLS = INLINED | _WITH_RULES
# Matches a scope opened by a user or a module, but not transformations (which have brackets) and einsum equations.
_SCOPE = re.compile(r"[\w.-]+")
# A matrix product with fewer FLOPs per byte of its result counts as elementwise work.
MIN_FLOPS_PER_BYTE = 4.0


@dataclasses.dataclass(frozen=True)
class LayerValues:
    """The values that the layers of a model can keep for the backward pass.

    Fields:
        graph: one layer that represents all layers of all kinds.
        values: label -> the value. A plan, the choice of the values to keep, refers to values by their labels.
        order: for each kind of layer, the keys (texts that describe an equation) of the equations that a policy
            distinguishes by their order.
        known: the keys of all equations of the layers.
    """

    graph: LayerGraph
    values: dict[str, Value]
    order: tuple[tuple[str, ...], ...]
    known: frozenset[str]

    def wanted(self, labels: Iterable[str]) -> Wanted:
        """Returns the names and equations by which a remat policy recognizes the values with these labels."""
        kept = [self.values[label] for label in labels]
        places = []
        for kind in range(len(self.order)):
            places.append(frozenset(value.place for value in kept if kind in value.kinds and value.place >= 0))
        return Wanted(
            frozenset(value.name for value in kept if value.name),
            frozenset(value.key for value in kept if not value.name and value.place < 0),
            self.order,
            tuple(places),
            self.known,
        )


@dataclasses.dataclass(frozen=True)
class _LayerEquation:
    """An equation of a layer, before it becomes a `GraphStep` with FLOPs and bytes.

    Fields:
        equation: the equation of the jaxpr.
        outs, ins: numbers of its results and operands.
        key: the key by which a remat policy recognizes the equation; "" if jax does not ask the policy about it.
        nested: whether the equation is in a body that jax inlines.
        parts: number of devices over which the result is sharded.
    """

    equation: Any
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    key: str
    nested: bool
    parts: int


def find_values(layers: Sequence[Layer], shards: JaxprSharding | None = None, ordered: bool = True) -> LayerValues:
    """Returns the values that the layers can keep for the backward pass.

    Args:
        layers: the kinds of layers.
        shards: the shardings in the program that contains the layers; None for one device.
        ordered: whether a policy may distinguish equations with equal keys by their order. This requires that jax
            visits the equations of a layer in the same order in the program and in the layer alone.
    """
    forwards = [LayerForward(layer, shards) for layer in layers]
    # A policy sees only the equation, not the kind of its layer. So a key that is ambiguous in one kind is ambiguous
    # in all kinds.
    hidden: set[str] = set()
    for forward in forwards:
        hidden |= forward.asked - {key for _, key in forward.order}
    first, carry = 0, 0
    steps: list[GraphStep] = []
    read: list[int] = []
    counted: dict[Any, Value] = {}
    orders = []
    for kind, (layer, forward) in enumerate(zip(layers, forwards)):
        order = [(number, key) for number, key in forward.order if key not in hidden] if ordered else []
        orders.append(tuple(key for _, key in order))
        labels = _labels(forward, order, kind, layer.times, counted)
        for number, one in enumerate(forward.equations):
            outs, ins = [first + value for value in one.outs], [first + value for value in one.ins]
            steps.append(build_step(one.equation, outs, ins, labels.get(number, ""), one.parts, layer.times))
        read += [first + value for value in forward.read]
        first += forward.count
        carry += layer.times * forward.result_bytes
    known: frozenset[str] = frozenset().union(*(forward.asked for forward in forwards))
    sizes: dict[int, int] = {}
    for step in steps:
        sizes.update(zip(step.outs, step.bytes))
    graph = LayerGraph(1, tuple(steps), tuple(sorted(read)), carry, sum(sizes[value] for value in read))
    graph = with_names(graph, worth_deciding(graph) | {value.label for value in counted.values() if value.name})
    values = {value.label: value for value in counted.values() if value.label in graph.names}
    return LayerValues(graph, values, tuple(orders), known)


def with_names(graph: LayerGraph, names: Collection[str]) -> LayerGraph:
    """Returns the graph in which only the values with these names can be kept."""
    steps = (step if step.name in names else dataclasses.replace(step, name="") for step in graph.steps)
    return dataclasses.replace(graph, steps=tuple(steps))


def worth_deciding(graph: LayerGraph) -> set[str]:
    """Returns the labels of the values that are worth keeping for some memory budget. The search for the best plan only
    has to decide about these values, and still finds the plan with the least recomputation.

    Elementwise work is assumed to cost nothing to recompute. A value is left out in two cases:

    - A value of at most the same size can be kept in its place.
    - It can be recomputed without a matrix product from a value that is always needed together with it.
    """
    users, together = _users_and_needed_together(graph)
    size: dict[int, int] = {}
    label: dict[int, str] = {}
    for step in graph.steps:
        size.update(zip(step.outs, step.bytes))
        label.update(dict.fromkeys(step.outs, step.name))
    members = Counter(label[value] for value in together if label.get(value))
    shared: set[str] = set()
    # Value -> bytes of the product that serves only this value: the value itself, or a product that only it reads.
    product_size: dict[int, int] = {}
    for step in graph.steps:
        only_here = [v for v in step.ins if v in product_size and v not in graph.read and len(users.get(v, ())) == 1]
        inherited = max((product_size[value] for value in only_here), default=0)
        for value, flops, count in zip(step.outs, step.flops, step.bytes):
            product = count if _is_product(flops, count) else 0
            if product or inherited:
                product_size[value] = product or inherited
            # A policy cannot distinguish the values of one label. Keeping them is worth it only if one of them is a
            # product, or takes fewer bytes than the product from which only this value is made.
            if value in together and members[step.name] > 1 and (product or count < inherited):
                shared.add(step.name)
    free_from = _recomputable_from(graph, shared)
    worth = set(shared)
    for value in together.keys() & free_from.keys():
        if members[label[value]] != 1:
            continue
        before = free_from[value] - {value}
        smaller = any(members[label[source]] == 1 and size[source] <= size[value] for source in before)
        readers: list[int] = []
        for step in users[value]:
            readers += step.outs
        replaced = False
        if value not in graph.read and len(readers) == 1:
            result = readers[0]
            # If two values of equal size can be recomputed from each other, only the second may be left out.
            same = size[result] == size[value] and value in free_from.get(result, ())
            replaced = members[label[result]] == 1 and size[result] <= size[value] and not same
        if not (smaller or replaced or before & together[value]):
            worth.add(label[value])
    return worth


def _is_product(flops: int, size: int) -> bool:
    return flops > 0 and flops >= MIN_FLOPS_PER_BYTE * size


def _users_and_needed_together(graph: LayerGraph) -> tuple[dict[int, list[GraphStep]], dict[int, set[int]]]:
    """Returns (value -> the equations that read it, value -> the other values that the backward pass needs whenever it
    needs this value). The values are those that the backward pass reads, or that are recomputed for it if nothing is
    kept.
    """
    users: dict[int, list[GraphStep]] = {value: [] for value in graph.read}
    together = {value: set(graph.read) - {value} for value in graph.read}
    for step in reversed(graph.steps):
        results = together.keys() & step.outs
        if not results:
            continue
        with_any_result = set.intersection(*(together[result] for result in results))
        for value in step.ins:
            users.setdefault(value, []).append(step)
            with_step = with_any_result.union(step.ins) - {value}
            together[value] = together.get(value, with_step) & with_step
    return users, together


def _recomputable_from(graph: LayerGraph, shared: Collection[str]) -> dict[int, set[int]]:
    """Returns value -> the values from any one of which it can be recomputed without a matrix product, including the
    value itself. A value that needs no matrix product at all is not in the mapping.

    `shared`: labels that belong to several values, which a policy can only keep together. Such a value counts as
    recomputable only from itself, because its label may be kept for the sake of the other values.
    """
    free_from: dict[int, set[int]] = {}
    for step in graph.steps:
        inputs = [free_from[value] for value in step.ins if value in free_from]
        for value, flops, count in zip(step.outs, step.flops, step.bytes):
            if _is_product(flops, count) or step.name in shared:
                free_from[value] = {value}
            elif inputs:
                free_from[value] = {value}.union(set.intersection(*inputs))
    return free_from


class LayerForward:
    """The forward pass of a layer, as jax runs it when it differentiates the layer.

    Attributes:
        equations: the equations in order.
        read: numbers of the values that the backward pass reads.
        count: number of values.
        asked: keys (texts that describe an equation) of the equations about which jax asks a remat policy.
        order: (index in `equations`, key) of the equations about which jax always asks in the same order, so that a
            policy can distinguish equations with equal keys.
        result_bytes: bytes of the layer's result on one device.
        unvarying: numbers of the values that are the same for all layers.
    """

    def __init__(self, layer: Layer, shards: JaxprSharding | None = None):
        shards = shards or JaxprSharding()
        jaxpr, self._shards = _jaxpr_with_residuals(layer), shards
        shards.walk(jaxpr.jaxpr, shards.layer_specs(layer.body.jaxpr))
        results = len(layer.body.jaxpr.outvars)
        calls = _policy_keys(layer)
        self.asked = frozenset(calls)
        self.equations: list[_LayerEquation] = []
        self.count = 0
        self.result_bytes = sum(size_of(v.aval) // shards.parts(v) for v in jaxpr.jaxpr.outvars[:results])
        self.unvarying: set[int] = set()
        inputs = [_Operand(None, number >= layer.constants) for number in range(len(jaxpr.jaxpr.invars))]
        outs = self._add_equations(jaxpr.jaxpr, inputs, nested=False)
        self.read = sorted({value.number for value in outs[results:] if value.number is not None})
        top = [(number, one.key) for number, one in enumerate(self.equations) if one.key and not one.nested]
        # A walk may lack equations that a derivative adds. Equations of the forward pass are in every walk.
        once = Counter(calls)
        derived, plain = Counter(key for _, key in top), Counter(_forward_keys(layer.body.jaxpr))
        hidden = {one.key for one in self.equations if one.nested} | set(_keys_inside_bodies(jaxpr.jaxpr))
        self.order = [
            (number, key)
            for number, key in top
            if key not in hidden and not key.startswith(f"{NAME} ") and once[key] == derived[key] == plain[key]
        ]

    def _add_equations(self, jaxpr: Any, given: Sequence[_Operand], nested: bool) -> list[_Operand]:
        """Adds the equations of a Jaxpr to `self.equations`, and returns the operands that are its results.

        given: the operands (values with their numbers) that are its inputs. nested: whether it is the body of a call
        that jax inlines.
        """
        env = dict(zip(jaxpr.invars, given))

        def operand(atom: Any) -> _Operand:
            return _Operand(None, False) if hasattr(atom, "val") else env.get(atom, _Operand(None, False))

        for equation in jaxpr.eqns:
            ins = [operand(atom) for atom in equation.invars]
            body, key = _inlined_body(equation), _asked_key(equation)
            if equation.primitive.name in _WITH_RULES and _key_of(equation) in self.asked:
                body, key = None, _key_of(equation)
            if body is not None:
                results = self._add_equations(body, ins, nested=True)
            else:
                varies = any(value.varies for value in ins)
                results = [_Operand(self.count + number, varies) for number in range(len(equation.outvars))]
                numbers = tuple(range(self.count, self.count + len(results)))
                self.count += len(numbers)
                if not varies:
                    self.unvarying.update(numbers)
                known = tuple(sorted({value.number for value in ins if value.number is not None}))
                parts = self._shards.parts(equation.outvars[0]) if numbers else 1
                self.equations.append(_LayerEquation(equation, numbers, known, key, nested, parts))
            env.update(zip(equation.outvars, results))
        return [operand(atom) for atom in jaxpr.outvars]


class _Operand(NamedTuple):
    """An operand of an equation: the number of its value (None for a literal or an input of the layer), and whether
    the value differs from layer to layer.
    """

    number: int | None
    varies: bool


def _jaxpr_with_residuals(layer: Layer) -> Any:
    import jax

    return jax.make_jaxpr(lambda *inputs: _vjp(layer, None, inputs))(*input_specs(layer.body.jaxpr))


def _policy_keys(layer: Layer) -> list[str]:
    """Returns the keys (texts that describe an equation) of the equations about which jax asks a remat policy while it
    traces a layer once, in order.
    """
    import jax

    keys: list[str] = []

    def note(primitive: Any, *avals: Any, **params: Any) -> bool:
        keys.append(key_of(primitive.name, avals, params))
        return False

    jax.make_jaxpr(lambda *inputs: _vjp(layer, note, inputs))(*input_specs(layer.body.jaxpr))
    return keys


def _vjp(layer: Layer, policy: Any, inputs: Sequence[Any]) -> Any:
    import jax
    from jax.extend import core

    places = [number for number, active in enumerate(layer.active) if active]

    def run(*active: Any) -> Any:
        every = list(inputs)
        for place, value in zip(places, active):
            every[place] = value
        return core.jaxpr_as_fun(layer.body)(*every)

    return jax.vjp(jax.checkpoint(run, policy=policy) if policy else run, *(inputs[place] for place in places))


def _inlined_body(equation: Any) -> Any:
    if equation.primitive.name not in _INLINED_CALLS and not checkpoint_of(equation):
        return None
    given = parameters(equation)
    inner = next((given[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in given), None)
    return getattr(inner, "jaxpr", inner)


def _asked_key(equation: Any) -> str:
    # jax asks a policy about the equations in the body instead.
    if equation.primitive.name != "pallas_call" and any(bodies(equation)):
        return ""
    return _key_of(equation)


def _key_of(equation: Any) -> str:
    primitive = NAME if checkpoint_name_of(equation) else equation.primitive.name
    return key_of(primitive, [atom.aval for atom in equation.invars], parameters(equation))


def _forward_keys(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        # jax asks about the body of a function with a custom derivative rule.
        body = _inlined_body(equation) if equation.primitive.name.startswith("custom_") else None
        if body is not None:
            yield from _forward_keys(body)
        else:
            yield _asked_key(equation)


def _keys_inside_bodies(jaxpr: Any, within: bool = False) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if within:
            yield _asked_key(equation)
        for body in bodies(equation):
            yield from _keys_inside_bodies(body, within=True)


def _labels(
    forward: LayerForward,
    order: Sequence[tuple[int, str]],
    kind: int,
    times: int,
    counted: dict[Any, Value],
) -> dict[int, str]:
    """Finds the values of a layer that a remat policy can keep, and adds them to `counted`. Returns index in
    `forward.equations` -> label of the value that the equation computes.

    These are the results of the equations about which jax asks a policy. Equations whose key also occurs in a loop are
    left out.

    Args:
        forward: the forward pass of the layer.
        order: (index in `forward.equations`, key) of the equations that a policy recognizes by their order.
        kind: number that identifies the kind of layer.
        times: number of layers of this kind.
        counted: what a policy recognizes -> the value. The keys are ("name", checkpoint name), ("order", keys of the
            ordered equations up to this one) or ("key", key of the equation).
    """
    place, keys = {number: at for at, (number, _) in enumerate(order)}, tuple(key for _, key in order)
    in_loops: set[str] = set()
    for one in forward.equations:
        if not one.key:
            for body in bodies(one.equation):
                in_loops.update(_keys_inside_bodies(body), map(_asked_key, body.eqns))
    labels: dict[int, str] = {}
    for number, one in enumerate(forward.equations):
        if not one.key or one.key not in forward.asked or one.key in in_loops:
            continue
        at = place.get(number, -1)
        name = checkpoint_name_of(one.equation)
        recognized_by: tuple[str, Any] = ("key", one.key)
        if name:
            recognized_by = ("name", name)
        elif at >= 0:
            recognized_by = ("order", keys[: at + 1])
        if recognized_by not in counted:
            label = _unique_label(one.equation, name, {value.label for value in counted.values()})
            kept_type = type_of(one.equation.outvars[0].aval)
            counted[recognized_by] = Value(label, (), name, one.key, at, kept_type, 0, 0, where_of(one.equation))
        value = counted[recognized_by]
        size = times * sum(size_of(v.aval) for v in one.equation.outvars) // one.parts
        counted[recognized_by] = dataclasses.replace(
            value,
            kinds=tuple(dict.fromkeys((*value.kinds, kind))),
            count=value.count + times,
            bytes=value.bytes + size,
        )
        labels[number] = value.label
    return labels


def _unique_label(equation: Any, name: str, taken: set[str]) -> str:
    scopes = [part for part in str(equation.source_info.name_stack).split("/") if _SCOPE.fullmatch(part)]
    plain = name or ".".join([*scopes[-1:], equation.primitive.name])
    label, number = plain, 1
    while label in taken:
        number += 1
        label = f"{plain}.{number}"
    return label
