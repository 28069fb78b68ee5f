"""Finds functions of the user's own code in the stack frames of an operation: their names, and their call sites.

Frames of JAX and of the frameworks above it are skipped, because users can wrap or change only their own model.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from typing import NamedTuple

from bytescope.memory.hlo.module import Frame
from bytescope.memory.hlo.sources import OUTSIDE, OWN, kind_of, short_place

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Folder of a library -> its wrapper of jax.checkpoint.
_WRAPPERS = {
    "/flax/linen/": "nn.remat",
    "/flax/nnx/": "nnx.remat",
    "/equinox/": "eqx.filter_checkpoint",
    "/haiku/": "hk.remat",
}


class Function(NamedTuple):
    """A function of the user's code: its qualified name and its file."""

    name: str
    file: str

    @property
    def title(self) -> str:
        """The short name: "Block" for a module's `__call__`, "attention" for a function inside another."""
        return self.name.rsplit("<locals>.", 1)[-1].removesuffix(".__call__")

    @property
    def nameless(self) -> bool:
        """Whether it is a lambda or a comprehension."""
        return self.name.endswith(">")


class Call(NamedTuple):
    """A function in the chain of calls around an operation.

    Fields:
        function: the called function; caller: its call site, "model.py:31", "" if unknown.
        around: (file, line) of every outer frame.
        repeated: whether an outer frame is inside a loop, so that the function may run several times.
    """

    function: Function
    caller: str
    around: tuple[tuple[str, int], ...] = ()
    repeated: bool = False


def calls(frames: Iterable[Frame], traced: str = "") -> list[Call]:
    """The user's functions around an operation, innermost first.

    `traced`: the name of the function that was given to jax.jit; frames outside it ran once, to trace it.
    """
    chain = _within(tuple(frames), traced)
    found: dict[Function, Call] = {}
    for at, frame in enumerate(chain):
        function = Function(frame.function, frame.file)
        if not frame.function or kind_of(frame.file) != OWN or function in found:
            continue
        outer = chain[at + 1 :]
        caller = next((place(each) for each in outer if kind_of(each.file) == OWN), "")
        around = tuple((each.file, each.line) for each in outer)
        found[function] = Call(function, caller, around, repeated=any(map(in_loop, outer)))
    return list(found.values())


def _within(frames: tuple[Frame, ...], traced: str) -> tuple[Frame, ...]:
    """Stack frames inside the traced function, inclusive; if it has no name, frames inside this package."""
    names = [frame.function.rsplit(".", 1)[-1] for frame in frames]
    if traced in names:
        return frames[: len(names) - names[::-1].index(traced)]
    for at, frame in enumerate(frames):
        if kind_of(frame.file) == OUTSIDE:
            return frames[:at]
    return frames


def in_loop(frame: Frame) -> bool:
    """Whether the line of a frame is inside a loop or a comprehension of its own function; False if its source cannot
    be read."""
    return any(start <= frame.line <= end for start, end in _loops(frame.file).get(_enclosing(frame), ()))


def _enclosing(frame: Frame) -> int:
    """The first line of the innermost function around a frame's line, 0 for none."""
    return max((start for start, end in _bodies(frame.file) if start <= frame.line <= end), default=0)


@functools.lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=256)
def _bodies(file: str) -> tuple[tuple[int, int], ...]:
    """(first, last line) of every function of a file."""
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@functools.lru_cache(maxsize=256)
def _loops(file: str) -> dict[int, list[tuple[int, int]]]:
    """First line of a function, 0 for none -> (first, last line) of each of its own loops."""
    found: dict[int, list[tuple[int, int]]] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, _LOOPS):
            owner = _enclosing(Frame(file, node.lineno))
            found.setdefault(owner, []).append((node.lineno, node.end_lineno or node.lineno))
    return found


def place(frame: Frame) -> str:
    """The source position of a frame: "model.py:31"."""
    return short_place(f"{frame.file}:{frame.line}")


def wrapper(frames: Iterable[Frame]) -> str:
    """The wrapper of jax.checkpoint in the library that a program uses; "" for plain JAX."""
    files = {frame.file for frame in frames}
    for folder, name in _WRAPPERS.items():
        if any(folder in file for file in files):
            return name
    return ""
