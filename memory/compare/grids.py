"""Combinations of keys as a command line writes them: grids and their values. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from bytescope.memory.errors import ReportError

# Keys of a grid that are no keys of a program: which config file, and what to compile for.
CONFIG, TARGET = "config", "target"


def split_values(text: str) -> list[str]:
    """`a,(b,c),d` -> ["a", "(b,c)", "d"]: a tuple is one value."""
    out, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            out.append("")
        else:
            out[-1] += letter
    return [value.strip() for value in out]


def parse_grid(text: str) -> tuple[str, list[str]]:
    """`KEY=V1,V2` -> (key, values). Raises ReportError for anything else."""
    key, equals, values = text.partition("=")
    key = key.strip().removeprefix("--").removeprefix("config.")
    split = split_values(values)
    if not key or not equals or not all(split):
        raise ReportError(f"--grid={text}: write --grid=KEY=V1,V2, such as --grid=data.seq_len=1024,2048")
    return key, split


def expand(grids: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Every combination of the values of (key, values); a key that comes twice has the values of both."""
    values: dict[str, list[str]] = {}
    for key, texts in grids:
        values[key] = list(dict.fromkeys([*values.get(key, ()), *texts]))
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(str, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
