"""The graph of a layer's forward pass: values that the backward pass reads, named values, and costs of recomputation.

For every choice of names, the graph shows which values are kept and which are recomputed by `jax.checkpoint`
(remat/remat_solver.py). It is plain data and is sent between processes as JSON. `named_block` builds it for a model
that names its values, `layer_values` for any loss. Both read jax's derivative of the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bytescope.memory.cost import flops

# The name of a layer's input. The loop over layers carries it, so it is kept under every policy.
LAYER_INPUT = "block_in"
# Maximum number of results of one equation for which FLOPs are counted for every subset of the results.
MAX_RESULTS = 8


@dataclasses.dataclass(frozen=True)
class GraphStep:
    """One equation in the forward pass of a layer. The values of the layer are identified by numbers.

    Fields:
        name: the name that the equation gives with `checkpoint_name`, "" for none.
        outs, ins: numbers of the values that the equation computes and reads, without inputs of the layer.
        flops: for each value in `outs`, the FLOPs over all devices of computing only this value.
        all_flops: the FLOPs over all devices of computing all values in `outs`.
        dtype: the compute unit that does the work, such as "bf16" (a key of `Target.peak_flops`); "" without FLOPs.
        bytes: for each value in `outs`, the bytes on one device.
        shared: (indices in `outs`, FLOPs) of work that is needed by all of these values and is done only once for them.
            The FLOPs are part of the `flops` of each of these values, so they are subtracted if several are computed.
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
class LayerGraph:
    """The forward pass of one layer of a model, whose layers are all equal.

    Fields:
        layers: number of equal layers.
        steps: the equations of the layer, in order.
        read: numbers of the values that the backward pass reads.
        carry_bytes: bytes of the layer's input, on one device.
        none_bytes: bytes on one device of all values that a layer keeps if it is not under a checkpoint.
        bound: name of a value -> names of other values that must be kept on the device together with it. An example is
            an attention kernel outside of the checkpoint: if its result is kept, so are the kernel's inputs and unnamed
            residuals.
    """

    layers: int
    steps: tuple[GraphStep, ...]
    read: tuple[int, ...]
    carry_bytes: int
    none_bytes: int
    bound: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the values that the backward pass has to recompute if the forward pass keeps none of them, in the
        order of their equations.
        """
        needed = set(self.read)
        named: list[str] = []
        for step in reversed(self.steps):
            if needed.intersection(step.outs):
                needed.update(step.ins)
                named.append(step.name)
        return tuple(dict.fromkeys(name for name in reversed(named) if name not in ("", LAYER_INPUT)))

    @functools.cached_property
    def keepers(self) -> tuple[str, ...]:
        """For each step, the name of the value to keep so that the step need not be recomputed; "" if there is none."""
        kernels: dict[tuple[int, ...], str] = {}
        for tag in self.steps:
            if tag.name in self.bound:
                kernels |= {step.outs: tag.name for step in self.steps if set(tag.ins).intersection(step.outs)}
        return tuple(
            step.name if step.name not in ("", LAYER_INPUT) else kernels.get(step.outs, "") for step in self.steps
        )

    def kept_bytes(self, number: int) -> int:
        """Returns the bytes on one device of keeping the results of step `number` instead of recomputing them.

        If the name of its value is in `bound`, the step belongs to a kernel outside of the checkpoint. The bytes then
        include the kernel's other results that the backward pass reads.
        """
        name = self.keepers[number]
        if name not in self.bound:
            return sum(self.steps[number].bytes)
        tag = next(step for step in self.steps if step.name == name)
        kernel = next(step for step in self.steps if set(tag.ins).intersection(step.outs))
        others = (size for value, size in zip(kernel.outs, kernel.bytes) if value in self.read and value not in tag.ins)
        return sum(tag.bytes) + sum(others)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LayerGraph:
        """Rebuilds the graph of a layer from the JSON of `dataclasses.asdict(graph)`, in which tuples are lists."""
        steps = []
        for step in values["steps"]:
            steps.append(GraphStep(**{key: _lists_to_tuples(value) for key, value in step.items()}))
        bound = {name: tuple(names) for name, names in values["bound"].items()}
        return cls(**{**values, "steps": tuple(steps), "read": tuple(values["read"]), "bound": bound})


def build_step(
    equation: Any, outs: Sequence[int], ins: Collection[int], name: str, parts: int | Fraction, times: int = 1
) -> GraphStep:
    """Returns the record of an equation, with FLOPs and bytes summed over `times` layers.

    Args:
        equation: an equation of one layer.
        outs, ins: numbers of the results and of the operands.
        name: the name by which the results can be kept, "" for none.
        parts: number by which the bytes of the results are divided to get the bytes on one device. It is the number of
            devices over which the results are sharded, divided by the number of micro-batches that a device stores.
    """
    counted = flops.count_equation(equation)
    every = counted.total
    each, shared = _flops_by_result(equation, every)
    dtype = max(counted.by, key=lambda unit: counted.by[unit])[1] if every else ""
    return GraphStep(
        tuple(outs),
        tuple(sorted(ins)),
        name,
        tuple(times * count for count in each),
        times * every,
        dtype,
        tuple(times * (size_of(v.aval) // parts) for v in equation.outvars),
        tuple((which, times * count) for which, count in shared),
    )


def _flops_by_result(equation: Any, every: int) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], int], ...]]:
    """Returns the fields `flops` and `shared` of a `GraphStep`: the FLOPs that each result of an equation needs, and
    the FLOPs that several results share.

    `every`: the FLOPs of the whole equation.
    """
    count = len(equation.outvars)
    everything = tuple(range(count))
    if not every or count == 1:
        return (every,) * count, ()
    if count > MAX_RESULTS:
        return (every,) * count, ((everything, every),)
    # Set of results -> FLOPs that all of these results need and no other result needs: the FLOPs that the other
    # results do not need, minus those of smaller sets.
    own: dict[tuple[int, ...], int] = {}
    for size in range(1, count + 1):
        for which in itertools.combinations(everything, size):
            others = tuple(number for number in everything if number not in which)
            inside = every - (_flops_for_results(equation, others) if others else 0)
            own[which] = inside - sum(done for part, done in own.items() if set(part) < set(which))
    each = []
    for number in everything:
        each.append(sum(done for which, done in own.items() if number in which))
    return tuple(each), tuple((which, done) for which, done in own.items() if done and len(which) > 1)


def _flops_for_results(equation: Any, which: Sequence[int]) -> int:
    """Returns the FLOPs of an equation if only the results with the indices `which` are needed. Then only a part of
    the body of a call or a loop has to run.
    """
    from jax.interpreters import partial_eval

    rule = partial_eval.dce_rules.get(equation.primitive)
    wanted = [number in which for number in range(len(equation.outvars))]
    # From jax 0.12 on, a rule also takes a list of the operands that are needed.
    arguments: list[Any] = [wanted, equation]
    if rule and len(inspect.signature(rule).parameters) > 2:
        arguments.insert(1, [True] * len(equation.invars))
    live = rule(*arguments)[1] if rule else equation
    return flops.count_equation(live).total if live else 0


def _lists_to_tuples(value: Any) -> Any:
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


def size_of(aval: Any) -> int:
    """Returns the bytes of an array, over all devices."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
