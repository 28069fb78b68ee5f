"""Caches finished rows on disk, so that an interrupted comparison can be resumed.

A row is one small file in $XDG_CACHE_HOME/bytescope/compare. Its name is a digest of everything that decides its
figures: program, target, versions, environment and sources. `MAKING_ROWS` lists the modules of bytescope.memory that
count as sources; a factory adds the files of its program. A file is written completely or not at all and contains a
digest of its answer; a damaged file is treated as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.devices.chips import base_name
from bytescope.memory.errors import check_readable
from bytescope.memory.files import cache_folder, write_whole

# Incremented when the meaning of a cached answer changes.
LAYOUT = 8

# Environment variables that change the compiled program or the available memory.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION")
_PREFIXES = ("JAX_", "XLA_PYTHON_CLIENT_")
# Set by this process when it describes a GPU (devices/targets.py). It changes no program.
_OWN_VARIABLES = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK",)


def folder(env: Mapping[str, str] | None = None) -> Path:
    """Returns the folder in which finished comparison rows are cached: `bytescope/compare` in $XDG_CACHE_HOME, or in
    ~/.cache. A row is the compiled result of one config for one target.

    env: the environment variables (default: the variables of this process).
    """
    return cache_folder("compare", env)


# The modules that compile, read and analyze a program to compute a comparison row. A change in their source makes
# cached rows invalid. A package means all its modules. Modules that show rows or predict times are not listed, because
# they work on finished rows.
MAKING_ROWS = (
    *(f"bytescope.memory.{name}" for name in ("analysis", "cost", "devices", "environment", "errors", "hlo")),
    *(f"bytescope.memory.{name}" for name in ("jaxprs", "peak", "program", "records", "units")),
    *(f"bytescope.memory.compare.{name}" for name in ("prepared_program", "program_factory")),
    *(f"bytescope.memory.compare.{name}" for name in ("row_cache", "worker")),
    *(f"bytescope.memory.seconds.{name}" for name in ("products", "reading")),
)


def source_files(modules: Iterable[str]) -> list[Path]:
    """Returns the paths of the .py files of modules, sorted; for a package, the files of all its modules.

    The modules are not imported, because many of them import jax, which a command does not need if all its answers are
    in the cache.

    modules: the names of the modules, such as "bytescope.memory.cost".
    """
    files: list[Path] = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
        if spec.submodule_search_locations:
            files += [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py")]
        else:
            files.append(Path(spec.origin))
    return sorted(files)


def digest_files(files: Iterable[Path]) -> str:
    """Returns a hex digest of the files' names, their folders' names and their contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.parent.name}/{path.name}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that change a compiled program or the available memory."""
    return {
        name: value
        for name, value in env.items()
        if name not in _OWN_VARIABLES and (name in _VARIABLES or name.startswith(_PREFIXES))
    }


def key(
    config: Mapping[str, Any],
    target: str,
    versions: Mapping[str, str],
    sources: str,
    measure: bool,
    env: Mapping[str, str] | None = None,
    factory: str = "",
    choice: str = "",
) -> str:
    """Returns the file name of a cached comparison row: a hex digest of everything that decides the row's content.

    Args:
        config: every config key with its value.
        target: the target's name, such as "h100:8".
        versions: package -> version.
        sources: the digest of the source files.
        measure: whether the program is run. The name of this machine is then included. It is also included if the
            target is `local` or a CPU.
        env: the environment variables (default: the variables of this process). Only those that affect a row are
            included.
        factory: where to import the function that makes the program, such as "module:function".
        choice: a digest of the sources that choose settings left open by the config, or "".
    """
    given = settings(os.environ if env is None else env)
    # Several machines may share a home folder, and `local` means different devices on each.
    machine = platform.node() if measure or base_name(target) in ("local", "cpu") else ""
    parts = [LAYOUT, factory, dict(config), target, dict(versions), sources, measure, given, machine, choice]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read(place: Path, name: str) -> dict[str, Any] | None:
    """Returns the answer of a worker process, which contains the fields of a comparison row, from the cache. Returns
    None if the file is missing or damaged, or if the job failed.

    place: the folder of the cache. name: the file name that `key` returns.
    """
    path = place / f"{name}.json"
    try:
        check_readable(path)
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        if digest != _digest(text):
            return None
        value = json.loads(text)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("status") == "ok" else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(place: Path, name: str, answer: Mapping[str, Any]) -> None:
    """Stores the answer of a worker process, which contains the fields of a comparison row, in the cache. Does nothing
    if the folder cannot be written.

    place: the folder of the cache. name: the file name that `key` returns.
    """
    path, text = place / f"{name}.json", json.dumps(answer)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        if path.exists():
            check_readable(path)
        write_whole(path, f"{_digest(text)}\n{text}")
