"""jax's persistent compilation cache when it is damaged: entries that cannot be read are removed and compiled again.

jax itself warns about such an entry at every start and never replaces it: what a process killed while it wrote one
leaves behind costs its compile, and two lines, for ever.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MESSAGE = "Error (reading|writing) persistent compilation cache"
_ENTRY = re.compile(MESSAGE + r" entry for '([^']+)': (.*)", re.DOTALL)


def mend(tell: Callable[[str], None]) -> None:
    """From now on damaged entries are removed, and the first is told in a line in place of jax's warnings."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        found = _ENTRY.match(str(message))
        if found is None:
            plain(message, category, filename, lineno, *rest)
            return
        import jax

        folder, (does, program, why) = Path(jax.config.jax_compilation_cache_dir or ""), found.groups()
        if does == "reading":
            remove_damaged(folder, program)
        if does not in told:
            told.add(does)
            tell({"reading": f"damaged entries of the compilation cache {folder} are removed and compiled again",
                  "writing": f"the compilation cache {folder} cannot be written ({_short(why)}): the next start will "
                             "compile again"}[does])

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


def _short(text: str) -> str:
    return " ".join(text.split())[:120]
