"""What a layer of anyone's model can keep: its values as a graph, and how a policy can tell them apart.

The graph is read from jax's own derivative of the layer with everything kept: what it returns beside the layer's result
is what the backward pass reads. A value can be kept where jax asks a policy about it: not inside of loops.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bytescope.memory.jaxprs import bodies
from bytescope.memory.remat.jaxpr_sharding import Shards
from bytescope.memory.remat.layer_discovery import Layer, is_checkpoint, specs_of, where_of
from bytescope.memory.remat.layer_graph import INLINED, Block, Step, size_of, step_of
from bytescope.memory.remat.remat_policy import Value, Wanted, key_of, type_of
from bytescope.memory.remat.worth import with_names, worth_deciding

# Calls whose bodies jax walks with the policy, and those that it opens when it differentiates.
# Functions with a derivative of their own. Those that are left in a derivative, called by the rule of another, jax asks
# about as a whole.
_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))
_OPENED = INLINED | _WITH_RULES | {"remat2", "checkpoint"}
# A scope that a person gave, or a module: transformations have brackets, einsum writes its equation.
_SCOPE = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Values:
    """The blocks of all kinds of layers as one (`block`, of one layer that stands for all), and what it can keep:
    `values` by label; `order` and `known` as in `Wanted`."""

    block: Block
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


def values_of(layers: Sequence[Layer], shards: Shards | None = None, ordered: bool = True) -> Values:
    """What the layers can keep.

    Args:
        shards: of the program that they are in, None for one device.
        ordered: whether equations of one key can be told apart by their order, as they can where jax walks the layers
            in the program as it does alone.
    """
    graphs = [_Graph(layer, shards or Shards()) for layer in layers]
    # A policy is told an equation, not of which kind of layer: what one kind cannot tell apart no other can.
    hidden = {key for graph in graphs for key in graph.asked - {key for _, key in graph.order}} if ordered else None
    first, steps, read, carry = 0, [], [], 0
    alike: dict[Any, Value] = {}
    orders = []
    for kind, (layer, graph) in enumerate(zip(layers, graphs)):
        order = [] if hidden is None else [(number, key) for number, key in graph.order if key not in hidden]
        orders.append(tuple(key for _, key in order))
        labels = _labels(graph, order, kind, layer.times, alike)
        for number, one in enumerate(graph.made):
            outs, ins = ([first + value for value in of] for of in (one.outs, one.ins))
            steps.append(_times(step_of(one.equation, outs, ins, labels.get(number, ""), one.parts), layer.times))
        read += [first + value for value in graph.read]
        first += graph.count
        carry += layer.times * graph.result_bytes
    known = frozenset().union(*(graph.asked for graph in graphs))
    values = {value.label: value for value in alike.values()}
    sizes = {value: size for step in steps for value, size in zip(step.outs, step.bytes)}
    block = Block(1, tuple(steps), tuple(sorted(read)), carry, sum(sizes[value] for value in read))
    chosen = worth_deciding(block, values)
    return Values(with_names(block, chosen), {label: values[label] for label in chosen}, tuple(orders), known)


def _times(step: Step, times: int) -> Step:
    """The step of `times` layers."""
    return dataclasses.replace(
        step,
        flops=tuple(times * flops for flops in step.flops),
        all_flops=times * step.all_flops,
        bytes=tuple(times * size for size in step.bytes),
        shared=tuple((which, times * flops) for which, flops in step.shared),
    )


class _Graph:
    """A layer's forward pass as jax differentiates it.

    Attributes:
        made: its equations. read: numbers of values that the backward pass reads. count: of values.
        asked: keys about which jax asks a policy; order: (index in `made`, key) of those whose order is known.
        result_bytes: of its result, on one device.
    """

    def __init__(self, layer: Layer, shards: Shards):
        jaxpr, self._shards = _derivative(layer), shards
        shards.walk(jaxpr.jaxpr, shards.of_layer(layer.body.jaxpr))
        results = len(layer.body.jaxpr.outvars)
        calls = _calls(layer)
        self.asked = frozenset(calls)
        self.made: list[_Made] = []
        self.count = 0
        self.result_bytes = sum(size_of(v.aval) // shards.parts(v) for v in jaxpr.jaxpr.outvars[:results])
        outs = self._read(jaxpr.jaxpr, [None] * len(jaxpr.jaxpr.invars), nested=False)
        self.read = sorted({value for value in outs[results:] if value is not None})
        top = [(number, one.key) for number, one in enumerate(self.made) if one.key and not one.nested]
        # A derivative adds equations, and a walk may leave them out; a forward pass has the same ones in every walk.
        once = Counter(calls)
        derived, plain = Counter(key for _, key in top), Counter(_keys(layer.body.jaxpr))
        hidden = {one.key for one in self.made if one.nested} | set(_inside(jaxpr.jaxpr))
        self.order = [
            (number, key)
            for number, key in top
            if key not in hidden and not key.startswith("name ") and once[key] == derived[key] == plain[key]
        ]

    def _read(self, jaxpr: Any, given: Sequence[int | None], nested: bool) -> list[int | None]:
        env = dict(zip(jaxpr.invars, given))

        def number(atom: Any) -> int | None:
            return None if hasattr(atom, "val") else env.get(atom)

        for equation in jaxpr.eqns:
            ins = [number(atom) for atom in equation.invars]
            body, key = _body(equation), _key(equation)
            if equation.primitive.name in _WITH_RULES and (unit := _key_of(equation)) in self.asked:
                body, key = None, unit
            if body is not None:
                made = self._read(body, ins, nested=True)
            else:
                made = list(range(self.count, self.count + len(equation.outvars)))
                self.count += len(made)
                known = tuple(sorted({value for value in ins if value is not None}))
                parts = self._shards.parts(equation.outvars[0]) if made else 1
                self.made.append(_Made(equation, tuple(made), known, key, nested, parts))
            env.update(zip(equation.outvars, made))
        return [number(atom) for atom in jaxpr.outvars]


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
    graph: _Graph, order: Sequence[tuple[int, str]], kind: int, times: int, alike: dict[Any, Value]
) -> dict[int, str]:
    """Index in `made` -> label of the value that it is or is one of, for all about which jax asks a policy.

    `alike`: what tells a value to a policy (its name; its key; or its key and all those before it in the order) -> the
    value; those of this kind of layer are added.
    """
    place, keys = {number: at for at, (number, _) in enumerate(order)}, tuple(key for _, key in order)
    in_loops = {
        key
        for one in graph.made
        if not one.key
        for body in bodies(one.equation)
        for key in (*_inside(body), *map(_key, body.eqns))
    }
    out: dict[int, str] = {}
    for number, one in enumerate(graph.made):
        if not one.key or one.key not in graph.asked or one.key in in_loops:
            continue
        at = place.get(number, -1)
        name = one.equation.params["name"] if one.equation.primitive.name == "name" else ""
        told = _told(name, one.key, keys[: at + 1])
        size = times * sum(size_of(v.aval) for v in one.equation.outvars) // one.parts
        if told not in alike:
            label = _label(one.equation, name, {value.label for value in alike.values()})
            alike[told] = Value(
                label, (), name, one.key, at, type_of(one.equation.outvars[0].aval), 0, 0, where_of(one.equation)
            )
        value = alike[told]
        alike[told] = dataclasses.replace(
            value, kinds=tuple(dict.fromkeys((*value.kinds, kind))), count=value.count + times, bytes=value.bytes + size
        )
        out[number] = value.label
    return out


def _told(name: str, key: str, before: tuple[str, ...]) -> tuple[str, Any]:
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
