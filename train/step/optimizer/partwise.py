"""The update by parts: each layer of the stacked blocks, one after the other, then every other parameter separately.

Every optimizer of this project computes the update of a parameter only from that parameter, except for the clipping
norm. The result therefore equals one update of all parameters. Only one layer's state is on the device at a time:
state in host memory is fetched, updated and written back in place, layer by layer.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bytescope.model import Precision
from bytescope.model.runs import BLOCKS, DENSE
from bytescope.train.step.optimizer.host_offload import fetch, is_hosted, stow
from bytescope.train.step.optimizer.rounding import apply_update
from bytescope.train.step.optimizer.rules import ROW_BY_ROW, ClipState, OptimizerConfig, clip_scale, make_rule, squares

Leaves = list[jax.Array]
STACKS = (BLOCKS, DENSE)
PIECE = 2**28  # maximum bytes of a piece of a table, about the size of a layer's largest parameter
HOLE = optax.MaskedNode()  # optax ignores it, and it has no leaves


@dataclasses.dataclass(frozen=True)
class Part:
    """A group of parameters that the optimizer updates together: a stack of layers, one unstacked layer, or one other
    parameter.

    Fields:
      params: indices of the group's leaves in the list of all parameters.
      kept: indices of their optimizer state in the list of all leaves of the optimizer state.
      turns: number of equal pieces along the first axis that are updated one after the other to save memory. A piece is
        a layer of a stack, or a range of rows of a large table in host memory. 0 to update the whole group at once.
      stacked: True if the pieces are layers.
      group: name of the parts whose gradients are clipped by their common norm if clipping is by layer.
    """

    params: tuple[int, ...]
    kept: tuple[int, ...]
    turns: int
    stacked: bool
    group: str


def owner(path: tuple, known: set[tuple]) -> tuple | None:
    """Returns the path of the parameter to which a leaf of the optimizer state belongs. Returns None for leaves such as
    counters.

    Args:
      path: path of the leaf in the optimizer state, which contains the path of its parameter.
      known: paths of all parameters.
    """
    spans = (path[start:stop] for start in range(len(path)) for stop in range(len(path), start, -1))
    return next((span for span in spans if span in known), None)


def rows_of_table(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the number of equal ranges of rows into which a table, such as an embedding, is split, so that each range
    has at most PIECE bytes on a device.

    Returns 0 if the whole table has at most PIECE bytes or its rows are sharded.
    """
    if _rows_sharded(leaf.sharding):
        return 0
    size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    fewest = -(-size // PIECE)
    if fewest <= 1:
        return 0
    return next((n for n in range(fewest, leaf.shape[0] + 1) if leaf.shape[0] % n == 0), 0)


def _rows_sharded(sharding: jax.sharding.NamedSharding) -> bool:
    first = sharding.spec[0] if len(sharding.spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    return any(sharding.mesh.shape[axis] > 1 for axis in axes if axis)


def parts_of(params: Any, kept: Any, stacked: bool, in_rows: bool) -> tuple[list[Part], list[int]]:
    """Groups parameters into parts that are updated together. Returns the parts, and the indices of the optimizer-state
    leaves that belong to no parameter, such as counters.

    Args:
      params, kept: trees of the parameters and of the optimizer state, abstract or concrete.
      stacked: True if the layers are stacked, with the layer as the first axis of each leaf. A stack is then one part.
        Otherwise each layer is a part.
      in_rows: True if a large table in host memory may be updated some rows at a time.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves, kept_leaves, known = jax.tree.leaves(params), jax.tree.leaves(kept), set(paths)
    owners = [owner(path, known) for path, _ in jax.tree_util.tree_leaves_with_path(kept)]
    named: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        named.setdefault(jax.tree_util.keystr(_part_path(path, stacked)), []).append(place)
    parts = []
    for name, places in named.items():
        path = paths[places[0]]
        in_blocks = path[0].key in STACKS
        own = {paths[place] for place in places}
        state = [place for place, path in enumerate(owners) if path in own]
        hosted = any(map(is_hosted, [leaves[places[0]], *(kept_leaves[place] for place in state)]))
        turns = leaves[places[0]].shape[0] if in_blocks and stacked else 0
        if in_rows and hosted and not in_blocks:
            turns = rows_of_table(leaves[places[0]])
        parts.append(Part(tuple(places), tuple(state), turns, in_blocks and stacked, name if in_blocks else "rest"))
    return parts, [place for place, path in enumerate(owners) if path is None]


def _part_path(path: tuple, stacked: bool) -> tuple:
    if path[0].key not in STACKS:
        return path
    return path[:1] if stacked else path[:2]


@dataclasses.dataclass(frozen=True)
class PartwiseUpdate:
    """Computes the optimizer update one part (group of parameters) at a time, which needs less memory than all at once.
    The results and the state equal those of `optax.chain(mean_and_clip(max_norm), rule)`, wrapped in `optax.MultiSteps`
    if `every` is above 1.

    Fields:
      rule: the transformation after clipping.
      max_norm: maximum norm of the mean gradient, 0 for no clipping.
      by_layer: True to clip each layer by its own norm, and all other parameters by their common norm.
      every: number of calls whose gradients are summed before an update.
      stacked: True if the layers are stacked, with the layer as the first axis of each leaf.
      in_rows: True if the rule may update some rows of a table at a time.
      precision: determines how updated parameters are rounded. The result is bit-equal to an update of everything at
        once.
      params, opt_state: abstract trees.
    """

    rule: optax.GradientTransformation
    max_norm: float
    by_layer: bool
    every: int
    stacked: bool
    in_rows: bool
    precision: Precision
    params: Any
    opt_state: Any

    @cached_property
    def _trees(self) -> tuple[Any, Any]:
        inner = self.opt_state.inner_opt_state if self.every > 1 else self.opt_state
        return jax.tree.structure(self.params), jax.tree.structure(inner[1])

    @cached_property
    def parts(self) -> tuple[list[Part], list[int]]:
        """Pair (parts, indices of the optimizer-state leaves that belong to no parameter, such as counters)."""
        inner = self.opt_state.inner_opt_state if self.every > 1 else self.opt_state
        return parts_of(self.params, inner[1], self.stacked, self.in_rows)

    def __call__(self, params: Any, grads: Any, opt_state: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        """Returns the new params and opt_state. Each leaf stays in the memory (device or host) that it is in.

        Args:
          params, opt_state: the trees before the update.
          grads: gradients summed over `tokens` tokens.
          tokens: number of unmasked targets.
          key: random key for the rounding of updated parameters.
        """
        if self.every == 1:
            return self._update_if(params, grads, opt_state, tokens, key, None)
        summed = jax.tree.map(lambda kept, grad: kept + grad, opt_state.acc_grads, grads)
        last = opt_state.mini_step == self.every - 1
        params, inner = self._update_if(params, summed, opt_state.inner_opt_state, tokens, key, last)
        summed = self._wait_for(summed, jax.tree.leaves(params)[0])
        return params, optax.MultiStepsState(
            mini_step=(opt_state.mini_step + 1) % self.every,
            gradient_step=opt_state.gradient_step + last,
            inner_opt_state=inner,
            acc_grads=jax.tree.map(lambda grad: jnp.where(last, 0.0, grad), summed),
            skip_state=opt_state.skip_state,
        )

    def _update_if(
        self, params: Any, grads: Any, opt_state: Any, tokens: jax.Array, key: jax.Array, when: jax.Array | None
    ) -> tuple[Any, Any]:
        # If `when` is False nothing changes, because the loops over parts then have no iterations.
        p, g, s = jax.tree.leaves(params), jax.tree.leaves(grads), jax.tree.leaves(opt_state[1])
        scales, norm = self.scales(g, tokens)
        shared = self.shared(s)
        self.run(self.parts[0], p, s, g, shared, scales, key, when)
        return self.result(p, s, shared, norm, opt_state[0], when)

    def run(
        self,
        parts: Sequence[Part],
        p: Leaves,
        s: Leaves,
        g: Leaves,
        shared: Leaves,
        scales: dict[str, jax.Array],
        key: jax.Array,
        when: jax.Array | None = None,
    ) -> None:
        """Updates some parts: replaces their leaves in the lists `p` and `s` in place.

        Args:
          parts: the parts to update.
          p, s, g: leaves of all parameters, of the optimizer state, and of the gradients (in the order of `p`).
          shared: leaves of the optimizer state that belong to no parameter, such as counters.
          scales: `Part.group` -> factor from the summed gradient to the clipped mean gradient, as the method `scales`
            returns it.
          key: random key for the rounding of updated parameters.
          when: False to leave everything unchanged, because the gradients of this update are not yet complete.
        """
        after = None
        for part in parts:
            params, kept = self._wait_for(([p[i] for i in part.params], [s[i] for i in part.kept]), after)
            new = self._part(part, params, kept, [g[i] for i in part.params], shared, scales[part.group], key, when)
            for indices, leaves, values in ((part.params, p, new[0]), (part.kept, s, new[1])):
                for place, value in zip(indices, values):
                    leaves[place] = value
            after = new[0][0]

    def result(
        self, p: Leaves, s: Leaves, shared: Leaves, norm: jax.Array, clip: ClipState, when: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """Builds the trees (params, opt_state) after all parts were updated, and advances the counters of the
        optimizer.

        Args:
          p, s: leaves of the updated parameters and of the optimizer state.
          shared: leaves of the optimizer state that belong to no parameter, before the update.
          norm: global norm of the mean gradient, stored for the metrics.
          clip: the state of clipping before the update.
          when: False if this call updated nothing, so that counters and norm do not change.
        """
        for place, value in zip(self.parts[1], self.counted(shared)):
            s[place] = value if when is None else jnp.where(when, value, s[place])
        norm = norm if when is None else jnp.where(when, norm, clip.grad_norm)
        tree, kept_tree = self._trees
        return tree.unflatten(p), (ClipState(norm), kept_tree.unflatten(s))

    @staticmethod
    def _wait_for(own: Any, before: jax.Array | None) -> Any:
        # Without the barrier the compiler fetches the optimizer state of all parts at once.
        return own if before is None else jax.lax.optimization_barrier((own, before))[0]

    def scales(self, grads: Leaves, tokens: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns (`Part.group` -> factor of the gradients, global norm of the mean gradient), float32.

        A factor turns a gradient that is summed over tokens into the clipped mean gradient. For a stack that is clipped
        by layer it has shape [layers], one factor per layer.

        Args:
          grads: leaves of the gradients, summed over tokens.
          tokens: number of tokens in the sum.
        """
        inverse = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        with jax.named_scope("grad_norm"):
            if not self.by_layer and not any(map(is_hosted, grads)):  # bit-equal to `mean_and_clip`
                norm = optax.tree.norm([grad.astype(jnp.float32) for grad in grads]) * inverse
                return dict.fromkeys(
                    (part.group for part in self.parts[0]), clip_scale(norm, inverse, self.max_norm)
                ), norm
            total, groups = jnp.zeros((), jnp.float32), dict[str, Any]()
            for part in self.parts[0]:
                own = self._squares_of_part(part, [grads[i] for i in part.params])
                groups[part.group] = groups.get(part.group, 0.0) + own
                total = total + own.sum()
            norm = jnp.sqrt(total) * inverse
            if self.by_layer:
                scales = {
                    name: clip_scale(jnp.sqrt(own) * inverse, inverse, self.max_norm) for name, own in groups.items()
                }
            else:
                scales = dict.fromkeys(groups, clip_scale(norm, inverse, self.max_norm))
        return scales, norm

    def _squares_of_part(self, part: Part, grads: Leaves) -> jax.Array:
        # [N] for a stack of N layers, else a scalar.
        if not part.turns:
            return squares(fetch(grads))
        each = jax.lax.map(
            lambda i: squares(fetch([_slice_piece(part, leaf, i) for leaf in grads])), jnp.arange(part.turns)
        )
        return each if part.stacked else each.sum()

    def shared(self, kept: Leaves) -> Leaves:
        """Returns the leaves of the optimizer state that belong to no parameter, such as counters. `kept`: all leaves
        of the optimizer state."""
        return [kept[place] for place in self.parts[1]]

    def counted(self, shared: Leaves) -> Leaves:
        """Returns the values after the update of `shared`, the leaves of the optimizer state that belong to no
        parameter, such as counters."""
        return self._apply_rule(Part((), (), 0, False, ""), [], [], [], shared)[2]

    def _part(
        self,
        part: Part,
        params: Leaves,
        kept: Leaves,
        grads: Leaves,
        shared: Leaves,
        scale: jax.Array,
        key: jax.Array,
        when: jax.Array | None,
    ) -> tuple[Leaves, Leaves]:
        if not part.turns:
            if when is None:
                return self.turn(part, params, kept, grads, shared, scale, key)

            def once(_: jax.Array, own: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
                return self.turn(part, *own, grads, shared, scale, key)

            return jax.lax.fori_loop(0, when.astype(jnp.int32), once, (params, kept))

        def layer(index: jax.Array, stacks: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            own = scale[index] if scale.ndim else scale
            return self.layer(
                part, index, *stacks, [_slice_piece(part, leaf, index) for leaf in grads], shared, own, key
            )

        turns = part.turns if when is None else jnp.where(when, part.turns, 0)
        return jax.lax.fori_loop(0, turns, layer, (params, kept))

    def layer(
        self,
        part: Part,
        index: jax.Array,
        params: Leaves,
        kept: Leaves,
        grads: Leaves,
        shared: Leaves,
        scale: jax.Array,
        key: jax.Array,
    ) -> tuple[Leaves, Leaves]:
        """Updates one piece of a part: one layer of a stack, or a range of rows of a table. Returns the (parameters,
        optimizer state) of the whole part.

        Args:
          part: the part. Its `turns` must be above 0.
          index: number of the piece.
          params, kept: leaves of the whole part: parameters and optimizer state.
          grads: gradients of the piece only, [1, ...] for a layer.
          shared: leaves of the optimizer state that belong to no parameter, such as counters.
          scale: factor from the summed gradient to the clipped mean gradient.
          key: random key for the rounding of updated parameters.
        """
        old = [_slice_piece(part, leaf, index) for leaf in params], [_slice_piece(part, leaf, index) for leaf in kept]
        new_params, new_kept = self.turn(part, *old, grads, shared, scale, key, index)

        def updated(stacks: Leaves, pieces: Leaves) -> Leaves:
            return [
                jax.lax.dynamic_update_slice_in_dim(leaf, piece, index * piece.shape[0], 0)
                for leaf, piece in zip(stacks, pieces)
            ]

        return updated(params, new_params), updated(kept, new_kept)

    def turn(
        self,
        part: Part,
        params: Leaves,
        kept: Leaves,
        grads: Leaves,
        shared: Leaves,
        scale: jax.Array,
        key: jax.Array,
        index: jax.Array | int = 0,
    ) -> tuple[Leaves, Leaves]:
        """Computes the optimizer update of one part, or of one piece of it (a layer, or a range of rows). Returns the
        new (parameters, optimizer state). Each leaf stays in the memory (device or host) that it is in.

        Args:
          part: the part.
          params, kept: parameters and optimizer state of the part or piece.
          grads: their gradients, summed over tokens.
          shared: leaves of the optimizer state that belong to no parameter, such as counters.
          scale: factor from the summed gradient to the clipped mean gradient.
          key: random key for the rounding of updated parameters.
          index: number of the piece, which selects its random bits.
        """
        mean = [grad.astype(jnp.float32) * scale for grad in fetch(grads)]
        on_device = fetch(params)
        updates, new_kept, _ = self._apply_rule(part, on_device, fetch(kept), mean, shared)
        new = [
            apply_update(param, update, self.precision, key, number, index * param.shape[0] if param.ndim else 0)
            for number, param, update in zip(part.params, on_device, updates)
        ]
        return stow(new, params), stow(new_kept, kept)

    def _apply_rule(
        self, part: Part, params: Leaves, kept: Leaves, grads: Leaves, shared: Leaves
    ) -> tuple[Leaves, Leaves, Leaves]:
        """Applies the optimizer rule to one part on the device. Returns the updates of its parameters, its new
        optimizer state, and the new `shared` leaves.

        Args:
          part: the part, a group of parameters.
          params, kept: its parameters and optimizer state.
          grads: its mean gradients.
          shared: leaves of the optimizer state that belong to no parameter, such as counters.
        """
        tree, kept_tree = self._trees
        params, grads = (
            tree.unflatten(_place_among_holes(part.params, leaves, tree.num_leaves)) for leaves in (params, grads)
        )
        places = [*part.kept, *self.parts[1]]
        state = kept_tree.unflatten(_place_among_holes(places, [*kept, *shared], kept_tree.num_leaves))
        updates, state = self.rule.update(grads, state, params)
        new = dict(zip(sorted(places), jax.tree.leaves(state)))
        return (jax.tree.leaves(updates), [new[place] for place in part.kept], [new[place] for place in self.parts[1]])


def make_partwise(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    precision: Precision,
    every: int,
    state: Any,
    *,
    vocabulary: int,
    stacked: bool,
) -> PartwiseUpdate:
    """Returns the optimizer update that is computed one part (group of parameters) at a time. Training state in host
    memory, clipping by layer and a fused backward pass need it.

    Args:
      schedule: index of the update -> learning rate.
      precision: determines how updated parameters are rounded.
      every: number of calls whose gradients are summed before an update.
      state: the abstract TrainState.
      vocabulary: number of tokens in the vocabulary.
      stacked: True if the layers are stacked, with the layer as the first axis of each leaf.
    """
    return PartwiseUpdate(
        make_rule(config, schedule, vocabulary),
        config.clip_norm,
        config.clip == "layer",
        every,
        stacked,
        config.name in ROW_BY_ROW,
        precision,
        state.params,
        state.opt_state,
    )


def _slice_piece(part: Part, leaf: jax.Array, index: jax.Array) -> jax.Array:
    # A piece of a stack has shape [1, ...], so that optimizer rules treat it like a stack of one layer.
    size = leaf.shape[0] // part.turns
    return jax.lax.dynamic_slice_in_dim(leaf, index * size, size, 0)


def _place_among_holes(places: Sequence[int], leaves: Leaves, count: int) -> list[Any]:
    out: list[Any] = [HOLE] * count
    for place, leaf in zip(places, leaves):
        out[place] = leaf
    return out
