"""Loads a step by the name of a function that returns it: `module:function` or `path/file.py:function`.

The function's parameters with defaults are the keys that KEY=VALUE and --grid=KEY=V,V set; a function with a parameter
`overrides` gets all keys and values in this parameter, as one dict. A parameter `target` gets the target. The function
returns one of

    step, (state, batch)                                       # arrays or ShapeDtypeStructs
    step, (state, batch), {"donate_argnums": 0}                # options of memory.analyze; "kwargs": keyword arguments
                                                               # of the step; "tokens": per update, over all devices
    jax.jit(step).trace(state, batch)                          # or .lower(...): a jax stage
    config                                                     # an object or a dict with such a function as `program`
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bytescope.memory.errors import ReportError, did_you_mean, message_of
from bytescope.memory.processes import ForkedError, original_only

# Options of a program in addition to the options of jax.jit.
OWN_OPTIONS = ("kwargs", "target", "config", "facts", "roles", "names", "tokens", "compiler_options")
# Names of the parameters that receive the target, and all keys of the grid in one dict.
TARGET, OVERRIDES = "target", "overrides"
# The attribute or key of a config that contains the function.
FUNCTION = "program"
_RETURN = "return (step, (state, batch)), a jax.stages.Traced or Lowered"
_MAX_NAMES = 6
_IMPORTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class UserProgram:
    """The program that a user's function returned.

    Fields:
        name: the name of the program in reports.
        program: a step that is called with `args`, or a jax stage (such as `jax.stages.Traced`) without arguments.
        args: the arguments of the step, () for a jax stage.
        options: keyword arguments for `memory.analyze`.
    """

    name: str
    program: Any
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """A user's function that returns a program.

    Fields:
        name: the function as the user wrote it.
        function: the function itself.
        module: the module that contains it.
    """

    name: str
    function: Any
    module: ModuleType

    def make(self, overrides: Mapping[str, Any] = {}, target: Any = None) -> UserProgram:
        """Calls the function and returns its program. `overrides`: parameter of the function -> value; a function with
        a parameter `overrides` gets all of them in it. `target`: the devices to compile for, passed to the function if
        it has a parameter `target`. Raises ReportError, a one-line message, if the function fails or does not return a
        program.
        """
        with _hidden_argv(self.name), one_line_errors(self.name):  # reading an attribute may run the user's code too
            return _read_result(self.name, _call_user_function(self.name, self.function, overrides, target))


def load_function(name: str) -> UserFunction:
    """Imports a user's function, given its name `module:function` or `file.py:function`. Modules in the current folder
    can be imported too.

    Raises ReportError, a one-line message, if the module or function does not exist or fails.
    """
    where, function = split(name)
    with _hidden_argv(name), one_line_errors(name):
        module = _import_user_module(where)
        return UserFunction(name, _find_function(module, function), module)


@contextlib.contextmanager
def _hidden_argv(name: str) -> Iterator[None]:
    arguments, sys.argv = sys.argv, [split(name)[0]]
    try:
        yield
    finally:
        sys.argv = arguments


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Context manager that turns every exception of user code, including SystemExit, into a ReportError. Raises
    ForkedError in a copy of the process that the code made.

    what: the beginning of the error's message. KeyboardInterrupt (Ctrl-C) is not caught.
    """
    try:
        with original_only(what):
            yield
    except (ReportError, ForkedError):
        raise
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise
        raise ReportError(f"{what}: {describe_user_error(error)}") from error


def split(name: str) -> tuple[str, str]:
    """Splits the name of a function into (module or file, function). Raises ReportError if it is not
    `module:function` or `file.py:function`.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function or not all(map(str.isidentifier, function.split("."))):
        raise ReportError(f"{name} does not name a function: write module:function or path/to/file.py:function")
    return where, function


def describe_user_error(error: BaseException) -> str:
    """Describes an error in user code in one line: its class, the first line of its message, and the last source line
    that is not in a library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    lines = message_of(error).strip().splitlines() or [""]
    kind = type(error).__name__
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{kind}{': ' if lines[0] else ''}{lines[0]}{place}"


def _is_user_file(path: str) -> bool:
    libraries = str(Path(__file__).parent), os.path.dirname(os.__file__), "<frozen"
    return not (path.startswith(libraries) or "site-packages" in path)


# ---- the module and the function -------------------------------------------------------------------------------------


def _import_user_module(where: str) -> ModuleType:
    if where.endswith(".py") or "/" in where or os.sep in where:
        return _import_file(Path(os.path.expanduser(where)))
    if not all(map(str.isidentifier, where.split("."))):
        raise ReportError(
            f"{where!r} is neither a module nor a file; write module:function or path/to/file.py:function"
        )
    _prepend_to_sys_path(Path.cwd())
    return _import_module(where, where)


def _import_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        folder = path.parent if os.path.isdir(path.parent) else Path(".")
        near = did_you_mean(path.name, [file.name for file in folder.glob("*.py")])
        raise ReportError(f"the file {path} does not exist: {near or 'give path/to/file.py:function'}")
    path = path.resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():  # the folder is a package
        folder, parts = folder.parent, [folder.name, *parts]
    _prepend_to_sys_path(folder)
    if len(parts) > 1:
        return _import_module(".".join(parts[:-1] if path.stem == "__init__" else parts), str(path))
    name = parts[0] if parts[0].isidentifier() and parts[0] not in sys.modules else f"bytescope_program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ReportError(f"{path} is not a Python file: give path/to/file.py:function")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as failed:
        failed.callback(sys.modules.pop, name, None)
        with one_line_errors(f"{path.name} cannot be imported"):
            spec.loader.exec_module(module)
        failed.pop_all()
    return module


def _prepend_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))


def _import_module(module: str, name: str) -> ModuleType:
    with _IMPORTING:  # two threads that clear Python's caches at the same time get a KeyError
        importlib.invalidate_caches()
    with one_line_errors(f"{name} cannot be imported"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module == missing or module.startswith(f"{missing}."):
                raise ReportError(
                    f"there is no module {missing} in {Path.cwd()} or among the installed packages: run it from its "
                    "folder, or write path/to/file.py:function"
                ) from error
            raise ReportError(
                f"{name} cannot be imported: {describe_user_error(error)}: install {missing} in this environment"
            ) from error


def _find_function(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ReportError(f"{module.__name__} has no {name}: {_hint_similar_function(value, part, module)}")
        value = getattr(value, part)
    return value


def _hint_similar_function(holder: Any, name: str, module: ModuleType) -> str:
    own = [
        key
        for key, value in vars(holder).items()
        if callable(value)
        and not key.startswith("_")
        and (holder is not module or getattr(value, "__module__", module.__name__) == module.__name__)
    ]
    if not own:
        return "it has no function; define one that returns (step, (state, batch))"
    more = f" and {len(own) - _MAX_NAMES} more" if len(own) > _MAX_NAMES else ""
    return did_you_mean(name, own) or f"it has {', '.join(own[:_MAX_NAMES])}{more}"


# ---- the result of the function --------------------------------------------------------------------------------------


def _call_user_function(name: str, function: Any, overrides: Mapping[str, Any] = {}, target: Any = None) -> Any:
    """Calls a user's function with the overrides (parameter -> value), and with the target (the devices to compile for)
    if it has a parameter `target`. Returns its result. An object that is not a function is returned unchanged.
    """
    from bytescope.memory.program.compilation import is_stage

    if not callable(function) or is_stage(function):
        if overrides:
            raise ReportError(
                f"{name} is not a function, so it has no parameters {', '.join(overrides)}: leave them out"
            )
        return function
    parameters = parameters_of(function)
    given: dict[str, Any] = {}
    if TARGET in parameters and target is not None:
        given[TARGET] = target
    if OVERRIDES in parameters:
        given[OVERRIDES] = dict(overrides)
    else:
        given |= overrides
    with one_line_errors(f"{name}() fails"):
        return function(**given)


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name. Returns {} if Python cannot determine them, as for a function
    written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _read_result(name: str, result: Any) -> UserProgram:
    """Converts the result of a user's function to a program. If the result is a config with a function `program`, calls
    this function and converts its result. `name`: the name of the program in messages."""
    from bytescope.memory.program.compilation import is_stage, takes_arguments

    if is_stage(result):
        return UserProgram(name, result)
    match result:
        case [step, (tuple() | list()) as args] if takes_arguments(step):
            return UserProgram(name, step, tuple(args))
        case [step, (tuple() | list()) as args, Mapping() as options] if takes_arguments(step):
            return UserProgram(name, step, tuple(args), _checked_options(name, dict(options)))
        case tuple() | list():
            raise ReportError(
                f"{name} returns ({', '.join(map(_describe_value, result))}), which is not a program: return (step, "
                "arguments) or (step, arguments, {option: value}), as in (step, (state, batch))"
            )
    inner = result.get(FUNCTION) if isinstance(result, Mapping) else None
    inner = getattr(result, FUNCTION, inner)
    if inner is not None:
        name = f"{name}().{FUNCTION}"
        return _read_result(name, _call_user_function(name, inner))
    if takes_arguments(result):
        raise ReportError(f"{name} returns the step without its arguments: return (step, (state, batch))")
    raise ReportError(
        f"{name} returns {_describe_value(result)}, which is not a program: {_RETURN}, or a config that has such a "
        f"function as `{FUNCTION}`"
    )


def _checked_options(name: str, options: dict[Any, Any]) -> dict[str, Any]:
    from bytescope.memory.program.tracing import OPTIONS

    for key in options:
        if key not in (*OPTIONS, *OWN_OPTIONS):
            near = did_you_mean(str(key), (*OPTIONS, *OWN_OPTIONS))
            raise ReportError(
                f"{name} returns the unknown option {key!r}: {near or 'remove it.'} Keyword arguments of the step "
                "go into {'kwargs': {...}}"
            )
    if not isinstance(options.get("kwargs", {}), Mapping):
        raise ReportError(
            f"{name} returns the option 'kwargs' as {_describe_value(options['kwargs'])}, which is not a dict: return "
            "a dict of keyword arguments"
        )
    return options


def _describe_value(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return getattr(value, "__name__", kind) if inspect.isroutine(value) else kind
