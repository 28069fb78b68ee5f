"""The run directory: which run it holds, and whether this config may go on with it."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.train.config import flatten
from bytescope.train.errors import UserError
from bytescope.train.parallel.processes import ALONE, Processes

# Keys that may differ when a run goes on: they change how a step is computed or recorded, not the curve.
# A trailing dot is a whole group. Everything else, and the global batch, is the identity of the run.
FREE = ("mesh.", "remat.", "loss.", "train.", "batch.micro", "batch.accumulation", "batch.tokens", "batch.mode",
        "data.prefetch", "data.workers", "data.source", "data.eval_source", "data.tokenizer", "data.dtype",
        "model.attention", "model.attention_chunk", "model.mlp_chunk", "model.unroll", "xla.")
# What each process may have in a place of its own.
LOCAL = ("train.cache_dir", "data.prefetch", "data.workers", "data.source", "data.eval_source", "data.tokenizer")
SHARED_S = 15.0  # for a network file system to show a file that another machine wrote
SILENT = ("train.", "data.prefetch", "data.workers")


def new_workdir(name: str) -> Path:
    """runs/<config>-<time>, not there yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [Path("runs") / f"{name}-{stamp}"] + [Path("runs") / f"{name}-{stamp}-{n}" for n in range(2, 100)]
    return next(path for path in candidates if not path.exists())


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new, whenever the power goes."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes a run this run: the curve-changing keys, the global batch in sequences, the data."""

    config: dict[str, Any]
    global_rows: int
    data: str

    @classmethod
    def of(cls, config: ConfigDict, global_rows: int, data_fingerprint: str) -> "Identity":
        # Through JSON, so that tuples compare equal to what a file gives back.
        return cls(json.loads(json.dumps(flatten(config))), global_rows, data_fingerprint)

    def everything(self) -> dict[str, Any]:
        """All of it under one name each."""
        return {**self.config, "global batch (sequences)": self.global_rows, "data": self.data}

    def curve(self) -> dict[str, Any]:
        """The part that may not change."""
        return {key: value for key, value in self.everything().items() if not _matches(key, FREE)}


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key.startswith(p) if p.endswith(".") else key == p for p in patterns)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = sorted(set(old) | set(new))
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def claim_together(workdir: Path, identity: Identity, *, extend: bool, processes: Processes = ALONE) -> list[str]:
    """`claim` by process 0, once all processes have shown that they would train the same; returns its notes.

    Raises:
      UserError: as `claim`; or this process has another config or other data, or does not see the directory.
    """
    first = Identity(**processes.from_first(dataclasses.asdict(identity)))
    mine, theirs = ({key: value for key, value in one.everything().items() if not _matches(key, LOCAL)}
                    for one in (identity, first))
    if differences := _differences(theirs, mine):
        raise UserError(f"this process differs from process 0: {'; '.join(differences)}. Give all the same")
    notes = processes.from_first(claim(workdir, identity, extend=extend) if processes.first else None)
    deadline = time.monotonic() + SHARED_S
    while not (workdir / "config.json").exists():  # a network file system may show it late
        if time.monotonic() > deadline:
            raise UserError(f"{workdir} of process 0 is not to be seen here: give a --workdir that all share")
        time.sleep(0.1)
    return notes


def claim(workdir: Path, identity: Identity, *, extend: bool) -> list[str]:
    """Makes `workdir` hold this run, or checks that it does; returns notes on what changed.

    Raises:
      UserError: the directory holds another run, or something else, or more steps without `extend`.
    """
    path = workdir / "config.json"
    if path.exists():
        notes = _check(path, identity, extend)
    elif workdir.exists() and any(workdir.iterdir()):
        raise UserError(f"{workdir} is not empty and holds no run: choose another --workdir")
    else:
        notes = []
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dataclasses.asdict(identity), indent=1) + "\n")
    return notes


def _same_batch(old: Identity, new: Identity) -> str:
    """The accumulation that gives the old global batch on the new devices, if there is one."""
    if new.config.get("batch.tokens") or new.config.get("batch.accumulation_schedule"):  # they tell it themselves
        return ""
    ranks_and_micro = new.global_rows // new.config["batch.accumulation"]
    if old.global_rows == new.global_rows or old.global_rows % ranks_and_micro:
        return ""
    return (f"--config.batch.accumulation={old.global_rows // ranks_and_micro} makes the global batch "
            f"{old.global_rows} again. ")


def _check(path: Path, identity: Identity, extend: bool) -> list[str]:
    try:
        old = Identity(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or choose another --workdir") from error
    if differences := _differences(old.curve(), identity.curve()):
        raise UserError(f"{path.parent} holds another run: {'; '.join(differences)}. "
                        f"{_same_batch(old, identity)}Use the old values or another --workdir")
    before, now = old.config["train.steps"], identity.config["train.steps"]
    if now > before and not extend:
        raise UserError(f"{path.parent} was planned for {before} steps, not {now}: "
                        "the learning rate would change course; say --extend if you mean it")
    return [f"changed since the last start: {line}"
            for line in _differences(old.config, identity.config) if not _matches(line.split()[0], SILENT)]
