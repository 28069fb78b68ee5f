"""Finished rows on disk, by program, target and versions, so that a search can be resumed.

A row is one small file under $XDG_CACHE_HOME/bytescope/compare; its name is a digest of everything that decides its
figures. Files are written completely or not at all; each holds a digest of its answer, and a damaged one counts as
absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.files import write_whole

# Rises when a cached answer changes its meaning.
LAYOUT = 6

# Variables that change what is compiled, or what a device has available.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION")
_PREFIXES = ("JAX_", "XLA_PYTHON_CLIENT_")

# Folders of memory/ that search or show results: a change there leaves rows valid.
_SHOWING = ("commands", "formulas", "report", "view")
# Of these folders only the modules that make a row count; the others choose what is compiled, or predict from a row.
_MAKING = {
    "compare": ("row_cache", "worker"),
    "remat": ("block_graph",),
    "seconds": ("products", "reading", "step_schedule"),
}
# The folders that choose: what they chose is part of a row whose remat policy is `auto`.
_CHOOSING = ("remat", "seconds")


def folder(env: Mapping[str, str] | None = None) -> Path:
    """The folder of rows; `env` stands for this process's environment."""
    env = os.environ if env is None else env
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bytescope" / "compare"


def source_digest(packages: Iterable[Path], choosing: bool = False) -> str:
    """A digest, in hex, of this package's analysis and of every .py file under `packages`, names included.

    choosing: of what chooses a plan, too.
    """
    memory = Path(__file__).parents[1]
    own = [
        path
        for path in memory.rglob("*.py")
        if (room := path.relative_to(memory).parts[0]) not in _SHOWING
        and (path.stem in _MAKING.get(room, (path.stem,)) or (choosing and room in _CHOOSING))
    ]
    digest = hashlib.sha256()
    for path in sorted([*own, *(file for package in packages for file in package.rglob("*.py"))]):
        digest.update(f"{path.parent.name}/{path.name}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key(
    config: Mapping[str, Any],
    target: str,
    versions: Mapping[str, str],
    sources: str,
    measure: bool,
    env: Mapping[str, str] | None = None,
    choice: str = "",
) -> str:
    """The name of a row: a digest, in hex, of the resolved config, the target, versions, sources and environment.

    choice: a digest of what chooses a part of the program, "" where the config says all of it. Rows that are
    measured, or compiled for this machine's devices, carry its name too.
    """
    env = os.environ if env is None else env
    settings = {name: value for name, value in env.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    # A home folder may be shared by machines, and `local` is other devices on each.
    machine = platform.node() if measure or target.partition(":")[0] in ("local", "cpu") else ""
    parts = [LAYOUT, dict(config), target, dict(versions), sources, measure, settings, machine, choice]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read(place: Path, name: str) -> dict[str, Any] | None:
    """The answer of a finished row in the folder `place`, None when there is none that can be read."""
    try:
        digest, _, text = (place / f"{name}.json").read_text(encoding="utf-8").partition("\n")
        if digest != _digest(text):
            return None
        value = json.loads(text)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("status") == "ok" else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(place: Path, name: str, answer: Mapping[str, Any]) -> None:
    """Keeps an answer in the folder `place`. Where that cannot be written, nothing is kept and nothing raised."""
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(answer)
        write_whole(place / f"{name}.json", f"{_digest(text)}\n{text}")
