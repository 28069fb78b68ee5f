"""One transformer block: attention and then an MLP or experts, each normed first and added to the residual stream."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from bytescope.model.adapters import Lora, add_adapters
from bytescope.model.attention.grouped_query import Attention
from bytescope.model.attention.latent import LatentAttention
from bytescope.model.experts.expert_layer import Experts, Load
from bytescope.model.layers import dropout, fold
from bytescope.model.mlp import Mlp
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.norm import Norm
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision
from bytescope.model.remat.tile import count_tiles, tiled
from bytescope.model.segments import Packed

# model.attention_kind -> the module that computes queries, keys and values.
KINDS = {"gqa": Attention, "mla": LatentAttention}
Masks = tuple[jax.Array | None, jax.Array | None]  # `Packed.real_BL` and `Packed.learned_BL`, which only experts read


class Block(nnx.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)). With `config.post_norms` the output of each
    branch is normalized before it is added.

    Args:
      routed: True to use a mixture of experts instead of the MLP. Shared experts, which process every token, are then
        one MLP, the attribute `shared`.
      pooled: True to also record the router's mean score of each expert. A balance loss pooled over all layers needs
        it.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        place: Placement,
        *,
        routed: bool = False,
        pooled: bool = False,
        lora: Lora | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.precision, self.place = config, precision, place
        self.norm_attention = Norm(config, precision, place)
        self.attention = KINDS[config.attention_kind](config, precision, place, rngs=rngs)
        self.norm_mlp = Norm(config, precision, place)
        self.routed = routed
        if routed:
            self.experts = Experts(config, precision, place, pooled=pooled, rngs=rngs)
            if config.shared_experts:
                self.shared = Mlp(
                    config, precision, place, width=config.shared_experts * config.expert_width, rngs=rngs
                )
        else:
            self.mlp = Mlp(config, precision, place, rngs=rngs)
        if config.post_norms:
            self.post_norm_attention = Norm(config, precision, place)
            self.post_norm_mlp = Norm(config, precision, place)
        if lora:
            add_adapters(self.attention, lora, precision.param, rngs)
            for mlp in self._dense_mlps():
                add_adapters(mlp, lora, precision.param, rngs)

    def _inputs(
        self, x_BLD: jax.Array, packed: Packed | None, key_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        with jax.named_scope("attention"):
            return self.attention.inputs(tag(self.norm_attention(x_BLD), "attn_norm"), packed, fold(key_B, 0))

    def _core(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, key_B: jax.Array | None, packed: Packed | None
    ) -> jax.Array:
        with jax.named_scope("attention"):
            return self.attention.core(q_BLHK, k_BLGK, v_BLGK, fold(key_B, 0), packed)

    def _join(self, x_BLD: jax.Array, context_BLHK: jax.Array, key_B: jax.Array | None) -> jax.Array:
        with jax.named_scope("attention"):
            key_B = fold(key_B, 0)
            y_BLD = self.attention.output(context_BLHK, key_B)
            if self.config.post_norms:
                y_BLD = self.post_norm_attention(y_BLD)
            return x_BLD + dropout(y_BLD, fold(key_B, 1), self.config.dropout, "attn_out_mask")

    def _attend(self, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> jax.Array:
        return self._join(x_BLD, self._core(*self._inputs(x_BLD, packed, key_B), key_B, packed), key_B)

    def _feed(self, x_BLD: jax.Array, key_B: jax.Array | None, masks: Masks) -> tuple[jax.Array, Load | None]:
        x_BLD, load = tag(x_BLD, "mid"), None
        with jax.named_scope("mlp"):
            if self.routed:
                x_BLD, load = self._add_experts(x_BLD, fold(key_B, 1), masks)
            else:
                x_BLD = self._add_mlp(x_BLD, fold(key_B, 1))
        return self.place(x_BLD, ("batch", "stream", None)), load

    def _add_experts(self, x_BLD: jax.Array, key_B: jax.Array | None, masks: Masks) -> tuple[jax.Array, Load]:
        config = self.config
        normed_BLD = tag(self.norm_mlp(x_BLD), "mlp_norm")
        y_BLD, load = self.experts(normed_BLD, *masks)
        if config.shared_experts:
            with jax.named_scope("shared"):
                y_BLD = y_BLD + self.shared(normed_BLD, key_B)
        if config.post_norms:
            y_BLD = self.post_norm_mlp(y_BLD)
        return x_BLD + dropout(y_BLD, key_B, config.dropout, "mlp_out_mask"), load

    def _dense_mlps(self) -> list[Mlp]:
        # The MLPs that process every token.
        if not self.routed:
            return [self.mlp]
        return [self.shared] if self.config.shared_experts else []

    def _add_mlp(self, x_BLD: jax.Array, key_B: jax.Array | None) -> jax.Array:
        config = self.config
        tiles = count_tiles(x_BLD.shape[1], config.mlp_chunk, self.place.stream_parts)
        post = (self.post_norm_mlp,) if config.post_norms else ()
        if tiles == 1:
            y_BLD = self.mlp(tag(self.norm_mlp(x_BLD), "mlp_norm"), key_B)
            for norm in post:
                y_BLD = norm(y_BLD)
            return x_BLD + dropout(y_BLD, key_B, config.dropout, "mlp_out_mask")

        def run(norm: Norm, mlp: Mlp, *rest: Any) -> jax.Array:
            *post, x_BCD = rest
            y_BCD = mlp(norm(x_BCD))
            for norm in post:
                y_BCD = norm(y_BCD)
            return x_BCD + y_BCD if key_B is None else y_BCD

        y_BLD = tiled(run, (self.norm_mlp, self.mlp, *post), x_BLD, tiles, self.place, self.precision.compute)
        # The mask is generated for whole sequences, so that tiles do not change it.
        return y_BLD if key_B is None else x_BLD + dropout(y_BLD, key_B, config.dropout, "mlp_out_mask")

    def cached(
        self, x_BTD: jax.Array, packed: Packed, core: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    ) -> jax.Array:
        """Returns the block's output [B, T, D] for T new tokens, which also attend to cached earlier tokens.

        Args:
          x_BTD: the residual stream of the new tokens.
          packed: the positions of the tokens.
          core: (queries, keys, values or None) of the new tokens -> the context. It writes the keys and values to the
            KV cache and computes attention.
        """
        with jax.named_scope("attention"):
            context = core(*self.attention.cached_inputs(self.norm_attention(x_BTD), packed))
            context_BTHK = self.attention.from_cache(context)
        return self._feed(self._join(x_BTD, context_BTHK, None), None, _masks(packed))[0]

    def set(self, layer: jax.Array | int, regather: bool) -> "Block":
        """Sets this block's layer index (from 0) and `regather`. Returns the block.

        `regather`: True if the backward pass gathers the sharded parameters again. False if the forward pass saves them
        gathered.
        """
        self.attention.regather = regather
        for mlp in self._dense_mlps():
            mlp.regather = regather
        if self.routed:
            self.experts.regather = regather
        self.attention.layer = layer
        return self

    def __call__(
        self, x_BLD: jax.Array, key_B: jax.Array | None = None, packed: Packed | None = None
    ) -> tuple[jax.Array, Load | None]:
        """Returns the block's output [B, L, D] for the residual stream `x_BLD`, and the statistics of its expert router
        (None without experts).

        `key_B`: dropout keys, one per sequence; None for no dropout. `packed`: segment ids, positions and padding of
        packed rows; None if every row is one full text.
        """
        return self._feed(self._attend(x_BLD, key_B, packed), key_B, _masks(packed))


def _masks(packed: Packed | None) -> Masks:
    return (None, None) if packed is None else (packed.real_BL, packed.learned_BL)


Read = Callable[[], Block]  # returns the block; its parameters are read at the place of the call
Out = tuple[jax.Array, Load | None]


def _whole(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> Out:
    # The name is inside the checkpoint: outside it would be an input, which no policy can offload.
    return wrap(lambda x, key, packed: read()(tag(x, "block_in"), key, packed))(x_BLD, key_B, packed)


def _parts(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> Out:
    x_BLD = wrap(lambda x, key, packed: read()._attend(tag(x, "block_in"), key, packed))(x_BLD, key_B, packed)
    return wrap(lambda x, key, masks: read()._feed(x, key, masks))(x_BLD, key_B, _masks(packed))


def _around_core(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> Out:
    # A kernel whose residuals have no names (cuDNN's) stays outside the checkpoints. Otherwise it would run again even
    # if its output is saved.
    x_BLD = tag(x_BLD, "block_in")
    inputs: tuple[jax.Array, jax.Array, jax.Array] = wrap(lambda x, packed, key: read()._inputs(x, packed, key))(
        x_BLD, packed, key_B
    )
    context_BLHK = read()._core(*inputs, key_B, packed)

    def rest(x_BLD: jax.Array, context_BLHK: jax.Array, key_B: jax.Array | None, masks: Masks) -> Out:
        block = read()
        return block._feed(block._join(x_BLD, context_BLHK, key_B), key_B, masks)

    return wrap(rest)(x_BLD, context_BLHK, key_B, _masks(packed))


# How a block is cut into pieces; `wrap`, for example a checkpoint, is applied to each piece.
CUTS = {"block": _whole, "parts": _parts, "around_core": _around_core}
