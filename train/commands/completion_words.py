"""Collects the words of shell completion from the parsers, the shipped configs and the tables of names.

The value of a flag, a config key or a positional argument has a kind, written as text:

- `@file`, `@folder`: a path. `@config`: a config's name, a file, or `hf:` and a folder of weights.
- `@target`: a target. `@grid`: KEY=VALUE,VALUE.
- `@one a b c`: one of these words. `@list a b c`: several of these words, separated by commas.
- `@any`: any text.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.commands.arguments import OldFlag
from bytescope.train.commands import trainer_packages

FILE, FOLDER, CONFIG, TARGET, GRID, NOTHING = "@file", "@folder", "@config", "@target", "@grid", "@any"
# Name of a positional argument -> kind, and metavar of a flag -> kind. Arguments with choices complete to the choices.
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
_METAVARS = {"CONFIG": CONFIG, "TARGET": TARGET, "FILE": FILE, "DIR": FOLDER, "FILE|DIR": FILE, "KEY=V,V": GRID}
# Flags and config keys whose values are paths, which neither their metavar nor their type shows.
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
# Numbers of devices that are suggested after a target's colon.
_GPU_COUNTS, _TPU_COUNTS, _CPU_COUNTS = ("2", "4", "8", "2x8", "4x8"), ("2x2", "4x4", "8x8"), ("2", "4", "8")


@dataclasses.dataclass(frozen=True)
class Words:
    """The words that a completion script offers.

    The kind of a value says how to complete it, such as `@file`; the module docstring lists the kinds.

    Attributes:
        commands: command -> summary, as in the overview of `bytescope --help`.
        flags: command -> flag -> kind of the flag's value, or None if the flag has no value.
        places: command -> kinds of its positional arguments, in order.
        keys: dotted config key -> kind of its value.
        configs: names of the shipped configs.
        targets: target -> suggestions with a number of devices, such as h100 -> h100:8.
    """

    commands: Mapping[str, str]
    flags: Mapping[str, Mapping[str, str | None]]
    places: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, str]
    configs: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the argument parser of each command, by command name. Commands whose parser needs the trainer's packages
    are left out if these are not installed."""
    from bytescope.train.commands.registry import COMMANDS, make_parser

    each: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        try:
            each[name] = make_parser(name)
        except ModuleNotFoundError as error:
            if not trainer_packages.needs_trainer(error):
                raise
    return each


def gather() -> Words:
    """Returns the words that shell completion offers. Config names, keys and policies are left out if the trainer's
    packages, which read them, are not installed.

    Imports jax, but starts no device.
    """
    from bytescope.train.commands.registry import COMMANDS
    from bytescope.train.source import shipped

    trainer = trainer_packages.are_installed()
    lists, each = _list_flag_kinds(trainer), parsers()
    return Words(
        commands={name: command.summary for name, command in COMMANDS.items()},
        flags={name: _flag_kinds(parser, lists) for name, parser in each.items()},
        places={
            name: tuple(_value_kind(action) for action in parser._actions if not action.option_strings)
            for name, parser in each.items()
        },
        keys=_config_key_kinds() if trainer else {},
        configs=tuple(path.stem for path in shipped()) if trainer else (),
        targets=_target_suggestions(),
    )


def _flag_kinds(parser: argparse.ArgumentParser, lists: Mapping[str, str]) -> dict[str, str | None]:
    kinds: dict[str, str | None] = {}
    for action in parser._actions:
        if isinstance(action, OldFlag):
            continue
        for flag in action.option_strings:
            if flag.startswith("--") and flag != "--config.KEY":
                kind = lists.get(flag) or _PATHS.get(flag) or _value_kind(action)
                kinds[flag] = None if action.nargs == 0 else kind
    return kinds


def _value_kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(["@one", *map(str, action.choices)])
    if not action.option_strings:
        return _PLACES.get(action.dest, NOTHING)
    return CONFIG if action.dest == "config" else _METAVARS.get(str(action.metavar), NOTHING)


def _list_flag_kinds(trainer: bool) -> dict[str, str]:
    from bytescope.memory.formulas.model_shape import TARGETS
    from bytescope.train.plan import levers
    from bytescope.train.plan.fit import fit_space

    kinds = {
        "--levers": " ".join(["@list", *fit_space.LEVERS]),
        "--savings": " ".join(["@list", *levers.STAGES]),
        "--lora-targets": " ".join(["@list", *TARGETS]),
    }
    if trainer:
        from bytescope.model.remat.policies import POLICIES

        kinds["--remat"] = " ".join(["@list", *POLICIES])
    return kinds


def _config_key_kinds() -> dict[str, str]:
    from bytescope.configs import base
    from bytescope.train.parallel.xla_options import TABLE
    from bytescope.train.program.config_files import flatten
    from bytescope.train.program.valid_values import CHOICES, OF_THE_MODEL

    tables: dict[str, Any] = {
        **CHOICES,
        **OF_THE_MODEL,
        **{f"xla.{key}": rows for key, rows in TABLE.items()},
    }
    kinds = {}
    for key, value in flatten(base.get_config()).items():
        if key in tables:
            kinds[key] = " ".join(["@list" if isinstance(value, tuple) else "@one", *tables[key]])
        elif isinstance(value, bool):
            kinds[key] = "@one true false"
        else:
            kinds[key] = _PATHS.get(key, NOTHING)
    return kinds


def _target_suggestions() -> dict[str, tuple[str, ...]]:
    from bytescope.memory.devices.chips import CHIPS

    names = {"local": (), "cpu": tuple(f"cpu:{count}" for count in _CPU_COUNTS)}
    for chip in CHIPS.values():
        if chip.platform == "tpu":
            depth = "x1" if len(chip.max_shape) == 3 else ""
            names[chip.name] = tuple(f"{chip.name}:{count}{depth}" for count in _TPU_COUNTS)
        else:
            counts = (count for count in _GPU_COUNTS if int(count.rpartition("x")[2]) <= chip.devices_per_host)
            names[chip.name] = tuple(f"{chip.name}:{count}" for count in counts)
    return names
