"""Result records: dataclasses whose typed fields are the JSON of a command, its JSON Schema and its reference page.

`plain` converts a record to JSON values, `read` converts them back and checks each field against its annotation, and
`schema` returns the JSON Schema. The JSON of a record has its fields, and the properties that `COMPUTED_KEYS` of its
class lists.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, TypeVar, Union

from bytescope.memory.errors import type_phrase

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

# Maximum count of bytes, FLOPs or elements; a larger integer is damaged.
LARGEST = 2**80


class Absent(enum.Enum):
    """The value of a field whose key is left out of the JSON."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


class Internal(enum.Enum):
    """Marks a field that is not in the JSON: `Annotated[str, INTERNAL]`."""

    INTERNAL = "internal"


INTERNAL = Internal.INTERNAL


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition on a field's value, in addition to its type: `Annotated[int, Check(lambda value: value >= 0)]`."""

    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class JsonForm:
    """The JSON of a field, if it does not follow from the field's type: `Annotated[Steps, JsonForm(...)]`.

    Attributes:
        hint: type annotation of the JSON values.
        write: converts the field's value to JSON values.
        read: converts JSON values to the field's value. Raises TypeError or ValueError for other values.
    """

    hint: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


Count = Annotated[int, Check(lambda value: value >= 0)]


def is_count(value: Any) -> bool:
    """Returns whether a JSON value is an integer that is small enough to be a count of bytes, FLOPs or elements.
    Negative integers are allowed.
    """
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number."""
    return is_count(value) or (isinstance(value, float) and math.isfinite(value))


# Type of a field -> (function that checks a JSON value, JSON Schema).
_SCALARS: Mapping[Any, tuple[Callable[[Any], bool], Mapping[str, str]]] = {
    str: (lambda value: isinstance(value, str), {"type": "string"}),
    bool: (lambda value: isinstance(value, bool), {"type": "boolean"}),
    int: (is_count, {"type": "integer"}),
    float: (is_number, {"type": "number"}),
    type(None): (lambda value: value is None, {"type": "null"}),
    Any: (lambda value: True, {}),
    object: (lambda value: True, {}),
}
# End of a field's name -> unit of its value. The first match counts.
_UNITS: Mapping[str, str] = {
    "bytes_per_s": "bytes/s",
    "tokens_per_s": "tokens/s",
    "(bf16|peak)_flops": "FLOP/s",
    "flops": "FLOPs",
    "bytes": "bytes",
    "seconds(_low|_high)?": "seconds",
    "fraction|mfu": "fraction (0 to 1)",
    "percent": "percent",
}


# ---- JSON values


def parse(text: str | bytes) -> Any:
    """Parses JSON text.

    Raises ValueError if the text is not JSON, contains NaN or Infinity (which Python's parser accepts), or is nested
    too deeply.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a valid JSON number: use only finite numbers")
    return value


def finite(value: Any) -> Any:
    """Returns the JSON values with NaN and infinite numbers replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """Converts a value to plain JSON values: records become dicts, sequences become lists, and unknown types become
    their `str`. Fields with the value `ABSENT` are left out.
    """
    if _is_record(value):
        kind: Any = type(value)
        values = {name: (write, getattr(value, name)) for name, write in _writers(kind).items()}
        return {name: write(own) for name, (write, own) in values.items() if own is not ABSENT}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@functools.cache
def _writers(record: Any) -> dict[str, Callable[[Any], Any]]:
    """Returns JSON key -> function that converts its value to JSON values."""
    forms = {name: _json_form(hint) for name, hint in json_keys(record).items()}
    return {name: form.write if form else plain for name, form in forms.items()}


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value)


def _json_form(hint: Any) -> JsonForm | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, JsonForm)), None)


@functools.cache
def json_keys(record: Any) -> dict[str, Any]:
    """Returns the keys of a record's JSON with their type annotations: the fields of the dataclass `record` that
    are not `INTERNAL`, then its `COMPUTED_KEYS`."""
    hints = typing.get_type_hints(record, include_extras=True)
    names = [field.name for field in dataclasses.fields(record)]
    keys = {name: hints[name] for name in names if INTERNAL not in getattr(hints[name], "__metadata__", ())}
    for name in getattr(record, "COMPUTED_KEYS", ()):
        keys[name] = typing.get_type_hints(getattr(record, name).fget, include_extras=True)["return"]
    return keys


# ---- from JSON values to records


def read(record: type[Record], value: Any, where: str = "") -> Record:
    """Returns a record of class `record` whose fields are the values of a JSON object. Unknown keys are ignored.

    where: the field that has this value, for messages; "" if it is not part of another record.

    Raises TypeError if the value is not a JSON object, or if a field does not have the type of its annotation. The
    message names the field and the value.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{where or f'a {record.__name__}'} must be a JSON object, but it is {type_phrase(value)}")
    readers = _readers(record)
    return record(**{name: readers[name](inner) for name, inner in value.items() if name in readers})


@functools.cache
def _readers(record: Any) -> dict[str, Callable[[Any], Any]]:
    keys, names = json_keys(record), [field.name for field in dataclasses.fields(record)]
    return {name: _reader(keys[name], f"{record.__name__}.{name}") for name in names if name in keys}


def _reader(hint: Any, where: str) -> Callable[[Any], Any]:
    """Returns the function that converts a JSON value to a value with the annotation `hint`. The function raises
    TypeError for a value of another type. where: the name of the field, for messages."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if form := _json_form(hint):
        return form.read
    if _is_record(hint):
        return functools.partial(read, hint, where=where)
    if origin in (Union, types.UnionType):
        (inner,) = (_reader(each, where) for each in args if each not in (type(None), Absent))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and args[-1] is not Ellipsis:
        parts = [_reader(each, where) for each in args]

        def read_parts(value: Any) -> tuple[Any, ...]:
            _checked(isinstance(value, (list, tuple)) and len(value) == len(parts), value, where)
            return tuple(part(each) for part, each in zip(parts, value))

        return read_parts
    if origin in (tuple, Sequence):
        inner = _reader(args[0], where)
        return lambda value: tuple(map(inner, _checked(isinstance(value, (list, tuple)), value, where)))
    if origin is Mapping:
        key, inner = int if args[0] is int else _reader(args[0], where), _reader(args[1], where)

        def read_mapping(value: Any) -> dict[Any, Any]:
            _checked(isinstance(value, dict), value, where)
            return {key(name): inner(each) for name, each in value.items()}

        return read_mapping
    if origin is Annotated:
        inner, checks = _reader(args[0], where), [each.holds for each in args[1:] if isinstance(each, Check)]
        return lambda value: _checked(all(holds(inner(value)) for holds in checks), inner(value), where)
    is_valid = _SCALARS[str if origin is Literal else hint][0]
    return lambda value: _checked(is_valid(value), value, where)


def _checked(is_valid: bool, value: Any, where: str) -> Any:
    if not is_valid:
        raise TypeError(f"{where} is {value!r:.40}")
    return value


# ---- JSON Schema


def schema(hint: Any) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of the JSON of values that have the type annotation `hint`.

    Supported annotations: str, bool, int, float, None, Any, Literal, unions, lists, tuples, mappings from str, and
    dataclasses. A dataclass becomes an object with exactly the keys of `json_keys`, each with its description from the
    docstring and its unit. Raises TypeError for an unsupported annotation.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if form := _json_form(hint):
        return schema(form.hint)
    if hint in _SCALARS or origin is Literal:
        return dict(_SCALARS[str if origin is Literal else hint][1])
    if origin is Annotated:
        return schema(args[0])
    if origin in (Union, types.UnionType):
        kinds = [schema(each) for each in args if each is not Absent]
        return {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
    if origin is tuple and args[-1] is not Ellipsis:
        items = [schema(each) for each in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": schema(args[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema(args[1])}
    if not _is_record(hint):
        raise TypeError(f"{hint!r} has no JSON Schema: use a record, a list or a mapping")
    keys, texts = json_keys(hint), descriptions(hint)
    properties = {}
    for name, each in keys.items():
        about = {"description": texts.get(name), "unit": unit_of_field(name)}
        properties[name] = schema(each) | {key: text for key, text in about.items() if text}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, each in keys.items() if Absent not in typing.get_args(each)],
        "additionalProperties": False,
    }


def descriptions(record: Any) -> dict[str, str]:
    """Returns key of a record's JSON -> its description. Descriptions of fields are those in the section `Fields:` or
    `Attributes:` of the docstrings of the class and its bases; a computed key has the docstring of its property."""
    texts: dict[str, str] = {}
    for each in reversed(record.__mro__):
        section = re.search(r"^(Fields|Attributes)\b.*:\n((  .*\n?|\n)+)", inspect.cleandoc(each.__doc__ or ""), re.M)
        if section:
            for _, names, text in re.findall(r"^( +)(\w+(?:, \w+)*): (.*(?:\n\1 .*)*)", section[2], re.M):
                texts |= dict.fromkeys(names.split(", "), text)
    for name in getattr(record, "COMPUTED_KEYS", ()):
        texts[name] = inspect.getdoc(getattr(record, name)) or ""
    return {name: " ".join(text.split()) for name, text in texts.items()}


def unit_of_field(name: str) -> str:
    """Returns the unit that a field's name ends with, such as "bytes"; "" if it ends with none."""
    return next((unit for end, unit in _UNITS.items() if re.search(rf"(^|_)({end})$", name)), "")
