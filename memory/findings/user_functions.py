"""Finds functions of the user's own code in the stack frames of an operation: their names and their call sites.

Frames of JAX and of frameworks on top of it are skipped, because users can change or wrap only their own code.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from typing import Any, NamedTuple

from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.sources import OUTSIDE, OWN, kind_of, short_place, source_line

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Folder of a library -> its wrapper of jax.checkpoint.
_WRAPPERS = {
    "/flax/linen/": "nn.remat",
    "/flax/nnx/": "nnx.remat",
    "/equinox/": "eqx.filter_checkpoint",
    "/haiku/": "hk.remat",
}


class Function(NamedTuple):
    """A function in the user's code.

    name: its qualified name. file: the path of its source file.
    """

    name: str
    file: str

    @property
    def title(self) -> str:
        """The function's name in messages, such as "Block" for the `__call__` of a module Block, or "attention" for a
        nested function."""
        return self.name.rsplit("<locals>.", 1)[-1].removesuffix(".__call__")

    @property
    def nameless(self) -> bool:
        """True if the function is a lambda or a comprehension, which has no name to show."""
        return self.name.endswith(">")


class Call(NamedTuple):
    """A call of a user's function, found in the Python stack of an operation of the program.

    Fields:
        function: the called function.
        caller: the call site, such as "model.py:31", "" if unknown.
        around: (file, line) of every stack frame outside the call.
        repeated: whether an outer frame is inside a Python loop, so that the function may run several times.
    """

    function: Function
    caller: str
    around: tuple[tuple[str, int], ...] = ()
    repeated: bool = False


def calls(frames: Iterable[Frame], traced: str = "") -> list[Call]:
    """Returns the calls of the user's functions in the Python stack of an operation, innermost first.

    traced: name of the function that was passed to jax.jit. Frames outside this function are left out, because they ran
    only once.
    """
    chain = _frames_inside(tuple(frames), traced)
    by_function: dict[Function, Call] = {}
    for at, frame in enumerate(chain):
        function = Function(frame.function, frame.file)
        if not frame.function or kind_of(frame.file) != OWN or function in by_function:
            continue
        outer = chain[at + 1 :]
        caller = next((place(each) for each in outer if kind_of(each.file) == OWN), "")
        around = tuple((each.file, each.line) for each in outer)
        by_function[function] = Call(function, caller, around, repeated=any(map(in_loop, outer)))
    return list(by_function.values())


def _frames_inside(frames: tuple[Frame, ...], traced: str) -> tuple[Frame, ...]:
    """Returns the stack frames from the innermost up to the function `traced`, innermost first. The callers of this
    function are left out. If no frame has this name, the result ends before the first frame of bytescope, which called
    the compiler."""
    names = [frame.function.rsplit(".", 1)[-1] for frame in frames]
    if traced in names:
        return frames[: len(names) - names[::-1].index(traced)]
    for at, frame in enumerate(frames):
        if kind_of(frame.file) == OUTSIDE:
            return frames[:at]
    return frames


def in_loop(frame: Frame) -> bool:
    """Returns whether a stack frame's line is inside a loop or comprehension of its own function. Returns False if the
    source cannot be read."""
    functions, loops = _spans(frame.file)
    begin = max((first for first, last in functions if first <= frame.line <= last), default=0)
    return any(begin <= first <= frame.line <= last for first, last in loops)


@functools.lru_cache(maxsize=256)
def _spans(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the (first line, last line) of each function, and of each loop, in a source file."""
    functions, loops = [], []
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError, RecursionError):
        return [], []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, _LOOPS):
            loops.append((node.lineno, node.end_lineno or node.lineno))
    return functions, loops


def place(frame: Frame) -> str:
    """Returns the source location of a stack frame, such as "model.py:31"."""
    return short_place(f"{frame.file}:{frame.line}")


def wrapper(frames: Iterable[Frame]) -> str:
    """Returns the library wrapper of jax.checkpoint that suits the library in these stack frames, such as "nn.remat"
    for Flax. Returns "" for plain JAX."""
    files = {frame.file for frame in frames}
    for folder, name in _WRAPPERS.items():
        if any(folder in file for file in files):
            return name
    return ""


def frames_of(equation: Any) -> tuple[Frame, ...]:
    """Returns the stack frames in which an equation was made, innermost first. Frames of jax itself are left out."""
    return _frames_of_traceback(equation.source_info.traceback)


@functools.lru_cache(maxsize=16384)
def _frames_of_traceback(traceback: Any) -> tuple[Frame, ...]:
    from jax._src import source_info_util

    frames = source_info_util.user_frames(traceback)
    return tuple(
        Frame(each.file_name, each.start_line, each.start_column, each.end_line, each.end_column, each.function_name)
        for each in frames
    )


def line_of(equation: Any) -> str:
    """Returns "file.py:line" of the user's code that made an equation; "" if unknown."""
    return _line_of_frames(frames_of(equation))


@functools.lru_cache(maxsize=16384)
def _line_of_frames(frames: tuple[Frame, ...]) -> str:
    return source_line(Metadata("", frames))
