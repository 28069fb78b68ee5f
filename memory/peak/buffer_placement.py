"""Finds how the arrays of a program are sharded over its devices.

The layouts of arguments come from the compiled program. The batch dimensions of activations come from the jaxpr,
because it has the global shapes, whereas the compiled module has only the shapes of one device. Batch dimensions that
the mesh shards are followed from the arguments through the equations of the forward pass. If an array is compiled with
more elements than its shard should have, it has lost this sharding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.compiler_log import FullRemat
from bytescope.memory.devices.signature import Signature
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.buffers import Allocation, HloProgram
from bytescope.memory.hlo.mesh import ArgumentLayout, Axes
from bytescope.memory.hlo.module import Module
from bytescope.memory.jaxprs import bodies, checkpoint_name_of
from bytescope.memory.peak.checkpoint_names import Place
from bytescope.memory.program.program_arguments import Arguments

# Labels of an array: dimension -> mesh axes that should shard it.
Labels = dict[int, tuple[str, ...]]
# Equations that are not followed: loops with arbitrary state, and bodies whose arrays are already shards.
_OPAQUE = frozenset(("while", "shard_map", "pallas_call"))


@dataclasses.dataclass(frozen=True)
class Activation:
    """One global array of the forward pass.

    Fields:
        place: file, line and column of the equation that computes the array.
        suffix: "name stack/primitive" of the equation, such as "mlp/dot_general". The op_name of the HLO instruction
            that was compiled from the equation ends with it.
        dims: dimensions of the global array.
        dtype: dtype of the array.
        labels: dimension -> names of the mesh axes that should shard it.
        name: the checkpoint name, "" if there is none.
    """

    place: Place
    suffix: str
    dims: tuple[int, ...]
    dtype: str
    labels: Labels
    name: str = ""


@dataclasses.dataclass(frozen=True)
class PlacedProgram:
    """A parsed program with its mesh and the layouts of its arrays.

    Fields:
        program: the parsed program, unchanged.
        mesh: names and sizes of the mesh axes, () if unknown.
        layouts: number of a parameter of the compiled program -> its layout on the mesh; {} if unknown.
        replicated: numbers of the parameters that are replicated on every device; None if unknown.
        activations: the global arrays of the forward pass that have a batch dimension; None if there is no jaxpr.
        jaxpr: the ClosedJaxpr of the whole program, None for a program that was not traced.
        arguments: pytree paths and roles (such as "optimizer") of the parameters of the compiled program.
        facts: the trainer's description of the step, None if there is no trainer.
        results: layouts of the program's results on the mesh, in order; () if unknown.
        full_remats: XLA's log lines about tensors that its partitioner replicates in order to change their sharding.
        signature: names, shapes and donation of all arguments and results, None if unknown.
    """

    program: HloProgram
    mesh: Axes = ()
    layouts: Mapping[int, ArgumentLayout] = dataclasses.field(default_factory=dict)
    replicated: frozenset[int] | None = None
    activations: tuple[Activation, ...] | None = None
    jaxpr: Any = None
    arguments: Arguments = dataclasses.field(default_factory=Arguments)
    facts: ModelFacts | None = None
    results: tuple[ArgumentLayout, ...] = ()
    full_remats: tuple[FullRemat, ...] = ()
    signature: Signature | None = None

    @property
    def module(self) -> Module:
        """The HLO module of the compiled program."""
        return self.program.module

    @property
    def allocations(self) -> list[Allocation]:
        """The memory ranges that the runtime allocates for the program; a range can hold several buffers."""
        return self.program.allocations


def place(
    program: HloProgram, compilation: Compilation, facts: ModelFacts | None, arguments: Arguments
) -> PlacedProgram:
    """Combines a parsed program with the device mesh of its arguments and the activations of its jaxpr.

    Args:
        program: the program, parsed from its HLO proto.
        compilation: the compilation of the program. Layouts come from its executable, activations from its jaxpr.
        facts: the trainer's description of the step. Its mesh is used if the shardings of the arguments have no mesh.
        arguments: pytree paths and roles of the parameters of the compiled program.
    """
    module = program.module
    axes, layouts = hlo_mesh.read_layouts(compilation.compiled) if compilation.compiled is not None else ((), ())
    matched = hlo_mesh.match(module, layouts)
    if facts and not axes and math.prod(facts.mesh.values()) == module.devices:
        axes = tuple(facts.mesh.items())
    replicated, activations = None, None
    if layouts:
        replicated = frozenset(number for number, layout in matched.items() if layout.local == layout.dims)
    if compilation.jaxpr is not None and module.devices > 1:
        known = arguments.roles
        batch = {
            layout.position: {dim: names for dim, names in enumerate(layout.spec) if names}
            for number, layout in matched.items()
            if known[number] == "batch"
        }
        activations = find_activations(compilation.jaxpr, batch)
    results: tuple[ArgumentLayout, ...] = ()
    if compilation.compiled is not None and compilation.signature is not None and module.devices > 1:
        shapes = [(leaf.shape, leaf.dtype) for leaf in compilation.signature.results]
        results = hlo_mesh.read_result_layouts(compilation.compiled, shapes)
    return PlacedProgram(
        program=program,
        mesh=axes,
        layouts=matched,
        replicated=replicated,
        activations=activations,
        jaxpr=compilation.jaxpr,
        arguments=arguments,
        facts=facts,
        results=results,
        full_remats=compilation.full_remats,
        signature=compilation.signature,
    )


# ---- the batch dimensions of activations -------------------------------------------------------------------------


def find_activations(jaxpr: Any, arguments: Mapping[int, Labels]) -> tuple[Activation, ...]:
    """Returns the arrays of the forward pass that have a batch dimension, in the order of the equations.

    `arguments`: position of an argument of the ClosedJaxpr -> its dimensions with the mesh axes that shard them.
    """
    inner = jaxpr.jaxpr
    known = {inner.invars[at]: labels for at, labels in arguments.items() if at < len(inner.invars)}
    return tuple(_walk(inner, known, ""))


def _walk(jaxpr: Any, known: dict[Any, Labels], stack: str) -> Iterator[Activation]:
    """Yields the activations of a jaxpr, and stores the labels of its variables (dimension -> mesh axes) in `known`.
    `stack`: the name stack around the jaxpr.
    """
    from jax._src import source_info_util

    for equation in jaxpr.eqns:
        inner_stack = f"{stack}/{equation.source_info.name_stack}"
        if "transpose(" in inner_stack:  # the backward pass
            continue
        labels = [known.get(v, {}) if not hasattr(v, "val") else {} for v in equation.invars]
        primitive = equation.primitive.name
        if not any(labels) or primitive in _OPAQUE:
            continue
        body = next(bodies(equation), None)
        if body is not None:
            yield from _walk_body(equation, body, labels, known, inner_stack)
            continue
        rule = _RULES.get(primitive, _same_dim_labels)
        for variable in equation.outvars:
            shape = tuple(getattr(variable.aval, "shape", ()))
            known[variable] = rule(equation, labels, shape) if shape else {}
        result = equation.outvars[0] if equation.outvars else None
        if result is None or not known[result] or result.aval.dtype.kind not in "fV":
            continue
        frame = next(source_info_util.user_frames(equation.source_info.traceback), None)
        if frame is not None:
            yield Activation(
                place=(frame.file_name, frame.start_line, frame.start_column),
                suffix=f"{equation.source_info.name_stack}/{primitive}",
                dims=tuple(result.aval.shape),
                dtype=result.aval.dtype.name,
                labels=known[result],
                name=checkpoint_name_of(equation),
            )


def _walk_body(
    equation: Any, body: Any, labels: list[Labels], known: dict[Any, Labels], stack: str
) -> Iterator[Activation]:
    inside: dict[Any, Labels] = {}
    skipped = 1 if equation.primitive.name == "cond" else 0
    # Inside the body, the inputs that a scan iterates over and the outputs that it stacks have one dimension less.
    for variable, outer, own in zip(body.invars, equation.invars[skipped:], labels[skipped:]):
        inside[variable] = _moved(own, _rank(variable) - _rank(outer))
    yield from _walk(body, inside, stack)
    for variable, inner in zip(equation.outvars, body.outvars):
        own = inside.get(inner, {}) if not hasattr(inner, "val") else {}
        known[variable] = _moved(own, _rank(variable) - _rank(inner))


def _rank(variable: Any) -> int:
    return len(getattr(variable.aval, "shape", ()))


def _moved(labels: Labels, by: int) -> Labels:
    return {dim + by: axes for dim, axes in labels.items() if dim + by >= 0}


# ---- rules: (equation, labels of its operands, shape of the result) -> labels of the result ----------------------


def _same_dim_labels(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    out: Labels = {}
    for variable, own in zip(equation.invars, labels):
        dims = tuple(getattr(variable.aval, "shape", ()))
        if len(dims) == len(shape):
            out |= {dim: axes for dim, axes in own.items() if dims[dim] == shape[dim]}
    return out


def _dot_labels(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    # The result has the batch dimensions, the free dimensions of the left operand, and those of the right.
    contracted, batch = equation.params["dimension_numbers"]
    out: Labels = {}
    place = len(batch[0])
    for side in (0, 1):
        out |= {at: labels[side][dim] for at, dim in enumerate(batch[side]) if dim in labels[side]}
        for dim in range(len(equation.invars[side].aval.shape)):
            if dim not in contracted[side] and dim not in batch[side]:
                out |= {place: labels[side][dim]} if dim in labels[side] else {}
                place += 1
    return out


def _transpose(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    return {at: labels[0][dim] for at, dim in enumerate(equation.params["permutation"]) if dim in labels[0]}


def _broadcast(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    dims = equation.params["broadcast_dimensions"]
    return {
        dims[dim]: axes for dim, axes in labels[0].items() if equation.invars[0].aval.shape[dim] == shape[dims[dim]]
    }


def _reduce(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    gone = equation.params.get("axes", equation.params.get("dimensions", ()))
    left = [dim for dim in range(len(equation.invars[0].aval.shape)) if dim not in gone]
    return {at: labels[0][dim] for at, dim in enumerate(left) if dim in labels[0]}


def _reshape_labels(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    out: Labels = {}
    dims = equation.invars[0].aval.shape
    for dim, axes in labels[0].items():
        before = math.prod(dims[:dim])
        match = [at for at in range(len(shape)) if math.prod(shape[:at]) == before and shape[at] > 1]
        # the first of merged or split dimensions
        if match:
            out[match[0]] = axes
    return out


def _gather_labels(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    offsets = equation.params["dimension_numbers"].offset_dims
    free = [dim for dim in range(len(shape)) if dim not in offsets]
    # The dimensions of the index array, except its last, keep their labels.
    return {free[dim]: axes for dim, axes in labels[1].items() if dim < len(free)}


def _lost(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    return {}


_RULES: Mapping[str, Callable[[Any, list[Labels], tuple[int, ...]], Labels]] = {
    "dot_general": _dot_labels,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape_labels,
    "gather": _gather_labels,
    "squeeze": _reduce,
    "argmax": _reduce,
    "argmin": _reduce,
    "scatter": _lost,
    "sort": _same_dim_labels,
    "conv_general_dilated": _lost,
} | {f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or")}
