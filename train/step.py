"""One training step: gradients of one micro-batch, two ways to accumulate them, one update."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from bytescope.model import Precision
from bytescope.model.frozen import joined
from bytescope.train.losses import count_tokens
from bytescope.train.optimizer.host_offload import is_hosted
from bytescope.train.optimizer.loss_scale import LossScale, Scaling, guard
from bytescope.train.optimizer.rounding import apply_updates
from bytescope.train.optimizer.rules import grad_norm
from bytescope.train.parallel.axes import BATCH
from bytescope.train.parallel.layout import Layout

Batch = dict[str, jax.Array]
ROUNDING = 0x726E64  # folded into the keys of rounding, so that they differ from those of dropout


@partial(jax.tree_util.register_dataclass, data_fields=["loss", "tokens"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums over the micro-batches of the current update: loss in nats (float32), counted tokens (int32)."""

    loss: jax.Array
    tokens: jax.Array

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.loss + other.loss, self.tokens + other.tokens)


def zero_tally() -> Tally:
    """The tally before the first micro-batch of an update."""
    return Tally(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


@partial(jax.tree_util.register_dataclass,
         data_fields=["step", "params", "opt_state", "tally", "loss_scale", "frozen"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that persists between steps.

    step: optimizer updates so far, int32, those that a loss scale skipped included. params: pure dict of what is
    trained, in `precision.param`. opt_state: optax' state, of these alone. loss_scale: None unless the precision has
    one. frozen: pure dict of the other parameters, in `precision.compute`, None where all are trained.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    tally: Tally
    loss_scale: LossScale | None = None
    frozen: Any = None

    @property
    def model_params(self) -> Any:
        """All parameters of the model, as one pure dict."""
        return joined(self.params, self.frozen)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Trained parameters on their way into a step and gradients on their way out, by the layout's ZeRO strategy.

    axes, contracted: trees like the parameters (`logical_axes` and `contracted` of model/transformer.py).
    """

    layout: Layout
    axes: Any
    contracted: Any
    precision: Precision

    def copy(self, params: Any) -> Any:
        """The parameters that the step computes with: under zero1 and zero2 a gathered copy, matrices in the compute
        dtype.

        Where gradients are sharded the token table is not gathered: it stays sharded as under zero3, and norms and
        biases are gathered as they are read. With `precision.cast=step` every parameter is cast, under any strategy.
        """
        strategy, cast = self.layout.strategy, self.precision.copied
        gathers = strategy.stored and not strategy.by_layer
        if not gathers and not cast:
            return params

        def one(param, axes, contracted):
            with jax.named_scope("param_copy"):
                if contracted or cast:
                    param = param.astype(self.precision.compute)
                if gathers and (contracted or not strategy.gradients):
                    return self.layout.gather(param, axes)
                return self.layout.held(param, axes) if cast else param

        copy = self._map(one, params, self.contracted)
        # One copy for all its readers: for unrolled layers the compiler would otherwise cast again for each reader.
        return jax.lax.optimization_barrier(copy) if cast else copy

    def gradients(self, grads: Any) -> Any:
        """Gradients of one micro-batch as they are kept: their dtype and sharding."""
        keep = self.layout.gradient  # those of parameters in host memory are there already, with the same sharding
        return self._map(lambda grad, axes: grad if is_hosted(grad) else keep(grad, axes), grads)

    def totals(self, grads: Any) -> Any:
        """Sums of these over micro-batches, sharded likewise; their dtype stays."""
        return self._map(self.layout.total, grads)

    def _map(self, function: Callable, *trees: Any) -> Any:
        leaves, structure = jax.tree.flatten(trees[0])
        axes = jax.tree.leaves(self.axes, is_leaf=lambda node: isinstance(node, tuple))
        return structure.unflatten([function(*row) for row in zip(leaves, axes, *map(jax.tree.leaves, trees[1:]))])

    def specs(self) -> Any:
        """How gradients that are reduced once per update are sharded over data-parallel ranks: as they are stored."""
        def own(axes):
            dims = [self.layout.mesh_axes(axis, state=self.layout.strategy.stored) for axis in axes]
            return P(*["fsdp" if "fsdp" in dim else None for dim in dims])

        return jax.tree.map(own, self.axes, is_leaf=lambda node: isinstance(node, tuple))

    def reduce(self, grads: Any) -> Any:
        """Gradients summed over the ranks, inside a `jax.shard_map` over them: each rank keeps the shard it stores."""
        local = self.layout.local

        def one(grad, axes, spec):
            def summed(grad):
                if "fsdp" not in spec or self.layout.mesh.shape["fsdp"] == 1:
                    return jax.lax.psum(grad, BATCH)
                return jax.lax.psum(
                    jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=list(spec).index("fsdp"), tiled=True), "data")

            # Every device sends its own shard: with `tensor` left to the compiler, XLA gathers what it then scatters.
            return local.own(summed, (axes,), axes)(self.layout.reduced(grad))

        return self._map(one, grads, self.specs())


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The functions and settings of a step.

    loss: (params, batch, dropout_key_B, frozen) -> float32 sum in nats. optimizer: optax' transformation, or MultiSteps
      of it. schedule: number of the update -> learning rate. seed: of dropout and rounding.
    local_loss: `loss` of one data-parallel rank's sequences, where gradients are reduced once per update, else None.
    scaling: the rule of the loss scale, if there is one.
    partwise: the optimizer's update layer by layer, where it is asked for (train/optimizer/partwise.py).
    fused: (params, opt_state, batch, keys, tokens, rounding key, frozen) -> loss, new parameters and optimizer state,
      updated inside the backward pass (train/optimizer/fused_backward.py).
    """

    loss: Callable[..., jax.Array]
    optimizer: Any
    schedule: Callable[[jax.Array], jax.Array]
    seed: int
    weights: Weights
    local_loss: Callable[..., jax.Array] | None = None
    scaling: Scaling | None = None
    partwise: Callable[..., tuple[Any, Any]] | None = None
    fused: Callable[..., tuple[jax.Array, Any, Any]] | None = None

    @property
    def precision(self) -> Precision:
        """Dtypes by role."""
        return self.weights.precision

    def rounding_key(self, state: TrainState) -> jax.Array:
        """The key of this update's rounding of parameters."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), ROUNDING), state.step)

    def dropout_keys(self, step: jax.Array, first_row: jax.Array | int, rows: int) -> jax.Array:
        """A key per sequence [rows], from the step and the place of the sequence in the global batch alone."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(rows))

    def factor(self, state: TrainState) -> jax.Array | None:
        """What the loss is multiplied by before the backward pass, float32; None without a loss scale."""
        return None if self.scaling is None else self.scaling.factor(state.loss_scale)

    def gradients(self, state: TrainState, batch: Batch, key_AB: jax.Array) -> tuple[Tally, Any]:
        """Sums over the A micro-batches [A, B, L]: the tally, and gradients as they are kept until the update."""
        weights, factor = self.weights.copy(state.params), self.factor(state)
        if self.local_loss is not None:
            return _sums_by_rank(self, weights, batch, key_AB, factor, state.frozen)
        tally, grads = _sums(self, weights, batch, key_AB, factor, state.frozen)
        return tally, self.weights.totals(grads)

    def update(self, state: TrainState, tally: Tally, grads: Any) -> tuple[Any, Any, LossScale | None]:
        """(parameters, optimizer state, loss scale) after the update, or after one micro-step of it."""
        with jax.named_scope("optimizer"):
            if isinstance(state.opt_state, optax.MultiStepsState):  # it would narrow its sum to the gradients' dtype
                grads = jax.tree.map(lambda grad, total: grad.astype(total.dtype), grads, state.opt_state.acc_grads)
            key = self.rounding_key(state)
            if self.partwise:
                return *self.partwise(state.params, grads, state.opt_state, tally.tokens, key), None
            extra = {} if self.scaling is None else {"factor": self.factor(state)}
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, tokens=tally.tokens,
                                                       **extra)
            params = apply_updates(state.params, updates, self.precision, key)
            if self.scaling is None:
                return params, opt_state, None
            return guard(self.scaling, state.loss_scale, (params, opt_state), (state.params, state.opt_state))

    def metrics(self, state: TrainState, tally: Tally, opt_state: Any,
                loss_scale: LossScale | None) -> dict[str, jax.Array]:
        """What a step reports: mean loss in nats per token, counted tokens, gradient norm before clipping, learning
        rate and, with a loss scale, the scale and the updates skipped so far."""
        done, own = state.step, {}
        if loss_scale is not None:
            done = done - state.loss_scale.skipped
            own = {"loss_scale": loss_scale.scale, "skipped_steps": loss_scale.skipped}
        return {"loss": tally.loss / jnp.maximum(tally.tokens, 1), "tokens": tally.tokens,
                "grad_norm": grad_norm(opt_state), "lr": jnp.asarray(self.schedule(done), jnp.float32), **own}


def train_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """(new state, metrics) after one micro-batch, {"inputs", "targets"} and of packed rows "segments", int32 [B, L].

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
        return TrainState(state.step + 1, params, opt_state, zero_tally(), loss_scale, state.frozen), metrics
    done = opt_state.mini_step == 0
    kept = jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), tally)
    return TrainState(state.step + done.astype(jnp.int32), params, opt_state, kept, loss_scale, state.frozen), metrics


def scan_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """(new state, metrics) after a global batch [A, B, L]: micro-batches are accumulated inside the step."""
    micro_steps, rows = batch["inputs"].shape[:2]
    key_AB = jax.vmap(lambda index: parts.dropout_keys(state.step, index * rows, rows))(jnp.arange(micro_steps))
    tally, grads = parts.gradients(state, batch, key_AB)
    params, opt_state, loss_scale = parts.update(state, tally, grads)
    metrics = parts.metrics(state, tally, opt_state, loss_scale)
    return TrainState(state.step + 1, params, opt_state, zero_tally(), loss_scale, state.frozen), metrics


def fused_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """(new state, metrics) after a global batch [B, L] or [1, B, L]: each layer is updated in the backward pass."""
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    keys = parts.dropout_keys(state.step, 0, batch["inputs"].shape[0])
    tokens = count_tokens(batch["targets"])  # known before the first layer is updated: its gradient becomes a mean
    loss, params, opt_state = parts.fused(state.params, state.opt_state, batch, keys, tokens,
                                          parts.rounding_key(state), state.frozen)
    return TrainState(state.step + 1, params, opt_state, zero_tally(), frozen=state.frozen), parts.metrics(
        state, Tally(loss, tokens), opt_state, None)


def _sums(parts: StepParts, weights: Any, batch: Batch, key_AB: jax.Array, factor: jax.Array | None,
          frozen: Any, *, local: bool = False) -> tuple[Tally, Any]:
    """Tally and gradients of all micro-batches; unless `local`, gradients are reduced over the ranks as they are made.

    The gradients are those of the loss times `factor`; the tally is without it.
    """
    loss = parts.local_loss if local else parts.loss
    keep = (lambda grads: grads) if local else parts.weights.gradients

    def scaled(weights, micro_batch, key_B):
        total = loss(weights, micro_batch, key_B, frozen)
        return (total if factor is None else total * factor), total

    def one(micro_batch, key_B):
        (_, total), grads = jax.value_and_grad(scaled, has_aux=True)(weights, micro_batch, key_B)
        return Tally(total, count_tokens(micro_batch["targets"])), keep(grads)

    if key_AB.shape[0] == 1:  # no accumulator
        return one(jax.tree.map(lambda x: x[0], batch), key_AB[0])

    def micro(carry, xs):
        here, grads = one(*xs)
        with jax.named_scope("accumulate"):
            return (carry[0] + here, jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry[1], grads)), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, parts.precision.accumulator), weights)
    zeros = zeros if local else parts.weights.totals(zeros)
    return jax.lax.scan(micro, (zero_tally(), zeros), (batch, key_AB))[0]


def _sums_by_rank(parts: StepParts, weights: Any, batch: Batch, key_AB: jax.Array, factor: jax.Array | None,
                  frozen: Any) -> tuple[Tally, Any]:
    """The same, with one reduction after the last micro-batch: until then every rank sums its own gradients."""
    def ranks(weights, batch, key_AB, factor, frozen):
        tally, grads = _sums(parts, weights, batch, key_AB, factor, frozen, local=True)
        with jax.named_scope("reduce"):
            return jax.tree.map(lambda x: jax.lax.psum(x, BATCH), tally), parts.weights.reduce(grads)

    # Without the check of replication: with it a gradient of replicated weights would be reduced in every micro-step.
    layout = parts.weights.layout
    return jax.shard_map(ranks, mesh=layout.mesh, in_specs=(P(), P(None, BATCH), P(None, BATCH), P(), P()),
                         out_specs=(P(), parts.weights.specs()), axis_names=set(layout.local.manual), check_vma=False)(
        weights, batch, key_AB, factor, frozen)


def eval_step(parts: StepParts, params: Any, batch: Batch, frozen: Any = None) -> Tally:
    """Loss sum and counted tokens of one held-out micro-batch [B, L], without dropout."""
    return Tally(parts.loss(parts.weights.copy(params), batch, None, frozen), count_tokens(batch["targets"]))


# mode -> (the step, whether optax.MultiSteps wraps the optimizer)
ACCUMULATION = {"multisteps": (train_step, True), "scan": (scan_step, False)}
