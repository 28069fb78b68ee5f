"""The table of adapters: the prefix of a program's name on the command line -> the adapter."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.program_factory import ProgramFactory
from bytescope.memory.errors import ReportError

# Prefix -> module of the adapter, whose `FACTORY` is the adapter.
ADAPTERS: Mapping[str, str] = {"maxtext": "bytescope.memory.adapters.maxtext"}


class TrainerFactory(ProgramFactory):
    """Makes the programs of a third-party trainer, such as MaxText, from the trainer's own configs. The adapter for a
    trainer is a subclass.

    In the overrides of a program, the key `config` has the name of the program, such as "maxtext:llama2-7b". All other
    keys are keys of the trainer or flags of XLA.

    Attributes:
        policy_key: the trainer's key of the remat policy.
        policies: the values of this key that `compare --remat=all` compares.
        batch_key: the trainer's key of the number of sequences on one device.
        scan_key: the trainer's key that runs the layers in a loop ("true") or unrolled ("false").
    """

    policy_key: str
    policies: Sequence[str]
    batch_key: str
    scan_key: str

    def keys_of_names(self, names: Collection[str], kept: Collection[str]) -> dict[str, str]:
        """Returns the trainer's keys of the remat policy that keeps the tensors `kept` on the device and
        recomputes all other tensors of the layers.

        names: the names of all tensors of the layers for which the trainer has a key (`names_with_keys`). kept: the
        names of the tensors to keep.
        """
        raise NotImplementedError

    def names_with_keys(self, names: Collection[str]) -> set[str]:
        """Returns those of `names` (checkpoint names of tensors) for which the trainer has a key that says whether the
        tensor is kept."""
        raise NotImplementedError


def is_adapted(name: str | None) -> bool:
    """Returns whether the name of a program, such as "maxtext:llama2-7b", begins with the prefix of an adapter."""
    prefix, colon, _ = (name or "").partition(":")
    return bool(colon) and prefix in ADAPTERS


def find_adapter(name: str) -> TrainerFactory:
    """Returns the adapter for the program `name`, for which `is_adapted` must be true."""
    factory: TrainerFactory = importlib.import_module(ADAPTERS[name.partition(":")[0]]).FACTORY
    return factory


def overrides_of(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Returns the overrides for an adapter: the name of the program under the key `config`, and the trainer's keys with
    their values as texts.

    settings: the words KEY=VALUE of the command line. Raises ReportError if a word has another form, or if a key is
    given twice.
    """
    overrides: dict[str, Any] = {CONFIG: name}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise ReportError(f"{word} is not a key of the trainer with its value: write KEY=VALUE")
        if key in overrides:
            raise ReportError(f"{key} is given twice, as {overrides[key]} and as {value}: leave one out")
        overrides[key] = value
    return overrides
