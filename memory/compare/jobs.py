"""The jobs of a search: a config with its overrides, resolved by the trainer and named for the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare import row_cache
from bytescope.memory.compare.worker_pool import Job
from bytescope.memory.config_keys import REMAT_POLICY
from bytescope.memory.seconds import rates

if TYPE_CHECKING:
    from bytescope.memory.compare.trainer import Trainer

AUTO = "auto"  # the remat policy that a search settles, by the rates of the target's devices


class Jobs:
    """Makes the jobs of one search: the versions and the trainer's sources are those at its beginning.

    A job is named by the key of its row in the cache, so two jobs of one name compile the same program.

    Args:
        versions: package -> version of what compiles, this environment's by default.
    """

    def __init__(self, trainer: Trainer, versions: Mapping[str, str] | None = None) -> None:
        from bytescope.memory.devices import compiler

        self._trainer = trainer
        self._versions = compiler.versions() if versions is None else versions
        self._sources = row_cache.source_digest(trainer.sources())
        self._choosing: str | None = None

    def resolve(self, config: str, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The whole config, dotted key -> value. Raises the trainer's errors for an unknown key or a wrong value."""
        return self._trainer.config(config, overrides)

    def check(self, config: str, overrides: Sequence[tuple[str, str]]) -> None:
        """Raises the trainer's errors for a value that no target could run."""
        self._trainer.check(config, overrides)

    def job(
        self,
        config: str,
        target: str,
        overrides: Sequence[tuple[str, str]],
        label: str = "",
        *,
        describe: bool = False,
        measure: bool = False,
    ) -> Job:
        """The job that compiles `config` with its overrides, pairs of (dotted key, text), for a target.

        Args:
            label: what people see while it compiles.
            describe: compile nothing; the answer is what a search has to know of the program's blocks.
            measure: run the step too, so that the row belongs to this machine.

        Raises the trainer's errors for an unknown key or a wrong value.
        """
        flat = self.resolve(config, overrides)
        choice = self._choice() if flat.get(REMAT_POLICY) == AUTO else ""
        name = row_cache.key(flat, target, self._versions, self._sources, measure, choice=choice)
        if describe:
            name += "-block"
        chosen = rates.chosen()
        return Job(config, target, tuple(overrides), {}, name, label, flat, describe, chosen and str(chosen))

    def _choice(self) -> str:
        """A digest of what settles a remat policy of `auto`: the modules that choose, and the rates chosen."""
        if self._choosing is None:
            self._choosing = row_cache.source_digest(self._trainer.sources(), choosing=True)
        return self._choosing + rates.digest()
