"""`watch` wraps the step of a training loop. It predicts and measures the step's memory, and explains out-of-memory
errors.

    step = memory.watch(jax.jit(step, donate_argnums=0))
    for batch in batches:
        state, loss = step(state, batch)

The first call compiles the step with `memory.compile`, and every call runs the resulting executable. A step that
cannot be analyzed is called without a watch, so a watch never stops a loop that runs without it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

from bytescope.memory.analysis import report_of
from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.messages.post_mortem import PostMortem
from bytescope.memory.program.roles import checked_roles
from bytescope.memory.program.tracing import LostUpdateError, check_options
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human, parse_bytes, plural
from bytescope.memory.watching.executable import Executable, as_jitted, compile_jitted, is_wrapper, statics_of
from bytescope.memory.watching.reporting import EXHAUSTED, StepReporter, is_exhausted

# Exceptions that an executable raises, before it runs, for arguments that it was not compiled for.
_MISMATCH = (TypeError, ValueError)


@dataclasses.dataclass
class _CompiledStep:
    """The watched step, compiled for arguments of certain shapes.

    Fields:
        run: the function to call.
        report: its memory report; None if the step could not be analyzed.
        device: the device whose memory is measured.
        leaves: shapes and dtypes of the arguments.
    """

    run: Callable[..., Any]
    report: Report | None = None
    device: JaxDevice | None = None
    leaves: tuple[Any, ...] = ()


class Watched:
    """A watched step, as returned by `watch`. It is called like the step itself.

    Attributes:
        report: the report of the current executable, None before the first call.
        compiled: the current executable, None before the first call.
        calls: the number of calls so far.
        post_mortem: the post-mortem of the last call that ran out of memory, None if no call did.

    Other attributes are read from the step. Used as a context manager around a loop, as in `with memory.watch(step) as
    step: ...`, it also explains out-of-memory errors that are raised later, when results are read.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        every: int,
        limit: int | None,
        folder: Path,
        tell: Callable[[str], None],
        about: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.__wrapped__, self._step = step, as_jitted(step, options)
        name = str(getattr(step, "__name__", None) or getattr(step, "__qualname__", type(step).__name__))
        self._reporter = StepReporter(name, tell, folder)
        self._every, self._limit, self._about, self.calls = every, limit, about, 0
        self._known: dict[Any, _CompiledStep] = {}
        self._now, self._key = _CompiledStep(self._run_matching), None
        # The function that a call runs, and whether it is an executable, which raises for arguments of other shapes.
        self._run, self._exact = self._now.run, False
        # Executables of other libraries' wrappers do not check static arguments, so this class checks every call.
        self._checked = is_wrapper(self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step and returns its result. Errors of the step are raised unchanged."""
        self.calls += 1
        try:
            out = self._run(*args, **kwargs)
        except Exception as error:
            if not (self._exact and isinstance(error, _MISMATCH)):
                self._explain_out_of_memory(error, args, kwargs)
                raise
            out = self._call_again(error, args, kwargs)
        if self._every and not self.calls % self._every and self._now.report is not None:
            self._reporter.report_measured(self._now.report, self._now.device, self.calls)
        return out

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not set yet: the object is being created or copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"Watched({self._reporter.name}, {plural(self.calls, 'call')})"

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._explain_out_of_memory(error)

    @property
    def report(self) -> Report | None:
        """The report of the current executable. None before the first call, or if the step could not be watched."""
        return self._now.report

    @property
    def compiled(self) -> Executable | None:
        """The current executable. None before the first call, or if the step could not be watched."""
        return self._now.run if isinstance(self._now.run, Executable) else None

    @property
    def post_mortem(self) -> PostMortem | None:
        """The post-mortem of the last call that ran out of memory; None if no call did."""
        return self._reporter.post_mortem

    # ---- choosing the executable of a call ----------------------------------------------------------------------

    def _run_matching(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_for_key(self._make_key(args, kwargs), args, kwargs)

    def _call_again(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._make_key(args, kwargs)
        if key == self._key:
            # The executable was compiled for exactly these arguments.
            raise error
        try:
            return self._run_for_key(key, args, kwargs)
        except Exception as other:
            self._explain_out_of_memory(other, args, kwargs)
            raise other from None

    def _run_for_key(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if key is None:  # the call is inside another transformation, which traces the step itself
            return self._step(*args, **kwargs)
        if key in self._known:
            self._make_current(key)
            return self._now.run(*args, **kwargs)
        known = self._compile(args, kwargs)
        self._known[key] = known
        self._make_current(key)
        out = known.run(*args, **kwargs)
        if known.report is not None:
            import jax

            jax.block_until_ready(out)  # only after compiling: a failed allocation raises here, not later
        return out

    def _make_current(self, key: Any) -> None:
        self._key, self._now = key, self._known[key]
        self._exact = isinstance(self._now.run, Executable) and not self._checked
        # An executable of another library does not check its static arguments.
        self._run = self._run_matching if self._checked else self._now.run

    def _make_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the properties of arguments on which compiling depends: tree structure, shapes, dtypes, shardings
        and static values. Returns None if the arguments are tracers of an outer jax transformation."""
        import jax

        inputs, named_inputs, values = statics_of(self._step).split(args, kwargs)
        leaves, tree = jax.tree.flatten((inputs, named_inputs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return None
        return tree, tuple(self._leaf_key(leaf) for leaf in leaves), values

    def _leaf_key(self, leaf: Any) -> Any:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return leaf.shape, leaf.dtype, leaf.sharding if getattr(leaf, "committed", False) else None
        # A leaf of a step that another library jitted may be a static argument.
        return (type(leaf), leaf) if self._checked else type(leaf)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _CompiledStep:
        """Compiles the step for these arguments and predicts its memory. If the prediction fails, returns the
        executable without a report; if compiling fails, returns the step itself.

        Raises an out-of-memory error if the predicted memory exceeds the limit.
        """
        import jax

        try:
            compilation, target, executable = compile_jitted(self._step, args, kwargs)
            running: Any = compilation.executable.runtime_executable()
            device = running.local_devices()[0]
        except Exception as error:  # an error in the step itself is raised again when the step is called
            if is_exhausted(error):
                raise
            self._reporter.report_unwatched(error)
            return _CompiledStep(self.__wrapped__ if isinstance(error, LostUpdateError) else self._step)
        arguments = jax.tree.leaves((args, kwargs))
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arguments if hasattr(leaf, "dtype"))
        known = _CompiledStep(executable, None, device, shapes)
        try:
            report = Report.of(report_of(compilation, target=target, seconds=True, **self._about))
        except Exception as error:  # a failed analysis must not stop the loop
            self._reporter.report_unwatched(error)
            return known
        known.report = report
        self._reporter.begin(device, report)
        _latest[:] = [weakref.ref(self)]
        _install_excepthook()
        if self._limit is not None and report.predicted_bytes > self._limit:
            self._raise_over_limit(report, self._limit, device, arguments)
        self._reporter.report_predicted(report, len(self._known) + 1)
        return known

    def _raise_over_limit(self, report: Report, limit: int, device: JaxDevice, arguments: list[Any]) -> None:
        import jax

        error = jax.errors.JaxRuntimeError(
            f"{EXHAUSTED}: {self._reporter.name} is predicted to take {human(report.predicted_bytes)} per "
            f"device, more than budget={human(limit)}"
        )
        limited = dataclasses.replace(report, limit_bytes=limit, fits=False, verdict="exceeds")
        self._reporter.report_exhausted(error, self.calls, device, arguments, limited)
        raise error

    def _explain_out_of_memory(
        self, error: BaseException, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}
    ) -> None:
        if not is_exhausted(error) or getattr(error, "_bytescope_reported", False):
            return
        import jax

        leaves = jax.tree.leaves((args, kwargs)) or self._now.leaves
        self._reporter.report_exhausted(error, self.calls, self._now.device, leaves, self._now.report)


@overload
def watch(
    step: Callable[..., Any],
    *,
    every: int = ...,
    budget: int | str | None = ...,
    folder: str | Path = ...,
    tell: Callable[[str], None] = ...,
    config: Mapping[str, Any] | None = ...,
    roles: Iterable[tuple[str, str]] = ...,
    names: Iterable[str] = ...,
    **options: Any,
) -> Watched: ...


@overload
def watch(
    step: None = None,
    *,
    every: int = ...,
    budget: int | str | None = ...,
    folder: str | Path = ...,
    tell: Callable[[str], None] = ...,
    config: Mapping[str, Any] | None = ...,
    roles: Iterable[tuple[str, str]] = ...,
    names: Iterable[str] = ...,
    **options: Any,
) -> Callable[[Callable[..., Any]], Watched]: ...


def watch(
    step: Callable[..., Any] | None = None,
    *,
    every: int = 100,
    budget: int | str | None = None,
    folder: str | Path = ".",
    tell: Callable[[str], None] = print,
    config: Mapping[str, Any] | None = None,
    facts: ModelFacts | None = None,
    roles: Iterable[tuple[str, str]] = (),
    names: Iterable[str] = (),
    **options: Any,
) -> Watched | Callable[[Callable[..., Any]], Watched]:
    """Watches the memory of a training step. Returns a `Watched`, which is called like the step. Works as a decorator.

    The first call compiles the step and prints its predicted bytes. As with `jax.jit`, arguments of other shapes are
    compiled separately. After every `every` calls, one line compares predicted with measured bytes. If the device runs
    out of memory, a post-mortem of up to 45 lines is printed (the cause, where the bytes are, the largest buffers with
    the live arrays that are not arguments, and the three cheapest remedies) and written to `memory-post-mortem.html`
    and `.json`. Then the error is re-raised. Errors that are raised later, when results are read, are explained if they
    are uncaught, or raised inside `with memory.watch(step) as step:`.

    Args:
        step: a function, plain or jitted. Without it, the result is a decorator.
        every: number of calls between two comparisons, 0 for none.
        budget: maximum bytes on one device, as an int or a text such as "72GiB". A step that is predicted to take more
            fails as if the device had this memory. None: no budget in addition to the device's memory.
        folder: folder for the files of the post-mortem.
        tell: function that is called with each text, instead of `print`.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's description of the step (`memory.ModelFacts`): shapes, mesh, precision and remat.
        roles: (regular expression, role) pairs that give arguments their role, such as "params", by pytree path.
        names: the checkpoint names of the program.
        options: options of `jax.jit`, such as donate_argnums.

    Raises:
        ReportError: `budget` is not a size, `step` cannot be called, or options are given for a jitted step.
        TypeError: an option is not known to `jax.jit`.
    """
    check_options(options, "watch", ("every", "budget", "folder", "tell", "config", "facts", "roles", "names"))
    if every < 0:
        raise ReportError(f"every={every} is not a number of calls: give 1 or more, or 0 for no comparisons")
    decorate = functools.partial(
        Watched,
        every=every,
        limit=parse_bytes(budget) if budget is not None else None,
        folder=Path(folder),
        tell=tell,
        about={"config": config, "facts": facts, "roles": checked_roles(roles), "names": tuple(names)},
        options=options,
    )
    if step is None:
        return decorate
    if not callable(step):
        raise ReportError(f"{type_phrase(step)} is not a step: give memory.watch(step) a function, plain or jitted")
    return decorate(step)


# The step that was compiled last, to explain errors that are raised when its results are read.
_latest: list[weakref.ref[Watched]] = []


@functools.cache
def _install_excepthook() -> None:
    before = sys.excepthook

    def explain(kind: Any, error: BaseException, traceback: Any) -> None:
        watched = _latest[0]() if _latest else None
        if watched is not None:
            watched._explain_out_of_memory(error)
        before(kind, error, traceback)

    sys.excepthook = explain
