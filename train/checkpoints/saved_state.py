"""The part of the training state that a checkpoint contains, and its bytes. Importing this module does not import
Orbax."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bytescope.model.frozen import merge_parameters, router_biases, split_parameters
from bytescope.train.step.state import TrainState

GB = 10**9  # Orbax counts the bytes in flight in units of 1e9 bytes


@partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "tally", "loss_scale"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """The part of a TrainState that a checkpoint contains.

    Frozen parameters are not saved, because a resumed run loads them again from their original source. Router biases
    are part of `params`, although no gradient trains them, because every update changes them.

    Fields:
      step: number of optimizer updates so far, int32.
      params: nested dict of the trained parameters and router biases.
      opt_state: optax state without the gradient accumulator.
      tally: sums over the micro-batches of the current update.
      loss_scale: state of the loss scale; None unless the precision has one.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    tally: Any
    loss_scale: Any


def portable(state: TrainState) -> Saved:
    """Returns the part of `state` that a checkpoint contains: without its frozen parameters and without the accumulator
    of `optax.MultiSteps`.

    A run can therefore be resumed with another kind of gradient accumulation. Between updates the accumulator is zero,
    and its counters can be computed from the step.
    """
    multi = isinstance(state.opt_state, optax.MultiStepsState)
    _, biases = split_parameters(state.frozen, router_biases(state.frozen))
    return Saved(
        state.step,
        merge_parameters(state.params, biases),
        state.opt_state.inner_opt_state if multi else state.opt_state,
        state.tally,
        state.loss_scale,
    )


def complete(saved: Saved, abstract: TrainState) -> TrainState:
    """Converts the content of a checkpoint back to a TrainState (the inverse of `portable`), with a gradient
    accumulator of zeros if the program has one. `abstract`: the shapes and shardings of the program's state.

    The `frozen` of the result contains the router biases only, or is None if there are none: other frozen parameters
    are not in a checkpoint.
    """
    params, biases = split_parameters(saved.params, router_biases(saved.params))
    opt_state = saved.opt_state
    if isinstance(abstract.opt_state, optax.MultiStepsState):
        shapes = abstract.opt_state._replace(inner_opt_state=())
        zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes),
        )()
        # A copy of the step: the leaves of the state are donated, and no buffer may be donated twice.
        steps = zeros.gradient_step + saved.step
        opt_state = zeros._replace(inner_opt_state=saved.opt_state, gradient_step=steps)
    return TrainState(saved.step, params, opt_state, saved.tally, saved.loss_scale, biases)


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one shard of an array with a sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def write_limit(state: TrainState, processes: int = 1) -> int:
    """Returns the maximum bytes of arrays that one process compresses and writes at once: an eighth of its part of the
    state, at least twice the largest shard, rounded up to whole GB. Compressed chunks are in host memory until they are
    written, beside the copy of the arrays.

    `state`: shapes and shardings of the training state. `processes`: number of processes of the run.
    """
    leaves = jax.tree.leaves(portable(state))
    part = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // processes
    return (max(2 * max(map(shard_bytes, leaves)), part // 8) // GB + 1) * GB
