"""The state that persists between steps, and the sums over the micro-batches of an update."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bytescope.model.experts.expert_layer import Load
from bytescope.model.frozen import merge_parameters
from bytescope.train.step.optimizer.loss_scale import LossScale
from bytescope.train.step.routing import Routed, no_load

Batch = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["loss", "tokens", "routing"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums over the micro-batches of the current update.

    Fields:
      loss: cross-entropy summed over unmasked targets, in nats, float32.
      tokens: number of unmasked targets, int32.
      routing: router statistics, such as the number of tokens of each expert; None without experts.
    """

    loss: jax.Array
    tokens: jax.Array
    routing: Load | None = None

    def __add__(self, other: "Tally") -> "Tally":
        return jax.tree.map(jnp.add, self, other)


def zero_tally(routed: Routed = None) -> Tally:
    """Returns sums of zero, for the start of an update. `routed`: (number of layers with experts, experts in each),
    None without experts."""
    return Tally(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), routed and no_load(*routed))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "tally", "loss_scale", "frozen"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that persists between steps.

    Fields:
      step: number of optimizer updates so far, int32, including updates that the loss scale skipped.
      params: nested dict of the trained parameters, in `precision.param`.
      opt_state: optax state of the trained parameters.
      tally: sums over the micro-batches of the current update.
      loss_scale: state of dynamic loss scaling; None unless the precision has a loss scale.
      frozen: nested dict of the frozen parameters, in `precision.compute`; None if all parameters are trained.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    tally: Tally
    loss_scale: LossScale | None = None
    frozen: Any = None

    @property
    def model_params(self) -> Any:
        """All parameters of the model, as one nested dict."""
        return merge_parameters(self.params, self.frozen)
