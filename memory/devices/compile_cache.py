"""Two additions to jax's persistent compilation cache: it keeps HloProtos, and it removes damaged entries.

An executable from the cache has no heap trace. So the HloProto of a compile is saved beside its entry, under jax's own
key, and is loaded with it. jax warns about an unreadable entry at every start and never replaces it: an entry of a
process that was killed while it wrote costs a compile and two lines at every later start. Here such entries are removed
and compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import math
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from bytescope.memory.hlo.jax_types import LoweredStage

MESSAGE = "Error (reading|writing) persistent compilation cache"
# The logger that prints the key of an entry that is read or written: no public API returns it.
_COMPILER = logging.getLogger("jax._src.compiler")
_KEYED = re.compile("(?i)persistent compilation cache (hit|miss) for")
# Suffix of the saved protos. An entry has several: programs that differ only in names and source lines share it.
_BUFFERS, _MAX_PROTOS = ".buffers.gz", 4
RENAMED = (
    "out of the compilation cache: names and source lines are those of the program that filled it, which "
    "differs from this one in nothing else"
)
_watching = threading.Lock()
_ENTRY = re.compile(MESSAGE + r" entry for '([^']+)': (.*)", re.DOTALL)


def remove_damaged_entries(tell: Callable[[str], None]) -> None:
    """Removes damaged entries when jax warns about them, from now on in this process.

    tell: gets one line at the first failed read and one at the first failed write, in place of jax's warnings.
    """
    reported: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = _ENTRY.match(str(message))
        if found is None:
            plain(message, category, filename, lineno, file, line)
            return
        folder, (operation, program, why) = Path(_folder()), found.groups()
        if operation == "reading":
            remove_damaged(folder, program)
        if operation in reported:
            return
        reported.add(operation)
        if operation == "reading":
            tell(f"damaged entries of the compilation cache {folder} are removed and compiled again")
        else:
            reason = " ".join(why.split())[:120]
            tell(f"the compilation cache {folder} cannot be written ({reason}): the next start will compile again")

    plain = warnings.showwarning
    warnings.filterwarnings("always", message=MESSAGE)
    warnings.showwarning = show


@contextlib.contextmanager
def damaged_entries_removed() -> Iterator[None]:
    """A context in which damaged entries are removed without a message."""
    with warnings.catch_warnings():
        remove_damaged_entries(lambda line: None)
        yield


def remove_damaged(folder: Path, program: str) -> None:
    """Removes the entries of a program that cannot be decompressed; `program`: the name that jax gives it."""
    for path in folder.glob(f"{program}-*-cache"):
        with contextlib.suppress(OSError):
            if not _is_readable(path):
                path.unlink()


def _is_readable(path: Path) -> bool:
    from jax._src.compilation_cache import decompress_executable  # the library it uses depends on the installation

    content = path.read_bytes()
    try:
        return bool(decompress_executable(content))
    except Exception:  # each library has exceptions of its own
        return False


def _folder() -> str:
    """Returns the folder or the URL of jax's compilation cache; "" without one."""
    import jax

    return jax.config.jax_compilation_cache_dir or ""  # type: ignore[attr-defined]  # jax sets its options at run time


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the cache that jax looked up: its key, and whether the cache had it."""

    key: str
    hit: bool

    def path(self) -> Path | None:
        """Returns the file of the entry; None without a cache on a local disk."""
        folder = _folder()
        return Path(folder, f"{self.key}-cache") if folder and "://" not in folder else None

    def kept(self, program: str, *, renamed: bool = False) -> tuple[bytes, Mapping[str, Any]] | None:
        """Returns the HloProto that was saved for a program, and the JSON saved with it; None if there is none.

        renamed: if the program has none, returns the newest of a program that differs only in names and source lines.
        """
        path = self.path()
        if path is None or not path.exists():
            return None
        found = [self._beside(path, program)]
        if renamed:
            found += sorted(path.parent.glob(self._beside(path, "*").name), key=_age)
        for each in found:
            with contextlib.suppress(OSError, EOFError, zlib.error, ValueError):  # none, or damaged
                head, _, proto = gzip.decompress(each.read_bytes()).partition(b"\n")
                told = json.loads(head)
                return proto, told if each == found[0] else {**told, "notes": [*told["notes"], RENAMED]}
        return None

    def keep(self, program: str, proto: bytes, more: Mapping[str, Any]) -> None:
        """Saves a serialized HloProto beside the program's entry in the compilation cache, if there is one; removes
        the protos whose entry is gone. `more`: what is saved with it."""
        path = self.path()
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError):  # if the disk is full, the next report compiles again
            whole = self._beside(path, program)
            partial = whole.with_name(f".{whole.name}.{threading.get_ident()}")
            packed = io.BytesIO()
            with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as out:
                out.write(json.dumps(dict(more)).encode() + b"\n" + proto)
            partial.write_bytes(packed.getvalue())
            partial.replace(whole)
            _clear(path)

    @contextlib.contextmanager
    def absent(self) -> Iterator[bool]:
        """A context without the entry, in which jax compiles and writes it again; its value is whether the entry could
        be removed. The entry is restored if jax does not write it, as for compiles below its minimum seconds."""
        path, content = self.path(), b""
        if path is None:
            yield False
            return
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            path.unlink()
        gone = not path.exists()
        try:
            yield gone
        finally:
            if gone and content and not path.exists():
                with contextlib.suppress(OSError):
                    path.write_bytes(content)

    @staticmethod
    def _beside(path: Path, program: str) -> Path:
        return path.with_name(f"{path.name.removesuffix('-cache')}-{program}{_BUFFERS}")


def _age(path: Path) -> float:
    """Returns a key that sorts the newest file first and deleted files last."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return math.inf


def _clear(entry: Path) -> None:
    """Removes the oldest protos of an entry, and all protos without an entry."""
    found = sorted(entry.parent.glob(f"*{_BUFFERS}"), key=_age)
    own = [path for path in found if path.name.startswith(entry.name.removesuffix("cache"))]
    gone = [path for path in found if not (entry.parent / f"{path.name.rpartition('-')[0]}-cache").exists()]
    for path in {*own[_MAX_PROTOS:], *gone}:
        path.unlink(missing_ok=True)


def digest(lowered: LoweredStage) -> str:
    """Returns a hash of a program's text with its names and source lines, which jax's key leaves out and a report
    shows; "" if the stage has no text or there is no cache."""
    if not _folder():
        return ""
    try:
        out = io.BytesIO()
        lowered.compiler_ir("stablehlo").operation.write_bytecode(out)
    except Exception:  # other stages have no such text
        return ""
    return hashlib.sha256(out.getvalue()).hexdigest()[:12]


@contextlib.contextmanager
def watched() -> Iterator[list[Entry]]:
    """A context that lists the entries that jax looks up in this thread, in order: the last is the program's own."""
    found: list[Entry] = []
    thread = threading.get_ident()

    def take(record: logging.LogRecord) -> bool:
        keyed = _KEYED.match(str(record.msg))
        if keyed and record.thread == thread and isinstance(record.args, tuple):
            found.append(Entry(str(record.args[-1]), keyed[1].lower() == "hit"))
        return record.levelno >= passing

    if not _watching.acquire(blocking=False):  # another thread is watching: then nothing is saved
        yield found
        return
    level, passing = _COMPILER.level, _COMPILER.getEffectiveLevel()
    _COMPILER.addFilter(take)
    _COMPILER.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        _COMPILER.setLevel(level)
        _COMPILER.removeFilter(take)
        _watching.release()
