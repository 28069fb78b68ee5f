"""One training step: gradients of one micro-batch, two ways to accumulate them, one update."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.losses import count_tokens
from train.optimizer import grad_norm

Batch = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["loss", "tokens"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums over the micro-batches of the update under way: loss in nats (float32), tokens (int32)."""

    loss: jax.Array
    tokens: jax.Array

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.loss + other.loss, self.tokens + other.tokens)


def zero_tally() -> Tally:
    return Tally(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "tally"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that persists between steps. `step` counts optimizer updates, int32."""

    step: jax.Array
    params: Any
    opt_state: Any
    tally: Tally


@dataclasses.dataclass(frozen=True)
class StepParts:
    """What a step is made of: `loss(params, batch, dropout_key_B) -> sum in nats`, optimizer, schedule, seed."""

    loss: Callable[..., jax.Array]
    optimizer: Any
    schedule: Callable[[jax.Array], jax.Array]
    seed: int
    accumulator: Any

    def dropout_keys(self, step: jax.Array, first_row: jax.Array | int, rows: int) -> jax.Array:
        """A key for each sequence, from its place in the global batch alone."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(rows))

    def gradients(self, params: Any, batch: Batch, key_B: jax.Array) -> tuple[Tally, Any]:
        loss, grads = jax.value_and_grad(self.loss)(params, batch, key_B)
        return Tally(loss, count_tokens(batch["targets"])), grads

    def update(self, state: TrainState, tally: Tally, grads: Any) -> tuple[Any, Any]:
        with jax.named_scope("optimizer"):
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, tokens=tally.tokens)
            return optax.apply_updates(state.params, updates), opt_state

    def metrics(self, state: TrainState, tally: Tally, opt_state: Any) -> dict[str, jax.Array]:
        return {"loss": tally.loss / jnp.maximum(tally.tokens, 1), "tokens": tally.tokens,
                "grad_norm": grad_norm(opt_state), "lr": jnp.asarray(self.schedule(state.step), jnp.float32)}


def train_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """One micro-batch [B, L]. With MultiSteps only every k-th call updates; its metrics are the update's."""
    rows = batch["inputs"].shape[0]
    multi = isinstance(state.opt_state, optax.MultiStepsState)
    micro = state.opt_state.mini_step if multi else 0
    tally, grads = parts.gradients(state.params, batch, parts.dropout_keys(state.step, micro * rows, rows))
    tally = state.tally + tally if multi else tally
    params, opt_state = parts.update(state, tally, grads)
    metrics = parts.metrics(state, tally, opt_state)
    if not multi:
        return TrainState(state.step + 1, params, opt_state, zero_tally()), metrics
    done = opt_state.mini_step == 0
    kept = jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), tally)
    return TrainState(state.step + done.astype(jnp.int32), params, opt_state, kept), metrics


def scan_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """A whole global batch [A, B, L]: the accumulator lives inside the step and the optimizer runs once."""
    micro_steps, rows = batch["inputs"].shape[:2]

    def micro(carry, xs):
        tally, total = carry
        index, micro_batch = xs
        here, grads = parts.gradients(state.params, micro_batch,
                                      parts.dropout_keys(state.step, index * rows, rows))
        with jax.named_scope("accumulate"):
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return (tally + here, total), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, parts.accumulator), state.params)
    (tally, grads), _ = jax.lax.scan(micro, (zero_tally(), zeros), (jnp.arange(micro_steps), batch))
    params, opt_state = parts.update(state, tally, grads)
    return TrainState(state.step + 1, params, opt_state, zero_tally()), parts.metrics(state, tally, opt_state)


def eval_step(loss: Callable[..., jax.Array], params: Any, batch: Batch) -> Tally:
    """Loss sum and tokens of one held-out micro-batch [B, L], no dropout."""
    return Tally(loss(params, batch, None), count_tokens(batch["targets"]))


# mode -> (the step, whether optax.MultiSteps wraps the optimizer)
ACCUMULATION = {"multisteps": (train_step, True), "scan": (scan_step, False)}
