"""The forms of messages about memory that JAX, XLA, TensorFlow and PyTorch print: kind, severity, and what happened.

All messages that one line of a library's code can print have the same form. The text by which a form is recognized is
in message_readers.py, and a phrase of it in log_text.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Kinds of messages, the most informative kind first. A log has the kind of its most informative message.
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
    """Messages about memory that differ only in their sizes and names, such as "Out of memory while trying to allocate
    N bytes." for any N.

    Fields:
        name: short name of the messages, for lists.
        kind: the kind of the messages, one of `KINDS`.
        failure: whether the messages are errors; False for warnings and for requests that may fail.
        sentence: what happened, with placeholders for sizes and names in the message, such as "{requested}". The
            sentence is used only if the message contains all of them.
        short: what happened, without placeholders, for a message that does not contain all of them.
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
        "XLA could not allocate {requested} on the GPU for a compiled program, and printed the program's memory.",
        "XLA ran out of GPU memory for a compiled program, and printed the program's memory.",
    ),
    "gpu_request": Form(
        "failed request",
        "plain",
        True,
        "XLA could not allocate {requested} on the device.",
        "XLA could not allocate memory on the device. The size of the request is missing in the log.",
    ),
    "bare_code": Form(
        "error code",
        "plain",
        True,
        "The log contains only the code of an out-of-memory error, without a size.",
        "The log contains only the code of an out-of-memory error, without a size.",
    ),
    "gpu_platform": Form(
        "failed request without a pool",
        "plain",
        True,
        "The GPU driver could not allocate {requested} on device {device}. XLA requested it without a memory pool.",
        "The GPU driver could not allocate memory, which XLA requested without a memory pool.",
    ),
    "picker": Form(
        "failed autotuning",
        "plain",
        True,
        "XLA measured algorithms for a convolution or matmul (autotuning), and could not allocate their workspace "
        "of {requested}.",
        "XLA measured algorithms for a convolution or matmul (autotuning), and could not allocate their workspace.",
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
        "The compiler refused a program: it needs {requested} of {space} memory, and a TPU core has {limit}.",
        "The compiler refused a program: it needs more memory than a TPU core has.",
    ),
    "tpu_scoped": Form(
        "kernel too large for the TPU",
        "tpu_hbm",
        True,
        "A kernel requested {requested} of on-chip memory; its limit is {limit}.",
        "A kernel requested more on-chip memory than its limit allows.",
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
        "One buffer of {requested} is larger than the TPU's whole memory of {limit}.",
        "One buffer is larger than the TPU's whole memory.",
    ),
    "tpu_allocate": Form(
        "failed request of the TPU runtime",
        "plain",
        True,
        "The TPU runtime could not allocate an array of {requested}; {free} were free.",
        "The TPU runtime could not allocate an array.",
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
        "The TPU runtime could not allocate {requested}; the largest free block has {largest}.",
        "The TPU runtime could not allocate memory.",
    ),
    "bfc": Form(
        "failed request of a memory pool",
        "bfc",
        True,
        "The memory pool {allocator} could not provide {requested}.",
        "A memory pool of XLA (BFC allocator) ran out of memory.",
    ),
    "bfc_no_failure": Form(
        "failed optional request of a memory pool",
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
        "failed request of cuda_async",
        "allocator_other",
        True,
        "CUDA's asynchronous allocator could not provide {requested}; the GPU has {card}, of which {free} were free.",
        "CUDA's asynchronous allocator could not provide memory.",
    ),
    "pinned_host": Form(
        "failed request of pinned host memory",
        "allocator_other",
        True,
        "The driver could not allocate {requested} of pinned host memory (memory of the computer, not of the GPU).",
        "The driver could not allocate pinned host memory (memory of the computer, not of the GPU).",
    ),
    "driver": Form(
        "failed request of the CUDA driver",
        "allocator_other",
        True,
        "The CUDA driver could not allocate {requested} of GPU memory outside XLA's pool.",
        "The CUDA driver could not allocate GPU memory outside XLA's pool.",
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
        "failed start of a CUDA library",
        "allocator_other",
        True,
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not start or found no algorithm that runs. The log does "
        "not show why; usually too little memory is left outside XLA's pool.",
        "A CUDA library (cuDNN, cuBLAS, cuSOLVER) could not start or found no algorithm that runs. The log does "
        "not show why; usually too little memory is left outside XLA's pool.",
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
        "cannot bring them below the budget of {limit}. The run may still succeed.",
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
        "{whole} on every device.",
        "A warning of the compiler: to change the sharding of a tensor, it makes the whole tensor on every device.",
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
        "RESOURCE_EXHAUSTED that is not about memory",
        "plain",
        True,
        'RESOURCE_EXHAUSTED refers to "{quota}" here, not to memory.',
        "RESOURCE_EXHAUSTED refers to another limit than memory here.",
    ),
}
