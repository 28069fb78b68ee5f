"""Reads the stack frames of an operation: the source line to show, and the component by the functions called.

Each frame belongs to the user's own code (including model libraries that are not listed in this module), to a
framework, or is hidden. Frames of frameworks are skipped in the search for the user's line, but the framework function
that the user called may name the component.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bytescope.memory.hlo.module import Frame, Metadata
from bytescope.memory.hlo.scopes import COMPONENTS, CONTAINERS, NORMS, is_layer

# Packages of frameworks. To add a framework, add the name of its package.
_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "equinox",
    "haiku",
    "chex",
    "jaxtyping",
    "beartype",
    "diffrax",
    "lineax",
    "optimistix",
    "quax",
    "numpyro",
    "mctx",
    "distrax",
    "rlax",
    "blackjax",
    "tensorflow_probability",
    "orbax",
    "penzai",
    "tree",
    "jraph",
    "brax",
    "jmp",
    "kfac_jax",
)
_FRAMEWORK = re.compile(
    rf"/(site|dist)-packages/({'|'.join(_PACKAGES)})/|/optax/(_src|losses|contrib|transforms|tree_utils|projections)/"
    r"|/flax/(linen|nnx|core|training)/|/haiku/_src/|/equinox/(nn/|internal/|_)"
)
# Framework files that only forward calls.
_PLUMBING = re.compile(
    r"/flax/(core/|linen/(module|transforms|summary|dtypes)|nnx/(transforms/|graph|extract|compat|module|object|spmd|nn/dtypes))"
    r"|/haiku/_src/(module|transform|multi_transform|lift|stateful|base)\b|/equinox/(internal/|_(?!nn))|/jaxtyping/"
    r"|/beartype/|/chex/|/tree/|/numpyro/(handlers|primitives|util)\b|/quax/"
)
_HIDDEN = re.compile(r"/jax/(_src|experimental)/|/lib/python3\.\d+/(?!(site|dist)-packages/)|^<(frozen|string|attrs)")
_OPTIMIZER = re.compile(r"/optax/(?!.*losses)|/flax/training/train_state|/flax/nnx/training/optimizer")
# The file name that a notebook's kernel gives a cell.
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")
# Stack frames of the code that compiles a step for a report, and of its callers, do not belong to the step.
_MEMORY = str(Path(__file__).parents[1]) + "/"

# (words of a function's name, component). In frameworks, a part of a word matches too.
_FUNCTIONS = (
    (re.compile(r"attention|attn", re.I), "attention"),
    (re.compile(r"\bmlp\b|ffn|feed_?forward", re.I), "mlp"),
    (re.compile(r"embed", re.I), "embed"),
)
_LOSS = re.compile(r"cross_entropy|xent", re.I)
_PARTS = frozenset(("attention", "mlp", "moe", "embed"))
# Names of functions that run a whole step, so that they do not name a component.
_WHOLE = re.compile(r"train|step|loss|model|update|main|run|fit|eval|test", re.I)
_CALLING = frozenset(("__call__", "__init__", "call", "forward", "apply", "setup"))

OWN, FRAMEWORK, PLUMBING, HIDDEN, OUTSIDE = "own", "framework", "plumbing", "hidden", "outside"


@functools.lru_cache(maxsize=8192)
def kind_of(file: str) -> str:
    """Classifies the code of a file: OWN (the user's), FRAMEWORK (a library such as flax), PLUMBING (library code that
    only forwards calls), HIDDEN (jax or Python itself), or OUTSIDE (the code that compiles the program for a report).
    """
    if not file or _HIDDEN.search(file):
        return HIDDEN
    if file.startswith(_MEMORY) or "/bytescope/memory/" in file:
        return OUTSIDE
    if not _FRAMEWORK.search(file):
        return OWN
    return PLUMBING if _PLUMBING.search(file) else FRAMEWORK


def _program_frames(frames: Iterable[Frame]) -> Iterator[tuple[str, Frame]]:
    """Yields (kind of code, frame), innermost first, for the stack frames of the program's code that may be shown.
    Frames of jax or Python itself and top-level lines of scripts are skipped. The search ends at the code that compiles
    the program.
    """
    for frame in frames:
        kind = kind_of(frame.file)
        if kind == OUTSIDE:
            return
        if kind != HIDDEN and frame.function != "<module>":
            yield kind, frame


def source_line(metadata: Metadata) -> str:
    """Returns "file:line" of the innermost stack frame in the user's code, or else in a framework; "" if there is
    none.

    A line at the top level of a script is used only if there is no other line, because it only starts the program. The
    lines that ask for a report, such as those of a command of this package, are not lines of the program.
    """
    library: dict[str, Frame] = {}
    for kind, frame in _program_frames(metadata.frames):
        if kind == OWN:
            return f"{frame.file}:{frame.line}"
        library.setdefault(kind, frame)
    program = itertools.takewhile(lambda frame: kind_of(frame.file) != OUTSIDE, metadata.frames)
    last = next((frame for frame in program if kind_of(frame.file) == OWN), None)
    best = library.get(FRAMEWORK) or library.get(PLUMBING) or last
    return f"{best.file}:{best.line}" if best else ""


def notebook_cell(file: str) -> str:
    """Returns the name of the notebook cell to which a file name belongs, such as "In[3]"; "cell" if another process
    runs the notebook; "" if the file is not a notebook cell.
    """
    if not _CELL.search(file):
        return ""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    return named[1] if named else "cell"


def short_place(source: str) -> str:
    """Shortens a source place: "folder/model.py:31" becomes "model.py:31", and a line of a notebook cell becomes
    "In[3]:31".
    """
    file, colon, number = source.rpartition(":")
    return f"{notebook_cell(file) or file.rsplit('/', 1)[-1]}{colon}{number}"


def component_of_code(frames: Iterable[Frame]) -> str:
    """Returns the component of the model to which an operation belongs, from the functions and classes in its stack
    frames; "" if unknown.

    The component is the first of these that is found: a known part of a model, or the optimizer; the framework function
    that the user called; the user's class; the user's function with "()" after its name; the line of a lambda outside
    of any function.
    """
    visible = list(_program_frames(frames))
    called, own = "", ""
    for kind, frame in visible:
        known = _known_component(kind, frame, innermost=not own)
        if known:
            return known
        name = _class_or_function_name(frame.function)
        if kind == OWN:
            own = own or name or f"{frame.file.rpartition('/')[2]}:{frame.line}"
        elif kind == FRAMEWORK and not own and name and not is_layer(name) and name.lower() not in CONTAINERS:
            called = frame.function.rpartition(".<locals>.")[2] + "()" if name.endswith("()") else name
    return called or own


def modules_of_code(frames: Iterable[Frame]) -> tuple[str, ...]:
    """Returns the classes of the modules that were being called, outermost first, for libraries that do not use named
    scopes.
    """
    classes: list[str] = []
    for kind, frame in _program_frames(frames):
        parts = frame.function.split(".")
        if kind != PLUMBING and parts[-1] == "__call__" and len(parts) > 1 and parts[-2][:1].isupper():
            classes.append(parts[-2])
    return tuple(dict.fromkeys(reversed(classes)))


def _known_component(kind: str, frame: Frame, innermost: bool) -> str:
    """Returns the known component of the model that a stack frame's function or class names, such as "attention"; "" if
    none.

    `kind`: kind of the frame's code, such as OWN for the user's (`kind_of`). `innermost`: whether it is the innermost
    frame. A loss counts only there, because a loss in an outer frame contains the whole model.
    """
    outer, _, function = frame.function.rpartition(".")
    owner = outer.rpartition(".")[2]
    if innermost and _LOSS.search(function):
        return "loss"
    if kind != OWN and _OPTIMIZER.search(frame.file):
        return "optimizer"
    for word in (function, owner):
        part = COMPONENTS.get(word.lower(), "")
        if part in _PARTS:
            return part
        if NORMS.search(word.lower()):
            return "norm"
    if kind == OWN and _WHOLE.search(function):
        return ""
    return next((name for pattern, name in _FUNCTIONS if pattern.search(function)), "")


def _class_or_function_name(function: str) -> str:
    for part in reversed(function.split(".<locals>.")):
        owner, _, name = part.rpartition(".")
        if name.startswith("<"):
            continue
        if name in _CALLING and owner:
            return owner.rpartition(".")[2]
        return f"{name}()" if name else ""
    return ""
