"""What can be completed on a command line, gathered from the parsers, the configs and the tables of names.

The value of a flag, a key or a place has a kind, in one word or several:

- `@file`, `@folder`: a path. `@config`: a config's name, a file, or `hf:` with a folder of weights.
- `@target`: a target. `@grid`: KEY=VALUE,VALUE.
- `@one a b c`: one of these words. `@list a b c`: some of them, with commas between.
- `@any`: nothing that is known beforehand.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.commands.arguments import OldFlag

FILE, FOLDER, CONFIG, TARGET, GRID, NOTHING = "@file", "@folder", "@config", "@target", "@grid", "@any"
# Where an argument stands, or its metavar -> the kind; action.choices come first.
_PLACES = {
    "config_here": CONFIG,
    "target_here": TARGET,
    "before": FILE,
    "after": FILE,
    "trace": FOLDER,
    "workdir": FOLDER,
    "run": FOLDER,
    "out": FOLDER,
    "source": FOLDER,
}
_METAVARS = {"CONFIG": CONFIG, "TARGET": TARGET, "FILE": FILE, "DIR": FOLDER, "KEY=V,V": GRID}
# Flags and keys whose words are told by no parser.
_PATHS = {
    "--source": FILE,
    "--tokenizer": FILE,
    "data.source": FILE,
    "data.eval_source": FILE,
    "data.tokenizer": FILE,
    "data.chat_template": FILE,
    "init.folder": FOLDER,
    "init.adapter": FOLDER,
    "train.cache_dir": FOLDER,
    "train.eval_prompts": FILE,
}
# Devices that are suggested after a target's colon.
_GPU_COUNTS, _TPU_COUNTS, _CPU_COUNTS = ("2", "4", "8", "2x8", "4x8"), ("2x2", "4x4", "8x8"), ("2", "4", "8")


@dataclasses.dataclass(frozen=True)
class Words:
    """Everything that a script completes.

    Fields:
        commands: name -> what it does, as the overview has it.
        flags: command -> flag -> the kind of its value, None for a flag without one.
        places: command -> the kinds of its arguments by position. keys: dotted config key -> kind of its value.
        configs: names. targets: name -> with counts, such as h100:8.
    """

    commands: Mapping[str, str]
    flags: Mapping[str, Mapping[str, str | None]]
    places: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, str]
    configs: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns command -> parser."""
    from bytescope.train.commands.registry import COMMANDS, make_parser

    return {name: make_parser(name) for name in COMMANDS}


def gather() -> Words:
    """Returns the words that shell completion offers.

    Imports jax to read its tables of names, but starts no device.
    """
    from bytescope.train.commands.registry import COMMANDS
    from bytescope.train.source import shipped

    lists, each = _lists(), parsers()
    return Words(
        commands={name: command.summary for name, command in COMMANDS.items()},
        flags={name: _flags(parser, lists) for name, parser in each.items()},
        places={
            name: tuple(_kind(action) for action in parser._actions if not action.option_strings)
            for name, parser in each.items()
        },
        keys=_keys(),
        configs=tuple(path.stem for path in shipped()),
        targets=_targets(),
    )


def _flags(parser: argparse.ArgumentParser, lists: Mapping[str, str]) -> dict[str, str | None]:
    """Flag -> the kind of its value; --config.KEY is left out, the keys being completed one by one."""
    found: dict[str, str | None] = {}
    for action in parser._actions:
        if isinstance(action, OldFlag):
            continue
        for flag in action.option_strings:
            if flag.startswith("--") and flag != "--config.KEY":
                kind = lists.get(flag) or _PATHS.get(flag) or _kind(action)
                found[flag] = None if action.nargs == 0 else kind
    return found


def _kind(action: argparse.Action) -> str:
    """The kind of an argument's value, by its parser."""
    if action.choices is not None:
        return " ".join(["@one", *map(str, action.choices)])
    if not action.option_strings:
        return _PLACES.get(action.dest, NOTHING)
    return CONFIG if action.dest == "config" else _METAVARS.get(str(action.metavar), NOTHING)


def _lists() -> dict[str, str]:
    """Flags that take several names with commas between them."""
    from bytescope.memory.formulas.model_shape import TARGETS
    from bytescope.model.remat.policies import POLICIES
    from bytescope.train.plan import levers
    from bytescope.train.plan.fit import fit_space

    return {
        "--remat": " ".join(["@list", *POLICIES]),
        "--levers": " ".join(["@list", *fit_space.LEVERS]),
        "--savings": " ".join(["@list", *levers.STAGES]),
        "--lora-targets": " ".join(["@list", *TARGETS]),
    }


def _keys() -> dict[str, str]:
    """Config key -> kind of its value."""
    from bytescope.configs import base
    from bytescope.train.parallel.xla_options import TABLE
    from bytescope.train.program.config_files import flatten
    from bytescope.train.program.valid_values import CHOICES, OF_THE_MODEL

    tables: dict[str, Any] = {
        **CHOICES,
        **OF_THE_MODEL,
        **{f"xla.{key}": rows for key, rows in TABLE.items()},
    }
    found = {}
    for key, value in flatten(base.get_config()).items():
        if key in tables:
            found[key] = " ".join(["@list" if isinstance(value, tuple) else "@one", *tables[key]])
        elif isinstance(value, bool):
            found[key] = "@one true false"
        else:
            found[key] = _PATHS.get(key, NOTHING)
    return found


def _targets() -> dict[str, tuple[str, ...]]:
    """Target -> the same with counts of devices."""
    from bytescope.memory.devices.chips import CHIPS

    found = {"local": (), "cpu": tuple(f"cpu:{count}" for count in _CPU_COUNTS)}
    for chip in CHIPS.values():
        if chip.platform == "tpu":
            depth = "x1" if len(chip.max_shape) == 3 else ""
            found[chip.name] = tuple(f"{chip.name}:{count}{depth}" for count in _TPU_COUNTS)
        else:
            counts = (count for count in _GPU_COUNTS if int(count.rpartition("x")[2]) <= chip.devices_per_host)
            found[chip.name] = tuple(f"{chip.name}:{count}" for count in counts)
    return found
