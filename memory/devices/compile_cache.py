"""jax's persistent compilation cache: what it lacks for a report, and what it leaves lying when it is damaged.

An executable out of the cache has no heap trace any more. So the HloProto of a compile is kept beside its entry, by
jax's own key, and found again with it. jax warns about an entry that cannot be read at every start and never replaces
it: what a process killed while it wrote one leaves behind costs its compile, and two lines, for ever. Here such entries
are removed and compiled again.
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

from bytescope.memory.hlo.jax_stages import LoweredStage

MESSAGE = "Error (reading|writing) persistent compilation cache"
# The logger that tells the key of an entry, found or written: nothing public does.
_COMPILER = logging.getLogger("jax._src.compiler")
_KEYED = re.compile("(?i)persistent compilation cache (hit|miss) for")
# Beside an entry: protos of the programs that are the same but for the names and lines in their source, newest first.
_BUFFERS, _MOST = ".buffers.gz", 4
RENAMED = (
    "out of the compilation cache: names and source lines are those of the program that filled it, which "
    "differs from this one in nothing else"
)
_watching = threading.Lock()
_ENTRY = re.compile(MESSAGE + r" entry for '([^']+)': (.*)", re.DOTALL)


def mend(tell: Callable[[str], None]) -> None:
    """From now on damaged entries are removed, and the first is told in a line in place of jax's warnings."""
    told: set[str] = set()

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
        folder, (does, program, why) = Path(_folder()), found.groups()
        if does == "reading":
            remove_damaged(folder, program)
        if does not in told:
            told.add(does)
            tell(
                {
                    "reading": f"damaged entries of the compilation cache {folder} are removed and compiled again",
                    "writing": f"the compilation cache {folder} cannot be written ({_short(why)}): the next start will "
                    "compile again",
                }[does]
            )

    plain = warnings.showwarning
    warnings.filterwarnings("always", message=MESSAGE)
    warnings.showwarning = show


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """A context in which damaged entries are removed without a word."""
    with warnings.catch_warnings():
        mend(lambda line: None)
        yield


def remove_damaged(folder: Path, program: str) -> None:
    """Removes the entries of a program, by the name that jax gives it, which cannot be decompressed."""
    for path in folder.glob(f"{program}-*-cache"):
        with contextlib.suppress(OSError):
            if not _reads(path):
                path.unlink()


def _reads(path: Path) -> bool:
    from jax._src.compilation_cache import decompress_executable  # the library it uses depends on the installation

    content = path.read_bytes()
    try:
        return bool(decompress_executable(content))
    except Exception:  # each of the libraries has its own
        return False


def _folder() -> str:
    """Returns the folder or the URL of jax's compilation cache; "" without one."""
    import jax

    return jax.config.jax_compilation_cache_dir or ""  # type: ignore[attr-defined]  # jax sets its options at run time


def _short(text: str) -> str:
    return " ".join(text.split())[:120]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the cache that jax asked for: its key, and whether it was there."""

    key: str
    hit: bool

    def path(self) -> Path | None:
        """The file of the entry; None without a cache on a local disk."""
        folder = _folder()
        return Path(folder, f"{self.key}-cache") if folder and "://" not in folder else None

    def kept(self, program: str, *, renamed: bool = False) -> tuple[bytes, Mapping[str, Any]] | None:
        """The HloProto that was kept of this entry for a program, and what was kept with it; None without one.

        renamed: of one that is the same but for names and lines, the newest, where there is none of this.
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
        """Keeps a proto beside the entry, if there is one; protos of entries that are gone are removed."""
        path = self.path()
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError):  # a full or foreign disk costs the next report a compile, no more
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
        """The entry is gone meanwhile, and jax compiles and writes it again; whether it is. What jax does not write, a
        compile of less than its shortest seconds, is put back."""
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
    """A key that sorts the newest first; what is gone meanwhile comes last."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return math.inf


def _clear(entry: Path) -> None:
    """Removes the oldest protos of an entry, and all of entries that are gone."""
    found = sorted(entry.parent.glob(f"*{_BUFFERS}"), key=_age)
    own = [path for path in found if path.name.startswith(entry.name.removesuffix("cache"))]
    gone = [path for path in found if not (entry.parent / f"{path.name.rpartition('-')[0]}-cache").exists()]
    for path in {*own[_MOST:], *gone}:
        path.unlink(missing_ok=True)


def digest(lowered: LoweredStage) -> str:
    """A program's text with the names and lines of its source, which jax's key leaves out and a report shows; as a
    hash. "" for one that does not tell, and where there is no cache."""
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
    """The entries that jax asks the cache for in this thread meanwhile, in order: the last is the program's own."""
    found: list[Entry] = []
    thread = threading.get_ident()

    def take(record: logging.LogRecord) -> bool:
        keyed = _KEYED.match(str(record.msg))
        if keyed and record.thread == thread and isinstance(record.args, tuple):
            found.append(Entry(str(record.args[-1]), keyed[1].lower() == "hit"))
        return record.levelno >= passing

    if not _watching.acquire(blocking=False):  # by another thread: then nothing is kept
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
