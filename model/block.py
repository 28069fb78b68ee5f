"""One transformer block: attention and MLP, each behind a norm and added to the residual stream."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.adapters import Lora, adapted, add_adapters
from bytescope.model.attention.kernels import KERNELS, scoring_of
from bytescope.model.attention.ring import ring_attention
from bytescope.model.config import ModelConfig
from bytescope.model.layers import ACTIVATIONS, MLPS, dropout, enter, fold, leave, param, read
from bytescope.model.names import tag
from bytescope.model.norm import Norm
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision
from bytescope.model.remat.tile import count_tiles, tiled
from bytescope.model.rotary import rope_frequencies, rotate, rotate_by_layer
from bytescope.model.segments import Packed


class Attention(nnx.Module):
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245); the kernel is a row of KERNELS."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *, rngs: nnx.Rngs):
        self.config, self.precision, self.place, self.again, self.lora = config, precision, place, False, None
        self.layer = None  # its number, from 0; see Block.set
        D, H, G, K = config.d_model, config.n_heads, config.n_kv_heads, config.d_head
        std, dtype = config.init_std, precision.param
        self.w_q = param(rngs.params(), (D, H, K), ("d_model", "heads", "d_head"), dtype, std=std, contracted=True)
        self.w_k = param(rngs.params(), (D, G, K), ("d_model", "kv_heads", "d_head"), dtype, std=std, contracted=True)
        self.w_v = param(rngs.params(), (D, G, K), ("d_model", "kv_heads", "d_head"), dtype, std=std, contracted=True)
        # Branches that add to the residual stream start smaller with depth, as in GPT-2.
        self.w_o = param(rngs.params(), (H, K, D), ("heads", "d_head", "d_model"), dtype,
                         std=std / math.sqrt(2 * config.n_layers), contracted=True)
        if config.bias or config.qkv_bias:
            self.b_q = param(None, (H, K), ("heads", "d_head"), dtype)
            self.b_k = param(None, (G, K), ("kv_heads", "d_head"), dtype)
            self.b_v = param(None, (G, K), ("kv_heads", "d_head"), dtype)
        if config.bias:
            self.b_o = param(None, (D,), ("d_model",), dtype)
        if config.qk_norm:
            self.norm_q = Norm(config, precision, place, "d_head", ("batch", "length", "heads", None))
            self.norm_k = Norm(config, precision, place, "d_head", ("batch", "length", "kv_heads", None))

    def project(self, x_BLD: jax.Array, key_B: jax.Array | None) -> list[jax.Array]:
        """Queries [B, L, H, K], keys and values [B, L, G, K], in the compute dtype and before rotation."""
        weights = {"q": self.w_q, "k": self.w_k, "v": self.w_v}
        out = []
        outs = adapted(self, "bld,dhk->blhk", x_BLD, self._enter(x_BLD, weights), tuple(weights), fold(key_B, 2),
                       "attn_norm_mask")
        for which, y_BLHK in zip(weights, outs):
            heads = "heads" if which == "q" else "kv_heads"
            with jax.named_scope(which):
                if self.config.bias or self.config.qkv_bias:
                    y_BLHK = y_BLHK + read(getattr(self, f"b_{which}"), y_BLHK.dtype, self.place)[None, None]
                out.append(tag(self.place(y_BLHK, ("batch", "length", heads, None)), which))
        return out

    def _enter(self, x_BLD: jax.Array, weights: dict[str, nnx.Param]) -> tuple[jax.Array, ...]:
        return enter("bld,dhk->blhk", x_BLD, weights, self.place, again=self.again,
                     matmul=self.precision.matmul, name="attn_norm")

    def inputs(self, x_BLD: jax.Array, packed: Packed | None,
               key_B: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values as the attention core reads them: as `project` has them, normed and rotated."""
        config = self.config
        with jax.named_scope("qkv"):
            q_BLHK, k_BLGK, v_BLGK = self.project(x_BLD, key_B)
        if config.qk_norm:
            with jax.named_scope("qk_norm"):
                q_BLHK, k_BLGK = self.norm_q(q_BLHK), self.norm_k(k_BLGK)
        if config.position == "rope":
            with jax.named_scope("rope"):
                turn, frequency = self._rotation()
                positions = self.place.positions(x_BLD.shape[1]) if packed is None else packed.positions_BL
                q_BLHK = turn(q_BLHK, positions, frequency)
                k_BLGK = turn(k_BLGK, positions, frequency)
        return tag(q_BLHK, "q_rot"), tag(k_BLGK, "k_rot"), v_BLGK

    def _rotation(self) -> tuple[Callable[..., jax.Array], jax.Array]:
        """How this layer rotates, and the frequencies."""
        config = self.config
        frequency = rope_frequencies(config.d_head, config.rope_theta, config.rope_scaling)
        if not config.rope_local_theta:
            return rotate, frequency
        local = rope_frequencies(config.d_head, config.rope_local_theta, ())
        return rotate_by_layer, jnp.where(config.is_global(self.layer), frequency, local)

    def core(self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, key_B: jax.Array | None,
             packed: Packed | None) -> jax.Array:
        """The kernel's context [B, L, H, K]."""
        config, segments_BL = self.config, packed and packed.ids_BL
        with jax.named_scope("core"):
            # The kernel itself tags its result `context`: one with its own gradient must do so inside.
            if ring := self.place.ring:
                context_BLHK = ring_attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, ring=ring,
                                              chunk=config.attention_chunk, scoring=scoring_of(config))
            else:
                context_BLHK = KERNELS[config.attention].run(
                    q_BLHK, k_BLGK, v_BLGK, segments_BL, config=config, key_B=fold(key_B, 0), place=self.place)
            return self.place(context_BLHK, ("batch", "length", "heads", None))

    def output(self, context_BLHK: jax.Array, key_B: jax.Array | None) -> jax.Array:
        """The output projection, [B, L, D]; `key_B`: dropout keys, of its adapter alone."""
        config, dtype = self.config, self.precision.compute
        with jax.named_scope("out"):
            # The gradient of every kernel but the naive one reads its own result, so that is kept wide already.
            name = "context" if config.attention == "naive" and not self.place.ring else ""
            y_BLD = leave("blhk,hkd->bld", context_BLHK, self.w_o, self.place, again=self.again,
                          matmul=self.precision.matmul, name=name, out="attn_out")
            y_BLD, = adapted(self, "blhk,hkd->bld", context_BLHK, (y_BLD,), ("o",), fold(key_B, 3), "context_mask")
            if config.bias:
                y_BLD = y_BLD + read(self.b_o, dtype, self.place)[None, None]
            return tag(self.place(y_BLD, ("batch", "stream", None)), "attn_out")


class Mlp(nnx.Module):
    """Feed-forward layer, gated or not, a row of MLPS by `config.mlp`: [B, L, D] to [B, L, D]."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *, rngs: nnx.Rngs):
        self.config, self.precision, self.place, self.again, self.lora = config, precision, place, False, None
        self.gated, self.activation = MLPS[config.mlp]
        D, F, std, dtype = config.d_model, config.d_ff, config.init_std, precision.param
        if self.gated:
            self.w_gate = param(rngs.params(), (D, F), ("d_model", "d_ff"), dtype, std=std, contracted=True)
        self.w_up = param(rngs.params(), (D, F), ("d_model", "d_ff"), dtype, std=std, contracted=True)
        self.w_down = param(rngs.params(), (F, D), ("d_ff", "d_model"), dtype,
                            std=std / math.sqrt(2 * config.n_layers), contracted=True)
        if config.bias:
            self.b_up = param(None, (F,), ("d_ff",), dtype)
            self.b_down = param(None, (D,), ("d_model",), dtype)

    def __call__(self, x_BLD: jax.Array, key_B: jax.Array | None = None) -> jax.Array:
        dtype, act = self.precision.compute, ACTIVATIONS[self.activation]
        weights = {"up": self.w_up, **({"gate": self.w_gate} if self.gated else {})}
        up_BLF, *gate = enter("bld,df->blf", x_BLD, weights, self.place, again=self.again,
                              matmul=self.precision.matmul, name="mlp_norm")
        up_BLF, *gate = adapted(self, "bld,df->blf", x_BLD, (up_BLF, *gate), tuple(weights), fold(key_B, 2),
                                "mlp_norm_mask")
        if self.config.bias:
            up_BLF = up_BLF + read(self.b_up, dtype, self.place)[None, None]
        up_BLF = tag(self.place(up_BLF, ("batch", "length", "d_ff")), "up")
        if self.gated:
            gate_BLF = tag(self.place(gate[0], ("batch", "length", "d_ff")), "gate")
            act_BLF = act(gate_BLF) * up_BLF
        else:
            act_BLF = act(up_BLF)
        act_BLF = tag(act_BLF, "act")
        y_BLD = leave("blf,fd->bld", act_BLF, self.w_down, self.place, again=self.again,
                      matmul=self.precision.matmul, name="act", out="mlp_out")
        y_BLD, = adapted(self, "blf,fd->bld", act_BLF, (y_BLD,), ("down",), fold(key_B, 3), "act_mask")
        if self.config.bias:
            y_BLD = y_BLD + read(self.b_down, dtype, self.place)[None, None]
        return tag(self.place(y_BLD, ("batch", "stream", None)), "mlp_out")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms` what is added is normed too."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *,
                 lora: Lora | None = None, rngs: nnx.Rngs):
        self.config, self.precision, self.place = config, precision, place
        self.norm_attention = Norm(config, precision, place)
        self.attention = Attention(config, precision, place, rngs=rngs)
        self.norm_mlp = Norm(config, precision, place)
        self.mlp = Mlp(config, precision, place, rngs=rngs)
        if config.post_norms:
            self.post_norm_attention = Norm(config, precision, place)
            self.post_norm_mlp = Norm(config, precision, place)
        if lora:
            add_adapters(self.attention, lora, precision.param, rngs)
            add_adapters(self.mlp, lora, precision.param, rngs)

    def _inputs(self, x_BLD: jax.Array, packed: Packed | None,
                key_B: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        with jax.named_scope("attention"):
            return self.attention.inputs(tag(self.norm_attention(x_BLD), "attn_norm"), packed, fold(key_B, 0))

    def _core(self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, key_B: jax.Array | None,
              packed: Packed | None) -> jax.Array:
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

    def _feed(self, x_BLD: jax.Array, key_B: jax.Array | None) -> jax.Array:
        x_BLD = tag(x_BLD, "mid")
        with jax.named_scope("mlp"):
            x_BLD = self._add_mlp(x_BLD, fold(key_B, 1))
        return self.place(x_BLD, ("batch", "stream", None))

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
        # The mask is drawn for whole sequences, so that tiles do not change it.
        return y_BLD if key_B is None else x_BLD + dropout(y_BLD, key_B, config.dropout, "mlp_out_mask")

    def set(self, layer: jax.Array | int, again: bool) -> "Block":
        """This block as the layer of this number, from 0, set to gather its parameters again in the backward pass or
        not (`again` of `layers.enter`)."""
        self.attention.again = self.mlp.again = again
        self.attention.layer = layer
        return self

    def __call__(self, x_BLD: jax.Array, key_B: jax.Array | None = None, packed: Packed | None = None) -> jax.Array:
        """The block's output [B, L, D] for the residual stream `x_BLD`; `key_B`: dropout keys, None for no dropout;
        `packed`: the examples of packed rows."""
        return self._feed(self._attend(x_BLD, key_B, packed), key_B)


Read = Callable[[], Block]  # gives the block; its parameters are read where it is called


def _whole(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> jax.Array:
    # The name is inside the checkpoint: outside it would be an input, and no policy can move those.
    return wrap(lambda x, key, packed: read()(tag(x, "block_in"), key, packed))(x_BLD, key_B, packed)


def _parts(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None, packed: Packed | None) -> jax.Array:
    x_BLD = wrap(lambda x, key, packed: read()._attend(tag(x, "block_in"), key, packed))(x_BLD, key_B, packed)
    return wrap(lambda x, key: read()._feed(x, key))(x_BLD, key_B)


def _around_core(read: Read, wrap: Callable, x_BLD: jax.Array, key_B: jax.Array | None,
                 packed: Packed | None) -> jax.Array:
    # A kernel whose residuals have no names (cuDNN's) stays outside the checkpoints: else it would run again even
    # where its output is kept.
    x_BLD = tag(x_BLD, "block_in")
    inputs = wrap(lambda x, packed, key: read()._inputs(x, packed, key))(x_BLD, packed, key_B)
    context_BLHK = read()._core(*inputs, key_B, packed)

    def rest(x_BLD: jax.Array, context_BLHK: jax.Array, key_B: jax.Array | None) -> jax.Array:
        block = read()
        return block._feed(block._join(x_BLD, context_BLHK, key_B), key_B)

    return wrap(rest)(x_BLD, context_BLHK, key_B)


# How a block is cut into pieces, each with a `wrap`, such as a checkpoint, around it.
CUTS = {"block": _whole, "parts": _parts, "around_core": _around_core}
