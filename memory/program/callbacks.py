"""Lowers programs with Python callbacks for devices that are not present.

To lower a callback, jax needs the runtime of its platform, which a described device does not have. For a GPU, the
callback is replaced with the custom call that jax would make, with the same operands and results but without a
function, so that the compiled program has the same buffers. On other platforms, the results are replaced with zeros of
the same shapes that depend on the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from bytescope.memory.jaxprs import bodies, distinct_jaxprs, inner_jaxpr, with_parameters

# Primitive -> whether it has side effects, so that it is called even if nothing uses its results.
CALLBACKS = {"debug_callback": True, "debug_print": True, "io_callback": True, "pure_callback": False}
# Prints inside kernels are not callbacks.
_KERNELS = {"pallas_call"}
_EFFECTS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}
_GPUS = {"cuda", "rocm"}


def count(jaxpr: Any) -> int:
    """Returns the number of equations that call Python functions, such as `jax.pure_callback`, in a Jaxpr or
    ClosedJaxpr and its inner jaxprs. An inner jaxpr that is used several times is counted once."""
    number = 0
    for inside in distinct_jaxprs(jaxpr, _bodies_outside_kernels):
        number += sum(equation.primitive.name in CALLBACKS for equation in inside.eqns)
    return number


def without_runtime(closed: Any, platform: str) -> Any:
    """Replaces the Python callbacks in a ClosedJaxpr by calls that run no Python function, so that it can be lowered
    for devices that this machine does not have. Returns the new ClosedJaxpr; one without callbacks is returned
    unchanged.

    platform: jax's name of the devices' platform, such as "cuda".
    """
    return _CallbackRewriter(platform).rewrite_param(closed) if count(closed) else closed


def note(number: int) -> str:
    """Returns the report's note that `number` Python callbacks were compiled as empty calls."""
    if number == 1:
        return "1 Python callback: compiled as an empty call, because the target is not present"
    return f"{number} Python callbacks: compiled as empty calls, because the target is not present"


def _bodies_outside_kernels(equation: Any) -> list[Any]:
    return [] if equation.primitive.name in _KERNELS else list(bodies(equation))


class _CallbackRewriter:
    """Replaces the Python callbacks in one program's jaxprs by calls that run no Python function. If several equations
    share a jaxpr, they share its replacement.
    """

    def __init__(self, platform: str):
        self.platform = platform
        self._done: dict[int, Any] = {}

    def rewrite_param(self, value: Any) -> Any:
        if hasattr(value, "eqns"):
            bare = inner_jaxpr(value)
            return self.rewrite_jaxpr(bare) if bare is value else value.replace(jaxpr=self.rewrite_jaxpr(bare))
        if type(value) in (tuple, list):
            return type(value)(map(self.rewrite_param, value))
        return value

    def rewrite_jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) in self._done:
            return self._done[id(jaxpr)][1]
        equations = []
        for equation in jaxpr.eqns:
            if equation.primitive.name in CALLBACKS:
                equations += self.rewrite_callback(equation)
            elif _bodies_outside_kernels(equation):
                params = with_parameters(equation, lambda _, value: self.rewrite_param(value))
                equations.append(equation.replace(params=params, effects=_without_callback_effects(equation.effects)))
            else:
                equations.append(equation)
        # Lowering would add tokens for the effects of callbacks.
        rewritten = jaxpr.replace(eqns=equations, effects=_without_callback_effects(jaxpr.effects))
        self._done[id(jaxpr)] = jaxpr, rewritten  # keeps the old jaxpr, so that its id is not used again
        return rewritten

    def rewrite_callback(self, equation: Any) -> list[Any]:
        results = tuple(variable.aval for variable in equation.outvars)
        primitive = _gpu_callback_primitive() if self.platform in _GPUS else None
        if primitive is None and not results:
            return []
        if primitive is None:
            return [_replace_with_function(equation, lambda *operands: _zeros_after(operands, results))]
        params = {
            "results": results,
            "partitioned": bool(equation.params.get("partitioned")),
            "acts": _custom_call_effects() if CALLBACKS[equation.primitive.name] else frozenset(),
        }
        return [_replace_with_function(equation, lambda *operands: primitive.bind(*map(_key_data, operands), **params))]


def _replace_with_function(equation: Any, function: Callable[..., Any]) -> Any:
    import jax

    avals = [operand.aval for operand in equation.invars]
    with jax.sharding.use_abstract_mesh(equation.ctx.cur_abstract_mesh):
        new = jax.make_jaxpr(jax.jit(function, inline=False))(*avals).jaxpr.eqns[-1]
    return new.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info, ctx=equation.ctx
    )


def _without_callback_effects(effects: Any) -> Any:
    left = {each for each in effects if type(each).__name__ not in _EFFECTS}
    # Without any effect, jax would drop the custom calls.
    return type(effects)(left | _custom_call_effects() if len(left) < len(effects) else left)


@functools.cache
def _custom_call_effects() -> frozenset[Any]:
    import jax

    traced = jax.make_jaxpr(lambda: jax.ffi.ffi_call("acts", (), has_side_effect=True)())()
    return frozenset(traced.jaxpr.effects)


def _key_data(operand: Any) -> Any:
    import jax

    # The compiler has no type for random keys.
    return jax.random.key_data(operand) if jax.dtypes.issubdtype(operand.dtype, jax.dtypes.prng_key) else operand


@functools.cache
def _gpu_callback_primitive() -> Any:
    """Returns a primitive that lowers to the custom call of jax's GPU callbacks, but calls no Python function. Returns
    None if this version of jax lowers callbacks differently."""
    import numpy as np
    from jax.extend import core
    from jax.interpreters import mlir

    try:  # no public API sets the device on which a call runs
        from jax._src.callback import _callback_op_sharding
        from jax._src.ffi import build_ffi_lowering_function
        from jax._src.interpreters.mlir import set_sharding
    except ImportError:
        return None

    def lower(context: Any, *operands: Any, results: Any, partitioned: bool, acts: Any) -> Any:
        try:
            sharding = _callback_op_sharding(context.module_context.axis_context, None, context.avals_out)
        except NotImplementedError:  # a shard_map over some axes of the mesh, not all
            zeros = mlir.lower_fun(lambda *values: _zeros_after(values, results), multiple_results=True)
            return zeros(context, *operands)
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


def _zeros_after(operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    import jax

    zeros = [jax.numpy.zeros(result.shape, result.dtype) for result in results]
    # The barrier makes the zeros depend on the operands, so that the compiler keeps the operands.
    return list(jax.lax.optimization_barrier((list(map(_key_data, operands)), zeros))[1])
