"""Follows shardings from the arguments of a model through its jaxpr, to count the devices over which each value is
sharded.

Only the compiler knows the decisions of the partitioner; this module applies its simple rules. A dimension keeps its
mesh axes through elementwise work, broadcasts, transposes and products. If both operands of a product use an axis, the
larger operand keeps it (FSDP gathers the weights). A sum over a sharded dimension drops its axes. A value without a
rule counts as replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.jaxprs import parameters

# For each dimension of a value, the axes of the mesh over which it is sharded.
Spec = tuple[tuple[str, ...], ...]
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class JaxprSharding:
    """Derives the shardings of all values of a jaxpr from the shardings of its arguments.

    Attributes:
        sizes: mesh axis -> number of devices, {} for one device.
        inputs: id of an inner Jaxpr -> specs of its inputs. A spec lists, for each dimension, the mesh axes that shard
            it.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None):
        self.sizes = dict(sizes or {})
        self.inputs: dict[int, list[Spec]] = {}
        self._known: dict[Any, Spec] = {}

    @classmethod
    def from_arguments(cls, jaxpr: Any, shardings: Sequence[Any]) -> JaxprSharding:
        """Derives the shardings in a ClosedJaxpr from the NamedShardings of its arguments. `shardings`: one for each
        argument, in order; None if it is unknown.
        """
        sizes: dict[str, int] = {}
        for sharding in shardings:
            if sharding is not None and hasattr(sharding, "spec"):
                sizes |= sharding.mesh.shape
        own = cls(sizes)
        given = [
            _pad_spec(getattr(sharding, "spec", ()), len(variable.aval.shape))
            for sharding, variable in zip(shardings, jaxpr.jaxpr.invars)
        ]
        if own.sizes:
            own.walk(jaxpr.jaxpr, given)
        return own

    def layer_specs(self, jaxpr: Any) -> list[Spec]:
        """Returns the specs (mesh axes per dimension) of the inputs of an inner Jaxpr that `walk` has visited. If it
        was not visited, the inputs count as replicated.
        """
        known = self.inputs.get(id(jaxpr))
        return known or [_whole(variable.aval) for variable in jaxpr.invars]

    def parts(self, variable: Any) -> int:
        """Returns the number of devices over which the value of a variable is sharded; 1 for a literal or if the
        sharding is unknown.
        """
        return math.prod(map(self._devices, self.spec(variable)))

    def walk(self, jaxpr: Any, given: Sequence[Spec]) -> list[Spec]:
        """Derives the sharding of every value in a Jaxpr from the shardings of its inputs. Returns the shardings of its
        results, in order.

        A sharding is a Spec: for each dimension, the mesh axes over which it is sharded. `given` has one for each
        input of `jaxpr`.
        """
        if not self.sizes:
            return [_whole(atom.aval) for atom in jaxpr.outvars]
        self.inputs[id(jaxpr)] = list(given)
        self._known.update(zip(jaxpr.invars, given))
        for equation in jaxpr.eqns:
            specs = self._equation(equation, [self.spec(atom) for atom in equation.invars])
            for variable, spec in zip(equation.outvars, specs):
                self._known[variable] = self._divisible_axes(_explicit_spec(variable.aval) or spec, variable.aval)
        return [self.spec(atom) for atom in jaxpr.outvars]

    def spec(self, atom: Any) -> Spec:
        """Returns the mesh axes that shard each dimension of a value; no axes if the sharding is unknown."""
        return _whole(atom.aval) if hasattr(atom, "val") else self._known.get(atom, _whole(atom.aval))

    def _divisible_axes(self, spec: Spec, aval: Any) -> Spec:
        shape = getattr(aval, "shape", ())
        return tuple(axes if size % self._devices(axes) == 0 else () for axes, size in zip(spec, shape))

    def _devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def _equation(self, equation: Any, ins: list[Spec]) -> list[Spec]:
        name = equation.primitive.name
        given = parameters(equation)
        body = next((given[key] for key in _BODIES if key in given), None)
        inner = getattr(body, "jaxpr", body)
        if name == "scan":
            return self._loop_result_specs(equation, inner, ins)
        if name == "while":
            return ins[-len(equation.outvars) :]
        if name not in ("shard_map", "pallas_call") and len(getattr(inner, "invars", ())) == len(ins) and ins:
            return self.walk(inner, ins)
        rule = _RULES.get(name, _elementwise_spec)
        return [rule(equation, ins, variable.aval) for variable in equation.outvars]

    def _loop_result_specs(self, equation: Any, body: Any, ins: list[Spec]) -> list[Spec]:
        """Derives the specs (mesh axes per dimension) in the body of a loop, and returns the specs of the loop's
        results. Carried values have the specs that the body returns. Values that the loop stacks have an additional
        first dimension, which is not sharded.

        `ins`: the specs of the loop's operands.
        """
        inside = [spec[len(spec) - len(variable.aval.shape) :] for spec, variable in zip(ins, body.invars)]
        carried = sum(len(out.aval.shape) == len(own.aval.shape) for out, own in zip(equation.outvars, body.outvars))
        stacked = sum(len(spec) > len(variable.aval.shape) for spec, variable in zip(ins, body.invars))
        first = len(inside) - stacked - carried
        for _ in range(2):
            outs = self.walk(body, inside)
            inside[first : first + carried] = [
                own if any(own) else out for own, out in zip(inside[first : first + carried], outs)
            ]
        return [*outs[:carried], *(((), *spec) for spec in outs[carried:])]


def _whole(aval: Any) -> Spec:
    return ((),) * len(getattr(aval, "shape", ()))


def _pad_spec(spec: Any, rank: int) -> Spec:
    axes: list[tuple[str, ...]] = []
    for entry in spec or ():
        if isinstance(entry, str):
            entry = (entry,)
        axes.append(entry if isinstance(entry, tuple) else ())
    return tuple([*axes, *[()] * (rank - len(axes))][:rank])


def _explicit_spec(aval: Any) -> Spec:
    # Only a mesh with explicit axes puts the spec into the type.
    spec = _pad_spec(getattr(getattr(aval, "sharding", None), "spec", ()), len(getattr(aval, "shape", ())))
    return spec if any(spec) else ()


def _merge_specs(specs: Sequence[Spec], rank: int) -> Spec:
    out: list[tuple[str, ...]] = [()] * rank
    used: set[str] = set()
    for spec in specs:
        for number, axes in enumerate(spec):
            if not out[number] and used.isdisjoint(axes):
                out[number] = axes
                used.update(axes)
    return tuple(out)


def _elementwise_spec(equation: Any, ins: list[Spec], out: Any) -> Spec:
    shape = getattr(out, "shape", ())
    same: list[Spec] = []
    for spec, atom in zip(ins, equation.invars):
        if len(spec) == len(shape):
            same.append(tuple(axes if own == size else () for axes, own, size in zip(spec, atom.aval.shape, shape)))
    return _merge_specs(same, len(shape))


def _product(equation: Any, ins: list[Spec], out: Any) -> Spec:
    contracted, batch = equation.params["dimension_numbers"]
    rank, sides, taken = len(out.shape), [], len(batch[0])
    for spec, atom, summed, shared in zip(ins, equation.invars, contracted, batch):
        free = [number for number in range(len(spec)) if number not in (*summed, *shared)]
        placed: list[tuple[str, ...]] = [()] * rank
        placed[: len(shared)] = [spec[number] for number in shared]
        placed[taken : taken + len(free)] = [spec[number] for number in free]
        taken += len(free)
        sides.append((-math.prod(atom.aval.shape), tuple(placed)))
    return _merge_specs([spec for _, spec in sorted(sides, key=lambda side: side[0])], rank)


def _broadcast(equation: Any, ins: list[Spec], out: Any) -> Spec:
    placed: list[tuple[str, ...]] = [()] * len(out.shape)
    given = equation.invars[0].aval.shape
    for number, axes, size in zip(equation.params["broadcast_dimensions"], ins[0], given):
        placed[number] = axes if out.shape[number] == size else ()
    return tuple(placed)


def _transpose(equation: Any, ins: list[Spec], out: Any) -> Spec:
    return tuple(ins[0][number] for number in equation.params["permutation"])


def _rule_dropping_dims(key: str) -> Callable[[Any, list[Spec], Any], Spec]:
    def rule(equation: Any, ins: list[Spec], out: Any) -> Spec:
        dropped = [number % len(ins[0]) for number in equation.params[key]]
        return tuple(axes for number, axes in enumerate(ins[0]) if number not in dropped)

    return rule


def _reshape_spec(equation: Any, ins: list[Spec], out: Any) -> Spec:
    # If dimensions are merged or split, the mesh axes go to the first of the resulting dimensions.
    placed: list[tuple[str, ...]] = [()] * len(out.shape)
    given = equation.invars[0].aval.shape
    before = {math.prod(given[:number]): axes for number, axes in enumerate(ins[0]) if given[number] > 1}
    for number, size in enumerate(out.shape):
        if size > 1:
            placed[number] = before.get(math.prod(out.shape[:number]), ())
    return tuple(placed)


def _gather_spec(equation: Any, ins: list[Spec], out: Any) -> Spec:
    inside = equation.params["dimension_numbers"].offset_dims
    # Gathered rows are sharded like the indices.
    rows = iter(ins[1][:-1])
    return tuple(() if number in inside else next(rows, ()) for number in range(len(out.shape)))


def _constraint(equation: Any, ins: list[Spec], out: Any) -> Spec:
    return _pad_spec(getattr(equation.params.get("sharding"), "spec", ()), len(out.shape))


_RULES: dict[str, Callable[[Any, list[Spec], Any], Spec]] = (
    {
        "dot_general": _product,
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "reshape": _reshape_spec,
        "squeeze": _rule_dropping_dims("dimensions"),
        "gather": _gather_spec,
        "sharding_constraint": _constraint,
    }
    | {f"reduce_{kind}": _rule_dropping_dims("axes") for kind in ("sum", "max", "min", "prod", "and", "or")}
    | {kind: _rule_dropping_dims("axes") for kind in ("argmax", "argmin")}
)
