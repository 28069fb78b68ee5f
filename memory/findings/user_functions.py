"""Functions of the user's own code, by the source frames of what they computed: their names, and where they are called.

Frames of JAX and of the frameworks above it are passed over: what a person can wrap or change is their model.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from typing import NamedTuple

from bytescope.memory.hlo.module import Frame
from bytescope.memory.hlo.sources import OUTSIDE, OWN, kind_of

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Folder of a library -> how it wraps a module or a function in jax.checkpoint.
_WRAPPERS = {
    "/flax/linen/": "nn.remat",
    "/flax/nnx/": "nnx.remat",
    "/equinox/": "eqx.filter_checkpoint",
    "/haiku/": "hk.remat",
}


class Function(NamedTuple):
    """A function of the user's code: its name as Python has it, and its file."""

    name: str
    file: str

    @property
    def title(self) -> str:
        """As people say it: "Block" for a module's `__call__`, "attention" for a function inside another."""
        return self.name.rsplit("<locals>.", 1)[-1].removesuffix(".__call__")

    @property
    def nameless(self) -> bool:
        """Whether it is a lambda or a comprehension, which are not called by name."""
        return self.name.endswith(">")


class Call(NamedTuple):
    """A function in the chain of calls around an operation.

    Fields:
        function: which. caller: the place that calls it, "model.py:31"; "" where that is not known.
        around: file and line of every frame outside of it. repeated: whether one of them is inside a loop, so that the
        function may run more than once from there.
    """

    function: Function
    caller: str
    around: tuple[tuple[str, int], ...] = ()
    repeated: bool = False


def calls(frames: Iterable[Frame], traced: str = "") -> list[Call]:
    """The user's functions around an operation, the inmost first.

    `traced`: the name of the function that was given to jax.jit; what is outside of it ran once, to trace it.
    """
    chain = _within(tuple(frames), traced)
    found: dict[Function, Call] = {}
    for at, frame in enumerate(chain):
        function = Function(frame.function, frame.file)
        if not frame.function or kind_of(frame.file) != OWN or function in found:
            continue
        outer = chain[at + 1 :]
        caller = next((place(each) for each in outer if kind_of(each.file) == OWN), "")
        found[function] = Call(
            function, caller, tuple((each.file, each.line) for each in outer), any(in_loop(each) for each in outer)
        )
    return list(found.values())


def _within(frames: tuple[Frame, ...], traced: str) -> tuple[Frame, ...]:
    """The frames inside a traced function, itself among them; without its name, those inside this package's."""
    names = [frame.function.rsplit(".", 1)[-1] for frame in frames]
    if traced in names:
        return frames[: len(names) - names[::-1].index(traced)]
    return frames[: next((at for at, frame in enumerate(frames) if kind_of(frame.file) == OUTSIDE), len(frames))]


def in_loop(frame: Frame) -> bool:
    """Whether the line of a frame is inside a loop or a comprehension of its own function, by its source; False where
    that cannot be read."""
    return any(start <= frame.line <= end for start, end in _loops(frame.file).get(_enclosing(frame), ()))


def _enclosing(frame: Frame) -> int:
    """The first line of the inmost function around a frame's line, 0 for none."""
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
    """First line of a function, 0 for none -> (first, last line) of the loops of its own."""
    found: dict[int, list[tuple[int, int]]] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, _LOOPS):
            owner = _enclosing(Frame(file, node.lineno))
            found.setdefault(owner, []).append((node.lineno, node.end_lineno or node.lineno))
    return found


def place(frame: Frame) -> str:
    """Where a frame is: "model.py:31"."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"


def wrapper(frames: Iterable[Frame]) -> str:
    """How the library that a program is written with wraps a part of it in jax.checkpoint; "" for plain JAX."""
    files = {frame.file for frame in frames}
    return next((name for folder, name in _WRAPPERS.items() if any(folder in file for file in files)), "")
