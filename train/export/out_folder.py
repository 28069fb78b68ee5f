"""The folder of a model that a command writes: refused where something else is, made beside its place, moved there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bytescope.memory.errors import disk_remedy
from bytescope.train.checkpoints.workdir import require_utf8
from bytescope.train.source import holds_model
from bytescope.train.user_errors import UserError


def refuse_used(out: Path, force: bool) -> None:
    """Raises UserError if `out` exists and is neither an empty folder nor, with `force`, a folder with a model; and for
    a path that is not valid UTF-8."""
    require_utf8(out)
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is no folder: give a new or empty one")
    if not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"{out} is not empty: give a new or empty folder, or --force to replace the model in it")
    if not holds_model(out):
        raise UserError(f"{out} holds no model, and --force replaces nothing else: give another folder")


def move(partial: Path, out: Path) -> None:
    """Puts the finished folder in its place; what was there goes once the new one is."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def disk_told(out: Path, left: str = "nothing was left there") -> Iterator[None]:
    """Turns an error of the disk into one line, which ends with what is `left` of the work."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written or read ({error.strerror or error}): "
            f"{disk_remedy(error)}choose another folder; {left}"
        ) from error
