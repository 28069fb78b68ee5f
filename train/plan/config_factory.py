"""The trainer of this repository as `memory.compare.trainer.Trainer`, for the commands and workers of `memory`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare.trainer import Overrides
from bytescope.memory.errors import ReportError
from bytescope.train import config as configs

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target
    from bytescope.train.generation.budget import Planned
    from bytescope.memory.peak.runtime_overheads import LoopOverhead
    from bytescope.train.program import Program


class Adapter:
    """Implements the Protocol, which explains each method. None starts jax before it has to; errors of the config are
    raised as they are, with their exit codes."""

    def split_overrides(self, argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """See `Trainer.split_overrides`."""
        return configs.split_overrides(argv)

    def config(self, name: str, overrides: Overrides) -> dict[str, Any]:
        """See `Trainer.config`."""
        return configs.flatten(configs.load(name, overrides))

    def check(self, name: str, overrides: Overrides) -> None:
        """See `Trainer.check`."""
        from bytescope.train.checks import check_without_devices

        try:
            check_without_devices(configs.load(name, overrides))
        except ValueError as error:
            if hasattr(error, "exit_code"):
                raise
            raise ReportError(" ".join(str(error).split())) from error

    def program(self, name: str, overrides: Overrides, target: Target) -> Program:
        """See `Trainer.program`."""
        from bytescope.train.plan.remat_auto import settled_program

        config = configs.load(name, overrides)
        try:
            return settled_program(config, target.devices())
        except ValueError as error:  # a config that cannot run there; the message says what to change
            if hasattr(error, "exit_code"):
                raise
            raise ReportError(" ".join(str(error).split())) from error

    def settled(self, program: Program) -> dict[str, Any]:
        """See `Trainer.settled`."""
        from bytescope.memory.config_keys import MESH, MODEL_ATTENTION
        from bytescope.model.remat.policies import POLICIES

        plan = program.remat
        segments = []
        for segment in plan.segments(program.model.n_layers):
            moved = segment.policy.moved
            policy = segment.name if segment.name in POLICIES else "custom"
            segments.append(
                {
                    "layers": segment.stop - segment.start,
                    "policy": policy,
                    "groups": segment.groups,
                    "save": [name for name in segment.policy.names if name not in moved],
                    "offload": list(moved),
                }
            )
        mesh = {MESH + axis: size for axis, size in program.mesh.shape.items()}
        return {MODEL_ATTENTION: program.kernel[0], "batch": str(program.batch), **mesh, "segments": segments}

    def describe(self, name: str, overrides: Overrides, target: Target) -> dict[str, Any]:
        """See `Trainer.describe`."""
        from bytescope.memory.compare.worker import tokens_of
        from bytescope.memory.config_keys import MODEL_SCAN
        from bytescope.train.plan.block_description import describe_block, most_ranges
        from bytescope.train.plan.remat_auto import fixed_policies

        program = self.program(name, (*overrides, (MODEL_SCAN, "true")), target)
        micro_steps = program.batch.accumulation if program.scanned else 1
        return {
            "block": dataclasses.asdict(describe_block(program)),
            "micro_steps": micro_steps,
            "ranges": most_ranges(program),
            "policies": fixed_policies(),
            "moving": fixed_policies(moving=True),
            "tokens_per_update": tokens_of(program),
        }

    def choices(self, program: Program) -> str:
        """See `Trainer.choices`."""
        (kernel, why), (matmul, how) = program.kernel, program.matmul
        return f"attention {kernel} ({why})\nproducts {matmul} ({how})"

    def loop_overhead(self, program: Program) -> LoopOverhead:
        """See `Trainer.loop_overhead`."""
        from bytescope.train.plan.run_peak import loop_overhead

        return loop_overhead(program)

    def run_peaks(self, program: Program) -> dict[str, int]:
        """See `Trainer.run_peaks`."""
        from bytescope.train.plan.run_peak import peaks

        return peaks(program)

    def vocabulary(self) -> tuple[str, ...]:
        """See `Trainer.vocabulary`."""
        from bytescope.model.names import NAMES

        return tuple(NAMES)

    def names(self, name: str, overrides: Overrides, target: Target) -> tuple[Any, Callable[[str], tuple[str, int]]]:
        """See `Trainer.names`."""
        from bytescope.model.names import NAMES
        from bytescope.train.parallel.axes import activation_axes
        from bytescope.train.plan.block_description import trace_gradient

        program = self.program(name, overrides, target)

        def sharding(tensor: str) -> tuple[str, int]:
            letters = NAMES[tensor][0]
            dims = program.layout.split(activation_axes(letters))
            text = ", ".join(f"{letter} {' x '.join(dim)}" for letter, dim in zip(letters, dims) if dim)
            return text or "replicated", math.prod(program.mesh.shape[axis] for dim in dims for axis in dim)

        return trace_gradient(program), sharding

    def generation(self, name: str, overrides: Overrides, target: Target, asked: Any) -> Planned:
        """See `Trainer.generation`."""
        from bytescope.train.generation.opened import plan

        return plan(name, configs.load(name, overrides), target, asked)

    def configs(self) -> Mapping[str, str]:
        """See `Trainer.configs`."""
        return configs.purposes()

    def keys(self) -> list[tuple[str, str, str]]:
        """See `Trainer.keys`."""
        return configs.describe_keys()

    def keys_named(self, name: str) -> Sequence[str]:
        """See `Trainer.keys_named`."""
        return configs.keys_named(name)

    def policies(self) -> Mapping[str, str]:
        """See `Trainer.policies`."""
        from bytescope.model.remat.policies import AUTO, POLICIES

        special = {
            "custom": "the names of remat.save kept, those of remat.offload in pinned host memory",
            AUTO: "the least recomputation that fits remat.budget, chosen by name and range of layers",
        }
        return {**{name: row.summary for name, row in POLICIES.items() if row}, **special}

    def sources(self) -> list[Path]:
        """See `Trainer.sources`."""
        found = (importlib.util.find_spec(package) for package in ("bytescope.model", "bytescope.train"))
        return [Path(folder) for spec in found if spec for folder in spec.submodule_search_locations or ()]
