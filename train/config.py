"""Config files and their overrides, with one-line errors: what ml_collections reads, checked at once."""

import ast
import difflib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.train.errors import UserError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
SHIPPED = Path(base.__file__).parent


def _parse_bool(text: str) -> bool:
    return BOOLEANS[text.lower()]


def _parse_tuple(text: str) -> tuple:
    """`a,b` is ('a', 'b'); `1,2.0` and `(1, 2.0)` are numbers; empty is ()."""
    def element(item: str) -> Any:
        try:
            return ast.literal_eval(item)
        except (ValueError, SyntaxError):
            return item

    inner = text.strip().removeprefix("(").removesuffix(")")
    return tuple(element(item.strip()) for item in inner.split(",") if item.strip())


PARSERS: dict[type, Callable[[str], Any]] = {
    bool: _parse_bool, int: int, float: float, str: str, tuple: _parse_tuple,
}


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {prefix + key: value}
    return flat


def find_file(name: str) -> Path:
    """The config file `name`: a path, or the bare name of a shipped config."""
    for path in (Path(name), SHIPPED / name, SHIPPED / f"{name}.py", SHIPPED.parent / name):
        if path.is_file():
            return path
    names = [path.stem for path in shipped()]
    near = difflib.get_close_matches(Path(name).stem, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no config file {name!r}: {hint}shipped: {', '.join(names)}")


def shipped() -> list[Path]:
    """The files of the shipped configs, by name."""
    return sorted(path for path in SHIPPED.glob("*.py") if path.stem not in ("__init__", "base"))


def purposes() -> dict[str, str]:
    """Shipped config -> the first sentence of its docstring."""
    found = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in shipped()}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in found.items()}


def describe_keys() -> list[tuple[str, str, str]]:
    """(dotted key, default as text, meaning) of every key; the meaning is its comment in configs/base.py.

    A comment above a key belongs to it as one behind it does; keys that a row of values sets have that row's.
    """
    defaults = flatten(base.get_config())
    meanings: dict[str, str] = {}
    above: list[str] = []
    for line in Path(base.__file__).read_text(encoding="utf-8").splitlines():
        code, _, comment = line.strip().partition("#")
        if not code.strip():
            above = [*above, comment.strip()] if comment else []
            continue
        target = code.split("=")[0].strip().removeprefix("config.")
        meaning = " ".join([*above, comment.strip()]).strip()
        if target in defaults:
            meanings[target] = meaning
        elif ".update(" in target:  # the keys of an architecture's row
            group = target.partition(".update(")[0]
            meanings |= dict.fromkeys((key for key in defaults if key.rpartition(".")[2] in base.LLAMA
                                       and key.startswith(f"{group}.")), meaning)
        above = []
    return [(key, as_text(value), meanings.get(key, "")) for key, value in defaults.items()]


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(name: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """The config of file `name` with `overrides` ((dotted key, text) pairs) applied.

    Raises:
      UserError: no such file, a file without get_config(), an unknown key, a value of the wrong type.
    """
    path = find_file(name)
    spec = importlib.util.spec_from_file_location(f"bytescope_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # someone's file: whatever is wrong in it is the user's to mend
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path}: get_config() returned {type(config).__name__}, not an ml_collections.ConfigDict")
    _check_keys(config, path)
    for key, text in overrides:
        override(config, key, text)
    return config


def _check_keys(config: ConfigDict, path: Path) -> None:
    """A config of one's own must hold the keys of base.py: a missing or a misspelt one fails here."""
    want, have = flatten(base.get_config()), flatten(config)
    for key in have:
        if key not in want:
            raise UserError(f"{path}: unknown key {key}{_nearest(key, want)}")
    for key in want:
        if key not in have:
            raise UserError(f"{path}: key {key} is missing: start from bytescope.configs.base.get_config()")
        if type(have[key]) is not type(want[key]) and not (type(want[key]), type(have[key])) == (float, int):
            raise UserError(f"{path}: {key}={have[key]!r} is {type(have[key]).__name__}, "
                            f"{type(want[key]).__name__} expected")


def _nearest(key: str, valid: dict[str, Any]) -> str:
    near = difflib.get_close_matches(key, valid, 1, 0.5)
    if not near:  # the right name in the wrong group
        near = [name for name in valid if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return f": did you mean {near[0]}?" if near else f": the keys are in {SHIPPED.name}/base.py"


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets the dotted `key` from command-line `text`, in the type the key has."""
    flat = flatten(config)
    if key not in flat:
        group = [name for name in flat if name.startswith(key + ".")]
        if group:
            raise UserError(f"--config.{key} is a group: set one of its keys, such as --config.{group[0]}=...")
        raise UserError(f"unknown key --config.{key}{_nearest(key, flat)}")
    kind = type(flat[key])
    try:
        value = PARSERS[kind](text)
    except (ValueError, KeyError):
        raise UserError(f"--config.{key}={text}: {kind.__name__} expected, such as {flat[key]!r}") from None
    *groups, leaf = key.split(".")
    node = config
    for group in groups:
        node = node[group]
    node[leaf] = value


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(other arguments, overrides): takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of `argv`."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    pending = iter(argv)
    for argument in pending:
        name = argument.lstrip("-")
        if not argument.startswith("-") or not name.startswith("config."):
            rest.append(argument)
            continue
        key, equals, text = name.removeprefix("config.").partition("=")
        if not equals:
            text = next(pending, None)
            if text is None or text.startswith("--"):
                raise UserError(f"--config.{key} has no value: write --config.{key}=VALUE")
        overrides.append((key, text))
    return rest, overrides
