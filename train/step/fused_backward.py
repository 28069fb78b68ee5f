"""Backward pass and update as one loop over layers: a layer's gradient is freed before the next one is computed.

As in LOMO (Lv et al. 2023, arXiv 2306.09782), but with any row of the table of optimizers. The forward loop saves the
residuals that the remat policy of each layer selects. The backward loop carries the stacks of parameters and optimizer
state. For each layer it reads the layer from the stacks, computes its gradient and writes the updated layer back.
Embedding, final norm and head are updated outside the loop. A layer's gradient is used before the gradients of earlier
layers are known, so it can only be clipped by its own norm, not by the global norm.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.frozen import merge_parameters
from bytescope.model.placement import row_major
from bytescope.model.segments import Packed
from bytescope.train.step.losses import in_ring_order
from bytescope.train.step.optimizer.host_offload import fetch
from bytescope.train.step.optimizer.partwise import Leaves, Part, PartwiseUpdate
from bytescope.train.step.optimizer.rules import clip_scale, squares
from bytescope.train.step.pullback import Pullback, row_of

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class FusedBackward:
    """Computes the gradient and the update of one global batch: the optimizer runs inside the backward pass.

    Fields:
      graph: the graph definition of the Transformer.
      cross_entropy: (x [B, L, D], w_head, targets [B, L]) -> float32 sum in nats, with B sequences, L tokens per
        sequence and width D.
      weights: `train.step.step_weights.Weights`, which prepares parameters for the step and gradients for the update.
      update: the optimizer update, which can be computed for one group of parameters at a time.
      dropout: True if the model uses dropout keys.
    """

    graph: nnx.GraphDef
    cross_entropy: Callable[..., jax.Array]
    weights: Any
    update: PartwiseUpdate
    dropout: bool

    def __call__(
        self,
        params: Any,
        opt_state: Any,
        batch: Batch,
        dropout_key_B: jax.Array,
        tokens: jax.Array,
        rounding: jax.Array,
        frozen: Any = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the loss (sum in nats), the new parameters and the new optimizer state.

        Args:
          params: the trained parameters.
          opt_state: the optimizer state.
          batch: name -> array of one micro-batch, int32 [B, L], with B sequences of L tokens.
          dropout_key_B: a random key per sequence.
          tokens: number of unmasked targets of the batch.
          rounding: the key for stochastic rounding.
          frozen: the parameters that are not trained, None if all are.
        """
        base = (frozen or {}).get("blocks")
        computed = self.weights.copy(params)
        key_B = dropout_key_B if self.dropout else None
        # Frozen layers are not part of the carry: the loops read them from `frozen`.
        rest = fetch({name: tree for name, tree in computed.items() if name != "blocks"})
        inputs_BL, targets_BL = in_ring_order(batch, self.weights.layout)

        def transformer(rest):
            return nnx.merge(self.graph, merge_parameters({**rest, "blocks": computed["blocks"]}, frozen))

        def end(rest, x_BLD):
            model = transformer(rest)
            x_BLD = model.finish(x_BLD)
            with jax.named_scope("loss"):
                return self.cross_entropy(x_BLD, model.head(), targets_BL)

        packed = transformer(rest).packed(batch.get("segments"))
        x_BLD, pull_begin = jax.vjp(lambda rest: transformer(rest).begin(inputs_BL, key_B, packed), rest)
        with jax.named_scope("blocks"):
            x_BLD, kept = self._forward(transformer(rest), computed["blocks"], base, x_BLD, key_B, packed)
        loss, pull_end = jax.vjp(end, rest, x_BLD)
        d_end, d_BLD = pull_end(jnp.ones_like(loss))
        # Under zero1 and zero2 the layers computed with copies, otherwise with the master parameters themselves.
        stack = None if computed is params else computed["blocks"]
        blocks, total, d_BLD = self._backward(params, opt_state, stack, base, kept, d_BLD, tokens, rounding)
        (d_begin,) = pull_begin(d_BLD)
        grads = self._cast_and_shard(jax.tree.map(jnp.add, d_end, d_begin))
        return loss, *self._update_outside_blocks(params, opt_state, blocks, grads, total, tokens, rounding)

    def _forward(
        self, model: Any, stack: Any, base: Any, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None
    ) -> tuple[jax.Array, list]:
        """Runs all blocks and saves what the backward pass needs.

        Returns the output of the last block and a list with a tuple for each range of layers with equal remat policy:
        (function that rebuilds a layer's pullback, i.e. its gradient function, from its residuals; residuals [layers,
        ...]; layer indices; number of layers per loop iteration).

        Args:
          stack: the stacked parameters of the layers.
          base: the stacked frozen parameters of the layers.
          x_BLD: the input of the first block.
          key_B: a dropout key per sequence, None without dropout.
          packed: segment ids and token positions of packed rows, which contain several examples; None if no row is
            packed or padded.
        """
        out = []
        for run, block in model.layers():
            segment, recipe = run.segment, Pullback()

            def layer(x_BLD, number, block=block, recipe=recipe):
                own = jax.tree.map(row_major, fetch(row_of(stack, number)))
                fixed = jax.tree.map(row_major, row_of(base, number))
                y_BLD, pullback = jax.vjp(
                    lambda x_BLD, own: block(x_BLD, merge_parameters(own, fixed), number, key_B, packed)[0], x_BLD, own
                )
                return y_BLD, recipe.split(pullback, jax.tree.leaves((own, fixed)), jax.tree.leaves(packed))

            numbers = jnp.arange(segment.start, segment.stop)
            at_once = model.at_once(segment)
            x_BLD, kept = jax.lax.scan(layer, x_BLD, numbers, unroll=at_once)
            out.append((partial(recipe.join, shared=jax.tree.leaves(packed)), kept, numbers, at_once))
        return x_BLD, out

    def _backward(
        self,
        params: Any,
        opt_state: Any,
        copies: Any,
        base: Any,
        segments: list,
        d_BLD: jax.Array,
        tokens: jax.Array,
        rounding: jax.Array,
    ) -> tuple[tuple[Leaves, Leaves], jax.Array, jax.Array]:
        """Runs the backward pass through all blocks and updates each layer in it. Returns the updated stacks of layers
        as lists of leaves (parameters, optimizer state), the sum of squares of the blocks' gradients, and the gradient
        of the blocks' input.

        Args:
          copies: the stacked layers in the compute dtype, from which each layer is read; None to read `params`.
          base: the stacked frozen parameters of the layers.
          segments: the list that `_forward` returns, with the residuals of each range of layers.
          d_BLD: gradient of the last block's output.
          tokens: number of unmasked targets of the batch.
          rounding: the key for stochastic rounding.
        """
        # XLA's GPU compiler transposes arrays that are gathered or scattered over their last dimension. Without
        # `row_major` it transposes the stacks, including the optimizer's, and allocates copies of all layers.
        part = self._stack()
        p, s = jax.tree.leaves(params), jax.tree.leaves(opt_state[1])
        shared, inverse = self.update.shared(s), self._inverse(tokens)

        def layer(carry, xs, join):
            d_BLD, stacks, total = carry
            kept, number = xs
            source = stacks[0] if copies is None else jax.tree.leaves(copies)
            own = [row_major(fetch(row_of(leaf, number))) for leaf in (*source, *jax.tree.leaves(base))]
            d_BLD, d_own = join(kept, own)(d_BLD)
            grads = self._cast_and_shard({"blocks": jax.tree.map(lambda grad: grad[None], d_own)})
            grads = jax.tree.leaves(grads)
            if self.weights.layout.mesh.size > 1:  # on one device XLA would then transpose the products' activations
                grads = [row_major(grad) for grad in grads]
            with jax.named_scope("optimizer"):
                square = squares(grads)
                stacks = self.update.layer(
                    part, number, *stacks, grads, shared, self._clip_factor(square, inverse), rounding
                )
            return (d_BLD, stacks, total + square), None

        carry = (d_BLD, ([p[i] for i in part.params], [s[i] for i in part.kept]), jnp.zeros((), jnp.float32))
        for join, kept, numbers, at_once in reversed(segments):
            carry, _ = jax.lax.scan(
                partial(layer, join=join),
                carry,
                (kept, numbers),
                reverse=True,
                unroll=at_once,
            )
        return carry[1], carry[2], carry[0]

    def _cast_and_shard(self, grads: Any) -> Any:
        axes = {name: self.weights.axes[name] for name in grads}
        return dataclasses.replace(self.weights, axes=axes).gradients(grads)

    def _update_outside_blocks(
        self,
        params: Any,
        opt_state: Any,
        blocks: tuple[Leaves, Leaves],
        grads: Any,
        total: jax.Array,
        tokens: jax.Array,
        rounding: jax.Array,
    ) -> tuple[Any, Any]:
        """Updates all parameters outside the blocks. Returns the new parameters and optimizer state of the whole model.

        Args:
          blocks: the updated leaves of the blocks, (parameters, optimizer state).
          grads: gradients of the parameters outside the blocks, summed over tokens.
          total: the sum of squares of the blocks' gradients.
          tokens: the number of unmasked targets of the batch.
          rounding: the key for stochastic rounding.
        """
        update, part = self.update, self._stack()
        p, s = jax.tree.leaves(params), jax.tree.leaves(opt_state[1])
        shared, inverse = update.shared(s), self._inverse(tokens)
        for places, leaves, values in ((part.params, p, blocks[0]), (part.kept, s, blocks[1])):
            for place, value in zip(places, values):
                leaves[place] = value
        with jax.named_scope("optimizer"):
            square = squares(grads)
            g = jax.tree.leaves({**grads, "blocks": params["blocks"]})  # aligned with the leaves of the parameters
            rest = [own for own in update.parts[0] if own is not part]
            scales = dict.fromkeys([own.group for own in rest], self._clip_factor(square, inverse))
            update.run(rest, p, s, g, shared, scales, rounding)
            return update.result(p, s, shared, jnp.sqrt(total + square) * inverse, opt_state[0])

    def _stack(self) -> Part:
        return next(part for part in self.update.parts[0] if part.stacked)

    def _inverse(self, tokens: jax.Array) -> jax.Array:
        return 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)

    def _clip_factor(self, square: jax.Array, inverse: jax.Array) -> jax.Array:
        """Returns the factor that turns a gradient summed over tokens into the clipped mean gradient. `square`: sum of
        squares of the summed gradient. `inverse`: 1 / number of tokens."""
        return clip_scale(jnp.sqrt(square) * inverse, inverse, self.update.max_norm)
