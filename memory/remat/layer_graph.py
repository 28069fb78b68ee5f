"""A block's forward pass as a graph: what its backward pass reads, what is named, what recomputing each value costs.

Read from the jaxpr of a gradient without any remat policy. Autodiff of a loop over blocks stacks exactly the values
that the backward loop reads; walked from there to the names and to the block's inputs, the graph tells for every
choice of names what would be kept and what recomputed, the way `jax.checkpoint` decides it (remat/kept_patterns.py). The
graph itself is plain data: it crosses processes as JSON.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.errors import ReportError

# Calls that are no more than their body.
INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
# The name of the block's input, which its loop hands on: it is kept whatever a policy says.
CARRY = "block_in"
# The most results of one equation whose FLOPs are counted apart, by looking at each set of them.
MOST_RESULTS = 8


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation. Values are numbers; `name`: the checkpoint name it gives, "" for none.

    outs, ins: values it makes and reads, inputs of the block left out. flops: over all devices, of making each of
    `outs` alone; all_flops: of making all of them. dtype: the unit that does it (a key of `Target.peak_flops`), "" for
    no FLOPs. bytes: of each of `outs`, on one device. shared: (numbers of results in `outs`, FLOPs): they are in the
    `flops` of each of these, and done once for all of them.
    """

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    name: str = ""
    flops: tuple[int, ...] = ()
    all_flops: int = 0
    dtype: str = ""
    bytes: tuple[int, ...] = ()
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """One of `layers` equal blocks.

    steps: its equations in order. read: values that its backward pass reads. carry_bytes: of its input, on one device;
    none_bytes: of all that plain autodiff keeps of it. bound: name -> names that are kept with it on the device, in
    whose place it is kept too: a kernel outside of the checkpoint, whose residuals no name reaches.
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
        """The same block with `times` as many tokens."""

        def size(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(round(value * times) for value in values)

        steps = tuple(
            dataclasses.replace(
                step,
                flops=size(step.flops),
                all_flops=round(step.all_flops * times),
                bytes=size(step.bytes),
                shared=tuple((which, round(flops * times)) for which, flops in step.shared),
            )
            for step in self.steps
        )
        return dataclasses.replace(
            self, steps=steps, carry_bytes=round(self.carry_bytes * times), none_bytes=round(self.none_bytes * times)
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Block:
        """The block of `dataclasses.asdict`, read back from JSON."""
        steps = tuple(Step(**{key: _tuples(value) for key, value in step.items()}) for step in values["steps"])
        bound = {name: tuple(names) for name, names in values["bound"].items()}
        return cls(**{**values, "steps": steps, "read": tuple(values["read"]), "bound": bound})


def block_of(
    jaxpr: Any, parts: Callable[[str], int | Fraction], bound: Mapping[str, tuple[str, ...]] | None = None
) -> Block:
    """The block of a ClosedJaxpr: the body of its loop over the blocks.

    Args:
        jaxpr: of the gradient of one micro-batch, nothing recomputed, layers scanned.
        parts: name -> devices over which its tensor is sharded; values without a name lie as the name before them.
            Fractions where a device keeps the tensors of a layer more or less often than once.
        bound: see `Block`.

    Raises ReportError where no loop names a tensor.
    """
    loop = _loop(jaxpr)
    body, carried = loop.params["jaxpr"].jaxpr, carried_count(loop)
    numbers: dict[Any, int] = {}
    made = list(_flat(body.eqns))
    for _, outs, _ in made:
        for variable in outs:
            numbers.setdefault(variable, len(numbers))
    steps, near = [], parts(CARRY)
    for equation, outs, ins in made:
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        near = parts(name) if name else near
        operands = {numbers[v] for v in ins if v in numbers}
        steps.append(step_of(equation, [numbers[v] for v in outs], operands, name, near))
    alias = _aliases(body, made)
    stacked = {alias.get(variable, variable) for variable in body.outvars[carried:] if not hasattr(variable, "val")}
    kept = [variable for variable in stacked if variable in numbers]
    # Before what it stacks a loop is given constants, then what it carries.
    first = alike(loop.invars, body.invars) - carried
    carry = max((variable.aval for variable in body.invars[first : first + carried]), key=size_of)
    share = parts(CARRY)
    return Block(
        loop.params["length"],
        tuple(steps),
        tuple(sorted(numbers[variable] for variable in kept)),
        size_of(carry) // share,
        sum(size_of(variable.aval) for variable in kept) // share,
        dict(bound or {}),
    )


def _loop(jaxpr: Any) -> Any:
    """The scan that names tensors and stacks the most bytes."""
    found = [equation for equation in _scans(jaxpr.jaxpr) if _names(equation)]
    if not found:
        raise ReportError("no loop over layers names a tensor: set model.scan=true")
    return max(found, key=lambda equation: sum(size_of(v.aval) for v in equation.outvars[carried_count(equation) :]))


def carried_count(loop: Any) -> int:
    """How many values a loop carries from one turn to the next: jax's own parameter for it changes between versions."""
    return alike(loop.outvars, loop.params["jaxpr"].jaxpr.outvars)


def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many values have the same shape outside of a loop and in its body; what it stacks has one dimension more."""
    return sum(len(out.aval.shape) == len(own.aval.shape) for out, own in zip(outside, inside))


def _scans(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        elif equation.primitive.name in INLINED:
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
        if equation.primitive.name in INLINED and any(
            e.primitive.name == "name" for e, _, _ in _flat(inner.jaxpr.eqns)
        ):
            body = inner.jaxpr
            passed = {
                own: outer(given) for own, given in zip(body.invars, equation.invars) if not hasattr(given, "val")
            }
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
        if equation.primitive.name in INLINED and equation.outvars and equation.outvars[0] not in own:
            out |= {
                given: inside
                for given, inside in zip(equation.outvars, inner.jaxpr.outvars)
                if not hasattr(inside, "val")
            }
    return out


def step_of(equation: Any, outs: Sequence[int], ins: Collection[int], name: str, parts: int | Fraction) -> Step:
    """The step of an equation, its results and operands given as numbers; `parts`: devices that its results are sharded
    over."""
    counted = flops.of_equation(equation)
    every = counted.total
    each, shared = _by_result(equation, every)
    dtype = max(counted.by, key=counted.by.get)[1] if every else ""
    return Step(
        tuple(outs),
        tuple(sorted(ins)),
        name,
        each,
        every,
        dtype,
        tuple(size_of(v.aval) // parts for v in equation.outvars),
        shared,
    )


def _by_result(equation: Any, every: int) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], int], ...]]:
    """FLOPs of each result alone, and those that several share, as in `Step`.

    Of more than MOST_RESULTS results each is taken to need all FLOPs.
    """
    count = len(equation.outvars)
    everything = tuple(range(count))
    if not every or count == 1:
        return (every,) * count, ()
    if count > MOST_RESULTS:
        return (every,) * count, ((everything, every),)
    sets = [which for size in range(1, count + 1) for which in itertools.combinations(everything, size)]
    # What no other result needs, then what these alone share: all that is done without them, and less, taken off.
    own: dict[tuple[int, ...], int] = {}
    for which in sets:
        others = tuple(number for number in everything if number not in which)
        inside = every - (_live(equation, others) if others else 0)
        own[which] = inside - sum(done for part, done in own.items() if set(part) < set(which))
    each = tuple(sum(done for which, done in own.items() if number in which) for number in everything)
    return each, tuple((which, done) for which, done in own.items() if done and len(which) > 1)


def _live(equation: Any, which: Sequence[int]) -> int:
    """FLOPs of an equation of which these results alone are wanted: of a call or a loop, of what makes them."""
    from jax.interpreters import partial_eval

    rule = partial_eval.dce_rules.get(equation.primitive)
    wanted = [number in which for number in range(len(equation.outvars))]
    # From jax 0.12 on a rule is told which operands are worth having, too.
    operands = [[True] * len(equation.invars)] if rule and len(inspect.signature(rule).parameters) > 2 else []
    live = rule(wanted, *operands, equation)[1] if rule else equation
    return flops.of_equation(live).total if live else 0


def _tuples(value: Any) -> Any:
    """Lists, and those in them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def size_of(aval: Any) -> int:
    """Bytes of an array, over all devices."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
