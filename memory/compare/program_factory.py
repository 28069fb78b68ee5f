"""Functions from overrides to a program: what `compare` varies, and what names a finished row in the cache.

Any function that `bytescope report --program` takes is a factory: its parameters with defaults are the keys of a grid.

    def program(width=256, layers=4, remat="full"):
        ...
        return step, (state, batch), {"donate_argnums": 0, "tokens": 8192}

    program.how = ("remat",)  # optional: keys that say how the step runs; rows that differ only in these compete

A trainer with a config of its own writes a subclass of `ProgramFactory`, which says more of its keys and its programs
(`train.plan.config_factory.ConfigFactory`), and names an object of it.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.prepared_program import PreparedProgram, prepare
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.memory.program import user_program
from bytescope.memory.program.user_program import OVERRIDES, TARGET, UserFunction, parameters_of

# What a command line writes for a boolean.
_BOOLEANS = {"true": True, "false": False}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


class ProgramFactory:
    """Makes programs from overrides, key -> value.

    Attributes:
        reference: `module:function` or `file.py:function`; a worker process finds the factory by it.
        row: the class of its rows, which knows which keys compete.
    """

    reference: str
    row: type[Row] = Row

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """The program of these overrides on a target, nothing compiled yet. Raises ValueError with an `exit_code` for a
        mistake of the user's."""
        raise NotImplementedError

    def spell_out(self, chosen: Mapping[str, str], fixed: Mapping[str, Any]) -> Mapping[str, str]:
        """The keys of one combination of a grid; a factory may write one key as several.

        fixed: the overrides of every combination.
        """
        return chosen

    def resolve(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Every key with its value under these overrides, without starting jax.

        Raises ValueError with an `exit_code` for an unknown key, or a value of the wrong type.
        """
        raise NotImplementedError

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Raises ValueError with an `exit_code` for overrides that could run on no target."""

    def sources(self) -> Sequence[Path]:
        """The files that decide what a program computes: a change there makes finished rows invalid."""
        raise NotImplementedError

    def choosing_sources(self, resolved: Mapping[str, Any]) -> Sequence[Path]:
        """The files that choose a part of a program which its keys leave open; () where the keys say all of it.

        resolved: what `resolve` returned.
        """
        return ()

    def formula(self, resolved: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The figures of published formulas for a row, as JSON values; None where there are none.

        resolved: what `resolve` returned. answer: the worker's.
        """
        return None


class FunctionFactory(ProgramFactory):
    """A function of anyone's, whose parameters are the keys."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self.reference = function.name
        self._parameters = parameters_of(function.function)
        how = getattr(function.function, "how", ())
        if not isinstance(how, tuple | list) or not all(isinstance(key, str) for key in how):
            raise ReportError(f"{function.name}.how={how!r:.60}: give a tuple of the names of keys")
        self.row = type("FunctionRow", (Row,), {"how": tuple(how)})

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """See `ProgramFactory.__call__`."""
        resolved = self.resolve(overrides)
        return prepare(self._function.make({key: resolved[key] for key in overrides}, target), target)

    def resolve(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `ProgramFactory.resolve`: the defaults of the function, and the overrides by the types of these."""
        keys = {
            parameter.name: None if parameter.default is parameter.empty else parameter.default
            for parameter in self._parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in (TARGET, OVERRIDES)
        }
        takes_any = OVERRIDES in self._parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )
        for key in overrides:
            if key not in keys and not takes_any:
                raise ReportError(f"{self.reference} takes no {key}: {_remedy(key, list(keys))}")
        return keys | {key: _typed(key, value, keys.get(key)) for key, value in overrides.items()}

    def check(self, overrides: Mapping[str, Any]) -> None:
        """See `ProgramFactory.check`."""
        self.resolve(overrides)

    def sources(self) -> Sequence[Path]:
        """See `ProgramFactory.sources`: the function's module and its package; without a package the module, and the
        modules that were imported from the same folder."""
        return _sources_of(inspect.getmodule(self._function.function) or self._function.module)


def load_factory(reference: str) -> ProgramFactory:
    """The factory of `module:function` or `file.py:function`: a ProgramFactory object, or any function.

    Raises ReportError, in one line, for a module or function that does not exist or fails.
    """
    function = user_program.load_function(reference)
    return function.function if isinstance(function.function, ProgramFactory) else FunctionFactory(function)


def _remedy(key: str, known: Sequence[str]) -> str:
    if not known:
        return "it has no parameter with a default"
    return " ".join(filter(None, (did_you_mean(key, known), f"it takes {', '.join(known)}")))


def _typed(key: str, text: Any, default: Any) -> Any:
    """A value of the command line, of the type of the parameter's default; without one as Python reads it."""
    if not isinstance(text, str) or isinstance(default, str):
        return text
    if isinstance(default, bool):
        value: Any = _BOOLEANS.get(text.lower())
    elif isinstance(default, int | float):
        value = _number(text, type(default))
    else:
        return _literal(text)
    if value is None:
        raise ReportError(f"{key}={text}: give {_KINDS[type(default)]}")
    return value


def _number(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text.replace("_", ""))
    except ValueError:
        return None


def _literal(text: str) -> Any:
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _sources_of(module: ModuleType) -> list[Path]:
    """The .py files of a module's outermost package; of a module without one the files beside it that it imported."""
    file = getattr(module, "__file__", None)
    if file is None:  # a notebook, or a module of C
        return []
    top = sys.modules.get(module.__name__.partition(".")[0])
    if top is not None and "." in module.__name__ and hasattr(top, "__path__"):
        return sorted(path for folder in top.__path__ for path in Path(folder).rglob("*.py"))
    folder = os.path.dirname(os.path.abspath(file))
    others = [getattr(other, "__file__", None) for other in list(sys.modules.values())]
    beside = {other for other in others if other and other.endswith(".py") and _is_within(other, folder)}
    return sorted(map(Path, {os.path.abspath(file), *map(os.path.abspath, beside)}))


def _is_within(file: str, folder: str) -> bool:
    """Returns whether a file is in the folder or below, and not an installed library's."""
    return os.path.abspath(file).startswith(folder + os.sep) and "site-packages" not in file
