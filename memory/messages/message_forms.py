"""The forms of messages about memory that JAX, XLA, TensorFlow and PyTorch print: kind, severity, and what happened.

The grammar of each form, with the versions that print it, is in the reader of the form (message_readers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Kinds of messages, the ones that contain the most first. A log has the kind of its richest message.
KINDS = (
    "gpu_buffers",
    "tpu_hbm",
    "bfc",
    "allocator_other",
    "plain",
    "torch_cuda",
    "remat_warning",
    "spmd",
    "donation",
)


class Form(NamedTuple):
    """A form of messages.

    Fields:
        name: its name in a list.
        kind: one of `KINDS`.
        failure: whether the message is an error; False for warnings and for lines that are not a failure.
        sentence: what happened, with names of figures in braces ("{requested}") and words ("{space}"). A sentence is
            used only if the message contains all of its names.
        short: what happened, for a message that lacks a figure of `sentence`.
    """

    name: str
    kind: str
    failure: bool
    sentence: str
    short: str


FORMS: Mapping[str, Form] = {
    "gpu_buffers": Form(
        "list of buffers",
        "gpu_buffers",
        True,
        "XLA could not allocate {requested} on the GPU for a compiled program, and listed the program's buffers.",
        "XLA ran out of GPU memory for a compiled program, and listed the program's buffers.",
    ),
    "gpu_request": Form(
        "failed request",
        "plain",
        True,
        "XLA could not allocate {requested} on the device.",
        "XLA could not allocate memory on the device; the size of the request is cut off.",
    ),
    "bare_code": Form(
        "RESOURCE_EXHAUSTED",
        "plain",
        True,
        "RESOURCE_EXHAUSTED was raised. The log contains no size and no name.",
        "RESOURCE_EXHAUSTED was raised. The log contains no size and no name.",
    ),
    "gpu_platform": Form(
        "failed request of the driver",
        "plain",
        True,
        "The driver of device {device} refused {requested}. This request went to the driver itself, not to a pool.",
        "The driver refused a request. It went to the driver itself, not to a pool.",
    ),
    "picker": Form(
        "failed measurement of algorithms",
        "plain",
        True,
        "XLA measured algorithms for a convolution or matmul, and their workspace of {requested} could not be "
        "allocated.",
        "XLA measured algorithms for a convolution or matmul, and their workspace could not be allocated.",
    ),
    "cpu_request": Form(
        "failed request on the CPU",
        "plain",
        True,
        "The CPU backend could not allocate {requested} of host memory.",
        "The CPU backend could not allocate host memory.",
    ),
    "xla_host": Form(
        "full pool of host memory",
        "plain",
        True,
        "XLA's pool of pinned host memory is full: {requested} could not be allocated.",
        "XLA's pool of pinned host memory is full.",
    ),
    "tpu_table": Form(
        "program too large for the TPU",
        "tpu_hbm",
        True,
        "The compiler refused a program: it needs {requested}, and the {space} of a TPU core has {limit}.",
        "The compiler refused a program: it needs more memory than a TPU core has.",
    ),
    "tpu_scoped": Form(
        "kernel too large for the TPU",
        "tpu_hbm",
        True,
        "A kernel asked for {requested} of on-chip memory; its limit is {limit}.",
        "A kernel asked for more on-chip memory than its limit.",
    ),
    "tpu_sparse_core": Form(
        "program too large for the TPU",
        "tpu_hbm",
        True,
        "The compiler refused a program: TensorCore and SparseCore need {requested}, and {limit} are available.",
        "The compiler refused a program: TensorCore and SparseCore need more memory than is available.",
    ),
    "tpu_single": Form(
        "buffer too large for the TPU",
        "tpu_hbm",
        True,
        "One buffer of {requested} is larger than the whole memory of {limit}.",
        "One buffer is larger than the whole memory.",
    ),
    "tpu_allocate": Form(
        "failed request of the TPU runtime",
        "plain",
        True,
        "The TPU runtime could not place an array of {requested}; {free} were free.",
        "The TPU runtime could not place an array.",
    ),
    "tpu_reserve": Form(
        "failed request of the TPU runtime",
        "plain",
        True,
        "The TPU runtime could not reserve {requested} to load a program; {free} were free.",
        "The TPU runtime could not reserve memory to load a program.",
    ),
    "tpu_available": Form(
        "failed request of the TPU runtime",
        "plain",
        True,
        "The TPU runtime could not allocate {requested}; the largest piece that it can allocate is {largest}.",
        "The TPU runtime could not allocate memory.",
    ),
    "bfc": Form(
        "line of the pool",
        "bfc",
        True,
        "The memory pool {allocator} could not provide {requested}.",
        "A memory pool of XLA (BFC allocator) ran out of memory.",
    ),
    "bfc_no_failure": Form(
        "line of the pool that is not a failure",
        "bfc",
        False,
        "The memory pool {allocator} could not provide {asked}. The caller then used less memory: this is not a "
        "failure.",
        "A memory pool could not provide optional memory: this is not a failure.",
    ),
    "bfc_dump": Form(
        "list of the pool's chunks",
        "bfc",
        True,
        "The memory pool ran out of memory with {in_use} of {limit} in use.",
        "The memory pool ran out of memory, and its chunks were listed.",
    ),
    "cuda_async": Form(
        "line of CUDA's allocator",
        "allocator_other",
        True,
        "CUDA's asynchronous allocator could not provide {requested}; the GPU has {card}, of which {free} were free.",
        "CUDA's asynchronous allocator could not provide memory.",
    ),
    "pinned_host": Form(
        "refused pinned host memory",
        "allocator_other",
        True,
        "The driver refused {requested} of pinned host memory. This is memory of the computer, not of the GPU.",
        "The driver refused pinned host memory. This is memory of the computer, not of the GPU.",
    ),
    "driver": Form(
        "refusal of the driver",
        "allocator_other",
        True,
        "The CUDA driver refused {requested} of device memory outside XLA's pool.",
        "The CUDA driver refused device memory outside XLA's pool.",
    ),
    "nccl_memory": Form(
        "error of NCCL",
        "allocator_other",
        True,
        "NCCL ran out of GPU memory. It allocates its buffers outside XLA's pool.",
        "NCCL ran out of GPU memory. It allocates its buffers outside XLA's pool.",
    ),
    "cudnn_memory": Form(
        "error of a CUDA library",
        "allocator_other",
        True,
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not allocate its memory outside XLA's pool.",
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not allocate its memory outside XLA's pool.",
    ),
    "library_start": Form(
        "start of a CUDA library that failed",
        "allocator_other",
        True,
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not start or found no algorithm that runs. The log does "
        "not say "
        "why; usually no memory is left outside XLA's pool.",
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not start or found no algorithm that runs. The log does "
        "not say "
        "why; usually no memory is left outside XLA's pool.",
    ),
    "library_other": Form(
        "error of a CUDA library",
        "allocator_other",
        True,
        "{library} failed. The log does not say that memory was missing.",
        "A CUDA library failed. The log does not say that memory was missing.",
    ),
    "vmm_budget": Form(
        "full budget of XLA's allocator",
        "allocator_other",
        True,
        "XLA's virtual-memory allocator reached its budget of {limit} with a request of {requested}.",
        "XLA's virtual-memory allocator reached its budget.",
    ),
    "torch_cuda": Form(
        "out-of-memory error of PyTorch",
        "torch_cuda",
        True,
        "This is PyTorch's error, not JAX's: PyTorch tried to allocate {requested} on a GPU of {limit}.",
        "This is PyTorch's error, not JAX's.",
    ),
    "remat": Form(
        "rematerialization warning",
        "remat_warning",
        False,
        "A warning of the compiler: the program's temporary memory and results take {total}, and recomputing "
        "cannot bring "
        "them below the budget of {limit}. The run may still succeed.",
        "A warning of the compiler: recomputing cannot bring the program's memory below its budget.",
    ),
    "remat_budget": Form(
        "budget warning",
        "remat_warning",
        False,
        "A warning of the compiler: arguments and results alone take {total}, more than its whole budget of {limit}.",
        "A warning of the compiler: arguments and results alone take more than its whole budget.",
    ),
    "spmd": Form(
        "warning of full rematerialization",
        "spmd",
        False,
        "A warning of the compiler: a tensor has to change its sharding in a way that needs the whole tensor of "
        "{whole} on "
        "every device.",
        "A warning of the compiler: a tensor has to change its sharding, and for this it is made whole on every "
        "device.",
    ),
    "donation": Form(
        "warning of unusable donation",
        "donation",
        False,
        "A warning of JAX: donated arguments of {total} could not be reused, because no result has their shape "
        "and dtype.",
        "A warning of JAX: donated arguments could not be reused, because no result has their shape and dtype.",
    ),
    "constants": Form(
        "warning of captured constants",
        "donation",
        False,
        "A warning of JAX: {total} of arrays are captured in a jitted function as constants.",
        "A warning of JAX: arrays are captured in a jitted function as constants.",
    ),
    "not_memory": Form(
        "limit of something else than memory",
        "plain",
        True,
        "RESOURCE_EXHAUSTED here is a limit of {quota}, not of memory.",
        "RESOURCE_EXHAUSTED here is a limit of something else than memory.",
    ),
}
