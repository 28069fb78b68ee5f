"""Traces a step once: a plain function, a jitted function, or a function wrapped by another library's jit.

Arguments that are not arrays (strings, functions, configs) are static: the step reads them while it is traced, and
they are not inputs of the program, as in equinox.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError, nearest, suggestion

# Options of `jax.jit` that a step may have.
OPTIONS = ("in_shardings", "out_shardings", "donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
# Names of a size in our functions. Each may be given in the place of another.
_SIZES = ("size", "limit", "budget")
_NUMBERS = (bool, int, float, complex)
_NNX = "flax.nnx"


def trace(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Traces a step with jax. Returns a `jax.stages.Traced`, or another library's wrapper of one.

    Args:
        step: a function, or a function wrapped by `jax.jit` or another library's jit.
        args, kwargs: arrays, ShapeDtypeStructs, or pytrees of them. Other leaves are static.
        options: options of `jax.jit` for a plain function, such as `donate_argnums` (`OPTIONS`).

    Raises ReportError if options are given for a step that is already jitted.
    """
    given = {name: value for name, value in options.items() if value is not None}
    is_jitted = hasattr(step, "trace") or hasattr(step, "lower")
    if is_jitted and given:
        raise ReportError(
            f"{', '.join(given)} cannot be set for a step that is jitted already: give the options to jax.jit, or give "
            "the plain function"
        )
    if hasattr(step, "trace"):
        return step.trace(*args, **kwargs)
    return _trace_wrapper(step, args, kwargs) if is_jitted else _trace_function(step, args, kwargs, given)


def check_options(options: Iterable[str], function: str, own: Sequence[str] = ()) -> None:
    """Raises TypeError if an option is not known to `jax.jit`.

    function: the name of the function to which the options were passed, for the message. own: the function's own
    keyword arguments, which the message suggests for a misspelt one.
    """
    for option in sorted(set(options) - set(OPTIONS)):
        sizes = [name for name in own if name in _SIZES] if option in _SIZES else []
        near = suggestion(sizes or nearest(option, (*own, *OPTIONS)))
        raise TypeError(
            f"{function}() got the unknown option {option}: {f'{near} Else ' if near else ''}give only options of "
            f"jax.jit, {', '.join(OPTIONS)}"
        )


def takes_no_arguments(step: Any) -> bool:
    """Returns whether a step can be called without arguments."""
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True


def donation_switched_off(step: Any, options: Mapping[str, Any], program: Any) -> tuple[bool, ...]:
    """Returns for each array among the arguments whether the step asks to donate it although jax donates nothing,
    because its setting `jax_debug_nans` is on. Returns () if the setting is off, or if the step's options are unknown.

    Args:
        step: a function, plain or wrapped by `jax.jit` or `flax.nnx.jit`.
        options: options of `jax.jit` for a plain function, such as `donate_argnums`.
        program: the `jax.stages.Traced` of the step.
    """
    import jax

    if not jax.config.jax_debug_nans:  # type: ignore[attr-defined]  # jax sets its options at run time
        return ()
    jitted = getattr(step, "_jit_info", None) or getattr(getattr(step, "jitted_fn", None), "_jit_info", None)

    def option(name: str) -> Any:
        return getattr(jitted, name, None) if jitted is not None else options.get(name)

    positional, named = program.args_info
    static = set(_as_int_tuple(option("static_argnums")))
    total = len(positional) + len(static)
    numbers = {number % total for number in _as_int_tuple(option("donate_argnums"))} if total else set()
    names = _as_name_set(option("donate_argnames"))
    flags: list[bool] = []
    for number, arg in zip((at for at in range(total) if at not in static), positional):
        flags += [number in numbers] * len(jax.tree.leaves(arg))
    for name, arg in sorted(named.items()):
        flags += [name in names] * len(jax.tree.leaves(arg))
    return tuple(flags)


def _trace_function(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:
    import jax

    step = refuse_lost_updates(step)
    static = {number % len(args) for number in _as_int_tuple(given.get("static_argnums")) if args}
    named = _as_name_set(given.get("static_argnames")) | _parameter_names(step, static)
    marked = [value if number in static else _mark_static(value, numbers=False) for number, value in enumerate(args)]
    marked_by_name = {
        name: value if name in named else _mark_static(value, numbers=False) for name, value in kwargs.items()
    }
    if not any(map(_is_static, jax.tree.leaves((marked, marked_by_name), is_leaf=_is_static))):
        return jax.jit(step, **given).trace(*args, **kwargs)
    return jax.jit(_with_static_leaves(step), **given).trace(*marked, **marked_by_name)


def _trace_wrapper(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces a function wrapped by another library's jit. Arguments that the wrapper donates are donated.

    Python numbers are static, as in these libraries. Arrays that are bound to the function become arguments of the
    program.
    """
    import jax

    bound = [step] if any(map(_is_array, jax.tree.leaves(step))) else []
    marked = [_mark_static(value, numbers=True) for value in (*bound, *args)]
    marked_by_name = _mark_static(kwargs, numbers=True)
    function = _with_static_leaves(_call_bound if bound else step, like=step)
    first = jax.jit(function).trace(*marked, **marked_by_name)
    donated = _donated_arguments(first, len(marked))
    return jax.jit(function, donate_argnums=donated).trace(*marked, **marked_by_name) if donated else first


def _call_bound(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # jit sees `fun` as an argument, so arrays that are bound to it become arguments of the program.
    return fun(*args, **kwargs)


def _with_static_leaves(step: Callable[..., Any], like: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Wraps a step so that its arguments and results may contain static leaves, which are not traced.

    like: the function whose name and parameters the wrapper has (default: the step).
    """
    import jax

    def function(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda leaf: leaf.value if _is_static(leaf) else leaf, (args, kwargs), is_leaf=_is_static
        )
        return _mark_static(step(*args, **kwargs), numbers=False)

    functools.update_wrapper(function, like or step)
    function.__name__ = getattr(like or step, "__name__", type(like or step).__name__)
    if step is _call_bound:  # the signature has the function as one more parameter
        del vars(function)["__wrapped__"]
        try:
            rest = [each for each in inspect.signature(like or step).parameters.values() if each.name != "fun"]
        except (TypeError, ValueError):
            rest = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        first = inspect.Parameter("fun", inspect.Parameter.POSITIONAL_ONLY)
        vars(function)["__signature__"] = inspect.Signature([first, *rest])
    return function


def _donated_arguments(program: Any, count: int) -> tuple[int, ...]:
    import jax
    from jax.extend.core import Var

    given = set()
    for equation in program.jaxpr.jaxpr.eqns:
        for variable, donated in zip(equation.invars, equation.params.get("donated_invars", ())):
            if donated and isinstance(variable, Var):
                given.add(variable)
    args, _ = program.args_info
    variables, numbers = iter(program.jaxpr.jaxpr.invars), []
    for number, arg in zip(range(count), args):
        own = [next(variables) for _ in jax.tree.leaves(arg)]
        # An argument is donated only if all its leaves are.
        if own and given.issuperset(own):
            numbers.append(number)
    return tuple(numbers)


def _mark_static(tree: Any, *, numbers: bool) -> Any:
    import jax

    def mark(leaf: Any) -> Any:
        is_argument = _is_array(leaf) or (not numbers and isinstance(leaf, _NUMBERS))
        return leaf if is_argument else _static_leaf_type()(leaf)

    return jax.tree.map(mark, tree)


def _is_array(leaf: Any) -> bool:
    # jax does not accept numpy arrays of objects or text.
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and hasattr(leaf, "shape") and getattr(dtype, "kind", "") not in ("O", "U", "S")


def _is_static(leaf: Any) -> bool:
    return isinstance(leaf, _static_leaf_type())


@functools.cache
def _static_leaf_type() -> type:
    import jax

    class Static:
        def __init__(self, value: Any):
            self.value = value

    # The value is part of the tree's structure, so jax recompiles if it changes.
    jax.tree_util.register_pytree_node(Static, lambda node: ((), node), lambda node, _: node)
    return Static


def _as_int_tuple(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _as_name_set(value: str | Iterable[str] | None) -> set[str]:
    if value is None:
        return set()
    return {value} if isinstance(value, str) else set(value)


def _parameter_names(step: Any, numbers: Iterable[int]) -> set[str]:
    # Static arguments may also be passed by name.
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return set()
    return {names[number] for number in numbers if number < len(names)}


class LostUpdateError(ReportError):
    """Raised for a step that updates its arguments in place, because `jax.jit` would lose the updates."""


def refuse_lost_updates(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a plain step so that tracing it raises LostUpdateError if it updates Flax NNX objects in place without
    returning them. `flax.nnx.jit` returns such updates; `jax.jit` would compile the step without its optimizer, and the
    report would not describe the step that trains.

    Lost updates of scalars are ignored, because dropout counts its calls in a scalar.
    """
    if _NNX not in sys.modules:
        return step

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        import jax

        before = []
        for value in (*args, *kwargs.values()):
            if any(kind.__module__.startswith(_NNX) for kind in type(value).__mro__):
                before.append((value, jax.tree.leaves(value)))
        out = step(*args, **kwargs)
        returned = {id(leaf) for leaf in jax.tree.leaves(out)} if before else set()
        lost = []
        for value, leaves in before:
            changed = [new for old, new in zip(leaves, jax.tree.leaves(value)) if new is not old]
            if any(getattr(new, "shape", ()) and id(new) not in returned for new in changed):
                lost.append(type(value).__name__)
        if lost:
            raise LostUpdateError(
                f"{getattr(step, '__name__', 'the step')} updates {' and '.join(lost)} in place, "
                "and jax.jit loses the updates: give flax.nnx.jit(step), or return the updated objects"
            )
        return out

    return checked
