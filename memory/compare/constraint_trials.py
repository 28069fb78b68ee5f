"""Tries sharding constraints on the arrays that XLA's partitioner gathers in full.

Each trial inserts `jax.lax.with_sharding_constraint` into the traced program, compiles the program for the target, and
compares the bytes and seconds of its report with the report of the unchanged program. A sharding constraint changes
where values are stored, never what the program computes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import Compilation, compile_lowered
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.findings.evidence import spec_words
from bytescope.memory.findings.user_functions import line_of
from bytescope.memory.hlo.sharding_text import mesh_axes_of, parse_sharding
from bytescope.memory.jaxprs import bodies, distinct_jaxprs, inner_jaxpr, with_parameters
from bytescope.memory.program import retarget
from bytescope.memory.program.compilation import compiled_for, trace_step, unwrapped_stage
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding

# Mesh axes for each dimension of an array, as in a PartitionSpec.
Spec = tuple[tuple[str, ...], ...]
_OPAQUE = ("shard_map", "pallas_call", "custom_partitioning")


@dataclasses.dataclass(frozen=True)
class ConstraintTrial:
    """A sharding constraint that was tried. All bytes are bytes on one device; seconds and sent bytes are those of one
    step.

    Fields:
        source: "file.py:line" of the operation that computes or reads the constrained array.
        array: the constrained array in words, such as "the result of dot_general, float32[64,512]" or "operand 1 of
            add, float32[64,512]".
        spec: the sharding as a PartitionSpec in source code, such as "P('x', None)".
        code: the line of Python to insert, "x = jax.lax.with_sharding_constraint(x, ...)", where x is the array.
        allocated_before, allocated_after: bytes that the program allocates without and with the constraint.
        wire_before, wire_after: bytes that one device sends to others without and with the constraint.
        seconds_before, seconds_after: predicted seconds without and with the constraint; None if the target's FLOP/s
            and bandwidths are unknown.
        rows_before, rows_after: number of audit rows about arrays that are gathered in full, without and with the
            constraint.
    """

    source: str
    array: str
    spec: str
    code: str
    allocated_before: int
    allocated_after: int
    wire_before: int
    wire_after: int
    seconds_before: float | None
    seconds_after: float | None
    rows_before: int
    rows_after: int

    @property
    def improves(self) -> bool:
        """True if the constraint lowers the allocated bytes, or leaves them equal and lowers the bytes that one device
        sends."""
        return (self.allocated_after, self.wire_after) < (self.allocated_before, self.wire_before)


@dataclasses.dataclass(frozen=True)
class _Site:
    """The place where a sharding constraint is inserted: one operand or result of an operation. If a source line makes
    several equations with this primitive in the forward pass or its recomputation, each of them is constrained.

    Fields:
        line: "file.py:line" of the operation.
        primitive: name of the operation's primitive, such as "dot_general".
        on_operand: True if an operand is constrained, False if a result is constrained.
        position: index of the operand or of the result.
        shape: global shape of the constrained array.
        dtype: dtype of the constrained array, such as "float32".
    """

    line: str
    primitive: str
    on_operand: bool
    position: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def array(self) -> str:
        place = f"operand {self.position}" if self.on_operand else "the result"
        return f"{place} of {self.primitive}, {self.dtype}[{','.join(map(str, self.shape))}]"


def try_constraints(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | str,
    options: Mapping[str, Any] | None = None,
    max_trials: int = 12,
    progress: Callable[[int, int, str], None] = lambda number, count, words: None,
) -> tuple[ConstraintTrial, ...]:
    """Compiles a step with different sharding constraints on the arrays that XLA gathers in full on every device.

    Args:
        step, args, kwargs: the step and its arguments, as for `memory.analyze`.
        target: the devices, such as "h100:8".
        options: options of `jax.jit`, such as `donate_argnums`, if the step is a plain function.
        max_trials: maximum number of constraints that are compiled.
        progress: function that is called before each compilation with (number of the compilation, number of all
            compilations, text of the constraint).

    Returns one ConstraintTrial for each constraint that compiles, sorted by allocated bytes, then predicted seconds,
    then bytes sent, lowest first. Returns () if the program has no mesh, if no array is gathered in full, or if only
    parameters are gathered in full inside a loop.

    Raises ReportError if the unchanged step cannot be compiled for the target.
    """
    target = targets.parse(target) if isinstance(target, str) else target
    traced = unwrapped_stage(trace_step(step, args, kwargs, target=target, options=options))
    compilation, _ = compiled_for(traced, target=target)
    before = report_of(compilation, target=target, seconds=True)
    mesh = _mesh_of(traced)
    if mesh is None:
        return ()
    candidates = list(_candidates(traced, compilation, before, mesh))[:max_trials]
    trials = []
    for number, (site, spec) in enumerate(candidates, start=1):
        words = spec_words(spec)
        progress(number, len(candidates), f"{words} for {site.array}")
        try:
            changed = _changed(traced, site, spec, mesh)
            lowered = retarget.lowered_for(changed, target)
            pool = target.pool_bytes if target.is_described else None
            after = report_of(
                compile_lowered(lowered, jaxpr=changed.jaxpr, device_memory_bytes=pool), target=target, seconds=True
            )
        except (ReportError, ValueError, TypeError, RuntimeError):  # jax and XLA refuse some shardings
            continue
        trials.append(
            ConstraintTrial(
                source=site.line,
                array=site.array,
                spec=words,
                code=f"x = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, {words}))",
                allocated_before=before.allocated_bytes,
                allocated_after=after.allocated_bytes,
                wire_before=_wire_bytes(before),
                wire_after=_wire_bytes(after),
                seconds_before=before.prediction.get("seconds"),
                seconds_after=after.prediction.get("seconds"),
                rows_before=len(_rows(before)),
                rows_after=len(_rows(after)),
            )
        )
    return tuple(sorted(trials, key=lambda trial: (trial.allocated_after, trial.seconds_after or 0, trial.wire_after)))


def _wire_bytes(report: ReportRecord) -> int:
    return sum(item.wire_bytes * item.times for item in report.collectives)


def _rows(report: ReportRecord) -> list[Any]:
    return [row for row in report.audit if row.kind == "sharding" and row.honored is False]


def _mesh_of(traced: Any) -> Any:
    """Returns the first device mesh in the shardings of a traced program's arguments or sharding constraints; None
    if there is none."""
    shardings = list(retarget.argument_shardings(traced))
    for inside in distinct_jaxprs(traced.jaxpr):
        shardings += [equation.params.get("sharding") for equation in inside.eqns]
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    return next((mesh for mesh in meshes if mesh is not None and not mesh.empty and hasattr(mesh, "devices")), None)


# ---- candidates -----------------------------------------------------------------------------------------------------


def _candidates(traced: Any, compilation: Compilation, report: ReportRecord, mesh: Any) -> Iterator[tuple[_Site, Spec]]:
    """Yields the constraints to try, as pairs (the place where the constraint is inserted, the sharding). Yields the
    first sharding of every array, largest array first, then the second sharding of every array, and so on.

    Args:
        traced: the traced step.
        compilation: the compiled step with XLA's log lines.
        report: the report of the step, whose audit lists the arrays that are gathered in full.
        mesh: the device mesh.
    """
    sizes = {str(name): int(size) for name, size in mesh.shape.items() if size > 1}
    sharding = JaxprSharding.from_arguments(traced.jaxpr, retarget.argument_shardings(traced))
    logged = [parse_sharding(text) for remat in compilation.full_remats for text in (remat.source, remat.target)]
    between = [mesh_axes_of(parsed, list(mesh.shape.items())) for parsed in logged if parsed is not None]
    signature = compilation.signature
    paths = {leaf.path for leaf in signature.arguments} if signature is not None else set()
    by_site: dict[_Site, list[Spec]] = {}
    for row in sorted(_rows(report), key=lambda row: -row.bytes):
        if row.subject in paths:  # a parameter that a loop gathers, which a constraint inside the loop does not change
            continue
        for site, variable in _sites(traced.jaxpr, row.source, row.bytes // row.count):
            rank = len(site.shape)
            own = tuple(tuple(axis for axis in axes if axis in sizes) for axes in sharding.spec(variable))
            starts = [spec for spec in between if spec is not None and len(spec) == rank]
            by_site.setdefault(site, list(_specs(own, starts, site.shape, sizes)))
    for turn in itertools.zip_longest(*by_site.values()):
        for site, spec in zip(by_site, turn):
            if spec is not None:
                yield site, spec


def _specs(own: Spec, between: Sequence[Spec], shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Spec]:
    """Yields the shardings to try for one array. Shardings that do not divide the array evenly are left out.

    The order is: 1. the array's own sharding, unchanged; 2. variants of the shardings in `between` and of the array's
    own sharding, in which one mesh axis is moved to another dimension; 3. one dimension sharded over all mesh axes; 4.
    one dimension sharded over one mesh axis.

    Args:
        own: the sharding of the array in the jaxpr, as mesh axes for each dimension.
        between: the shardings in XLA's log between which the array is resharded.
        shape: global shape of the array.
        sizes: mesh axis -> number of devices, only for mesh axes of more than one device.
    """
    rank = len(shape)
    specs = [own]
    for spec in (*between, own):
        for start, end in itertools.permutations(range(rank), 2):
            for axis in spec[start]:
                moved = list(spec)
                moved[start] = tuple(other for other in spec[start] if other != axis)
                specs += [
                    (*moved[:end], axes, *moved[end + 1 :])
                    for axes in dict.fromkeys(((*moved[end], axis), (axis, *moved[end])))
                ]
    for axes in (tuple(sizes), *((axis,) for axis in sizes)):
        specs += [((),) * dim + (axes,) + ((),) * (rank - dim - 1) for dim in range(rank)]
    for spec in dict.fromkeys(specs):
        parts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in spec]
        if any(spec) and all(size % part == 0 for size, part in zip(shape, parts)):
            yield spec


def _sites(jaxpr: Any, line: str, size: int) -> Iterator[tuple[_Site, Any]]:
    """Yields (place for a constraint, variable of the jaxpr) for each array that one source line computes in the
    forward pass and whose global size is `size` bytes. If the line computes no such array, yields the arrays of this
    size that the line reads. `line`: "file.py:line"."""
    equations = [equation for equation, backward in _equations(jaxpr) if not backward and line_of(equation) == line]
    for on_operand in (False, True):
        found: dict[_Site, Any] = {}
        for equation in equations:
            if on_operand is False and equation.primitive.name == "sharding_constraint":
                continue  # its result has a sharding already
            for position, atom in enumerate(equation.invars if on_operand else equation.outvars):
                shape, dtype = getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)
                if hasattr(atom, "val") or dtype is None or math.prod(shape) * dtype.itemsize != size:
                    continue
                site = _Site(line, equation.primitive.name, on_operand, position, tuple(shape), dtype.name)
                found.setdefault(site, atom)
        if found:
            yield from found.items()
            return


def _equations(jaxpr: Any, backward: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields (equation, is_backward) for the equations of a jaxpr and of the jaxprs inside it. Equations that only
    contain other equations, such as a scan, are not yielded. is_backward is True for an equation of the backward pass
    that is not a recomputation of the forward pass. `backward`: True if the whole `jaxpr` is part of the backward
    pass."""
    for equation in inner_jaxpr(jaxpr).eqns:
        inside = list(bodies(equation)) if equation.primitive.name not in _OPAQUE else []
        own = _is_backward(equation, backward)
        if not inside:
            yield equation, own
        for body in inside:
            yield from _equations(body, own)


def _is_backward(equation: Any, outer: bool) -> bool:
    # A recomputation is inside the backward pass and computes the values of the forward pass.
    stack = str(equation.source_info.name_stack)
    return (outer or "transpose(" in stack) and "rematted_computation" not in stack


# ---- changed programs -----------------------------------------------------------------------------------------------


class _ChangedProgram:
    """A `jax.stages.Traced` in which the attribute `jaxpr` is replaced by another ClosedJaxpr."""

    def __init__(self, traced: Any, jaxpr: Any):
        self._traced, self.jaxpr = traced, jaxpr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)


def _changed(traced: Any, site: _Site, spec: Spec, mesh: Any) -> Any:
    """Returns a copy of the traced program in which the array that `site` describes, and its gradient, are constrained
    to the sharding `spec` over the mesh."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(axes or None for axes in spec)))
    return _ChangedProgram(traced, _Rewriter(site, sharding).closed(traced.jaxpr))


class _Rewriter:
    """Inserts one sharding constraint into a jaxpr: on the array that `site` describes, and on the gradient of this
    array in the backward pass, because `with_sharding_constraint` in source code constrains both.

    The gradient is recognized as a value with the array's shape and dtype that the backward pass computes and that an
    equation of the same source line reads in the backward pass."""

    def __init__(self, site: _Site, sharding: Any):
        self.site, self.sharding = site, sharding
        self._done: dict[Any, Any] = {}

    def closed(self, jaxpr: Any) -> Any:
        """Returns a copy of a ClosedJaxpr in which the array that `site` describes, and its gradient, have the
        sharding constraint."""
        return self._value(jaxpr, False, ())

    def _value(self, value: Any, backward: bool, gradients: Sequence[bool]) -> Any:
        from jax.extend import core

        if isinstance(value, core.ClosedJaxpr):
            return core.ClosedJaxpr(self._jaxpr(value.jaxpr, backward, gradients), value.consts)
        if isinstance(value, core.Jaxpr):
            return self._jaxpr(value, backward, gradients)
        if type(value) in (tuple, list):
            return type(value)(self._value(each, backward, gradients) for each in value)
        return value

    def _jaxpr(self, jaxpr: Any, outer: bool, given: Sequence[bool]) -> Any:
        """Returns a copy of a Jaxpr in which the array at `self.site`, and its gradient, have the sharding constraint
        `self.sharding`.

        Args:
            jaxpr: the Jaxpr.
            outer: True if the whole Jaxpr is part of the backward pass.
            given: for each input of the Jaxpr, True if the backward pass computed the input, so that it is a gradient.
        """
        key = id(jaxpr), outer, tuple(given)
        if key in self._done:
            return self._done[key][1]
        gradients = set()
        if len(given) == len(jaxpr.invars):  # a conditional and a while loop have other operands than their bodies
            gradients = {variable for variable, known in zip(jaxpr.invars, given) if known}
        renamed: dict[Any, Any] = {}
        equations = []

        def read(atom: Any) -> Any:
            return atom if hasattr(atom, "val") else renamed.get(atom, atom)

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            backward = _is_backward(equation, outer)
            of_gradients = [not hasattr(atom, "val") and atom in gradients for atom in equation.invars]
            reads, positions = self._positions(equation, backward, of_gradients)
            for position in positions if reads else ():
                equations.append(self._constraint(operands[position]))
                operands[position] = equations[-1].outvars[0]
            parameters = equation.params
            if equation.primitive.name not in _OPAQUE:
                change = functools.partial(self._change, backward, of_gradients)
                parameters = with_parameters(equation, change)
            equations.append(equation.replace(invars=operands, params=parameters))
            for position in positions if not reads else ():
                equations.append(self._constraint(equation.outvars[position]))
                renamed[equation.outvars[position]] = equations[-1].outvars[0]
            if backward:
                gradients.update(equation.outvars)
        changed = jaxpr.replace(eqns=equations, outvars=[read(atom) for atom in jaxpr.outvars])
        self._done[key] = jaxpr, changed  # keeps the old jaxpr, so that its id is not used again
        return changed

    def _change(self, backward: bool, of_gradients: Sequence[bool], _: str, value: Any) -> Any:
        return self._value(value, backward, of_gradients)

    def _positions(self, equation: Any, backward: bool, of_gradients: Sequence[bool]) -> tuple[bool, list[int]]:
        """Returns (on_operand, positions): the positions of the arrays of an equation that get the constraint. They are
        positions of operands if on_operand is True, of results if it is False. `positions` is [] for an equation of
        another source line than that of `self.site`, the array to constrain.

        In the forward pass, the constraint is applied to the operand or result that `self.site` describes. In the
        backward pass, it is applied to each operand that the backward pass computed and that has the shape and dtype of
        `self.site`.

        Args:
            equation: the equation.
            backward: True if the equation belongs to the backward pass and is not a recomputation.
            of_gradients: for each operand, True if the backward pass computed it.
        """
        site = self.site
        if line_of(equation) != site.line:
            return False, []
        if backward:
            wanted = site.shape, site.dtype
            types = [(getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)) for atom in equation.invars]
            fits = [(tuple(shape), str(dtype)) == wanted for shape, dtype in types]
            return True, [at for at, known in enumerate(of_gradients) if known and fits[at]]
        atoms = equation.invars if site.on_operand else equation.outvars
        if equation.primitive.name != site.primitive or site.position >= len(atoms):
            return False, []
        atom = atoms[site.position]
        fits_rank = not hasattr(atom, "val") and len(getattr(atom.aval, "shape", ())) == len(site.shape)
        return site.on_operand, [site.position] if fits_rank else []

    def _constraint(self, variable: Any) -> Any:
        import jax

        array = jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        made = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, self.sharding))(array)
        return made.jaxpr.eqns[0].replace(invars=[variable])
