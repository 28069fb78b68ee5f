"""MaxText's training step beside ours, compiled for the same described GPUs.

    python tests/bench/peers.py                           # in an environment with MaxText, about two hours
    python tests/bench/peers.py --only=llama2-7b          # rows whose name contains a text
    python tests/bench/peers.py --show --html=peers.html  # compiles nothing, shows the finished cells

Each row of ROWS is one task: model, sequence length, sequences per device, devices, remat policy, and layers in a loop
(scanned) or unrolled. It has up to four cells: MaxText with its defaults; MaxText with `param_scan_axis=0`, which
applies to scanned layers only; our step matched (logits in bfloat16 and a loss over all logits, as in MaxText); and
our step with the loss of its config. All cells of a row have the same batch, compute dtype, mesh (FSDP over all
devices), optimizer (AdamW in float32) and remat policy. MaxText's better setting is chosen for each figure of each row.
Rows are never removed: a row that cannot be compiled shows its error.
"""

import dataclasses
import itertools
from collections.abc import Mapping

# Model -> (tokens of a sequence, our config, our keys that make it the same model).
MODELS: Mapping[str, tuple[int, str, Mapping[str, str]]] = {
    "llama2-7b": (
        4096,
        "llama_8b",
        {
            "model.n_kv_heads": "32",
            "model.d_ff": "11008",
            "model.vocab_size": "32000",
            "model.rope_theta": "10000.0",
            "model.rope_scaling": "()",
        },
    ),
    "llama3-8b": (8192, "llama_8b", {"model.rope_scaling": "()"}),
    "llama3-70b": (8192, "llama_70b", {"model.rope_scaling": "()"}),
    "mixtral-8x7b": (
        4096,
        "mixtral_8x7b",
        {"optimizer.name": "adamw", "model.capacity_factor": "0.0", "mesh.expert": "1", "loss.balance": "0.0"},
    ),
}
# Remat policy of MaxText -> the tensors that our policy saves; None for our policy of the same name. MaxText's
# `minimal` also names the output of the MLP, which no gradient of a dense layer reads. In a layer with experts it keeps
# one of the two products (`mlpwi_0`).
_PROJECTIONS = ("q_rot", "k_rot", "v")
POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "full": None,
    "save_qkv_proj": _PROJECTIONS,
    "minimal": (*_PROJECTIONS, "attn_out", "gate", "up"),
    "minimal_with_context": (*_PROJECTIONS, "attn_out", "gate", "up", "context"),
    "none": None,
}
MINIMAL_WITH_EXPERTS = (*_PROJECTIONS, "attn_out", "expert_gate")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row's difference from the usual settings: MaxText's keys, and our keys for the same."""

    maxtext: Mapping[str, str]
    ours: Mapping[str, str]


VARIANTS: Mapping[str, Variant] = {
    "": Variant({}, {}),
    "naive attention": Variant({"attention": "dot_product"}, {"model.attention": "naive"}),
    # MaxText computes the loss in 8 parts, our chunked loss in chunks of as many tokens.
    "loss in 8 parts": Variant({"num_vocab_tiling": "8"}, {"loss.kind": "chunked"}),
    # Each expert computes at most 1.25 times the mean number of rows; the others are dropped.
    "capacity 1.25": Variant(
        {"sparse_matmul": "false", "megablox": "false", "capacity_factor": "1.25"},
        {"model.moe_kernel": "capacity", "model.capacity_factor": "1.25"},
    ),
}


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """One task that both trainers compile.

    Fields:
        model: MaxText's name of the model, a key of MODELS.
        target: the devices, such as "h100:8".
        policy: MaxText's remat policy, a key of POLICIES.
        scan: whether the layers run in a loop.
        sequences: sequences per device.
        variant: a key of VARIANTS.
    """

    model: str
    target: str
    policy: str
    scan: bool = True
    sequences: int = 1
    variant: str = ""


# Fixed before any figure of this script was seen. The rows that take hours come last.
ROWS: tuple[PeerRow, ...] = (
    *(
        PeerRow("llama2-7b", "h100:8", policy)
        for policy in ("full", "save_qkv_proj", "minimal", "minimal_with_context", "none")
    ),
    PeerRow("llama2-7b", "h100:8", "full", variant="naive attention"),
    *(PeerRow("llama2-7b", "h100:8", policy, scan=False) for policy in ("full", "minimal_with_context")),
    *itertools.chain.from_iterable(
        (
            PeerRow("llama3-8b", "h100:8", "full", sequences=sequences),
            PeerRow("llama3-8b", "h100:8", "minimal_with_context", sequences=sequences),
            PeerRow("llama3-8b", "h100:8", "full", sequences=sequences, variant="loss in 8 parts"),
            PeerRow("llama3-8b", "h100:8", "full", scan=False, sequences=sequences),
        )
        for sequences in (1, 2)
    ),
    PeerRow("llama3-70b", "h100:8x8", "full"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full"),
    PeerRow("mixtral-8x7b", "h100:2x8", "minimal"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full", variant="capacity 1.25"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full", scan=False),
    PeerRow("mixtral-8x7b", "h100:2x8", "minimal", scan=False),
    PeerRow("llama3-70b", "h100:8x8", "full", scan=False),
)
