"""Factories, which make a program from config keys and their values. A comparison varies these values.

Any function that `bytescope report` accepts is a factory. Its parameters with defaults are the keys of a
grid.

    def program(width=256, layers=4, remat="full"):
        ...
        return step, (state, batch), {"donate_argnums": 0, "tokens": 8192}

    program.how = ("remat",)  # optional: keys that change how the step runs; rows that differ only in these compete

A trainer with its own configs writes a subclass of `ProgramFactory`, which knows more about its keys and programs
(`train.plan.config_factory.ConfigFactory`), and passes an instance of the subclass as the function.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.prepared_program import PreparedProgram, prepare
from bytescope.memory.compare.what_if import Variant, flag_variants
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import JAX_FRACTION, MemoryFraction
from bytescope.memory.devices.targets import Target
from bytescope.memory.devices.xla_flags import LEVELS, is_flag, parse_value
from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.memory.program import user_program
from bytescope.memory.program.user_program import OVERRIDES, TARGET, UserFunction, UserProgram, parameters_of

# The texts of booleans on the command line.
_BOOLEANS = {"true": True, "false": False}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


class ProgramFactory:
    """Makes a program from config keys and their values. The commands that compare programs use a factory for each kind
    of program, such as the trainer's configs or a user's function.

    Attributes:
        reference: `module:function` or `file.py:function`, by which a worker process finds the factory.
        row: the class of the comparison rows for this factory's programs.
        memory_fraction: the fraction of a GPU's memory that jax reserves as its pool for these programs, if neither the
            target nor the user's environment sets it.
    """

    reference: str
    row: type[Row] = Row
    memory_fraction: MemoryFraction = JAX_FRACTION

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns the program for a target, ready to be compiled.

        overrides: config key -> value. Raises ValueError with an `exit_code` attribute for a user error.
        """
        raise NotImplementedError

    def spell_out(self, chosen: Mapping[str, str], fixed: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the config keys and values of one combination of a grid. By default they are returned unchanged; a
        subclass may replace a short key by several config keys.

        chosen: the values of the grid. fixed: keys and values that are the same in all combinations.
        """
        return chosen

    def split_options(
        self, overrides: Mapping[str, Any], target: Target
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Splits overrides into what is traced and how it is compiled. Programs with equal first parts are traced once.

        Returns (the overrides that make the program, the compiler options to compile it with: flag of XLA -> value).
        None instead of options means the program's own options.
        """
        return overrides, None

    def what_if(self, overrides: Mapping[str, Any], platform: str) -> Sequence[Variant]:
        """Returns the variants that `compare --what-if` compiles, the program as given among them. Longer compiles come
        first.

        overrides: the keys that all variants share. platform: the target's platform, such as "cuda".
        """
        return flag_variants(platform)

    def resolve(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns every config key with its value: the defaults, updated with `overrides`. Does not start jax.

        Raises ValueError with an `exit_code` attribute for an unknown key or a value of the wrong type.
        """
        raise NotImplementedError

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Raises ValueError with an `exit_code` attribute if a program with these overrides cannot run on any
        target."""

    def sources(self) -> Sequence[Path]:
        """Returns the source files whose code decides what a program computes. If one of them changes, cached results
        are no longer used."""
        raise NotImplementedError

    def choosing_sources(self, resolved: Mapping[str, Any]) -> Sequence[Path]:
        """Returns the source files of the code that chooses settings which the config leaves open, such as the tensors
        saved by `remat.policy=auto`. If one of them changes, cached results are no longer used. Returns () if the
        config determines the whole program.

        resolved: every config key with its value, as returned by `resolve`.
        """
        return ()

    def report_json(self, overrides: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """Compiles a program and returns {"report": its memory report as JSON}. A worker process calls this method for
        `bytescope check`.

        overrides: config key -> value. Raises the errors of `__call__`.
        """
        traced, options = self.split_options(overrides, target)
        program = self(traced, target)
        compilation, judged = program.compile() if options is None else program.compile(options)
        return {"report": program.report_of(compilation, judged).to_json()}

    def formula(self, resolved: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the memory and FLOPs that published formulas give for a program, as JSON values. Returns None if no
        formula applies.

        resolved: every config key with its value, as returned by `resolve`. answer: the worker's answer, with the sizes
        that the compiler gave for the program.
        """
        return None


class FunctionFactory(ProgramFactory):
    """Makes programs by calling a user's function. The function's parameters are the config keys."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self.reference = function.name
        self._parameters = parameters_of(function.function)
        how = getattr(function.function, "how", ())
        if not isinstance(how, tuple | list) or not all(isinstance(key, str) for key in how):
            raise ReportError(
                f"{function.name}.how={how!r:.60} is not a tuple of names: give a tuple of parameter names"
            )
        # Flags of XLA change how the step runs, too.
        self.row = type("FunctionRow", (Row,), {"how": (*how, "xla_", *LEVELS)})

    def __call__(self, overrides: Mapping[str, Any], target: Target | str) -> PreparedProgram:
        """Calls the user's function with `overrides` (config key -> value) as keyword arguments. Returns the program
        that it returns, ready to be compiled for the target."""
        return prepare(self.call(overrides, target), target)

    def call(self, overrides: Mapping[str, Any], target: Target | str) -> UserProgram:
        """Calls the user's function as `__call__` does, and returns what the function returns. The name of a target is
        parsed, which may start jax, only if the function takes the target."""
        resolved = self.resolve(overrides)
        if isinstance(target, str) and TARGET in self._parameters:
            target = targets.parse(target)
        return self._function.make({key: resolved[key] for key in overrides}, target)

    def split_options(
        self, overrides: Mapping[str, Any], target: Target
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Splits overrides into parameters of the function and options of XLA, whose keys are flags of XLA."""
        resolved = self.resolve(overrides)
        options = {key: resolved[key] for key in overrides if self._is_flag(key)}
        return {key: value for key, value in overrides.items() if key not in options}, options or None

    def _is_flag(self, key: str) -> bool:
        return is_flag(key) and key not in self._parameters

    def resolve(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns every config key with its value: the defaults of the function's parameters, updated with the
        overrides. An override that is text is converted to the type of the parameter's default. A key that is a flag of
        XLA and no parameter is a compiler option.

        Raises ReportError for an unknown key or a value of the wrong type.
        """
        keys = {
            parameter.name: None if parameter.default is parameter.empty else parameter.default
            for parameter in self._parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in (TARGET, OVERRIDES)
        }
        takes_any = OVERRIDES in self._parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )
        flags = {key: value for key, value in overrides.items() if self._is_flag(key)}
        overrides = {key: value for key, value in overrides.items() if key not in flags}
        for key in overrides:
            if key not in keys and not takes_any:
                raise ReportError(f"{self.reference} has no parameter {key}: {_remedy(key, list(keys))}")
        options = {key: parse_value(key, value) if isinstance(value, str) else value for key, value in flags.items()}
        return keys | {key: _parse_value(key, value, keys.get(key)) for key, value in overrides.items()} | options

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Raises ReportError if a key is not a parameter of the user's function, or if a value has the wrong type."""
        self.resolve(overrides)

    def sources(self) -> Sequence[Path]:
        """Returns the source files of the function's package. If the function is in a single file, returns this file
        and the imported files in the same folder."""
        return _list_sources(inspect.getmodule(self._function.function) or self._function.module)


def load_factory(reference: str) -> ProgramFactory:
    """Imports what `reference` names, written as `module:function` or `file.py:function`: a user's function or a
    ProgramFactory. Returns the factory, or a factory that calls the function.

    Raises ReportError, a one-line message, if the module or function does not exist or fails.
    """
    function = user_program.load_function(reference)
    return function.function if isinstance(function.function, ProgramFactory) else FunctionFactory(function)


def _remedy(key: str, known: Sequence[str]) -> str:
    if not known:
        return "it has no parameter with a default"
    return " ".join(filter(None, (did_you_mean(key, known), f"it takes {', '.join(known)}")))


def _parse_value(key: str, text: Any, default: Any) -> Any:
    if not isinstance(text, str) or isinstance(default, str):
        return text
    value: Any = text
    if text.lower() in _BOOLEANS:
        value = _BOOLEANS[text.lower()]
    else:
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
    if type(default) is float and type(value) is int:
        value = float(value)
    if type(default) in _KINDS and type(value) is not type(default):
        raise ReportError(f"{key}={text} has the wrong type: give {_KINDS[type(default)]}")
    return value


def _list_sources(module: ModuleType) -> list[Path]:
    file = getattr(module, "__file__", None)
    if file is None:  # a notebook or an extension module
        return []
    top = sys.modules.get(module.__name__.partition(".")[0])
    if top is not None and "." in module.__name__ and hasattr(top, "__path__"):
        return sorted(path for folder in top.__path__ for path in Path(folder).rglob("*.py"))
    # A module in no package: its file and the imported files in the same folder.
    folder = os.path.dirname(os.path.abspath(file))
    others = [getattr(other, "__file__", None) for other in list(sys.modules.values())]
    beside = {other for other in others if other and other.endswith(".py") and _is_within(other, folder)}
    return sorted(map(Path, {os.path.abspath(file), *map(os.path.abspath, beside)}))


def _is_within(file: str, folder: str) -> bool:
    return os.path.abspath(file).startswith(folder + os.sep) and "site-packages" not in file  # not installed libraries
