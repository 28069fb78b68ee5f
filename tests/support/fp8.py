"""What fp8 keeps of the inputs of products, by hand."""

from bytescope.model.fp8.products import TILE
from support.toy import small_program

INPUTS = ("attn_norm", "context", "mlp_norm", "act")  # of products, as wide tensors are named


def expected(overrides, tokens):
    """Bytes of the inputs of products in one layer: (elements, scales of 4 bytes) by name."""
    model = small_program(overrides).model
    widths = dict(zip(INPUTS, (model.d_model, model.n_heads * model.d_head, model.d_model, model.d_ff)))
    return {name: (tokens * width, 4 * tokens * -(-width // TILE)) for name, width in widths.items()}
