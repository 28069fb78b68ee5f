"""The run directory: which run it holds, and whether this config may go on with it."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from train.config import flatten
from train.errors import UserError

# Keys that may differ when a run goes on: they change how a step is computed or recorded, not the curve.
# A trailing dot is a whole group. Everything else, and the global batch, is the identity of the run.
FREE = ("mesh.", "remat.", "loss.", "train.", "batch.", "data.prefetch", "data.workers", "data.source",
        "data.eval_source", "data.tokenizer", "data.dtype", "model.attention", "model.attention_chunk")
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

    def curve(self) -> dict[str, Any]:
        """The part that may not change."""
        kept = {key: value for key, value in self.config.items() if not _matches(key, FREE)}
        return {**kept, "global batch (sequences)": self.global_rows, "data": self.data}


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key.startswith(p) if p.endswith(".") else key == p for p in patterns)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = sorted(set(old) | set(new))
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


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


def _check(path: Path, identity: Identity, extend: bool) -> list[str]:
    try:
        old = Identity(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or choose another --workdir") from error
    if differences := _differences(old.curve(), identity.curve()):
        raise UserError(f"{path.parent} holds another run: {'; '.join(differences)}. "
                        "Use the old values or another --workdir")
    before, now = old.config["train.steps"], identity.config["train.steps"]
    if now > before and not extend:
        raise UserError(f"{path.parent} was planned for {before} steps, not {now}: "
                        "the learning rate would change course; say --extend if you mean it")
    return [f"changed since the last start: {line}"
            for line in _differences(old.config, identity.config) if not _matches(line.split()[0], SILENT)]
