"""The forward pass through the stages of a pipeline, one virtual stage after the other, for evaluations and samples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from bytescope.model.frozen import merge_parameters
from bytescope.train.pipeline.schedule import Schedule
from bytescope.train.pipeline.stage_units import STAGE, Micro, StackUnit, broadcast_from, inside
from bytescope.train.step.state import Batch


@dataclasses.dataclass(frozen=True)
class PipelineForward:
    """The forward pass of a pipelined model, without dropout.

    Fields:
      graph: the flax graph definition of the model without the layers in the stages.
      schedule: which micro-batch each stage computes at which time.
      units: the layers of a chunk, one entry per parameter stack. A chunk is a group of layers that a stage runs
        without interruption. A parameter stack is the tree of the parameters of layers with equal structure, with
        leaves [layers, ...].
    """

    graph: nnx.GraphDef
    schedule: Schedule
    units: tuple[StackUnit, ...]

    def hidden(
        self,
        params: Any,
        tokens_BL: jax.Array,
        frozen: Any = None,
        segments_BL: jax.Array | None = None,
        masks: tuple[jax.Array | None, ...] = (),
    ) -> jax.Array:
        """Returns the output of the last block after the final norm, [B, L, D] (sequences, tokens, model width) in the
        compute dtype.

        Args:
          params, frozen: trained and frozen parameters.
          tokens_BL: int32 token ids.
          segments_BL: int32, the number (from 1) of the example that each token belongs to, 0 for padding; None if a
            row is one example.
          masks: the masks of `train.step.losses.token_masks`.
        """
        model = nnx.merge(self.graph, merge_parameters(params, frozen))
        packed = model.packed(segments_BL, *masks)
        x_BLD = model.begin(tokens_BL, None, packed)
        names = [unit.rows.stack for unit in self.units]
        stacks = {name: params.get(name, {}) for name in names}
        fixed = {name: (frozen or {}).get(name, {}) for name in names}
        micro = Micro(None, packed, jnp.zeros((), jnp.int32), jnp.zeros(2))
        counts = [(jnp.asarray(unit.rows.count), jnp.asarray(unit.rows.first)) for unit in self.units]

        def chunk(place, x_BLD, counts, stacks, fixed, micro):
            stage, chunk = place
            mine, y_BLD = jax.lax.axis_index(STAGE) == stage, x_BLD
            for unit, (count, first) in zip(self.units, counts):
                name = unit.rows.stack
                y_BLD = unit.run(
                    chunk, jnp.where(mine, count[0, chunk], 0), first[0], y_BLD, stacks[name], fixed[name], micro
                )
            return broadcast_from(model.place, y_BLD, mine)

        run = inside(model.place, chunk, (P(), P(), P(STAGE), P(STAGE), P(STAGE), P()), P())
        places = [self.schedule.place_of(k) for k in range(self.schedule.virtual_stages)]

        def turn(x_BLD, place):
            y_BLD = run(place, x_BLD, counts, stacks, fixed, micro)
            return model.place(y_BLD, ("batch", "stream", None)), None

        with jax.named_scope("blocks"):
            x_BLD, _ = jax.lax.scan(turn, x_BLD, tuple(jnp.asarray(places, jnp.int32).T))
        return model.finish(x_BLD)

    def loss(
        self, cross_entropy: Callable[..., jax.Array], masks: Callable[[Batch], tuple[jax.Array | None, ...]]
    ) -> Callable[..., Any]:
        """Returns a loss function for evaluation, without auxiliary losses and router statistics.

        It maps (trained parameters, batch, None, frozen parameters) to (loss, (loss, None)), the form of
        `train.step.losses.make_loss`. The loss is a sum in nats.

        Args:
          cross_entropy: (x_BLD, head weights, targets_BL) -> float32 sum in nats.
          masks: batch -> two bool masks or None each: False for padding, and False for tokens with a masked target.
        """

        def loss(params: Any, batch: Batch, dropout_key_B: None, frozen: Any = None) -> tuple:
            model = nnx.merge(self.graph, merge_parameters(params, frozen))
            x_BLD = self.hidden(params, batch["inputs"], frozen, batch.get("segments"), masks(batch))
            with jax.named_scope("loss"):
                total = cross_entropy(x_BLD, model.head(), batch["targets"])
            return total, (total, None)

        return loss
