"""A block's forward pass as a graph: what its backward pass reads, what is named, what making each value again takes.

Read from the jaxpr of a gradient without any remat policy. Autodiff of a loop over blocks stacks exactly the values
that the backward loop reads; walked from there to the names and to the block's inputs, the graph tells for every
choice of names what would be kept and what made again, the way `jax.checkpoint` decides it (memory/patterns.py). The
graph itself is plain data: it crosses processes as JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memory import flops
from memory.errors import ReportError

# Calls that are no more than their body.
_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
# The name of what the loop hands a block: it is kept whatever a policy says.
CARRY = "block_in"


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation. Values are numbers; `name`: the checkpoint name it gives, "" for none.

    outs, ins: values it makes and reads, inputs of the block left out. flops: over all devices, of making each of
    `outs` alone; all_flops: of making all of them. dtype: the unit that does it (a key of `Target.peak_flops`), "" for
    no FLOPs. bytes: of each of `outs`, on one device.
    """

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    name: str = ""
    flops: tuple[int, ...] = ()
    all_flops: int = 0
    dtype: str = ""
    bytes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """One of `layers` alike blocks.

    read: values that its backward pass reads. carry_bytes: of its input, on one device; none_bytes: of all that plain
    autodiff keeps of it. bound: name -> names that are kept with it on the device, in whose place it is kept too: a
    kernel outside of the checkpoint, whose residuals no name reaches.
    """

    layers: int
    steps: tuple[Step, ...]
    read: tuple[int, ...]
    carry_bytes: int
    none_bytes: int
    bound: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names it gives, in the order in which they are made; its input's left out."""
        return tuple(dict.fromkeys(step.name for step in self.steps if step.name and step.name != CARRY))

    def scaled(self, times: float) -> Block:
        """The same block with so many times the tokens."""
        def size(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(round(value * times) for value in values)

        steps = tuple(dataclasses.replace(step, flops=size(step.flops), all_flops=round(step.all_flops * times),
                                          bytes=size(step.bytes)) for step in self.steps)
        return dataclasses.replace(self, steps=steps, carry_bytes=round(self.carry_bytes * times),
                                   none_bytes=round(self.none_bytes * times))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Block:
        """The block of `dataclasses.asdict`, read back from JSON."""
        steps = tuple(Step(**{key: tuple(value) if isinstance(value, list) else value for key, value in step.items()})
                      for step in values["steps"])
        bound = {name: tuple(names) for name, names in values["bound"].items()}
        return cls(**{**values, "steps": steps, "read": tuple(values["read"]), "bound": bound})


def block_of(jaxpr: Any, parts: Callable[[str], int], bound: Mapping[str, tuple[str, ...]] | None = None) -> Block:
    """The block of a ClosedJaxpr: the body of its loop over the blocks.

    Args:
        jaxpr: of the gradient of one micro-batch, nothing recomputed, layers scanned.
        parts: devices over which the tensor of a name is divided; values without a name lie as the name before them.
        bound: see `Block`.

    Raises ReportError where no loop names a tensor.
    """
    loop = _loop(jaxpr)
    body, carried = loop.params["jaxpr"].jaxpr, loop.params["num_carry"]
    numbers: dict[Any, int] = {}
    made = list(_flat(body.eqns))
    for _, outs, _ in made:
        for variable in outs:
            numbers.setdefault(variable, len(numbers))
    steps, near = [], parts(CARRY)
    for equation, outs, ins in made:
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        near = parts(name) if name else near
        steps.append(_step(equation, outs, ins, name, numbers, near))
    alias = _aliases(body, made)
    stacked = {alias.get(variable, variable) for variable in body.outvars[carried:] if not hasattr(variable, "val")}
    kept = [variable for variable in stacked if variable in numbers]
    first = loop.params["num_consts"]
    carry = max((variable.aval for variable in body.invars[first:first + carried]), key=_size)
    share = parts(CARRY)
    return Block(loop.params["length"], tuple(steps), tuple(sorted(numbers[variable] for variable in kept)),
                 _size(carry) // share, sum(_size(variable.aval) for variable in kept) // share, dict(bound or {}))


def _loop(jaxpr: Any) -> Any:
    """The scan that names tensors and stacks the most bytes."""
    found = [equation for equation in _scans(jaxpr.jaxpr) if _names(equation)]
    if not found:
        raise ReportError("no loop over layers names a tensor: set model.scan=true")
    return max(found, key=lambda equation: sum(_size(v.aval) for v in
                                               equation.outvars[equation.params["num_carry"]:]))


def _scans(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        elif equation.primitive.name in _INLINED:
            yield from _scans(equation.params.get("jaxpr", equation.params.get("call_jaxpr")).jaxpr)


def _names(loop: Any) -> bool:
    return any(equation.primitive.name == "name" for equation, _, _ in _flat(loop.params["jaxpr"].jaxpr.eqns))


def _flat(equations: Sequence[Any], inside: Mapping[Any, Any] | None = None) -> Iterator[tuple[Any, list, list]]:
    """(equation, results, operands) with calls that name something opened: their variables become the caller's."""
    known = dict(inside or {})

    def outer(variable: Any) -> Any:
        while variable in known:
            variable = known[variable]
        return variable

    for equation in equations:
        ins = [outer(v) for v in equation.invars if not hasattr(v, "val")]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in _INLINED and any(e.primitive.name == "name" for e, _, _ in
                                                       _flat(inner.jaxpr.eqns)):
            body = inner.jaxpr
            passed = {own: outer(given) for own, given in zip(body.invars, equation.invars)
                      if not hasattr(given, "val")}
            yield from _flat(body.eqns, {**known, **passed})
            for given, own in zip(equation.outvars, body.outvars):
                if not hasattr(own, "val"):
                    known[given] = passed.get(own, own)
        else:
            yield equation, list(equation.outvars), ins


def _aliases(body: Any, made: Sequence[tuple[Any, list, list]]) -> dict[Any, Any]:
    """Results of opened calls -> the variables that they are."""
    own = {variable for _, outs, _ in made for variable in outs}
    out: dict[Any, Any] = {}
    for equation in body.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in _INLINED and equation.outvars and equation.outvars[0] not in own:
            out |= {given: inside for given, inside in zip(equation.outvars, inner.jaxpr.outvars)
                    if not hasattr(inside, "val")}
    return out


def _step(equation: Any, outs: Sequence[Any], ins: Sequence[Any], name: str, numbers: Mapping[Any, int],
          near: int) -> Step:
    counted = flops.of_equation(equation)
    every = counted.total
    each = (every,) if len(outs) == 1 else tuple(_alone(equation, which) for which in range(len(outs)))
    dtype = max(counted.by, key=counted.by.get)[1] if every else ""
    return Step(tuple(numbers[v] for v in outs), tuple(sorted({numbers[v] for v in ins if v in numbers})), name,
                each, every, dtype, tuple(_size(v.aval) // near for v in outs))


def _alone(equation: Any, which: int) -> int:
    """FLOPs of one result of an equation: of a call, only of what makes it."""
    from jax.interpreters import partial_eval

    bodies = [body for value in equation.params.values() if hasattr(body := getattr(value, "jaxpr", value), "eqns")]
    if equation.primitive.name not in (*_INLINED, "custom_vjp_call", "custom_jvp_call") or len(bodies) != 1:
        return flops.of_equation(equation).total
    wanted = [number == which for number in range(len(equation.outvars))]
    live, _ = partial_eval.dce_jaxpr(bodies[0], wanted)
    return sum(flops.of_equation(inner).total for inner in live.eqns)


def _size(aval: Any) -> int:
    """Bytes of an array, over all devices."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
