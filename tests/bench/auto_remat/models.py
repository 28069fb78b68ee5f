"""The five models of the benchmark in plain jax: GPT, Llama, Mixtral, ViT and a U-Net.

Array names have shape suffixes: B sequences or images, L tokens, D width, F hidden width, H heads, G key-value heads,
K width of a head, E experts, T routed tokens; X, Y, C height, width and channels of an image. Values have MaxText's
checkpoint names, so that its estimator can choose among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from graph import Graph
from jax.ad_checkpoint import checkpoint_name
from jax_graphs import Block, build_graph

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Dimensions of a transformer: layers, sequences, tokens, width, hidden width, heads, key-value heads, experts."""

    layers: int
    batch: int
    length: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int = 0
    chosen: int = 0
    dtype: Any = jnp.bfloat16

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


GPT = Size(4, 4, 1024, 1024, 4096, 16, 16)
LLAMA = Size(4, 2, 4096, 2048, 5632, 16, 4)
MIXTRAL = Size(4, 4, 2048, 1024, 3584, 16, 4, experts=8, chosen=2)
VIT = Size(4, 32, 256, 768, 3072, 12, 12)


# ---- parts -------------------------------------------------------------------------------------------------------


def layer_norm(scale_D: Any, x_BLD: Any) -> Any:
    x32_BLD = x_BLD.astype(jnp.float32)
    mean_BL1 = x32_BLD.mean(-1, keepdims=True)
    centered_BLD = x32_BLD - mean_BL1
    variance_BL1 = (centered_BLD * centered_BLD).mean(-1, keepdims=True)
    return (centered_BLD * jax.lax.rsqrt(variance_BL1 + 1e-5)).astype(x_BLD.dtype) * scale_D[None, None]


def rms_norm(scale_D: Any, x_BLD: Any) -> Any:
    x32_BLD = x_BLD.astype(jnp.float32)
    variance_BL1 = (x32_BLD * x32_BLD).mean(-1, keepdims=True)
    return (x32_BLD * jax.lax.rsqrt(variance_BL1 + 1e-5)).astype(x_BLD.dtype) * scale_D[None, None]


def rotate(x_BLHK: Any) -> Any:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""
    half = x_BLHK.shape[-1] // 2
    frequency_K = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LK = jnp.arange(x_BLHK.shape[1], dtype=jnp.float32)[:, None] * frequency_K[None]
    cos, sin = (f(angle_LK)[None, :, None, :].astype(x_BLHK.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x_BLHK[..., :half], x_BLHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def naive_attention(q_BLHK: Any, k_BLHK: Any, v_BLHK: Any, causal: bool) -> Any:
    """Attention whose scores are in memory, with a softmax in float32."""
    scores_BHLL = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BLHK).astype(jnp.float32) * q_BLHK.shape[-1] ** -0.5
    if causal:
        length = q_BLHK.shape[1]
        mask_LL = jnp.tril(jnp.ones((length, length), bool))
        scores_BHLL = jnp.where(mask_LL[None, None], scores_BHLL, -1e30)
    shifted_BHLL = jnp.exp(scores_BHLL - jax.lax.stop_gradient(scores_BHLL.max(-1, keepdims=True)))
    probs_BHLL = (shifted_BHLL / shifted_BHLL.sum(-1, keepdims=True)).astype(q_BLHK.dtype)
    return jnp.einsum("bhlm,bmhk->blhk", probs_BHLL, v_BLHK)


# A fused attention kernel: a graph has it as one operation for each pass. The bodies count its FLOPs (Dao et al. 2022,
# arXiv 2205.14135, algorithms 1 and 4): two products forward, five backward. They are traced and never run.
def flash_forward(q_BLHK: Any, k_BLGK: Any, v_BLGK: Any) -> Any:
    q_BLGRK = q_BLHK.reshape(*q_BLHK.shape[:2], k_BLGK.shape[2], -1, q_BLHK.shape[-1])
    scores = jnp.einsum("blgrk,bmgk->bgrlm", q_BLGRK, k_BLGK)
    lse = jax.nn.logsumexp(scores.astype(jnp.float32), -1)
    out = jnp.einsum("bgrlm,bmgk->blgrk", jnp.exp(scores - lse[..., None]).astype(q_BLHK.dtype), v_BLGK)
    return out.reshape(q_BLHK.shape), lse


def flash_backward(q_BLHK: Any, k_BLGK: Any, v_BLGK: Any, out_BLHK: Any, lse: Any, d_BLHK: Any) -> Any:
    shape = (*q_BLHK.shape[:2], k_BLGK.shape[2], -1, q_BLHK.shape[-1])
    q, out, d = (x.reshape(shape) for x in (q_BLHK, out_BLHK, d_BLHK))
    probs = jnp.exp(jnp.einsum("blgrk,bmgk->bgrlm", q, k_BLGK) - lse[..., None]).astype(q.dtype)
    dv = jnp.einsum("bgrlm,blgrk->bmgk", probs, d)
    dprobs = jnp.einsum("blgrk,bmgk->bgrlm", d, v_BLGK)
    dscores = (probs * (dprobs - (out * d).sum(-1).transpose(0, 2, 3, 1)[..., None])).astype(q.dtype)
    dq = jnp.einsum("bgrlm,bmgk->blgrk", dscores, k_BLGK).reshape(q_BLHK.shape)
    return dq, jnp.einsum("bgrlm,blgrk->bmgk", dscores, q), dv


@jax.custom_vjp
def flash_attention(q_BLHK: Any, k_BLGK: Any, v_BLGK: Any) -> Any:
    return jax.jit(flash_forward)(q_BLHK, k_BLGK, v_BLGK)[0]


def _flash_rule(q_BLHK: Any, k_BLGK: Any, v_BLGK: Any) -> Any:
    out_BLHK, lse = jax.jit(flash_forward)(q_BLHK, k_BLGK, v_BLGK)
    return out_BLHK, (q_BLHK, k_BLGK, v_BLGK, out_BLHK, lse)


flash_attention.defvjp(_flash_rule, lambda residuals, d_BLHK: jax.jit(flash_backward)(*residuals, d_BLHK))


# ---- transformer blocks ------------------------------------------------------------------------------------------


def attention_params(size: Size) -> dict[str, Any]:
    query = (size.width, size.heads, size.head_dim)
    key = (size.width, size.kv_heads, size.head_dim)
    return arrays(size, {"q": query, "k": key, "v": key, "out": (*query[1:], size.width), "norm": (size.width,)})


def arrays(size: Size, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, size.dtype) for name, shape in shapes.items()}


def attend(params: Params, h_BLD: Any, *, rotary: bool, fused: bool, causal: bool) -> Any:
    q_BLHK = checkpoint_name(jnp.einsum("bld,dhk->blhk", h_BLD, params["q"]), "query_proj")
    k_BLGK = checkpoint_name(jnp.einsum("bld,dgk->blgk", h_BLD, params["k"]), "key_proj")
    v_BLGK = checkpoint_name(jnp.einsum("bld,dgk->blgk", h_BLD, params["v"]), "value_proj")
    if rotary:
        q_BLHK, k_BLGK = rotate(q_BLHK), rotate(k_BLGK)
    if fused:
        context_BLHK = flash_attention(q_BLHK, k_BLGK, v_BLGK)
    else:
        context_BLHK = naive_attention(q_BLHK, k_BLGK, v_BLGK, causal)
    context_BLHK = checkpoint_name(context_BLHK, "context")
    return checkpoint_name(jnp.einsum("blhk,hkd->bld", context_BLHK, params["out"]), "out_proj")


def plain_block(params: Params, x_BLD: Any, *, causal: bool) -> Any:
    """A pre-norm block with naive attention and a GELU MLP: GPT-2 if causal, else ViT."""
    h_BLD = layer_norm(params["norm"], x_BLD)
    x_BLD = x_BLD + attend(params, h_BLD, rotary=False, fused=False, causal=causal)
    h_BLD = layer_norm(params["mlp_norm"], x_BLD)
    up_BLF = checkpoint_name(jnp.einsum("bld,df->blf", h_BLD, params["up"]), "mlpwi")
    mid_BLF = jax.nn.gelu(up_BLF, approximate=causal)
    return x_BLD + checkpoint_name(jnp.einsum("blf,fd->bld", mid_BLF, params["down"]), "mlpwo")


def llama_block(params: Params, x_BLD: Any) -> Any:
    """RMSNorm, grouped-query rotary attention in a fused kernel, SwiGLU MLP."""
    h_BLD = rms_norm(params["norm"], x_BLD)
    x_BLD = x_BLD + attend(params, h_BLD, rotary=True, fused=True, causal=True)
    h_BLD = rms_norm(params["mlp_norm"], x_BLD)
    gate_BLF = checkpoint_name(jnp.einsum("bld,df->blf", h_BLD, params["gate"]), "mlpwi_0")
    up_BLF = checkpoint_name(jnp.einsum("bld,df->blf", h_BLD, params["up"]), "mlpwi_1")
    mid_BLF = gate_BLF * jax.lax.logistic(gate_BLF) * up_BLF
    return x_BLD + checkpoint_name(jnp.einsum("blf,fd->bld", mid_BLF, params["down"]), "mlpwo")


def mixtral_block(params: Params, x_BLD: Any, *, chosen: int) -> Any:
    """A Llama block whose MLP is a mixture of experts: tokens sorted by expert, grouped matrix products."""
    h_BLD = rms_norm(params["norm"], x_BLD)
    x_BLD = x_BLD + attend(params, h_BLD, rotary=True, fused=True, causal=True)
    h_SD = rms_norm(params["mlp_norm"], x_BLD).reshape(-1, x_BLD.shape[-1])
    scores_SE = jnp.einsum("sd,de->se", h_SD, params["router"]).astype(jnp.float32)
    top_SC, expert_SC = jax.lax.top_k(scores_SE, chosen)
    shifted_SC = jnp.exp(top_SC - jax.lax.stop_gradient(top_SC.max(-1, keepdims=True)))
    weight_SC = (shifted_SC / shifted_SC.sum(-1, keepdims=True)).astype(h_SD.dtype)
    expert_T = expert_SC.reshape(-1)
    order_T = jnp.argsort(expert_T)
    sizes_E = (expert_T[:, None] == jnp.arange(scores_SE.shape[1])[None]).astype(jnp.int32).sum(0)
    routed_TD = h_SD[order_T // chosen]
    gate_TF = checkpoint_name(jax.lax.ragged_dot(routed_TD, params["gate"], sizes_E), "mlpwi_0")
    up_TF = checkpoint_name(jax.lax.ragged_dot(routed_TD, params["up"], sizes_E), "mlpwi_1")
    mid_TF = gate_TF * jax.lax.logistic(gate_TF) * up_TF
    down_TD = checkpoint_name(jax.lax.ragged_dot(mid_TF, params["down"], sizes_E), "mlpwo")
    weighted_TD = down_TD * weight_SC.reshape(-1)[order_T][:, None]
    out_SD = jnp.zeros_like(h_SD).at[order_T // chosen].add(weighted_TD)
    return x_BLD + out_SD.reshape(x_BLD.shape)


def transformer(name: str, size: Size, function: Any, mlp: Mapping[str, tuple[int, ...]]) -> Graph:
    params = attention_params(size) | arrays(size, {**mlp, "mlp_norm": (size.width,)})
    blocks = []
    for number in range(size.layers):
        blocks.append(Block(f"b{number}", function, params, (f"b{number - 1}" if number else "x",)))
    activations = 1 if "gate" not in mlp else 2
    facts = {
        "emb_dim": size.width,
        "mlp_dim": size.hidden,
        "num_query_heads": size.heads,
        "num_kv_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_target_length": size.length,
        "mlp_activations": activations,
    }
    x_BLD = jax.ShapeDtypeStruct((size.batch, size.length, size.width), size.dtype)
    source = f"tests/bench/auto_remat/models.py: {name}, {size.layers} blocks, {size.batch} x {size.length} tokens"
    return build_graph(name, source, blocks, {"x": x_BLD}, facts)


def plain_mlp(size: Size) -> dict[str, tuple[int, ...]]:
    return {"up": (size.width, size.hidden), "down": (size.hidden, size.width)}


def gated_mlp(size: Size) -> dict[str, tuple[int, ...]]:
    return {"gate": (size.width, size.hidden), **plain_mlp(size)}


def gpt() -> Graph:
    return transformer("gpt", GPT, functools.partial(plain_block, causal=True), plain_mlp(GPT))


def vit() -> Graph:
    return transformer("vit", VIT, functools.partial(plain_block, causal=False), plain_mlp(VIT))


def llama() -> Graph:
    return transformer("llama", LLAMA, llama_block, gated_mlp(LLAMA))


def mixtral() -> Graph:
    experts = {name: (MIXTRAL.experts, *shape) for name, shape in gated_mlp(MIXTRAL).items()}
    shapes = {**experts, "router": (MIXTRAL.width, MIXTRAL.experts)}
    return transformer("mixtral", MIXTRAL, functools.partial(mixtral_block, chosen=MIXTRAL.chosen), shapes)


# ---- U-Net -------------------------------------------------------------------------------------------------------


def convolve(kernel: Any, x_BXYC: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x_BXYC, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def group_norm(scale_C: Any, x_BXYC: Any, groups: int = 32) -> Any:
    shape = x_BXYC.shape
    x32 = x_BXYC.astype(jnp.float32).reshape(*shape[:3], groups, shape[3] // groups)
    mean = x32.mean((1, 2, 4), keepdims=True)
    centered = x32 - mean
    variance = (centered * centered).mean((1, 2, 4), keepdims=True)
    normalized = (centered * jax.lax.rsqrt(variance + 1e-5)).reshape(shape)
    return normalized.astype(x_BXYC.dtype) * scale_C[None, None, None]


def residual_block(params: Params, x_BXYC: Any, *skip: Any) -> Any:
    """Two convolutions with group norm and SiLU (Ho et al. 2020, arXiv 2006.11239, appendix B); reads a skip
    connection if one is given.
    """
    if skip:
        x_BXYC = jnp.concatenate([x_BXYC, skip[0]], -1)
    h_BXYC = group_norm(params["norm1"], x_BXYC)
    h_BXYC = convolve(params["conv1"], h_BXYC * jax.lax.logistic(h_BXYC))
    h_BXYC = group_norm(params["norm2"], h_BXYC)
    h_BXYC = convolve(params["conv2"], h_BXYC * jax.lax.logistic(h_BXYC))
    if "short" in params:
        x_BXYC = convolve(params["short"], x_BXYC)
    return x_BXYC + h_BXYC


def attention_block(params: Params, x_BXYC: Any) -> Any:
    """Naive attention over all positions, with one head."""
    batch, _, _, channels = x_BXYC.shape
    h_BLD = group_norm(params["norm"], x_BXYC).reshape(batch, -1, channels)
    q, k, v = (jnp.einsum("bld,de->ble", h_BLD, params[name])[:, :, None] for name in ("q", "k", "v"))
    context_BLD = naive_attention(q, k, v, causal=False)[:, :, 0]
    return x_BXYC + jnp.einsum("bld,de->ble", context_BLD, params["out"]).reshape(x_BXYC.shape)


def down_sample(params: Params, x_BXYC: Any) -> Any:
    return convolve(params["conv"], x_BXYC, stride=2)


def up_sample(params: Params, x_BXYC: Any) -> Any:
    batch, height, width, channels = x_BXYC.shape
    wide = jnp.broadcast_to(x_BXYC[:, :, None, :, None], (batch, height, 2, width, 2, channels))
    return convolve(params["conv"], wide.reshape(batch, 2 * height, 2 * width, channels))


def unet() -> Graph:
    """A U-Net for images of 64 x 64 with three resolutions, 16 images, as diffusion models use it."""
    channels, image, batch = (128, 256, 512), 64, 16

    def spec(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def residual(name: str, before: int, after: int, *inputs: str) -> Block:
        params = {"norm1": spec(before), "conv1": spec(3, 3, before, after), "norm2": spec(after)}
        params["conv2"] = spec(3, 3, after, after)
        if before != after:
            params["short"] = spec(1, 1, before, after)
        return Block(name, residual_block, params, inputs)

    blocks, width, last, skips = [], channels[0], "x", []
    for level, after in enumerate(channels):
        for number in range(2):
            blocks.append(residual(f"down{level}.{number}", width, after, last))
            last, width = blocks[-1].name, after
            skips.append((last, width))
        if level < len(channels) - 1:
            blocks.append(Block(f"shrink{level}", down_sample, {"conv": spec(3, 3, width, width)}, (last,)))
            last = blocks[-1].name
    square = {name: spec(width, width) for name in ("q", "k", "v", "out")}
    blocks.append(Block("middle", attention_block, {"norm": spec(width), **square}, (last,)))
    last = "middle"
    for level, after in reversed(list(enumerate(channels))):
        for number in range(2):
            skip, skip_width = skips.pop()
            blocks.append(residual(f"up{level}.{number}", width + skip_width, after, last, skip))
            last, width = blocks[-1].name, after
        if level:
            blocks.append(Block(f"grow{level}", up_sample, {"conv": spec(3, 3, width, width)}, (last,)))
            last = blocks[-1].name
    source = f"tests/bench/auto_remat/models.py: U-Net, {batch} images of {image} x {image}, channels {channels}"
    return build_graph("unet", source, blocks, {"x": spec(batch, image, image, channels[0])}, {})


MODELS = {"gpt": gpt, "llama": llama, "mixtral": mixtral, "vit": vit, "unet": unet}
