"""How the arrays of a program lie on its devices: a frozen record that leaves the parsed program as it was read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.buffers import Allocation, HloProgram
from bytescope.memory.hlo.mesh import ArgumentLayout, Axes
from bytescope.memory.hlo.module import Module
from bytescope.memory.peak.batch_axes import Activation, activations_of
from bytescope.memory.program.program_arguments import Arguments


@dataclasses.dataclass(frozen=True)
class PlacedProgram:
    """A parsed program with its mesh.

    Fields:
        program: as it was read.
        mesh: names and sizes of the mesh axes, () when unknown.
        layouts: entry parameter number -> how it lies on the mesh, {} when unknown.
        replicated: numbers of the entry parameters that are replicated on every device; None when unknown.
        activations: the global arrays of the forward pass that carry the batch, None without a jaxpr.
        jaxpr: the ClosedJaxpr of the whole program, None for one that was not traced.
        arguments: what its entry parameters are.
        facts: what its trainer says of it, None for a program of which nobody says more.
    """

    program: HloProgram
    mesh: Axes = ()
    layouts: Mapping[int, ArgumentLayout] = dataclasses.field(default_factory=dict)
    replicated: frozenset[int] | None = None
    activations: tuple[Activation, ...] | None = None
    jaxpr: Any = None
    arguments: Arguments = dataclasses.field(default_factory=Arguments)
    facts: ModelFacts | None = None

    @property
    def module(self) -> Module:
        """The compiled module."""
        return self.program.module

    @property
    def allocations(self) -> list[Allocation]:
        """The stretches of memory that the runtime takes."""
        return self.program.allocations


def place(
    program: HloProgram, compilation: Compilation, facts: ModelFacts | None, arguments: Arguments
) -> PlacedProgram:
    """A program with the mesh of its arguments, and the activations of its jaxpr.

    Args:
        compilation: where the program is from; its executable tells layouts, its jaxpr activations.
        facts: what its trainer says of it; its mesh is used if the arguments do not tell theirs.
        arguments: what its entry parameters are.
    """
    module = program.module
    axes, layouts = hlo_mesh.of_compiled(compilation.compiled) if compilation.compiled is not None else ((), ())
    matched = hlo_mesh.match(module, layouts)
    if facts and not axes and math.prod(facts.mesh.values()) == module.devices:
        axes = tuple(facts.mesh.items())
    replicated, activations = None, None
    if layouts:
        replicated = frozenset(number for number, layout in matched.items() if layout.local == layout.dims)
    if compilation.jaxpr is not None and module.devices > 1:
        known = arguments.roles
        batch = {
            layout.position: {dim: names for dim, names in enumerate(layout.spec) if names}
            for number, layout in matched.items()
            if known[number] == "batch"
        }
        activations = activations_of(compilation.jaxpr, batch)
    return PlacedProgram(program, axes, matched, replicated, activations, compilation.jaxpr, arguments, facts)
