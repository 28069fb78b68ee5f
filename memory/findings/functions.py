"""Functions of the user's own code, by the source frames of what they computed: their names, and where they are called.

Frames of JAX, of the libraries above it and of this package are passed over: what a person can wrap or change is their
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bytescope.memory.hlo.module import Frame

# Packages whose functions nobody edits, by their folder.
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/(?:jax|jaxlib|flax|equinox|haiku|optax|chex|einops|jaxtyping|"
                        r"beartype|numpy|diffrax|lineax|optimistix|numpyro|distrax|mctx|penzai)/"
                        r"|/lib/python3\.\d+/(?!site-packages|dist-packages)|^<")
_OURS = f"{Path(__file__).parents[1]}/"
# Folder of a library -> how it wraps a module or a function in jax.checkpoint.
_WRAPPERS = {"/flax/linen/": "nn.remat", "/flax/nnx/": "nnx.remat", "/equinox/": "eqx.filter_checkpoint",
             "/haiku/": "hk.remat"}


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
    """A function with the place that calls it, "model.py:31"; "" where that is not known."""

    function: Function
    caller: str


def calls(frames: Iterable[Frame]) -> list[Call]:
    """The user's functions around an operation, the inmost first, each where it is called."""
    own = [frame for frame in frames if frame.function and not _foreign(frame.file)]
    found: dict[Function, Call] = {}
    for at, frame in enumerate(own):
        function = Function(frame.function, frame.file)
        if function not in found:
            after = own[at + 1] if at + 1 < len(own) else None
            found[function] = Call(function, place(after) if after else "")
    return list(found.values())


def place(frame: Frame) -> str:
    """Where a frame is: "model.py:31"."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"


def wrapper(frames: Iterable[Frame]) -> str:
    """How the library that a program is written with wraps a part of it in jax.checkpoint; "" for plain JAX."""
    files = {frame.file for frame in frames}
    return next((name for folder, name in _WRAPPERS.items() if any(folder in file for file in files)), "")


def _foreign(file: str) -> bool:
    return file.startswith(_OURS) or bool(_LIBRARIES.search(file))
