"""The work of one stage in a tick: runs layers of one chunk forward and saves residuals, or backward and sums
gradients.

Both run inside a `jax.shard_map` over the stages; the compiler shards over the other axes of the mesh. For a stage
without work in a tick the loops have no iterations, because a conditional would copy the sums of gradients.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bytescope.model import Transformer
from bytescope.model.experts.expert_layer import Load, choice_shares
from bytescope.model.frozen import merge_parameters
from bytescope.model.runs import BLOCKS
from bytescope.model.segments import Packed
from bytescope.train.parallel.layout import Layout
from bytescope.train.pipeline.schedule import Schedule
from bytescope.train.pipeline.stages import StackRows
from bytescope.train.step.pullback import Pullback, row_of
from bytescope.train.step.routing import weighted_load
from bytescope.train.step.step_weights import Weights

Leaves = list[jax.Array]
STAGE = "stage"


@dataclasses.dataclass(frozen=True)
class Micro:
    """The inputs of the blocks for a micro-batch of B sequences, except the activations.

    Fields:
      keys: raw data of the dropout keys [B, ...], None without dropout.
      packed: segment ids and padding of the rows; None if no row has several examples or padding.
      tokens: number of unmasked targets, int32.
      coefficients: the weights of a layer's two auxiliary router losses (balance loss, z loss), float32 [2], zeros
        without experts.
    """

    keys: jax.Array | None
    packed: Packed | None
    tokens: jax.Array
    coefficients: jax.Array

    @property
    def key_B(self) -> jax.Array | None:
        """The random keys of dropout, one jax key for each sequence; None without dropout."""
        return None if self.keys is None else jax.random.wrap_key_data(self.keys)


jax.tree_util.register_dataclass(Micro, ["keys", "packed", "tokens", "coefficients"], [])


@dataclasses.dataclass(frozen=True)
class StackUnit:
    """The layers of a chunk that belong to one parameter stack. A chunk is a group of layers that a pipeline stage runs
    without interruption. A parameter stack is the tree of the parameters of layers with equal structure, [layers, ...].

    Fields:
      rows: which layers of the stack each stage stores.
      block: runs one layer under the remat policy: (x_BLD, its parameters, layer index, dropout keys [B], segment ids
        and padding) -> (x_BLD, router statistics).
      weights: the record that casts and shards the gradients of these parameters.
      routed: True if the layers have experts.
      turns: the name of the `jax.named_scope` around the loops over a chunk's layers. It contains their iteration
        counts (`turns_scope`).
      recipe, dtypes: which residuals are saved, and their dtypes. Both are filled when the forward pass is traced.
    """

    rows: StackRows
    block: Callable[..., tuple[jax.Array, Load | None]]
    weights: Weights
    routed: bool
    turns: str
    recipe: Pullback = dataclasses.field(default_factory=Pullback)
    dtypes: list = dataclasses.field(default_factory=list)

    def _run_with_pullback(self, x_BLD: jax.Array, own: Any, fixed: Any, number: jax.Array, micro: Micro) -> tuple:
        """Runs one layer and returns ((y_BLD, losses), its pullback from `jax.vjp`, router statistics).

        `losses` is float32 [2], the balance loss and the z loss. If the balance loss is computed over all layers
        together, it is [E + 1], the mean router scores of the E experts and the z loss.

        Args:
          own, fixed: trained and frozen parameters of the layer.
          number: index of the layer.
          micro: the other inputs of the micro-batch, such as dropout keys.
        """

        def run(x_BLD, own):
            y_BLD, load = self.block(x_BLD, merge_parameters(own, fixed), number, micro.key_B, micro.packed)
            if load is None:
                losses = jnp.zeros(2)
            elif load.shares is None:
                losses = jnp.stack([load.balance, load.router_z])
            else:
                losses = jnp.append(load.shares, load.router_z)
            return (y_BLD, losses), load

        return jax.vjp(run, x_BLD, own, has_aux=True)

    def layer(
        self, x_BLD: jax.Array, own: Any, fixed: Any, number: jax.Array, micro: Micro
    ) -> tuple[jax.Array, Load | None, Leaves]:
        """Runs one layer. Returns its output [B, L, D], its router statistics (None without experts), and the residuals
        to save.

        Args:
          own, fixed: trained and frozen parameters of the layer.
          number: index of the layer.
          micro: the other inputs of the micro-batch, such as dropout keys.
        """
        (y_BLD, _), pullback, load = self._run_with_pullback(x_BLD, own, fixed, number, micro)
        kept = self.recipe.split(pullback, jax.tree.leaves((own, fixed)), _leaves_known_to_backward(number, micro))
        self.dtypes[:] = [leaf.dtype for leaf in kept]
        return y_BLD, load, [_raw_key_data(leaf) for leaf in kept]

    def forward(
        self,
        unit: jax.Array,
        count: jax.Array,
        first: jax.Array,
        x_BLD: jax.Array,
        stash: Leaves,
        own: Any,
        fixed: Any,
        load: Load | None,
        pool: jax.Array | None,
        micro: Micro,
    ) -> tuple[jax.Array, Leaves, Load | None, jax.Array | None]:
        """Runs the forward pass of a chunk of layers. Returns its output, and `stash`, `load` and `pool` with the
        values of its layers added.

        Args:
          unit: int32 [3], the indices of the micro-batch, the chunk, and the slot (place in `stash`).
          count, first: for each chunk its number of layers and the index of its first layer.
          own, fixed: trained and frozen parameters, [rows of the stage, ...].
          stash: the saved residuals, [slots, rows of a chunk, ...].
          load: sums of the router statistics, [rows of the stage, ...]; None without experts.
          pool: for each of E experts, the fraction of the router's choices that went to it and its mean score, summed
            over layers, float32 [A, 2, E] for A micro-batches; None unless the balance loss is computed over all layers
            together.
          micro: the other inputs of the micro-batch, such as dropout keys.
        """
        number, chunk, slot = unit

        def turn(index, carry):
            x_BLD, stash, load, pool = carry
            row = chunk * self.rows.rows + index
            x_BLD, layer_load, kept = self.layer(x_BLD, *row_of((own, fixed), row), first[chunk] + index, micro)
            stash = [_write_at_leading_indices(leaf, new, (slot, index)) for leaf, new in zip(stash, kept, strict=True)]
            if layer_load is not None:
                load = jax.tree.map(
                    lambda sums, new: sums.at[row].add(new), load, weighted_load(layer_load, micro.tokens)
                )
                if layer_load.shares is not None:
                    pool = pool.at[number].add(jnp.stack([choice_shares(layer_load.counts), layer_load.shares]))
            return x_BLD, stash, load, pool

        with jax.named_scope(self.rows.stack), jax.named_scope(self.turns):
            return jax.lax.fori_loop(0, count[chunk], turn, (x_BLD, stash, load, pool))

    def run(
        self, chunk: jax.Array, count: jax.Array, first: jax.Array, x_BLD: jax.Array, own: Any, fixed: Any, micro: Micro
    ) -> jax.Array:
        """Returns the output of the first `count` layers of a chunk, [B, L, D], without saving residuals.

        Args:
          chunk: index of the chunk on the stage.
          count: number of layers to run; 0 on a stage that does not have the chunk.
          first: for each chunk the index of its first layer.
          own, fixed: trained and frozen parameters, [rows of the stage, ...].
          micro: the other inputs of the micro-batch, such as dropout keys.
        """

        def turn(index, x_BLD):
            weights = merge_parameters(*row_of((own, fixed), chunk * self.rows.rows + index))
            return self.block(x_BLD, weights, first[chunk] + index, None, micro.packed)[0]

        return jax.lax.fori_loop(0, count, turn, x_BLD)

    def backward(
        self,
        unit: jax.Array,
        count: jax.Array,
        first: jax.Array,
        d_BLD: jax.Array,
        stash: Leaves,
        own: Any,
        fixed: Any,
        sums: Any,
        busy_AE: jax.Array | None,
        micro: Micro,
    ) -> tuple[jax.Array, Any]:
        """Runs the backward pass of a chunk. Returns the gradient of its input, and `sums` with the gradients of its
        layers added.

        Args:
          unit: int32 [3], the indices of the micro-batch, the chunk, and the slot (place in `stash`).
          count, first: for each chunk its number of layers and the index of its first layer.
          d_BLD: the gradient of the chunk's output.
          stash: the saved residuals, [slots, rows of a chunk, ...].
          own, fixed: trained and frozen parameters, [rows of the stage, ...].
          sums: sums of the gradients, [rows of the stage, ...].
          busy_AE: the fraction (0 to 1) of the choices in a micro-batch that went to each expert, averaged over all
            layers; None unless the balance loss is computed over all layers together.
          micro: the other inputs of the micro-batch, such as dropout keys.
        """
        number, chunk, slot = unit
        d_losses = micro.coefficients
        if self.routed and busy_AE is not None:
            # The gradient of E sum(busy * shares) with respect to a layer's shares; choices have no gradient.
            d_shares = micro.coefficients[0] * busy_AE.shape[1] * busy_AE[number]
            d_losses = jnp.append(d_shares, micro.coefficients[1])

        def turn(index, carry):
            d_BLD, sums = carry
            index = count[chunk] - 1 - index
            row = chunk * self.rows.rows + index
            weights = row_of((own, fixed), row)
            kept = [_typed(_read(leaf, (slot, index)), dtype) for leaf, dtype in zip(stash, self.dtypes, strict=True)]
            pullback = self.recipe.join(
                kept, jax.tree.leaves(weights), _leaves_known_to_backward(first[chunk] + index, micro)
            )
            d_BLD, d_own = pullback((d_BLD, d_losses))
            d_own = self.weights.gradients(jax.tree.map(lambda grad: grad[None], d_own))

            def add(total, grad):
                return _write_at_leading_indices(total, _read(total, (row,)) + grad[0].astype(total.dtype), (row,))

            return d_BLD, jax.tree.map(add, sums, d_own)

        with jax.named_scope(self.rows.stack), jax.named_scope(self.turns):
            return jax.lax.fori_loop(0, count[chunk], turn, (d_BLD, sums))


def _leaves_known_to_backward(number: jax.Array, micro: Micro) -> Leaves:
    # The backward pass has these arrays anyway, so they are not saved as residuals.
    return jax.tree.leaves((number, micro.packed, micro.tokens, micro.coefficients))


def _write_at_leading_indices(leaf: jax.Array, new: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    zeros = [0] * new.ndim
    return jax.lax.dynamic_update_slice(leaf, new[(None,) * len(at)], (*at, *zeros))


def _read(leaf: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    shape = leaf.shape[len(at) :]
    return jax.lax.dynamic_slice(leaf, (*at, *[0] * len(shape)), (1,) * len(at) + shape).reshape(shape)


def _raw_key_data(leaf: jax.Array) -> jax.Array:
    # Saved residuals are initialized with zeros, which random keys cannot be.
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _typed(leaf: jax.Array, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(leaf) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else leaf


def turns_scope(max_turns: int, total: int, times: int) -> str:
    """Returns the name of the `jax.named_scope` that records how often a loop runs, such as `turns_8_mean_64_56`.

    The memory report reads the numbers from the name, because XLA does not know the iteration counts
    (memory/hlo/loops.py).

    Args:
      max_turns: maximum number of iterations of one run of the loop.
      total: iterations of all runs together.
      times: number of runs.
    """
    return f"turns_{max_turns}_mean_{total}_{times}"


def stack_units(
    model: Transformer, stacks: Sequence[StackRows], weights: Weights, schedule: Schedule
) -> list[StackUnit]:
    """Returns one `StackUnit` for each parameter stack, in the order in which a chunk of layers runs the stacks.

    Args:
      model: the abstract model, with the layout that is used inside the stages (`Layout.staged`).
      stacks: for each stack, which of its layers each stage stores.
      weights: the record that casts and shards gradients, with the same layout as the model.
      schedule: which micro-batch each stage computes at which time.
    """
    blocks = {run.stack: block for run, block in model.layers()}
    units, runs = [], schedule.ticks * schedule.stages
    for rows in stacks:
        routed = bool(model.config.experts) and rows.stack == BLOCKS
        own = dataclasses.replace(weights, axes=weights.axes.get(rows.stack, {}))
        turns = turns_scope(int(rows.count.max()), schedule.micro_batches * int(rows.count.sum()), runs)
        units.append(StackUnit(rows, blocks[rows.stack], own, routed, turns))
    return units


def inside(layout: Layout, function: Callable, inputs: Any, outputs: Any) -> Callable:
    """Wraps `function` in a `jax.shard_map` over the pipeline stages. The compiler shards over the other mesh axes.

    `inputs`, `outputs`: PartitionSpecs of the arguments and of the result.
    """
    return jax.shard_map(
        function, mesh=layout.mesh, in_specs=inputs, out_specs=outputs, axis_names={STAGE}, check_vma=False
    )


def broadcast_from(layout: Layout, x: jax.Array, mine: jax.Array) -> jax.Array:
    """Sends `x` from the stage on which `mine` is true to all stages, and returns it there. To be called inside a
    `jax.shard_map` over the stages."""
    x = jnp.where(mine, x, 0)
    # XLA's CPU compiler (0.10 to 0.12) aborts on 16-bit sums at this point. With one nonzero summand float32 is
    # as exact.
    in_float32 = layout.mesh.devices.flat[0].platform == "cpu" and x.dtype.itemsize < 4
    return jax.lax.psum(x.astype(jnp.float32) if in_float32 else x, STAGE).astype(x.dtype)


def when(condition: jax.Array, function: Callable[[Any], Any], carried: Any, turns: str) -> Any:
    """Returns `function(carried)` if `condition` is true, else `carried`.

    It is a loop with one or no iteration, which updates `carried` in place. A `jax.lax.cond` would copy it.

    `turns`: the name of the loop's `jax.named_scope`, which tells the memory report how often the condition is true
    (`turns_scope`).
    """
    with jax.named_scope(turns):
        return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carried: function(carried), carried)
