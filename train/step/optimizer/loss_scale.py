"""Dynamic loss scaling: keeps gradients within the exponent range of float16, and skips updates that overflow.

Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2: the loss is multiplied by a scale before the backward pass
and the gradients are divided by it in float32. If a gradient is not finite, the update is skipped and the scale is
halved. After `growth_every` updates without overflow the scale doubles.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bytescope.train.config_fields import MAX_LOSS_SCALE
from bytescope.train.step.optimizer.rules import grad_norm

SCALED_REMEDY = "compute in bfloat16 (--config.precision.preset=bf16), "


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "good", "skipped"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The state of dynamic loss scaling, a part of TrainState.

    Fields:
      scale: the current loss scale, float32.
      good: updates without overflow since the scale last changed, int32.
      skipped: number of all skipped updates, int32.
    """

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The settings of dynamic loss scaling, and its rule: the scale doubles after `growth_every` updates without
    overflow, and halves after an overflow.

    Fields:
      initial: the loss scale at the start, for the mean loss.
      growth_every: number of updates without overflow after which the scale doubles.
      positions: number of token positions of a micro-batch over all devices. The loss is a sum over positions, so it is
        multiplied by the scale divided by this number. The number is rounded up to a power of two, because products
        with powers of two change only exponents.
    """

    initial: float
    growth_every: int
    positions: int

    def init(self) -> LossScale:
        """Returns the state before the first update: the scale `initial`, and counters that are 0."""
        return LossScale(jnp.float32(self.initial), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def factor(self, state: LossScale) -> jax.Array:
        """Returns the factor by which the summed loss is multiplied before the backward pass, float32."""
        return state.scale / 2.0 ** math.ceil(math.log2(self.positions))

    def after(self, state: LossScale, finite: jax.Array) -> LossScale:
        """Returns the state after an update. `finite`: a boolean scalar, False if a gradient overflowed."""
        good = jnp.where(finite, state.good + 1, 0)
        grown = good >= self.growth_every
        scale = jnp.where(
            finite, jnp.where(grown, jnp.minimum(2.0 * state.scale, MAX_LOSS_SCALE), state.scale), 0.5 * state.scale
        )
        return LossScale(scale, jnp.where(grown, 0, good), state.skipped + ~finite)


def scale_metrics(values: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the loss-scale values for a row of metrics.jsonl, from the metrics of a step. Returns {} without a loss
    scale."""
    if "loss_scale" not in values:
        return {}
    return {"loss_scale": float(values["loss_scale"]), "skipped_steps": int(values["skipped_steps"])}


def keep_if(done: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` if `done` is true, else `old`, for each leaf of a tree."""
    return jax.tree.map(lambda one, other: jnp.where(done, one, other), new, old)


def undo_overflow(
    scaling: Scaling, scale: LossScale, new: tuple[Any, Any], old: tuple[Any, Any]
) -> tuple[Any, Any, LossScale]:
    """Returns (params, optimizer state, loss scale) after an update, which is undone if a gradient overflowed.

    Args:
      scaling: the rule that changes the loss scale.
      scale: the loss scale before the update.
      new, old: (params, optimizer state) after the update, and before it. After an overflow the result is `old`, but
        with the gradient norm of `new`, which is infinite or NaN and so shows the overflow in the metrics.

    Under `optax.MultiSteps` an overflow in any micro-batch stays in the sum of gradients until the last micro-batch,
    which then skips the update.
    """
    params, opt_state = new
    multi = isinstance(opt_state, optax.MultiStepsState)
    last = opt_state.mini_step == 0 if multi else jnp.bool_(True)
    finite = jnp.isfinite(grad_norm(opt_state))
    done = last & finite
    clip, *rest = opt_state.inner_opt_state if multi else opt_state
    _, *old_rest = old[1].inner_opt_state if multi else old[1]
    inner = (clip, *keep_if(done, rest, old_rest))
    if multi:  # optax clears the sum by multiplying it with zero, which leaves nan and infinity as nan
        sums = jax.tree.map(lambda leaf: jnp.where(last, jnp.zeros_like(leaf), leaf), opt_state.acc_grads)
        inner = opt_state._replace(inner_opt_state=inner, acc_grads=sums)
    return keep_if(done, params, old[0]), inner, keep_if(last, scaling.after(scale, finite), scale)
