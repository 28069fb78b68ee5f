"""Runs a training script up to its first training step, and returns the step traced with its arguments.

The script runs as `__main__`, without accelerators and without allocating its model (`abstract_arrays`); packages and
data that this machine does not have are replaced (`stand_ins`). jax.jit and jax.pmap return wrappers that trace each
call from Python. The first call whose program computes gradients and returns updated values of its arguments is the
training step. It is not executed: the script ends there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import linecache
import logging
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bytescope.memory import environment
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.jaxprs import bodies, distinct_jaxprs, inner_jaxpr
from bytescope.memory.program.stand_ins import (
    GivenValues,
    MissingPiece,
    ScriptState,
    SourceLine,
    StandIn,
    installed,
    is_user_file,
    missing_shape,
    relative_line,
    resolve,
    user_line,
)

# Settings of a script's environment: nothing is downloaded, and types are not checked, because jax puts descriptions of
# arrays where the script has arrays.
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "JAXTYPING_DISABLE": "1",
}
# Maximum number of calls with unknown arguments at one line. After more calls, the line is taken for the training loop.
_MAX_SKIPPED = 2000


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A training step that a script called.

    Fields:
        traced: the step traced with its arguments (`jax.stages.Traced`).
        name: the name of the jitted function.
        defined: the function's name, followed by its file and line if the file is the user's.
        called: the line of the script that calls the step.
        updates: whether the step returns updated values of its arguments. False if it only returns gradients.
        assumptions: (line of the script, what was assumed) about values that the script read before the step.
        packages: package that was replaced by placeholders (`StandIn`) -> the line that imports the package.
        values: line of the script -> the text of the value or shape that the user gave for this line.
    """

    traced: Any
    name: str
    defined: str
    called: SourceLine | None
    updates: bool
    assumptions: tuple[tuple[SourceLine | None, str], ...]
    packages: Mapping[str, SourceLine | None]
    values: Mapping[SourceLine, str]


class StepFound(BaseException):
    """Raised to end the script when its training step is found. It is no subclass of Exception, so that an `except
    Exception` in the script does not catch it."""


def captured_step(
    script: str | Path,
    argv: Sequence[str] = (),
    *,
    step: str | None = None,
    values: Mapping[str, str] = {},
    without: Sequence[str] = (),
    auto_axes: bool = False,
    folder: str | Path | None = None,
) -> Any:
    """Runs a training script up to its first training step. Returns the step as a `jax.stages.Traced`, which
    `memory.analyze` and `bytescope report` take.

    Args:
        script: the script's file.
        argv: the script's arguments.
        step: the name of the step's function; None takes the first jitted function that computes gradients and returns
            updated values of its arguments.
        values: what lines of the script return whose data is missing. Key: the line, as "file.py:LINE" or "file.py:text
            of the line". Value: the shape of a batch, as "int32[8,128]" or "image:float32[8,28,28],label:int32[8]", or
            a whole number.
        without: names of installed packages that are replaced by placeholders, as missing packages are.
        auto_axes: whether jax.make_mesh makes axes of the type Auto by default, as before jax 0.9, instead of Explicit.
        folder: the folder in which the script runs; None is the working folder.

    Raises ReportError if the script does not reach a training step. Its message names the first missing piece.
    """
    try:
        with contextlib.chdir(folder or "."):
            return capture(script, argv, step=step, values=values, without=without, auto_axes=auto_axes).traced
    except MissingPiece as missing:
        place, text = missing.pieces[0]
        more = f" (and {len(missing.pieces) - 1} more)" if len(missing.pieces) > 1 else ""
        raise ReportError(f"{place or script}: {text}{more}; bytescope report SCRIPT lists them all") from None


def capture(
    script: str | Path,
    argv: Sequence[str],
    *,
    step: str | None = None,
    values: Mapping[str, str] = {},
    without: Sequence[str] = (),
    auto_axes: bool = False,
) -> CapturedStep:
    """As `captured_step` in the working folder, but returns a `CapturedStep`. Raises MissingPiece if the script does
    not reach a training step."""
    if not os.path.isfile(script):
        raise ReportError(f"the script {script} does not exist: give the path of a Python file")
    linecache.checkcache()  # the script may have changed since an earlier run in this process
    capturing = _Capturing(step, GivenValues(values), auto_axes)
    folder = str(Path(script).resolve().parent)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored(sys.modules, "__main__"))
        stack.enter_context(_replaced(sys, "argv", [str(script), *argv]))
        stack.enter_context(_replaced(sys, "path", [folder, *sys.path, os.getcwd(), os.path.abspath("src")]))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # stdout may be a report's JSON
        variables = environment.variables()
        stack.enter_context(mock.patch.dict(variables, {**_SETTINGS, **variables}))  # the user's own settings win
        stack.enter_context(_quiet_logging())
        stack.enter_context(installed(capturing.run, without))
        stack.enter_context(capturing.intercepting())
        try:
            runpy.run_path(str(script), run_name="__main__")
        except StepFound:
            pass
        except MissingPiece as missing:
            raise MissingPiece(capturing.all_unknown() or missing.pieces) from missing
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            ended = isinstance(error, SystemExit) and not error.code
            if not ended and capturing.found is None and capturing.gradients is None:
                # Errors after a skipped call are its consequences.
                raise MissingPiece(capturing.all_unknown() or [_piece_of(error)]) from error
    found = capturing.found or capturing.gradients
    if found is None:
        name = f"the function {step}" if step else "a jitted function that computes gradients"
        ending = (None, f"the script ends without a call of {name}{capturing.seen_text()}")
        raise MissingPiece(capturing.all_unknown() or [ending])
    return dataclasses.replace(
        found,
        assumptions=tuple(capturing.run.assumptions),
        packages=dict(capturing.run.packages),
        values=dict(capturing.run.values.used),
    )


def _piece_of(error: BaseException) -> tuple[SourceLine | None, str]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            frames.append(relative_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    place = frames[-1] if frames else None
    if isinstance(error, SystemExit) and error.code:
        return place, f"the script exits with {error.code!r} before its step: give its arguments after --"
    text = f"{type(error).__name__}: {one_line(error, 300)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        root = error.name.split(".")[0]
        text += f": install {root}, or give --without=PACKAGE for the package that needs it"
    elif type(error).__name__ == "ShardingTypeError":
        text += ": if the script was written for a jax before 0.9, give --auto-axes"
    elif "DataLoader worker" in text:  # the worker processes of PyTorch have no stand-ins
        text += ": give the script's argument for no worker processes, such as --num_workers=0"
    return place, text


# ---- the training step among the jitted functions --------------------------------------------------------------------


def computes_gradients(jaxpr: Any) -> bool:
    """Returns whether a Jaxpr has equations of a backward pass."""
    return any(
        "transpose(" in str(equation.source_info.name_stack)
        for inner in distinct_jaxprs(jaxpr)
        for equation in inner.eqns
    )


def returns_updates(jaxpr: Any) -> bool:
    """Returns whether a result of a Jaxpr is the new value of an argument: a float array of the same shape and dtype,
    computed from it outside of the loss and its gradient."""
    import jax

    sources = _sources(jaxpr)
    for result, places in zip(jaxpr.outvars, sources):
        aval = result.aval
        if not getattr(aval, "shape", ()) or not jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
            continue
        same = [place for place, var in enumerate(jaxpr.invars) if _same_type(var.aval, aval)]
        if places.intersection(same):
            return True
    return False


def _same_type(one: Any, other: Any) -> bool:
    return getattr(one, "shape", None) == other.shape and getattr(one, "dtype", None) == other.dtype


def _sources(jaxpr: Any) -> list[set[int]]:
    """Returns for each result of a Jaxpr the positions of the arguments from which it is computed without the
    equations of the loss and its gradient."""
    known: dict[Any, set[int]] = {var: {place} for place, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        inputs = [known.get(var, set()) if not hasattr(var, "val") else set() for var in equation.invars]
        if any(mark in str(equation.source_info.name_stack) for mark in ("jvp(", "transpose(")):
            outputs = [set[int]() for _ in equation.outvars]
        else:
            outputs = _equation_sources(equation, inputs)
        for var, places in zip(equation.outvars, outputs):
            known[var] = places
    return [set() if hasattr(var, "val") else known.get(var, set()) for var in jaxpr.outvars]


def _equation_sources(equation: Any, inputs: Sequence[set[int]]) -> list[set[int]]:
    inner = [inner_jaxpr(body) for body in bodies(equation)]
    matching = [body for body in inner if (len(body.invars), len(body.outvars)) == (len(inputs), len(equation.outvars))]
    if matching and computes_gradients(matching[0]):  # arguments and results of the body are the equation's
        return [set().union(*(inputs[place] for place in places)) for places in _sources(matching[0])]
    return [set().union(*inputs) for _ in equation.outvars]


# ---- the interception ------------------------------------------------------------------------------------------------


class _Capturing:
    """What is known about a script that runs while functions of jax are replaced.

    found: the training step, once it is found. gradients: a function that only returns gradients, for a script without
    a step. unknown: line that calls a jitted function -> the arguments of the call that have no known shape. skipped:
    line that calls a jitted function -> number of such calls.
    """

    def __init__(self, step: str | None, values: GivenValues, auto_axes: bool):
        import jax

        from bytescope.memory.program.abstract_arrays import AbstractTrace

        self.step, self.auto_axes, self.real_jit = step, auto_axes, jax.jit
        self.found: CapturedStep | None = None
        self.gradients: CapturedStep | None = None
        self.seen: dict[str, SourceLine | None] = {}
        self.unknown: dict[SourceLine | None, list[tuple[SourceLine | None, str]]] = {}
        self.skipped: Counter[SourceLine | None] = Counter()
        self.trace = AbstractTrace(self._on_value)
        self.run = ScriptState(values, self._in_traced_code, jax.numpy.asarray)

    def _in_traced_code(self) -> bool:
        from jax._src import core

        return not self.trace.is_current() and not core.trace_state_clean()

    def _on_value(self, array: Any) -> None:
        kind = f"{array.aval.dtype}[{','.join(map(str, array.aval.shape))}]"
        self.run.assume(f"reads a value of type {kind}, taken as 0")

    def seen_text(self) -> str:
        """Returns the names of the jitted functions that the script called, as the end of an error message."""
        if not self.seen:
            return ": it calls no jitted function from Python"
        return "; it calls " + ", ".join(f"{name} ({place})" for name, place in self.seen.items())

    def observe(self, traced: Any) -> None:
        """Checks whether `traced`, a function that the script calls, is the training step. If it is, stores the step
        and raises StepFound."""
        jaxpr = traced.jaxpr.jaxpr
        name = _function_name(traced)
        self.seen.setdefault(name, user_line())
        named = self.step is not None and self.step in (name, traced.fun_name)
        if self.step is not None and not named:
            return
        if not named and not computes_gradients(jaxpr):
            return
        updates = returns_updates(jaxpr)
        defined = _definition(traced, name)
        captured = CapturedStep(traced, name, defined, user_line(), updates, (), {}, {})
        if updates or named:
            self.found = captured
            raise StepFound
        self.gradients = self.gradients or captured

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Context manager in which functions of jax, such as jax.jit, are replaced, and eager code runs on abstract
        arrays."""
        import jax
        import jax.experimental.multihost_utils
        import jax.experimental.pjit

        from bytescope.memory.program.abstract_arrays import zeros_like_sharded

        with contextlib.ExitStack() as stack:
            jit, pmap = functools.partial(self._wrapping, jax.jit), functools.partial(self._wrapping, jax.pmap)
            replacements = [
                (jax, "jit", jit),
                (jax.experimental.pjit, "pjit", jit),  # an old name of jax.jit
                (jax, "pmap", pmap),
                *self._device_functions(),
            ]
            for owner, name, replacement in replacements:
                stack.enter_context(_replaced(owner, name, replacement))
            stack.enter_context(zeros_like_sharded())
            stack.enter_context(self.trace.current())
            yield

    def _wrapping(self, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not args and "fun" not in options:
            return lambda function: self._wrapping(real, function, **options)
        return WrappedJit(real(*args, **options), self)

    def known(self, tree: Any, names: Sequence[str] = ()) -> Any:
        """Returns a pytree in which zeros replace each placeholder (`StandIn`) whose shape is known. Raises
        MissingPiece with all placeholders whose shape is unknown.

        names: the names of the parameters, if the pytree is (args, kwargs).
        """
        import jax

        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        unknown = [
            missing_shape(leaf, f"{_argument_name(path, names)} of the call at {user_line()}")
            for path, leaf in leaves
            if isinstance(leaf, StandIn) and leaf._specs is None
        ]
        if unknown:
            raise _UnknownShapes(unknown)
        known = [resolve(leaf) if isinstance(leaf, StandIn) else leaf for _, leaf in leaves]
        return jax.tree.unflatten(structure, known)

    def skipped_call(self, unknown: MissingPiece) -> Any:
        """Records a call of a jitted function whose arguments have no known shapes, and returns the scalar 0 as its
        result, because the call may be an evaluation before the training step. Raises MissingPiece after many calls at
        one line, because this line is then the training loop."""
        import jax

        place = user_line()
        self.skipped[place] += 1
        if self.skipped[place] > _MAX_SKIPPED:
            raise MissingPiece(self.all_unknown())
        self.unknown[place] = list(unknown.pieces)
        return jax.numpy.zeros(())

    def all_unknown(self) -> list[tuple[SourceLine | None, str]]:
        """Returns (line, problem with its remedy) for each argument without a known shape in the recorded calls."""
        return [piece for pieces in self.unknown.values() for piece in pieces]

    def _device_functions(self) -> list[tuple[Any, str, Any]]:
        import jax

        from bytescope.memory.program.abstract_arrays import AbstractArray, outside_traces

        devices, local_devices, device_put = jax.devices, jax.local_devices, jax.device_put
        set_mesh, make_mesh, from_callback = jax.set_mesh, jax.make_mesh, jax.make_array_from_callback
        from_shards, from_local = jax.make_array_from_single_device_arrays, jax.make_array_from_process_local_data

        def any_devices(backend: Any = None) -> Any:
            return devices()

        def any_local_devices(process_index: Any = None, backend: Any = None, host_id: Any = None) -> Any:
            return local_devices()

        def put(x: Any, *args: Any, **kwargs: Any) -> Any:
            return device_put(self.known(x), *args, **kwargs)

        def enter_mesh(mesh: Any) -> Any:
            if not self.trace.is_current():
                return set_mesh(mesh)
            with outside_traces():
                return set_mesh(mesh)

        def auto_mesh(axis_shapes: Any, axis_names: Any, axis_types: Any = None, **kwargs: Any) -> Any:
            types = axis_types or (jax.sharding.AxisType.Auto,) * len(axis_names)
            return make_mesh(axis_shapes, axis_names, axis_types=types, **kwargs)

        def array_from_shards(shape: Any, sharding: Any, arrays: Any, **kwargs: Any) -> Any:
            if any(isinstance(array, AbstractArray) for array in arrays):
                return self.trace.array(shape, arrays[0].dtype, sharding)
            with outside_traces():
                return from_shards(shape, sharding, arrays, **kwargs)

        def array_from_local(sharding: Any, local_data: Any, *args: Any, **kwargs: Any) -> Any:
            local_data = self.known(local_data)
            with outside_traces():
                return from_local(sharding, local_data, *args, **kwargs)

        def array_from_callback(shape: Any, sharding: Any, data_callback: Any, *args: Any, **kwargs: Any) -> Any:
            index = next(iter(sharding.addressable_devices_indices_map(tuple(shape)).values()))
            part = data_callback(index)
            if isinstance(part, AbstractArray):
                return self.trace.array(shape, part.dtype, sharding)
            with outside_traces():
                return from_callback(shape, sharding, data_callback, *args, **kwargs)

        def ignored(*args: Any, **kwargs: Any) -> None:
            return None

        replaced = [
            (jax, "devices", any_devices),
            (jax, "local_devices", any_local_devices),
            (jax, "device_put", put),
            (jax, "set_mesh", enter_mesh),
            (jax.sharding, "set_mesh", enter_mesh),
            (jax, "make_array_from_single_device_arrays", array_from_shards),
            (jax, "make_array_from_process_local_data", array_from_local),
            (jax, "make_array_from_callback", array_from_callback),
            (jax.distributed, "initialize", ignored),
            (jax.profiler, "start_trace", ignored),
            (jax.profiler, "stop_trace", ignored),
            (jax.profiler, "start_server", ignored),
        ]
        if self.auto_axes:
            replaced.append((jax, "make_mesh", auto_mesh))
        return replaced


class _UnknownShapes(MissingPiece):
    """Raised if arguments of a call of a jitted function, or of jax.device_put, are placeholders without known
    shapes."""


class WrappedJit:
    """A function that jax.jit or jax.pmap returned. If the script calls it from Python, the function is traced to find
    the training step. If traced code calls it, the call is passed on unchanged."""

    def __init__(self, real: Any, capturing: _Capturing):
        functools.update_wrapper(self, real, updated=())
        self._real, self._capturing = real, capturing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def _names(self) -> list[str]:
        try:
            return list(inspect.signature(self._real).parameters)
        except (TypeError, ValueError):
            return []

    @property
    def _is_pmap(self) -> bool:
        return getattr(self._real.lower, "__qualname__", "").startswith("pmap.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function and checks whether it is the training step. If not, calls it on abstract arrays."""
        capturing = self._capturing
        if not capturing.trace.is_current():
            return self._real(*args, **kwargs)
        try:
            args, kwargs = capturing.known((args, kwargs), self._names)
        except _UnknownShapes as unknown:
            return capturing.skipped_call(unknown)
        traced = self._observed(args, kwargs)
        if self._is_pmap:
            return self._pmap_results(traced)
        return self._real(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As jax's `trace`, for arguments that may be abstract arrays."""
        if not self._capturing.trace.is_current():
            return self._real.trace(*args, **kwargs)
        return self._observed(*self._capturing.known((args, kwargs), self._names))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As jax's `lower`. The result is compiled to a function that returns abstract arrays."""
        if not self._capturing.trace.is_current():
            return self._real.lower(*args, **kwargs)
        return _LoweredFunction(self._observed(*self._capturing.known((args, kwargs), self._names)), self._capturing)

    def _observed(self, args: Any, kwargs: Any) -> Any:
        import jax

        from bytescope.memory.program import tracing
        from bytescope.memory.program.abstract_arrays import spec_of

        args, kwargs = jax.tree.map(spec_of, (args, kwargs))
        if self._is_pmap:
            with _replaced(jax, "jit", self._capturing.real_jit):
                traced = tracing.trace(self._real, args, kwargs, {})
        else:
            traced = self._real.trace(*args, **kwargs)
        self._capturing.observe(traced)
        return traced

    def _pmap_results(self, traced: Any) -> Any:
        import jax

        def result(spec: Any) -> Any:
            mesh = jax.sharding.Mesh(jax.devices()[: spec.shape[0]], ("devices",))
            sharding = jax.sharding.NamedSharding(mesh, jax.P("devices"))
            return self._capturing.trace.array(spec.shape, spec.dtype, sharding)

        return jax.tree.map(result, traced.out_info)


class _LoweredFunction:
    """The result of `WrappedJit.lower`, and of its method `compile`. If it is called, it returns abstract arrays with
    the shapes and dtypes of the function's results."""

    def __init__(self, traced: Any, capturing: _Capturing):
        self._traced, self._capturing = traced, capturing

    def compile(self, *args: Any, **kwargs: Any) -> _LoweredFunction:
        """Returns this object. Nothing is compiled."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns abstract arrays with the shapes, dtypes and shardings of the function's results."""
        import jax

        def result(spec: Any) -> Any:
            return self._capturing.trace.array(spec.shape, spec.dtype, getattr(spec, "sharding", None))

        return jax.tree.map(result, self._traced.out_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced.lower(), name)


def _argument_name(path: Any, names: Sequence[str]) -> str:
    """Returns the name of an argument for a message. path: the path of the argument in the pytree (args, kwargs).
    names: the names of the function's parameters."""
    import jax

    if not path or not hasattr(path[0], "idx") or len(path) < 2:
        return "the argument"
    number = getattr(path[1], "idx", len(names))
    root = names[number] if path[0].idx == 0 and number < len(names) else jax.tree_util.keystr(path[1:2], simple=True)
    return f"the argument {root}{jax.tree_util.keystr(path[2:])}"


def _function_name(traced: Any) -> str:
    """Returns the name of the function that the user wrote. If a library wraps the function, the name comes from jax's
    description of the source."""
    described = str(traced.jaxpr.jaxpr.debug_info.func_src_info or "").split(" at ")[0]
    return described if described.isidentifier() else traced.fun_name


def _definition(traced: Any, name: str) -> str:
    """Returns "name (file:line)" for a function in the user's code; only the name for a function in a library."""
    place = str(traced.jaxpr.jaxpr.debug_info.func_src_info or "").rpartition(" at ")[2]
    file, _, line = place.rpartition(":")
    if not line.isdigit() or not is_user_file(os.path.abspath(file)):
        return name
    return f"{name} ({relative_line(file, int(line))})"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    is_own = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own) if is_own else delattr(owner, name)


@contextlib.contextmanager
def _restored(table: dict[str, Any], key: str) -> Iterator[None]:
    own = table.get(key)
    try:
        yield
    finally:
        table[key] = own


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Context manager in which the root logger has a handler. Without a handler, a call of `logging.info` in the
    script would set up logging and print to the terminal."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
