"""Applies memory savings one after the other, from a plain float32 step to the smallest step, and lists what each one
saves.

A stage is one saving. A level is a config with one stage and all stages before it. This module only arranges configs
and figures; it compiles nothing. The JSON has these keys (sizes are bytes on ONE device, null if unknown):

- `levels`: one object per level: `stage`, `title`, `flags` (the flags that this stage adds), `all_flags` (the flags to
  add to the command to run the level), `kernel` (the attention kernel), `why` (the effect and the cost of the saving),
  `change_bytes` (allocated bytes minus the allocated bytes of the level before) and the figures of
  `memory.compare.compare_rows.Row`.
- `left_out`: stage -> the reason why it has no level. Later stages are then compiled without it.
- `first_that_fits`: the stage of the first level that fits the target; null if no level fits.
- `config`, `given`, `target`, `versions`, `interrupted`: as in the JSON of a comparison.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.grids import as_text
from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.plan.lever_catalogue import SAVINGS, Saving

# The config keys of a step without any saving, from which every level starts. Keys that a config lacks are left out.
BASELINE = {
    "precision.preset": "fp32",
    "loss.kind": "full",
    "model.attention": "naive",
    "remat.policy": "none",
    "optimizer.name": "adamw",
    "remat.layers": "()",
    "remat.save": "()",
    "remat.offload": "()",
    "model.mlp_chunk": "0",
    "optimizer.fused_backward": "false",
    "optimizer.clip": "global",
    "offload.optimizer": "false",
    "offload.params": "false",
}

# STAGES: stage -> its saving. DEFAULT: the stages to apply if --savings is not given, in order. OPTIONAL: the others.
STAGES: dict[str, Saving] = {name: saving for name, saving in SAVINGS.items() if saving.title}
DEFAULT = (
    "fp32",
    "bf16",
    "loss",
    "attention",
    "selective",
    "full",
    "adamw_8bit",
    "fused_backward",
    "offload",
    "offload_params",
)
OPTIONAL = tuple(name for name in STAGES if name not in DEFAULT)

# Maximum length of a bar as a multiple of the target's limit, or of the shortest bar if there is no limit.
MAX_LIMITS, MAX_SHORTEST = 5, 12


@dataclasses.dataclass(frozen=True)
class Level:
    """A config to which one memory saving (a stage) and all earlier savings are applied.

    Attributes:
        stage: the name of the saving, a key of STAGES.
        adds: the config keys that the stage sets, dotted key -> text.
        keys: the config keys of this and all earlier stages, dotted key -> text.
        flags: the flags to add to the command to run this level.
        kernel: the attention kernel; "" if it is unknown.
        row: the bytes, predicted seconds and recomputed FLOPs of the compiled program.
    """

    stage: str
    adds: Mapping[str, str]
    keys: Mapping[str, str]
    flags: str = ""
    kernel: str = ""
    row: Row = dataclasses.field(default_factory=lambda: Row({}))

    @property
    def title(self) -> str:
        return STAGES[self.stage].title


def choose_stages(text: str | None) -> list[str]:
    """Returns the memory savings that `--savings=a,b,c` lists, or the default savings if `text` is None.

    Raises:
        ReportError: a saving does not exist or is listed twice.
    """
    names = list(DEFAULT) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STAGES:
            raise ReportError(f"--savings={text}: unknown saving {name!r}: {remedy_for(name, STAGES)}")
    if len(set(names)) < len(names):
        raise ReportError(f"--savings={text}: a saving is listed twice; list each saving once")
    return names


def build_levels(
    stages: Sequence[str], config: Mapping[str, Any], given: Iterable[str], refused: Mapping[str, str]
) -> tuple[list[Level], dict[str, str]]:
    """Returns the levels to compile, and stage -> reason for each stage that is left out.

    A stage is a memory saving. A level is the config with one stage and all stages before it.

    Args:
        stages: the stages in the order in which they are applied.
        config: the whole config, dotted key -> value.
        given: the keys that the command line sets. No level changes them, so a stage that sets one of them is left out.
            The stage fp32 is applied without these keys instead.
        refused: stage -> the reason why the config cannot run with it.
    """
    given, left_out, levels = set(given), dict[str, str](), list[Level]()
    keys = {key: text for key, text in BASELINE.items() if key in config and key not in given}
    for name in stages:
        adds = dict(STAGES[name].keys)
        missing = [key for key in adds if key not in config]
        fixed = [key for key in adds if key in given]
        if name in refused:
            left_out[name] = refused[name]
        elif missing:
            left_out[name] = f"the config has no key {missing[0]}"
        elif fixed and name != "fp32":
            left_out[name] = f"--config.{fixed[0]} is given, and no stage changes a given key"
        else:
            keys = keys | {key: text for key, text in adds.items() if key not in given}
            # The first level adds the baseline's keys too.
            levels.append(Level(name, adds if levels else dict(keys), keys))
    return levels, left_out


def changed_flags(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns command-line flags for the keys whose value differs from the config, quoted for a shell.

    Args:
        keys: the config keys that a level (a set of memory savings) sets, dotted key -> text.
        values: the resolved config with the keys.
        config: the resolved config without the keys.
    """
    return shlex.join(f"--config.{key}={as_text(values[key])}" for key in keys if values[key] != config[key])


def longest_bar(sizes: Sequence[int], limit: int | None) -> int:
    """Returns the number of bytes that the longest bar of a chart represents. The bars of larger levels are cut off, so
    that bars near the memory limit stay readable.

    Args:
        sizes: the allocated bytes of the levels, which are the bars.
        limit: the bytes available on a device of the target; None if unknown.
    """
    shortest = min(sizes, default=1)
    longest = max(MAX_LIMITS * limit, 2 * shortest) if limit else MAX_SHORTEST * shortest
    return max(1, min(max(sizes, default=1), longest))


def to_json(
    levels: Sequence[Level],
    left_out: Mapping[str, str],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
    config: str = "",
    given: str = "",
) -> dict[str, Any]:
    """Returns the levels (the config with one memory saving after another) and their bytes, FLOPs and seconds as JSON
    values. The module docstring lists the keys.

    Args:
        levels: the levels in order.
        left_out: memory saving -> why it is left out.
        target, versions: the devices, and library -> version.
        interrupted: whether the command ended early.
        config, given: the config and the flags as the command line gives them.
    """
    rows: list[dict[str, Any]] = []
    winner: str | None = None
    before: int | None = None
    for level in levels:
        size = level.row.allocated_bytes
        change = None if before is None or size is None else size - before
        before = size
        if winner is None and level.row.ok and level.row.fits:
            winner = level.stage
        row = dataclasses.asdict(level.row)
        row |= {"stage": level.stage, "title": level.title, "why": STAGES[level.stage].why, "kernel": level.kernel}
        row |= {"flags": flags_of(level), "all_flags": level.flags, "change_bytes": change}
        rows.append(row)
    return {
        "levels": rows,
        "left_out": dict(left_out),
        "first_that_fits": winner,
        "config": config,
        "given": given,
        "target": dict(target),
        "versions": dict(versions),
        "interrupted": interrupted,
    }


def flags_of(level: Level) -> str:
    """Returns the command-line flags that the memory saving of this level adds, quoted for a shell.

    The first level sets all keys of BASELINE, the config without savings. To keep its flags short, a key is not shown
    if its value is "false", or if neither its own saving nor a default saving changes it.
    """
    changed = set(STAGES[level.stage].keys)
    for stage in DEFAULT:
        changed.update(STAGES[stage].keys)
    added = [(key, text) for key, text in level.adds.items() if key in changed and text != "false"]
    return shlex.join(f"--config.{key}={text}" for key, text in added)
