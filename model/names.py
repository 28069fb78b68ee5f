"""The vocabulary of checkpoint names: every tensor that a remat policy may keep, offload or recompute.

`tag` is the only way a name enters the program. So a name outside this table cannot occur in one, and a policy that
asks for it is refused.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.ad_checkpoint import checkpoint_name

# name -> (shape suffix, what it is); a scale's last letter is the dimension that its tiles of 128 cut
NAMES = {
    "embed": ("BLD", "token (and position) embedding, input of the first block"),
    "embed_mask": ("BLD", "dropout mask of the embedding, one byte per element"),
    "block_in": ("BLD", "residual stream entering a block"),
    "attn_norm": ("BLD", "normed input of the attention projections"),
    "attn_norm_fp8": ("BLD", "the same, quantized for products in fp8"),
    "attn_norm_scale": ("BLD", "its scales, one float32 per 128 of the width"),
    "q": ("BLHK", "queries as projected, before rotation"),
    "k": ("BLGK", "keys as projected, before rotation; of latent attention the part that is not rotated"),
    "v": ("BLGK", "values as projected"),
    "q_latent": ("BLc", "latent that the queries are projected from (latent attention only)"),
    "kv_latent": ("BLc", "latent that keys and values are projected from (latent attention only)"),
    "k_rope": ("BLc", "the part of the keys that is rotated, shared by all heads (latent attention only)"),
    "q_rot": ("BLHK", "queries as the attention core reads them"),
    "k_rot": ("BLGK", "keys as the attention core reads them"),
    "probs": ("BGRLS", "softmax of the scores (naive kernel only)"),
    "probs_mask": ("BGRLS", "dropout mask of the probabilities, one byte per element"),
    "probs_dropped": ("BGRLS", "probabilities after dropout"),
    "lse": ("BGRL", "log of the softmax's denominator (chunked kernel and ring attention)"),
    "context": ("BLHK", "output of the attention core, input of the output projection"),
    "context_fp8": ("BLHK", "the same, quantized for products in fp8 (naive kernel only)"),
    "context_scale": ("BLH", "its scales, one float32 per 128 of all heads' width"),
    "attn_out": ("BLD", "output projection of attention"),
    "attn_out_mask": ("BLD", "dropout mask of the attention branch, one byte per element"),
    "mid": ("BLD", "residual stream between attention and MLP"),
    "mlp_norm": ("BLD", "normed input of the MLP"),
    "mlp_norm_fp8": ("BLD", "the same, quantized for products in fp8"),
    "mlp_norm_scale": ("BLD", "its scales, one float32 per 128 of the width"),
    "gate": ("BLF", "gate projection (gated MLPs only)"),
    "up": ("BLF", "up projection"),
    "act": ("BLF", "input of the down projection"),
    "act_fp8": ("BLF", "the same, quantized for products in fp8"),
    "act_scale": ("BLF", "its scales, one float32 per 128 of the width"),
    "mlp_out": ("BLD", "down projection"),
    "mlp_out_mask": ("BLD", "dropout mask of the MLP branch, one byte per element"),
    "lora_q": ("BLr", "input of the second half of the adapter of w_q; likewise below"),
    "lora_k": ("BLr", "of w_k"),
    "lora_v": ("BLr", "of w_v"),
    "lora_o": ("BLr", "of w_o"),
    "lora_gate": ("BLr", "of w_gate"),
    "lora_up": ("BLr", "of w_up"),
    "lora_down": ("BLr", "of w_down"),
    "attn_norm_mask": ("BLD", "dropout mask of what the adapters of q, k and v read, one byte per element"),
    "context_mask": ("BLHK", "the same for the adapter of o"),
    "mlp_norm_mask": ("BLD", "the same for the adapters of gate and up"),
    "act_mask": ("BLF", "the same for the adapter of down"),
    "router_logits": ("BLE", "scores of the experts before softmax or sigmoid, float32"),
    "dispatched": ("XD", "rows of tokens sorted by expert, input of the experts' gate and up projections"),
    "expert_gate": ("XF", "gate projection of the routed experts"),
    "expert_up": ("XF", "up projection of the routed experts"),
    "expert_act": ("XF", "input of the routed experts' down projection, multiplied by the router's weight"),
    "combined": ("BLD", "sum of a token's routed experts"),
    "final_norm": ("BLD", "normed output of the last block, input of the head"),
}

# Never kept with model.mlp_chunk: each tile of the MLP is recomputed for its gradient (model/remat/tile.py).
TILED = ("mlp_norm", "gate", "up", "act", "mlp_out")


def tag(x: jax.Array, name: str) -> jax.Array:
    """`x` unchanged, under its checkpoint name.

    Raises:
      KeyError: the name is not in the vocabulary; add it there first.
    """
    if name not in NAMES:
        raise KeyError(f"checkpoint name {name!r} is not in model/names.py")
    if (found := _FOUND.get()) is not None:
        found[name] = x
    return checkpoint_name(x, name)


_FOUND: ContextVar[dict[str, jax.Array] | None] = ContextVar("found", default=None)


@contextlib.contextmanager
def found_names() -> Iterator[dict[str, jax.Array]]:
    """A dict of what is tagged while it lasts, by name: values of the trace under way, which may return them.

    Of one block under no checkpoint and with the naive attention kernel: what is tagged in an inner trace, such as that
    of a loop or of a function with a gradient of its own, is not to be read outside of it.
    """
    found: dict[str, jax.Array] = {}
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)
