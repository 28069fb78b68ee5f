"""Combinations of keys as a command line writes them: grids, values, policies; and keys as its flags again. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from bytescope.memory.config_keys import REMAT_OFFLOAD, REMAT_POLICY, REMAT_SAVE
from bytescope.memory.errors import ReportError

# Keys of a grid that are not config keys: which config file, and what to compile for.
CONFIG, TARGET = "config", "target"
POLICY, SAVE, OFFLOAD = REMAT_POLICY, REMAT_SAVE, REMAT_OFFLOAD


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


def policy_keys(text: str) -> dict[str, str]:
    """A policy of --remat as config keys: `custom(a,b)+offload(c)` names what it saves and what it offloads.

    Anything without parentheses is the name of a policy; `custom` alone takes its names from the config.
    Raises ReportError for parentheses anywhere else.
    """
    if "(" not in text and ")" not in text:
        return {POLICY: text}
    names = r"\(([\w\s,]*)\)"
    match = re.fullmatch(rf"custom(?:{names})?(?:\s*\+\s*offload{names})?", text.strip())
    groups = match.groups(default="") if match else ("", "")
    save, offload = ([name.strip() for name in group.split(",") if name.strip()] for group in groups)
    if not save and not offload:
        raise ReportError(
            f"{text}: write custom(NAME,NAME), custom(NAME)+offload(NAME) or custom+offload(NAME); "
            "bytescope names lists the names"
        )
    return {POLICY: "custom", SAVE: f"({','.join(save)})", OFFLOAD: f"({','.join(offload)})"}


def given_flags(overrides: Iterable[tuple[str, str]]) -> str:
    """The keys of a command line as its flags again, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in overrides)


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(str, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
