"""What a layer of anyone's model can keep: its values as a graph, and how a policy can tell them apart.

The graph is read from jax's own derivative of the layer with everything kept: what it returns beside the layer's result
is what the backward pass reads. A value can be kept where jax asks a policy about it: not inside of loops.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bytescope.memory.jaxprs import bodies
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding
from bytescope.memory.remat.layer_discovery import INLINED, Layer, is_checkpoint, specs_of, where_of
from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph, size_of, step_of
from bytescope.memory.remat.recognition import Value, Wanted, key_of, type_of

# Calls whose bodies jax walks with the policy, and those that it opens when it differentiates.
# Functions with a derivative of their own. Those that are left in a derivative, called by the rule of another, jax asks
# about as a whole.
_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))
_OPENED = INLINED | _WITH_RULES | {"remat2", "checkpoint"}
# A scope that a person gave, or a module: transformations have brackets, einsum writes its equation.
_SCOPE = re.compile(r"[\w.-]+")
# Below so many FLOPs per byte of its result, a product is work on elements that was written as one.
MIN_FLOPS_PER_BYTE = 4.0


@dataclasses.dataclass(frozen=True)
class LayerValues:
    """The blocks of all kinds of layers as one (`block`, of one layer that stands for all), and what it can keep:
    `values` by label; `order` and `known` as in `Wanted`."""

    graph: LayerGraph
    values: dict[str, Value]
    order: tuple[tuple[str, ...], ...]
    known: frozenset[str]

    def wanted(self, labels: Iterable[str]) -> Wanted:
        """What a policy keeps that keeps these values."""
        kept = [self.values[label] for label in labels]
        places = tuple(
            frozenset(value.place for value in kept if kind in value.kinds and value.place >= 0)
            for kind in range(len(self.order))
        )
        return Wanted(
            frozenset(value.name for value in kept if value.name),
            frozenset(value.key for value in kept if not value.name and value.place < 0),
            self.order,
            places,
            self.known,
        )


@dataclasses.dataclass(frozen=True)
class _Made:
    """An equation of a layer's graph: numbers of its results and operands; key: "" where jax asks no policy; parts:
    devices over which its result is sharded."""

    equation: Any
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    key: str
    nested: bool
    parts: int


def values_of(layers: Sequence[Layer], shards: JaxprSharding | None = None, ordered: bool = True) -> LayerValues:
    """What the layers can keep.

    Args:
        shards: of the program that they are in, None for one device.
        ordered: whether equations of one key can be told apart by their order, as they can where jax walks the layers
            in the program as it does alone.
    """
    forwards = [LayerForward(layer, shards) for layer in layers]
    # A policy sees an equation, not the kind of its layer: what one kind cannot tell apart no other can.
    hidden: set[str] = set()
    for forward in forwards:
        hidden |= forward.asked - {key for _, key in forward.order}
    first, carry = 0, 0
    steps: list[GraphStep] = []
    read: list[int] = []
    alike: dict[Any, Value] = {}
    orders = []
    for kind, (layer, forward) in enumerate(zip(layers, forwards)):
        order = [(number, key) for number, key in forward.order if key not in hidden] if ordered else []
        orders.append(tuple(key for _, key in order))
        labels = _labels(forward, order, kind, layer.times, alike)
        for number, one in enumerate(forward.equations):
            outs, ins = [first + value for value in one.outs], [first + value for value in one.ins]
            step = step_of(one.equation, outs, ins, labels.get(number, ""), one.parts)
            steps.append(_times(step, layer.times))
        read += [first + value for value in forward.read]
        first += forward.count
        carry += layer.times * forward.result_bytes
    known: frozenset[str] = frozenset().union(*(forward.asked for forward in forwards))
    values = {value.label: value for value in alike.values()}
    sizes = {value: size for step in steps for value, size in zip(step.outs, step.bytes)}
    graph = LayerGraph(1, tuple(steps), tuple(sorted(read)), carry, sum(sizes[value] for value in read))
    graph = with_names(graph, worth_deciding(graph) | {value.label for value in values.values() if value.name})
    values = {label: values[label] for label in values if label in graph.names}
    return LayerValues(graph, values, tuple(orders), known)


def with_names(graph: LayerGraph, names: Collection[str]) -> LayerGraph:
    """Returns the graph without all other names."""
    steps = (step if step.name in names else dataclasses.replace(step, name="") for step in graph.steps)
    return dataclasses.replace(graph, steps=tuple(steps))


def worth_deciding(graph: LayerGraph) -> set[str]:
    """Returns the labels of the values that a plan of least recomputation may have to keep.

    Work on elements is recomputed for free. A value is left out if another choice is never worse: a smaller value from
    which it is recomputed for free, the smaller result of the only step that reads it, or recomputing it for free from
    a value that is needed whenever it is. That loses no plan. A label of several values, which a policy cannot tell
    apart, is left out too if none of them is a product, or smaller than a product that nothing else is made of.
    """
    users, together = _users_and_needed_together(graph)
    size = {value: count for step in graph.steps for value, count in zip(step.outs, step.bytes)}
    label = {value: step.name for step in graph.steps for value in step.outs}
    members = Counter(label[value] for value in together if label.get(value))
    shared: set[str] = set()
    product_size: dict[int, int] = {}  # of the product that serves no other value: a product, or what alone reads it
    for step in graph.steps:
        only_here = [v for v in step.ins if v in product_size and v not in graph.read and len(users.get(v, ())) == 1]
        inherited = max((product_size[value] for value in only_here), default=0)
        for value, flops, count in zip(step.outs, step.flops, step.bytes):
            product = count if _is_product(flops, count) else 0
            if product or inherited:
                product_size[value] = product or inherited
            if value in together and members[step.name] > 1 and (product or count < inherited):
                shared.add(step.name)
    free_from = _free_from(graph, shared)
    worth = set(shared)
    for value in together.keys() & free_from.keys():
        if members[label[value]] != 1:
            continue
        before = free_from[value] - {value}
        smaller = any(members[label[source]] == 1 and size[source] <= size[value] for source in before)
        readers = [result for step in users[value] for result in step.outs]
        replaced = False
        if value not in graph.read and len(readers) == 1:
            result = readers[0]
            # Of two equally large values one has to stay: the first, if the second is free from it.
            same = size[result] == size[value] and value in free_from.get(result, ())
            replaced = members[label[result]] == 1 and size[result] <= size[value] and not same
        if not (smaller or replaced or before & together[value]):
            worth.add(label[value])
    return worth


def _is_product(flops: int, size: int) -> bool:
    return flops > 0 and flops >= MIN_FLOPS_PER_BYTE * size


def _users_and_needed_together(graph: LayerGraph) -> tuple[dict[int, list[GraphStep]], dict[int, set[int]]]:
    """Value -> the steps that read it, and the other values that are needed whenever it is; of the values that are
    needed if nothing is kept."""
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


def _free_from(graph: LayerGraph, shared: Collection[str]) -> dict[int, set[int]]:
    """Value -> values each of which is enough to recompute it for free; values that need no product are left out.

    A value with one of the labels `shared` may be kept for another value's sake, so it does not count as free.
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


def _times(step: GraphStep, times: int) -> GraphStep:
    """The step of `times` layers."""
    return dataclasses.replace(
        step,
        flops=tuple(times * flops for flops in step.flops),
        all_flops=times * step.all_flops,
        bytes=tuple(times * size for size in step.bytes),
        shared=tuple((which, times * flops) for which, flops in step.shared),
    )


class LayerForward:
    """A layer's forward pass as jax differentiates it.

    Attributes:
        equations: in order. read: numbers of values that the backward pass reads. count: of values.
        asked: keys about which jax asks a policy; order: (index in `equations`, key) of those whose order is known.
        result_bytes: of its result, on one device. unvarying: numbers of values that are the same for all layers.
    """

    def __init__(self, layer: Layer, shards: JaxprSharding | None = None):
        shards = shards or JaxprSharding()
        jaxpr, self._shards = _derivative(layer), shards
        shards.walk(jaxpr.jaxpr, shards.of_layer(layer.body.jaxpr))
        results = len(layer.body.jaxpr.outvars)
        calls = _calls(layer)
        self.asked = frozenset(calls)
        self.equations: list[_Made] = []
        self.count = 0
        self.result_bytes = sum(size_of(v.aval) // shards.parts(v) for v in jaxpr.jaxpr.outvars[:results])
        self.unvarying: set[int] = set()
        inputs = [_Operand(None, number >= layer.constants) for number in range(len(jaxpr.jaxpr.invars))]
        outs = self._read(jaxpr.jaxpr, inputs, nested=False)
        self.read = sorted({value.number for value in outs[results:] if value.number is not None})
        top = [(number, one.key) for number, one in enumerate(self.equations) if one.key and not one.nested]
        # A derivative adds equations, and a walk may leave them out; a forward pass has the same ones in every walk.
        once = Counter(calls)
        derived, plain = Counter(key for _, key in top), Counter(_keys(layer.body.jaxpr))
        hidden = {one.key for one in self.equations if one.nested} | set(_inside(jaxpr.jaxpr))
        self.order = [
            (number, key)
            for number, key in top
            if key not in hidden and not key.startswith("name ") and once[key] == derived[key] == plain[key]
        ]

    def _read(self, jaxpr: Any, given: Sequence[_Operand], nested: bool) -> list[_Operand]:
        """Notes the equations of a Jaxpr; returns its results, given its inputs."""
        env = dict(zip(jaxpr.invars, given))

        def operand(atom: Any) -> _Operand:
            return _Operand(None, False) if hasattr(atom, "val") else env.get(atom, _Operand(None, False))

        for equation in jaxpr.eqns:
            ins = [operand(atom) for atom in equation.invars]
            body, key = _body(equation), _key(equation)
            if equation.primitive.name in _WITH_RULES and (unit := _key_of(equation)) in self.asked:
                body, key = None, unit
            if body is not None:
                results = self._read(body, ins, nested=True)
            else:
                varies = any(value.varies for value in ins)
                results = [_Operand(self.count + number, varies) for number in range(len(equation.outvars))]
                numbers = tuple(range(self.count, self.count + len(results)))
                self.count += len(numbers)
                if not varies:
                    self.unvarying.update(numbers)
                known = tuple(sorted({value.number for value in ins if value.number is not None}))
                parts = self._shards.parts(equation.outvars[0]) if numbers else 1
                self.equations.append(_Made(equation, numbers, known, key, nested, parts))
            env.update(zip(equation.outvars, results))
        return [operand(atom) for atom in jaxpr.outvars]


class _Operand(NamedTuple):
    """An operand of an equation: the index of the value that it reads, None for an input of the layer or a literal, and
    whether the value differs between layers."""

    number: int | None
    varies: bool


def _derivative(layer: Layer) -> Any:
    """The ClosedJaxpr of a layer's result and of all that its backward pass reads."""
    import jax

    return jax.make_jaxpr(lambda *inputs: _vjp(layer, None, inputs))(*specs_of(layer.body.jaxpr))


def _calls(layer: Layer) -> list[str]:
    """The keys of what jax asks a policy in one walk of a layer, in order."""
    import jax

    keys: list[str] = []

    def note(primitive: Any, *avals: Any, **params: Any) -> bool:
        keys.append(key_of(primitive, avals, params))
        return False

    jax.make_jaxpr(lambda *inputs: _vjp(layer, note, inputs))(*specs_of(layer.body.jaxpr))
    return keys


def _vjp(layer: Layer, policy: Any, inputs: Sequence[Any]) -> Any:
    """The result of a layer and its derivative, by the inputs that are active; under a checkpoint with a policy."""
    import jax
    from jax.extend import core

    places = [number for number, active in enumerate(layer.active) if active]

    def run(*active: Any) -> Any:
        every = list(inputs)
        for place, value in zip(places, active):
            every[place] = value
        return core.jaxpr_as_fun(layer.body)(*every)

    return jax.vjp(jax.checkpoint(run, policy=policy) if policy else run, *(inputs[place] for place in places))


def _body(equation: Any) -> Any:
    """The Jaxpr of a call that jax opens, None for other equations."""
    if equation.primitive.name not in _OPENED and not is_checkpoint(equation):
        return None
    inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params), None)
    return getattr(inner, "jaxpr", inner)


def _key(equation: Any) -> str:
    """The key of an equation; "" where jax asks no policy: it walks into what has a body, kernels apart."""
    if equation.primitive.name != "pallas_call" and any(bodies(equation)):
        return ""
    return _key_of(equation)


def _key_of(equation: Any) -> str:
    return key_of(equation.primitive, [atom.aval for atom in equation.invars], equation.params)


def _keys(jaxpr: Any) -> Iterator[str]:
    """Keys of a forward pass: of its own equations, and of functions with a derivative of their own."""
    for equation in jaxpr.eqns:
        body = _body(equation) if equation.primitive.name.startswith("custom_") else None
        if body is not None:
            yield from _keys(body)
        else:
            yield _key(equation)


def _inside(jaxpr: Any, within: bool = False) -> Iterator[str]:
    """Keys of everything in bodies of equations."""
    for equation in jaxpr.eqns:
        if within:
            yield _key(equation)
        for body in bodies(equation):
            yield from _inside(body, within=True)


def _labels(
    graph: LayerForward, order: Sequence[tuple[int, str]], kind: int, times: int, alike: dict[Any, Value]
) -> dict[int, str]:
    """Index in `equations` -> label of the value that it is or is one of, for all about which jax asks a policy.

    `alike`: what tells a value to a policy (its name; its key; or its key and all those before it in the order) -> the
    value; those of this kind of layer are added.
    """
    place, keys = {number: at for at, (number, _) in enumerate(order)}, tuple(key for _, key in order)
    in_loops = {
        key
        for one in graph.equations
        if not one.key
        for body in bodies(one.equation)
        for key in (*_inside(body), *map(_key, body.eqns))
    }
    out: dict[int, str] = {}
    for number, one in enumerate(graph.equations):
        if not one.key or one.key not in graph.asked or one.key in in_loops:
            continue
        at = place.get(number, -1)
        name = one.equation.params["name"] if one.equation.primitive.name == "name" else ""
        recognized_by = _recognized_by(name, one.key, keys[: at + 1])
        size = times * sum(size_of(v.aval) for v in one.equation.outvars) // one.parts
        if recognized_by not in alike:
            label = _label(one.equation, name, {value.label for value in alike.values()})
            alike[recognized_by] = Value(
                label, (), name, one.key, at, type_of(one.equation.outvars[0].aval), 0, 0, where_of(one.equation)
            )
        value = alike[recognized_by]
        alike[recognized_by] = dataclasses.replace(
            value, kinds=tuple(dict.fromkeys((*value.kinds, kind))), count=value.count + times, bytes=value.bytes + size
        )
        out[number] = value.label
    return out


def _recognized_by(name: str, key: str, before: tuple[str, ...]) -> tuple[str, Any]:
    """What tells a value to a policy; `before`: the keys up to it in the order, () where that does not tell it."""
    if name:
        return "name", name
    return ("order", before) if before else ("key", key)


def _label(equation: Any, name: str, taken: set[str]) -> str:
    """The name of a value, else the last of its scopes and its primitive; numbered where that is taken."""
    scopes = [part for part in str(equation.source_info.name_stack).split("/") if _SCOPE.fullmatch(part)]
    plain = name or ".".join([*scopes[-1:], equation.primitive.name])
    return next(
        label
        for number in range(1, len(taken) + 2)
        if (label := plain if number == 1 else f"{plain}.{number}") not in taken
    )
