"""The run directory: the identity of its run, the check that a run with this config may resume it, and its lock.

One process at a time trains in a run directory. The lock ends with the process that holds it, even if it is killed.
"""

import contextlib
import dataclasses
import errno
import glob
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.memory.errors import one_line
from bytescope.train.launch.processes import ALONE, Processes
from bytescope.train.program.config_files import flatten
from bytescope.train.source import CHECKPOINTS, CONFIG, METRICS
from bytescope.train.user_errors import UserError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

# Keys that may change when a run is resumed: they change how a step is computed or recorded, not the loss curve. A
# trailing dot stands for a group. All other keys, and the global batch, are the identity of the run.
FREE = (
    "mesh.",
    "pipeline.",
    "remat.",
    "loss.",
    "train.",
    "batch.micro",
    "batch.accumulation",
    "batch.tokens",
    "batch.mode",
    "data.prefetch",
    "data.workers",
    "data.source",
    "data.eval_source",
    "data.tokenizer",
    "data.dtype",
    "data.field",
    "data.skip_bad",
    "data.chat_template",
    "init.folder",
    "init.adapter",
    "model.attention",
    "model.attention_chunk",
    "model.mlp_chunk",
    "model.unroll",
    "xla.",
)
# Keys that may differ between processes: paths on their own machines, and settings of reading.
LOCAL = (
    "train.cache_dir",
    "data.prefetch",
    "data.workers",
    "data.source",
    "data.eval_source",
    "data.tokenizer",
    "data.chat_template",
    "init.folder",
    "init.adapter",
    "train.eval_prompts",
)
SHARED_S = 15.0  # maximum seconds until a network file system shows a file that another machine wrote
LOCK = "run.lock"
# Errors of flock on a file system without locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Files that an interrupted start may leave before it has claimed its directory.
BEFORE_CLAIM = (LOCK, f"{CONFIG}.tmp")
# Keys whose changes are not reported.
SILENT = ("train.", "data.prefetch", "data.workers")


def new_workdir(name: str) -> Path:
    """Returns a new path runs/<name>-<time>. The folder is not created."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [Path("runs") / f"{name}-{stamp}"] + [Path("runs") / f"{name}-{stamp}-{n}" for n in range(2, 100)]
    return next(path for path in candidates if not path.exists())


def check_path(workdir: Path) -> None:
    """Raises UserError if the path contains *, ? or [, because Orbax could not read the checkpoints there.

    Orbax uses the unescaped path in a glob pattern (merge_ocdbt_per_process_files in its ocdbt_utils.py). With these
    characters the pattern matches no folder, or the folder of another run.
    """
    require_utf8(workdir)
    path = os.path.abspath(workdir)
    if glob.escape(path) != path:
        raise UserError(
            f"the path {path} has one of the characters * ? [, so a checkpoint that is written there "
            "could not be read: rename the folder or choose another --workdir"
        )


def require_utf8(folder: Path) -> None:
    """Raises UserError if the path is not valid UTF-8, which tensorstore and tokenizers require."""
    path = os.path.abspath(folder)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the path {path} is not valid UTF-8: rename the folder, or choose another folder") from error


def interrupted_note(workdir: Path) -> str:
    """Returns the line to print when Ctrl-C ends a run at once. It names the checkpoint to resume from, or says that
    none is saved."""
    steps = [int(path.name) for path in (workdir / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    if not steps:
        return "interrupted before the first checkpoint: nothing is saved"
    return f"interrupted: bytescope train with --workdir={workdir} resumes from step {max(steps)}"


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file by `text`. The file always has either the old or the new content, even after a
    power failure.

    Raises:
      OSError: the file could not be written and still has the old content. The error's `filename` is `path`.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


@dataclasses.dataclass(frozen=True)
class Identity:
    """The identity of a run: its config, data and initial weights. It is recorded to check that a later start continues
    the same run.

    Fields:
      config: the config by dotted key.
      global_rows: number of sequences in a global batch.
      data: fingerprint of the data.
      weights, adapter: fingerprints of the initial weights and adapters, "" for random initial values.
    """

    config: dict[str, Any]
    global_rows: int
    data: str
    weights: str = ""
    adapter: str = ""

    @classmethod
    def from_config(
        cls, config: ConfigDict, global_rows: int, data_fingerprint: str, weights: str = "", adapter: str = ""
    ) -> "Identity":
        """Returns the identity of a run with this config. The other arguments are the sequences of a global batch and
        the fingerprints of the data, the initial weights and the adapters.
        """
        # Converted through JSON, so that tuples compare equal to the lists that a file returns.
        return cls(json.loads(json.dumps(flatten(config))), global_rows, data_fingerprint, weights, adapter)

    def everything(self) -> dict[str, Any]:
        """Returns all fields of the identity in one dict. Config keys are dotted."""
        return {
            **self.config,
            "global batch (sequences)": self.global_rows,
            "data": self.data,
            "weights of init.folder": self.weights,
            "adapters of init.adapter": self.adapter,
        }

    def curve(self) -> dict[str, Any]:
        """Returns the values that determine the loss curve, which may not change when a run is resumed."""
        return {key: value for key, value in self.everything().items() if not _matches(key, FREE)}


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key.startswith(p) if p.endswith(".") else key == p for p in patterns)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = sorted(set(old) | set(new))
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


@contextlib.contextmanager
def claimed(workdir: Path, identity: Identity, *, extend: bool, processes: Processes = ALONE) -> Iterator[list[str]]:
    """A context manager that reserves `workdir` for this run. Yields notes about settings that changed since the run's
    last start, one line each. Process 0 locks the directory for all processes.

    Args:
      identity: config, data and initial weights of the run.
      extend: whether the run may get more steps than it was planned for.
      processes: the processes of the run.

    Raises:
      UserError: the directory contains another run or other files, another process has locked it, more steps are asked
        for without `extend`, or the processes do not train the same run.
    """
    if not processes.first:
        yield claim_together(workdir, identity, extend=extend, processes=processes)
        return
    _refuse_foreign_folder(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(take_lock(workdir)) as lock:
        notes = claim_together(workdir, identity, extend=extend, processes=processes)
        yield [*(f"warning: {note}" for note in [lock.note] if note), *notes]


def _refuse_foreign_folder(workdir: Path) -> None:
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file: give a folder")
    if (
        workdir.exists()
        and not (workdir / CONFIG).exists()
        and any(entry.name not in BEFORE_CLAIM for entry in workdir.iterdir())
    ):
        raise UserError(f"{workdir} is not empty and is not a run directory: choose another --workdir")


def claim_together(workdir: Path, identity: Identity, *, extend: bool, processes: Processes = ALONE) -> list[str]:
    """Checks that all processes train the same run, then records the run in `workdir`, as `claim` does, in process 0.
    Returns one-line notes about settings that changed since the run's last start.

    `extend`: whether the run may get more steps than it was planned for.

    Raises:
      UserError: `claim` failed, this process has another config or other data than process 0, or the directory is not
        visible to it.
    """
    first = Identity(**processes.from_first(dataclasses.asdict(identity)))
    if differences := _differences(_shared_values(first), _shared_values(identity)):
        raise UserError(
            f"this process differs from process 0: {'; '.join(differences)}. Give all processes the same values"
        )
    notes = processes.from_first(claim(workdir, identity, extend=extend) if processes.first else None)
    deadline = time.monotonic() + SHARED_S
    while not (workdir / CONFIG).exists():  # a network file system may show the file late
        if time.monotonic() > deadline:
            raise UserError(
                f"the run directory {workdir} of process 0 is not visible on this machine: give a --workdir on a file "
                "system that all machines share"
            )
        time.sleep(0.1)
    return notes


def _shared_values(identity: Identity) -> dict[str, Any]:
    # These are equal in all processes of a run.
    return {key: value for key, value in identity.everything().items() if not _matches(key, LOCAL)}


def claim(workdir: Path, identity: Identity, *, extend: bool) -> list[str]:
    """Records this run in an empty `workdir`, or checks that `workdir` belongs to this run. Returns notes about changed
    settings, one line each.

    `identity`: config, data and initial weights of the run. `extend`: whether the run may get more steps than it was
    planned for.

    Raises:
      UserError: the directory contains another run or other files, or the run was planned for fewer steps and `extend`
        is False.
    """
    path = workdir / CONFIG
    _refuse_foreign_folder(workdir)
    notes = _check(path, identity, extend) if path.exists() else []
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dataclasses.asdict(identity), indent=1) + "\n")
    return notes


def _same_batch_remedy(old: Identity, new: Identity) -> str:
    if new.config.get("batch.tokens") or new.config.get("batch.accumulation_schedule"):  # these set the accumulation
        return ""
    ranks_and_micro = new.global_rows // new.config["batch.accumulation"]
    if old.global_rows == new.global_rows or old.global_rows % ranks_and_micro:
        return ""
    return (
        f"--config.batch.accumulation={old.global_rows // ranks_and_micro} makes the global batch "
        f"{old.global_rows} again. "
    )


def recorded(path: Path) -> Identity:
    """Returns the identity of a run (config, data, initial weights) from the config.json of its run directory. Raises
    UserError if the file is damaged.

    `path`: the path of config.json.
    """
    try:
        old = Identity(**json.loads(path.read_text()))
        numbers = [old.global_rows, *(old.config[key] for key in ("train.steps", "batch.accumulation"))]
        if not all(type(number) is int and number > 0 for number in numbers) or not isinstance(old.data, str):
            raise ValueError(
                "global_rows, train.steps and batch.accumulation must be positive integers, and data must be text"
            )
    except KeyError as error:
        raise _damaged(path, f"the required key {error} is missing") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, one_line(error)) from error
    # A key that the run's version did not have yet has today's default.
    return dataclasses.replace(old, config={**Identity.from_config(base.get_config(), 0, "").config, **old.config})


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}): restore it, or choose another --workdir")


def _has_begun(workdir: Path) -> bool:
    metrics, checkpoints = workdir / METRICS, workdir / CHECKPOINTS
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _check(path: Path, identity: Identity, extend: bool) -> list[str]:
    old = recorded(path)
    if not _has_begun(path.parent):  # for example a run that did not fit its device: no work would be lost
        return []
    if differences := _differences(old.curve(), identity.curve()):
        raise UserError(
            f"{path.parent} contains another run: {'; '.join(differences)}. "
            f"{_same_batch_remedy(old, identity)}Use the old values or another --workdir"
        )
    before, now = old.config["train.steps"], identity.config["train.steps"]
    if now > before and not extend:
        raise UserError(
            f"the run in {path.parent} was planned for {before} steps, not {now}: "
            "the learning rate would follow another schedule; pass --extend to accept that"
        )
    return [
        f"changed since the last start: {line}"
        for line in _differences(old.config, identity.config)
        if not _matches(line.split()[0], SILENT)
    ]


# ---- the lock -------------------------------------------------------------------------------------------------------


class Lock:
    """The lock that this process has on a run directory. `close` releases the lock. `note`: a warning if the lock is
    unreliable, else ""."""

    def __init__(self, file: IO[str], note: str = ""):
        self._file, self.note = file, note

    def close(self) -> None:
        """Releases the run directory.

        The lock file is not removed, because another process may already have opened it to lock it.
        """
        self._file.close()


def take_lock(workdir: Path) -> Lock:
    """Locks an existing run directory for this process.

    Raises:
      UserError: another process trains in it. The message has its process id and machine.
    """
    file = open(workdir / LOCK, "a+")  # noqa: SIM115  (closed by Lock.close)
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system does not support file locks (flock)")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _describe_holder(file)
        file.close()
        raise UserError(
            f"{workdir} is in use by {holder}: wait for that run or stop it, or choose another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            file.close()
            raise
        return Lock(
            file,
            f"{workdir} cannot be locked ({error.strerror}): make sure that no second training starts in it",
        )
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # on a full disk the lock works too, without the name of its holder
        file.seek(0)
        file.truncate()
        file.write(json.dumps(who) + "\n")
        file.flush()
    return Lock(file)


def _describe_holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        who: Any = json.loads(file.read())
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
