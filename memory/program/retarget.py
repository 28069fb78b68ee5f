"""Lowers a traced step for a target that is not present, or that the step was not written for.

A jaxpr names devices in its shardings (of arguments, sharding constraints, shard_map and inner jits) and in the types
of its values. Shardings of devices of this process are moved: a mesh becomes a mesh of the same axes and sizes over
the target's devices. So the compiled program is exactly the target's program. Parts that name no device are not
changed, and shared parts stay shared.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.hlo.jax_types import LoweredStage, TracedStage
from bytescope.memory.jaxprs import parameters, with_parameters
from bytescope.memory.program import callbacks
from bytescope.memory.units import plural

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target


DEVICE = "device"


def moves(program: TracedStage, target: Target) -> bool:
    """Returns whether a `jax.stages.Traced` was traced for other devices than the target's. Its devices are those in
    the shardings of its arguments, or those of the meshes in its jaxpr if there are no shardings.
    """
    devices = set(devices_of(program))
    if not devices:
        for mesh in _meshes(program.jaxpr.jaxpr, {}):
            devices.update(mesh.devices.flat)
    return not devices <= set(target.devices()) if devices else target.is_described


def _meshes(jaxpr: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yields the device meshes that occur in the equations of a Jaxpr.

    seen: the jaxprs that were visited already, by id.
    """
    import jax

    if id(jaxpr) in seen:
        return
    seen[id(jaxpr)] = jaxpr
    leaves: list[Any] = []
    for equation in jaxpr.eqns:
        for value in parameters(equation).values():
            leaves += value if isinstance(value, (tuple, list)) else (value,)
    for leaf in leaves:
        mesh = leaf if isinstance(leaf, jax.sharding.Mesh) else getattr(leaf, "mesh", None)
        inside = getattr(leaf, "jaxpr", leaf)
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            yield mesh
        elif hasattr(inside, "eqns"):
            yield from _meshes(inside, seen)


def devices_of(program: TracedStage) -> list[Any]:
    """Returns the devices on which a `jax.stages.Traced` runs, according to the shardings of its arguments. Returns []
    if no sharding names devices."""
    devices: list[Any] = []
    for sharding in argument_shardings(program):
        if sharding is not None and not _is_abstract(_mesh_of(sharding)):
            devices += sharding._device_assignment
    return list(dict.fromkeys(devices))


def lowered_for(program: TracedStage, target: Target) -> LoweredStage:
    """Lowers a `jax.stages.Traced` for a target's devices. Returns a `jax.stages.Lowered`, whose arguments keep their
    names.

    Raises ReportError if the program's mesh and the target have different numbers of devices.
    """
    import jax
    from jax.extend import core

    params, placement = program._params, TargetPlacement(target)
    jaxpr = callbacks.without_runtime(program.jaxpr, target.platform) if target.is_described else program.jaxpr
    inside = placement.closed(jaxpr)
    moved = [placement.concrete(sharding) for sharding in argument_shardings(program)]
    context = placement.context(params["ctx_mesh"])
    if not placement.has_mesh and all(sharding is None or _is_abstract(_mesh_of(sharding)) for sharding in moved):
        moved = [placement.one_device if sharding is None else sharding for sharding in moved]
    leaves, host_shardings = [], []
    for own, sharding in zip(program._meta_tys_flat, moved):
        aval = own.aval
        # If host memory is given only in `in_shardings`, not in the argument's own sharding, the type of the argument
        # still says device memory.
        by_jit = _is_abstract(_mesh_of(sharding)) and aval.memory_space == jax.memory.Space.Device
        host_shardings.append(sharding if by_jit else None)
        own_sharding = None if by_jit else sharding
        leaves.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=own_sharding))
    args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
    options = {}
    if any(host_shardings):
        options["in_shardings"] = jax.tree.unflatten(program.in_tree, host_shardings)[0]
    results = [
        placement.concrete(sharding) if isinstance(sharding, jax.sharding.Sharding) else None
        for sharding in params["out_shardings"]
    ]
    if not leaves and not placement.has_mesh and not any(results):
        results = [placement.one_device] * len(results)

    def step(*args: Any, **kwargs: Any) -> Any:
        flat = core.jaxpr_as_fun(inside)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(program.out_tree, flat)

    step.__name__ = step.__qualname__ = program.fun_name
    vars(step)["__signature__"] = _signature(program)

    def is_donated(arg: Any) -> bool:
        flags = [info.donated for info in jax.tree.leaves(arg)]
        return bool(flags) and all(flags)

    positional, named = program.args_info
    names_devices = [not _is_abstract(_mesh_of(sharding)) for sharding in moved if sharding is not None]
    if names_devices and not any(names_devices):
        # No argument names the devices: the first mesh that was moved does, or one of a single device.
        one_device = jax.sharding.Mesh(target.devices()[:1], ("one",))
        context = jax.set_mesh(next(iter(placement.meshes.values()), one_device))
    with context:
        return jax.jit(
            step,
            out_shardings=jax.tree.unflatten(program.out_tree, results),
            donate_argnums=tuple(number for number, arg in enumerate(positional) if is_donated(arg)),
            donate_argnames=tuple(name for name, arg in named.items() if is_donated(arg)),
            keep_unused=params["keep_unused"],
            **options,
        ).lower(*args, **kwargs)


def argument_shardings(program: TracedStage) -> list[Any]:
    """Returns the sharding of each array among the arguments of a `jax.stages.Traced`; None for an array that jax may
    place."""
    import jax

    shardings: list[Any] = []
    for given, own in zip(program._params["in_shardings"], program._meta_tys_flat):
        if isinstance(given, jax.sharding.Sharding):  # else jax's marker for "not given"
            shardings.append(given)
        else:
            shardings.append(own.sharding if own.committed else None)
    return shardings


def _signature(program: TracedStage) -> inspect.Signature:
    """Returns the signature of the traced function, reconstructed from the argument names that jax stores."""
    import jax

    (args, kwargs), leaf_names = program.args_info, iter(program.jaxpr.jaxpr.debug_info.arg_names or ())
    names = []
    for number, arg in enumerate(args):
        own = [next(leaf_names, "") or "" for _ in jax.tree.leaves(arg)]
        root = re.match(r"[A-Za-z_]\w*(?=$|\[|\.)", own[0]) if own else None
        names.append(root[0] if root else f"args_{number}")
    if len({*names, *kwargs}) < len(names) + len(kwargs):  # all values of a parameter *args have the same name
        return inspect.Signature(
            [
                inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            ]
        )
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    )


def _asked_memory(sharding: Any) -> str | None:
    # Every sharding of present devices has a memory kind. These are defaults, which the program did not ask for.
    return None if sharding.memory_kind in (DEVICE, "unpinned_host") else sharding.memory_kind


def _mesh_of(sharding: Any) -> Any:
    return getattr(sharding, "mesh", None)


def _is_abstract(mesh: Any) -> bool:
    import jax

    return isinstance(mesh, jax.sharding.AbstractMesh)


class TargetPlacement:
    """Replaces the devices in meshes, shardings, array types, contexts and jaxprs by a target's devices."""

    def __init__(self, target: Target):
        import jax

        self.target = target
        self.one_device = jax.sharding.SingleDeviceSharding(target.devices()[0])
        self.kind = jax.sharding.Mesh(target.devices()[:1], ("one",)).abstract_mesh.abstract_device
        self.meshes: dict[Any, Any] = {}
        self._first_abstract: Any = None  # the program's first abstract mesh
        self._jaxprs: dict[int, Any] = {}
        self._contexts: dict[Any, Any] = {}

    @property
    def has_mesh(self) -> bool:
        """True if any sharding that was moved to the target has a mesh. The program's devices are then the devices of
        the mesh, and jax places values that have no sharding.
        """
        return bool(self.meshes)

    # ---- meshes and shardings

    def concrete(self, sharding: Any) -> Any:
        """Returns the sharding of an argument or result over the target's devices. An abstract mesh in it becomes a
        mesh of devices. None is returned unchanged."""
        mesh = getattr(sharding, "mesh", None)
        if _is_abstract(mesh):
            return self._in_memory(self._mesh_over_target(mesh), sharding.spec, _asked_memory(sharding))
        return self.sharding(sharding)

    def sharding(self, sharding: Any) -> Any:
        """Returns a sharding with its devices replaced by the target's devices. None is returned unchanged.

        Raises ReportError for a sharding that is neither a NamedSharding nor a SingleDeviceSharding.
        """
        import jax

        if isinstance(sharding, jax.sharding.NamedSharding):
            if _is_abstract(sharding.mesh):
                return sharding.update(mesh=self.abstract(sharding.mesh))
            return self._in_memory(self.mesh(sharding.mesh), sharding.spec, _asked_memory(sharding))
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            kind = _asked_memory(sharding)
            mesh = jax.sharding.Mesh(self.target.devices()[:1], ("one",))
            return self._in_memory(mesh, jax.sharding.PartitionSpec(), kind) if kind else self.one_device
        if isinstance(sharding, jax.sharding.Sharding):
            raise ReportError(
                f"{type_phrase(sharding)} cannot be placed on the devices of {self.target.name}: use a NamedSharding"
            )
        return sharding

    def _in_memory(self, mesh: Any, spec: Any, memory_kind: str | None) -> Any:
        import jax

        moved = jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind)
        if moved.memory_kind != memory_kind:
            # Described devices list no memories, so jax drops the memory kind of their shardings. An abstract mesh
            # keeps it.
            moved = jax.sharding.NamedSharding(mesh.abstract_mesh, spec, memory_kind=memory_kind)
        return moved

    def _fetching(self, operand: Any, place: Any) -> Any:
        """Returns the place to which a `device_put` equation moves an operand: a sharding, a memory or None. A sharding
        that fetches the operand from host memory names the device's memory, which is otherwise left out.
        """
        import jax

        on_host = getattr(operand.aval, "memory_space", None) == jax.memory.Space.Host
        if not on_host or not isinstance(place, jax.sharding.Sharding) or place.memory_kind is not None:
            return place
        if not isinstance(place, jax.sharding.NamedSharding):
            return jax.memory.Space.Device
        return self._in_memory(place.mesh, place.spec, DEVICE)

    def mesh(self, mesh: Any) -> Any:
        """Returns a mesh with the same axes and sizes over the target's devices. An empty or abstract mesh is returned
        unchanged."""
        import jax

        if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
            return mesh
        if mesh not in self.meshes:
            devices = self._mesh_devices(mesh)
            moved = mesh
            if set(mesh.devices.flat) != set(devices.flat):
                moved = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            self.meshes[mesh] = moved
        return self.meshes[mesh]

    def _mesh_over_target(self, mesh: Any) -> Any:
        import jax

        own = jax.sharding.Mesh(self._mesh_devices(mesh), mesh.axis_names, axis_types=mesh.axis_types)
        return self.meshes.setdefault(own, own)

    def _mesh_devices(self, mesh: Any) -> Any:
        if mesh.size != self.target.n_devices:
            axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
            raise ReportError(
                f"a mesh of {plural(mesh.size, 'device')} ({axes}) does not fit {self.target.name}, which has "
                f"{plural(self.target.n_devices, 'device')}: change the mesh or the target"
            )
        return self.target.mesh_devices(*mesh.axis_sizes)

    def abstract(self, mesh: Any) -> Any:
        """Returns an abstract mesh whose device kind, if it has one, is replaced by the target's device kind."""
        if not _is_abstract(mesh) or mesh.empty:
            return mesh
        if self._first_abstract is None and not mesh.manual_axes:
            self._first_abstract = mesh
        if mesh.abstract_device in (None, self.kind):
            return mesh
        return mesh.update(abstract_device=self.kind)

    def context(self, mesh: Any) -> Any:
        """Returns the context manager in which the program is lowered. It sets the mesh under which the program was
        traced, with the target's devices."""
        import jax

        if getattr(mesh, "empty", True) and self._first_abstract is not None and not self.has_mesh:
            mesh = self._mesh_over_target(self._first_abstract)  # traced under an abstract mesh only
        moved = self.mesh(mesh)
        return contextlib.nullcontext() if getattr(moved, "empty", True) else jax.set_mesh(moved)

    # ---- jaxprs

    def closed(self, jaxpr: Any) -> Any:
        """Returns a ClosedJaxpr with its devices replaced by the target's devices. Its constants become numpy arrays,
        except random keys."""
        import jax
        import numpy as np
        from jax.extend import core

        consts = []
        for const in jaxpr.consts:
            is_key = isinstance(const, jax.Array) and jax.dtypes.issubdtype(const.dtype, jax.dtypes.prng_key)
            consts.append(np.asarray(const) if isinstance(const, jax.Array) and not is_key else const)
        return core.ClosedJaxpr(self.jaxpr(jaxpr.jaxpr), consts)

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a Jaxpr with the devices in its equations and types replaced by the target's devices. A jaxpr that
        several equations share stays shared."""
        from jax.extend import core

        if id(jaxpr) in self._jaxprs:
            return self._jaxprs[id(jaxpr)][1]
        own: dict[Any, Any] = {}

        def atoms(given: Sequence[Any]) -> list[Any]:
            out = []
            for atom in given:
                if isinstance(atom, core.Var):
                    if atom not in own:
                        aval = self.type(atom.aval)
                        own[atom] = atom if aval is atom.aval else type(atom)(aval)
                    out.append(own[atom])
                else:
                    out.append(self.literal(atom))
            return out

        equations = []
        for equation in jaxpr.eqns:
            # Variables are moved before parameters, so that `context` uses the program's first abstract mesh.
            invars, outvars = atoms(equation.invars), atoms(equation.outvars)
            params = with_parameters(equation, lambda _, value: self.parameter(value), self.type)
            if equation.primitive.name == "device_put":
                params["devices"] = tuple(map(self._fetching, equation.invars, params["devices"]))
            context = self.equation_context(equation)
            equations.append(equation.replace(invars=invars, outvars=outvars, params=params, ctx=context))
        moved = jaxpr.replace(
            invars=atoms(jaxpr.invars),
            constvars=atoms(jaxpr.constvars),
            eqns=equations,
            outvars=atoms(jaxpr.outvars),
        )
        self._jaxprs[id(jaxpr)] = jaxpr, moved  # keeps the old jaxpr, so that its id is not used again
        return moved

    def literal(self, literal: Any) -> Any:
        """Returns a jaxpr literal (a constant in an equation) whose type has the target's device kind. If the value is
        a jax array, which has a type of its own, it is copied without the old device kind."""
        aval = self.type(literal.aval)
        if aval is literal.aval:
            return literal
        value = literal.val
        if hasattr(value, "aval"):  # a jax scalar or array; a new one has no mesh in its type
            value = value.copy() if hasattr(value, "copy") else type(value)(value, value.dtype)
        return type(literal)(value, aval)

    def type(self, aval: Any) -> Any:
        """Returns a type (aval) with the target's device kind. If nothing changes, returns the same object."""
        sharding = getattr(aval, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if sharding is None or mesh is None:
            return aval
        moved = self.abstract(mesh)
        return aval if moved is mesh else aval.update(sharding=sharding.update(mesh=moved))

    def equation_context(self, equation: Any) -> Any:
        """Returns the context in which an equation was traced, with the device kind of its mesh replaced by the
        target's device kind."""
        import jax

        context, kernel = equation.ctx, equation.primitive.name == "pallas_call"
        mesh = moved = context.cur_abstract_mesh
        if not mesh.empty:
            moved = self.abstract(mesh)
        elif kernel and self.target.platform == "cuda":  # since jax 0.11, Pallas reads the GPU of a kernel
            moved = jax.sharding.AbstractMesh((), (), abstract_device=self.kind)
        if moved is mesh:
            return context
        key = context, kernel
        if key not in self._contexts:
            # jax creates contexts only from its current settings, so this copies one with another mesh.
            self._contexts[key] = other = object.__new__(type(context))
            for name in type(context).__slots__:
                if name != "__weakref__" and hasattr(context, name):
                    object.__setattr__(other, name, getattr(context, name))
            object.__setattr__(other, "cur_abstract_mesh", moved)
        return self._contexts[key]

    def parameter(self, value: Any) -> Any:
        """Returns an equation's parameter with the devices in all its meshes, shardings and jaxprs replaced by the
        target's devices."""
        import jax
        from jax.extend import core

        if isinstance(value, jax.sharding.Mesh):
            return self.mesh(value)
        if isinstance(value, jax.sharding.AbstractMesh):
            return self.abstract(value)
        if isinstance(value, jax.sharding.Sharding):
            return self.sharding(value)
        if isinstance(value, core.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, core.Jaxpr):
            return self.jaxpr(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.parameter, value))
        return value
