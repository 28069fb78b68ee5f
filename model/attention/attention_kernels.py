"""Causal self-attention kernels: the rows of the table KERNELS, which have the same signature.

    run(q_BLHK, k_BLGK, v_BLGK, segments_BL, *, config, key_B, place) -> context_BLHK

Queries and keys arrive rotated. The kernel applies the scale and cap of the scores. Each kernel tags its own result
`context`, because a kernel with a custom gradient must name the residual inside its forward rule.

`segments_BL` are the segment ids of packed rows, None if each row is one text. A query attends only to keys of its own
segment, and padding (id 0) only to padding. Every kernel computes all score blocks of the causal triangle, also those
that span two segments, because skipping blocks would need a trip count that depends on the data. FLOPs are counted as
for rows of one text.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.model.attention.chunked import Scoring, chunked_attention
from bytescope.model.layers import dropout
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.placement import Placement
from bytescope.model.precision import Precision


@jax.custom_vjp
def causal_softmax(scores_BGRLS: jax.Array, like: jax.Array, segments_BL: jax.Array | None = None) -> jax.Array:
    """Returns the causal softmax of attention scores over the keys (last axis). Keys after the query, and keys of
    another segment, get probability 0.

    It is computed in the dtype of the scores and cast to the dtype of `like`. Its gradient needs only the result, which
    has the checkpoint name `probs`. `jax.nn.softmax` saves an array inside its own function, which no remat policy can
    select by name.

    Args:
      scores_BGRLS: scores of B sequences, G key heads, R query heads per key head, L queries and S keys.
      like: an array with the dtype of the result; its values are not read.
      segments_BL: for packed rows, the number of each position's text; None if each row is one text.
    """
    L, S = scores_BGRLS.shape[-2:]
    # Built from iotas, not passed in: a mask of [L, S] booleans would be a constant of the program.
    row = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, L, S), 3)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, L, S), 4)
    allowed = column <= row
    if segments_BL is not None:
        allowed &= _same_segment(segments_BL)[:, None, None]
    masked = jnp.where(allowed, scores_BGRLS, jnp.finfo(scores_BGRLS.dtype).min)
    return jax.nn.softmax(masked, axis=-1).astype(like.dtype)


def _same_segment(segments_BL: jax.Array) -> jax.Array:
    return segments_BL[:, :, None] == segments_BL[:, None, :]


def _softmax_forward(scores_BGRLS, like, segments_BL=None):
    probs_BGRLS = tag(causal_softmax(scores_BGRLS, like, segments_BL), "probs")
    return probs_BGRLS, (probs_BGRLS, jnp.zeros((0,), scores_BGRLS.dtype), like)


def _softmax_backward(residuals, d_probs_BGRLS):
    probs_BGRLS, scores_like, like = residuals
    p, d = probs_BGRLS.astype(scores_like.dtype), d_probs_BGRLS.astype(scores_like.dtype)
    return p * (d - (p * d).sum(-1, keepdims=True)), jnp.zeros_like(like), None


causal_softmax.defvjp(_softmax_forward, _softmax_backward)


def scoring_of(config: ModelConfig) -> Scoring:
    """Returns the scale and the cap (maximum absolute value) of the attention scores from the config."""
    return Scoring(config.attention_scale, config.attention_softcap)


def naive(q_BLHK, k_BSGK, v_BSGK, segments_BL=None, *, config: ModelConfig, key_B, place: Placement):
    """Computes attention with the full score matrix. Memory is quadratic in the sequence length. Returns the context
    [B, L, H, V], V elements per value.

    The matrix products and their results have the dtype of the queries; scale, cap and softmax are float32, as in
    transformers' eager attention and in MaxText's `dot_product`.

    Args:
      q_BLHK: queries of B sequences, L positions, H heads and K elements.
      k_BSGK, v_BSGK: keys and values of S positions and G heads, each shared by H / G query heads.
      segments_BL: for packed rows, the number of each position's text; None if each row is one text.
      config: gives the scale and cap of the scores and the dropout rate.
      key_B: dropout keys, one per sequence; None for no dropout.
      place: not used by this kernel.
    """
    B, L, H, K = q_BLHK.shape
    G = k_BSGK.shape[2]
    # Heads first: then both products, forward and backward, read the scores without a transpose. With positions first
    # XLA transposes them, and keeps whole stacks of probabilities twice.
    q_BGRLK = jnp.moveaxis(q_BLHK.reshape(B, L, G, H // G, K), 1, 3)
    k_BGSK, v_BGSK = jnp.moveaxis(k_BSGK, 1, 2), jnp.moveaxis(v_BSGK, 1, 2)
    scores_BGRLS = scoring_of(config)(jnp.einsum("bgrlk,bgsk->bgrls", q_BGRLK, k_BGSK).astype(jnp.float32), K)
    probs_BGRLS = causal_softmax(scores_BGRLS, jnp.zeros((0,), v_BSGK.dtype), segments_BL)
    if key_B is not None and config.dropout:
        probs_BGRLS = tag(dropout(probs_BGRLS, key_B, config.dropout, "probs_mask"), "probs_dropped")
    context_BGRLK = jnp.einsum("bgrls,bgsk->bgrlk", probs_BGRLS, v_BGSK)
    return tag(jnp.moveaxis(context_BGRLK, 3, 1).reshape(B, L, H, -1), "context")


def chunked(q_BLHK, k_BSGK, v_BSGK, segments_BL=None, *, config: ModelConfig, key_B, place: Placement):
    """Computes attention with an online softmax over blocks of `config.attention_chunk` positions. Memory is linear in
    the sequence length; runs on any backend.

    Takes the arguments and returns the context [B, L, H, V] of every attention kernel (see `naive`). There is no
    dropout, so `key_B` is not read.
    """
    return chunked_attention(
        q_BLHK, k_BSGK, v_BSGK, segments_BL, min(config.attention_chunk, q_BLHK.shape[1]), scoring_of(config)
    )


def cudnn(q_BLHK, k_BSGK, v_BSGK, segments_BL=None, *, config: ModelConfig, key_B, place: Placement):
    """Computes attention with cuDNN's FlashAttention (Dao et al. 2022, arXiv 2205.14135). If the values of a head have
    fewer elements than its keys, they are padded with zeros.

    Takes the arguments and returns the context [B, L, H, V] of every attention kernel (see `naive`). There is no
    dropout, so `key_B` is not read.
    """
    width, pad = v_BSGK.shape[-1], k_BSGK.shape[-1] - v_BSGK.shape[-1]
    if pad:
        v_BSGK = jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, pad)])
    # If the config sets no scale, pass none: cuDNN's default is 1/sqrt(K).
    scale = {"scale": config.attention_scale} if config.attention_scale else {}
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", **scale)
    queries, keys = (("batch", "length", heads, None) for heads in ("heads", "kv_heads"))
    if segments_BL is None:
        context_BLHK = place.kernel(attend, (queries, keys, keys), queries)(q_BLHK, k_BSGK, v_BSGK)
        return tag(context_BLHK[..., :width], "context")
    # Packed rows pass a mask of all pairs. jax turns it into a 16-bit bias, and jax 0.10 also computes a 16-bit
    # gradient for it. cuDNN's packed layout (offsets and lengths) runs on Hopper and newer, but jax offers it only in
    # private functions, with a static number of segments and softmax statistics of a whole row for each segment. jax
    # 0.10 also computes wrong offsets for it when there are fewer key heads than query heads.
    pairs = ("batch", None, None, None)
    same_B1LS = place(_same_segment(segments_BL)[:, None], pairs)

    def within(q_BLHK, k_BSGK, v_BSGK, same_B1LS):
        return attend(q_BLHK, k_BSGK, v_BSGK, mask=same_B1LS)

    attend_within = place.kernel(within, (queries, keys, keys, pairs), queries)
    return tag(attend_within(q_BLHK, k_BSGK, v_BSGK, same_B1LS)[..., :width], "context")


def _needs_no_dropout(config: ModelConfig, precision: Precision, platform: str) -> str | None:
    if config.dropout:
        return f"it has no dropout of the attention probabilities (model.dropout={config.dropout}); use naive"
    return None


def _needs_cudnn(config: ModelConfig, precision: Precision, platform: str) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs from Ampere on, not on {platform}; use chunked"
    if np.dtype(precision.compute).itemsize != 2:
        return (
            f"it computes in 16-bit floats only, not in {np.dtype(precision.compute)}; set precision.preset=bf16 "
            "or use chunked"
        )
    width = config.score_width
    if width % 8 or width > 128:
        width_keys = f"model.d_head={config.d_head}"
        if width > config.d_head:
            width_keys = f"{width}, {width_keys} and model.mla_d_rope={config.mla_d_rope}"
        return f"it needs a head width that is a multiple of 8 up to 128, not {width_keys}; use chunked"
    if config.value_width > width:
        return (
            f"it needs values as wide as keys at most, {width}, not model.mla_d_value={config.value_width}; use chunked"
        )
    if config.attention_softcap:
        return f"it has no cap of the scores (model.attention_softcap={config.attention_softcap}); use chunked"
    return _needs_no_dropout(config, precision, platform)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One row of the table of attention kernels.

    Fields:
      run: (queries, keys, values, segment ids or None, *, config, key_B, place) -> the context [B, L, H, V] in the
        dtype of the queries. `key_B`: dropout keys. `place`: shards arrays over the mesh.
      refuses: (config, precision, platform) -> None if the kernel can run there, else the reason and the remedy.
    """

    run: Callable[..., jax.Array]
    refuses: Callable[[ModelConfig, Precision, str], str | None]


KERNELS = {
    "naive": Kernel(naive, lambda *_: None),
    "chunked": Kernel(chunked, _needs_no_dropout),
    "cudnn": Kernel(cudnn, _needs_cudnn),
}

# The length of one block of the default size. From two blocks on, chunked attention skips a quarter of the scores, and
# on a CPU the rest fits its caches (0.55x the time and memory at 1024 positions; tests/bench/attention.py).
NAIVE_UP_TO = 512

# Minimum compute capability for running cuDNN's FlashAttention: Ampere. It also compiles for older GPUs.
CUDNN_FROM = (8, 0)


def platform_of(device: jax.Device) -> str:
    """Returns the platform name for `choose_kernel`: the platform of the device, such as "cuda", or the name of the
    GPU if it cannot run cuDNN's FlashAttention: an AMD GPU, or one that is too old."""
    if device.device_kind.startswith("AMD"):
        return device.device_kind
    nvidia = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform in ("gpu", "cuda") and nvidia and tuple(map(int, nvidia.groups())) < CUDNN_FROM:
        return device.device_kind
    return device.platform


def _chunked_bytes_per_row(config: ModelConfig, seq_len: int, head_parts: int) -> int:
    # Float32 sums of the gradients, 16-bit query blocks and three float32 blocks of scores: within 4 % of what the
    # compiler allocated for models of 8B and 124M parameters on an H100 (jax 0.10.2). `head_parts` devices share
    # the heads.
    H, G, K = config.n_heads, config.n_kv_heads, config.score_width
    block = min(config.attention_chunk, seq_len)
    sums = 4 * (K * (H + G) + config.value_width * G)
    return (seq_len * (sums + 2 * H * K) + 3 * 4 * H * block**2) // head_parts


def _choose_packed_kernel(config: ModelConfig, seq_len: int, head_parts: int) -> tuple[str, str]:
    mask = 2 * 2 * seq_len**2  # a 16-bit bias and, in jax 0.10, its 16-bit gradient, [seq_len, seq_len] each
    chunked = _chunked_bytes_per_row(config, seq_len, head_parts)
    sizes = f"a mask of {mask / 2**20:,.0f} MiB a row in cudnn, {chunked / 2**20:,.0f} MiB of sums in chunked"
    # cuDNN needs an even length for packed rows.
    return "cudnn" if mask <= chunked and not seq_len % 2 else "chunked", f"auto: packed rows, {sizes}"


def choose_kernel(
    config: ModelConfig, precision: Precision, platform: str, seq_len: int, *, packed: bool = False, head_parts: int = 1
) -> tuple[str, str]:
    """Returns the name of the attention kernel that `config.attention` selects, and the reason.

    "auto" selects cuDNN where it can run. Elsewhere it selects the naive kernel for sequences of at most NAIVE_UP_TO
    positions, or if chunked attention cannot run, and otherwise the chunked kernel. For packed rows on GPUs that can
    run cuDNN, it selects cuDNN or chunked attention, whichever needs less memory.

    Args:
      platform: result of `platform_of` for the device that will run the program: "cpu", "gpu", "cuda", "tpu" or the
        name of a GPU.
      packed: True if rows are packed: they contain several texts, with a segment id per position.
      head_parts: number of devices that share the heads.

    Raises:
      ValueError: the requested kernel cannot run on this platform or does not exist.
    """
    if config.attention != "auto":
        if config.attention not in KERNELS:
            raise ValueError(
                f"model.attention={config.attention!r} is unknown: choose one of auto, {', '.join(KERNELS)}"
            )
        if reason := KERNELS[config.attention].refuses(config, precision, platform):
            raise ValueError(f"model.attention={config.attention} cannot run here: {reason}")
        if config.attention == "cudnn" and packed and seq_len % 2:
            raise ValueError(
                f"model.attention=cudnn cannot run here: packed rows need an even data.seq_len, not {seq_len}; "
                "make it even, or use model.attention=chunked"
            )
        return config.attention, "as configured"
    refused = KERNELS["cudnn"].refuses(config, precision, platform)
    if refused is None:
        if packed:
            return _choose_packed_kernel(config, seq_len, head_parts)
        return "cudnn", "auto: 16-bit compute on an NVIDIA GPU"
    if reason := KERNELS["chunked"].refuses(config, precision, platform):
        return "naive", f"auto: chunked cannot run here, {reason.split(';')[0]}"
    if seq_len <= NAIVE_UP_TO:
        return "naive", f"auto: {seq_len} positions; chunked is faster above {NAIVE_UP_TO}"
    if config.score_width > config.d_head and platform in ("gpu", "cuda"):
        return "chunked", f"auto: cudnn cannot run here, {refused.split(';')[0]}"
    return "chunked", f"auto: {seq_len} positions, more than {NAIVE_UP_TO}"
