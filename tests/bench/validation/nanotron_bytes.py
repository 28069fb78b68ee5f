"""The bytes that nanotron holds on a GPU in a run without pipeline stages, as a sum of terms read from its source code.

The sum explains the difference between our bytes and the measured bytes: each term says whether our program has it.
Two versions of nanotron are described: the one of the Playbook's runs (branch nouamane/bench2, December 2024,
`tp_linear_async_communication` and `tp_recompute_allgather`) and the one of old_bench (branch bench_cluster, May 2024,
no asynchronous communication). Files are those of github.com/huggingface/nanotron, src/nanotron.

The sum is of allocated bytes at the loss of a micro-batch, when the saved tensors of all layers exist. torch reserves
more. `reserved_terms` has the two known reasons with their maximum: they are no part of the sum, because how much of
them is reserved depends on when the host and the device run.

Outcomes were known when this module was written: the reserved bytes of the Playbook's runs, and the allocated and
reserved bytes of old_bench.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_SEQ_LEN = 4096
_MIB = 1 << 20
# Workspaces of cuBLAS on an H100, 32 MiB each: one for the thread of the forward pass, and one for the thread of the
# backward pass. torch's allocator provides them (pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp).
_WORKSPACES = 2 * 32 * _MIB


@dataclasses.dataclass(frozen=True)
class ByteTerm:
    """A part of nanotron's bytes on one GPU.

    Attributes:
        name: what the bytes contain.
        bytes: number of bytes.
        ours: whether our program has these bytes too.
        source: the lines of source code from which the term was read.
    """

    name: str
    bytes: int
    ours: bool
    source: str


@dataclasses.dataclass(frozen=True)
class NanotronRun:
    """A run of nanotron without pipeline stages.

    Attributes:
        layers, width, heads, mlp: number of layers, width, attention heads and width of the MLP.
        tied: whether the embedding and the head share their weights.
        vocab: size of the vocabulary.
        data, tensor: number of data-parallel ranks, and size of the tensor-parallel group.
        zero: ZeRO stage, 0 or 1.
        micro: sequences of 4096 tokens per micro-batch.
        asynchronous: True for the version of the Playbook's runs, False for the version of old_bench.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    tied: bool
    vocab: int
    data: int
    tensor: int
    zero: int
    micro: int
    asynchronous: bool

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, without norms."""
        matrices = self.layers * (4 * self.width * self.width + 3 * self.width * self.mlp)
        return matrices + self.vocab * self.width * (1 if self.tied else 2)

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch, which the ranks of a tensor-parallel group share."""
        return self.micro * _SEQ_LEN


def terms(run: NanotronRun) -> tuple[ByteTerm, ...]:
    """Returns the parts of the bytes that nanotron allocates on one GPU at the loss of a micro-batch.

    Terms of zero bytes are left out.
    """
    layers, h, f, n, tokens = run.layers, run.width, run.mlp, run.tensor, run.tokens
    weights = run.parameters // n
    split = n > 1
    found: list[ByteTerm] = []

    def add(name: str, count: float, ours: bool, source: str) -> None:
        if count:
            found.append(ByteTerm(name, int(count), ours, source))

    add("bfloat16 parameters, float32 gradient sums", 6 * weights, True, "optim/gradient_accumulator.py")
    add("masters and moments", 12 * weights // (run.data if run.zero else 1), True, "optim/zero.py")
    ddp = run.data > 1 and not run.zero
    add("gradient buckets of DDP", 2 * weights if ddp else 0, True, "trainer.py: make_ddp")
    saved = layers * tokens * (16 * h + 6 * f + 4 * run.heads + 8) / n
    add("tensors saved by layers", saved, True, "models/llama.py; the same as our policy selective")
    more = layers * tokens * (4 * h + 2 * f) / n
    add(
        "storage of all three projections, silu(gate)",
        more,
        False,
        "models/llama.py: CausalSelfAttention, GLUActivation",
    )
    add("logits in float32, twice", 8 * run.vocab * tokens / n, True, "parallel/tensor_parallel/functional.py")
    add("input and result of the last norm", 4 * h * tokens / n, True, "nn/layer_norm.py")
    if run.asynchronous:
        # A buffer for gathered inputs, and one for gathered gradients. Both stay allocated.
        buffers = 2 * 2 * h * tokens if split else 0
        add("buffers of gathered tensors", buffers, False, "parallel/utils.py: MemoryBuffer")
    else:
        # Two column-parallel linear layers per layer, and the head: each saves its gathered input, not its own part.
        gathered = (2 * layers + 1) * 2 * h * tokens * (1 - 1 / n)
        add(
            "gathered inputs of linear layers", gathered, False, "parallel/tensor_parallel/functional.py: column_linear"
        )
        # A batch of several sequences is transposed, so that torch's matmul copies and saves it.
        copied = layers * 2 * h * tokens / n if run.micro > 1 else 0
        add("copied outputs of attention", copied, False, "models/llama.py: CausalSelfAttention")
        # Per layer a float32 table of complex values, and two bfloat16 tables of flash-attn, of half a head's width.
        tables = layers * _SEQ_LEN * (h // run.heads // 2) * (8 + 2 * 2)
        add("rotary tables of each layer", tables, False, "models/llama.py: RotaryEmbedding")
    add("workspaces of cuBLAS", _WORKSPACES, False, "pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp")
    return tuple(found)


def reserved_terms(run: NanotronRun) -> tuple[ByteTerm, ...]:
    """Returns upper bounds of the bytes that torch reserves for nanotron in addition to the allocated bytes.

    The first term is for ZeRO 1: after the backward pass, the float32 gradients are copied into one contiguous array
    for each data-parallel rank; freed tensors of layers are often too small for them. The second term is for tensors
    that an NCCL collective has used: torch reuses their memory only when the device has finished the collective
    (`Tensor.record_stream`, github.com/pytorch/pytorch/pull/76861), while the host already launches later kernels. In
    each layer these are the results of two linear layers before their reduce-scatter, and two gradients, all of the
    full width and of all tokens of the micro-batch.
    """
    weights, found = run.parameters // run.tensor, []
    if run.zero and run.data > 1:
        source = "distributed.py: reduce_scatter_coalesced"
        found.append(ByteTerm("flattened float32 gradients", 4 * weights, False, source))
    if run.tensor > 1:
        full = 2 * run.width * run.tokens
        source = "parallel/tensor_parallel/functional.py: reduce_scatter_tensor"
        found.append(ByteTerm("freed tensors that wait for NCCL", 4 * run.layers * full, False, source))
    return tuple(found)


def total(some: Sequence[ByteTerm], ours: bool | None = None) -> int:
    """Returns the sum of the bytes of terms.

    ours: True for the terms that our program has too, False for the terms that it does not have, None for all.
    """
    return sum(term.bytes for term in some if ours is None or term.ours == ours)
