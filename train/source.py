"""Recognizes whether a path or name is a run of `bytescope train`, a folder of weights, or a config.

Every command that accepts one of the three calls `find_source`, so that all commands recognize a name in the same way.
This module reads only file names and config.json. SavedRun, Folder and config_files.load read the contents.

The modules that read weights and configs import the file names and config names that are declared here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from bytescope import configs
from bytescope.memory.commands.arguments import user_path
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.errors import did_you_mean
from bytescope.memory.records.report_record import IN_RUN
from bytescope.train.user_errors import UserError

# File names in a run directory, a folder of weights and an adapter folder. Run directories and folders of weights both
# have a config.json, with different keys.
CONFIG = "config.json"
CHECKPOINTS, METRICS, MEMORY = "checkpoints", "metrics.jsonl", IN_RUN
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
IDENTITY_KEYS = {"config", "global_rows"}  # only the config.json of a run has these keys
MAX_JSON_BYTES = 64 * 2**20  # larger JSON files are not read; the largest published index has 8 MB
# Prefix of the name of a config that is derived from a folder of weights, as in `hf:FOLDER`.
WEIGHTS = "hf:"
# Prefix of a model that `bytescope estimate` takes by its number of parameters, as in `gpt:7e9`.
ASSUMED = "gpt:"
# Words before a path that say what it is, for a folder with both.
_MODEL_PREFIXES = ("run:", "weights:")
NO_CONFIG = "no config: give a config file, or the name of a shipped config, as the first argument"
SHIPPED = Path(configs.__path__[0])


@dataclasses.dataclass(frozen=True)
class SourcePath:
    """Base class of a path that was recognized as a run, a folder of weights, or a config. The subclass says which.
    `path`: the path."""

    path: Path


@dataclasses.dataclass(frozen=True)
class RunPath(SourcePath):
    """The directory of a training run, with or without checkpoints."""


@dataclasses.dataclass(frozen=True)
class WeightsPath(SourcePath):
    """A folder of weights in Hugging Face's format. It may contain only a config.json and no weights."""


@dataclasses.dataclass(frozen=True)
class ConfigPath(SourcePath):
    """A config file, or a folder of weights that the user named as `hf:FOLDER` to fine-tune.

    Attributes:
        path: the config file, or FOLDER with `~` expanded.
        weights: FOLDER as the user wrote it; None for a config file.
    """

    weights: str | None = None


Kind = TypeVar("Kind", bound=SourcePath)


def find_source(name: str | Path, *kinds: type[Kind]) -> Kind:
    """Recognizes `name` as a run, a folder of weights, or a config, and returns its path.

    Args:
        name: a path or a config name, as the user wrote it. In a str `~` is expanded, in a Path it is not.
        kinds: the classes that the caller accepts: RunPath, WeightsPath, ConfigPath. The first class that matches is
            used.

    Raises:
        UserError: `name` matches none of `kinds`.
    """
    for kind in kinds:
        source = _FINDERS[kind](name)
        if source is not None:
            return cast(Kind, source)
    raise UserError(_not_found_message(name, kinds))


def model_path(word: str) -> Path:
    """Returns the path of a word that names a model: a run or a folder of weights, with or without the prefix run:,
    weights: or hf:. The type of a command-line argument.

    Raises argparse.ArgumentTypeError if the path is empty or names an unknown user.
    """
    prefix, _, path = word.partition(":")
    has_prefix = bool(path) and f"{prefix}:" in (*_MODEL_PREFIXES, WEIGHTS) and not os.path.exists(word)
    return user_path(path if has_prefix else word)


def is_run(folder: str | Path) -> bool:
    """Returns whether `folder` is the directory of a run.

    A directory is a run if it contains checkpoints, if it contains a run's metrics or memory report and no weights, or
    if its config.json has the keys of a run.
    """
    path = _expand_home(folder)
    if os.path.isdir(path / CHECKPOINTS):
        return True
    has_weights = any(os.path.isfile(path / name) for name in (SINGLE, INDEX))
    if not has_weights and any(os.path.isfile(path / name) for name in (METRICS, MEMORY)):
        return True
    return _is_run_config(path / CONFIG)


def holds_model(folder: Path) -> bool:
    """Returns whether a folder contains both a config and safetensors files, of a model or of a LoRA adapter.

    `--force` overwrites a folder only if this returns True.
    """
    names = {path.name for path in folder.iterdir()}
    return bool(names & {CONFIG, ADAPTER_CONFIG}) and any(name.endswith(".safetensors") for name in names)


def title_of(name: str) -> str:
    """Returns the title of a config for reports and run directories.

    The title is the file name of a config without its extension, or the name of FOLDER for `hf:FOLDER`. If FOLDER is a
    snapshot in Hugging Face's cache, whose name is a hash, the title is the name of the model.
    """
    if not name.startswith(WEIGHTS):
        return Path(name).stem
    folder = Path(os.path.abspath(os.path.expanduser(name.removeprefix(WEIGHTS))))
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name


def shipped() -> list[Path]:
    """Returns the paths of the configs that come with the package, sorted by name."""
    return sorted(path for path in SHIPPED.glob("*.py") if path.stem not in ("__init__", "base"))


def _find_run(name: str | Path) -> RunPath | None:
    return RunPath(_expand_home(name)) if is_run(name) else None


def _find_weights(name: str | Path) -> WeightsPath | None:
    path = _expand_home(name)
    return WeightsPath(path) if os.path.isfile(path / CONFIG) and not is_run(path) else None


def _find_config(name: str | Path) -> ConfigPath | None:
    text = str(name)
    if text.startswith(WEIGHTS):
        folder = text.removeprefix(WEIGHTS)
        return ConfigPath(Path(os.path.expanduser(folder)), folder)
    if not text:
        return None
    paths = [_expand_home(name)]
    if not text.startswith(("./", "../")):
        paths += [SHIPPED / text, SHIPPED / f"{text}.py", SHIPPED.parent / text]
    for path in paths:
        if os.path.isfile(path):  # isfile returns False for a name that is too long for the file system
            return ConfigPath(path)
    return None


_FINDERS: dict[type[SourcePath], Callable[[str | Path], SourcePath | None]] = {
    RunPath: _find_run,
    WeightsPath: _find_weights,
    ConfigPath: _find_config,
}


def _expand_home(name: str | Path) -> Path:
    # A folder that is given as a Path may be called `~`, so only a str is expanded.
    return Path(os.path.expanduser(name)) if isinstance(name, str) else name


def _is_run_config(path: Path) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return False
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() >= IDENTITY_KEYS


def _not_found_message(name: str | Path, kinds: tuple[type[SourcePath], ...]) -> str:
    text, is_folder = str(name), os.path.isdir(_expand_home(name))
    if ConfigPath not in kinds:
        if WeightsPath not in kinds:
            return f"{text} is not a run directory: give the folder that bytescope train wrote, with its config.json"
        return (
            f"{text} is neither a run nor a folder of weights: give the folder that bytescope train wrote, "
            "or a folder with a config.json in the format of transformers"
        )
    if not text:
        return "the name of the config is empty: give a file, or a name that bytescope list configs lists"
    if is_folder and len(kinds) > 1:
        return (
            f"{text} is neither a run, a folder of weights nor a config: give the folder that bytescope train wrote, "
            "a folder with a config.json in the format of transformers, or a name that bytescope list configs lists"
        )
    if is_folder:
        hint = f", or {WEIGHTS}{text} to use the weights in the folder" if _find_weights(name) else ""
        return f"config {text!r} is a folder: give a file in it{hint}"
    if text.partition(":")[0].lower() in CHIPS:
        return f"no config file {text!r}: this is a target, which follows a config, such as tiny {text}"
    if text.startswith(ASSUMED):
        return f"{text} has only formulas: run bytescope estimate {text}"
    if text.endswith(":"):
        return f"{text} names nothing after the colon: write {text}NAME"
    names = [path.stem for path in shipped()]
    hint = did_you_mean(_expand_home(name).stem, names)
    if os.sep in text or text.endswith(".py"):
        return f"there is no file or folder {text}: {hint or 'give a path that exists'}"
    return f"no config file {text!r}: {hint}{' ' if hint else ''}shipped: {', '.join(names)}"
