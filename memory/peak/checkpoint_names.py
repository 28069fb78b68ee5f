"""Finds the checkpoint names of residuals.

`jax.ad_checkpoint.checkpoint_name` leaves only the source position of its call in a compiled program. A name is found
in one of three ways, tried in this order:

1. A word of the op_name is in the caller's vocabulary, because the model also opens a named scope.
2. The position of the call is in the jaxpr of a `jax.stages.Traced`. Without a jaxpr, the call is read from the source
   file: `checkpoint_name(x, "q")`, or a function of the user that calls it with one string that looks like a name.
3. The position of the operation whose result was named is looked up in the same way, because XLA often drops the mark
   of the call.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.scopes import COMPONENTS
from bytescope.memory.jaxprs import checkpoint_name_of, distinct_jaxprs

Place = tuple[str, int, int]
Chain = tuple[Place, ...]
# (frames, end of the innermost expression, name stack, primitive) of an equation.
_Position = tuple[Chain, tuple[int, int], str, str]
_FORMS = frozenset(
    (
        "reshape",
        "convert_element_type",
        "transpose",
        "squeeze",
        "sharding_constraint",
        "expand_dims",
        "reduce_precision",
        "broadcast_in_dim",
        "copy",
    )
)
MARK = "reduce_precision"
# The operation in the op_name of a kernel that partitions itself, such as cuDNN's attention.
_PARTITIONED = "custom_partitioning"
_NAME = re.compile(r"^[A-Za-z_][\w.\-/]*$")
_MAX_SOURCE = 4_000_000


class NamedPlace(NamedTuple):
    """The source position of an equation whose value has a checkpoint name.

    Fields:
        chain: (file, line, column) of each stack frame, innermost first.
        end: (line, column) at which the expression of the innermost frame ends.
        suffix: "name stack/primitive" of the equation. The op_name of the HLO instruction that was compiled from the
            equation ends with it.
        name: the checkpoint name, "" for none.
        elements: number of elements of the value, if several saved values may have this position and are distinguished
            by their size; otherwise 0.
    """

    chain: Chain
    end: tuple[int, int]
    suffix: str
    name: str
    elements: int = 0


class Names:
    """Looks up the checkpoint names of values by their source positions. The names come from a jaxpr (`named_places`),
    or from the source files if there is no jaxpr.
    """

    def __init__(self, vocabulary: Iterable[str] = (), places: Iterable[NamedPlace] | None = None):
        # A word that also names a part of the model, such as "embed", does not identify a tensor.
        self.vocabulary = frozenset(vocabulary) - COMPONENTS.keys()
        self._in_source = places is None
        # Innermost positions of the marks that have another position than their value.
        self.displaced_marks: set[Place] = set()
        self._table: dict[Chain, list[NamedPlace]] = {}
        for place in places or ():
            if place.elements:
                self.displaced_marks.add(place.chain[0])
            # The compiled program may lack outer frames, so every prefix of the chain can match.
            for length in range(1, len(place.chain) + 1):
                self._table.setdefault(place.chain[:length], []).append(place)

    def find(self, makers: Iterable[Metadata], elements: int = 0) -> str:
        """Returns the checkpoint name of a value; "" if it has none.

        Args:
            makers: metadata of the instructions that computed or passed on the value, nearest first.
            elements: number of elements of the value, on one device and in one loop iteration, if its position may
                belong to several saved values; otherwise 0.
        """
        metadata = [item for item in makers if item.op_name]

        def by_place(item: Metadata) -> str:
            return self._by_place(item, elements)

        for lookup in (self._by_word, *((_call, _around) if self._in_source else (by_place,))):
            for item in metadata:
                name = lookup(item)
                if name:
                    return name
        return ""

    def _by_word(self, metadata: Metadata) -> str:
        words = reversed(metadata.op_name.split("/"))
        return next((word for word in words if word in self.vocabulary), "") if self.vocabulary else ""

    def _by_place(self, metadata: Metadata, elements: int) -> str:
        chain = tuple(frame[:3] for frame in metadata.frames)
        for length in range(len(chain), 0, -1):
            names = {
                place.name
                for place in self._table.get(chain[:length], ())
                if metadata.op_name.endswith(place.suffix)
                and _same_end(metadata.frames[0], place.end)
                and place.elements in (0, elements)
            }
            if names:
                return names.pop() if len(names) == 1 else ""
        return ""


def _same_end(frame: Frame, end: tuple[int, int]) -> bool:
    known = (frame.end_line, frame.end_column)
    # Partitioning may lose the end of a frame; it is then (0, 0) or the start.
    return known in (end, (0, 0), (frame.line, frame.column))


def _call(metadata: Metadata) -> str:
    # JAX marks a saved value with a reduce_precision at the position of the call that names it.
    if metadata.op_name.endswith(MARK):
        for frame in metadata.frames:
            name = _name_in_call_at(*frame[:3])
            if name:
                return name
    return ""


def _around(metadata: Metadata) -> str:
    return _name_in_call_around(*metadata.frames[0][:3]) if metadata.frames else ""


def named_places(jaxpr: object) -> list[NamedPlace]:
    """Returns the source positions of the equations in a jaxpr that name values with `checkpoint_name`, and of the
    equations that compute these values. Inner jaxprs are included.

    If equations of several values have the same position, as in a loop over layers, the place has all their names,
    such as "wi_0, wi_1".
    """
    places: list[NamedPlace] = []
    for inner in distinct_jaxprs(jaxpr):
        makers = {id(variable): equation for equation in inner.eqns for variable in equation.outvars}
        named = [equation for equation in inner.eqns if checkpoint_name_of(equation)]
        alike = Counter(_position_of(equation) for equation in inner.eqns) if named else Counter()
        # Position -> maker of a named value -> the names of its value.
        names_at: dict[_Position, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for equation in named:
            for maker in (equation, *_value_makers(equation, makers)):
                names_at[_position_of(maker)][id(maker)].add(checkpoint_name_of(equation))
        for where, names_of in names_at.items():
            # Equations of one expression cannot be distinguished, such as the products within a GELU. If not all of
            # them have a name, they are skipped.
            if len(names_of) != alike[where]:
                continue
            names = set.union(*names_of.values())
            if len(names_of) > 1:  # the calls of a loop over layers, or over names
                names = {", ".join(sorted(names))}
            chain, end, stack, primitive = where
            # The compiled instruction is named after the maker's primitive, or after JAX's mark on a saved value.
            for operation in (primitive, MARK, _PARTITIONED):
                places += [NamedPlace(chain, end, f"{stack}/{operation}", name) for name in names]
        places += _displaced_marks(inner, makers)
    return [place for place in places if place.chain]


def _displaced_marks(jaxpr: Any, makers: Mapping[int, Any]) -> Iterator[NamedPlace]:
    """Yields the source positions at which jax marks values that `jax.checkpoint` saves, together with their checkpoint
    names. A mark is a `reduce_precision` equation. Marks with the same source position as their value are left out.

    `makers`: id of a variable -> the equation that computes it.
    """
    for mark in jaxpr.eqns:
        maker = makers.get(id(mark.invars[0])) if mark.primitive.name == MARK else None
        if maker is None:
            continue
        chain, end, stack, _ = _position_of(mark)
        # With the flag `jax_remat3`, jax before 0.12 gives every mark the position of the `jax.checkpoint` call. The
        # marks are then told apart by their number of elements.
        if (chain, end) != _position_of(maker)[:2] and _keeps_all_bits(mark):
            elements = math.prod(mark.outvars[0].aval.shape)
            yield NamedPlace(chain, end, f"{stack}/{MARK}", checkpoint_name_of(maker), elements)


def _keeps_all_bits(equation: Any) -> bool:
    from jax import numpy as jnp

    # An equation that rounds to the precision of its operand only marks a saved value.
    known = jnp.finfo(equation.outvars[0].aval.dtype)
    given = equation.params
    return (known.nexp, known.nmant) == (given["exponent_bits"], given["mantissa_bits"])


def _value_makers(equation: Any, makers: Mapping[int, Any]) -> list[Any]:
    """Returns the equations that compute the value named by a `checkpoint_name` equation, nearest first: equations that
    only rearrange its elements, then the equation that computes them.

    `makers`: id of a variable -> the equation that computes it.
    """
    out: list[Any] = []
    variable = equation.invars[0]
    for _ in range(8):
        equation = makers.get(id(variable))
        if equation is None or checkpoint_name_of(equation):
            break
        out.append(equation)
        variable = _rearranged_operand(equation, variable)
        if variable is None:
            break
    return out


def _rearranged_operand(equation: Any, result: Any) -> Any:
    """Returns the operand whose elements an equation only rearranges; None if the equation computes new elements."""
    if equation.primitive.name in _FORMS:
        return equation.invars[0]
    body = getattr(equation.params.get("call_jaxpr"), "jaxpr", None)  # a function with a custom gradient
    if body is None:
        return None
    inside = {id(variable): inner for inner in body.eqns for variable in inner.outvars}
    variable = body.outvars[equation.outvars.index(result)]
    while (inner := inside.get(id(variable))) is not None and inner.primitive.name in _FORMS:
        variable = inner.invars[0]
    return equation.invars[body.invars.index(variable)] if variable in body.invars else None


def _position_of(equation: Any) -> _Position:
    from jax._src import source_info_util

    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    chain = tuple((frame.file_name, frame.start_line, frame.start_column) for frame in frames)
    end = (frames[0].end_line, frames[0].end_column) if frames else (0, 0)
    return chain, end, str(equation.source_info.name_stack), equation.primitive.name


@functools.lru_cache(maxsize=4096)
def _name_in_call_at(file: str, line: int, column: int) -> str:
    for node in _calls_and_aliases(file)[0].get(line, ()):
        if node.col_offset != column:
            continue
        strings = []
        for argument in (*node.args[1:], *(keyword.value for keyword in node.keywords)):
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and _NAME.match(argument.value):
                strings.append(argument.value)
        if len(strings) == 1:
            return strings[0]
    return ""


@functools.lru_cache(maxsize=4096)
def _name_in_call_around(file: str, line: int, column: int) -> str:
    calls, aliases = _calls_and_aliases(file)
    for nodes in calls.values():
        for node in nodes:
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            if function in aliases and start <= (line, column) < end:
                return _name_in_call_at(file, node.lineno, node.col_offset)
    return ""


@functools.lru_cache(maxsize=256)
def _calls_and_aliases(file: str) -> tuple[dict[int, list[ast.Call]], frozenset[str]]:
    calls: dict[int, list[ast.Call]] = {}
    aliases = {"checkpoint_name"}
    try:
        path = Path(file)
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MAX_SOURCE:
            return calls, frozenset()
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                calls.setdefault(node.lineno, []).append(node)
            elif isinstance(node, ast.ImportFrom):
                aliases |= {item.asname for item in node.names if item.name == "checkpoint_name" and item.asname}
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}, frozenset()
    return calls, frozenset(aliases)
