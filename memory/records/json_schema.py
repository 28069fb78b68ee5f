"""Converts annotations of records to JSON Schema (draft 2020-12)."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union

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
