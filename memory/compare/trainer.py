"""What this package asks of a trainer: the Protocol that commands and workers are written for.

The trainer of this repository implements it in train/plan/adapter.py. Another trainer that implements it gets
compare, levers, fit, front, names and report for its own configs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bytescope.memory.devices.targets import Target
from bytescope.memory.peak.runtime_overheads import LoopOverhead

if TYPE_CHECKING:
    from bytescope.train.generation.budget import Planned

Overrides = Sequence[tuple[str, str]]
# Begins the name of a config that a trainer makes from a folder of weights.
WEIGHTS = "hf:"


def called(config: str) -> str:
    """What reports and run directories call a config: a file's stem; of `hf:FOLDER` the folder's name, and of a
    snapshot in Hugging Face's cache, whose own is a digest, the model's."""
    if not config.startswith(WEIGHTS):
        return Path(config).stem
    folder = Path(os.path.abspath(os.path.expanduser(config.removeprefix(WEIGHTS))))
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name


class Trainer(Protocol):
    """A trainer, by the names of its configs. No method starts jax before it has to.

    Methods raise ValueError with an `exit_code` for what the user can mend: an unknown config, key or value.
    """

    def split_overrides(self, argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """(other arguments, overrides): takes `--config.KEY=VALUE` out of a command line."""

    def config(self, name: str, overrides: Overrides) -> dict[str, Any]:
        """The config as the trainer resolves it, dotted key -> value, without starting jax."""

    def check(self, name: str, overrides: Overrides) -> None:
        """Raises for a value in a config that could run on no target, before anything is compiled."""

    def program(self, name: str, overrides: Overrides, target: Target) -> Any:
        """The program of a config on a target's devices, nothing compiled yet.

        It has `compile_for_report(exact=...)` -> `memory.devices.compiler.Compilation`, `batch_shapes`,
        `calls_per_update`, `init()` and `mesh`.
        """

    def settled(self, program: Any) -> dict[str, Any]:
        """What a program made of its config: the kernel under `model.attention`, the mesh's axes without -1, `batch` in
        words, and `segments`: for each range of layers {"layers", "policy", "groups", "save", "offload"}, the last two
        the names of tensors."""

    def describe(self, name: str, overrides: Overrides, target: Target) -> dict[str, Any]:
        """What the search for the least recomputation needs of a config on a target; nothing is compiled.

        `block`: a `memory.remat.block_graph.Block` as JSON, of one micro-batch; `micro_steps`: micro-batches per call
        of the step; `policies`: policy -> names that it keeps, null where only the compiler knows, and `moving`: the
        same for policies that move tensors to host memory; `tokens_per_update`: over all devices.
        """

    def choices(self, program: Any) -> str:
        """What a program chose for its devices, and why, one choice per line."""

    def loop_overhead(self, program: Any) -> LoopOverhead:
        """What the trainer's loop keeps on a device besides a program's arguments, in bytes."""

    def run_peaks(self, program: Any) -> dict[str, int]:
        """Bytes on one device at the peak of each other program of a run, by name; compiles them."""

    def vocabulary(self) -> tuple[str, ...]:
        """Every checkpoint name of the trainer's model."""

    def names(self, name: str, overrides: Overrides, target: Target) -> tuple[Any, Callable[[str], tuple[str, int]]]:
        """(ClosedJaxpr of a config's gradient, a function from the name of a tensor to its sharding: as text, and the
        number of shards)."""

    def generation(self, name: str, overrides: Overrides, target: Target, asked: Any) -> Planned:
        """The memory of generating from a config's model on a target, its steps compiled; `asked`: the flags of
        train/generation/budget_arguments.py."""

    def configs(self) -> Mapping[str, str]:
        """Shipped config -> its purpose in one line."""

    def keys(self) -> Sequence[tuple[str, str, str]]:
        """(dotted key, default as the command line takes it, meaning) of every config key, in order."""

    def keys_named(self, name: str) -> Sequence[str]:
        """Returns the dotted config keys that have this name, or that other programs give it: `steps`, `lr`."""

    def policies(self) -> Mapping[str, str]:
        """Remat policy -> what a block keeps under it, in one line."""

    def sources(self) -> list[Path]:
        """Folders whose .py files decide what the step computes: a change there makes cached rows stale."""
