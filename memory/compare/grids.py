"""Parses the grids of a command line (--grid=KEY=V1,V2) and expands them to combinations. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from bytescope.memory.errors import ReportError

# Grid keys that are not keys of a program: the config file, and the target to compile for.
CONFIG, TARGET = "config", "target"
# Columns of a what-if instead of keys: `Row.change` and `Row.effect`.
CHANGE, EFFECT = "change", "effect"


def split_values(text: str) -> list[str]:
    """Splits a list of values at the commas outside parentheses: `a,(b,c),d` -> ["a", "(b,c)", "d"]. A tuple stays one
    value."""
    out, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            out.append("")
        else:
            out[-1] += letter
    return [value.strip() for value in out]


def parse_grid(text: str) -> tuple[str, list[str]]:
    """Parses `KEY=V1,V2`, a config key with the values to compare. Returns (key, values). Raises ReportError if the
    text does not have this form."""
    key, equals, values = text.partition("=")
    key = key.strip().removeprefix("--").removeprefix("config.")
    split = split_values(values)
    if not key or not equals or not all(split):
        raise ReportError(
            f"--grid={text} is not a key with values: write --grid=KEY=V1,V2, such as --grid=data.seq_len=1024,2048"
        )
    return key, split


def expand(grids: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Returns every combination of the values of a grid, one dict from key to value per combination.

    grids: (key, values) pairs. If a key occurs in several pairs, the values of all these pairs are used.
    """
    values: dict[str, list[str]] = {}
    for key, texts in grids:
        values[key] = list(dict.fromkeys([*values.get(key, ()), *texts]))
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def as_text(value: Any) -> str:
    """Returns a config value as the text that the command line accepts for it."""
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(str, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
