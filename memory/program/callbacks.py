"""Programs that call back into Python, for devices that are not here.

To lower a callback jax asks for the runtime of its platform, which a described device does not have. For a GPU the call
is put into the program without one: the custom call that jax would make, with its operands and results, so that the
compiled program has the same buffers. Elsewhere a value of the same shape that waits for the operands stands in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from bytescope.memory.jaxprs import bodies, opened

# Primitive -> whether it is called for what it does, whoever uses its results.
CALLBACKS = {"debug_callback": True, "debug_print": True, "io_callback": True, "pure_callback": False}
# Kernels have a way of their own to print.
_KERNELS = {"pallas_call"}
_EFFECTS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}
_GPUS = {"cuda", "rocm"}


def count(jaxpr: Any) -> int:
    """How many equations of a Jaxpr or ClosedJaxpr call back into Python, those of its inner jaxprs among them; each
    jaxpr is counted once."""
    seen: dict[int, Any] = {}

    def found(jaxpr: Any) -> int:
        if id(jaxpr) in seen:
            return 0
        seen[id(jaxpr)] = jaxpr
        return sum(
            1 if equation.primitive.name in CALLBACKS else sum(map(found, _inner(equation))) for equation in jaxpr.eqns
        )

    return found(opened(jaxpr))


def without_runtime(closed: Any, platform: str) -> Any:
    """A ClosedJaxpr whose callbacks lower for devices of a platform that are not here; the same if it has none."""
    return _Rewriting(platform).value(closed) if count(closed) else closed


def note(number: int) -> str:
    """What a report says of `number` callbacks."""
    calls = f"{number} Python callback{'s' * (number > 1)}"
    return f"{calls}: compiled as {'calls' if number > 1 else 'a call'} of nothing, since the target is not here"


def _inner(equation: Any) -> list[Any]:
    """The jaxprs that an equation runs, those of a kernel left out."""
    if equation.primitive.name in _KERNELS:
        return []
    return list(bodies(equation))


class _Rewriting:
    """One pass over a program; a jaxpr that is shared stays shared."""

    def __init__(self, platform: str):
        self.platform = platform
        self._done: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        """A parameter of an equation with every jaxpr in it rewritten."""
        if hasattr(value, "eqns"):
            bare = opened(value)
            return self.jaxpr(bare) if bare is value else value.replace(jaxpr=self.jaxpr(bare))
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        return value

    def jaxpr(self, jaxpr: Any) -> Any:
        """A Jaxpr without callbacks and without their effects, which lowering would thread tokens for."""
        if id(jaxpr) not in self._done:
            equations = [new for equation in jaxpr.eqns for new in self.equation(equation)]
            new = jaxpr.replace(eqns=equations, effects=_others(jaxpr.effects))
            self._done[id(jaxpr)] = jaxpr, new  # the old one is kept: its id must not come again
        return self._done[id(jaxpr)][1]

    def equation(self, equation: Any) -> list[Any]:
        """What stands for an equation: itself with its jaxprs rewritten, or what a callback becomes."""
        if equation.primitive.name in CALLBACKS:
            return self.call(equation)
        if not _inner(equation):
            return [equation]
        params = {key: self.value(value) for key, value in equation.params.items()}
        return [equation.replace(params=params, effects=_others(equation.effects))]

    def call(self, equation: Any) -> list[Any]:
        """The equations of a callback: one, or none where nothing would be left of it."""
        results = tuple(variable.aval for variable in equation.outvars)
        primitive = _primitive() if self.platform in _GPUS else None
        if primitive is None and not results:
            return []
        if primitive is None:
            return [_made(equation, lambda *operands: _waiting(operands, results))]
        told = {
            "results": results,
            "partitioned": bool(equation.params.get("partitioned")),
            "acts": _acting() if CALLBACKS[equation.primitive.name] else frozenset(),
        }
        return [_made(equation, lambda *operands: primitive.bind(*map(_plain, operands), **told))]


def _made(equation: Any, function: Callable[..., Any]) -> Any:
    """An equation in the place of another that computes a function of its operands."""
    import jax

    avals = [operand.aval for operand in equation.invars]
    with jax.sharding.use_abstract_mesh(equation.ctx.cur_abstract_mesh):
        new = jax.make_jaxpr(jax.jit(function, inline=False))(*avals).jaxpr.eqns[-1]
    return new.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info, ctx=equation.ctx
    )


def _others(effects: Any) -> Any:
    """Effects without those of callbacks; a call that acts keeps jaxprs around it from being left out."""
    left = {each for each in effects if type(each).__name__ not in _EFFECTS}
    return type(effects)(left | _acting() if len(left) < len(effects) else left)


@functools.cache
def _acting() -> frozenset[Any]:
    """What jax says of a custom call that is made for what it does."""
    import jax

    traced = jax.make_jaxpr(lambda: jax.ffi.ffi_call("acts", (), has_side_effect=True)())()
    return frozenset(traced.jaxpr.effects)


def _plain(operand: Any) -> Any:
    """An operand as the numbers that it is: random keys are no type of the compiler."""
    import jax

    return jax.random.key_data(operand) if jax.dtypes.issubdtype(operand.dtype, jax.dtypes.prng_key) else operand


@functools.cache
def _primitive() -> Any:
    """A primitive that lowers to jax's own call on a GPU, of no function; None where this jax makes it another way."""
    import numpy as np
    from jax.extend import core
    from jax.interpreters import mlir

    try:  # nothing public says where a call runs among several devices
        from jax._src.callback import _callback_op_sharding
        from jax._src.ffi import build_ffi_lowering_function
        from jax._src.interpreters.mlir import set_sharding
    except ImportError:
        return None

    def lower(context: Any, *operands: Any, results: Any, partitioned: bool, acts: Any) -> Any:
        try:
            sharding = _callback_op_sharding(context.module_context.axis_context, None, context.avals_out)
        except NotImplementedError:  # by hand over some axes of the mesh, not all
            waiting = mlir.lower_fun(lambda *values: _waiting(values, results), multiple_results=True)
            return waiting(context, *operands)
        name = f"xla_ffi{'_partitioned' if partitioned else ''}_python_gpu_callback"
        call = build_ffi_lowering_function(name, has_side_effect=bool(acts))(context, *operands, index=np.uint64(0))
        if sharding is not None and not partitioned:
            set_sharding(context.module_context, call, sharding)
        return call.results

    primitive = core.Primitive("python_callback")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *_, results, partitioned, acts: (list(results), set(acts)))
    for platform in sorted(_GPUS):
        mlir.register_lowering(primitive, lower, platform=platform)
    return primitive


def _waiting(operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Zeros that are there once the operands are."""
    import jax

    zeros = [jax.numpy.zeros(result.shape, result.dtype) for result in results]
    return list(jax.lax.optimization_barrier((list(map(_plain, operands)), zeros))[1])
