"""Runs eager JAX code without allocating its large arrays: shapes, dtypes and shardings instead of values.

jax sends each eager operation to the current trace. `AbstractTrace` is such a trace. An operation on small arrays is
computed, so that random keys, counters and schedules have their real values. An operation with a larger result is only
evaluated for its shape; its result is an `AbstractArray`. A script under this trace can initialize a model of any size.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core  # jax.extend has no Trace and no way to set the current one
from jax._src import mesh as mesh_lib
from jax._src.lax import lax
from jax.extend.core import jaxpr_as_fun

from bytescope.memory.jaxprs import distinct_jaxprs

# An operation is computed if its results have at most the first number of bytes, its program has at most the second
# number of equations, and no value inside the program has more bytes than the third number.
_SMALL_BYTES, _SMALL_PROGRAM, _SMALL_INTERMEDIATE = 2**16, 400, 2**20


class AbstractArray(core.Tracer):  # type: ignore[type-arg]  # jax gives the class no type arguments at run time
    """An array without values. Eager operations, jitted functions and isinstance(x, jax.Array) accept it.

    A conversion to a Python or numpy value returns zeros and is reported to the trace's `on_value`.
    """

    _trace: AbstractTrace
    aval: Any

    def __init__(self, trace: AbstractTrace, aval: Any, sharding: Any = None):
        if isinstance(sharding, jax.sharding.NamedSharding):  # as in the type of a jax array
            aval = core.update_aval_with_sharding(aval, sharding)
        super().__init__(trace, aval)
        self.given_sharding = sharding  # None: jax may place the array, as for an uncommitted array

    def _zeros(self) -> np.ndarray[Any, Any]:
        self._trace.on_value(self)
        if jax.dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key):
            raise TypeError("the bits of a random key are not known before the script runs")
        return np.zeros(self.aval.shape, self.aval.dtype)

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._zeros().astype(dtype or self.aval.dtype)

    def __bool__(self) -> bool:
        return bool(self._zeros())

    def __int__(self) -> int:
        return int(self._zeros())

    def __float__(self) -> float:
        return float(self._zeros())

    def __index__(self) -> int:
        return int(self._zeros())

    def __format__(self, spec: str) -> str:
        return format(self._zeros()[()], spec) if not self.aval.shape else repr(self)

    def item(self, *args: int) -> Any:
        """Returns 0 as a Python number of the array's kind, as numpy's `item` returns an element."""
        return self._zeros().item(*args)

    def tolist(self) -> Any:
        """Returns zeros in nested lists, as numpy's `tolist` returns the elements."""
        return self._zeros().tolist()

    @property
    def sharding(self) -> Any:
        """The array's sharding. If the array is not committed to a sharding: a sharding on the first device."""
        return self.given_sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])

    @property
    def committed(self) -> bool:
        """Whether the array is committed to its sharding. If False, jax may move the array to other devices."""
        return self.given_sharding is not None

    _committed = committed

    @property
    def is_fully_addressable(self) -> bool:
        """True, because all devices belong to this process."""
        return True

    @property
    def is_fully_replicated(self) -> bool:
        """True if each device has the whole array."""
        return self.sharding.is_fully_replicated

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, without its copies on several devices."""
        return _bytes_of(self.aval)

    def devices(self) -> set[Any]:
        """Returns the devices of the array's sharding."""
        return self.sharding.device_set

    def addressable_data(self, index: int) -> AbstractArray:
        """Returns an abstract array with the shape of one shard. All shards have this shape, so `index` is not used."""
        shape = self.sharding.shard_shape(self.aval.shape)
        return self._trace.array(shape, self.aval.dtype, None)

    @property
    def addressable_shards(self) -> list[Any]:
        """The shards of the array, one for each device. They have attributes of jax's `Shard`; `data` is an abstract
        array."""
        shards = []
        for number, (device, index) in enumerate(self.sharding.devices_indices_map(self.aval.shape).items()):
            part = self.addressable_data(number)
            shards.append(types.SimpleNamespace(device=device, index=index, replica_id=0, data=part))
        return shards

    global_shards = addressable_shards

    def block_until_ready(self) -> AbstractArray:
        """Returns the array, which has no values to wait for."""
        return self

    def copy_to_host_async(self) -> None:
        """Does nothing, because the array has no values."""

    def delete(self) -> None:
        """Does nothing, because the array has no memory."""

    def is_deleted(self) -> bool:
        """Returns False: an array without memory is never deleted."""
        return False


class AbstractTrace(core.Trace):
    """A jax trace under which eager operations return arrays without values (`AbstractArray`).

    on_value: function that is called with such an array when the code needs its values, for example in an `if`.
    """

    def __init__(self, on_value: Callable[[AbstractArray], None]):
        super().__init__()
        self.on_value = on_value

    def array(self, shape: Sequence[int], dtype: Any, sharding: Any) -> AbstractArray:
        """Returns an abstract array of a shape, dtype and sharding (None: not committed)."""
        return AbstractArray(self, core.ShapedArray(tuple(shape), dtype), sharding)

    def is_current(self) -> bool:
        """Returns whether eager code runs under this trace, outside of every function that jax traces."""
        return core.trace_ctx.trace is self

    def current(self) -> Any:
        """Returns a context manager inside which eager code runs under this trace."""
        return core.set_current_trace(self)

    def stage_value(self, val: Any) -> Any:
        """Returns `val` unchanged."""
        return val

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: Any, /) -> Any:
        """Runs an operation. If all arguments have values and the results are small, returns jax's results. Otherwise
        returns abstract arrays with the shapes, dtypes and shardings of the results. params: the operation's
        parameters."""
        with core.set_current_trace(core.eval_trace):
            avals, _ = primitive.abstract_eval(*(core.typeof(arg) for arg in args), **params)
            avals = list(avals) if primitive.multiple_results else [avals]
            if not any(isinstance(arg, AbstractArray) for arg in args) and _is_small(avals, params):
                return core.eval_trace.process_primitive(primitive, args, params)
            shardings = _result_shardings(primitive, args, params, avals)
        results = [AbstractArray(self, aval, sharding) for aval, sharding in zip(avals, shardings)]
        return results if primitive.multiple_results else results[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        """Calls `fun` with the arguments `tracers`, operation by operation under this trace."""
        with self.current():
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        """Calls `fun` with the arguments `tracers`, operation by operation under this trace."""
        with self.current():
            return fun.call_wrapped(*tracers)


@contextlib.contextmanager
def zeros_like_sharded() -> Iterator[None]:
    """Context manager in which `jnp.zeros_like` of an abstract array keeps the array's sharding. jax keeps the sharding
    of its own arrays, but not of tracers."""
    real = lax.full_like

    def full_like(x: Any, fill_value: Any, dtype: Any = None, shape: Any = None, sharding: Any = None) -> Any:
        keeps = isinstance(x, AbstractArray) and sharding is None and shape in (None, x.aval.shape)
        if keeps and x.given_sharding is not None and x._trace.is_current():
            return x._trace.array(x.aval.shape, jax.dtypes.canonicalize_dtype(dtype or x.aval.dtype), x.given_sharding)
        return real(x, fill_value, dtype, shape, sharding)

    lax.full_like = jax.lax.full_like = full_like
    try:
        yield
    finally:
        lax.full_like = jax.lax.full_like = real


def outside_traces() -> Any:
    """Returns a context manager inside which jax computes eager code as usual, without an `AbstractTrace`."""
    return core.set_current_trace(core.eval_trace)


def spec_of(value: Any) -> Any:
    """Returns the ShapeDtypeStruct of an array, with the array's sharding if the array is committed. Returns other
    values unchanged."""
    if isinstance(value, AbstractArray):
        aval, sharding = value.aval, value.given_sharding
    elif isinstance(value, jax.Array) and not isinstance(value, core.Tracer):
        aval, sharding = core.typeof(value), value.sharding if value.committed else None
    else:
        return value
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=sharding)


def _bytes_of(aval: Any) -> int:
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


def _is_small(avals: Sequence[Any], params: Any) -> bool:
    if sum(map(_bytes_of, avals)) > _SMALL_BYTES:
        return False
    equations = 0
    for body in _bodies(params):
        for inner in distinct_jaxprs(body):
            equations += len(inner.eqns)
            for equation in inner.eqns:
                if any(_bytes_of(result.aval) > _SMALL_INTERMEDIATE for result in equation.outvars):
                    return False
    return equations <= _SMALL_PROGRAM


def _bodies(params: Any) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield getattr(item, "jaxpr", item)


def _result_shardings(primitive: Any, args: Sequence[Any], params: Any, avals: Sequence[Any]) -> list[Any]:
    """Returns the sharding of each result of an operation; None for a result that is not committed to devices. params:
    the operation's parameters. avals: the types of the results."""
    if primitive.name == "device_put":
        placed = []
        for arg, device in zip(args, params["devices"]):
            if isinstance(device, jax.Device):
                device = jax.sharding.SingleDeviceSharding(device)
            is_sharding = isinstance(device, jax.sharding.Sharding)
            placed.append(device if is_sharding else getattr(arg, "given_sharding", None))
        return placed
    shardings = [_committed_sharding(arg) for arg in args]
    if primitive.name == "sharding_constraint":
        return [params["sharding"]]
    given = [sharding for sharding in shardings if sharding is not None]
    if any(_explicit_spec(aval) is not None for aval in avals):  # the types of the results have their shardings
        mesh = _mesh_of(given[0]) if given else mesh_lib.get_concrete_mesh()
        specs = [_explicit_spec(aval) for aval in avals]
        return [None if spec is None else jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    if "out_shardings" in params:
        wanted = [s if isinstance(s, jax.sharding.Sharding) else None for s in params["out_shardings"]]
        over_mesh = any(s.num_devices > 1 for s in given) or _has_constraint(params["jaxpr"].jaxpr)
        if all(s is not None for s in wanted) or not over_mesh:
            return [w or (given[0] if given else None) for w in wanted]
        return _compiled_shardings(args, shardings, params, wanted)
    several = [sharding for sharding in given if sharding.num_devices > 1]
    if not several:
        return [given[0] if given else None] * len(avals)
    # An eager operation over several devices: a result of an argument's shape is sharded like the argument.
    found = []
    for aval in avals:
        alike = [s for arg, s in zip(args, shardings) if s in several and np.shape(arg) == aval.shape]
        found.append(alike[0] if alike else jax.sharding.NamedSharding(_mesh_of(several[0]), jax.P()))
    return found


def _explicit_spec(aval: Any) -> Any:
    sharding = getattr(aval, "sharding", None)
    return sharding.spec if sharding is not None and sharding.mesh._any_axis_explicit else None


def _committed_sharding(arg: Any) -> Any:
    if isinstance(arg, AbstractArray):
        return arg.given_sharding
    return arg.sharding if isinstance(arg, jax.Array) and arg.committed else None


def _mesh_of(sharding: Any) -> Any:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh
    return jax.sharding.Mesh(np.array(sorted(sharding.device_set, key=lambda device: device.id)), ("devices",))


def _has_constraint(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in ("sharding_constraint", "shard_map")
        for inner in distinct_jaxprs(jaxpr)
        for equation in inner.eqns
    )


def _compiled_shardings(args: Sequence[Any], shardings: Sequence[Any], params: Any, wanted: Sequence[Any]) -> list[Any]:
    """Compiles a jitted function for the CPU devices and returns the shardings of its results. No array is allocated.

    args: the arguments of the function, with the `shardings` that they are committed to (None: not committed). params:
    the parameters of jax's jit primitive, with the function's jaxpr. wanted: the sharding that the caller asks for each
    result; None if XLA chooses the sharding.
    """
    specs = []
    for arg, sharding in zip(args, shardings):
        aval = core.typeof(arg)
        specs.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))
    function = jax.jit(jaxpr_as_fun(params["jaxpr"]), out_shardings=list(wanted))
    compiled = function.lower(*specs).compile()
    return list(jax.tree.leaves(compiled.output_shardings, is_leaf=lambda s: isinstance(s, jax.sharding.Sharding)))
