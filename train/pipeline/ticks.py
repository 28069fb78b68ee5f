"""A schedule as the arrays that the loop over ticks reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.train.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Ticks:
    """The table of a schedule as a loop reads it, a row a tick; int32, -1 for nothing.

    forward, backward: [ticks, stages, 3] micro-batch, chunk, slot. enter: micro-batch whose embedding the first stage
    reads. end: micro-batch whose loss is computed, and the slot of its output. leave: micro-batch whose gradient leaves
    the first stage. keep: slot for the output of the last stage.
    """

    forward: jax.Array
    backward: jax.Array
    enter: jax.Array
    end: jax.Array
    leave: jax.Array
    keep: jax.Array

    @classmethod
    def of(cls, schedule: Schedule) -> "Ticks":
        """Those of a schedule."""
        stage, chunk = schedule.place_of(0)

        def first(table: np.ndarray) -> np.ndarray:
            return np.where(table[:, stage, 1] == chunk, table[:, stage, 0], -1)

        arrays = (
            schedule.forward,
            schedule.backward,
            first(schedule.forward),
            schedule.ends,
            first(schedule.backward),
            schedule.output_write,
        )
        return cls(*(jnp.asarray(array, jnp.int32) for array in arrays))


jax.tree_util.register_dataclass(Ticks, ["forward", "backward", "enter", "end", "leave", "keep"], [])
