"""Config files and their overrides: read with ml_collections, every key checked at once, errors in one line."""

import ast
import importlib.util
import io
import tokenize
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.memory.errors import MAX_SUGGESTIONS, message_of, nearest, suggestion
from bytescope.train.source import ConfigPath, find_source, shipped
from bytescope.train.user_errors import UserError

NO_CONFIG = "no config: give --config=FILE, or its name as the first argument"
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# Names in other programs or in our output -> the last part of our key.
SYNONYMS = {
    "width": "d_model",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "vocabulary": "vocab_size",
    "context_length": "seq_len",
    "batch_size": "micro",
    "lr": "learning_rate",
    "max_steps": "steps",
}


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
    bool: _parse_bool,
    int: int,
    float: float,
    str: str,
    tuple: _parse_tuple,
}


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; `prefix` is put before each key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {prefix + key: value}
    return flat


def load_flat(name: str, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Returns the config that `load` returns as a dict, dotted key -> value."""
    return flatten(load(name, overrides))


def purposes() -> dict[str, str]:
    """Shipped config -> the first paragraph of its docstring, in one line."""
    found = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in shipped()}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in found.items()}


def describe_keys() -> list[tuple[str, str, str]]:
    """Returns (dotted key, default as text, meaning) of every key.

    The meaning is the comment of the key's assignment in configs/base.py, on its line or on lines of their own above.
    """
    source = Path(base.__file__).read_text(encoding="utf-8")
    lines, comments = source.splitlines(), _comments(source)
    meanings: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            key = ast.unparse(node.targets[0]).removeprefix("config.")
            meanings[key] = " ".join(comments[line] for line in range(first, node.lineno + 1) if line in comments)
    return [(key, as_text(value), meanings.get(key, "")) for key, value in flatten(base.get_config()).items()]


def _comments(source: str) -> dict[int, str]:
    """Number of a line -> its comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def as_text(value: Any) -> str:
    """Formats a value as the command line takes it: a tuple as a,b, a boolean in lower case."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(name: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Returns the config of file `name`, or of the folder of weights `hf:FOLDER`, with overrides applied.

    overrides: (dotted key, text) pairs.

    Raises:
      UserError: no such file, a file without get_config(), an unknown key, or a value of the wrong type. Or the model
        does not match the folder `init.folder`, or the adapters do not match `init.adapter`.
    """
    from bytescope.train.weights import finetune

    given = {key for key, _ in overrides}
    source = find_source(name, ConfigPath)
    if source.weights is not None:
        config = finetune.config_of(source.weights, given)
    else:
        config = _made_by(source.path)
        _check_keys(config, source.path)
    for key, text in overrides:
        override(config, key, text)
    if config.init.folder:
        finetune.check_agreement(config, given)
    if config.init.adapter:
        from bytescope.train.weights import adapter_folder

        adapter_folder.settle(config, given)
    return config


def _made_by(path: Path) -> ConfigDict:
    """Returns the result of get_config() in a file. Raises UserError for a file that is not a config."""
    if path.suffix != ".py":
        raise UserError(
            f"{path} is not a config: give a Python file with get_config(), or a name that bytescope configs lists"
        )
    spec = importlib.util.spec_from_file_location(f"bytescope_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise UserError(
                f"{path} has no get_config(): define one, which returns bytescope.configs.base.get_config()"
                " with changes"
            )
        config = module.get_config()
    except UserError:
        raise
    # A user's file may do anything: sys.exit() in it is no success of ours, nor KeyboardInterrupt a Ctrl-C.
    except BaseException as error:
        raise UserError(f"{path}: {type(error).__name__}: {message_of(error)}: fix the file") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path}: get_config() returns {type(config).__name__}, not an ml_collections.ConfigDict")
    return config


def _check_keys(config: ConfigDict, path: Path) -> None:
    """Raises UserError unless a config has exactly the keys of base.py, with values of their types."""
    want, have = flatten(base.get_config()), flatten(config)
    for key in have:
        if key not in want:
            raise UserError(f"{path}: unknown key {key}{_nearest(key, want)}")
    for key in want:
        if key not in have:
            raise UserError(f"{path}: key {key} is missing: start from bytescope.configs.base.get_config()")
        if type(have[key]) is not type(want[key]) and not (type(want[key]), type(have[key])) == (float, int):
            raise UserError(
                f"{path}: {key}={have[key]!r} is {type(have[key]).__name__}, {type(want[key]).__name__} expected"
            )


def _nearest(key: str, valid: dict[str, Any]) -> str:
    """Returns the end of a message about an unknown key: the key that was probably meant, or where keys are listed."""
    near = _near_keys(key, valid)
    return f": {suggestion(near[:MAX_SUGGESTIONS])}" if near else "; bytescope keys lists the keys"


def keys_named(name: str, valid: Iterable[str] | None = None) -> list[str]:
    """Returns the dotted keys of `valid`, by default of the base config, whose last part is `name` or its row in
    SYNONYMS."""
    name = SYNONYMS.get(name, name)
    return [full for full in valid or flatten(base.get_config()) if full.rpartition(".")[2] == name]


def _near_keys(key: str, valid: Iterable[str]) -> list[str]:
    """Returns keys that a misspelt key may mean: the same name or a synonym in any group, then similar names in its
    group, then similar names anywhere."""
    valid = list(valid)
    group, _, name = key.rpartition(".")
    names = {full: full.rpartition(".")[2] for full in valid}
    moved = keys_named(name, valid)
    in_group = [names[full] for full in valid if full.rpartition(".")[0] == group]
    beside = [f"{group}.{near}" for near in nearest(name, in_group)]
    if moved or beside:
        return moved or beside
    alike: list[str] = []
    for near in nearest(name, dict.fromkeys(names.values())):
        alike += [full for full in valid if names[full] == near]
    return alike


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets the dotted `key` of a config from `text` of the command line, in the type that the key has.

    Raises:
      UserError: an unknown key, a group of keys, a value of another type.
    """
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
    *path, leaf = key.split(".")
    node = config
    for name in path:
        node = node[name]
    node[leaf] = value


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(other arguments, overrides): takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of `argv`.

    Raises:
      UserError: a key without a value.
    """
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
            text = next(pending, "--")
            if text.startswith("--"):
                raise UserError(f"--config.{key} has no value: write --config.{key}=VALUE")
        overrides.append((key, text))
    return rest, overrides
