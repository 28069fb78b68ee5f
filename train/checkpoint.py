"""Checkpoints: Orbax, asynchronous and atomic, verified by content when they are read.

Orbax renames a finished checkpoint into place, so a kill leaves either all of it or none. It does
not notice a flipped byte, however: each checkpoint therefore carries a checksum per array, made on
the device and independent of the mesh, and a state that does not match is damaged.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from train.errors import UserError

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _checksum(x: jax.Array) -> jax.Array:
    """Sum of the array's bit patterns, each weighted by an odd number of its place, modulo 2**32."""
    bits = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (place * jnp.uint32(2_654_435_762) + jnp.uint32(1)), dtype=jnp.uint32)


@jax.jit
def checksums(state: Any) -> jax.Array:
    """One uint32 per leaf of `state`, in tree order; the same on every mesh."""
    return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(state)])


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer updates done and sequences consumed."""

    step: int
    sequences: int


class Damaged(Exception):
    """A checkpoint that cannot be read or does not hold what was written."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the one with the best held-out loss."""

    def __init__(self, workdir: Path, keep: int):
        if keep < 1:
            raise UserError(f"train.keep={keep}: keep at least 1 checkpoint, or a run cannot be resumed")
        self.root, self.aside = workdir / "checkpoints", workdir / "damaged"
        policies = [preservation_policy.LatestN(keep),
                    preservation_policy.BestN(n=1, get_metric_fn=lambda m: m["eval_loss"], reverse=True,
                                              keep_checkpoints_without_metrics=False)]
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            best_fn=lambda metrics: metrics["eval_loss"], best_mode="min",
            enable_async_checkpointing=True, create=True)
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every save
        self._manager = ocp.CheckpointManager(self.root.absolute(), options=self._options)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, position: Position, eval_loss: float | None = None) -> None:
        """Starts writing `state`; returns once it is copied off the device, so it may be donated."""
        meta = {**dataclasses.asdict(position), "checksums": np.asarray(checksums(state)).tolist()}
        self._manager.save(
            position.step, metrics=None if eval_loss is None else {"eval_loss": eval_loss},
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)))

    def restore(self, abstract: Any, warn: Callable[[str], None]) -> tuple[Any, Position] | None:
        """The newest undamaged checkpoint, laid out as `abstract` says, whatever mesh wrote it.

        A damaged one is reported through `warn` and moved aside, never deleted; then the one before is tried.
        None if there is no checkpoint.
        """
        while steps := self.steps():
            try:
                return self._read(steps[-1], abstract)
            except Damaged as error:
                aside = self._set_aside(steps[-1])
                warn(f"checkpoint {steps[-1]} is damaged ({error}); moved to {aside}, trying the one before")
        return None

    def _read(self, step: int, abstract: Any) -> tuple[Any, Position]:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        try:
            read = self._manager.restore(step, args=args)
            state, meta = read["state"], read["meta"]
            position = Position(int(meta["step"]), int(meta["sequences"]))
        except Exception as error:  # whatever Orbax, tensorstore or json raise on bad bytes
            raise Damaged(" ".join(str(error).split())[:120] or type(error).__name__) from error
        if position.step != step or np.asarray(checksums(state)).tolist() != meta["checksums"]:
            raise Damaged("its arrays do not match their checksums")
        return state, position

    def _set_aside(self, step: int) -> Path:
        self.aside.mkdir(exist_ok=True)
        target = next(path for n in itertools.count(1) if not (path := self.aside / f"{step}.{n}").exists())
        (self.root / str(step)).rename(target)
        self._manager.reload()
        return target

    def wait(self) -> None:
        """Returns when every started save is in place; raises what went wrong while writing."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the writer threads."""
        self._manager.close()
