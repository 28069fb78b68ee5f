"""Reads config files and their overrides with ml_collections. All keys are checked, and errors are one line."""

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.memory.errors import MAX_SUGGESTIONS, message_of, nearest, suggestion
from bytescope.train.config_fields import FIELDS, REMOVED
from bytescope.train.source import ConfigPath, find_source, shipped
from bytescope.train.user_errors import UserError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _parse_bool(text: str) -> bool:
    return BOOLEANS[text.lower()]


def _parse_tuple(text: str) -> tuple:
    """Parses a tuple: `a,b` gives ('a', 'b'), `1,2.0` and `(1, 2.0)` give numbers, and empty text gives ()."""

    def element(item: str) -> Any:
        try:
            return ast.literal_eval(item)
        except (ValueError, SyntaxError):
            return item

    inner = text.strip().removeprefix("(").removesuffix(")")
    return tuple(element(item.strip()) for item in inner.split(",") if item.strip())


PARSERS: dict[type, Callable[[str], Any]] = {
    bool: _parse_bool,
    int: int,
    float: float,
    str: str,
    tuple: _parse_tuple,
}


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Returns the keys of a nested config in one dict, dotted key -> value. `prefix` is put before each key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {prefix + key: value}
    return flat


def load_flat(name: str, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Reads a config and applies overrides, as `load` does. Returns a flat dict, dotted key -> value."""
    return flatten(load(name, overrides))


def purposes() -> dict[str, str]:
    """Returns what each shipped config is for: name of the config -> first paragraph of its docstring, in one line."""
    docstrings = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in shipped()}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in docstrings.items()}


def describe_keys() -> list[tuple[str, str, str]]:
    """Returns (dotted key, default as text, meaning) for every key of the config, sorted by key."""
    return [(key, as_text(field.default), field.meaning) for key, field in sorted(FIELDS.items())]


def as_text(value: Any) -> str:
    """Formats a value for the command line. A tuple becomes a,b and a boolean true or false."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(name: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Reads a config and applies overrides. `name` is the name of a shipped config, a path, or `hf:FOLDER` for the
    model of a Hugging Face folder.

    Args:
      overrides: pairs (dotted key, value as text) that replace values of the config.

    Raises:
      UserError: the file does not exist or has no get_config(), a key is unknown, a value has the wrong type, the model
        does not match the folder `init.folder`, or the adapters do not match `init.adapter`.
    """
    from bytescope.train.weights import finetune

    given = {key for key, _ in overrides}
    source = find_source(name, ConfigPath)
    if source.weights is not None:
        config = finetune.config_of(source.weights, given)
    else:
        config = _call_get_config(source.path)
        _check_keys_match_base(config, source.path)
    for key, text in overrides:
        override(config, key, text)
    if config.init.folder:
        finetune.check_agreement(config, given)
    if config.init.adapter:
        from bytescope.train.weights import adapter_folder

        adapter_folder.settle(config, given)
    return config


def _call_get_config(path: Path) -> ConfigDict:
    if path.suffix != ".py":
        raise UserError(
            f"{path} is not a config: give a Python file with get_config(), or a name of bytescope list configs"
        )
    spec = importlib.util.spec_from_file_location(f"bytescope_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise UserError(
                f"{path} has no get_config(), so it is not a config: define get_config(), which returns "
                "bytescope.configs.base.get_config() with changes; for a training script of your own, run "
                f"bytescope report {path}"
            )
        config = module.get_config()
    except UserError:
        raise
    # A user's file may do anything: its sys.exit() must not end us successfully, and its KeyboardInterrupt is not a
    # Ctrl-C.
    except BaseException as error:
        raise UserError(
            f"the config {path} raised {type(error).__name__}: {message_of(error)}: fix the file"
        ) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"{path}: get_config() returns {type(config).__name__}, not an ml_collections.ConfigDict: return the "
            "result of bytescope.configs.base.get_config()"
        )
    return config


def _check_keys_match_base(config: ConfigDict, path: Path) -> None:
    want, have = flatten(base.get_config()), flatten(config)
    for key in have:
        if key not in want:
            raise UserError(f"the config {path} has the unknown key {key}{_suggest_keys(key)}")
    for key in want:
        if key not in have:
            raise UserError(
                f"the key {key} is missing in the config {path}: start from bytescope.configs.base.get_config()"
            )
        if type(have[key]) is not type(want[key]) and not (type(want[key]), type(have[key])) == (float, int):
            raise UserError(
                f"{path}: {key}={have[key]!r} is {type(have[key]).__name__}: give a value of type "
                f"{type(want[key]).__name__}"
            )


def _suggest_keys(key: str) -> str:
    if key in REMOVED:
        return f", because it is gone: {REMOVED[key].remedy}"
    # Keys with the same last part or a synonym of it come first.
    near = keys_named(key.rpartition(".")[2]) or nearest(key, sorted(FIELDS))
    return f": {suggestion(near[:MAX_SUGGESTIONS])}" if near else "; bytescope list keys lists the keys"


def keys_named(name: str) -> list[str]:
    """Returns the dotted config keys with the synonym `name`, or else those whose last part is `name`, as suggestions
    for an unknown key."""
    synonymous = [key for key, field in FIELDS.items() if name in field.synonyms]
    return synonymous or [key for key in sorted(FIELDS) if key.rpartition(".")[2] == name]


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets the dotted `key` of a config from command-line text, converted to the type of the key.

    Raises:
      UserError: the key is unknown, the key is a group, or the text cannot be converted.
    """
    flat = flatten(config)
    if key not in flat:
        group = [name for name in flat if name.startswith(key + ".")]
        if group:
            raise UserError(f"{key} is a group of keys: set one of its keys, such as {group[0]}=...")
        raise UserError(f"{key} is an unknown key{_suggest_keys(key)}")
    kind = type(flat[key])
    try:
        value = PARSERS[kind](text)
    except (ValueError, KeyError):
        raise UserError(
            f"{key}={text} has the wrong type: give a value of type {kind.__name__}, such as {flat[key]!r}"
        ) from None
    *path, leaf = key.split(".")
    node = config
    for name in path:
        node = node[name]
    node[leaf] = value
