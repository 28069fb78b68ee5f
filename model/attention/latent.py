"""Multi-head latent attention: keys, values and optionally queries are projected from a low-rank latent of each
token."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.adapters import Lora
from bytescope.model.attention.grouped_query import Attention
from bytescope.model.layers import STREAM, WITHIN, enter, move, multiply, param
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.norm import Norm
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision
from bytescope.model.segments import Packed, token_positions

_HEADS = ("batch", "length", "heads", None)


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1). Keys and values are computed from
    a small vector per token, the latent, and only the latent is cached.

    A head's queries and keys have d_head elements plus mla_d_rope rotated elements. All heads share the rotated part of
    the keys, which is projected directly from the input. If mla_q_rank is 0, queries are projected from the input, else
    from a latent too. Latents are normed. The score scale is 1/sqrt(d_head + mla_d_rope).

    Under sequence parallelism latents are sharded like the residual stream. Matmuls with the latent matrices run in the
    compute dtype in every precision preset.
    """

    def __init__(self, config: ModelConfig, precision: Precision, place: Placement, *, rngs: nnx.Rngs):
        self.config, self.precision, self.place, self.regather = config, precision, place, False
        self.lora: Lora | None = None
        self.layer: jax.Array | int | None = None
        D, H, K, V = config.d_model, config.n_heads, config.score_width, config.value_width
        down, up = ("d_model", "latent"), ("latent_state", "heads", "d_head")

        def matrix(shape: tuple[int, ...], axes: tuple[str, ...], std: float = config.init_std) -> nnx.Param:
            return param(rngs.params(), shape, axes, precision.param, std=std, contracted=True)

        rank = config.mla_q_rank
        if rank:
            self.w_q_down, self.w_q_up = matrix((D, rank), down), matrix((rank, H, K), up)
            self.norm_q_latent = Norm(config, precision, place, "mla_q_rank", STREAM, "latent_state")
        else:
            self.w_q = matrix((D, H, K), ("d_model", "heads", "d_head"))
        rank = config.mla_kv_rank
        self.w_kv_down = matrix((D, rank + config.mla_d_rope), down)
        self.w_k_up, self.w_v_up = matrix((rank, H, config.d_head), up), matrix((rank, H, V), up)
        self.norm_kv_latent = Norm(config, precision, place, "mla_kv_rank", STREAM, "latent_state")
        self.w_o = matrix((H, V, D), ("heads", "d_head", "d_model"), config.init_std / math.sqrt(2 * config.n_layers))

    def inputs(
        self, x_BLD: jax.Array, packed: Packed | None, key_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and keys [B, L, H, d_head + mla_d_rope] and values [B, L, H, mla_d_value] for the attention
        kernel. `packed`: token positions of packed rows, None if every row is one text. `key_B`: dropout keys, which
        only the adapters use."""
        K = self.config.d_head
        with jax.named_scope("qkv"):
            q_BLHK = self._project_queries(x_BLD)
            kv_BLc, k_rope_BLc = jnp.split(self._project_down(x_BLD, "kv_down"), [self.config.mla_kv_rank], axis=-1)
            k_rope_BLc = tag(self.place(k_rope_BLc, STREAM), "k_rope")
            kv_BLc = self.norm_kv_latent(tag(self.place(kv_BLc, STREAM), "kv_latent"))
            k_BLHK, v_BLHK = self._project_up(kv_BLc, "k_up", "v_up")
            k_BLHK, v_BLHK = tag(k_BLHK, "k"), tag(v_BLHK, "v")
        with jax.named_scope("rope"):
            turn, frequency = self._rotation_and_frequencies(self.config.mla_d_rope)
            positions = token_positions(packed, x_BLD.shape[1], self.place)
            q_rope_BLHK = turn(q_BLHK[..., K:], positions, frequency)
            k_rope_BL1K = turn(move(k_rope_BLc, self.place, WITHIN, STREAM)[:, :, None], positions, frequency)
            k_rope_BLHK = jnp.broadcast_to(k_rope_BL1K, q_rope_BLHK.shape)
            q_BLHK = jnp.concatenate([q_BLHK[..., :K], q_rope_BLHK], axis=-1)
            k_BLHK = jnp.concatenate([k_BLHK, k_rope_BLHK], axis=-1)
        return tag(self.place(q_BLHK, _HEADS), "q_rot"), tag(self.place(k_BLHK, _HEADS), "k_rot"), v_BLHK

    def cached_inputs(self, x_BTD: jax.Array, packed: Packed) -> tuple[jax.Array, jax.Array, None]:
        """Returns the queries [B, T, H, c + r] and the keys [B, T, 1, c + r] of new tokens, for attention over a cache
        of latents, and None for the values. c is mla_kv_rank, r is mla_d_rope. `packed`: the positions of the tokens.

        A token's key, which all heads share, is its latent followed by the rotated part of its key. The cache stores
        only this vector. The matrices from latents to keys and values are applied to the queries and the context
        instead (section 2.1.2 of the paper): q (W c) = (q W) c.
        """
        K = self.config.d_head
        with jax.named_scope("qkv"):
            q_BTHK = self._project_queries(x_BTD)
            kv_BTc, k_rope_BTc = jnp.split(self._project_down(x_BTD, "kv_down"), [self.config.mla_kv_rank], axis=-1)
            kv_BTc = self.norm_kv_latent(kv_BTc)
            w_cHK = self.w_k_up[...].astype(q_BTHK.dtype)
            q_latent_BTHc = jnp.einsum("bthk,chk->bthc", q_BTHK[..., :K], w_cHK)
        with jax.named_scope("rope"):
            turn, frequency = self._rotation_and_frequencies(self.config.mla_d_rope)
            q_rope_BTHK = turn(q_BTHK[..., K:], packed.positions_BL, frequency)
            k_rope_BT1K = turn(k_rope_BTc[:, :, None], packed.positions_BL, frequency)
        return (
            jnp.concatenate([q_latent_BTHc, q_rope_BTHK], axis=-1),
            jnp.concatenate([kv_BTc[:, :, None], k_rope_BT1K], axis=-1),
            None,
        )

    def from_cache(self, context_BTHc: jax.Array) -> jax.Array:
        """Converts attention-weighted sums of latents [B, T, H, mla_kv_rank] (the result of attention over the KV
        cache) to the context of the heads, [B, T, H, mla_d_value]."""
        return jnp.einsum("bthc,chv->bthv", context_BTHc, self.w_v_up[...].astype(context_BTHc.dtype))

    def _project_queries(self, x_BLD: jax.Array) -> jax.Array:
        if not self.config.mla_q_rank:
            (q_BLHK,) = enter("bld,dhk->blhk", x_BLD, {"q": self.w_q}, self.place, regather=self.regather)
            return tag(self.place(q_BLHK, _HEADS), "q")
        q_BLc = self.norm_q_latent(tag(self._project_down(x_BLD, "q_down"), "q_latent"))
        return tag(self._project_up(q_BLc, "q_up")[0], "q")

    def _project_down(self, x_BLD: jax.Array, name: str) -> jax.Array:
        # Computed before the input is gathered: the latent stays sharded like the residual stream, and gathering it
        # later moves fewer bytes.
        with jax.named_scope(name):
            y_BLc = multiply(
                "bld,dc->blc",
                self.place(x_BLD, STREAM),
                getattr(self, f"w_{name}"),
                self.place,
                regather=self.regather,
                name=name,
            )
            return self.place(y_BLc, STREAM)

    def _project_up(self, x_BLc: jax.Array, *names: str) -> list[jax.Array]:
        weights = {name: getattr(self, f"w_{name}") for name in names}
        outs = enter("blc,chk->blhk", x_BLc, weights, self.place, regather=self.regather)
        return [self.place(y_BLHK, _HEADS) for y_BLHK in outs]
