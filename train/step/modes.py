"""One training step: two ways to accumulate micro-batches, the update in the backward pass, and an evaluation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bytescope.train.step.losses import count_tokens
from bytescope.train.step.parts import StepParts
from bytescope.train.step.state import Batch, Tally, TrainState, zero_tally


def train_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns (new state, metrics) after one micro-batch, which has the arrays of `batch_names`, int32 [B, L].

    With MultiSteps only every k-th call updates the parameters; its metrics are those of the update.
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
    """(new state, metrics) after a global batch [A, B, L]: micro-batches are accumulated inside the step."""
    micro_steps, rows = batch["inputs"].shape[:2]
    key_AB = jax.vmap(lambda index: parts.dropout_keys(state.step, index * rows, rows))(jnp.arange(micro_steps))
    tally, grads = parts.gradients(state, batch, key_AB)
    params, opt_state, loss_scale = parts.update(state, tally, grads)
    metrics = parts.metrics(state, tally, opt_state, loss_scale)
    return TrainState(
        state.step + 1, params, opt_state, zero_tally(parts.routed), loss_scale, parts.move_biases(state.frozen, tally)
    ), metrics


def fused_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """(new state, metrics) after a global batch [B, L] or [1, B, L]: each layer is updated in the backward pass."""
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    keys = parts.dropout_keys(state.step, 0, batch["inputs"].shape[0])
    tokens = count_tokens(batch["targets"])  # known before the first layer is updated: its gradient becomes a mean
    assert parts.fused is not None
    loss, params, opt_state = parts.fused(
        state.params, state.opt_state, batch, keys, tokens, parts.rounding_key(state), state.frozen
    )
    return TrainState(state.step + 1, params, opt_state, zero_tally(), frozen=state.frozen), parts.metrics(
        state, Tally(loss, tokens), opt_state, None
    )


def eval_step(parts: StepParts, params: Any, batch: Batch, frozen: Any = None) -> Tally:
    """Loss sum and counted tokens of one held-out micro-batch [B, L], without dropout."""
    _, (total, _) = parts.loss(parts.weights.copy(params), batch, None, frozen)
    return Tally(total, count_tokens(batch["targets"]))


# mode -> (the step, whether optax.MultiSteps wraps the optimizer)
ACCUMULATION = {"multisteps": (train_step, True), "scan": (scan_step, False)}
