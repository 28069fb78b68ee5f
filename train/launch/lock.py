"""One training at a time in a run directory: a lock that ends with the process that holds it, however that ends."""

import errno
import json
import os
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from bytescope.train.user_errors import UserError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

LOCK = "run.lock"
# What the kernel says where a file system has no such locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Lock:
    """A run directory that is held; `close` releases it. `note`: a warning in words, "" if the lock is real."""

    def __init__(self, file: IO[str], note: str = ""):
        self._file, self.note = file, note

    def close(self) -> None:
        """Releases the run directory. The file stays: to remove it would take the lock of who opened it meanwhile."""
        self._file.close()


def take(workdir: Path) -> Lock:
    """Locks the run directory, which must exist, for this process.

    Raises:
      UserError: another process trains there; the message has its number and machine.
    """
    file = open(workdir / LOCK, "a+")  # noqa: SIM115  (closed by Lock.close)
    try:
        _flock(file)
    except BlockingIOError as error:
        holder = _holder(file)
        file.close()
        raise UserError(
            f"{workdir} is in use by {holder}: wait for that run or stop it, or choose another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            file.close()
            raise
        return Lock(
            file, f"{workdir} cannot be locked ({error.strerror}): see to it that no second training starts there"
        )
    _sign(file)
    return Lock(file)


def _flock(file: IO[str]) -> None:
    """Raises BlockingIOError if another process holds the lock, another OSError where there are no locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sign(file: IO[str]) -> None:
    """Writes into the file who holds it; on a full disk nobody learns it, and the lock holds all the same."""
    try:
        file.seek(0)
        file.truncate()
        file.write(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
            + "\n"
        )
        file.flush()
    except OSError:
        return


def _holder(file: IO[str]) -> str:
    """The holder in words."""
    try:
        file.seek(0)
        who: Any = json.loads(file.read())
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
