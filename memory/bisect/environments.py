"""Makes a virtual environment for each version of jax, with a Python interpreter that supports it, `venv` and `pip
install`.

Finished environments are kept and used again. They are in the user's cache folder, `bytescope/bisect/environments` in
$XDG_CACHE_HOME or in ~/.cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from bytescope.memory.compare import row_cache
from bytescope.memory.errors import ReportError, one_line

# bytescope supports jax from this version on. Programs of older versions are dumped by standalone_dump.py.
SUPPORTED_FROM = (0, 10, 2)
# standalone_dump.py supports jax from this version on.
STANDALONE_FROM = (0, 4, 30)
# The first version of jax whose plugin uses CUDA 13.
_CUDA_13_FROM = (0, 7, 2)
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
_RELEASE = re.compile(r"\d+(\.\d+)+")


def cache_folder() -> Path:
    """Returns the folder that keeps environments and measurements: `bytescope/bisect` in the user's cache folder."""
    return row_cache.folder().parent / "bisect"


def parse_version(text: str) -> tuple[int, ...]:
    """Returns the numbers of a jax version: (0, 10, 2) for "0.10.2". Raises ReportError if the text is not a
    release, such as "0.10.2rc1"."""
    if not _RELEASE.fullmatch(text):
        raise ReportError(f"{text!r} is not a released version of jax: give a release such as 0.10.2")
    return tuple(map(int, text.split(".")))


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python interpreter.

    Fields:
        path: the executable.
        versions: the released versions of jax that pip can install for this interpreter, from old to new.
    """

    path: str
    versions: tuple[str, ...]


@functools.cache
def read_interpreter(path: str) -> Interpreter:
    """Starts the Python interpreter at `path`, asks its pip which versions of jax the package index has for it, and
    returns both as an `Interpreter`.

    Raises ReportError if the interpreter cannot be started, has no pip, or if pip cannot reach the package index.
    """
    command = [path, *_PIP, "index", "versions", "jax"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ReportError(
            f"{path} cannot be started ({error.strerror}): give a Python interpreter with --python"
        ) from error
    listed = re.search(r"Available versions: (.*)", done.stdout)
    if listed is None:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")] or [""]
        raise ReportError(
            f"pip of {path} cannot list the versions of jax ({one_line(lines[-1], 160)}): check the network, or use "
            "--python to give an interpreter that has pip"
        )
    return Interpreter(path, tuple(sorted(listed[1].split(", "), key=parse_version)))


def installed_interpreters() -> Iterator[str]:
    """Yields the paths of the Python interpreters on this machine: first the running interpreter, then the
    interpreters on PATH, then those of pyenv, each group from new to old."""
    yield sys.executable
    names = [f"python3.{minor}" for minor in range(20, 9, -1)]
    yield from filter(None, map(shutil.which, names))
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [path for path in root.glob("3.*/bin/python") if _RELEASE.fullmatch(path.parts[-3])]
    yield from map(str, sorted(found, key=lambda path: parse_version(path.parts[-3]), reverse=True))


def choose_versions(text: str, python: str | None) -> tuple[Interpreter, tuple[str, ...]]:
    """Parses the value of --jax, and chooses a Python interpreter that supports all of its versions.

    Args:
        text: the value of --jax. `0.10.2..0.12.0` means all releases from 0.10.2 to 0.12.0, and `0.10.2..` means all
            releases from 0.10.2 on. `0.10.2,0.11.1,0.12.0` lists the versions in the order of the search.
        python: path of the interpreter that --python names; None for the first installed interpreter that supports all
            versions.

    Returns (interpreter, versions).

    Raises ReportError if fewer than two versions are named, if a version is older than 0.4.30 or no release, or if no
    interpreter supports all versions.
    """
    first, dots, last = (part.strip() for part in text.partition(".."))
    named = [first, last] if dots else [part.strip() for part in text.split(",")]
    if dots and not last:
        named = [first]
    for version in named:
        if parse_version(version) < STANDALONE_FROM:
            oldest = ".".join(map(str, STANDALONE_FROM))
            raise ReportError(f"--jax={text}: jax {version} is too old: give jax {oldest} or newer")
    if dots and last and parse_version(first) >= parse_version(last):
        raise ReportError(f"--jax={text} contains no versions: write the older version first")
    if not dots and len(set(named)) < 2:
        raise ReportError(f"--jax={text} names only one version: give at least two, such as 0.10.2..0.12.0")
    paths = list(dict.fromkeys([python] if python else installed_interpreters()))
    interpreters, problems = [], []
    for path in paths:
        try:
            interpreters.append(read_interpreter(path))
        except ReportError as error:
            problems.append(str(error))
    if dots and not last and interpreters:
        last = max((each.versions[-1] for each in interpreters), key=parse_version)
        named.append(last)
    for interpreter in interpreters:
        missing = [version for version in named if version not in interpreter.versions]
        if missing:
            problems.append(f"{interpreter.path} does not support jax {', '.join(missing)}")
        elif dots:
            ends = parse_version(first), parse_version(last)
            between = [each for each in interpreter.versions if ends[0] <= parse_version(each) <= ends[1]]
            return interpreter, tuple(between)
        else:
            return interpreter, tuple(dict.fromkeys(named))
    raise ReportError(
        f"--jax={text}: {problems[0]}; install a Python interpreter that supports all these versions, or give its path "
        "with --python"
    )


def jax_requirement(version: str, platform: str, is_old_gpu: bool = False) -> list[str]:
    """Returns the pip requirements that install a version of jax with the plugin of a platform, such as
    ["jax[cuda13]==0.11.0"].

    Args:
        version: the version of jax.
        platform: "cpu", "cuda", "rocm" or "tpu".
        is_old_gpu: True if CUDA 13 no longer supports the GPU, so that the plugin for CUDA 12 is needed.
    """
    if platform == "cuda":
        cuda = "cuda12" if is_old_gpu or parse_version(version) < _CUDA_13_FROM else "cuda13"
        return [f"jax[{cuda}]=={version}"]
    if platform == "rocm":
        return [f"jax[rocm7-local]=={version}"]
    if platform == "tpu":
        return [f"jax[tpu]=={version}"]
    return [f"jax=={version}"]


def own_requirements(with_trainer: bool) -> list[str]:
    """Returns the pip requirements of bytescope, except jax. `with_trainer`: whether to include the packages of the
    extra `train`."""
    out = []
    for line in metadata.requires("bytescope") or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if requirement.startswith("jax") or ("extra" in marker and not (with_trainer and '"train"' in marker)):
            continue
        out.append(requirement)
    return out


def make_environment(interpreter: str, version: str, jax: Sequence[str], more: Sequence[str]) -> Path:
    """Makes a virtual environment with one version of jax, and returns the path of its Python interpreter. If an
    environment with the same interpreter and requirements exists already, returns its interpreter.

    A new environment starts as a copy of an environment with another version of jax and otherwise equal requirements.
    The copy consists of hard links, so it takes no disk space, and pip replaces only the packages that differ. An
    interrupted installation leaves nothing in the cache.

    Args:
        interpreter: path of the Python interpreter.
        version: the version of jax, which names the folder.
        jax: pip requirements that install this version.
        more: all other pip requirements.

    Raises ReportError if venv or pip fails.
    """
    same = [os.path.realpath(interpreter), *(each.partition("==")[0] for each in jax), *more]
    digest = hashlib.sha256("\0".join(same).encode()).hexdigest()[:8]
    siblings = cache_folder() / "environments" / digest
    folder, python = siblings / f"jax-{version}", Path("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (folder / python).exists():
        return folder / python
    partial = siblings / f".jax-{version}.{os.getpid()}"
    siblings.mkdir(parents=True, exist_ok=True)
    try:
        if not _copy_with_links(siblings, partial):
            _run([interpreter, "-m", "venv", str(partial)], f"{interpreter} -m venv")
        # Bytecode is written for what a worker imports, when it imports it: a small part of jax and scipy.
        _run([str(partial / python), *_PIP, "install", "--no-compile", *jax, *more], f"pip install {jax[0]}")
        # The interpreter finds its packages relative to itself, so the folder can be renamed.
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / python


def _copy_with_links(siblings: Path, new: Path) -> bool:
    """Copies one of the finished environments in the folder `siblings` to the folder `new`, as hard links. Returns
    True; if there is no finished environment or if the file system has no hard links, returns False. When pip changes
    the copy, the original stays as it is, because pip replaces files and never writes into existing ones."""
    finished = sorted(path for path in siblings.iterdir() if not path.name.startswith("."))
    if not finished:
        return False
    try:
        shutil.copytree(finished[-1], new, symlinks=True, copy_function=os.link)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        return False
    return True


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]
        reason = one_line((lines or done.stderr.splitlines() or ["no message"])[0], 200)
        raise ReportError(
            f"{what} failed ({reason}): check the network and the disk space, or give other versions of jax"
        )
