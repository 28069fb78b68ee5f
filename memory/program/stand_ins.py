"""Stand-ins for packages and data files that a training script needs and this machine does not have.

A missing package that the user's code imports becomes a module of `StandIn` objects. Every attribute, call, item and
element of a stand-in is a stand-in again, which remembers the line that made it. A missing token file read by
`np.memmap` or `np.fromfile` becomes an array of zeros. A stand-in that is used as an array needs a shape: the user
gives it for the line that made the stand-in (`--value`), otherwise the script stops with `MissingPiece`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import glob
import importlib.abc
import importlib.machinery
import linecache
import operator
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from bytescope.memory.errors import ReportError

# Packages that compute the step or read its configuration: a stand-in cannot replace them.
NEEDED = frozenset(
    (
        "flax",
        "optax",
        "equinox",
        "haiku",
        "chex",
        "einops",
        "jaxtyping",
        "beartype",
        "typeguard",
        "jmp",
        "distrax",
        "diffrax",
        "lineax",
        "optimistix",
        "jraph",
        "numpyro",
        "blackjax",
        "penzai",
        "levanter",
        "haliax",
        "tunix",
        "keras",
        "paxml",
        "praxis",
        "t5x",
        "fiddle",
        "gin",
        "tree",
        "ml_collections",
        "absl",
        "tyro",
        "hydra",
        "omegaconf",
        "click",
        "fire",
        "typer",
        "draccus",
        "simple_parsing",
        "pydantic",
        "attr",
        "attrs",
        "yaml",
        "toml",
    )
)
# Packages that send or write metrics: they have stand-ins even where they are installed.
TRACKERS = ("wandb", "mlflow", "neptune", "comet_ml", "clearml", "tensorboardX", "aim", "trackio", "swanlab")
# The length of a placeholder of unknown length, and the number of elements of a missing token file.
LENGTH, FILE_ELEMENTS = 1_000_000, 2**24
# Number of iterations of a loop over a placeholder. `next` can be called without end.
_ELEMENTS = 4
_ITEM = re.compile(r"\s*(?:(\w+)\s*:)?\s*(\w+)\s*\[([\d,\s]*)\]\s*(?:,|$)")
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)})


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of the user's code.

    Fields:
        file: path of the file, relative to the working folder if the file is inside this folder.
        line: number of the line, starting at 1.
    """

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line, without indentation."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class MissingPiece(BaseException):
    """Raised if the training step needs something that is missing: a package or the shape of an array. It is no
    subclass of Exception, so that an `except Exception` in the script does not catch it.

    pieces: (line of the script, problem with its remedy) for each missing piece.
    """

    def __init__(self, pieces: Sequence[tuple[SourceLine | None, str]]):
        super().__init__("; ".join(text for _, text in pieces))
        self.pieces = tuple(pieces)


def user_line() -> SourceLine | None:
    """Returns the innermost line of the user's code that is being executed; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return relative_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def relative_line(file: str, line: int) -> SourceLine:
    """Returns the `SourceLine` (relative path and line) for the path of a file and a line number."""
    path = os.path.abspath(file)
    below = path.startswith(os.getcwd() + os.sep)
    return SourceLine(os.path.relpath(path) if below else path, line)


def is_user_file(path: str) -> bool:
    """Returns whether a file, named as in a code object, is the user's: not a file of an installed package, of Python
    itself or of this package."""
    if path.startswith(("<", _OWN)) or "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_LIBRARIES)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def parse_value(text: str) -> Any:
    """Parses the value that the user gives for a line of the script: a whole number, "int32[8,128]" for an array,
    "int32[8],int32[8]" for a tuple of arrays, or "x:int32[8],y:int32[8]" for a dict. Returns an int, or
    ShapeDtypeStructs for arrays. Raises ReportError if the text has another form."""
    import jax

    if text.strip().isdigit():
        return int(text)
    items, at = [], 0
    while at < len(text):
        match = _ITEM.match(text, at)
        try:
            if match is None:
                raise TypeError
            dtype = jax.numpy.dtype(match[2])
        except TypeError:
            raise ReportError(
                f"{text} is not a value: write a whole number or dtype[dimensions], as in int32[8,128]; several with "
                "commas between them; for a dict as in image:float32[8,28,28],label:int32[8]"
            ) from None
        dims = tuple(int(dim) for dim in match[3].split(",") if dim.strip())
        items.append((match[1], jax.ShapeDtypeStruct(dims, dtype)))
        at = match.end()
    named = [name for name, _ in items if name]
    if not items or (named and len(named) != len(items)):
        raise ReportError(f"{text} is not a value: name all items, as in x:int32[8],y:int32[8], or none")
    if named:
        return dict(items)
    return items[0][1] if len(items) == 1 else tuple(spec for _, spec in items)


class GivenValues:
    """The values and shapes that the user gave for lines of the script whose data is missing (--value).

    given: `file.py:LINE` or `file.py:text of the line` -> the value as text (`parse_value`).
    """

    def __init__(self, given: Mapping[str, str]):
        self._specs: list[tuple[str, str, Any, str]] = []
        for where, text in given.items():
            file, colon, line = where.partition(":")
            if not colon or not line:
                raise ReportError(f"--value={where}={text} names no line: write file.py:LINE=dtype[dimensions]")
            self._specs.append((file, line.strip(), parse_value(text), text))
        self.used: dict[SourceLine, str] = {}

    def find(self, place: SourceLine | None) -> Any:
        """Returns the value or the shapes that the user gave by --value for the line of the script at `place`; None
        if the user gave none."""
        if place is None:
            return None
        for file, line, specs, text in self._specs:
            if f"{os.sep}{place.file}".endswith(f"{os.sep}{file}") and line in (str(place.line), place.source):
                self.used[place] = text
                return specs
        return None


# ---- the stand-in ----------------------------------------------------------------------------------------------------

_ARRAY_ATTRIBUTES = frozenset(name for name in dir(np.ndarray) if not name.startswith("_"))


class StandIn:
    """A placeholder for an object of a missing package, or for a value that such an object would return.

    Fields:
        _name: the expression that made the placeholder, such as "tfds.load()".
        _place: the line of the script that made the placeholder.
        _run: what is known about the script (`ScriptState`).
        _specs: the int or the ShapeDtypeStructs that the user gave for this line, or for the line of the placeholder
            from which this one was made; None if the user gave none.
    """

    def __init__(self, name: str, run: ScriptState, specs: Any = None):
        self._name, self._run, self._place = name, run, user_line()
        self._specs = run.values.find(self._place)
        if self._specs is None:
            self._specs = specs

    def _next(self, name: str) -> StandIn:
        return StandIn(f"{self._name}{name}", self._run, self._specs)

    def _assume(self, what: str) -> None:
        self._run.assume(f"{self._name} {what}")

    def _array(self) -> Any:
        import jax

        if not isinstance(self._specs, jax.ShapeDtypeStruct):
            raise MissingPiece([missing_shape(self, self._name)])
        return np.zeros(self._specs.shape, self._specs.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self._specs is not None and name in _ARRAY_ATTRIBUTES and hasattr(self._specs, "shape"):
            return getattr(self._array(), name)
        if name in ("shape", "dtype", "ndim", "size"):
            raise MissingPiece([missing_shape(self, self._name)])
        return self._next(f".{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (isinstance(args[0], type) or hasattr(args[0], "__code__")):
            return args[0]  # used as a decorator
        if self._run.in_traced_code():
            package = self._name.split(".")[0]
            raise MissingPiece(
                [(user_line(), f"{self._name}() is called inside a traced function: install the package {package}")]
            )
        return self._next("()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._specs, tuple):
            return iter([self._component(number) for number in range(len(self._specs))])
        return self._elements()

    def _elements(self) -> Iterator[Any]:
        for _ in range(_ELEMENTS):
            yield StandIn(f"next({self._name})", self._run, self._specs)

    def __next__(self) -> Any:
        return self._next(" element")

    def _component(self, key: Any) -> StandIn:
        component = StandIn(f"{self._name}[{key!r}]", self._run)
        component._specs = self._specs[key]
        return component

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._specs, dict) and key in self._specs:
            return self._component(key)
        if isinstance(self._specs, tuple) and isinstance(key, int) and key < len(self._specs):
            return self._component(key)
        if hasattr(self._specs, "shape") and not isinstance(key, str):
            return self._array()[key]
        return self._next(f"[{key!r}]" if isinstance(key, (int, str)) else "[...]")

    def keys(self) -> Any:
        """Returns the names in a batch that is a dict. If the names are unknown, returns a placeholder for them."""
        return self._specs.keys() if isinstance(self._specs, dict) else self._next(".keys()")

    def items(self) -> Any:
        """Returns the items of a batch that is a dict, as (name, placeholder) pairs. If the names in the batch are
        unknown, returns a placeholder for the items."""
        if isinstance(self._specs, dict):
            return [(key, self._component(key)) for key in self._specs]
        return self._next(".items()")

    def __len__(self) -> int:
        if self._specs is not None and not isinstance(self._specs, int):
            return len(self._specs) if isinstance(self._specs, (dict, tuple)) else len(self._array())
        self._assume(f"has the length {LENGTH:,}")
        return LENGTH

    def __index__(self) -> int:
        if isinstance(self._specs, int):
            return self._specs
        self._assume(f"is {LENGTH:,}")
        return LENGTH

    def __float__(self) -> float:
        if isinstance(self._specs, int):
            return float(self._specs)
        self._assume("is 1.0")
        return 1.0

    def __bool__(self) -> bool:
        return True

    def __fspath__(self) -> str:
        return "stand-in"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self._array()
        return array if dtype is None else array.astype(dtype)

    def __jax_array__(self) -> Any:
        return self._run.as_jax(self._array())

    def __setitem__(self, key: Any, value: Any) -> None:
        return None


def _comparison(symbol: str, compare: Callable[[Any, Any], bool]) -> Callable[[StandIn, Any], bool]:
    def method(self: StandIn, other: Any) -> bool:
        if isinstance(self._specs, int):
            return compare(self._specs, other)
        if symbol in ("==", "!=") and not isinstance(other, (int, float, str)):
            return compare(id(self), id(other))
        self._assume(f"{symbol} {other!r:.40}")
        return True

    return method


def _arithmetic(compute: Callable[[Any, Any], Any], reflected: bool) -> Callable[[StandIn, Any], Any]:
    def method(self: StandIn, other: Any) -> Any:
        if isinstance(self._specs, int):
            return compute(other, self._specs) if reflected else compute(self._specs, other)
        return self._next(" combined")

    return method


for _symbol, _name in (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")):
    setattr(StandIn, f"__{_name}__", _comparison(_symbol, getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "matmul"):
    _compute = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(StandIn, f"__{_name}__", _arithmetic(_compute, False))
    setattr(StandIn, f"__r{_name}__", _arithmetic(_compute, True))


def missing_shape(value: StandIn, what: str) -> tuple[SourceLine | None, str]:
    """Returns (line of the script, problem with its remedy) for a placeholder whose shape is not known.

    what: the name of the array that needs a shape, for the message.
    """
    made = f" comes from {value._name} and" if what != value._name else ""
    place = value._place or "FILE.py:LINE"
    return value._place, f"{what}{made} has no known shape: give --value '{place}=dtype[dimensions]'"


def resolve(value: StandIn) -> Any:
    """Returns zeros in the place of a placeholder (`StandIn`): a pytree of numpy arrays with the shapes that the user
    gave, or the int that the user gave. Raises MissingPiece if the user gave neither."""
    import jax

    if value._specs is None:
        raise MissingPiece([missing_shape(value, value._name)])
    if isinstance(value._specs, int):
        return value._specs
    return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), value._specs)


# ---- packages and files ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ScriptState:
    """What is known about a running script. All placeholders (`StandIn`) of the script share this record.

    Fields:
        values: the values and shapes that the user gave for lines of the script.
        in_traced_code: function that returns whether the running code is traced by jax.
        as_jax: function that converts a numpy array to a jax array.
        assumptions: (line of the script, what was assumed) -> None. Each key occurs once, in order.
        packages: package that placeholders replace -> the line that imports it first.
    """

    values: GivenValues
    in_traced_code: Callable[[], bool]
    as_jax: Callable[[Any], Any]
    assumptions: dict[tuple[SourceLine | None, str], None] = dataclasses.field(default_factory=dict)
    packages: dict[str, SourceLine | None] = dataclasses.field(default_factory=dict)

    def assume(self, what: str) -> None:
        """Records an assumption about the line of the user's code that is being executed."""
        self.assumptions.setdefault((user_line(), what))


class _StandInModule(ModuleType):
    def __init__(self, name: str, run: ScriptState):
        super().__init__(name)
        self.__path__: list[str] = []
        self._stand_in = StandIn(name, run)

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__all__", "__version__"):
            return {"__all__": [], "__version__": "0.0.0"}.get(name)
        return getattr(self._stand_in, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stand_in(*args, **kwargs)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that imports placeholders (`StandIn`) in the place of packages. Two of these hooks are installed: one
    before Python's own hooks, for installed packages that are replaced; one after them, for missing packages.

    without: installed packages to replace; None for the hook for missing packages.
    """

    def __init__(self, run: ScriptState, without: Sequence[str] | None):
        self.run, self.without = run, without

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        root = fullname.split(".")[0]
        if root not in self.run.packages:
            place = _importing_line()
            if self.without is not None:
                # An installed library that imports a tracker gets the real tracker.
                wanted = root in self.without or (root in TRACKERS and place is not None)
            else:
                wanted = place is not None and not _is_guarded(place)
                if wanted and root in NEEDED:
                    raise MissingPiece([(place, f"the package {root} is not installed here: install it")])
            if not wanted:
                return None
            self.run.packages[root] = place or user_line()
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _StandInModule(spec.name, self.run)

    def exec_module(self, module: ModuleType) -> None:
        return None


def _importing_line() -> SourceLine | None:
    """Returns the line of the import statement that is being executed, if it is in the user's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return None
    return relative_line(frame.f_code.co_filename, frame.f_lineno)


def _is_guarded(place: SourceLine) -> bool:
    """Returns whether a line is in the body of a `try` that handles ImportError. The script can then run without the
    package that the line imports."""
    try:
        tree = ast.parse(Path(place.file).read_text())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= place.line <= (node.body[-1].end_lineno or 0):
            caught = " ".join(ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers)
            if re.search(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b", caught):
                return True
    return False


@contextlib.contextmanager
def installed(run: ScriptState, without: Sequence[str]) -> Iterator[None]:
    """Context manager in which placeholders (`StandIn`) replace missing packages, and zeros replace missing token
    files.

    without: installed packages that are replaced too.
    """
    first, last = _Finder(run, without), _Finder(run, None)
    replaced = (*TRACKERS, *without)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in replaced}
    sys.meta_path[:] = [first, *sys.meta_path, last]
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.update, hidden)
        undo.callback(_remove_modules)
        undo.callback(
            lambda: sys.meta_path.__setitem__(slice(None), [f for f in sys.meta_path if f not in (first, last)])
        )
        for owner, name, replacement in _file_functions(run):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _remove_modules() -> None:
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandInModule)]:
        del sys.modules[name]


def _file_functions(run: ScriptState) -> list[tuple[Any, str, Any]]:
    memmap, fromfile, getsize, find = np.memmap, np.fromfile, os.path.getsize, glob.glob
    missing: dict[str, None] = {}

    def is_missing(file: Any) -> bool:
        return isinstance(file, (str, os.PathLike)) and not os.path.exists(file)

    def zeros(file: Any, dtype: Any, shape: Any) -> Any:
        missing.setdefault(os.fspath(file))
        count = shape if shape is not None else FILE_ELEMENTS
        run.assume(f"reads the missing file {os.fspath(file)} as zeros, {np.dtype(dtype)}")
        return np.zeros(count, dtype)

    class Memmap(np.memmap):
        def __new__(cls, filename: Any, dtype: Any = np.uint8, mode: Any = "r+", *args: Any, **kwargs: Any) -> Any:
            shape = kwargs.get("shape", args[1] if len(args) > 1 else None)
            if is_missing(filename) and mode in ("r", "c", "r+") and user_line() is not None:
                return zeros(filename, dtype, shape)
            return memmap(filename, dtype, mode, *args, **kwargs)

    def read_file(file: Any, dtype: Any = float, count: int = -1, *args: Any, **kwargs: Any) -> Any:
        if is_missing(file):
            return zeros(file, dtype, None if count < 0 else count)
        return fromfile(file, dtype, count, *args, **kwargs)

    def size(path: Any) -> int:
        if is_missing(path) and os.fspath(path) in missing:
            return 2 * FILE_ELEMENTS
        return getsize(path)

    def find_files(pattern: Any, *args: Any, **kwargs: Any) -> list[str]:
        found = find(pattern, *args, **kwargs)
        # A pattern that ends with a file name extension of token files; one file that matches the pattern is assumed.
        if not found and isinstance(pattern, str) and pattern.endswith((".bin", ".npy")) and user_line() is not None:
            name = re.sub(r"\*+|\?", "0", pattern)
            missing.setdefault(name)
            run.assume(f"finds the missing file {name}")
            return [name]
        return found

    return [
        (np, "memmap", Memmap),
        (np, "fromfile", read_file),
        (os.path, "getsize", size),
        (glob, "glob", find_files),
    ]
