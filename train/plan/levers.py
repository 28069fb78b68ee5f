"""What each memory saving saves, in turn: from a plain float32 step to the smallest, one on top of the other. Pure.

A stage is a saving; a level is a stage on top of all stages before it. The JSON has these keys (sizes are bytes on ONE
device, null if unknown):

- `levels`: one object per level: `stage`, `title`, `flags` (what this stage adds), `all_flags` (what to add to the
  command to run the level), `kernel` (of attention), `why` (what the saving does and what it costs), `change_bytes`
  (allocated, compared with the level before) and the figures of `memory.compare.compare_rows.Row`.
- `left_out`: stage -> why it has no level; later stages do not build on it.
- `first_that_fits`: the stage of the first level that fits the target; null for none.
- `config`, `given`, `target`, `versions`, `interrupted`: as in a comparison.
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

# The keys that every level starts from: no saving at all. Keys that a config does not have are left out.
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

# Stage -> its saving. DEFAULT: the stages without --savings, in order.
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
BEYOND = tuple(name for name in STAGES if name not in DEFAULT)

# No bar is longer than so many limits of the target, or without a limit than so many times the shortest bar.
MAX_LIMITS, MAX_TIMES = 5, 12


@dataclasses.dataclass(frozen=True)
class Level:
    """One stage on top of all stages before it.

    Fields:
        stage: a key of STAGES. adds: the keys that it sets. keys: all keys set so far, dotted key -> text.
        flags: what to add to the command to run the level. kernel: of attention, "" if unknown.
        row: its figures.
    """

    stage: str
    adds: Mapping[str, str]
    keys: Mapping[str, str]
    flags: str = ""
    kernel: str = ""
    row: Row = dataclasses.field(default_factory=lambda: Row({}))

    @property
    def title(self) -> str:
        """The title of the stage."""
        return STAGES[self.stage].title

    @property
    def moved_bytes(self) -> int | None:
        """Bytes over the host link in one call of the step, both directions; None if unknown."""
        if self.row.to_host_bytes is None or self.row.to_device_bytes is None:
            return None
        return self.row.to_host_bytes + self.row.to_device_bytes


def choose(text: str | None) -> list[str]:
    """Returns the stages named in `a,b,c`, the default stages for None.

    Raises ReportError for a stage that does not exist, or is listed twice.
    """
    names = list(DEFAULT) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STAGES:
            raise ReportError(f"--savings={text}: no saving {name!r}: {remedy_for(name, STAGES)}")
    if len(set(names)) < len(names):
        raise ReportError(f"--savings={text}: a saving is listed twice")
    return names


def climb(
    stages: Sequence[str], config: Mapping[str, Any], given: Iterable[str], refused: Mapping[str, str]
) -> tuple[list[Level], dict[str, str]]:
    """Returns the levels to compile, each on top of all before it, and stage -> why it is left out.

    Args:
        config: dotted key -> value, all keys.
        given: keys of the command line. No level changes them, so a stage that sets one is left out.
        refused: stage -> why the config cannot run with it.
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
            left_out[name] = f"--config.{fixed[0]} is given, and no stage changes it"
        else:
            keys = keys | {key: text for key, text in adds.items() if key not in given}
            # The first level adds the baseline's keys too.
            levels.append(Level(name, adds if levels else dict(keys), keys))
    return levels, left_out


def differing(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns the flags of those `keys` that change a config, quoted for a shell.

    values: the resolved config with the keys. config: the resolved config without them.
    """
    return shlex.join(f"--config.{key}={as_text(values[key])}" for key in keys if values[key] != config[key])


def changes(levels: Sequence[Level]) -> list[int | None]:
    """Returns the allocated bytes of each level minus those of the level before it; None for the first, and if one is
    unknown."""
    sizes = [level.row.allocated_bytes for level in levels]
    out: list[int | None] = []
    for before, size in zip([None, *sizes], sizes):
        out.append(None if before is None or size is None else size - before)
    return out


def first_that_fits(levels: Sequence[Level]) -> Level | None:
    """Returns the first level that fits the target, None for none."""
    return next((level for level in levels if level.row.ok and level.row.fits), None)


def scale_of(sizes: Sequence[int], limit: int | None) -> int:
    """Returns the bytes of the longest bar: the largest size, or less if bars near the limit would be too short to
    read."""
    shortest = min(sizes, default=1)
    longest = max(MAX_LIMITS * limit, 2 * shortest) if limit else MAX_TIMES * shortest
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
    """Returns the levels as JSON values; see the module for the keys."""
    winner = first_that_fits(levels)
    rows = []
    for level, change in zip(levels, changes(levels)):
        row = dataclasses.asdict(level.row)
        row |= {"stage": level.stage, "title": level.title, "why": STAGES[level.stage].why, "kernel": level.kernel}
        row |= {"flags": flags_of(level), "all_flags": level.flags, "change_bytes": change}
        rows.append(row)
    return {
        "levels": rows,
        "left_out": dict(left_out),
        "first_that_fits": winner.stage if winner else None,
        "config": config,
        "given": given,
        "target": dict(target),
        "versions": dict(versions),
        "interrupted": interrupted,
    }


def flags_of(level: Level) -> str:
    """Returns the flags that a stage adds to the command; of the first stage, only those that later stages change."""
    changed: set[str] = set()
    for stage in DEFAULT:
        changed.update(STAGES[stage].keys)
    added = [(key, text) for key, text in level.adds.items() if key in changed and text != "false"]
    return shlex.join(f"--config.{key}={text}" for key, text in added)
