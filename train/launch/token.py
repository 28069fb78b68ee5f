"""What tells the processes of one run from strangers at their port: a word that only they can read.

It is BYTESCOPE_TOKEN where a launcher sets that. Otherwise process 0 makes one up for this start and leaves it in a
file that its user alone may read, in the run directory that all processes share, for as long as it waits for them.
"""

import contextlib
import hmac
import os
import secrets
from pathlib import Path

VARIABLE = "BYTESCOPE_TOKEN"
FILE = ".rendezvous"


class Token:
    """The word of one start of a run.

    Args:
      workdir: the run directory if it is known yet, else None: then `runs` in the current folder takes its place.
      port: where process 0 listens; runs beside each other have different ones.
    """

    def __init__(self, workdir: Path | None, port: int):
        place = workdir or Path("runs") / "new"
        # In the directory where it exists already: it may be all that the machines share.
        self._files = (place / FILE, place.parent / f"{FILE}-{port}")
        self._made: Path | None = None

    def make(self) -> str:
        """The word for process 0 to ask for; "" where no file can be written: then whoever comes is taken."""
        if word := os.environ.get(VARIABLE, ""):
            return word
        word = secrets.token_hex(16)
        path = self._files[0] if self._files[0].parent.is_dir() else self._files[1]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of a start that was killed
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(word)
        except OSError:
            return ""
        self._made = path
        return word

    def read(self) -> str:
        """The word for another process to give; "" where there is none to be seen (yet)."""
        if word := os.environ.get(VARIABLE, ""):
            return word
        for path in self._files:
            with contextlib.suppress(OSError, ValueError):
                if word := path.read_text().strip():
                    return word
        return ""

    def remove(self) -> None:
        """Takes the file away again."""
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._made.unlink(missing_ok=True)


def matches(given: str, wanted: str) -> bool:
    """Whether a word is the right one; takes as long for one that is nearly right as for any other."""
    return not wanted or hmac.compare_digest(given.encode(), wanted.encode())
