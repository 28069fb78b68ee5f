"""Writes files so that readers never see a partial file, and names the folders of caches."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bytescope.memory.environment import cache_home


def cache_folder(name: str, env: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of one of this package's caches: `bytescope/NAME` in $XDG_CACHE_HOME, or in ~/.cache.

    env: the environment variables (default: the variables of this process).
    """
    return cache_home(env) / "bytescope" / name


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to a temporary file beside `path` and renames it to `path`, so that readers never see a partial
    file.

    Devices and pipes, such as /dev/null, are written to directly. If writing fails, the temporary file is removed.
    Raises OSError with the path.
    """
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path = Path(os.path.realpath(path))  # replaces the target of a symbolic link, not the link
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:32]}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # the error of a full disk has no file name
        raise
