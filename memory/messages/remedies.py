"""The remedies for each cause of a failed allocation, the cheapest first.

A remedy names only functions, variables and flags that exist in the jax and jaxlib that the project supports
(`Remedy.uses`); a test looks each of them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Annotated

from bytescope.memory.allocators.pinned_pool import DEFAULT_GIB
from bytescope.memory.devices.platform import JAX_FRACTION, MEMORY_FRACTION
from bytescope.memory.records.result import INTERNAL


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A remedy for a failed allocation.

    Fields:
        words: advice to the user in one to three sentences.
        uses: names of the functions, environment variables and flags of JAX and XLA that occur in `words`.
        saves: key of `Explanation.savings` for the bytes that the remedy can free, such as "logits"; "" if the message
            does not show how many bytes the remedy frees.
        bytes: maximum bytes on one device that the remedy frees; None if unknown.
        flags: the command-line flags that apply the remedy, "" if there are none.
    """

    words: str
    uses: tuple[str, ...] = ()
    saves: Annotated[str, INTERNAL] = ""
    bytes: int | None = None
    flags: str = ""


REMEDIES: Mapping[str, Remedy] = {
    "larger_pool": Remedy(
        f"If no other process needs the GPU, set XLA_CLIENT_MEM_FRACTION={MEMORY_FRACTION} before JAX starts. Its "
        "default is 0.75 of the GPU's memory.",
        ("XLA_CLIENT_MEM_FRACTION",),
        "pool",
    ),
    "smaller_pool": Remedy(
        "Leave more memory outside the pool: set XLA_CLIENT_MEM_FRACTION=0.7, or less, before JAX starts.",
        ("XLA_CLIENT_MEM_FRACTION",),
    ),
    "checkpoint": Remedy(
        "Recompute activations: put jax.checkpoint around each layer, with policy="
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable to recompute less.",
        ("jax.checkpoint", "jax.checkpoint_policies.dots_with_no_batch_dims_saveable"),
        "saved",
    ),
    "flash": Remedy(
        'Do not store attention scores: jax.nn.dot_product_attention(..., implementation="cudnn") on a GPU, a '
        "flash or splash attention kernel on a TPU.",
        ("jax.nn.dot_product_attention",),
        "scores",
    ),
    "chunk_loss": Remedy(
        "Compute the loss over parts of the tokens: jax.lax.map(..., batch_size=N) around jax.checkpoint of the output "
        "layer and the loss. Keep the logits in bfloat16.",
        ("jax.lax.map", "jax.checkpoint"),
        "logits",
    ),
    "parts": Remedy(
        "Compute the largest tensor in parts: jax.lax.map(..., batch_size=N) or jax.lax.scan over one of its axes.",
        ("jax.lax.map", "jax.lax.scan"),
    ),
    "batch": Remedy(
        "Make the batch per device smaller, and accumulate gradients over several batches to keep the number of "
        "examples per update.",
    ),
    "smaller_input": Remedy(
        "Make the input smaller: shorten the sequence or crop the image. Attention scores grow with the square of the "
        "length.",
    ),
    "bfloat16": Remedy(
        "Compute in jax.numpy.bfloat16 instead of float32: activations take half the bytes.", ("jax.numpy.bfloat16",)
    ),
    "shard_activation": Remedy(
        "Shard the largest tensors over more devices: jax.lax.with_sharding_constraint.",
        ("jax.lax.with_sharding_constraint",),
    ),
    "padding_layout": Remedy(
        "Give the last two dimensions sizes near multiples of 8 and 128: move a large dimension to the end, or merge "
        "a small last dimension with the one before it. A last dimension of 1 or 2 is padded to 128.",
        (),
        "padding",
    ),
    "donate": Remedy(
        "Donate the arguments that the results replace: jax.jit(step, donate_argnums=0).",
        ("jax.jit",),
        "outputs",
    ),
    "fewer_outputs": Remedy(
        "Return less from the program: sums or the last value instead of every intermediate result."
    ),
    "shard_state": Remedy(
        "Shard parameters and optimizer state over the devices: jax.sharding.NamedSharding in out_shardings of the "
        "jax.jit that creates them.",
        ("jax.sharding.NamedSharding", "jax.jit"),
    ),
    "abstract_init": Remedy(
        "Create the parameters sharded: jax.eval_shape finds their shapes, jax.jit(init, out_shardings=...) creates "
        "each shard on its device.",
        ("jax.eval_shape", "jax.jit"),
    ),
    "partitionable": Remedy(
        'Set jax.config.update("jax_threefry_partitionable", True), so that each device creates only the random bits '
        "of its own shard.",
        ("jax.config.update", "jax_threefry_partitionable"),
    ),
    "small_state": Remedy(
        "Use an optimizer with less state (optax.adafactor, optax.lion), or a smaller model.",
        ("optax.adafactor", "optax.lion"),
    ),
    "host_offload": Remedy(
        'Keep the optimizer state in host memory: a jax.sharding.NamedSharding with memory_kind="pinned_host".',
        ("jax.sharding.NamedSharding",),
    ),
    "constraint": Remedy(
        "Give the tensor the same sharding where it is made and where it is used: jax.lax.with_sharding_constraint "
        "between the two places, or equal out_shardings and in_shardings of the two programs.",
        ("jax.lax.with_sharding_constraint",),
        "whole",
    ),
    "as_argument": Remedy(
        "Pass the arrays as arguments of the jitted function. Then the program contains no copy of them, and they can "
        "be donated and sharded.",
        (),
        "constants",
    ),
    "donate_less": Remedy(
        "Donate only arguments that a result replaces, with the same shape, dtype and sharding: select them with "
        "donate_argnums of jax.jit.",
        ("jax.jit",),
    ),
    "delete": Remedy(
        "Delete arrays that are no longer needed: old states, lists of results, arrays of a notebook. "
        "jax.live_arrays() lists them, array.delete() frees one.",
        ("jax.live_arrays",),
    ),
    "one_program": Remedy("Free the first model or step before you load the second, or restart the notebook's kernel."),
    "other_process": Remedy(
        "Look for other processes on the GPU with nvidia-smi, and end those you do not need. Give each of your "
        "processes its own GPU with CUDA_VISIBLE_DEVICES, or with local_device_ids of jax.distributed.initialize.",
        ("jax.distributed.initialize",),
    ),
    "preallocate": Remedy(
        "Let the pool take its memory at the start, in one piece: do not set XLA_PYTHON_CLIENT_PREALLOCATE=false.",
        ("XLA_PYTHON_CLIENT_PREALLOCATE",),
    ),
    "cuda_async": Remedy(
        "Use CUDA's own allocator, which can serve a request from separate free blocks: set "
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async.",
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async"),
    ),
    "same_shapes": Remedy(
        "Use few different shapes: pad batches to the same lengths, and free large arrays in the order in which they "
        "were made.",
    ),
    "autotune": Remedy(
        "If only autotuning failed (the measurement of algorithms), the run may continue. "
        "XLA_FLAGS=--xla_gpu_autotune_level=0 turns autotuning off; kernels may then be slower.",
        ("XLA_FLAGS", "--xla_gpu_autotune_level"),
    ),
    "host_limit": Remedy(
        f"XLA pins at most {DEFAULT_GIB} GB of host memory; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB sets another limit.",
        ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",),
    ),
    "host_pieces": Remedy(
        "Move data to the device in smaller pieces: one batch at a time with jax.device_put instead of the whole "
        "data set.",
        ("jax.device_put",),
    ),
    "host_rules": Remedy(
        "Check the computer's free memory, `ulimit -l` and the memory limit of the container. WSL2 pins only a part "
        "of the memory; memory= in .wslconfig raises it.",
    ),
    "vmem": Remedy(
        "Make the kernel's blocks smaller. In your own Pallas kernel, raise the limit with "
        "vmem_limit_bytes of jax.experimental.pallas.tpu.CompilerParams.",
        ("jax.experimental.pallas.tpu.CompilerParams", "vmem_limit_bytes"),
    ),
    "scalar_inputs": Remedy(
        "Make the kernel's scalar inputs smaller. The page table of an attention kernel shrinks with the number of "
        "pages and with the maximum sequence length.",
    ),
    "wait": Remedy("Do nothing unless the run fails: it may still succeed."),
    "nothing": Remedy("No change of memory settings is needed."),
    "nccl_debug": Remedy("Set NCCL_DEBUG=INFO to see why the library failed."),
    "look_before": Remedy("Read the lines before this error: the first exception usually shows the cause."),
    "torch": Remedy(
        f"JAX and PyTorch share this GPU, and JAX's pool takes {100 * JAX_FRACTION.value:g} % of it by default. If the "
        "model runs in PyTorch, set XLA_PYTHON_CLIENT_PREALLOCATE=false or JAX_PLATFORMS=cpu. "
        "The message names PyTorch's own settings.",
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS"),
    ),
}

# Cause -> remedies, the cheapest first.
BY_CAUSE: Mapping[str, tuple[str, ...]] = {
    "saved_activations": ("checkpoint", "batch", "bfloat16", "shard_activation"),
    "attention_scores": ("flash", "checkpoint", "batch"),
    "logits": ("chunk_loss", "shard_activation", "batch"),
    "large_tensor": ("smaller_input", "batch", "parts", "shard_activation"),
    "padding": ("padding_layout", "batch"),
    "outputs": ("donate", "fewer_outputs", "shard_state"),
    "weights_and_state": ("donate", "shard_state", "small_state", "host_offload"),
    "replicated_tensor": ("constraint", "shard_activation"),
    "captured_constant": ("as_argument",),
    "unusable_donation": ("donate_less",),
    "device_full": ("delete", "one_program", "batch", "shard_state"),
    "fragmentation": ("preallocate", "same_shapes", "cuda_async", "batch"),
    "other_process": ("other_process", "larger_pool"),
    "outside_pool": ("smaller_pool", "autotune"),
    "host_memory": ("host_pieces", "host_rules", "host_limit"),
    "on_chip_memory": ("vmem",),
    "no_memory_problem": ("nothing",),
    "unknown": ("larger_pool", "checkpoint", "batch"),
}
# (cause, form of the message or memory space) -> remedies, which replace the remedies in `BY_CAUSE`.
BY_FORM: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("replicated_tensor", "gpu_buffers"): ("abstract_init", "partitionable", "shard_activation"),
    ("fragmentation", "tpu_allocate"): ("delete", "same_shapes", "batch"),
    ("fragmentation", "tpu_reserve"): ("delete", "same_shapes", "batch"),
    ("fragmentation", "tpu_available"): ("delete", "same_shapes", "batch"),
    ("fragmentation", "cuda_async"): ("same_shapes", "delete", "batch"),
    ("outside_pool", "nccl_memory"): ("smaller_pool", "nccl_debug"),
    ("outside_pool", "cudnn_memory"): ("smaller_pool", "batch"),
    ("outside_pool", "library_start"): ("smaller_pool", "other_process", "look_before"),
    ("host_memory", "cpu_request"): ("batch", "parts", "host_rules"),
    ("no_memory_problem", "remat"): ("wait",),
    ("no_memory_problem", "library_other"): ("nccl_debug", "look_before"),
    ("no_memory_problem", "gpu_request"): ("look_before",),
    ("no_memory_problem", "not_memory"): ("look_before",),
    ("saved_activations", "remat"): ("wait", "donate", "checkpoint", "batch"),
    ("unknown", "bare_code"): ("look_before", "batch"),
    ("unknown", "gpu_platform"): ("other_process", "delete", "batch"),
    ("unknown", "tpu_table"): ("checkpoint", "batch", "shard_state"),
    ("unknown", "torch_cuda"): ("torch",),
    ("large_tensor", "tpu_single"): ("parts", "shard_activation"),
    ("on_chip_memory", "smem"): ("scalar_inputs", "vmem"),
}


# Remedies for one kind of tensor. They come first for these causes if the message lists such a tensor.
_BY_TENSOR = ("flash", "chunk_loss")
_TENSOR_CAUSES = frozenset(("saved_activations", "attention_scores", "logits", "large_tensor"))


# Causes that a larger pool may remove.
_POOL_CAUSES = _TENSOR_CAUSES | {"weights_and_state", "outputs", "device_full", "fragmentation", "unknown"}


def remedies_for(
    cause: str, form: str, space: str = "", listed: Container[str] = (), default_pool: bool = False
) -> tuple[Remedy, ...]:
    """Returns the remedies for a cause, cheapest first. Up to three come before all others: a larger pool, if
    `default_pool` is true and the pool can be the cause, and the remedies for attention scores and for logits, if they
    are in `listed` and are not remedies of the cause anyway.

    cause: a key of `BY_CAUSE`. form: the form of the explained message, such as "gpu_request" (`message_forms.FORMS`).
    space: the memory space of a TPU, such as "vmem"; "" if unknown. listed: keys of `Explanation.savings`, such as
    "logits" if the message lists logits. default_pool: whether the log shows that JAX's pool had its default size.
    """
    names = BY_FORM.get((cause, space)) or BY_FORM.get((cause, form)) or BY_CAUSE[cause]
    added = _BY_TENSOR if cause in _TENSOR_CAUSES else ()
    first = [name for name in added if name not in names and REMEDIES[name].saves in listed]
    if default_pool and cause in _POOL_CAUSES:
        first, names = ["larger_pool", *first], tuple(name for name in names if name != "larger_pool")
    return tuple(REMEDIES[name] for name in (*first, *names))
