"""Converts config keys into rows of a comparison and into command-line flags, and remat policies and plans into config
keys.

A key is dotted, such as `remat.policy`. Its value is the text that the command line takes. This module compiles
nothing.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare.compare_rows import Row, flags
from bytescope.memory.compare.grids import CONFIG, as_text
from bytescope.memory.errors import ReportError
from bytescope.memory.view import elements
from bytescope.train.config_fields import FIELDS

if TYPE_CHECKING:
    from bytescope.memory.remat.remat_problem import LayerPlan

POLICY, SAVE, OFFLOAD, LAYERS = "remat.policy", "remat.save", "remat.offload", "remat.layers"


class ConfigRow(Row):
    """A row of the comparison `bytescope compare`: a config with changed keys, and the memory, FLOPs and time of its
    program. It can print the command that runs it."""

    how = tuple(key for key, field in FIELDS.items() if field.how)
    policy_key = POLICY
    policy_parts = (SAVE, OFFLOAD)

    @classmethod
    def flag(cls, key: str, value: Any) -> str:
        return f"--config.{key}={as_text(value)}"

    def command(self, source: str, target: str, given: str) -> str:
        """Returns the command that runs this row: `bytescope train` if the row fits, otherwise `bytescope report`.

        Args:
            source: the name of the config, unless the row has another.
            target: the name of the target.
            given: the command-line flags that all rows share.
        """
        fits = self.fits is not False and self.ok
        config = str(self.overrides.get(CONFIG, source))
        return elements.command(config, {"name": target}, given, flags(self), fits=fits)

    def value_text(self, key: str) -> str:
        """Returns the value of a key as it is shown to the user. The policy `custom` is followed by the names of the
        tensors that it saves and offloads."""
        text = super().value_text(key)
        if key != POLICY or text != "custom":
            return text
        save, offload = (as_text(self.overrides.get(name, ()))[1:-1] for name in (SAVE, OFFLOAD))
        if save:
            text += f"({save})"
        if offload:
            text += f"+offload({offload})"
        return text

    def names_a_policy(self) -> bool:
        """Returns whether all layers have one named remat policy. False if the config lists tensor names or ranges of
        layers."""
        layers = self.overrides.get(LAYERS) or "()"
        return as_text(layers) == "()" and self.overrides.get(POLICY) != "custom"


def policy_keys(text: str) -> dict[str, str]:
    """Parses a remat policy of the flag `--remat` and returns the config keys to set, dotted key -> text.

    The text is the name of a policy, or `custom(a,b)+offload(c)`, which lists the tensors to save and to offload.
    `custom` without parentheses uses the tensor names that the config sets.

    Raises:
        ReportError: the text has parentheses and is not in this form.
    """
    if "(" not in text and ")" not in text:
        return {POLICY: text}
    names = r"\(([\w\s,]*)\)"
    match = re.fullmatch(rf"custom(?:{names})?(?:\s*\+\s*offload{names})?", text.strip())
    groups = match.groups(default="") if match else ("", "")
    save, offload = ([name.strip() for name in group.split(",") if name.strip()] for group in groups)
    if not save and not offload:
        raise ReportError(
            f"{text} is not a remat policy: write custom(NAME,NAME), custom(NAME)+offload(NAME) or "
            "custom+offload(NAME); report --names lists the names"
        )
    return {POLICY: "custom", SAVE: f"({','.join(save)})", OFFLOAD: f"({','.join(offload)})"}


def remat_keys(policy: str, layers: str = "") -> dict[str, str]:
    """Returns the config keys that select a remat policy for all layers, dotted key -> text. Keys of other policies
    (tensor names to save or offload) are set to be empty.

    layers: ranges of layers that have other policies, such as "0-5:full,5-8:up"; "" for none.
    """
    return {SAVE: "()", OFFLOAD: "()", POLICY: policy, LAYERS: f"({layers})"}


def plan_keys(plan: LayerPlan) -> dict[str, str]:
    """Returns the config keys that select a plan of the remat search, dotted key -> text.

    A plan is one policy for all layers, or ranges of layers, each with the tensors that it saves.
    """
    if plan.policy:
        return remat_keys(plan.policy)
    stops = itertools.accumulate(count for _, count in plan.ranges)
    ranges = [f"{stop - count}-{stop}:{pattern.text()}" for stop, (pattern, count) in zip(stops, plan.ranges)]
    return remat_keys("full", ",".join(ranges))


def describe_keys(keys: Mapping[str, str]) -> str:
    """Returns config keys in a few words: keys and values as the command line takes them, then the remat policy, such
    as "batch.micro=4, full"."""
    others = [f"{key}={text}" for key, text in keys.items() if not key.startswith("remat.") and text not in ("()", "")]
    return ", ".join(filter(None, (*others, describe_remat(keys))))


def describe_remat(keys: Mapping[str, str]) -> str:
    """Returns the remat policy that config keys select, such as "full" or "29 x v+up, 3 x full"; "" if they select
    none."""
    ranges = keys.get(LAYERS, "")[1:-1]
    if not ranges:
        return ConfigRow(dict(keys)).value_text(POLICY)
    words = []
    for part in ranges.split(","):
        layers, _, pattern = part.partition(":")
        start, _, stop = layers.partition("-")
        words.append(f"{int(stop) - int(start)} x {pattern}")
    return ", ".join(words)


def policy_words(segments: Sequence[Mapping[str, Any]]) -> str:
    """Returns a description of the remat policies of a program's layers, such as "full" or "29 x v+up, 3 x v+up@host".

    segments: the ranges of layers, from `config_factory.settle`.
    """
    texts = []
    for segment in segments:
        policy = segment["policy"]
        if policy == "custom":
            names = [*segment["save"], *(f"{name}@host" for name in segment["offload"])]
            policy = "+".join(names) or "custom"
        texts.append(policy if len(segments) == 1 else f"{segment['layers']} x {policy}")
    return ", ".join(texts)


def given_flags(overrides: Iterable[tuple[str, str]]) -> str:
    """Returns overrides, pairs (dotted key, text), as command-line flags `--config.KEY=TEXT`, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in overrides)
