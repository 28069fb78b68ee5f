"""Finished rows on disk, by program, target, versions and sources, so that a search can be resumed.

`making_rows` lists the modules of bytescope.memory that make a row; a factory adds the files of its own program.

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
from types import ModuleType
from typing import Any

from bytescope.memory.files import write_whole

# Rises when a cached answer changes its meaning.
LAYOUT = 7

# Variables that change what is compiled, or what a device has available.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION")
_PREFIXES = ("JAX_", "XLA_PYTHON_CLIENT_")


def folder(env: Mapping[str, str] | None = None) -> Path:
    """The folder of rows; `env` stands for this process's environment."""
    env = os.environ if env is None else env
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bytescope" / "compare"


def making_rows() -> tuple[ModuleType, ...]:
    """The modules, and packages with all their modules, whose code makes a row: what compiles, reads and attributes a
    program. Modules that show rows, or that predict from a finished row, are not among them."""
    from bytescope.memory import analysis, cost, devices, errors, hlo, jaxprs, peak, program, records, units
    from bytescope.memory.compare import measured_steps, prepared_program, program_factory, row_cache, worker
    from bytescope.memory.seconds import products, reading, step_schedule

    compare = (measured_steps, prepared_program, program_factory, row_cache, worker)
    return (
        *(analysis, cost, devices, errors, hlo, jaxprs, peak, program, records, units),
        *compare,
        *(products, reading, step_schedule),
    )


def source_files(modules: Iterable[ModuleType]) -> list[Path]:
    """The .py files of modules; of a package those of all its modules."""
    files: list[Path] = []
    for module in modules:
        if hasattr(module, "__path__"):
            files += [path for folder in module.__path__ for path in Path(folder).rglob("*.py")]
        elif module.__file__ is not None:
            files.append(Path(module.__file__))
    return sorted(files)


def digest_of(files: Iterable[Path]) -> str:
    """A digest, in hex, of files: their names, with that of the folder, and what is in them."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.parent.name}/{path.name}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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
    """The name of a row: a digest, in hex, of the resolved keys, the target, versions, sources and environment.

    factory: the factory's reference. choice: a digest of what chooses a part of the program, "" where the keys say all
    of it. Rows that are measured, or compiled for this machine's devices, carry its name too.
    """
    env = os.environ if env is None else env
    settings = {name: value for name, value in env.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    # A home folder may be shared by machines, and `local` is other devices on each.
    machine = platform.node() if measure or target.partition(":")[0] in ("local", "cpu") else ""
    parts = [LAYOUT, factory, dict(config), target, dict(versions), sources, measure, settings, machine, choice]
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
