"""Where a program goes: the meshes, shardings, types and contexts of its jaxpr, over another target's devices.

What says nothing of devices stays as it is, and what is shared stays shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.errors import ReportError, a_kind

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target


class TargetPlacement:
    """Where a program goes: shardings over devices of this process become those over the target's."""

    def __init__(self, target: Target):
        import jax

        self.target = target
        self.one_device = jax.sharding.SingleDeviceSharding(target.devices()[0])
        self.kind = jax.sharding.Mesh(target.devices()[:1], ("one",)).abstract_mesh.abstract_device
        self._meshes: dict[Any, Any] = {}
        self._seen: Any = None  # the first abstract mesh
        self._jaxprs: dict[int, Any] = {}
        self._contexts: dict[Any, Any] = {}

    @property
    def has_mesh(self) -> bool:
        """Whether anything that was moved lies on a mesh: then it tells the devices, and jax the rest."""
        return bool(self._meshes)

    def mesh(self, mesh: Any) -> Any:
        """The mesh of the same axes and sizes over the target's devices; one that is over them already, or that has no
        devices, as it is."""
        import jax

        if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
            return mesh
        if mesh not in self._meshes:
            devices = self._checked(mesh)
            same = set(mesh.devices.flat) == set(devices.flat)
            self._meshes[mesh] = (
                mesh if same else jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            )
        return self._meshes[mesh]

    def _checked(self, mesh: Any) -> Any:
        """The target's devices in the shape of a mesh. Raises ReportError for a mesh of another size."""
        if mesh.size != self.target.n_devices:
            axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
            raise ReportError(
                f"a mesh of {mesh.size} devices ({axes}) on {self.target.name}, which has "
                f"{self.target.n_devices}: change the mesh or the target"
            )
        return self.target.mesh_devices(*mesh.axis_sizes)

    def concrete(self, sharding: Any) -> Any:
        """A sharding of an argument or a result over the target's devices, that of an abstract mesh too; None stays."""
        mesh = getattr(sharding, "mesh", None)
        return self.sharding(sharding.update(mesh=self.over(mesh)) if is_abstract(mesh) else sharding)

    def over(self, mesh: Any) -> Any:
        """An abstract mesh with the target's devices. Raises ReportError where it has another number of them."""
        import jax

        devices = self._checked(mesh)
        own = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return self._meshes.setdefault(own, own)

    def sharding(self, sharding: Any) -> Any:
        """A sharding over the target's devices; None stays None."""
        import jax

        if isinstance(sharding, jax.sharding.NamedSharding) and is_abstract(sharding.mesh):
            return sharding.update(mesh=self.abstract(sharding.mesh))
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(
                self.mesh(sharding.mesh),
                sharding.spec,
                memory_kind=sharding.memory_kind if self.named(sharding) else None,
            )
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            return self.one_device
        if isinstance(sharding, jax.sharding.Sharding):
            raise ReportError(f"{a_kind(sharding)} cannot be moved to {self.target.name}: say it as a NamedSharding")
        return sharding

    @staticmethod
    def named(sharding: Any) -> bool:
        """Whether a memory kind was asked for: "device" is what every sharding has."""
        return sharding.memory_kind not in (None, "device", "unpinned_host")

    def context(self, mesh: Any) -> Any:
        """The mesh that the program was traced under, as a context over the target's devices."""
        import jax

        if getattr(mesh, "empty", True) and self._seen is not None and not self.has_mesh:
            mesh = self.over(self._seen)  # traced under an abstract mesh alone: over all of the target's devices
        moved = self.mesh(mesh)
        return contextlib.nullcontext() if getattr(moved, "empty", True) else jax.set_mesh(moved)

    def closed(self, jaxpr: Any) -> Any:
        """A ClosedJaxpr over the target's devices; its constants as they are on the host."""
        import jax
        import numpy as np
        from jax.extend import core

        consts = [
            np.asarray(const) if isinstance(const, jax.Array) and not _is_key(const) else const
            for const in jaxpr.consts
        ]
        return core.ClosedJaxpr(self.jaxpr(jaxpr.jaxpr), consts)

    def jaxpr(self, jaxpr: Any) -> Any:
        """A Jaxpr whose equations and types name the target's devices; one that is shared stays shared."""
        if id(jaxpr) not in self._jaxprs:
            own: dict[Any, Any] = {}

            def variables(found: Sequence[Any]) -> list[Any]:
                return [
                    own.setdefault(v, self.variable(v)) if isinstance(v, core.Var) else self.literal(v) for v in found
                ]

            from jax.extend import core

            equations = [
                equation.replace(
                    invars=variables(equation.invars),
                    outvars=variables(equation.outvars),
                    params={key: self.moved(value) for key, value in equation.params.items()},
                    ctx=self.traced_under(equation),
                )
                for equation in jaxpr.eqns
            ]
            moved = jaxpr.replace(
                invars=variables(jaxpr.invars),
                constvars=variables(jaxpr.constvars),
                eqns=equations,
                outvars=variables(jaxpr.outvars),
            )
            self._jaxprs[id(jaxpr)] = jaxpr, moved  # the old one is kept: its id must not come again
        return self._jaxprs[id(jaxpr)][1]

    def traced_under(self, equation: Any) -> Any:
        """What an equation was traced under, with the target's kind of device in its mesh."""
        import jax

        context, kernel = equation.ctx, equation.primitive.name == "pallas_call"
        mesh = moved = context.cur_abstract_mesh
        if not mesh.empty:
            moved = self.abstract(mesh)
        elif kernel and self.target.platform == "cuda":  # from jax 0.11 on Pallas asks which GPU a kernel is for
            moved = jax.sharding.AbstractMesh((), (), abstract_device=self.kind)
        if moved is mesh:
            return context
        key = context, kernel
        if key not in self._contexts:
            # jax makes these from the settings of the moment alone; a copy differs in the mesh.
            self._contexts[key] = other = object.__new__(type(context))
            for name in type(context).__slots__:
                if name != "__weakref__" and hasattr(context, name):
                    object.__setattr__(other, name, getattr(context, name))
            object.__setattr__(other, "cur_abstract_mesh", moved)
        return self._contexts[key]

    def variable(self, variable: Any) -> Any:
        """A variable whose type names the target's kind of device in the place of another."""
        aval = self.type(variable.aval)
        return variable if aval is variable.aval else type(variable)(aval)

    def literal(self, literal: Any) -> Any:
        """A literal, as `variable`; its value has the type a second time."""
        aval = self.type(literal.aval)
        if aval is literal.aval:
            return literal
        value = literal.val
        if hasattr(value, "aval"):  # a scalar or an array of jax's own; a new one has no mesh in its type
            value = value.copy() if hasattr(value, "copy") else type(value)(value, value.dtype)
        return type(literal)(value, aval)

    def type(self, aval: Any) -> Any:
        """A type that names the target's kind of device; the same object if nothing changes."""
        sharding = getattr(aval, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if sharding is None or mesh is None or mesh is (moved := self.abstract(mesh)):
            return aval
        return aval.update(sharding=sharding.update(mesh=moved))

    def abstract(self, mesh: Any) -> Any:
        """An abstract mesh with the target's kind of device, where it names one; the same object if nothing changes."""

        if not is_abstract(mesh) or mesh.empty:
            return mesh
        if self._seen is None and not mesh.manual_axes:
            self._seen = mesh
        if mesh.abstract_device is None:
            return mesh
        return mesh if mesh.abstract_device == self.kind else mesh.update(abstract_device=self.kind)

    def moved(self, value: Any) -> Any:
        """A parameter of an equation with every mesh, sharding and jaxpr in it moved."""
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
            return type(value)(map(self.moved, value))
        return value


def is_abstract(mesh: Any) -> bool:
    """Whether a mesh is one without devices."""
    import jax

    return isinstance(mesh, jax.sharding.AbstractMesh)


def _is_key(array: Any) -> bool:
    """Whether an array holds random keys, which numpy has no type for."""
    import jax

    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
