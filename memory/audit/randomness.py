"""Audits random numbers under `jax.checkpoint`: whether the backward pass draws the same random bits as the forward
pass.

`jax.checkpoint` recomputes a dropout mask from its random key. If the recomputed mask differs, the gradient is wrong.
There are two causes:

- `jax.lax.rng_uniform` takes no key. XLA advances a hidden state with each draw.
- The key has the implementation `rbg` or `unsafe_rbg`, and the partitioner lets each device draw only its part of the
  array, so that the bits depend on the sharding of the mask. Only XLA for TPUs does so, with the flag
  xla_tpu_spmd_rng_bit_generator_unsafe (https://github.com/jax-ml/jax/issues/21046). XLA for CPUs and GPUs draws the
  whole array on every device.

The bits of threefry keys do not depend on the sharding. Until jax 0.4.38 they did with
jax_threefry_partitionable=False; tests/bench/redrawn_mask.py has the measurements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from bytescope.memory.cost.flops import RECOMPUTED
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.module import Frame, Metadata, Module
from bytescope.memory.hlo.sources import short_place, source_line
from bytescope.memory.jaxprs import bodies, distinct_jaxprs, parameters
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.audit_record import UNKNOWN, AuditRow
from bytescope.memory.records.report_record import JudgedProgram

# Primitives that draw random bits. The first one has no key.
_STATEFUL = "rng_uniform"
_DRAWS = frozenset((_STATEFUL, "random_bits", "rng_bit_generator", "threefry2x32"))
# The HLO instruction whose bits depend on the shape of its result.
_GENERATOR = "rng-bit-generator"
_NO_KEY = (
    "jax.lax.rng_uniform takes no random key, so the recomputed values differ from the values of the forward pass and "
    "the gradient is wrong: use jax.random.uniform with a key"
)


class _Draw(NamedTuple):
    """An equation that draws random bits.

    Fields:
        source: "file.py:line" of the draw in the user's code.
        recomputed: True if the equation belongs to the recomputation of a `jax.checkpoint`, False if it belongs to the
            forward pass.
        subject: the primitive, and the type of the key if known, such as "random_bits of key<rbg>".
        array: the type (aval) of the random array, with its global shape.
    """

    source: str
    recomputed: bool
    subject: str
    array: Any


class _Divided(NamedTuple):
    """Random bits that are divided among the devices differently in the forward pass and in the recomputation: one
    device draws an array of another shape in each of the two.

    Fields:
        bytes: bytes of random bits that one device draws in the forward pass.
        first: shape of the array that one device draws in the forward pass.
        again: shape of the array that one device draws in the recomputation.
    """

    bytes: int
    first: tuple[int, ...]
    again: tuple[int, ...]


def randomness(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields one row for each source line whose random bits are drawn in the forward pass and drawn again when a
    `jax.checkpoint` is recomputed. Without a jaxpr (an HLO dump), only draws whose bits differ get a row.

    Args:
        report: not used; all audits have the same arguments.
        program: the compiled step with its jaxpr.
    """
    divided = _divided_differently(program.module)
    first: set[str] = set()
    again: dict[str, list[_Draw]] = defaultdict(list)
    for draw in _draws(program.jaxpr) if program.jaxpr is not None else ():
        if draw.recomputed:
            again[draw.source].append(draw)
        else:
            first.add(draw.source)
    for source in divided.keys() - again.keys():
        asked = UNKNOWN if program.jaxpr is None else "repeat"
        message = _describe(divided[source])
        yield _redrawn("random bits", source, asked, divided[source].bytes, "partitioner", message)
    for source, draws in again.items():
        largest = max(draws, key=lambda draw: math.prod(draw.array.shape))
        subject, size = largest.subject, _bytes_on_device(largest, program.module)
        if source in divided:
            message = _describe(divided[source])
            yield _redrawn(subject, source, "repeat", divided[source].bytes, "partitioner", message, len(draws))
        elif source in first and subject == _STATEFUL:
            yield _redrawn(subject, source, "repeat", size, "runtime", _NO_KEY, len(draws))
        elif source in first:
            yield AuditRow("random", subject, short_place(source), "repeat", "repeated", size, count=len(draws))


def _redrawn(subject: str, source: str, asked: str, size: int, step: str, message: str, count: int = 1) -> AuditRow:
    return AuditRow("random", subject, short_place(source), asked, "redrawn", size, 0, step, message, count)


def _describe(divided: _Divided) -> str:
    first, again = (" x ".join(map(str, dims)) for dims in (divided.first, divided.again))
    return (
        f"each device draws an array of shape {first} in the forward pass and of shape {again} in the recomputation, "
        "so the random bits differ and the gradient is wrong: put jax.lax.with_sharding_constraint on the random "
        "array, use a threefry key, or remove the flag xla_tpu_spmd_rng_bit_generator_unsafe"
    )


def _divided_differently(module: Module) -> dict[str, _Divided]:
    """Returns a dict: "file.py:line" that draws random bits -> `_Divided`, for each line for which one device draws no
    array of the same shape in the forward pass and in the recomputation. The bits of such a line differ between the
    two. Returns {} for a module on one device."""
    if module.devices < 2:
        return {}
    shapes: dict[tuple[str, str], dict[tuple[int, ...], int]] = defaultdict(dict)
    for instruction in module.instructions.values():
        if instruction.opcode != _GENERATOR:
            continue
        metadata, shape = module.metadata(instruction), module.shape(instruction)
        bits = shape.parts[-1] if shape.parts else shape  # the result may be (new state, bits)
        phase = scopes.parse(metadata.op_name).phase
        shapes[source_line(metadata), phase][bits.dims] = bits.bytes
    found = {}
    for source in {source for source, _ in shapes}:
        first, again = shapes.get((source, "forward"), {}), shapes.get((source, "recompute"), {})
        if first and again and first.keys().isdisjoint(again):
            dims = next(iter(first))
            found[source] = _Divided(first[dims], dims, next(iter(again)))
    return found


def _bytes_on_device(draw: _Draw, module: Module) -> int:
    """Returns the bytes of one device's part of a random array. The number of elements of the part is taken from the
    compiled module: the largest result of an instruction with the same source line that divides the global array's
    number of elements evenly. If there is none, returns the bytes of the global array."""
    elements = whole = math.prod(draw.array.shape)
    if module.devices > 1 and whole:
        parts = [0]
        for instruction in module.instructions.values():
            size = module.shape(instruction).elements
            is_part = parts[-1] < size <= whole and whole % size == 0
            if is_part and source_line(module.metadata(instruction)) == draw.source:
                parts.append(size)
        elements = parts[-1] or whole
    return elements * draw.array.dtype.itemsize


def _draws(jaxpr: Any) -> Iterator[_Draw]:
    """Yields the equations of a ClosedJaxpr that draw random bits. Draws whose result is never used are left out."""
    from jax.interpreters import partial_eval

    inner = jaxpr.jaxpr
    if any(equation.primitive.name in _DRAWS for each in distinct_jaxprs(inner) for equation in each.eqns):
        live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
        yield from _walk(live, "", "")


def _walk(jaxpr: Any, stack: str, caller: str) -> Iterator[_Draw]:
    """Yields the equations that draw random bits in a Jaxpr and in the jaxprs inside it.

    Args:
        jaxpr: the Jaxpr.
        stack: name stack of the equation that contains the Jaxpr.
        caller: "file.py:line" of the user's call of a jax function, such as jax.random.bernoulli, if the Jaxpr is
            inside this function; "" otherwise.
    """
    for equation in jaxpr.eqns:
        path, name = f"{stack}/{equation.source_info.name_stack}", equation.primitive.name
        if name in _DRAWS:
            key = getattr(equation.invars[0].aval, "dtype", None)
            subject = f"{name} of {key}" if name == "random_bits" else name
            recomputed = bool(RECOMPUTED.search(path))
            yield _Draw(caller or _place(equation), recomputed, subject, equation.outvars[-1].aval)
            continue
        inside = caller
        # jax traces its own functions, such as _uniform, once: equations inside have the place of the first call.
        if not caller and str(parameters(equation).get("name", "")).startswith("_"):
            inside = _place(equation)
        for body in bodies(equation):
            yield from _walk(body, path, inside)


def _place(equation: Any) -> str:
    from jax._src import source_info_util

    frames = source_info_util.user_frames(equation.source_info.traceback)
    lines = tuple(Frame(each.file_name, each.start_line, function=each.function_name) for each in frames)
    return source_line(Metadata(frames=lines))
