"""The program of another trainer, such as maxtext:llama2-7b, as a subject."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from bytescope.memory.compare import grids
from bytescope.memory.devices.xla_flags import parse_flags
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Description
from bytescope.memory.subjects.subject import Subject

if TYPE_CHECKING:
    from bytescope.memory.adapters.trainers import TrainerFactory
    from bytescope.memory.compare.prepared_program import PreparedProgram

_OTHER = "a program of another trainer: leave it out"


class TrainerSubject(Subject):
    """A program that an adapter makes from the configs of another trainer, whose keys are the keys."""

    kind = "trainer"
    is_a = "a program of another trainer"
    has = ("program", "report", "variants", "fit")
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--formulas", "--run", "--generate", "compare --measure"), _OTHER),
        **{
            f"fit --{flag}": _OTHER
            for flag in ("batch-tokens", "vary", "lora", "measure", "jobs", "no-cache", "only-names")
        },
    }
    parts: ClassVar[Mapping[str, str]] = {"fit": "memory.commands.fit_adapter"}

    def program(self, target: str) -> PreparedProgram:
        """Returns the trainer's own step, with its keys, for a target."""
        from bytescope.memory.subjects.subject import with_program_host_memory

        factory, options = self._adapter(), dict(parse_flags(self.xla))
        program = factory(self.overrides(), self.target_of(factory, target))
        if options:
            program = dataclasses.replace(program, compile=functools.partial(program.compile, options))
        words = [f"{key}={value}" for key, value in self.keys]
        return dataclasses.replace(described(program, words), complete=with_program_host_memory)

    def target_of(self, factory: TrainerFactory, target: str) -> Any:
        """Returns the target of a name, with the trainer's fraction of the memory."""
        from bytescope.memory.devices import targets

        return targets.parse(target, factory.memory_fraction)

    def factory(self, target: str) -> TrainerFactory:
        """Returns the trainer's adapter."""
        self.start(target)
        return self._adapter()

    def _adapter(self) -> TrainerFactory:
        from bytescope.memory.adapters.trainers import find_adapter

        return find_adapter(self.name)

    def fixed(self) -> dict[str, Any]:
        """Returns the options of XLA, the name of the program under the key `config`, and the trainer's keys."""
        return {**dict(parse_flags(self.xla)), **self.overrides()}

    def overrides(self) -> dict[str, Any]:
        """Returns the name of the program under the key `config`, and the trainer's keys with their values as text.

        Raises ReportError if a key has a dot, or is given twice.
        """
        from bytescope.memory.adapters.trainers import overrides_of

        return overrides_of(self.name, [f"{key}={value}" for key, value in self.keys])

    def policies(self, text: str) -> list[tuple[str, list[str]]]:
        """Returns the trainer's key of the remat policy, and the policies: all that need no other keys for "all".

        Raises ReportError if a policy is empty.
        """
        adapter = self._adapter()
        policies = list(adapter.policies) if text == "all" else grids.split_values(text)
        if not all(policies):
            raise ReportError(f"--remat={text} has an empty policy: write --remat=P1,P2, or --remat=all")
        return [(adapter.policy_key, policies)]


def described(program: PreparedProgram, words: Sequence[str]) -> PreparedProgram:
    """Returns a trainer's program with its description, which its report contains.

    words: the trainer's keys that the command line or a search sets, as KEY=VALUE.
    """

    def describe(model_flops: int) -> Description:
        return Description(
            name=program.name,
            changes=tuple(words),
            batch=program.batch,
            policy=program.policy,
            tokens=program.tokens_per_update or 0,
            calls=program.calls_per_update,
            model_flops=model_flops,
        )

    return dataclasses.replace(program, describe=describe)
