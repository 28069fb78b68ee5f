"""Compiles a step once: returns the executable that runs and a report of the same executable."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from bytescope.memory.analysis import report_of
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo.jax_types import CompiledStage
from bytescope.memory.program.compilation import compiled_for, takes_arguments, with_arrays, with_donation_off
from bytescope.memory.program.roles import checked_roles
from bytescope.memory.program.tracing import check_options, refuse_lost_updates
from bytescope.memory.report.report_object import Report

# The values of static arguments: (number, value) of positional ones, then (name, value) of keyword arguments.
StaticValues = tuple[tuple[tuple[int, Any], ...], tuple[tuple[str, Any], ...]]


@dataclasses.dataclass(frozen=True)
class Statics:
    """The static arguments of a step, by index and by name.

    numbers: indices of positional arguments. names: names of keyword arguments.
    """

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], StaticValues]:
        """Separates the static arguments of a call from the others. Returns (other positional arguments, other keyword
        arguments, static arguments). The static arguments are two tuples of pairs: (index, value) of positional ones,
        (name, value) of keyword ones.
        """
        fixed = {number % len(args) for number in self.numbers if -len(args) <= number < len(args)}
        values = (
            tuple((number, args[number]) for number in sorted(fixed)),
            tuple((name, kwargs[name]) for name in sorted(self.names) if name in kwargs),
        )
        return (
            [arg for number, arg in enumerate(args) if number not in fixed],
            {name: arg for name, arg in kwargs.items() if name not in self.names},
            values,
        )


class Executable:
    """A compiled step. It is called with the same arguments as the step, including the static ones.

    The values of static arguments must be those that the step was compiled for. Arguments that the step donates are
    donated. An executable for devices that this process does not have cannot be called. All other attributes are read
    from `compiled`, a `jax.stages.Compiled`.
    """

    def __init__(
        self,
        compiled: CompiledStage,
        run: Callable[..., Any],
        statics: Statics = Statics(),
        values: StaticValues = ((), ()),
    ) -> None:
        self.compiled, self._run, self._statics, self._values = compiled, run, statics, values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled step with these arguments, including the static ones.

        Raises:
            TypeError: shapes, dtypes or static values differ from the ones that the step was compiled for.
            ReportError: this process does not have the devices that the step was compiled for.
        """
        if self._statics:
            inputs, named_inputs, values = self._statics.split(args, kwargs)
            if values != self._values:
                raise TypeError(
                    f"the step was compiled for the static arguments {_named(self._values)}, but is called with "
                    f"{_named(values)}: compile the step again for these values"
                )
            return self._run(*inputs, **named_inputs)
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "compiled":  # not set yet: the object is being created or copied
            raise AttributeError(name)
        return getattr(self.compiled, name)

    def __repr__(self) -> str:
        return f"Executable({self.compiled!r})"


def compile(
    step: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    **options: Any,
) -> tuple[Executable, Report]:
    """Compiles a step once. Returns (executable, report). The executable is called like the step.

        executable, report = memory.compile(step, state, batch, donate_argnums=0)

    The arguments are the same as for `memory.analyze`. If the target's devices are not present, the report is complete
    but calling the executable raises ReportError.

    Args:
        step: a function, plain or jitted.
        args, kwargs: arguments of the step: arrays, ShapeDtypeStructs, or pytrees of either.
        target: the devices to compile for, such as "h200:8"; None for the devices of this machine.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's description of the step (`memory.ModelFacts`): shapes, mesh, precision and remat.
        roles: (regular expression, role) pairs that give arguments their role, such as "params", by pytree path.
        names: the checkpoint names of the program.
        options: options of `jax.jit`, such as donate_argnums.

    Raises:
        ReportError: `step` is not a step, or it cannot be compiled for the target.
        TypeError: an option is not known to `jax.jit`.
    """
    check_options(options, "compile", ("target", "kwargs", "config", "facts", "roles", "names"))
    roles = checked_roles(roles)
    if not takes_arguments(step):
        raise ReportError(
            f"{type_phrase(step)} is not a step: give memory.compile(step, *arguments) a function, plain or jitted, "
            "or use memory.analyze for other programs"
        )
    compilation, judged, executable = compile_jitted(as_jitted(step, options), args, kwargs or {}, target)
    report = report_of(compilation, target=judged, config=config, facts=facts, roles=roles, names=names, seconds=True)
    return executable, Report.of(report)


def as_jitted(step: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Returns the step jitted with `options`. A step that is already jitted is returned unchanged.

    Raises ReportError if options are given for a step that is already jitted.
    """
    import jax

    given = {name: value for name, value in options.items() if value is not None}
    if not hasattr(step, "lower"):
        return jax.jit(refuse_lost_updates(step), **given)
    if given:
        raise ReportError(
            f"{', '.join(given)} cannot be set for a step that is jitted already: give the options to jax.jit, or give "
            "the plain function"
        )
    return step


def compile_jitted(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target | str | None = None,
) -> tuple[Compilation, Target | None, Executable]:
    """Compiles a jitted step for its arguments. Returns (the compiled program with the compiler's buffer information,
    the target with the memory limit that the report uses, the executable to call).

    If this process does not have the target's devices, calling the executable raises ReportError.
    """
    compilation, judged = None, None
    if target is not None and is_wrapper(jitted) and (args or kwargs):  # retargeted as in `memory.analyze`
        compilation, judged = compiled_for(jitted, args, kwargs, target=target)
    wrapper = None
    if compilation is None or compilation.local:
        stage, jaxpr, wrapper = _stage_step(jitted, args, kwargs)
        read, judged = compiled_for(stage, target=target)
        read = with_donation_off(with_arrays(read, args, kwargs), jitted, {}, stage)
        compilation = read if read.jaxpr is not None else dataclasses.replace(read, jaxpr=jaxpr)
    executable = compilation.executable
    if not compilation.local:
        run = _make_refusing_run(judged.name if judged else "other devices")
        return compilation, judged, Executable(executable, run)
    if wrapper is not None:
        return compilation, judged, Executable(executable, _with_library_arguments(wrapper, executable))
    statics = statics_of(jitted)
    return compilation, judged, Executable(executable, executable, statics, statics.split(args, kwargs)[2])


def statics_of(jitted: Any) -> Statics:
    """Returns the static arguments of a step that was jitted by `jax.jit`."""
    options = getattr(jitted, "_jit_info", None)
    numbers, names = getattr(options, "static_argnums", None), getattr(options, "static_argnames", None)
    return Statics(tuple(numbers or ()), tuple(names or ()))


def is_wrapper(jitted: Any) -> bool:
    """Returns whether a step was jitted by another library, such as `equinox.filter_jit` or `flax.nnx.jit`, instead of
    `jax.jit`."""
    return not hasattr(jitted, "_jit_info")


def _stage_step(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prepares a jitted step for compilation. Returns (step to compile, jaxpr, lowered step of the library).

    If the step was jitted by `jax.jit`, the step to compile is traced and contains its jaxpr, and the other two values
    are None. If another library jitted the step, such as equinox, the step to compile is lowered, and the library's
    lowered step handles the arguments of later calls.
    """
    if not is_wrapper(jitted):
        return jitted.trace(*args, **kwargs), None, None
    traced = jitted.trace(*args, **kwargs) if hasattr(jitted, "trace") else None
    lowered = traced.lower() if traced is not None else jitted.lower(*args, **kwargs)
    inside = getattr(traced, "traced", traced)
    return lowered, getattr(inside, "jaxpr", None), lowered if hasattr(lowered, "lowered") else None


def _with_library_arguments(lowered: Any, executable: CompiledStage) -> Callable[..., Any]:
    # A copy of the library's lowered step returns `executable` instead of compiling again.
    own = copy.copy(lowered)
    object.__setattr__(own, "lowered", SimpleNamespace(compile=lambda *args, **kwargs: executable))
    return own.compile()


def _make_refusing_run(target: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise ReportError(
            f"the step was compiled for {target}, which is not present: it cannot run, but its report is valid; call "
            "memory.compile(step, *arguments) without a target to compile for this machine"
        )

    return run


def _named(values: StaticValues) -> str:
    numbers, names = values
    named = [f"args[{number}]={value!r:.40}" for number, value in numbers]
    return ", ".join(named + [f"{name}={value!r:.40}" for name, value in names])
