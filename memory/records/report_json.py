"""Converts records to plain JSON values and back, with a check of each field against its annotation, and annotations of
records to JSON Schema (draft 2020-12)."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, Union

from bytescope.memory.errors import type_phrase

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

# Maximum count of bytes, FLOPs or elements; a larger integer is damaged.
LARGEST = 2**80


def is_count(value: Any) -> bool:
    """Returns whether a JSON value is an integer that is small enough to be a count of bytes, FLOPs or elements.
    Negative integers are allowed.
    """
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number."""
    return is_count(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# Annotation of a record's field -> function that checks a JSON value.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": is_count,
    "bool": lambda value: isinstance(value, bool),
    "float": is_number,
    "int | None": lambda value: value is None or is_count(value),
    "float | None": lambda value: value is None or is_number(value),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(is_count, value)),
    "tuple[str, ...]": lambda value: isinstance(value, tuple) and all(map(_is_text, value)),
}


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


def plain(value: Any) -> Any:
    """Converts a value to plain JSON values: records (dataclasses) become dicts, sequences become lists, and unknown
    types become their `str`.
    """
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def finite(value: Any) -> Any:
    """Returns the JSON values with NaN and infinite numbers replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_item(record: type[Record], value: Any) -> Record:
    """Returns a record of class `record` whose fields are the values of a JSON object. Unknown keys are ignored.

    Raises:
      TypeError: the value is not a JSON object, or a field does not have the type of its annotation. The message names
          the field and the value.
    """
    if not isinstance(value, dict):
        raise TypeError(f"the value of a {record.__name__} must be a JSON object, but it is {type_phrase(value)}")
    known = {f.name: f for f in dataclasses.fields(record)}
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items() if name in known}
    for name, v in fields.items():
        if not _KINDS[str(known[name].type)](v):
            raise TypeError(f"{record.__name__}.{name} is {v!r:.40}")
    return record(**fields)


# ---- JSON Schema ----------------------------------------------------------------------------------------------

_PLAIN: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}


def schema_of(hint: Any) -> dict[str, Any]:
    """Returns the JSON Schema of the values that have the type annotation `hint`. Supported annotations: str, bool,
    int, float, None, Any, unions, lists, tuples, mappings from str, dataclasses and TypedDicts. A dataclass or a
    TypedDict becomes an object with exactly its keys; `COMPUTED_KEYS` of a dataclass (key -> annotation) are keys that
    its JSON has in addition to its fields. `Annotated[Keys, Record]` becomes an object with the keys of
    the TypedDict `Keys` and of the dataclass `Record`. Raises TypeError for an unsupported annotation.
    """
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.NotRequired:
        return schema_of(args[0])
    if origin is typing.Annotated:
        own, *others = args
        keys: dict[str, Any] = {}
        for record in (*others, own):
            keys |= _keys_of(record)
        return object_schema(keys)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in args]}
    if origin is tuple and args[-1] is not Ellipsis:
        return {
            "type": "array",
            "prefixItems": [schema_of(each) for each in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": schema_of(args[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if typing.is_typeddict(hint) or dataclasses.is_dataclass(hint):
        return object_schema(_keys_of(hint))
    raise TypeError(f"{hint!r} has no JSON Schema: use a record, a list or a mapping")


def _keys_of(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record, include_extras=True)
    if dataclasses.is_dataclass(record):
        own = {field.name: hints[field.name] for field in dataclasses.fields(record)}
        return own | getattr(record, "COMPUTED_KEYS", {})
    return hints


def object_schema(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schema of an object with these keys: key -> annotation, `NotRequired[...]` for an optional
    key."""
    return {
        "type": "object",
        "properties": {name: schema_of(hint) for name, hint in hints.items()},
        "required": [name for name, hint in hints.items() if typing.get_origin(hint) is not typing.NotRequired],
        "additionalProperties": False,
    }
