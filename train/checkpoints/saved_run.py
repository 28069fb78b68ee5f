"""Reads a run directory for export: its config, and the parameters of one checkpoint, one array at a time.

Nothing is written to the directory, and no device is needed. Arrays are read as stored, for any mesh that saved them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from bytescope.memory.errors import one_line
from bytescope.train.checkpoints.stored_array import Slices, StoredArray, whole
from bytescope.train.checkpoints.workdir import Identity, recorded, require_utf8, saved_config
from bytescope.train.launch.failures import silence_library_log
from bytescope.train.launch.runtime import captured_stderr
from bytescope.train.source import CHECKPOINTS, CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.folder import Folder

_KEY = re.compile(r"\['?(.*?)'?\]")  # keys in jax.tree_util.keystr: .params['blocks'][0]['w_q']
_DESCRIBED = re.compile(r"(\w+)\[([\d,]*)\]")  # results of checkpoint.describe: float32[4,8]


@dataclasses.dataclass(frozen=True)
class Array:
    """A parameter in a checkpoint.

    Fields:
      keys: its keys in the parameter tree.
      dtype, shape: dtype name and shape, with stacked layers in model order.
      checksum: the recorded checksum of its values.
      order: for a stack saved in the order of pipeline stages, the layer index of each row, -1 for an unused row.
        Empty for other arrays.
    """

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the values, uncompressed, including unused rows of a stack."""
        shape = (len(self.order), *self.shape[1:]) if self.order else self.shape
        return math.prod(shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run.

    Fields:
      workdir: the run directory.
      identity: the recorded config, data and initial weights of the run.
      config: the config of the run.
      step: the step of the checkpoint.
      arrays: dotted path of a parameter -> its description. Parameters of scanned blocks are stacked.
    """

    workdir: Path
    identity: Identity
    config: ConfigDict
    step: int
    arrays: Mapping[str, Array]

    @classmethod
    def open(cls, workdir: Path, step: int | None = None) -> SavedRun:
        """Opens a checkpoint of the run in `workdir`: the one of `step`, or the newest one if `step` is None.

        Raises:
          UserError: there is no run or no such checkpoint, a file is damaged, or the path is not valid UTF-8.
        """
        require_utf8(workdir)
        silence_library_log()
        identity = recorded(workdir / CONFIG)
        config = saved_config(identity, workdir / CONFIG)
        steps = _checkpoint_steps(workdir)
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise UserError(
                f"--step={step} does not exist: {workdir} has checkpoints of the steps {', '.join(map(str, steps))}; "
                "give one of these"
            )
        run = cls(workdir, identity, config, chosen, {})
        with run.reporting_damage():
            meta = ocp.JsonCheckpointHandler().restore(run.folder / "meta")
            arrays = _parameters(meta["arrays"], meta["checksums"], meta.get("order", {}))
        return dataclasses.replace(run, arrays=arrays)

    @property
    def folder(self) -> Path:
        """Absolute path of the folder of the checkpoint in the run directory."""
        return (self.workdir / CHECKPOINTS / str(self.step)).absolute()

    def stored(self, path: str) -> StoredArray:
        """Returns a parameter that can be read in pieces. Raises UserError if the checkpoint is damaged."""
        array = self.arrays[path]
        with self.reporting_damage():
            return StoredArray(
                self.folder / "state",
                ".".join(("params", *array.keys)),
                array.dtype,
                array.shape,
                array.checksum,
                array.order,
            )

    def read(self, path: str) -> np.ndarray:
        """Returns a parameter, verified by its checksum.

        Raises:
          UserError: the checkpoint is damaged.
        """
        return whole(Slices(self.stored(path), self.reporting_damage))

    @property
    def remedy(self) -> str:
        """The remedy that error messages suggest if this checkpoint cannot be used."""
        others = [str(step) for step in _checkpoint_steps(self.workdir) if step != self.step]
        return f"choose another with --step={others[-1]}" if others else "there is no other checkpoint"

    @contextlib.contextmanager
    def reporting_damage(self) -> Iterator[None]:
        """A context manager that converts errors of Orbax, tensorstore and json about damaged files to a one-line
        UserError."""
        with captured_stderr() as complaints:
            try:
                yield
            except Exception as error:
                complaints.drop = True
                raise UserError(
                    f"checkpoint {self.step} of {self.workdir} is damaged "
                    f"({one_line(error) or type(error).__name__}): {self.remedy}"
                ) from error


def began_from(run: SavedRun) -> Folder | None:
    """Returns the folder of weights that a run started from. Returns None if the run started from random values or the
    folder does not exist on this machine."""
    path = os.path.expanduser(run.config.init.folder)
    return Folder.open(path) if path and os.path.isdir(path) else None


def _checkpoint_steps(workdir: Path) -> list[int]:
    # Orbax renames a checkpoint to its number when it is complete.
    names = [path.name for path in (workdir / CHECKPOINTS).glob("*") if path.is_dir()]
    steps = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
    if not steps:
        raise UserError(
            f"{workdir} has no checkpoint yet: wait until bytescope train has saved one, which it does every "
            "train.checkpoint_every updates and at its end"
        )
    return steps


def _parameters(arrays: Mapping[str, str], sums: list[int], orders: Mapping[str, list[int]]) -> dict[str, Array]:
    """Returns the parameters of a checkpoint, dotted path -> description. The checkpoint's other arrays are ignored.

    Args:
      arrays: path of each array -> its dtype and shape, such as "float32[4,8]".
      sums: checksum of each array, in the same order.
      orders: name of a stack of layers saved in the order of pipeline stages -> layer index of each row, -1 for an
        unused row.
    """
    parameters = {}
    for (path, described), checksum in zip(arrays.items(), sums, strict=True):
        if path.startswith(".params["):
            keys = tuple(_KEY.findall(path))
            if (match := _DESCRIBED.fullmatch(described)) is None:
                raise ValueError(
                    f"the description of {path} is {described!r} where a dtype and a shape such as float32[4,8] are "
                    "expected"
                )
            dtype, shape = match.groups()
            sizes, order = tuple(map(int, filter(None, shape.split(",")))), tuple(orders.get(keys[0], ()))
            if order:
                sizes = (sum(layer >= 0 for layer in order), *sizes[1:])
            parameters[".".join(keys)] = Array(keys, dtype, sizes, checksum, order)
    return parameters
