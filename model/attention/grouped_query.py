"""Grouped-query attention: projections, rotation, kernel and output projection."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.adapters import Lora, add_adapter_outputs
from bytescope.model.attention.attention_kernels import KERNELS, scoring_of
from bytescope.model.attention.ring import ring_attention
from bytescope.model.layers import enter, fold, leave, param, read
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.norm import Norm
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision
from bytescope.model.rotary import rope_frequencies, rotate, rotate_by_layer
from bytescope.model.segments import Packed, token_positions


class Attention(nnx.Module):
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245): H query heads share G key and value heads.
    The attention kernel that the config selects, a row of KERNELS, computes the scores and the context."""

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *, rngs: nnx.Rngs):
        self.config, self.precision, self.place, self.regather = config, precision, place, False
        self.lora: Lora | None = None
        self.layer: jax.Array | int | None = None  # layer index from 0, set by Block.set
        D, H, G, K = config.d_model, config.n_heads, config.n_kv_heads, config.d_head
        std, dtype = config.init_std, precision.param
        self.w_q = param(rngs.params(), (D, H, K), ("d_model", "heads", "d_head"), dtype, std=std, contracted=True)
        self.w_k = param(rngs.params(), (D, G, K), ("d_model", "kv_heads", "d_head"), dtype, std=std, contracted=True)
        self.w_v = param(rngs.params(), (D, G, K), ("d_model", "kv_heads", "d_head"), dtype, std=std, contracted=True)
        # Weights whose output is added to the residual stream are initialized smaller in deeper models, as in GPT-2.
        self.w_o = param(
            rngs.params(),
            (H, K, D),
            ("heads", "d_head", "d_model"),
            dtype,
            std=std / math.sqrt(2 * config.n_layers),
            contracted=True,
        )
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
        """Returns queries [B, L, H, K] and keys and values [B, L, G, K] in the compute dtype, before rotation. `key_B`:
        dropout keys, which only the adapters use."""
        weights = {"q": self.w_q, "k": self.w_k, "v": self.w_v}
        spec, out = "bld,dhk->blhk", []
        products = enter(
            spec,
            x_BLD,
            weights,
            self.place,
            regather=self.regather,
            matmul=self.precision.matmul,
            name="attn_norm",
        )
        outs = add_adapter_outputs(self, spec, x_BLD, products, tuple(weights), fold(key_B, 2), "attn_norm_mask")
        for which, y_BLHK in zip(weights, outs):
            heads = "heads" if which == "q" else "kv_heads"
            with jax.named_scope(which):
                if self.config.bias or self.config.qkv_bias:
                    y_BLHK = y_BLHK + read(getattr(self, f"b_{which}"), y_BLHK.dtype, self.place)[None, None]
                out.append(tag(self.place(y_BLHK, ("batch", "length", heads, None)), which))
        return out

    def inputs(
        self, x_BLD: jax.Array, packed: Packed | None, key_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the queries [B, L, H, K], keys and values [B, L, G, K] for the attention kernel. Queries and keys are
        normed if `config.qk_norm` is set, then rotated.

        `packed`: token positions of packed rows (several texts per row), None if every row is one text. `key_B`:
        dropout keys, which only the adapters use.
        """
        config = self.config
        with jax.named_scope("qkv"):
            q_BLHK, k_BLGK, v_BLGK = self.project(x_BLD, key_B)
        if config.qk_norm:
            with jax.named_scope("qk_norm"):
                q_BLHK, k_BLGK = self.norm_q(q_BLHK), self.norm_k(k_BLGK)
        if config.position == "rope":
            with jax.named_scope("rope"):
                turn, frequency = self._rotation_and_frequencies(config.d_head)
                positions = token_positions(packed, x_BLD.shape[1], self.place)
                q_BLHK = turn(q_BLHK, positions, frequency)
                k_BLGK = turn(k_BLGK, positions, frequency)
        return tag(q_BLHK, "q_rot"), tag(k_BLGK, "k_rot"), v_BLGK

    def cached_inputs(self, x_BTD: jax.Array, packed: Packed) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the queries [B, T, H, K] of T new tokens, and their keys and values [B, T, G, K], which the caller
        writes to the KV cache. The values are None if they are part of the keys (latent attention). `packed`: the
        positions of the tokens."""
        return self.inputs(x_BTD, packed)

    def from_cache(self, context_BTHV: jax.Array) -> jax.Array:
        """Converts the result of attention over the KV cache to the context of the heads, [B, T, H, V]. Here it is
        returned unchanged. Latent attention overrides this method, because its cache stores latents."""
        return context_BTHV

    def _rotation_and_frequencies(self, width: int) -> tuple[Callable[..., jax.Array], jax.Array]:
        config = self.config
        frequency = rope_frequencies(width, config.rope_theta, config.rope_scaling)
        if len(config.rope_scaling) == 5:  # YaRN
            return partial(rotate, amplitude=config.rope_scaling[-1]), frequency
        if not config.rope_local_theta:
            return rotate, frequency
        local = rope_frequencies(width, config.rope_local_theta, ())
        return rotate_by_layer, jnp.where(config.is_global(self.layer), frequency, local)

    def core(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, key_B: jax.Array | None, packed: Packed | None
    ) -> jax.Array:
        """Returns the attention context [B, L, H, K]. Ring attention computes it if the sequence is sharded, else the
        kernel of the config. `key_B`: dropout keys. `packed`: segment ids of packed rows, None if every row is one
        text."""
        config, segments_BL = self.config, None if packed is None else packed.ids_BL
        with jax.named_scope("core"):
            # The kernel tags its result `context` itself: a kernel with a custom gradient must do it inside its
            # forward rule.
            ring = self.place.ring
            if ring:
                context_BLHK = ring_attention(
                    q_BLHK,
                    k_BLGK,
                    v_BLGK,
                    segments_BL,
                    ring=ring,
                    chunk=config.attention_chunk,
                    scoring=scoring_of(config),
                )
            else:
                context_BLHK = KERNELS[config.attention].run(
                    q_BLHK, k_BLGK, v_BLGK, segments_BL, config=config, key_B=fold(key_B, 0), place=self.place
                )
            return self.place(context_BLHK, ("batch", "length", "heads", None))

    def output(self, context_BLHK: jax.Array, key_B: jax.Array | None) -> jax.Array:
        """Returns the output projection of the attention context, [B, L, D]. `key_B`: dropout keys, which only the
        adapter of the projection uses."""
        config, dtype = self.config, self.precision.compute
        with jax.named_scope("out"):
            # The gradients of all kernels but the naive one read the unquantized context, so it is saved already.
            name = "context" if config.attention == "naive" and not self.place.ring else ""
            y_BLD = leave(
                "blhk,hkd->bld",
                context_BLHK,
                self.w_o,
                self.place,
                regather=self.regather,
                matmul=self.precision.matmul,
                name=name,
                out="attn_out",
            )
            (y_BLD,) = add_adapter_outputs(
                self, "blhk,hkd->bld", context_BLHK, (y_BLD,), ("o",), fold(key_B, 3), "context_mask"
            )
            if config.bias:
                y_BLD = y_BLD + read(self.b_o, dtype, self.place)[None, None]
            return tag(self.place(y_BLD, ("batch", "stream", None)), "attn_out")
