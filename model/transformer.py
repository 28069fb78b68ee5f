"""The decoder: embedding, N blocks scanned or unrolled, final norm, head."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.adapters import Lora
from bytescope.model.block import CUTS, Block
from bytescope.model.experts.expert_layer import Load, pool_balance
from bytescope.model.layers import dropout, fold, look_up, param, read, soft_cap
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.norm import Norm
from bytescope.model.placement import ONE_DEVICE, Placement
from bytescope.model.precision import Precision
from bytescope.model.quantized.quantized_formats import FORMATS
from bytescope.model.quantized.weight import quantized
from bytescope.model.remat.offload import LAYERS_LATER, finish_gradients, order_offloads, to_device
from bytescope.model.remat.policies import LayerPolicies, Segment
from bytescope.model.runs import BLOCKS, DENSE, LayerRun, layers_of, read_from_stack, runs_of, split_layers, stack_loads
from bytescope.model.segments import Packed, token_positions

KEEP_ALL = LayerPolicies()


class Transformer(nnx.Module):
    """Decoder-only transformer.

    Parameters are float arrays in `precision.param`, each with its logical axes in the variable's metadata (`axes`).
    With `config.scan` the blocks are one Block whose parameters are stacked along a leading `layers` axis. Models with
    experts and dense layers have two such stacks, `blocks` and `dense_blocks`. Without `config.scan` `blocks` is a list
    of Blocks. The initial values are the same in all these layouts.

    Args:
      config: the architecture.
      precision: dtypes by role.
      remat: the tensors that each layer saves for its backward pass.
      place: shards activations, parameters and gradients over the mesh.
      ahead: number of layers per iteration of the loop over layers. More than one lets the compiler overlap
        communication with computation. The larger of `ahead` and `config.unroll` is used.
      base: storage format of the blocks' weight matrices, a row of FORMATS. Weights in any format but bf16 are frozen.
      lora: adapters of the blocks; None for no adapters. Initial values of other parameters do not depend on it.
      pooled: True if the load-balance loss of the experts' router is computed over all layers together.
      order: stack name -> the layer index of each row of the stack, -1 for an unused row. None if all layers are in
        order.
      rngs: its `params` stream initializes the parameters. Build under `nnx.eval_shape` to describe the model without
        allocating memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        *,
        remat: LayerPolicies = KEEP_ALL,
        place: Placement = ONE_DEVICE,
        ahead: int = 1,
        base: str = "bf16",
        lora: Lora | None = None,
        pooled: bool = False,
        order: Mapping[str, Sequence[int]] | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.precision, self.remat, self.place = config, precision, remat, place
        self.ahead, self.lora, self.pooled = ahead, lora, pooled
        V, D, dtype = config.vocab_size, config.d_model, precision.param
        pad = config.padded_vocab - V
        self.w_token = param(rngs.params(), (V, D), ("vocab", "d_model"), dtype, std=config.init_std, pad=(pad, 0))
        if config.position == "learned":
            self.w_position = param(
                rngs.params(), (config.max_seq_len, D), ("position", "d_model"), dtype, std=config.init_std
            )
        if not config.tie_embeddings:
            self.w_head = param(
                rngs.params(), (D, V), ("d_model", "vocab"), dtype, std=config.init_std, pad=(0, pad), contracted=True
            )
        self.final_norm = Norm(config, precision, place)
        key_N = jax.random.split(rngs.params(), config.n_layers)
        if not config.scan:
            # A list of blocks; with `scan` it is one block whose parameters are stacked.
            self.blocks: Any = nnx.List(
                [self._init_block(key, config.has_experts(layer), base) for layer, key in enumerate(key_N)]
            )
            return
        layers = {BLOCKS: layers_of(config, BLOCKS), DENSE: layers_of(config, DENSE)} | dict(order or {})
        self.blocks = self._init_stack(key_N[jnp.asarray(layers[BLOCKS])], config.experts > 0, base)
        if layers[DENSE]:
            self.dense_blocks = self._init_stack(key_N[jnp.asarray(layers[DENSE])], False, base)

    def _init_block(self, key: jax.Array, routed: bool, base: str) -> Block:
        block = Block(
            self.config,
            self.precision,
            self.place,
            routed=routed,
            pooled=self.pooled,
            lora=self.lora,
            rngs=nnx.Rngs(params=key),
        )
        return quantized(block, base) if FORMATS[base] else block

    def _init_stack(self, key_N: jax.Array, routed: bool, base: str) -> Block:
        def block(key: jax.Array) -> Block:
            return self._init_block(key, routed, base)

        graph, _ = nnx.split(nnx.eval_shape(partial(block, key_N[0])))
        # Quantized layers are initialized one after the other, so that at most one layer is unquantized.
        each = jax.lax.map if FORMATS[base] else lambda one, keys: jax.vmap(one)(keys)
        return nnx.merge(graph, each(lambda key: nnx.split(block(key))[1], key_N))

    def hidden(
        self, tokens_BL: jax.Array, dropout_key_B: jax.Array | None = None, segments_BL: jax.Array | None = None
    ) -> jax.Array:
        """Returns the output of the last block after the final norm, [B, L, D] in the compute dtype.

        Args:
          tokens_BL: int32 token ids, L at most `max_seq_len`.
          dropout_key_B: one key per sequence, or None for no dropout.
          segments_BL: for packed rows, the number of each position's example, int32: 1, 2, ..., or 0 for padding.

        Raises:
          ValueError: the sequences are longer than `max_seq_len`.
        """
        return self.hidden_and_load(tokens_BL, dropout_key_B, segments_BL)[0]

    def hidden_and_load(
        self,
        tokens_BL: jax.Array,
        dropout_key_B: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        real_BL: jax.Array | None = None,
        learned_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, Load | None]:
        """Returns the output of the last block after the final norm, [B, L, D] in the compute dtype, and the router
        statistics of all layers.

        The router statistics are stacked over the layers that have experts; None for a model without experts.

        Args:
          tokens_BL: int32 token ids, L at most `max_seq_len`.
          dropout_key_B: one key per sequence, or None for no dropout (evaluation, generation).
          segments_BL: for packed rows, the number of each position's example, int32: 1, 2, ..., or 0 for padding at
            the end. Attention and positions then stay within examples. The ids are in the order of the row, also if
            ring attention stores the tokens in `zigzag` order.
          real_BL: bool, False for padding, which visits no expert and is not counted in the statistics. It is in the
            order of `tokens_BL`. None if there is no padding.
          learned_BL: bool, True for tokens whose target is not masked, in the order of `tokens_BL`. The router's
            entropy and z-loss are averaged over them. None to average over all tokens.

        Raises:
          ValueError: the sequences are longer than `max_seq_len`.
        """
        dropout_key_B = dropout_key_B if self.has_dropout else None
        packed = self.packed(segments_BL, real_BL, learned_BL)
        x_BLD = self.begin(tokens_BL, dropout_key_B, packed)
        with jax.named_scope("blocks"):
            x_BLD, load = self._run_blocks(x_BLD, dropout_key_B, packed)
        return self.finish(x_BLD), pool_balance(load)

    @property
    def has_dropout(self) -> bool:
        return self.config.dropout > 0 or (self.lora is not None and self.lora.dropout > 0)

    def packed(
        self, segments_BL: jax.Array | None, real_BL: jax.Array | None = None, learned_BL: jax.Array | None = None
    ) -> Packed | None:
        """Returns segment ids, positions and masks of the rows, an argument of `begin` and of the blocks. Returns None
        if every row is one full example.

        Args:
          segments_BL: for packed rows, the number of each position's example, int32: 1, 2, ..., or 0 for padding.
          real_BL: bool, False for padding; None if there is no padding.
          learned_BL: bool, True for tokens whose target is not masked; None if every token has a target.
        """
        return Packed.from_ids(segments_BL, real_BL, self.place, learned_BL)

    def begin(self, tokens_BL: jax.Array, dropout_key_B: jax.Array | None, packed: Packed | None) -> jax.Array:
        """Returns the input of the first block, the embedded tokens, [B, L, D] in the compute dtype.

        Args:
          tokens_BL: int32 token ids.
          dropout_key_B: one key per sequence, or None for no dropout.
          packed: result of `packed`, the segment ids and positions of the rows.

        Raises:
          ValueError: the sequences are longer than `max_seq_len`.
        """
        config = self.config
        if tokens_BL.shape[1] > config.max_seq_len:
            raise ValueError(
                f"{tokens_BL.shape[1]} positions are more than model.max_seq_len={config.max_seq_len}: "
                "shorten the sequences or raise model.max_seq_len"
            )
        with jax.named_scope("embed"):
            x_BLD = self._embed(tokens_BL, packed)
            x_BLD = tag(self.place(x_BLD, ("batch", "stream", None)), "embed")
            return dropout(x_BLD, fold(dropout_key_B, config.n_layers), config.dropout, "embed_mask")

    @property
    def runs(self) -> list[LayerRun]:
        """The layers as runs of consecutive layers with the same structure and remat policy, in order."""
        return runs_of(self.config, self.remat.segments(self.config.n_layers))

    def layers(self) -> list[tuple[LayerRun, Callable[..., tuple[jax.Array, Load | None]]]]:
        """Returns for each run (consecutive layers with the same structure) a function that computes one layer under
        the run's remat policy.

        The function is block(x_BLD, parameters of a layer, layer index, key_B, packed) -> (x_BLD, router statistics).
        `key_B`: dropout keys. `packed`: segment ids and positions.
        """
        return [(run, self._block(run, nnx.split(getattr(self, run.stack))[0])) for run in self.runs]

    def at_once(self, segment: Segment) -> int:
        """Returns the number of layers per iteration of the loop over `segment`, a range of layers with the same remat
        policy."""
        return min(max(self.config.unroll, self.ahead), (segment.stop - segment.start) // segment.groups)

    def finish(self, x_BLD: jax.Array) -> jax.Array:
        """Applies the final norm to the output of the last block, [B, L, D] in the compute dtype."""
        with jax.named_scope("final_norm"):
            x_BLD = self.place(self.final_norm(x_BLD), ("batch", "length", None))
            return tag(x_BLD, "final_norm")

    def _embed(self, tokens_BL: jax.Array, packed: Packed | None) -> jax.Array:
        # Under ZeRO-3 the table stays sharded along the width: each device looks up its columns for all sequences of
        # its fsdp group, then an all-to-all exchanges sequences and columns. If the table were gathered, every device
        # would hold all V x D elements of the table and of its gradient.
        tokens_BL = self.place(tokens_BL, ("table_batch", "table_length"))
        x_BLD = look_up(to_device(self.w_token[...]), tokens_BL, self.place)
        x_BLD = self.place(x_BLD, ("table_batch", "table_length", "table_width")).astype(self.precision.compute)
        # In two steps: XLA replicates an array whose columns move to two dimensions at once.
        x_BLD = self.place(x_BLD, ("table_batch", "stream", "row_width"))
        if self.config.embed_scale != 1.0:
            x_BLD = x_BLD * jnp.asarray(self.config.embed_scale, x_BLD.dtype)
        if self.config.position == "learned":
            return self.place(x_BLD, ("batch", "stream", None)) + self._position_rows(x_BLD, packed)
        return x_BLD

    def _position_rows(self, x_BLD: jax.Array, packed: Packed | None) -> jax.Array:
        w_position = read(self.w_position, x_BLD.dtype, self.place)
        positions = token_positions(packed, x_BLD.shape[1], self.place)
        if positions.ndim == 1:
            return jnp.take(w_position, positions, axis=0)[None]
        # Every example reads the first rows, so their gradients are summed in float32.
        rows_BLD = jnp.take(w_position.astype(jnp.float32), positions, axis=0).astype(x_BLD.dtype)
        return self.place(rows_BLD, ("batch", "stream", None))

    def _run_blocks(
        self, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None
    ) -> tuple[jax.Array, Load | None]:
        runs, loads = self.runs, []
        if not self.config.scan:
            for run in runs:
                x_BLD, load = self._unroll_run(run, x_BLD, key_B, packed)
                loads.append(load)
            return x_BLD, stack_loads(loads)
        stacks = {}
        for name in dict.fromkeys(run.stack for run in runs):
            graph, state_N = nnx.split(getattr(self, name))
            own = [run for run in runs if run.stack == name]
            whole_N = jax.lax.stop_gradient(state_N) if len(own) > 1 else None
            stacks[name] = graph, iter(split_layers(state_N, [run.size for run in own])), whole_N
        for run in runs:
            graph, states, whole_N = stacks[run.stack]
            # Without a checkpoint the parameters that are read from the stack would be saved for each layer.
            whole_N = whole_N if run.segment.policy.saveable else None
            x_BLD, load = self._scan_run(run, graph, next(states), x_BLD, key_B, packed, whole_N)
            loads.append(load)
        return x_BLD, stack_loads(loads)

    def _block(
        self,
        run: LayerRun,
        graph: nnx.GraphDef,
        whole_N: nnx.State | None = None,
    ) -> Callable[..., tuple[jax.Array, Load | None]]:
        """Returns a function that computes one layer of `run` under the run's remat policy: (x_BLD, state of the layer,
        layer index, key_B, packed) -> (x_BLD, router statistics). `key_B`: dropout keys. `packed`: segment ids and
        positions.

        `graph`: the structure of the block's module. `whole_N`: the stack of all layers; the function then reads the
        layer's parameters from it inside each checkpoint. None to use the state that is passed.
        """
        policy, cut = run.segment.policy, self.remat.granularity
        if policy.saveable is not None and self.config.attention == "cudnn" and "context" in policy.names:
            cut = "around_core"
        # The compiler removes a loop with one step, and then sees both passes together.
        looped = self.at_once(run.segment) < run.size // run.segment.groups
        wrap = partial(policy.wrap, scanned=self.config.scan and looped)

        def block(
            x_BLD: jax.Array, state: nnx.State, layer: jax.Array | int, key_B: jax.Array | None, packed: Packed | None
        ) -> tuple[jax.Array, Load | None]:
            def read_block() -> Block:
                own = state
                if whole_N is not None:
                    own = jax.tree.map(partial(read_from_stack, layer - run.offset), state, whole_N)
                return nnx.merge(graph, own).set(layer, regather=policy.saveable is None)

            return CUTS[cut](read_block, wrap, self.place.stream(x_BLD), fold(key_B, layer), packed)

        return block

    def _scan_run(
        self,
        run: LayerRun,
        graph: nnx.GraphDef,
        state_N: nnx.State,
        x_BLD: jax.Array,
        key_B: jax.Array | None,
        packed: Packed | None,
        whole_N: nnx.State | None,
    ) -> tuple[jax.Array, Load | None]:
        segment, block = run.segment, self._block(run, graph, whole_N)

        def layers(x_BLD: jax.Array, xs: tuple) -> tuple[jax.Array, Load | None]:
            return jax.lax.scan(
                lambda x_BLD, xs: block(x_BLD, *xs, key_B, packed), x_BLD, xs, unroll=self.at_once(segment)
            )

        xs = (state_N, jnp.arange(segment.start, segment.stop))
        if segment.groups == 1:
            return layers(x_BLD, xs)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(segment.groups, -1, *leaf.shape[1:]), xs)
        x_BLD, load = jax.lax.scan(segment.policy.wrap(layers, scanned=True), x_BLD, grouped)
        return x_BLD, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), load)

    def _unroll_run(
        self, run: LayerRun, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None
    ) -> tuple[jax.Array, Load | None]:
        segment = run.segment

        def layers(x_BLD: jax.Array, states: list[nnx.State], numbers: range) -> tuple[jax.Array, Load | None]:
            loads = []
            states = list(states)
            for at, layer in enumerate(numbers):
                later = at + LAYERS_LATER
                # The input of the first layer may have no gradient.
                if layer > 0 and later < len(states) and not segment.policy.offloads:
                    x_BLD, states[later] = finish_gradients(x_BLD, states[later])
                with jax.named_scope(f"layer_{layer}"):
                    x_BLD, load = block(x_BLD, states[at], layer, key_B, packed)
                    loads.append(jax.tree.map(lambda leaf: leaf[None], load))
            return x_BLD, stack_loads(loads)

        graph, _ = nnx.split(self.blocks[segment.start])
        block = self._block(run, graph)
        if segment.policy.offloads:
            block = order_offloads(block)
        numbers = range(segment.start, segment.stop)
        states = [nnx.split(self.blocks[layer])[1] for layer in numbers]
        if segment.groups == 1:
            return layers(x_BLD, states, numbers)
        size, loads = len(numbers) // segment.groups, []
        for first in range(0, len(numbers), size):
            group = partial(layers, numbers=numbers[first : first + size])
            x_BLD, load = segment.policy.wrap(group, scanned=False)(x_BLD, states[first : first + size])
            loads.append(load)
        return x_BLD, stack_loads(loads)

    def head(self) -> jax.Array:
        """Returns the matrix from hidden states to logits in `precision.param`: [D, padded V], or [padded V, D] if it
        is the token table (tied embeddings)."""
        return to_device((self.w_token if self.config.tie_embeddings else self.w_head)[...])

    def logits(self, x_BLD: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns logits [B, L, V] of hidden states. The matrix product is in the dtype of `x_BLD`. Logits are stored
        and capped (`logits_softcap`) in `dtype`."""
        head = "vd" if self.config.tie_embeddings else "dv"
        w_head = self.head().astype(x_BLD.dtype)
        logits_BLV = jnp.einsum(f"bld,{head}->blv", x_BLD, w_head, preferred_element_type=dtype)
        logits_BLV = soft_cap(logits_BLV, self.config.logits_softcap)
        return logits_BLV[..., : self.config.vocab_size]  # without the padding rows of the table

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Returns logits [B, L, V] in `precision.logits` of int32 tokens, without dropout. Raises ValueError if the
        sequences are longer than `max_seq_len`."""
        x_BLD = self.hidden(tokens_BL)
        with jax.named_scope("head"):
            return self.logits(x_BLD, self.precision.logits)


def logical_axes(model: Transformer) -> dict:
    """Returns a tree with the structure of the parameters and the logical axes of each. Axes of stacked blocks begin
    with `layers`."""

    def axes(variable: nnx.Variable) -> tuple[str, ...]:
        own = variable.get_metadata()["axes"]
        return ("layers",) * (variable.ndim - len(own)) + own

    return _of_parameters(model, axes)


def contracted(model: Transformer) -> dict:
    """Returns a tree of bools with the structure of the parameters: True if only matrix products in the compute dtype
    read the parameter."""
    return _of_parameters(model, lambda variable: variable.get_metadata()["contracted"])


def always_float32(model: Transformer) -> dict:
    """Returns a tree of bools with the structure of the parameters: True if the parameter is float32 in every
    precision preset."""
    return _of_parameters(model, lambda variable: variable.get_metadata()["always_float32"])


def _of_parameters(model: Transformer, read: Callable[[nnx.Variable], object]) -> dict:
    tree: dict = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = read(variable)
    return tree
