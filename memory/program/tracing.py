"""Steps traced once, however people wrote them: plain or jitted functions, wrappers of jit, arguments of any type.

What is not an array among the arguments (a string, a function, a config) is the step's to know when it is traced, and
no part of the program: it is held apart, as equinox does.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.program import in_place

# Options of `jax.jit` that a step may come with.
OPTIONS = ("in_shardings", "out_shardings", "donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
_NUMBERS = (bool, int, float, complex)


def traced(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The `jax.stages.Traced` of a step, traced once, or the object that a library puts around it.

    Args:
        step: a function, or one that `jax.jit` or another library's jit has wrapped.
        args, kwargs: arrays, ShapeDtypeStructs, or pytrees of them; other leaves are held as they are.
        options: of `jax.jit` (`OPTIONS`), for a plain function.

    Raises ReportError for options with a step that is already jitted, and for `jax.pmap` over more devices than this
    process has.
    """
    import jax

    given = {name: value for name, value in options.items() if value is not None}
    is_jitted = hasattr(step, "trace") or hasattr(step, "lower")
    if is_jitted and given:
        raise ReportError(
            f"{', '.join(given)} with a step that is jitted already: give them to jax.jit, or give the function itself"
        )
    if hasattr(step, "trace"):
        return step.trace(*args, **kwargs)
    if not is_jitted:
        return _of_function(step, args, kwargs, given)
    try:
        return _of_wrapper(step, args, kwargs)
    except ValueError as error:
        mapped, available = _mapped_devices(step, args, kwargs), jax.local_device_count()
        if mapped > available and _PMAP_ERROR.search(str(error)):
            raise ReportError(
                f"jax.pmap over {mapped} devices, and this process has {available}: set "
                f"JAX_NUM_CPU_DEVICES={mapped} before jax starts, or use jax.jit over a mesh of the "
                "target's devices"
            ) from error
        raise


# jax's error messages for jax.pmap over more devices than the process has.
_PMAP_ERROR = re.compile(r"cannot select an axis to squeeze out|applied to the function '_fun'|requires \d+ replicas")


def _mapped_devices(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the length of the axis that `jax.pmap` maps, the most common first dimension of the arguments; 0 if the
    step is not wrapped by `jax.pmap`."""
    import jax

    if not getattr(step.lower, "__qualname__", "").startswith("pmap."):
        return 0
    lengths = Counter(leaf.shape[0] for leaf in jax.tree.leaves((args, kwargs)) if getattr(leaf, "shape", ()))
    return max(lengths, key=lengths.__getitem__, default=0)


def check_options(options: Iterable[str], function: str) -> None:
    """Raises TypeError for an option of `function` that `jax.jit` does not know."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(f"{function}() got {', '.join(unknown)}: options of jax.jit are {', '.join(OPTIONS)}")


def takes_none(step: Any) -> bool:
    """Whether a step can be called without arguments."""
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True


def _of_function(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:
    """A plain function as jax.jit traces it; numbers of Python are arguments."""
    import jax

    step = in_place.refused(step)
    static = {number % len(args) for number in _numbers(given.get("static_argnums")) if args}
    named = _names(given.get("static_argnames")) | _parameters(step, static)
    apart = [value if number in static else _held(value, numbers=False) for number, value in enumerate(args)]
    apart_by_name = {name: value if name in named else _held(value, numbers=False) for name, value in kwargs.items()}
    if not any(isinstance(leaf, _static()) for leaf in jax.tree.leaves((apart, apart_by_name), is_leaf=_is_static)):
        return jax.jit(step, **given).trace(*args, **kwargs)
    return jax.jit(_whole(step), **given).trace(*apart, **apart_by_name)


def _of_wrapper(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What another library's jit has wrapped, traced as it is called; what it donates is donated.

    As these libraries have it, numbers of Python are no arguments. Arrays that are bound to the function are.
    """
    import jax

    bound = [step] if any(map(_is_array, jax.tree.leaves(step))) else []
    held, held_by_name = [_held(value, numbers=True) for value in (*bound, *args)], _held(kwargs, numbers=True)
    whole = _whole(_call if bound else step, like=step)
    first = jax.jit(whole).trace(*held, **held_by_name)
    donated = _donated(first, len(held))
    return jax.jit(whole, donate_argnums=donated).trace(*held, **held_by_name) if donated else first


def _call(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function that arrays are bound to, as an argument of the program: so they are arguments too."""
    return fun(*args, **kwargs)


def _whole(step: Callable[..., Any], like: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A step whose arguments and results have held leaves, by the name and with the parameters of `like`."""
    import jax

    def whole(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda leaf: leaf.value if _is_static(leaf) else leaf, (args, kwargs), is_leaf=_is_static
        )
        return _held(step(*args, **kwargs), numbers=False)

    functools.update_wrapper(whole, like or step)
    whole.__name__ = getattr(like or step, "__name__", type(like or step).__name__)
    if step is _call:
        del vars(whole)["__wrapped__"]
        vars(whole)["__signature__"] = _with_first("fun", like)
    return whole


def _with_first(name: str, step: Any) -> inspect.Signature:
    """The signature of a step with one more argument in front."""
    try:
        rest = [each for each in inspect.signature(step).parameters.values() if each.name != name]
    except (TypeError, ValueError):
        rest = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind), *rest])


def _donated(program: Any, count: int) -> tuple[int, ...]:
    """Numbers of the positional arguments of which a wrapper's own jit donates every leaf."""
    import jax
    from jax.extend.core import Var

    equations = program.jaxpr.jaxpr.eqns
    given = {
        variable
        for equation in equations
        if "donated_invars" in equation.params
        for variable, donated in zip(equation.invars, equation.params["donated_invars"])
        if donated and isinstance(variable, Var)
    }
    args, _ = program.args_info
    variables, found = iter(program.jaxpr.jaxpr.invars), []
    for number, arg in zip(range(count), args):
        own = [next(variables) for _ in jax.tree.leaves(arg)]
        found += [number] if own and all(variable in given for variable in own) else []
    return tuple(found)


def _held(tree: Any, *, numbers: bool) -> Any:
    """A tree whose leaves that are no arrays are held: they are part of its structure then. `numbers`: Python's too."""
    import jax

    return jax.tree.map(
        lambda leaf: leaf if _is_array(leaf) or (not numbers and isinstance(leaf, _NUMBERS)) else _static()(leaf), tree
    )


def _is_array(leaf: Any) -> bool:
    """Whether jax takes a leaf as an array; numpy's arrays of objects and of text it does not."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and hasattr(leaf, "shape") and getattr(dtype, "kind", "") not in ("O", "U", "S")


def _is_static(leaf: Any) -> bool:
    return isinstance(leaf, _static())


@functools.cache
def _static() -> type:
    """The type of a leaf that is held: no leaf to jax, and equal to itself alone."""
    import jax

    class Static:
        def __init__(self, value: Any):
            self.value = value

    jax.tree_util.register_pytree_node(Static, lambda node: ((), node), lambda node, _: node)
    return Static


def _numbers(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """An option of `jax.jit` that is one number, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Iterable[str] | None) -> set[str]:
    """The same of names."""
    if value is None:
        return set()
    return {value} if isinstance(value, str) else set(value)


def _parameters(step: Any, numbers: Iterable[int]) -> set[str]:
    """The names of parameters by their numbers: static ones may be given by name too."""
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return set()
    return {names[number] for number in numbers if number < len(names)}
