"""The staircase: from a plain float32 step to the smallest, one memory lever after the other. Pure.

A stage is a lever; a level is a stage on top of all stages before it. The JSON of a staircase has these keys (sizes
are bytes on ONE device, null where nothing is known):

- `levels`: one object per level: `stage`, `title`, `flags` (what this stage adds), `all_flags` (what to add to the
  command to run the level), `kernel` (of attention), `why` (what the lever does and what it costs), `change_bytes`
  (allocated, compared with the level before) and the figures of `memory.compare.compare_rows.Row`.
- `left_out`: stage -> why it has no level; the stages after it go on without it.
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

# What every level starts from: no lever at all. Keys that a config lacks are left out.
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

# Stage -> its saving; DEFAULT has those that are climbed without --savings, in order.
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

# No bar is longer than so many limits of the target, or so many times the shortest bar where there is no limit.
MOST_LIMITS, MOST_TIMES = 5, 12


@dataclasses.dataclass(frozen=True)
class Level:
    """One stage on top of all stages before it.

    Fields:
        stage: a key of STAGES. adds: the keys that it sets. keys: all keys set so far, dotted key -> text.
        flags: what to add to the command to run the level. kernel: of attention, "" where that is not known.
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
        """The stage's title."""
        return STAGES[self.stage].title

    @property
    def moved_bytes(self) -> int | None:
        """Bytes over the host link in one call of the step, both directions; None where that is not known."""
        if self.row.to_host_bytes is None or self.row.to_device_bytes is None:
            return None
        return self.row.to_host_bytes + self.row.to_device_bytes


def choose(text: str | None) -> list[str]:
    """The stages named in `a,b,c`, the default ones for None.

    Raises ReportError for one that does not exist, or is listed twice.
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
    """The levels to compile, each on top of all before it, and stage -> why it is left out.

    Args:
        config: dotted key -> value, all keys that there are.
        given: keys of the command line. No level changes them, so a stage that sets one is left out.
        refused: stage -> why the config cannot run with it.
    """
    given, left_out, levels = set(given), dict[str, str](), list[Level]()
    keys = {key: text for key, text in BASELINE.items() if key in config and key not in given}
    for name in stages:
        adds = STAGES[name].keys
        lacking, fixed = [key for key in adds if key not in config], [key for key in adds if key in given]
        if name in refused:
            left_out[name] = refused[name]
        elif lacking:
            left_out[name] = f"the config has no key {lacking[0]}"
        elif fixed and name != "fp32":
            left_out[name] = f"--config.{fixed[0]} is given, and no stage changes it"
        else:
            keys = {**keys, **{key: text for key, text in adds.items() if key not in given}}
            # The first level has the baseline's keys too.
            levels.append(Level(name, dict(adds) if levels else dict(keys), keys))
    return levels, left_out


def differing(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The flags of those `keys` that change a config, quoted for a shell.

    values: the config with the keys, as the trainer resolves them. config: the config without them.
    """
    return shlex.join(f"--config.{key}={as_text(values[key])}" for key in keys if values[key] != config[key])


def changes(levels: Sequence[Level]) -> list[int | None]:
    """Allocated bytes of each level minus those of the level before it; None for the first."""
    sizes = [level.row.allocated_bytes for level in levels]
    return [None if before is None or here is None else here - before for before, here in zip([None, *sizes], sizes)]


def first_that_fits(levels: Sequence[Level]) -> Level | None:
    """The first level that fits the target, None for none."""
    return next((level for level in levels if level.row.ok and level.row.fits), None)


def scale_of(sizes: Sequence[int], limit: int | None) -> int:
    """Bytes of the longest bar: the largest size, unless bars near the limit would then be too short to read."""
    shortest = min(sizes, default=1)
    most = max(MOST_LIMITS * limit, 2 * shortest) if limit else MOST_TIMES * shortest
    return max(1, min(max(sizes, default=1), most))


def to_json(
    levels: Sequence[Level],
    left_out: Mapping[str, str],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
    config: str = "",
    given: str = "",
) -> dict[str, Any]:
    """The staircase as JSON values; see the module for the keys."""
    winner = first_that_fits(levels)
    return {
        "levels": [
            dataclasses.asdict(level.row)
            | {
                "stage": level.stage,
                "title": level.title,
                "why": STAGES[level.stage].why,
                "kernel": level.kernel,
                "flags": flags_of(level),
                "all_flags": level.flags,
                "change_bytes": change,
            }
            for level, change in zip(levels, changes(levels))
        ],
        "left_out": dict(left_out),
        "first_that_fits": winner.stage if winner else None,
        "config": config,
        "given": given,
        "target": dict(target),
        "versions": dict(versions),
        "interrupted": interrupted,
    }


def flags_of(level: Level) -> str:
    """The flags that a stage adds to the command; for the first, those that later stages change."""
    changed = {key for stage in DEFAULT for key in STAGES[stage].keys}
    return shlex.join(
        f"--config.{key}={text}" for key, text in level.adds.items() if key in changed and text != "false"
    )
