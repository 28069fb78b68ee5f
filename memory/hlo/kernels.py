"""The table of custom calls, and the opcodes of matrix products.

`CALLS` is the only place that knows the targets of custom calls. To add a library or a kernel language, add a row.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from bytescope.memory.records.schedule_records import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, FOREIGN, PRODUCT

# Opcodes of matrix products and convolutions; with custom calls, which may compute one; and with look-ups, which read a
# weight like a matrix product does.
PRODUCTS = frozenset(("dot", "ragged-dot", "convolution"))
PRODUCTS_AND_CALLS = PRODUCTS | {"custom-call"}
WEIGHT_READERS = PRODUCTS_AND_CALLS | {"gather"}

# Kinds of custom calls besides kernels of `schedule_records`: a mark of the compiler, which launches nothing, and a
# call that computes no matrix product as far as its target says.
MARK, OTHER = "mark", ""
CUBLAS, CUDNN = "cublas", "cudnn"
# Marks of a move to host memory: for each move to or from the host early in the compiler, for each move to the host
# later.
DEVICE_PLACEMENT, MOVE_TO_HOST = "annotate_device_placement", "MoveToHost"
# Beginnings of targets that only the compiler of one platform writes.
PLATFORM_TARGETS = {"gpu": ("__cublas$", "__cudnn$"), "tpu": ("tpu_custom_call",), "cpu": ("__ynn_fusion", "__onednn$")}


@dataclasses.dataclass(frozen=True, slots=True)
class CustomCall:
    """A row of `CALLS`: what the target of a custom call says about its kernel.

    Fields:
        pattern: regular expression that is searched in the target.
        kind: PRODUCT, CONVOLUTION, ATTENTION, ATTENTION_BACKWARD, FOREIGN (a kernel whose work is unknown), MARK or
            OTHER.
        library: the library that has the kernel, CUBLAS or CUDNN; "" for others.
        gradient: for a convolution, the operand whose gradient it computes, "input" or "filter"; "" for the forward
            pass.
        own_gradient: whether the kernel has a gradient of its own, whose residuals have no checkpoint name.
        lacks_workspace: whether the call's workspace is missing from the compiler's report without a GPU
            (`peak.runtime_overheads.workspace_bytes`). Other workspaces are results of the call.
    """

    pattern: str
    kind: str = OTHER
    library: str = ""
    gradient: str = ""
    own_gradient: bool = False
    lacks_workspace: bool = False

    @property
    def is_product(self) -> bool:
        """Whether the call may compute a matrix product or a convolution."""
        return self.kind not in (MARK, OTHER)


# The first row whose pattern is found decides.
CALLS = (
    CustomCall(rf"^(AllocateBuffer|{MOVE_TO_HOST}|MoveToDevice|{DEVICE_PLACEMENT}|Sharding)$", MARK),
    CustomCall(r"^__cudnn\$fmhaSoftmaxBackward$", ATTENTION_BACKWARD, CUDNN, own_gradient=True, lacks_workspace=True),
    CustomCall(r"^__cudnn\$fmha.*Backward", ATTENTION_BACKWARD, CUDNN, own_gradient=True),
    CustomCall(r"^__cudnn\$fmha", ATTENTION, CUDNN, own_gradient=True),
    CustomCall(r"^__cudnn\$conv.*BackwardInput", CONVOLUTION, CUDNN, "input", own_gradient=True),
    CustomCall(r"^__cudnn\$conv.*BackwardFilter", CONVOLUTION, CUDNN, "filter", own_gradient=True),
    CustomCall(r"^__cudnn\$conv", CONVOLUTION, CUDNN, own_gradient=True),
    CustomCall(r"^__cudnn\$", FOREIGN, CUDNN, own_gradient=True),
    CustomCall(r"cublas.*(gemm|matmul)", PRODUCT, CUBLAS),
    CustomCall(r"cublas", FOREIGN, CUBLAS),
    CustomCall(r"cudnn", FOREIGN, CUDNN),
    CustomCall(r"^(__gpu\$xla\.gpu\.triton|triton_kernel_call|tpu_custom_call|mosaic_gpu)", FOREIGN, own_gradient=True),
    CustomCall(r"gemm|matmul", PRODUCT),
    CustomCall(r"conv|fmha|attention|triton|tpu_custom_call|mosaic", FOREIGN),
    CustomCall(r""),
)


@functools.cache
def custom_call(target: str) -> CustomCall:
    """Returns the row of `CALLS` for the target of a custom call."""
    return next(row for row in CALLS if re.search(row.pattern, target, re.I))


def kernel_label(name: str) -> str:
    """Returns the name of an instruction as XLA writes it in the name of its kernel."""
    return name.replace(".", "_").replace("-", "_")
