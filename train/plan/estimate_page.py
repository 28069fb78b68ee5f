"""Renders the memory calculator as one HTML file that opens offline: inputs, the formulas in JavaScript, and a stacked
bar.

The page receives the tables of memory/formulas as data, so that each tensor, precision and optimizer is declared once.
Only the arithmetic exists twice, in Python and in the script; tests/memory/formulas/test_estimate.py compares the two.
The presets are the shipped configs and the chips of devices/chips.py. The current inputs can be copied as a `bytescope
estimate` command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.limits import described_limit
from bytescope.memory.devices.platform import MEMORY_FRACTION
from bytescope.memory.formulas import adapter_formulas, training_state, transformer_formulas
from bytescope.memory.formulas.expert_formulas import LARGEST_TILE, SMALLEST_TILE
from bytescope.memory.formulas.memory_estimate import ASPECT, NOTES, Question, shape_for
from bytescope.memory.formulas.model_shape import TARGETS, Adapters, ExpertShape, Latent
from bytescope.memory.units import GIB
from bytescope.memory.view.frame import page
from bytescope.train.plan import config_facts

# Input of the page -> config key with the same value. The script forms the other keys from several inputs. The sizes
# are always part of a command for gpt:N.
SIZES = {
    "layers": "model.n_layers",
    "width": "model.d_model",
    "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads",
    "head_width": "model.d_head",
    "mlp_width": "model.d_ff",
    "vocabulary": "model.vocab_size",
}
SHAPE = {
    **SIZES,
    "gated": "model.mlp",
    "tied": "model.tie_embeddings",
    "dropout": "model.dropout",
    "qk_norm": "model.qk_norm",
    "post_norms": "model.post_norms",
    "experts": "model.experts",
    "experts_per_token": "model.experts_per_token",
    "d_expert": "model.d_expert",
    "shared_experts": "model.shared_experts",
    "dense_layers": "model.dense_layers",
    "moe_every": "model.moe_every",
    "capacity": "model.capacity_factor",
    "slots": "model.moe_kernel",
    "mla_q_rank": "model.mla_q_rank",
    "mla_kv_rank": "model.mla_kv_rank",
    "mla_d_rope": "model.mla_d_rope",
    "mla_d_value": "model.mla_d_value",
}
REST = {
    "lora_rank": "lora.rank",
    "lora_targets": "lora.targets",
    "lora_base": "lora.base",
    "sequence": "data.seq_len",
    "batch": "batch.micro",
    "precision": "precision.preset",
    "optimizer": "optimizer.name",
    "fused": "optimizer.fused_backward",
    "tensor": "mesh.tensor",
    "sequence_parallel": "mesh.sequence_parallel",
    "expert_parallel": "mesh.expert",
}

# Initial values of the inputs for experts and for latent attention if the model has none.
NO_EXPERTS, NO_LATENT = ExpertShape(0, 2, 0), Latent(0, 0, 64, 128)


class Preset(NamedTuple):
    """A shipped config with which the user can fill in the inputs of the page.

    Attributes:
        question: the input of the memory calculator (model, batch, sharding, precision).
        recompute: which activations the config's remat policy recomputes, a key of `transformer_formulas.RECOMPUTE`.
    """

    question: Question
    recompute: str


def render(
    question: Question, name: str = "", presets: Mapping[str, Preset] | None = None, recompute: str = "none"
) -> str:
    """Returns the HTML page of the memory calculator, with `question` as the initial inputs.

    Args:
        question: the initial values of the inputs (model, batch, sharding, precision).
        name: the name of the model for the title; "" for a title without a name.
        presets: name of a shipped config -> the inputs that the page fills in if the user selects it.
        recompute: the recomputation that is selected at first, a key of `transformer_formulas.RECOMPUTE`.
    """
    title = f"{name} · training memory by formula" if name else "Training memory by formula"
    return page("estimate", title, page_data(question, presets or {}, recompute), notes=NOTES)


def page_data(question: Question, presets: Mapping[str, Preset], recompute: str) -> dict[str, Any]:
    """Returns the data of the page's script as JSON values: the tables of the formulas, the initial inputs, the shipped
    configs, and their keys. `recompute`: a key of `transformer_formulas.RECOMPUTE`."""
    return {
        "inputs": inputs(question, recompute),
        "aspect": ASPECT,
        "zero": training_state.ZERO,
        "layer": [row._asdict() for row in transformer_formulas.LAYER],
        "flash": transformer_formulas.FLASH._asdict(),
        "block_input": transformer_formulas.BLOCK_INPUT._asdict(),
        "outside": [row._asdict() for row in (transformer_formulas.EMBEDDING_MASK, *transformer_formulas.HEAD)],
        "logits": transformer_formulas.LOGITS._asdict(),
        "by_row": transformer_formulas.BY_ROW,
        "tiles": (SMALLEST_TILE, LARGEST_TILE),
        "precisions": {name: row._asdict() for name, row in config_facts.PRECISIONS.items()},
        "optimizers": {name: row._asdict() for name, row in config_facts.OPTIMIZERS.items()},
        "targets": TARGETS,
        "bases": {name: row._asdict() for name, row in adapter_formulas.BASES.items()},
        "offloads": training_state.OFFLOAD,
        "parts": training_state.ROLES,
        "recompute": transformer_formulas.RECOMPUTE,
        "attention": transformer_formulas.ATTENTION,
        "sizes": SIZES,
        "shape": SHAPE,
        "keys": SHAPE | REST,
        "strategies": {stage: name for name, stage in config_facts.ZERO_STAGES.items()},
        "cards": cards(),
        "padded": question.model.experts is None or question.model.experts.padded,
        "models": {name: inputs(preset.question, preset.recompute) for name, preset in presets.items()},
        "defaults": inputs(Question(1e9, shape_for(1e9))),
    }


def cards() -> dict[str, dict[str, Any]]:
    """Returns the chips that the page offers: chip -> its name, the GiB available to programs, and the FLOP/s of dense
    matmuls by dtype."""
    return {
        name: {
            "memory": round(
                described_limit(chip.platform, chip.device_memory_bytes, chip.reserved_bytes, MEMORY_FRACTION) / GIB, 2
            ),
            "kind": chip.kind,
            "peak_flops": dict(chip.peak_flops),
        }
        for name, chip in CHIPS.items()
    }


def inputs(question: Question, recompute: str = "none") -> dict[str, Any]:
    """Returns the values of the page's input fields, field -> value.

    Args:
        question: the input of the memory calculator.
        recompute: which activations are recomputed, a key of `transformer_formulas.RECOMPUTE`.
    """
    q, layout, model = question, question.layout, question.model
    lora = model.adapters or Adapters(0)
    experts, latent = model.experts or NO_EXPERTS, model.latent or NO_LATENT
    return {
        "parameters": q.parameters,
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_width": model.head_width,
        "mlp_width": model.mlp_width,
        "vocabulary": model.vocabulary,
        "gated": model.gated,
        "tied": model.tied,
        "dropout": model.dropout,
        "qk_norm": model.qk_norm,
        "post_norms": model.post_norms,
        "experts": experts.count,
        "experts_per_token": experts.per_token,
        "d_expert": experts.width,
        "shared_experts": experts.shared,
        "dense_layers": experts.dense_layers,
        "moe_every": experts.every,
        "capacity": experts.capacity,
        "slots": experts.slots,
        "mla_q_rank": latent.query_rank,
        "mla_kv_rank": latent.rank,
        "mla_d_rope": latent.rotary,
        "mla_d_value": latent.value,
        "lora_rank": lora.rank,
        "lora_targets": ",".join(lora.targets),
        "lora_base": lora.base,
        "sequence": q.sequence,
        "batch": q.batch,
        "logit_tokens": q.logit_tokens or 0,
        "mlp_tokens": q.mlp_tokens,
        "offload": q.offload,
        "fused": q.fused,
        "attention": q.attention,
        "recompute": recompute,
        "precision": q.precision.name,
        "optimizer": q.optimizer.name,
        "tensor": layout.tensor,
        "sequence_parallel": layout.sequence,
        "data": layout.data,
        "expert_parallel": layout.expert,
        "zero": layout.zero,
        "memory": cards()["h100"]["memory"],
    }
