"""The checkpoint names: every tensor that a remat policy may save, offload or recompute.

`tag` is the only function that gives a name to a tensor, and it rejects names outside NAMES. A policy that asks for
another name is refused.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.ad_checkpoint import checkpoint_name

# name -> (shape suffix, description); the last letter of a scale is the dimension that is cut into tiles of 128
NAMES = {
    "embed": ("BLD", "token (and position) embedding, input of the first block"),
    "embed_mask": ("BLD", "dropout mask of the embedding, one byte per element"),
    "block_in": ("BLD", "residual stream entering a block"),
    "attn_norm": ("BLD", "normed input of the attention projections"),
    "attn_norm_fp8": ("BLD", "attn_norm quantized for fp8 matmuls"),
    "attn_norm_scale": ("BLD", "scales of attn_norm_fp8, one float32 per 128 of the width"),
    "q": ("BLHK", "queries as projected, before rotation"),
    "k": ("BLGK", "keys as projected, before rotation (latent attention: the part that is not rotated)"),
    "v": ("BLGK", "values as projected"),
    "q_latent": ("BLc", "latent that the queries are projected from (latent attention only)"),
    "kv_latent": ("BLc", "latent that keys and values are projected from (latent attention only)"),
    "k_rope": ("BLc", "the part of the keys that is rotated, shared by all heads (latent attention only)"),
    "q_rot": ("BLHK", "rotated queries, as the attention core reads them"),
    "k_rot": ("BLGK", "rotated keys, as the attention core reads them"),
    "probs": ("BGRLS", "softmax of the scores (naive kernel only)"),
    "probs_mask": ("BGRLS", "dropout mask of the probabilities, one byte per element"),
    "probs_dropped": ("BGRLS", "probabilities after dropout"),
    "lse": ("BGRL", "log of the softmax's denominator (chunked kernel and ring attention)"),
    "context": ("BLHK", "output of the attention core, input of the output projection"),
    "context_fp8": ("BLHK", "context quantized for fp8 matmuls (naive kernel only)"),
    "context_scale": ("BLH", "scales of context_fp8, one float32 per 128 of the width of all heads"),
    "attn_out": ("BLD", "output projection of attention"),
    "attn_out_mask": ("BLD", "dropout mask of the attention branch, one byte per element"),
    "mid": ("BLD", "residual stream between attention and MLP"),
    "mlp_norm": ("BLD", "normed input of the MLP"),
    "mlp_norm_fp8": ("BLD", "mlp_norm quantized for fp8 matmuls"),
    "mlp_norm_scale": ("BLD", "scales of mlp_norm_fp8, one float32 per 128 of the width"),
    "gate": ("BLF", "gate projection (gated MLPs only)"),
    "up": ("BLF", "up projection"),
    "act": ("BLF", "input of the down projection"),
    "act_fp8": ("BLF", "act quantized for fp8 matmuls"),
    "act_scale": ("BLF", "scales of act_fp8, one float32 per 128 of the width"),
    "mlp_out": ("BLD", "down projection"),
    "mlp_out_mask": ("BLD", "dropout mask of the MLP branch, one byte per element"),
    "lora_q": ("BLr", "output of the first adapter matrix of w_q"),
    "lora_k": ("BLr", "output of the first adapter matrix of w_k"),
    "lora_v": ("BLr", "output of the first adapter matrix of w_v"),
    "lora_o": ("BLr", "output of the first adapter matrix of w_o"),
    "lora_gate": ("BLr", "output of the first adapter matrix of w_gate"),
    "lora_up": ("BLr", "output of the first adapter matrix of w_up"),
    "lora_down": ("BLr", "output of the first adapter matrix of w_down"),
    "attn_norm_mask": ("BLD", "dropout mask of the input of the adapters of w_q, w_k and w_v, one byte per element"),
    "context_mask": ("BLHK", "dropout mask of the input of the adapter of w_o, one byte per element"),
    "mlp_norm_mask": ("BLD", "dropout mask of the input of the adapters of w_gate and w_up, one byte per element"),
    "act_mask": ("BLF", "dropout mask of the input of the adapter of w_down, one byte per element"),
    "router_logits": ("BLE", "scores of the experts before softmax or sigmoid, float32"),
    "dispatched": ("XD", "rows of tokens sorted by expert, input of the experts' gate and up projections"),
    "expert_gate": ("XF", "gate projection of the routed experts"),
    "expert_up": ("XF", "up projection of the routed experts"),
    "expert_act": ("XF", "input of the routed experts' down projection, multiplied by the router's weight"),
    "combined": ("BLD", "sum of a token's routed experts"),
    "final_norm": ("BLD", "normed output of the last block, input of the head"),
}

# Never saved with model.mlp_chunk: each tile of the MLP is recomputed for its gradient (model/remat/tile.py).
TILED = ("mlp_norm", "gate", "up", "act", "mlp_out")


def tag(x: jax.Array, name: str) -> jax.Array:
    """Returns `x` unchanged, with a checkpoint name attached, by which remat policies select it.

    Raises:
      KeyError: the name is not in NAMES; add it there first.
    """
    if name not in NAMES:
        raise KeyError(f"checkpoint name {name!r} is not in NAMES of model/names.py: add it there first")
    if (tagged := _TAGGED.get()) is not None:
        tagged[name] = x
    return checkpoint_name(x, name)


_TAGGED: ContextVar[dict[str, jax.Array] | None] = ContextVar("tagged", default=None)


@contextlib.contextmanager
def collect_tagged() -> Iterator[dict[str, jax.Array]]:
    """Collects the arrays that `tag` names inside the `with` block in a dict, checkpoint name -> array. A function that
    is being traced can return them, for example to read the inputs of a block's weights.

    Use it for one block that has no checkpoint and uses the naive attention kernel. Values tagged in an inner trace,
    such as a loop or a function with a custom gradient, must not be read outside that trace.
    """
    tagged: dict[str, jax.Array] = {}
    token = _TAGGED.set(tagged)
    try:
        yield tagged
    finally:
        _TAGGED.reset(token)
