"""Converts records to plain JSON values and back, with a check of each field against its annotation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

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
    **dict.fromkeys(("str", "RowName", "LedgerRole"), _is_text),
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
