"""One training step: gradients of micro-batches, two ways to accumulate them, the update, and an evaluation.

ACCUMULATION has the step functions that the loop calls. `StepParts` are the functions and settings that they use.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from bytescope.model import Precision
from bytescope.model.experts.expert_layer import Load
from bytescope.train.parallel.axes import BATCH
from bytescope.train.step.losses import count_tokens
from bytescope.train.step.optimizer.loss_scale import LossScale, Scaling, undo_overflow
from bytescope.train.step.optimizer.rounding import apply_updates
from bytescope.train.step.optimizer.rules import grad_norm
from bytescope.train.step.routing import EXPERT_LOAD, Routed, move_router_biases, routing_metrics, weighted_load
from bytescope.train.step.state import Batch, Tally, TrainState, zero_tally
from bytescope.train.step.step_weights import Weights

ROUNDING = 0x726E64  # folded into the keys of rounding, so that they differ from the keys of dropout

# (params, batch, dropout keys, frozen) -> (total that is differentiated, (cross-entropy, load of the routers))
Loss = Callable[..., tuple[jax.Array, tuple[jax.Array, Load | None]]]


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The functions and settings of a step.

    Fields:
      loss: (params, batch, dropout_key_B, frozen) -> (total that is differentiated, (cross-entropy as a float32 sum in
        nats, router statistics)), where B is the number of sequences.
      optimizer: an optax transformation, or optax.MultiSteps of it.
      schedule: index of the update -> learning rate.
      seed: random seed of dropout and rounding.
      weights: casts, gathers and shards parameters and gradients.
      local_loss: `loss` of one data-parallel rank's sequences, if gradients are reduced once per update, else None.
      scaling: the rule of the loss scale, None without one.
      partwise: the update that is computed part by part (train/step/optimizer/partwise.py), None if it is not needed.
      fused: (params, opt_state, batch, keys, tokens, rounding key, frozen) -> (loss, new parameters, new optimizer
        state); the update is inside the backward pass (train/step/fused_backward.py). None if it is not used.
      routed: (layers with experts, experts in each), None without experts.
      bias_rate: the change of a router bias per update, 0 for constant biases.
      pipeline: (weights, batch [A, B, L], keys [A, B], factor, frozen) -> (tally, gradients), computed by the stages of
        a pipeline (train/pipeline/gradients.py), for A micro-batches of B sequences with L tokens; None without stages.
    """

    loss: Loss
    optimizer: Any
    schedule: Callable[[jax.Array], jax.Array]
    seed: int
    weights: Weights
    local_loss: Loss | None = None
    scaling: Scaling | None = None
    partwise: Callable[..., tuple[Any, Any]] | None = None
    fused: Callable[..., tuple[jax.Array, Any, Any]] | None = None
    routed: Routed = None
    bias_rate: float = 0.0
    pipeline: Any = None  # train.pipeline.gradients.PipelineGradients

    @property
    def precision(self) -> Precision:
        """The dtypes of parameters, computation and gradients."""
        return self.weights.precision

    def objective(self, params: Any, batch: Batch, dropout_key_B: jax.Array | None, frozen: Any = None) -> jax.Array:
        """Returns the scalar that is differentiated: the cross-entropy summed over tokens, with the auxiliary losses of
        experts."""
        return self.loss(params, batch, dropout_key_B, frozen)[0]

    def rounding_key(self, state: TrainState) -> jax.Array:
        """Returns the random key for rounding the parameters in this update."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), ROUNDING), state.step)

    def dropout_keys(self, step: jax.Array, first_row: jax.Array | int, rows: int) -> jax.Array:
        """Returns a random key for each sequence [rows]. A key depends only on the seed, the step and the sequence's
        index in the global batch. `first_row`: the index of the first sequence."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(rows))

    def factor(self, state: TrainState) -> jax.Array | None:
        """Returns the factor by which the loss is multiplied before the backward pass, float32; None without a loss
        scale."""
        if self.scaling is None:
            return None
        assert state.loss_scale is not None
        return self.scaling.factor(state.loss_scale)

    def gradients(self, state: TrainState, batch: Batch, key_AB: jax.Array) -> tuple[Tally, Any]:
        """Returns the tally (sums of loss, tokens and router statistics) and the gradients, each summed over all A
        micro-batches. `batch`: name -> int32 [A, B, L], with B sequences of L tokens. `key_AB`: a dropout key per
        sequence."""
        weights, factor = self.weights.copy(state.params), self.factor(state)
        if self.pipeline is not None:
            return self.pipeline(weights, batch, key_AB, factor, state.frozen)
        if self.local_loss is not None:
            return _sum_micro_batches_by_rank(self, weights, batch, key_AB, factor, state.frozen)
        tally, grads = _sum_micro_batches(self, weights, batch, key_AB, factor, state.frozen)
        return tally, self.weights.totals(grads)

    def update(self, state: TrainState, tally: Tally, grads: Any) -> tuple[Any, Any, LossScale | None]:
        """Applies the optimizer to the gradients. Returns the new (parameters, optimizer state, loss scale). With
        `optax.MultiSteps` a call may be one micro-step of an update, which does not change parameters.

        Args:
          state: the state before the update.
          tally: sums of loss, tokens and router statistics over the update's micro-batches.
          grads: gradients summed over tokens.
        """
        with jax.named_scope("optimizer"):
            if isinstance(state.opt_state, optax.MultiStepsState):  # it would cast its sum to the gradients' dtype
                grads = jax.tree.map(lambda grad, total: grad.astype(total.dtype), grads, state.opt_state.acc_grads)
            key = self.rounding_key(state)
            if self.partwise:
                return *self.partwise(state.params, grads, state.opt_state, tally.tokens, key), None
            extra = {} if self.scaling is None else {"factor": self.factor(state)}
            updates, opt_state = self.optimizer.update(
                grads, state.opt_state, state.params, tokens=tally.tokens, **extra
            )
            params = apply_updates(state.params, updates, self.precision, key)
            if self.scaling is None:
                return params, opt_state, None
            assert state.loss_scale is not None
            return undo_overflow(self.scaling, state.loss_scale, (params, opt_state), (state.params, state.opt_state))

    def move_biases(self, frozen: Any, tally: Tally, done: jax.Array | bool = True) -> Any:
        """Returns the frozen parameters after an update. If `done`, the update is complete, and router biases are moved
        so that all experts get equally many tokens."""
        if not self.bias_rate:
            return frozen
        with jax.named_scope("router_bias"):
            assert tally.routing is not None  # bias_rate is nonzero only in models with routers
            counts_NE = tally.routing.counts if self.pipeline is None else self.pipeline.in_rows(tally.routing.counts)
            return move_router_biases(frozen, counts_NE, jnp.where(done, self.bias_rate, 0.0))

    def metrics(
        self, state: TrainState, tally: Tally, opt_state: Any, loss_scale: LossScale | None
    ) -> dict[str, jax.Array]:
        """Returns the metrics of a step: mean loss in nats per token, number of unmasked targets, gradient norm before
        clipping, and learning rate.

        With a loss scale the metrics include the scale and the number of skipped updates. With experts they include the
        routing metrics, such as the load of the busiest expert.

        Args:
          state: the state before the update.
          tally: sums of loss, tokens and router statistics over the update's micro-batches.
          opt_state, loss_scale: the states after the update.
        """
        done, own = state.step, routing_metrics(tally.routing, tally.tokens)
        if EXPERT_LOAD in own:  # every process reads it
            own[EXPERT_LOAD] = self.weights.layout(own[EXPERT_LOAD], (None, None))
        if loss_scale is not None and state.loss_scale is not None:
            done = done - state.loss_scale.skipped
            own |= {"loss_scale": loss_scale.scale, "skipped_steps": loss_scale.skipped}
        return {
            "loss": tally.loss / jnp.maximum(tally.tokens, 1),
            "tokens": tally.tokens,
            "grad_norm": grad_norm(opt_state),
            "lr": jnp.asarray(self.schedule(done), jnp.float32),
            **own,
        }


def _sum_micro_batches(
    parts: StepParts,
    weights: Any,
    batch: Batch,
    key_AB: jax.Array,
    factor: jax.Array | None,
    frozen: Any,
    *,
    local: bool = False,
) -> tuple[Tally, Any]:
    """Returns the tally (loss, tokens, router statistics) and the gradients, each summed over all micro-batches.

    Args:
      weights: the parameters that the step computes with.
      batch: name -> int32 [A, B, L], A micro-batches of B sequences with L tokens.
      key_AB: a dropout key per sequence.
      factor: the loss is multiplied by it before the backward pass (loss scaling); None for no factor.
      frozen: the parameters that are not trained.
      local: True if the batch is that of one data-parallel rank, and gradients are not reduced over ranks.
    """
    loss = parts.local_loss if local else parts.loss
    keep = (lambda grads: grads) if local else parts.weights.gradients

    def scaled(weights, micro_batch, key_B):
        total, statistics = loss(weights, micro_batch, key_B, frozen)
        return (total if factor is None else total * factor), statistics

    def one(micro_batch, key_B):
        (_, (total, load)), grads = jax.value_and_grad(scaled, has_aux=True)(weights, micro_batch, key_B)
        tokens = count_tokens(micro_batch["targets"])
        return Tally(total, tokens, weighted_load(load, tokens)), keep(grads)

    if key_AB.shape[0] == 1:  # no accumulator
        return one(jax.tree.map(lambda x: x[0], batch), key_AB[0])

    def micro(carry, xs):
        tally, grads = one(*xs)
        with jax.named_scope("accumulate"):
            return (carry[0] + tally, jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry[1], grads)), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, parts.precision.accumulator), weights)
    zeros = zeros if local else parts.weights.totals(zeros)
    return jax.lax.scan(micro, (zero_tally(parts.routed), zeros), (batch, key_AB))[0]


def _sum_micro_batches_by_rank(
    parts: StepParts, weights: Any, batch: Batch, key_AB: jax.Array, factor: jax.Array | None, frozen: Any
) -> tuple[Tally, Any]:
    # Gradients are reduced over ranks only once: each rank first sums the gradients of its own micro-batches.
    def ranks(weights, batch, key_AB, factor, frozen):
        tally, grads = _sum_micro_batches(parts, weights, batch, key_AB, factor, frozen, local=True)
        with jax.named_scope("reduce"):
            return jax.tree.map(lambda x: jax.lax.psum(x, BATCH), tally), parts.weights.reduce(grads)

    # The replication check is off: with it a gradient of replicated weights would be reduced in every micro-step.
    layout = parts.weights.layout
    return jax.shard_map(
        ranks,
        mesh=layout.mesh,
        in_specs=(P(), P(None, BATCH), P(None, BATCH), P(), P()),
        out_specs=(P(), parts.weights.specs()),
        axis_names=set(layout.local.manual),
        check_vma=False,
    )(weights, batch, key_AB, factor, frozen)


def train_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns (new state, metrics) after one micro-batch. `batch`: name -> int32 [B, L], B sequences of L tokens.

    With `optax.MultiSteps` over k micro-batches, only every k-th call updates the parameters. The metrics of that call
    cover all k micro-batches.
    """
    rows = batch["inputs"].shape[0]
    multi = isinstance(state.opt_state, optax.MultiStepsState)
    micro = state.opt_state.mini_step if multi else 0
    keys = parts.dropout_keys(state.step, micro * rows, rows)
    tally, grads = parts.gradients(state, jax.tree.map(lambda x: x[None], batch), keys[None])
    tally = state.tally + tally if multi else tally
    params, opt_state, loss_scale = parts.update(state, tally, grads)
    metrics = parts.metrics(state, tally, opt_state, loss_scale)
    if not multi:
        return TrainState(
            state.step + 1,
            params,
            opt_state,
            zero_tally(parts.routed),
            loss_scale,
            parts.move_biases(state.frozen, tally),
        ), metrics
    done = opt_state.mini_step == 0
    frozen = parts.move_biases(state.frozen, tally, done)
    kept = jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), tally)
    return TrainState(state.step + done.astype(jnp.int32), params, opt_state, kept, loss_scale, frozen), metrics


def scan_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns (new state, metrics) after a global batch. The step accumulates gradients over its micro-batches.
    `batch`: name -> int32 [A, B, L], A micro-batches of B sequences with L tokens."""
    micro_steps, rows = batch["inputs"].shape[:2]
    key_AB = jax.vmap(lambda index: parts.dropout_keys(state.step, index * rows, rows))(jnp.arange(micro_steps))
    tally, grads = parts.gradients(state, batch, key_AB)
    params, opt_state, loss_scale = parts.update(state, tally, grads)
    metrics = parts.metrics(state, tally, opt_state, loss_scale)
    return TrainState(
        state.step + 1, params, opt_state, zero_tally(parts.routed), loss_scale, parts.move_biases(state.frozen, tally)
    ), metrics


def fused_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns (new state, metrics) after a global batch. Each layer is updated inside the backward pass. `batch`: name
    -> int32 [B, L] or [1, B, L], B sequences of L tokens."""
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    keys = parts.dropout_keys(state.step, 0, batch["inputs"].shape[0])
    tokens = count_tokens(batch["targets"])  # needed for mean gradients before the first layer is updated
    assert parts.fused is not None
    loss, params, opt_state = parts.fused(
        state.params, state.opt_state, batch, keys, tokens, parts.rounding_key(state), state.frozen
    )
    return TrainState(state.step + 1, params, opt_state, zero_tally(), frozen=state.frozen), parts.metrics(
        state, Tally(loss, tokens), opt_state, None
    )


def eval_step(parts: StepParts, params: Any, batch: Batch, frozen: Any = None) -> Tally:
    """Returns the loss sum and the number of unmasked targets of one held-out micro-batch, without dropout. `batch`:
    name -> int32 [B, L], B sequences of L tokens."""
    _, (total, _) = parts.loss(parts.weights.copy(params), batch, None, frozen)
    return Tally(total, count_tokens(batch["targets"]))


# mode -> (the step function, True if optax.MultiSteps wraps the optimizer)
ACCUMULATION = {"multisteps": (train_step, True), "scan": (scan_step, False)}
