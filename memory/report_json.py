"""Records to JSON and back: plain values out, fields checked against their annotations in. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Annotation of a record's field -> the types that its JSON value may have.
_KINDS = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int),
          "int | None": (int, type(None)), "tuple[int, ...]": (tuple,), "tuple[str, ...]": (tuple,)}


def plain(value: Any) -> Any:
    """A value as JSON has it: records become dicts, sequences lists; what JSON does not know becomes its `str`."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def read_item(record: type, value: Any) -> Any:
    """The record of a JSON object; keys that it does not know are left out.

    Raises:
      TypeError: not an object, or a field of another type than its annotation; the message has field and value.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{record.__name__} is {type(value).__name__}, not an object")
    known = {f.name: f for f in dataclasses.fields(record)}
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items() if name in known}
    for name, v in fields.items():
        allowed = _KINDS[str(known[name].type)]
        if not isinstance(v, allowed) or (isinstance(v, bool) and bool not in allowed):
            raise TypeError(f"{record.__name__}.{name} is {v!r}")
    return record(**fields)


def one_line(error: BaseException) -> str:
    """The message of an error in one line of at most 120 characters."""
    return " ".join(str(error).split())[:120]
