"""Computes the gradients of an update through the stages of a pipeline, in one loop over the ticks of a schedule.

In a tick each stage runs at most one chunk of layers forward and one backward (train/pipeline/stage_units.py). Then
outputs and gradients move to the stages that use them in the next tick. No stage is special: embedding and loss run on
all stages together, with the vocabulary sharded over them, in the ticks in which a micro-batch enters or leaves.

Shape suffixes: A is the micro-batches of an update and P the stages. Inside the stages P is 1.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from bytescope.model.experts.expert_layer import Load
from bytescope.model.frozen import merge_parameters
from bytescope.train.pipeline.schedule import Schedule, full_ticks
from bytescope.train.pipeline.stage_units import STAGE, Micro, StackUnit, broadcast_from, inside, turns_scope, when
from bytescope.train.step.losses import count_tokens
from bytescope.train.step.pullback import row_of
from bytescope.train.step.routing import no_load
from bytescope.train.step.state import Batch, Tally
from bytescope.train.step.step_weights import Weights

# The scopes that autodiff gives to the two passes, by which reports recognize them. Here each pass is written out.
FORWARD, BACKWARD = "jvp", "transpose(jvp)"


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A pipeline schedule as int32 arrays, one row per tick (iteration of the loop). -1 means no work.

    A slot is an index into a buffer of arrays that wait for a later tick.

    Fields:
      forward, backward: [ticks, stages, 3], for each stage the micro-batch, the chunk (group of layers), and the slot
        of the saved residuals.
      enter: [ticks], the micro-batch that enters the first stage, so that its embedding is computed.
      end: [ticks], the micro-batch whose loss is computed.
      leave: [ticks], the micro-batch whose backward pass ends on the first stage, so that its embedding gradient is
        computed.
    """

    forward: jax.Array
    backward: jax.Array
    enter: jax.Array
    end: jax.Array
    leave: jax.Array

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> "Ticks":
        stage, chunk = schedule.place_of(0)

        def first(table: np.ndarray) -> np.ndarray:
            return np.where(table[:, stage, 1] == chunk, table[:, stage, 0], -1)

        arrays = (
            schedule.forward,
            schedule.backward,
            first(schedule.forward),
            schedule.ends,
            first(schedule.backward),
        )
        return cls(*(jnp.asarray(array, jnp.int32) for array in arrays))


jax.tree_util.register_dataclass(Ticks, ["forward", "backward", "enter", "end", "leave"], [])


@dataclasses.dataclass(frozen=True)
class PipelineGradients:
    """Computes the loss sums (tally) and gradients of an update, whose A micro-batches of B sequences with L tokens
    pass through pipeline stages.

    The call is (trained parameters, batch [A, B, L], dropout keys [A, B], factor, frozen parameters) -> (tally,
    gradients). `factor` is the loss scale by which gradients are multiplied; None for no scaling.

    Fields:
      graph: the flax graph definition of the Transformer without the layers in the stages.
      cross_entropy: (x_BLD, head weights, targets_BL) -> float32 sum in nats.
      schedule: which micro-batch each stage computes at which time.
      units: the layers of a chunk, one entry per parameter stack. A chunk is a group of layers that a stage runs
        without interruption. A parameter stack is the tree of the parameters of layers with equal structure, with
        leaves [layers, ...].
      weights: the record that casts and shards gradients.
      accumulator: dtype of the gradient sums.
      dropout: True if the model has dropout.
      coefficients: the weights of a layer's two auxiliary router losses (balance loss, z loss), per unmasked target.
      experts: number of experts in a layer, 0 for none.
      pooled: True if the balance loss is computed from router statistics averaged over all layers, not layer by layer.
      masks: batch -> two bool masks or None each: False for padding, and False for tokens with a masked target.
    """

    graph: nnx.GraphDef
    cross_entropy: Callable[..., jax.Array]
    schedule: Schedule
    units: tuple[StackUnit, ...]
    weights: Weights
    accumulator: Any
    dropout: bool
    coefficients: tuple[float, float]
    experts: int
    pooled: bool
    masks: Callable[[Batch], tuple[jax.Array | None, ...]]

    def __call__(
        self, weights: Any, batch: Batch, key_AB: jax.Array, factor: jax.Array | None, frozen: Any
    ) -> tuple[Tally, Any]:
        stacks = {unit.rows.stack: weights.get(unit.rows.stack, {}) for unit in self.units}
        rest = {name: tree for name, tree in weights.items() if name not in stacks}
        fixed = {name: (frozen or {}).get(name) for name in stacks}
        micros = self._micros(rest, stacks, frozen, batch, key_AB, factor)
        run = _Run(self, stacks, rest, fixed, frozen, batch, micros, factor)
        with jax.named_scope(f"ticks_full_{full_ticks(self.schedule)}"):
            carry, _ = jax.lax.scan(run.tick, run.start(), Ticks.from_schedule(self.schedule))
        return run.result(carry)

    def in_rows(self, load_NE: jax.Array) -> jax.Array:
        """Reorders router statistics [layers, experts] from the layers' order in the model to the order in which the
        stages store the layers. Rows without a layer are 0."""
        rows = next(unit.rows for unit in self.units if unit.routed)
        return jnp.take(load_NE, jnp.asarray(rows.numbers), axis=0, mode="fill", fill_value=0)

    def transformer(self, rest: Any, stacks: Any, frozen: Any) -> Any:
        """Returns the Transformer without the layers in the stages: embedding, final norm and head.

        Args:
          rest, stacks: trained parameters outside and inside the stages, name -> tree.
          frozen: parameters that are not trained.
        """
        return nnx.merge(self.graph, merge_parameters({**rest, **stacks}, frozen))

    def _micros(
        self, rest: Any, stacks: Any, frozen: Any, batch: Batch, key_AB: jax.Array, factor: jax.Array | None
    ) -> Micro:
        """Returns the inputs of the blocks except the activations, such as dropout keys and segment ids, with leaves
        [A, ...] for A micro-batches.

        Args:
          rest, stacks: trained parameters outside and inside the stages.
          key_AB: dropout keys.
          factor: the loss scale; None for no scaling.
        """
        model = self.transformer(rest, stacks, frozen)
        rows, packed = (batch.get("segments"), *self.masks(batch)), None
        if any(array is not None for array in rows):
            packed = jax.lax.map(lambda row: model.packed(*row), rows)
        tokens_A = jax.vmap(count_tokens)(batch["targets"])
        scaled_A = tokens_A.astype(jnp.float32) * (1.0 if factor is None else factor)
        coefficients = jnp.outer(scaled_A, jnp.asarray(self.coefficients, jnp.float32))
        return Micro(jax.random.key_data(key_AB) if self.dropout else None, packed, tokens_A, coefficients)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One call of `PipelineGradients`: its arguments, and the body of the loop over ticks.

    In the methods, `carry` has the values that the loop passes from tick to tick (`start`), and `table` is the row of
    the schedule for this tick. P stages, B sequences, L tokens, D model width.

    Fields:
      whole: the object that is called.
      stacks, rest: trained parameters inside and outside the stages, name -> tree.
      fixed, frozen: frozen parameters inside the stages, and all frozen parameters.
      batch: the arrays of the update, [A, B, L] for A micro-batches.
      micros: the inputs of the blocks except the activations, [A, ...].
      factor: the loss scale; None for no scaling.
    """

    whole: PipelineGradients
    stacks: Any
    rest: Any
    fixed: Any
    frozen: Any
    batch: Batch
    micros: Micro
    factor: jax.Array | None

    @property
    def layout(self) -> Any:
        return self.whole.weights.layout

    @property
    def _micro_batch_scope(self) -> str:
        # One iteration in the ticks with a micro-batch, and none in the other ticks.
        return turns_scope(1, self.whole.schedule.micro_batches, self.whole.schedule.ticks)

    def start(self) -> dict[str, Any]:
        """Returns the initial carry of the loop over ticks: zero buffers and sums, name -> array or tree."""
        whole, stages = self.whole, self.whole.schedule.stages
        shape, dtype = self._stream_shape
        between_PBLD = jnp.zeros((stages, *shape), dtype)
        slots = max(whole.schedule.stash_slots)
        stash = []  # the residuals of each stack [stages, slots, rows of a chunk, ...]
        for unit, kept in zip(whole.units, self._residual_shapes()):
            rows = stages, slots, unit.rows.rows
            stash.append([self._shard_stages(jnp.zeros((*rows, *leaf.shape), leaf.dtype)) for leaf in kept])
        sums = jax.tree.map(lambda w: jnp.zeros(w.shape, whole.accumulator), {**self.stacks, **self.rest})
        sums = whole.weights.totals(sums)
        loads = [no_load(len(unit.rows.order), whole.experts) if unit.routed else None for unit in whole.units]
        pool = None
        if whole.pooled:
            pool = self._shard_stages(jnp.zeros((stages, whole.schedule.micro_batches, 2, whole.experts), jnp.float32))
        return {
            "x": self._shard_stream(between_PBLD),
            "d": self._shard_stream(between_PBLD),
            "stash": stash,
            "loads": loads,
            "pool": pool,
            "sums": sums,
            "loss": jnp.zeros((), jnp.float32),
        }

    @cached_property
    def _stream_shape(self) -> tuple[tuple[int, ...], Any]:
        x_BLD = jax.eval_shape(lambda: self._begin(self.rest, jnp.int32(0)))
        return x_BLD.shape, x_BLD.dtype

    def _residual_shapes(self) -> list[list[jax.ShapeDtypeStruct]]:
        """Returns for each stack (layers with equal structure) the shapes of the residuals that one of its layers
        saves."""

        def kept(stacks, fixed, micros, x_BLD):
            micro = jax.tree.map(lambda leaf: leaf[0], micros)
            residuals = []
            for unit in self.whole.units:
                own, base = (jax.tree.map(lambda leaf: leaf[0], tree[unit.rows.stack]) for tree in (stacks, fixed))
                x_BLD, _, leaves = unit.layer(x_BLD, own, base, jnp.int32(0), micro)
                residuals.append(leaves)
            return residuals

        shape, dtype = self._stream_shape
        kept_inside = inside(self.layout, kept, (P(STAGE), P(STAGE), P(), P()), P())
        return jax.eval_shape(kept_inside, self.stacks, self.fixed, self.micros, jax.ShapeDtypeStruct(shape, dtype))

    def _shard_stages(self, leaf: jax.Array) -> jax.Array:
        # The compiler chooses the sharding of the other axes.
        rest = [P.UNCONSTRAINED] * (leaf.ndim - 1)
        return jax.lax.with_sharding_constraint(leaf, jax.sharding.NamedSharding(self.layout.mesh, P(STAGE, *rest)))

    def _shard_stream(self, x_PBLD: jax.Array) -> jax.Array:
        spec = P(STAGE, *self.layout.spec(("batch", "stream", None)))
        return jax.lax.with_sharding_constraint(x_PBLD, jax.sharding.NamedSharding(self.layout.mesh, spec))

    def tick(self, carry: dict[str, Any], table: Ticks) -> tuple[dict[str, Any], None]:
        carry = dict(carry)
        with jax.named_scope(FORWARD):
            y_PBLD = self._forward(carry, table)
            d_end_BLD = self._end(carry, table, y_PBLD)
        with jax.named_scope(BACKWARD):
            d_PBLD = self._backward(carry, table, d_end_BLD)
            self._leave(carry, table, d_PBLD)
        with jax.named_scope(FORWARD), jax.named_scope("stage_sends"):
            carry["x"], carry["d"] = self._move(y_PBLD, d_PBLD, table)
        return carry, None

    def _begin(self, rest: Any, micro: jax.Array) -> jax.Array:
        """Returns the embedded tokens of micro-batch number `micro` [B, L, D], which are the input of the first block.

        `rest`: trained parameters outside the stages.
        """
        model = self.whole.transformer(rest, self.stacks, self.frozen)
        tokens_BL = row_of(self.batch["inputs"], micro)
        own = row_of(self.micros, micro)
        return model.begin(tokens_BL, own.key_B, own.packed)

    def _forward(self, carry: dict[str, Any], table: Ticks) -> jax.Array:
        """Runs the forward pass of this tick on every stage. Returns the output of each stage [P, B, L, D].

        Args:
          carry: the loop's values. The saved residuals and router statistics in it are updated.
          table: the micro-batch and chunk of each stage in this tick.
        """
        entering_BLD = when(
            table.enter >= 0,
            lambda x: self._begin(self.rest, jnp.maximum(table.enter, 0)),
            jnp.zeros(*self._stream_shape),
            self._micro_batch_scope,
        )
        stage, chunk = self.whole.schedule.place_of(0)

        def forward(unit, counts, x_1BLD, entering_BLD, stash, loads, pool, stacks, fixed, micros):
            unit, busy = jnp.maximum(unit[0], 0), unit[0, 0] >= 0
            micro = row_of(micros, unit[0])
            is_first = (jax.lax.axis_index(STAGE) == stage) & (unit[1] == chunk)
            x_BLD = jnp.where(is_first, entering_BLD, x_1BLD[0])
            pool = jax.tree.map(lambda leaf: leaf[0], pool)
            for index, one in enumerate(self.whole.units):
                count, first = (leaf[0] for leaf in counts[index])
                x_BLD, own, loads[index], pool = one.forward(
                    unit,
                    jnp.where(busy, count, 0),
                    first,
                    x_BLD,
                    [leaf[0] for leaf in stash[index]],
                    stacks[one.rows.stack],
                    fixed[one.rows.stack],
                    loads[index],
                    pool,
                    micro,
                )
                stash[index] = [leaf[None] for leaf in own]
            return x_BLD[None], stash, loads, jax.tree.map(lambda leaf: leaf[None], pool)

        stages = P(STAGE)
        run = inside(self.layout, forward, (stages, stages, stages, P(), *[stages] * 5, P()), stages)
        y_PBLD, carry["stash"], carry["loads"], carry["pool"] = run(
            table.forward,
            self._counts(),
            carry["x"],
            entering_BLD,
            carry["stash"],
            carry["loads"],
            carry["pool"],
            self.stacks,
            self.fixed,
            self.micros,
        )
        return self._shard_stream(y_PBLD)

    def _counts(self) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.asarray(unit.rows.count), jnp.asarray(unit.rows.first)) for unit in self.whole.units]

    def _end(self, carry: dict[str, Any], table: Ticks, y_PBLD: jax.Array) -> jax.Array:
        """Computes the loss of the micro-batch that ends in this tick, and adds the loss and its gradients to `carry`.

        Returns the gradient of the last block's output [B, L, D], zeros if no micro-batch ends.

        Args:
          carry: the loop's values.
          table: which micro-batch ends in this tick.
          y_PBLD: the output of each of P stages in this tick.
        """
        micro = table.end
        last, _ = self.whole.schedule.place_of(self.whole.schedule.virtual_stages - 1)

        def end(carried):
            loss, sums, _ = carried
            x_BLD = self._copy_from_stage(y_PBLD, last)
            targets_BL = row_of(self.batch["targets"], jnp.maximum(micro, 0))

            def function(rest, x_BLD):
                model = self.whole.transformer(rest, self.stacks, self.frozen)
                x_BLD = model.finish(x_BLD)
                with jax.named_scope("loss"):
                    return self.whole.cross_entropy(x_BLD, model.head(), targets_BL)

            total, pullback = jax.vjp(function, self.rest, x_BLD)
            grads, d_BLD = pullback(jnp.ones_like(total) if self.factor is None else self.factor)
            return loss + total, self._add(sums, grads), d_BLD

        zeros = jnp.zeros(*self._stream_shape)
        sums = {name: carry["sums"][name] for name in self.rest}
        carry["loss"], sums, d_BLD = when(micro >= 0, end, (carry["loss"], sums, zeros), self._micro_batch_scope)
        carry["sums"] = {**carry["sums"], **sums}
        return d_BLD

    def _copy_from_stage(self, x_PBLD: jax.Array, stage: int) -> jax.Array:
        def pick(x_1BLD):
            return broadcast_from(self.layout, x_1BLD[0], jax.lax.axis_index(STAGE) == stage)

        return self.layout(inside(self.layout, pick, (P(STAGE),), P())(x_PBLD), ("batch", "stream", None))

    def _add(self, sums: Any, grads: Any) -> Any:
        axes = {name: self.whole.weights.axes[name] for name in grads}
        grads = dataclasses.replace(self.whole.weights, axes=axes).gradients(grads)
        return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)

    def _backward(self, carry: dict[str, Any], table: Ticks, d_end_BLD: jax.Array) -> jax.Array:
        """Runs the backward pass of this tick on every stage. Returns the gradient of each stage's input [P, B, L, D].

        Args:
          carry: the loop's values. The sums of gradients in it are updated.
          table: the micro-batch and chunk of each stage in this tick.
          d_end_BLD: the gradient of the last block's output, for the micro-batch whose loss this tick computes.
        """
        stage, chunk = self.whole.schedule.place_of(self.whole.schedule.virtual_stages - 1)
        # All layers of a micro-batch have run forward before any of them runs backward.
        busy_AE = None if carry["pool"] is None else self._pooled(carry)[:, 0]

        def backward(unit, counts, d_1BLD, d_end_BLD, stash, sums, stacks, fixed, busy_AE, micros):
            unit, busy = jnp.maximum(unit[0], 0), unit[0, 0] >= 0
            micro = row_of(micros, unit[0])
            is_last = (jax.lax.axis_index(STAGE) == stage) & (unit[1] == chunk)
            d_BLD = jnp.where(is_last, d_end_BLD, d_1BLD[0])
            for index, one in reversed(list(enumerate(self.whole.units))):
                count, first = (leaf[0] for leaf in counts[index])
                name = one.rows.stack
                d_BLD, sums[name] = one.backward(
                    unit,
                    jnp.where(busy, count, 0),
                    first,
                    d_BLD,
                    [leaf[0] for leaf in stash[index]],
                    stacks[name],
                    fixed[name],
                    sums[name],
                    busy_AE,
                    micro,
                )
            return d_BLD[None], sums

        stages = P(STAGE)
        run = inside(self.layout, backward, (stages, stages, stages, P(), *[stages] * 4, P(), P()), stages)
        sums = {name: carry["sums"][name] for name in self.stacks}
        d_PBLD, sums = run(
            table.backward,
            self._counts(),
            carry["d"],
            d_end_BLD,
            carry["stash"],
            sums,
            self.stacks,
            self.fixed,
            busy_AE,
            self.micros,
        )
        carry["sums"] = {**carry["sums"], **sums}
        return self._shard_stream(d_PBLD)

    def _pooled(self, carry: dict[str, Any]) -> jax.Array:
        """Returns the router statistics for a balance loss that is computed over all layers together, float32 [A, 2,
        E].

        For each of A micro-batches and E experts they are the fraction of the router's choices that went to the expert,
        and the expert's mean score, both averaged over the layers with experts.
        """
        layers = sum(len(unit.rows.places) for unit in self.whole.units if unit.routed)
        return carry["pool"].sum(0) / layers

    def _leave(self, carry: dict[str, Any], table: Ticks, d_PBLD: jax.Array) -> None:
        """Adds to `carry` the embedding gradient of the micro-batch whose backward pass ends in this tick.

        `d_PBLD`: the gradient of each stage's input. `table`: which micro-batch ends.
        """
        stage, _ = self.whole.schedule.place_of(0)

        def leave(sums):
            micro = jnp.maximum(table.leave, 0)
            _, pullback = jax.vjp(lambda rest: self._begin(rest, micro), self.rest)
            return self._add(sums, pullback(self._copy_from_stage(d_PBLD, stage))[0])

        sums = when(table.leave >= 0, leave, {name: carry["sums"][name] for name in self.rest}, self._micro_batch_scope)
        carry["sums"] = {**carry["sums"], **sums}

    def _move(self, y_PBLD: jax.Array, d_PBLD: jax.Array, table: Ticks) -> tuple[jax.Array, jax.Array]:
        """Sends the stages' outputs `y_PBLD` and input gradients `d_PBLD` to the stages that need them in the next
        tick. Returns both as they arrive."""
        stages, bends = self.whole.schedule.stages, self.whole.schedule.bends
        ahead = [(stage, stage + 1) for stage in range(stages - 1)]
        back = [(to, source) for source, to in ahead]

        def bent(x_1BLD: jax.Array, chunk: jax.Array, on: int) -> jax.Array:
            # In the V placement the work of one chunk continues on the next stage and the work of the other chunk on
            # the previous stage; at the turn it stays on its stage. At most one of the three arrives at a stage.
            goes_on, comes_back = jnp.where(chunk == on, x_1BLD, 0), jnp.where(chunk == 1 - on, x_1BLD, 0)
            stays = jnp.where(jax.lax.axis_index(STAGE) == stages - 1, goes_on, 0)
            return jax.lax.ppermute(goes_on, STAGE, ahead) + jax.lax.ppermute(comes_back, STAGE, back) + stays

        def move(y_1BLD, d_1BLD, forward, backward):
            if bends:
                return bent(y_1BLD, forward[0, 1], 0), bent(d_1BLD, backward[0, 1], 1)
            return (
                jax.lax.ppermute(y_1BLD, STAGE, [*ahead, (stages - 1, 0)]),
                jax.lax.ppermute(d_1BLD, STAGE, [*back, (0, stages - 1)]),
            )

        specs = (P(STAGE),) * 4
        moved = inside(self.layout, move, specs, P(STAGE))(y_PBLD, d_PBLD, table.forward, table.backward)
        y_PBLD, d_PBLD = map(self._shard_stream, moved)
        return y_PBLD, d_PBLD

    def result(self, carry: dict[str, Any]) -> tuple[Tally, Any]:
        """Returns the loss sums (tally) and the gradients of all micro-batches.

        `carry`: the loop's values after the last tick.
        """
        routing = self._routing(carry)
        sums = {name: tree for name, tree in carry["sums"].items() if jax.tree.leaves(tree)}  # frozen stacks have none
        return Tally(carry["loss"], self.micros.tokens.sum(), routing), self.whole.weights.totals(sums)

    def _routing(self, carry: dict[str, Any]) -> Load | None:
        """Returns the router statistics summed over micro-batches, such as the tokens of each expert, with a leading
        axis of layers in the model's order. None without experts."""
        for unit, load in zip(self.whole.units, carry["loads"]):
            if load is None:
                continue
            places = jnp.asarray(unit.rows.places)
            by_layer: Load = jax.tree.map(lambda leaf, places=places: jnp.take(leaf, places, axis=0), load)
            if carry["pool"] is None:
                return by_layer
            busy_AE, shares_AE = jnp.moveaxis(self._pooled(carry), 1, 0)
            balance = self.whole.experts * ((busy_AE * shares_AE).sum(-1) * self.micros.tokens).sum()
            return dataclasses.replace(by_layer, balance=jnp.full_like(by_layer.balance, balance))
        return None
