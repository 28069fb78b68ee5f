"""Any step traced once and lowered for a target: for devices that are not here, or are not the ones it was written for.

A jaxpr says what is computed; where is said by shardings, in the arguments and inside of it (sharding constraints,
shard_map, inner jits). Those that name devices of this process are moved: a mesh becomes the mesh of the same axes and
sizes over the target's devices. The compiled program is then the target's own, to the byte.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.hlo.jax_types import LoweredStage, TracedStage
from bytescope.memory.program import callbacks
from bytescope.memory.program.place import TargetPlacement, is_abstract

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target


def moves(program: TracedStage, target: Target) -> bool:
    """Whether a `jax.stages.Traced` is for other devices than the target's: by its arguments, else by the meshes in
    it."""
    meshes = _meshes(program.jaxpr.jaxpr, {})
    devices = devices_of(program) or {device for mesh in meshes for device in mesh.devices.flat}
    return not set(devices) <= set(target.devices()) if devices else target.is_described


def _meshes(jaxpr: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The meshes that equations of a Jaxpr name devices by."""
    import jax

    if id(jaxpr) in seen:
        return
    seen[id(jaxpr)] = jaxpr
    leaves = [
        leaf
        for equation in jaxpr.eqns
        for value in equation.params.values()
        for leaf in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    for leaf in leaves:
        mesh = leaf if isinstance(leaf, jax.sharding.Mesh) else getattr(leaf, "mesh", None)
        inside = getattr(leaf, "jaxpr", leaf)
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            yield mesh
        elif hasattr(inside, "eqns"):
            yield from _meshes(inside, seen)


def devices_of(program: TracedStage) -> list[Any]:
    """The devices that a `jax.stages.Traced` is for by the shardings of its arguments; [] where they name none."""
    return list(dict.fromkeys(device for sharding in _shardings(program) for device in _devices(sharding)))


def _devices(sharding: Any) -> Sequence[Any]:
    """The devices of a sharding, () of none and of one over an abstract mesh."""
    if sharding is None or is_abstract(getattr(sharding, "mesh", None)):
        return ()
    return sharding._device_assignment


def lowered_for(program: TracedStage, target: Target) -> LoweredStage:
    """A `jax.stages.Traced` lowered for a target's devices, as a `jax.stages.Lowered`; arguments keep their names.

    Raises ReportError where the program's mesh has another number of devices than the target.
    """
    import jax

    params, place = program._params, TargetPlacement(target)
    jaxpr = callbacks.without_runtime(program.jaxpr, target.platform) if target.is_described else program.jaxpr
    inside, moved = place.closed(jaxpr), [place.concrete(sharding) for sharding in _shardings(program)]
    context = place.context(params["ctx_mesh"])
    if not place.has_mesh and all(sharding is None for sharding in moved):
        moved = [place.one_device] * len(moved)
    leaves = [
        jax.ShapeDtypeStruct(own.aval.shape, own.aval.dtype, weak_type=own.aval.weak_type, sharding=sharding)
        for own, sharding in zip(program._meta_tys_flat, moved)
    ]
    args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
    results = [place.concrete(sharding) if _is_given(sharding) else None for sharding in params["out_shardings"]]
    if not leaves and not place.has_mesh and not any(results):
        results = [place.one_device] * len(results)
    step = _as_function(program, inside)
    with context:
        return jax.jit(
            step,
            out_shardings=jax.tree.unflatten(program.out_tree, results),
            donate_argnums=_donated(program),
            keep_unused=params["keep_unused"],
        ).lower(*args, **kwargs)


def _shardings(program: TracedStage) -> list[Any]:
    """The sharding of each leaf of the arguments, None where it is anybody's choice."""

    def sharding(told: Any, own: Any) -> Any:
        if _is_given(told):
            return told
        return own.sharding if own.committed else None

    return list(map(sharding, program._params["in_shardings"], program._meta_tys_flat))


def _is_given(sharding: Any) -> bool:
    """Whether it is a sharding: not None, and not what jax has in the place of one that nobody gave."""
    import jax

    return isinstance(sharding, jax.sharding.Sharding)


def _donated(program: TracedStage) -> tuple[int, ...]:
    """Numbers of the positional arguments of which every leaf is donated."""
    import jax

    args, _ = program.args_info
    flags = [[info.donated for info in jax.tree.leaves(arg)] for arg in args]
    return tuple(number for number, own in enumerate(flags) if own and all(own))


def _as_function(program: TracedStage, inside: Any) -> Callable[..., Any]:
    """A function of the program's own arguments that computes a ClosedJaxpr, and is called as the program's was."""
    import jax
    from jax.extend import core

    def step(*args: Any, **kwargs: Any) -> Any:
        flat = core.jaxpr_as_fun(inside)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(program.out_tree, flat)

    step.__name__ = step.__qualname__ = program.fun_name
    vars(step)["__signature__"] = _signature(program)
    return step


def _signature(program: TracedStage) -> inspect.Signature:
    """The parameters of the traced function, by the names that jax keeps of its leaves."""
    import jax

    (args, kwargs), names = program.args_info, iter(program.jaxpr.jaxpr.debug_info.arg_names or ())
    found = []
    for number, arg in enumerate(args):
        told = [next(names, "") or "" for _ in jax.tree.leaves(arg)]
        root = re.match(r"[A-Za-z_]\w*(?=$|\[|\.)", told[0]) if told else None
        found.append(root[0] if root else f"args_{number}")
    if len({*found, *kwargs}) < len(found) + len(kwargs):  # *args: all leaves of all of them have its name
        return inspect.Signature(
            [
                inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            ]
        )
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in found]
        + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    )
