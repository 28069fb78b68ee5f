"""Config keys as text: rows of a comparison, flags of a command line, and the remat keys of a policy or a plan. Pure.

A key is dotted, such as `remat.policy`; its value is the text that the command line takes.
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

if TYPE_CHECKING:
    from bytescope.memory.remat.remat_problem import LayerPlan

POLICY, SAVE, OFFLOAD, LAYERS = "remat.policy", "remat.save", "remat.offload", "remat.layers"


class ConfigRow(Row):
    """A row whose overrides are keys of a config."""

    how = ("remat.", "mesh.", "loss.", "precision.", "model.scan", "model.attention")
    policy_key = POLICY
    policy_parts = (SAVE, OFFLOAD)

    @classmethod
    def flag(cls, key: str, value: Any) -> str:
        """The flag that gives a key this value, not quoted."""
        return f"--{key}={value}" if key == CONFIG else f"--config.{key}={as_text(value)}"

    def command(self, source: str, target: str, given: str) -> str:
        """The command that runs this row: it trains where the row fits, else it makes its report."""
        fits = self.fits is not False and self.ok
        return elements.command(source, {"name": target}, given, flags(self), fits=fits)

    def value_text(self, key: str) -> str:
        """The value of a key as people read it; the policy `custom` is shown with the names that it saves and
        offloads."""
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
        """Returns whether all layers are under one named policy, not under listed names or ranges of layers."""
        layers = self.overrides.get(LAYERS) or "()"
        return as_text(layers) == "()" and self.overrides.get(POLICY) != "custom"


def policy_keys(text: str) -> dict[str, str]:
    """A policy of --remat as config keys: `custom(a,b)+offload(c)` names what it saves and what it offloads.

    Anything without parentheses is the name of a policy; `custom` alone takes its names from the config.
    Raises ReportError for parentheses anywhere else.
    """
    if "(" not in text and ")" not in text:
        return {POLICY: text}
    names = r"\(([\w\s,]*)\)"
    match = re.fullmatch(rf"custom(?:{names})?(?:\s*\+\s*offload{names})?", text.strip())
    groups = match.groups(default="") if match else ("", "")
    save, offload = ([name.strip() for name in group.split(",") if name.strip()] for group in groups)
    if not save and not offload:
        raise ReportError(
            f"{text}: write custom(NAME,NAME), custom(NAME)+offload(NAME) or custom+offload(NAME); "
            "bytescope names lists the names"
        )
    return {POLICY: "custom", SAVE: f"({','.join(save)})", OFFLOAD: f"({','.join(offload)})"}


def remat_keys(policy: str, layers: str = "") -> dict[str, str]:
    """Returns the keys that put all layers under `policy`, and ranges of layers under others (`layers`, such as
    "0-5:full,5-8:up"). The keys that contradict these are cleared."""
    return {SAVE: "()", OFFLOAD: "()", POLICY: policy, LAYERS: f"({layers})"}


def plan_keys(plan: LayerPlan) -> dict[str, str]:
    """Returns the keys of a plan of the remat search: one policy, or ranges of layers with the names they keep."""
    if plan.policy:
        return remat_keys(plan.policy)
    stops = itertools.accumulate(count for _, count in plan.ranges)
    ranges = [f"{stop - count}-{stop}:{pattern.text()}" for stop, (pattern, count) in zip(stops, plan.ranges)]
    return remat_keys("full", ",".join(ranges))


def policy_words(segments: Sequence[Mapping[str, Any]]) -> str:
    """What the layers of a program keep, in words: "full", or "29 x v+up, 3 x v+up@host".

    segments: those of `config_factory.settled`.
    """

    def kept(segment: Mapping[str, Any]) -> str:
        if segment["policy"] != "custom":
            return segment["policy"]
        return "+".join((*segment["save"], *(f"{name}@host" for name in segment["offload"]))) or "custom"

    if len(segments) == 1:
        return kept(segments[0])
    return ", ".join(f"{segment['layers']} x {kept(segment)}" for segment in segments)


def given_flags(overrides: Iterable[tuple[str, str]]) -> str:
    """The keys of a command line as its flags again, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in overrides)
