"""Extends jax's persistent compilation cache: saves HloProtos next to its entries.

An executable from the cache has no heap trace, so the HloProto of a compile is saved next to its entry, under jax's
key, and is loaded with it.
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
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.hlo.jax_types import LoweredStage

# The logger that prints the key of an entry that is read or written. No public API returns the key.
_COMPILER = logging.getLogger("jax._src.compiler")
_KEYED = re.compile("(?i)persistent compilation cache (hit|miss) for")
# Suffix and maximum number of an entry's protos. Programs that differ only in names and source lines share an entry.
_BUFFERS, _MAX_PROTOS = ".buffers.gz", 4
RENAMED = (
    "from the compilation cache: names and source lines are from the program that filled the cache entry, which is "
    "otherwise identical"
)
_watching = threading.Lock()


def _cache_folder() -> str:
    import jax

    return jax.config.jax_compilation_cache_dir or ""  # type: ignore[attr-defined]  # jax sets its options at run time


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry that jax looked up in its compilation cache.

    key: the cache key. hit: whether the cache had the entry.
    """

    key: str
    hit: bool

    def path(self) -> Path | None:
        """Returns the file of the entry; None if the cache is not on a local disk."""
        folder = _cache_folder()
        return Path(folder, f"{self.key}-cache") if folder and "://" not in folder else None

    def load_proto(self, program: str, *, renamed: bool = False) -> tuple[bytes, Mapping[str, Any]] | None:
        """Returns (serialized HloProto, JSON values) that `save_proto` saved for a program beside this cache entry;
        None if nothing was saved.

        program: the program's hash from `digest`. renamed: whether to use the newest proto of a program that differs
        only in names and source lines, if nothing was saved for this program.
        """
        path = self.path()
        if path is None or not path.exists():
            return None
        candidates = [self._proto_path(path, program)]
        if renamed:
            candidates += sorted(path.parent.glob(self._proto_path(path, "*").name), key=_newest_first)
        for candidate in candidates:
            with contextlib.suppress(OSError, EOFError, zlib.error, ValueError):  # the file is missing or damaged
                head, _, proto = gzip.decompress(candidate.read_bytes()).partition(b"\n")
                saved = json.loads(head)
                return proto, saved if candidate == candidates[0] else {**saved, "notes": [*saved["notes"], RENAMED]}
        return None

    def save_proto(self, program: str, proto: bytes, more: Mapping[str, Any]) -> None:
        """Saves a program's serialized HloProto next to its cache entry. Does nothing if the entry does not exist. Also
        removes protos whose entry no longer exists.

        program: the program's hash from `digest`. more: JSON values that are saved with the proto.
        """
        path = self.path()
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError):  # if the disk is full, the next report compiles again
            whole = self._proto_path(path, program)
            partial = whole.with_name(f".{whole.name}.{threading.get_ident()}")
            packed = io.BytesIO()
            with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as out:
                out.write(json.dumps(dict(more)).encode() + b"\n" + proto)
            partial.write_bytes(packed.getvalue())
            partial.replace(whole)
            _remove_old_protos(path)

    @contextlib.contextmanager
    def removed(self) -> Iterator[bool]:
        """Context manager that removes the entry, so that jax compiles the program and writes the entry again. Yields
        whether the entry could be removed.

        The old entry is restored if jax does not write a new one, for example because the compilation was shorter than
        jax's minimum for caching.
        """
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
    def _proto_path(path: Path, program: str) -> Path:
        return path.with_name(f"{path.name.removesuffix('-cache')}-{program}{_BUFFERS}")


def _newest_first(path: Path) -> float:
    # A deleted file comes last.
    try:
        return -path.stat().st_mtime
    except OSError:
        return math.inf


def _remove_old_protos(entry: Path) -> None:
    protos = sorted(entry.parent.glob(f"*{_BUFFERS}"), key=_newest_first)
    own = [path for path in protos if path.name.startswith(entry.name.removesuffix("cache"))]
    orphans = [path for path in protos if not (entry.parent / f"{path.name.rpartition('-')[0]}-cache").exists()]
    for path in {*own[_MAX_PROTOS:], *orphans}:
        path.unlink(missing_ok=True)


def digest(lowered: LoweredStage) -> str:
    """Returns a hash of a program's text, including names and source lines. It tells apart programs that share a cache
    entry: jax's cache key ignores names and lines, but a report shows them. Returns "" if the program has no text or
    the cache is disabled.
    """
    if not _cache_folder():
        return ""
    try:
        out = io.BytesIO()
        module: Any = lowered.compiler_ir("stablehlo")
        module.operation.write_bytecode(out)
    except Exception:  # stages of other kinds have no StableHLO text
        return ""
    return hashlib.sha256(out.getvalue()).hexdigest()[:12]


@contextlib.contextmanager
def record_lookups() -> Iterator[list[Entry]]:
    """Context manager that records the cache entries that jax looks up in this thread. Yields the list of entries. The
    last entry belongs to the compiled program."""
    entries: list[Entry] = []
    thread = threading.get_ident()

    def record_entry(record: logging.LogRecord) -> bool:
        keyed = _KEYED.match(str(record.msg))
        if keyed and record.thread == thread and isinstance(record.args, tuple):
            entries.append(Entry(str(record.args[-1]), keyed[1].lower() == "hit"))
        return record.levelno >= passing

    if not _watching.acquire(blocking=False):  # another thread is already watching, so no proto is saved
        yield entries
        return
    level, passing = _COMPILER.level, _COMPILER.getEffectiveLevel()
    _COMPILER.addFilter(record_entry)
    _COMPILER.setLevel(logging.DEBUG)
    try:
        yield entries
    finally:
        _COMPILER.setLevel(level)
        _COMPILER.removeFilter(record_entry)
        _watching.release()
