"""Recognizes what a path or a name is: a run of `bytescope train`, a folder of weights, or a config.

Every command that takes one of the three asks `find_source`, so that all commands answer the same way. Only names and
config.json are looked at here; SavedRun, Folder and config_files.load read what was recognized.

This module is below train/weights and train/program, whose readers need the file names and config names declared here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from bytescope.configs import base
from bytescope.memory.errors import did_you_mean
from bytescope.memory.records.report_record import IN_RUN
from bytescope.train.user_errors import UserError

# Files of a run, of a folder of weights and of an adapter; the first two have a config.json, with different keys.
CONFIG = "config.json"
CHECKPOINTS, METRICS, MEMORY = "checkpoints", "metrics.jsonl", IN_RUN
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
IDENTITY_KEYS = {"config", "global_rows"}  # in the config.json of a run, and of no folder of weights
MAX_JSON_BYTES = 64 * 2**20  # of a JSON file that is read; the largest published index has 8 MB
# Begins the name of a config that is made from a folder of weights.
WEIGHTS = "hf:"
SHIPPED = Path(base.__file__).parent


@dataclasses.dataclass(frozen=True)
class SourcePath:
    """A path whose kind was recognized."""

    path: Path


@dataclasses.dataclass(frozen=True)
class RunPath(SourcePath):
    """The directory of a run, with or without checkpoints."""


@dataclasses.dataclass(frozen=True)
class WeightsPath(SourcePath):
    """A folder of weights as Hugging Face publishes it, or at least its config.json."""


@dataclasses.dataclass(frozen=True)
class ConfigPath(SourcePath):
    """A config file, or with the name `hf:FOLDER` the config to fine-tune a folder of weights.

    weights: FOLDER of `hf:FOLDER` as the user wrote it, which is then the path too; None for a config file.
    """

    weights: str | None = None


Kind = TypeVar("Kind", bound=SourcePath)


def find_source(name: str | Path, *kinds: type[Kind]) -> Kind:
    """Returns what `name` is: the first of `kinds` that it can be.

    name: as the user wrote it, or a path in which `~` is expanded already.
    kinds: the kinds that the caller accepts, of RunPath, WeightsPath and ConfigPath.

    Raises:
      UserError: `name` is none of them.
    """
    for kind in kinds:
        found = _FINDERS[kind](name)
        if found is not None:
            return cast(Kind, found)
    raise UserError(_refusal(name, kinds))


def is_run(folder: str | Path) -> bool:
    """Returns whether `folder` is the directory of a run.

    A run is recognized by its checkpoints; by its other files if there are no weights beside them; or by a config.json
    with the keys of a run's identity.
    """
    path = _expand(folder)
    if os.path.isdir(path / CHECKPOINTS):
        return True
    has_weights = any(os.path.isfile(path / name) for name in (SINGLE, INDEX))
    if not has_weights and any(os.path.isfile(path / name) for name in (METRICS, MEMORY)):
        return True
    return _holds_identity(path / CONFIG)


def holds_model(folder: Path) -> bool:
    """Returns whether a folder has the config and the weights of a model or an adapter, so that --force replaces it."""
    names = {path.name for path in folder.iterdir()}
    return bool(names & {CONFIG, ADAPTER_CONFIG}) and any(name.endswith(".safetensors") for name in names)


def title_of(name: str) -> str:
    """Returns the title of a config in reports and run directories: the stem of a file, or the folder of `hf:FOLDER`.

    If the folder is a snapshot in Hugging Face's cache, whose own name is a digest, the title is the model's name.
    """
    if not name.startswith(WEIGHTS):
        return Path(name).stem
    folder = Path(os.path.abspath(os.path.expanduser(name.removeprefix(WEIGHTS))))
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name


def shipped() -> list[Path]:
    """Returns the files of the shipped configs, sorted by name."""
    return sorted(path for path in SHIPPED.glob("*.py") if path.stem not in ("__init__", "base"))


def _find_run(name: str | Path) -> RunPath | None:
    return RunPath(_expand(name)) if is_run(name) else None


def _find_weights(name: str | Path) -> WeightsPath | None:
    path = _expand(name)
    return WeightsPath(path) if os.path.isfile(path / CONFIG) and not is_run(path) else None


def _find_config(name: str | Path) -> ConfigPath | None:
    text = str(name)
    if text.startswith(WEIGHTS):
        folder = text.removeprefix(WEIGHTS)
        return ConfigPath(Path(os.path.expanduser(folder)), folder)
    if not text:
        return None
    for path in (_expand(name), SHIPPED / text, SHIPPED / f"{text}.py", SHIPPED.parent / text):
        if os.path.isfile(path):  # False for a name that is too long for the system
            return ConfigPath(path)
    return None


_FINDERS: dict[type[SourcePath], Callable[[str | Path], SourcePath | None]] = {
    RunPath: _find_run,
    WeightsPath: _find_weights,
    ConfigPath: _find_config,
}


def _expand(name: str | Path) -> Path:
    """The path of a name. A Path stays as it is: a folder of one's own may be called `~`."""
    return Path(os.path.expanduser(name)) if isinstance(name, str) else name


def _holds_identity(path: Path) -> bool:
    """Whether a file is the config.json of a run."""
    if not os.path.isfile(path):
        return False
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return False
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() >= IDENTITY_KEYS


def _refusal(name: str | Path, kinds: tuple[type[SourcePath], ...]) -> str:
    """The message for a name that is none of the kinds that a caller accepts."""
    text, is_folder = str(name), os.path.isdir(_expand(name))
    if ConfigPath not in kinds:
        if WeightsPath not in kinds:
            return f"{text} holds no run: give the folder that bytescope train wrote, with its config.json"
        return (
            f"{text} is neither a run nor a folder of weights: give the folder that bytescope train wrote, "
            "or one with a config.json as transformers has it"
        )
    if not text:
        return "the name of the config is empty: give a file, or a name that bytescope configs lists"
    if is_folder and len(kinds) > 1:
        return (
            f"{text} is neither a run, a folder of weights nor a config: give the folder that bytescope train wrote, "
            "one with a config.json as transformers has it, or a name that bytescope configs lists"
        )
    if is_folder:
        hint = f", or {WEIGHTS}{text} for the weights there" if _find_weights(name) else ""
        return f"config {text!r} is a folder: give a file in it{hint}"
    names = [path.stem for path in shipped()]
    hint = did_you_mean(_expand(name).stem, names)
    return f"no config file {text!r}: {hint}{' ' if hint else ''}shipped: {', '.join(names)}"
