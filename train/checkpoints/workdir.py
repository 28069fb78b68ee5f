"""The run directory: the identity of its run, the check that a run with this config may resume it, and its lock.

One process at a time trains in a run directory. The lock ends with the process that holds it, even if it is killed.
"""

import contextlib
import dataclasses
import errno
import fcntl
import glob
import json
import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.memory.errors import one_line
from bytescope.train.config_fields import FIELDS, REMOVED
from bytescope.train.launch.processes import ALONE, Processes
from bytescope.train.program.config_files import flatten, override
from bytescope.train.program.run_command import Command
from bytescope.train.source import CHECKPOINTS, CONFIG, METRICS
from bytescope.train.user_errors import UserError

# Keys that may change when a run is resumed. All other keys, and the global batch, are the identity of the run. With
# experts the sequences of a micro-batch may be a part of it too (`_use_of_micro_batch`).
FREE = {key for key, field in FIELDS.items() if field.resumable}
# Keys that may differ between processes: paths on their own machines, and settings of reading.
LOCAL = {key for key, field in FIELDS.items() if field.path or field.local}
# Keys whose changes are not reported.
SILENT = {key for key, field in FIELDS.items() if field.resumable and not field.compiled and not field.contents}
# Field of Identity with a fingerprint of contents -> the keys that choose the contents.
CONTENTS = {
    contents: [key for key, field in FIELDS.items() if field.contents == contents]
    for contents in ("data", "weights", "adapter")
}
# Values of keys for paths that are no paths.
NAMES = ("", "stdlib", "bytes", "none")
MAX_DIFFERENCES = 8  # maximum number of differences in a message
# Keys that set the sequences of a micro-batch over all data-parallel ranks.
MICRO_BATCH = ("batch.micro", "batch.accumulation", "batch.tokens", "mesh.data", "mesh.fsdp", "mesh.expert")
SHARED_S = 15.0  # maximum seconds until a network file system shows a file that another machine wrote
LOCK = "run.lock"
# Errors of flock on a file system without locks. EBADF: NFS locks only files that are open for writing.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
# Files that an interrupted start may leave before it has claimed its directory.
BEFORE_CLAIM = (LOCK, f"{CONFIG}.tmp")


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
    return f"interrupted: bytescope train --workdir={workdir} resumes from step {max(steps)}"


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
      name: the config as the command line names it.
      given: the config keys that command lines have set; None for a run of a version that did not record them.
      folder: the folder that relative paths in the config start from.
      micro_rows: number of sequences in a micro-batch over all data-parallel ranks, 0 if unknown.
    """

    config: dict[str, Any]
    global_rows: int
    data: str
    weights: str = ""
    adapter: str = ""
    name: str = ""
    given: list[str] | None = None
    folder: str = ""
    micro_rows: int = 0

    @classmethod
    def from_config(
        cls,
        config: ConfigDict,
        global_rows: int,
        data_fingerprint: str,
        weights: str = "",
        adapter: str = "",
        *,
        micro_rows: int = 0,
    ) -> "Identity":
        """Returns the identity of a run with this config. The other arguments are the sequences of a global batch, the
        fingerprints of the data, the initial weights and the adapters, and the sequences of a micro-batch.
        """
        # Converted through JSON, so that tuples compare equal to the lists that a file returns.
        values = json.loads(json.dumps(flatten(config)))
        return cls(values, global_rows, data_fingerprint, weights, adapter, micro_rows=micro_rows)


def recordable(
    config: ConfigDict, command: Command, global_rows: int, *fingerprints: str, micro_rows: int = 0
) -> Identity:
    """Returns the identity of a start of a run.

    Args:
      config: the config of the run.
      command: the command of this start.
      global_rows: number of sequences in a global batch.
      fingerprints: the fingerprints of the data, the initial weights and the adapters.
      micro_rows: number of sequences in a micro-batch over all data-parallel ranks, 0 if unknown.
    """
    return dataclasses.replace(
        Identity.from_config(config, global_rows, *fingerprints),
        name=command.config,
        given=list(command.given),
        folder=os.getcwd(),
        micro_rows=micro_rows,
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = sorted(set(old) | set(new))
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _run_differences(old: Identity, new: Identity, ignored: Collection[str]) -> str:
    """Returns a text with the differences between two runs, except in the `ignored` keys. Returns "" if there are
    none."""
    before, now = (
        {key: value for key, value in run.config.items() if key not in ignored}
        | {"global batch (sequences)": run.global_rows}
        for run in (old, new)
    )
    lines = _differences(before, now)
    for field, keys in CONTENTS.items():
        if getattr(old, field) != getattr(new, field):
            paths = [{key: run.config.get(key) for key in keys} for run in (old, new)]
            other = f"{keys[0]}={paths[1][keys[0]]!r} has other content than before, or is read in another way"
            lines += _differences(*paths) or [other]
    more = [f"and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    return "; ".join([*lines[:MAX_DIFFERENCES], *more])


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
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            warnings = stack.enter_context(locked(workdir))
        except PermissionError as error:
            raise UserError(
                f"{error.filename or workdir} cannot be written ({error.strerror}): choose another --workdir, or "
                "change the permissions of the folder"
            ) from error
        yield [*warnings, *claim_together(workdir, identity, extend=extend, processes=processes)]


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
    if differences := _run_differences(first, identity, LOCAL):
        raise UserError(f"this process differs from process 0: {differences}. Give all processes the same values")
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
    notes = []
    if path.exists():
        notes = _check(path, identity, extend)
        identity = dataclasses.replace(identity, given=sorted({*(recorded(path).given or ()), *(identity.given or ())}))
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dataclasses.asdict(identity), indent=1) + "\n")
    return notes


def _use_of_micro_batch(config: dict[str, Any]) -> str:
    """Returns why the results of a mixture of experts depend on the sequences of a micro-batch, "" if they do not."""
    if not config.get("model.experts"):
        return ""
    if config["loss.balance"]:
        return "the load-balance loss (loss.balance) is a product of two means over a micro-batch"
    limited = config["mesh.expert"] != 1 and config["model.capacity_factor"]
    if limited or config["model.moe_kernel"] == "capacity":
        return "experts drop the rows of a micro-batch that exceed their capacity (model.capacity_factor)"
    return ""


def _check_micro_batch(workdir: Path, old: Identity, new: Identity) -> None:
    why = _use_of_micro_batch(new.config)
    if not why or not old.micro_rows or old.micro_rows == new.micro_rows:
        return
    keys = [{key: each.config[key] for key in MICRO_BATCH} for each in (old, new)]
    changed = [f"sequences of a micro-batch {old.micro_rows} -> {new.micro_rows}", *_differences(*keys)]
    raise UserError(
        f"{workdir} contains another run: {'; '.join(changed)}, but {why}. Use the old values or another --workdir"
    )


def _same_batch_remedy(old: Identity, new: Identity) -> str:
    if new.config.get("batch.tokens"):  # sets the accumulation
        return ""
    ranks_and_micro = new.global_rows // new.config["batch.accumulation"]
    if old.global_rows == new.global_rows or old.global_rows % ranks_and_micro or _use_of_micro_batch(new.config):
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
        values = json.loads(path.read_text())
        values.pop("files", None)  # earlier versions recorded digests of files
        old = Identity(**values)
        numbers = [old.global_rows, *(old.config[key] for key in ("train.steps", "batch.accumulation"))]
        texts = [old.data, old.weights, old.adapter, old.name, old.folder, *(old.given or ())]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("global_rows, train.steps and batch.accumulation must be positive integers")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("all other values but those of the config must be text")
        if type(old.micro_rows) is not int:
            raise ValueError("micro_rows must be an integer")
    except KeyError as error:
        raise _damaged(path, f"the required key {error} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, one_line(error)) from error
    # A key that the run's version did not have yet has today's default. A key that is gone is left out; if it changed
    # the loss curve, it must have had its default.
    kept = {
        key: value
        for key, value in old.config.items()
        if key not in REMOVED or REMOVED[key].neutral not in (None, value)
    }
    config = {**Identity.from_config(base.get_config(), 0, "").config, **kept}
    micro_rows = old.micro_rows
    if not micro_rows and not config["batch.tokens"]:
        micro_rows = old.global_rows // config["batch.accumulation"]
    return dataclasses.replace(old, config=config, micro_rows=micro_rows)


def saved_config(identity: Identity, path: Path) -> ConfigDict:
    """Returns the config of a run. A key that the run's version did not have yet has today's default.

    Raises UserError if the file that the identity was read from, `path`, has an unknown key or a value of a wrong type.
    """
    config = base.get_config()
    known = flatten(config)
    for key, value in identity.config.items():
        if key not in known:
            raise UserError(
                f"{path} has the unknown key {one_line(key)[:80]}: use the version of bytescope that trained the run"
            )
        try:
            _set_key(config, key, tuple(value) if isinstance(known[key], tuple) else value)
        except TypeError as error:
            raise UserError(f"{path} is damaged ({one_line(error)}): restore the file") from error
    return config


def _set_key(config: ConfigDict, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        config = config[group]
    config[name] = value


def continued_config(workdir: Path, named: ConfigDict | None, overrides: Sequence[tuple[str, str]]) -> ConfigDict:
    """Returns the config of a start that continues the run in `workdir`: the config of the run with the keys of this
    command line.

    Args:
      workdir: the run directory. It has a config.json.
      named: the config that the command line names, with `overrides`, or None. A named config may have been edited
        since the last start, so its values are used for all keys that no earlier command line has set.
      overrides: pairs (dotted key, value as text) of the command line.

    Raises:
      UserError: config.json is damaged, or an override is wrong.
    """
    path = workdir / CONFIG
    old = recorded(path)
    saved = saved_config(old, path)
    if old.folder and old.folder != os.getcwd():
        for key, value in flatten(saved).items():
            if FIELDS[key].path and value not in NAMES:
                _set_key(saved, key, os.path.join(old.folder, os.path.expanduser(value)))
    if named is None:
        for key, text in overrides:
            override(saved, key, text)
        return saved
    if _has_begun(workdir):
        values = flatten(saved)
        for key in old.given or ():
            if key in values and key not in dict(overrides):
                _set_key(named, key, values[key])
    return named


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}): restore it, or choose another --workdir")


def _has_begun(workdir: Path) -> bool:
    metrics, checkpoints = workdir / METRICS, workdir / CHECKPOINTS
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _check(path: Path, identity: Identity, extend: bool) -> list[str]:
    old = recorded(path)
    if not _has_begun(path.parent):  # for example a run that did not fit its device: no work would be lost
        return []
    if differences := _run_differences(old, identity, FREE):
        raise UserError(
            f"{path.parent} contains another run: {differences}. {_same_batch_remedy(old, identity)}"
            "Leave out these keys and the config, restore changed files, or choose another --workdir"
        )
    _check_micro_batch(path.parent, old, identity)
    before, now = old.config["train.steps"], identity.config["train.steps"]
    if now > before and not extend:
        raise UserError(
            f"the run in {path.parent} was planned for {before} steps, not {now}: "
            "the learning rate would follow another schedule; pass --extend to accept that"
        )
    return [
        f"changed since the last start: {line}"
        for line in _differences(old.config, identity.config)
        if line.split()[0] not in SILENT
    ]


# ---- the lock -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[list[str]]:
    """A context manager that locks an existing run directory for this process. Yields a warning if the file system
    cannot lock it, else [].

    The folder itself is locked, so that the lock does not end if the lock file is removed. The lock file is locked too,
    because NFS locks no folders; it also names the process. The file is not removed at the end, because another process
    may already have opened it to lock it.

    Raises:
      UserError: another process trains in it. The message has its process id and machine.
      OSError: the directory cannot be written.
    """
    path = workdir / LOCK
    with contextlib.ExitStack() as opened:
        folder = os.open(workdir, os.O_RDONLY)
        opened.callback(os.close, folder)
        file = opened.enter_context(open(path, "a+"))
        _flock(folder, path)
        why = _flock(file.fileno(), path)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # on a full disk the lock works too, without the name of its holder
            file.truncate(0)
            file.write(json.dumps(who) + "\n")
            file.flush()
        note = f"warning: {workdir} cannot be locked ({why}): make sure that no second training starts in it"
        yield [note] if why else []


def _flock(descriptor: int, path: Path) -> str:
    """Locks an open file or folder. Returns "", or the reason why the file system cannot lock it. Raises UserError if
    another process has locked it; the lock file at `path` names the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            who: Any = json.loads(path.read_text())
            holder = f"process {who['pid']} on {who['host']} since {who['since']}"
        raise UserError(
            f"{path.parent} is in use by {holder}: wait for that run or stop it, or choose another --workdir"
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return error.strerror or os.strerror(error.errno)
    return ""
