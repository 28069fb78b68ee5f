"""Bytes of the workspace of cuDNN's attention, which a compile without a GPU does not contain.

With a GPU, XLA asks cuDNN for the workspace of each call and adds it to the call's results as an array of bytes.
Without one, that array has 0 bytes, and the workspace is missing from the compiler's report. Backward calls have the
only large one (cudnn-frontend, node/scaled_dot_product_flash_attention.h): float32 gradients of the queries (dQ_accum),
float32 sums of the softmax (softmax_sum), and, if several query heads share a key, 16-bit gradients of keys and values
of every query head (dK_fullhead, dV_fullhead). The forward call has 256 bytes.

Checked on an H100 with jax 0.11.2 and cuDNN 9.19 (tests/gpu/measured): to the byte in 7 shapes, with heads of 64 and
128 features, with and without shared keys.
"""

import math

from bytescope.memory.hlo.loops import backend_config
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.records.buffer_records import PeakAccount

BACKWARD = "__cudnn$fmhaSoftmaxBackward"
_ALIGNMENT = 256  # bytes that cuDNN adds
_BACKEND, _SCORES = "cudnn_fmha_backend_config", "intermediate_tensor_shape"


def beyond_peak(module: Module, account: PeakAccount) -> int:
    """Returns the bytes by which the peak on one device grows if each backward call has its workspace; 0 if the calls
    have it already, or run when little else is alive.

    module: the compiled program. account: its memory timeline.
    """
    sizes = {
        instruction.name: workspace_bytes(module, instruction)
        for instruction in module.instructions.values()
        if instruction.target == BACKWARD
    }
    needed = (point.bytes + sizes.get(point.instruction, 0) for point in account.timeline)
    return max(max(needed, default=0) - account.peak_bytes, 0)


def workspace_bytes(module: Module, instruction: Instruction) -> int:
    """Returns the bytes of the workspace that a backward call of cuDNN's attention lacks; 0 if the call has one, or if
    its shapes are not those of such a call.

    Results of the call: the gradients of queries [B, N, T, H], keys and values [B, K, S, H], in 16 bits.
    """
    results = [leaf for _, leaf in leaves(module.shape(instruction))]
    if len(results) < 3 or any(_is_workspace(leaf) for leaf in results):
        return 0
    scores = backend_config(module, instruction).get(_BACKEND, {}).get(_SCORES, {}).get("dimensions", [])
    if len(scores) != 4:
        return 0
    batch, heads, queries, keys = map(int, scores)
    query_gradient, key_gradient, value_gradient = (math.prod(leaf.dims) for leaf in results[:3])
    width, value_width = (
        gradient // max(batch * keys, 1) // max(_heads(query_gradient, key_gradient, queries, keys, heads), 1)
        for gradient in (key_gradient, value_gradient)
    )
    shared = batch * heads * keys * (width + value_width) * 2
    is_shared = key_gradient * queries < query_gradient * keys
    return 4 * query_gradient + 4 * batch * heads * queries + (shared if is_shared else 0) + _ALIGNMENT


def _is_workspace(leaf: HloShape) -> bool:
    return leaf.dtype in ("uint8", "int8") and math.prod(leaf.dims) > 0


def _heads(query_gradient: int, key_gradient: int, queries: int, keys: int, heads: int) -> int:
    """Returns the number of key heads, from the sizes of the gradients (queries and keys have the same features)."""
    return heads * key_gradient * queries // max(query_gradient * keys, 1)
