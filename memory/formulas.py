"""Training memory and FLOPs from the published formulas: plain arithmetic, no compiler, no jax.

Sizes are bytes on one device, FLOPs are for all devices together. Symbols of the papers: s tokens of a sequence,
b sequences of a micro-batch, h width, a heads, L layers, v vocabulary, t tensor parallel size, p pipeline stages.

Left out everywhere: workspace of kernels and collectives, fragmentation, the runtime's own share, gathered copies of
sharded parameters, and what a compiler fuses, merges or keeps besides. Those are what a report is for.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder. GPT: `gated=False`, as many key/value heads as heads; Llama: gated, no dropout, untied."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    gated: bool = False
    dropout: bool = False
    tied: bool = True


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a training step is spread: `tensor` t ways, activations between the split parts too with `sequence`;
    `data` replicas that share state by the ZeRO stage `zero`; `pipeline` stages of `interleave` chunks each."""

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    zero: int = 0
    pipeline: int = 1
    interleave: int = 1


def gpt(layers: int, width: int, heads: int, vocabulary: int, *, dropout: bool = True) -> Model:
    """The architecture of the papers: MLP of 4h, GELU, one embedding table for input and output."""
    return Model(layers, width, heads, heads, width // heads, 4 * width, vocabulary, dropout=dropout)


def parameter_count(model: Model) -> int:
    """Matrices and embedding tables. Leaves out norms, biases and learned positions (about 0.1 % together)."""
    tables = 1 if model.tied else 2
    return _layer_matrices(model) * model.layers + tables * model.vocabulary * model.width


def _layer_matrices(model: Model) -> int:
    attention = model.width * model.head_width * 2 * (model.heads + model.kv_heads)
    return attention + model.width * model.mlp_width * (3 if model.gated else 2)


# ---- activations ---------------------------------------------------------------------------------------------

class Tensor(NamedTuple):
    """One tensor a layer keeps for its backward pass.

    name; size: what a token holds of it, a key of `token_sizes`; split: "tensor" is divided by t always, "sequence"
    only with sequence parallelism; itemsize: bytes, 0 for the activations' own; core: part of the attention core;
    only: the Model field without which it does not exist.
    """

    name: str
    size: str
    split: str
    itemsize: int = 0
    core: bool = False
    only: str = ""


# Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1: with dropout, a GELU MLP of 4h and 16-bit activations this
# sums to sbh(34 + 5as/h): attention 11 and the core 5as/h, MLP 19, norms 4; split by t it is 10 + 24/t + 5as/(ht),
# with sequence parallelism all of it by t. Grouped keys (Ainslie et al. 2023, arXiv 2305.13245) and the third matrix
# of SwiGLU (Shazeer 2020, arXiv 2002.05202) follow from the shapes. Left out: statistics of norms (two numbers a
# token) and whatever else plain autodiff keeps: 46.4 sbh in the place of 26.3 on the paper's 22B layer, under XLA.
LAYER = (
    Tensor("attention norm input", "width", "sequence"),
    Tensor("qkv input", "width", "sequence"),
    Tensor("queries", "queries", "tensor"),
    Tensor("keys", "keys", "tensor"),
    Tensor("values", "keys", "tensor"),
    Tensor("probabilities", "scores", "tensor", core=True),
    Tensor("probabilities' dropout mask", "scores", "tensor", 1, core=True, only="dropout"),
    Tensor("dropped probabilities", "scores", "tensor", core=True, only="dropout"),
    Tensor("context", "queries", "tensor"),
    Tensor("attention dropout mask", "width", "sequence", 1, only="dropout"),
    Tensor("mlp norm input", "width", "sequence"),
    Tensor("mlp input", "width", "sequence"),
    Tensor("gate", "mlp", "tensor", only="gated"),
    Tensor("up", "mlp", "tensor"),
    Tensor("down input", "mlp", "tensor"),
    Tensor("mlp dropout mask", "width", "sequence", 1, only="dropout"),
)

# FlashAttention (Dao et al. 2022, arXiv 2205.14135) keeps one float32 a query in the place of the core.
FLASH = Tensor("log of the softmax's denominator", "heads", "tensor", 4)

# Full recomputation keeps the block's input alone: 2 sbh, with sequence parallelism 2/t.
BLOCK_INPUT = LAYER[0]

# Outside the layers, on the first stage (the paper's section 4.3): sbh/t (p + 4 + 4v/h), the last two for p = 1 only.
# Logits in float32; their gradient is left out.
EMBEDDING_MASK = Tensor("embedding dropout mask", "width", "sequence", 1, only="dropout")
HEAD = (Tensor("final norm input", "width", "sequence"), Tensor("head input", "width", "sequence"))
LOGITS = Tensor("logits", "vocabulary", "tensor", 4)

RECOMPUTE = {
    "none": "nothing recomputed",
    "selective": "the attention core recomputed (Korthikanti et al. 2022)",
    "full": "each layer recomputed from its input",
}
ATTENTION = ("naive", "flash")


def token_sizes(model: Model, sequence: int) -> dict[str, int]:
    """Elements of one token by kind of tensor, the values of `Tensor.size`."""
    return {"width": model.width, "queries": model.heads * model.head_width, "keys": model.kv_heads * model.head_width,
            "scores": model.heads * sequence, "heads": model.heads, "mlp": model.mlp_width,
            "vocabulary": model.vocabulary}


def tensor_bytes(tensor: Tensor, model: Model, layout: Layout, sequence: int, tokens: int, itemsize: int) -> float:
    """Bytes of one tensor on a device for `tokens` of sequences of `sequence`; `itemsize`: of the activations."""
    if tensor.only and not getattr(model, tensor.only):
        return 0.0
    split = layout.tensor if tensor.split == "tensor" or layout.sequence else 1
    return token_sizes(model, sequence)[tensor.size] * tokens * (tensor.itemsize or itemsize) / split


def kept_by_layer(recompute: str, attention: str = "naive") -> tuple[Tensor, ...]:
    """The tensors a layer keeps; under `flash` there is no core to recompute, and `selective` equals `none`."""
    if recompute == "full":
        return (BLOCK_INPUT,)
    if attention == "flash":
        return (*(tensor for tensor in LAYER if not tensor.core), FLASH)
    return tuple(tensor for tensor in LAYER if recompute == "none" or not tensor.core)


def layer_bytes(model: Model, layout: Layout, sequence: int, batch: int, *, recompute: str = "none",
                attention: str = "naive", itemsize: int = 2) -> float:
    """Bytes one layer keeps for the backward pass of one micro-batch."""
    return sum(tensor_bytes(tensor, model, layout, sequence, sequence * batch, itemsize)
               for tensor in kept_by_layer(recompute, attention))


def layers_in_flight(layers: int, layout: Layout) -> float:
    """Layers' worth of activations on the first pipeline stage.

    One-forward-one-backward: p micro-batches of L/p layers, so L for any p; interleaving multiplies by
    1 + (p-1)/(pm) (Korthikanti et al. 2022, section 4.2.3). Leaves out that later stages hold less.
    """
    p, m = layout.pipeline, layout.interleave
    return layers * (1 + (p - 1) / (p * m) if m > 1 else 1)


def outside_bytes(model: Model, layout: Layout, sequence: int, batch: int, *, itemsize: int = 2,
                  logit_tokens: int | None = None) -> float:
    """Embedding, final norm, head and logits: (sbhL/t)(p/L + [p=1](4/L)(1 + v/h)) with sequence parallelism.

    `logit_tokens`: how many tokens have logits at once, for losses in chunks; None for all.
    """
    tokens = sequence * batch
    mask = tensor_bytes(EMBEDDING_MASK, model, layout, sequence, tokens, itemsize) * layout.pipeline
    if layout.pipeline > 1:
        return mask
    head = sum(tensor_bytes(tensor, model, layout, sequence, tokens, itemsize) for tensor in HEAD)
    at_once = tokens if logit_tokens is None else min(logit_tokens, tokens)
    return mask + head + tensor_bytes(LOGITS, model, layout, sequence, at_once, itemsize)


def recomputed_bytes(model: Model, layout: Layout, sequence: int, batch: int, *, recompute: str,
                     attention: str = "naive", itemsize: int = 2) -> float:
    """What comes back while one layer is recomputed: all it keeps under `none`, less what it had kept.

    The papers leave it out: their figures are what lives through the forward pass.
    """
    both = [layer_bytes(model, layout, sequence, batch, recompute=policy, attention=attention, itemsize=itemsize)
            for policy in ("none", recompute)]
    return both[0] - both[1]


# ---- state of the optimizer ----------------------------------------------------------------------------------

class Precision(NamedTuple):
    """Bytes of each role for a parameter, and of an activation. master: a second, wider copy of the parameters."""

    summary: str
    params: int
    gradients: int
    master: int
    state: int
    activation: int


# 16 bytes with Adam: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: 2 + 2 + (4 + 4 + 4). Keeping gradients
# in float32 besides makes the 20 bytes of Megatron-style runs. Gradient accumulators of other kinds are left out.
PRECISIONS = {
    "fp32": Precision("everything float32", 4, 4, 0, 4, 4),
    "bf16": Precision("float32 parameters and gradients, 16-bit compute", 4, 4, 0, 4, 2),
    "mixed": Precision("16-bit parameters and gradients, float32 master copy", 2, 2, 4, 4, 2),
    "mixed_fp32_grads": Precision("mixed, with float32 gradients besides", 2, 6, 4, 4, 2),
    "pure_bf16": Precision("everything 16-bit", 2, 2, 0, 2, 2),
    "bf16_params": Precision("16-bit parameters and gradients, no master copy, float32 moments", 2, 2, 0, 4, 2),
    "fp16": Precision("float32 parameters and gradients, 16-bit compute, loss scaling", 4, 4, 0, 4, 2),
}
# The trainer's names for two of them.
PRECISIONS |= {"bf16_grads": PRECISIONS["mixed"], "fp32_grads": PRECISIONS["mixed_fp32_grads"]}


class Optimizer(NamedTuple):
    """states: numbers kept for each parameter; itemsize: bytes of one, 0 for the precision's own."""

    summary: str
    states: int
    itemsize: float = 0.0


OPTIMIZERS = {
    "sgd": Optimizer("no state", 0),
    "momentum": Optimizer("one velocity", 1),
    "adamw": Optimizer("two moments (Kingma & Ba 2015, arXiv 1412.6980)", 2),
    "adamw_bf16": Optimizer("two moments, the first in bfloat16", 2, (2 + 4) / 2),
    # 8-bit moments with a float32 scale for each 128 of them (64 in heads of 64); norms and biases in float32 left out.
    "adamw_8bit": Optimizer("two 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861)", 2, 1 + 4 / 128),
    # Rows and columns of each matrix are left out: a few parts in a thousand of its elements.
    "adafactor": Optimizer("factored second moment (Shazeer & Stern 2018, arXiv 1804.04235)", 0),
    "adagrad": Optimizer("one sum of squares (Duchi et al. 2011)", 1),
    "rmsprop": Optimizer("one second moment (Tieleman & Hinton 2012)", 1),
    "lion": Optimizer("one moment (Chen et al. 2023, arXiv 2302.06675)", 1),
    # AdamW's second moment of tables, norms and biases is left out.
    "muon": Optimizer("one momentum (Jordan et al. 2024)", 1),
}

# Stage -> which roles the data-parallel ranks share (Rajbhandari et al. 2020, section 5). With Adam in `mixed`, bytes a
# parameter over N ranks: 16; 4 + 12/N; 2 + 14/N; 16/N.
ZERO = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "params")}


def state_bytes_per_parameter(precision: str = "mixed", optimizer: str = "adamw",
                              layout: Layout = Layout()) -> dict[str, float]:
    """Bytes a parameter of `params`, `gradients` and `optimizer` (master copy and moments) on a device.

    Tensor and pipeline parallelism divide all of it; norms, which stay whole, are left out.
    """
    row, kind = PRECISIONS[precision], OPTIMIZERS[optimizer]
    whole = {"params": row.params, "gradients": row.gradients,
             "optimizer": row.master + kind.states * (kind.itemsize or row.state)}
    shares = layout.tensor * layout.pipeline
    return {role: size / shares / (layout.data if role in ZERO[layout.zero] else 1) for role, size in whole.items()}


# ---- FLOPs ---------------------------------------------------------------------------------------------------

def model_flops(model: Model, sequence: int, sequences: int) -> float:
    """FLOPs of one iteration over `sequences`, forward and backward, nothing recomputed.

    6 a matrix parameter and token, 12 a s for each head's width: for GPT the
    72 B L s h^2 (1 + s/(6h) + v/(12hL)) of Korthikanti et al. 2022, appendix A. The masked half of the scores is
    counted. Leaves out norms, softmax, activation functions, the embedding look-up and the optimizer.
    """
    return 3 * (_layers_forward(model, sequence, sequences) + _head_forward(model, sequence, sequences))


def hardware_flops(model: Model, sequence: int, sequences: int, recompute: str) -> float:
    """Model FLOPs and the forward FLOPs done again: the core's 4 B L s^2 h, or those of all layers.

    Leaves out that a layer's last product need not be repeated, and what FlashAttention repeats in its own gradient.
    """
    again = {"none": 0.0, "selective": _core_forward(model, sequence, sequences),
             "full": _layers_forward(model, sequence, sequences)}
    return model_flops(model, sequence, sequences) + again[recompute]


def published_selective_flops(model: Model, sequence: int, sequences: int) -> float:
    """Hardware FLOPs with selective recomputation as Korthikanti et al. 2022 print them, for their HFU column.

    Their s/(3h) in the place of s/(6h) adds 12 B L s^2 h, three times the core's forward pass, which is all that
    runs again (s/(6h) would become 2s/(9h)): it overstates HFU, by 1.4 points on the 22B model, 0.5 on the 1T one.
    """
    return model_flops(model, sequence, sequences) + 3 * _core_forward(model, sequence, sequences)


def _core_forward(model: Model, sequence: int, sequences: int) -> float:
    return 4.0 * model.layers * sequences * sequence**2 * model.heads * model.head_width


def _layers_forward(model: Model, sequence: int, sequences: int) -> float:
    matrices = 2.0 * _layer_matrices(model) * model.layers * sequences * sequence
    return matrices + _core_forward(model, sequence, sequences)


def _head_forward(model: Model, sequence: int, sequences: int) -> float:
    return 2.0 * model.width * model.vocabulary * sequences * sequence


def utilization(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Share of the devices' peak (FLOP/s of one): MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / (seconds * devices * peak_flops)
