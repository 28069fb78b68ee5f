"""A trainer's config in the words of the formulas: its model, layout and work as a question of `estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_ACCUMULATION,
    BATCH_ACCUMULATION_SCHEDULE,
    BATCH_MICRO,
    BATCH_TOKENS,
    DATA_SEQ_LEN,
    LORA_BASE,
    LORA_RANK,
    LORA_TARGETS,
    LOSS_CHUNK,
    LOSS_KIND,
    MESH_CONTEXT,
    MESH_DATA,
    MESH_EXPERT,
    MESH_FSDP,
    MESH_SEQUENCE_PARALLEL,
    MESH_STAGE,
    MESH_STRATEGY,
    MESH_TENSOR,
    MODEL,
    MODEL_ATTENTION,
    MODEL_ATTENTION_KIND,
    MODEL_EXPERTS,
    MODEL_MOE_EVERY,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAMS,
    OPTIMIZER_FREEZE,
    OPTIMIZER_FUSED_BACKWARD,
    OPTIMIZER_NAME,
    PIPELINE_SCHEDULE,
    PIPELINE_VIRTUAL,
    PRECISION_PRESET,
)
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import training_state, transformer_formulas
from bytescope.memory.formulas.adapter_formulas import Adapters
from bytescope.memory.formulas.expert_formulas import Experts, idle_count, routed_count
from bytescope.memory.formulas.latent_formulas import Latent
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.transformer_formulas import Layout, Model
from bytescope.memory.pipeline.schedule_figures import held_share
from bytescope.memory.pipeline.schedules import make_schedule

# The trainer's attention kernels -> those of the formulas; all but the naive one keep no scores.
KERNELS = {"naive": "naive", "chunked": "flash", "cudnn": "flash", "auto": ""}
# Kinds of attention that have formulas.
KINDS = ("gqa", "mla")
# The trainer's factor of `capacity` where a config names none.
CAPACITY = 1.25
# Rows of the trainer's MLPs with a gate: three matrices.
GATED = ("swiglu", "geglu")
# (offload.optimizer, offload.params) -> row of the formulas.
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "params", (True, True): "both"}


def adapters_of(config: Mapping[str, Any]) -> Adapters | None:
    """The adapters of a trainer's config (dotted key -> value); None where it trains the weights."""
    if not config[LORA_RANK]:
        return None
    return Adapters(config[LORA_RANK], tuple(config[LORA_TARGETS]), config[LORA_BASE])


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """The experts of a trainer's config (dotted key -> value); None where every MLP is dense."""
    m = _model_keys(config)
    if not m["experts"]:
        return None
    slots = m["moe_kernel"] == "capacity"
    return Experts(
        m["experts"],
        m["experts_per_token"],
        m["d_expert"] or m["d_ff"],
        m["shared_experts"],
        m["dense_layers"],
        m["moe_every"],
        m["capacity_factor"] or CAPACITY * slots,
        slots,
    )


def latent_of(config: Mapping[str, Any]) -> Latent | None:
    """The latent attention of a trainer's config (dotted key -> value); None for another kind."""
    if config[MODEL_ATTENTION_KIND] != "mla":
        return None
    return Latent(*(config[f"{MODEL}mla_{width}"] for width in ("q_rank", "kv_rank", "d_rope", "d_value")))


def model_of(config: Mapping[str, Any]) -> Model:
    """The model of a trainer's config (dotted key -> value)."""
    m, latent = _model_keys(config), latent_of(config)
    vocabulary = -(-m["vocab_size"] // m["vocab_multiple"]) * m["vocab_multiple"]
    return Model(
        m["n_layers"],
        m["d_model"],
        m["n_heads"],
        m["n_heads"] if latent else m["n_kv_heads"],
        m["d_head"],
        m["d_ff"],
        vocabulary,
        gated=m["mlp"] in GATED,
        dropout=m["dropout"] > 0,
        tied=m["tie_embeddings"],
        qk_norm=m["qk_norm"],
        post_norms=m["post_norms"],
        adapters=adapters_of(config),
        experts=experts_of(config),
        latent=latent,
    )


def _model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The group `model` of a config, without its prefix."""
    return {key.removeprefix(MODEL): value for key, value in config.items() if key.startswith(MODEL)}


def parameters_of(config: Mapping[str, Any], total: int) -> dict[str, int]:
    """`total` parameters of a program, and those `active` that one token meets: all of them unless a config (dotted
    keys; {} for a program without one) has experts. {} where none are known."""
    if not total:
        return {}
    idle = idle_count(model_of(config)) if config.get(MODEL_EXPERTS) and MODEL_MOE_EVERY in config else 0
    return {"total": total, "active": total - idle}


def routed_share(config: Mapping[str, Any]) -> float:
    """The share of routed experts in the parameters of a trainer's config (dotted keys), 0 for any other."""
    if not config.get(MODEL_EXPERTS) or MODEL_MOE_EVERY not in config:
        return 0.0
    model = model_of(config)
    return routed_count(model) / transformer_formulas.parameter_count(model)


def accumulation(config: Mapping[str, Any], ranks: int) -> int:
    """Micro-steps per update of a trainer's config (dotted keys) on `ranks` data-parallel ranks; of a schedule the
    most."""
    if tokens := config.get(BATCH_TOKENS, 0):
        return max(tokens // (config[BATCH_MICRO] * config[DATA_SEQ_LEN] * ranks), 1)
    scheduled = [int(str(pair).partition(":")[2]) for pair in config.get(BATCH_ACCUMULATION_SCHEDULE, ())]
    return max(scheduled, default=config.get(BATCH_ACCUMULATION, 1))


def _stash(config: Mapping[str, Any], stages: int, ranks: int, layers: int) -> float:
    """What each stage keeps of layers, in units of all of them, by the config's schedule."""
    schedule = make_schedule(config[PIPELINE_SCHEDULE], stages, accumulation(config, ranks), config[PIPELINE_VIRTUAL])
    return float(held_share(schedule, layers))


def question_of(config: Mapping[str, Any]) -> Question:
    """The question that a trainer's config (dotted key -> value) asks; -1 in its mesh counts as 1 device.

    `mesh.strategy` is a ZeRO stage over the ranks of `fsdp` and of `context`, which share a sequence. That each of the
    latter holds its shard of the activations is left to the caller.

    Raises:
      ReportError: a config that names what the formulas do not know.
    """
    for key, table in (
        (PRECISION_PRESET, training_state.PRECISIONS),
        (OPTIMIZER_NAME, training_state.OPTIMIZERS),
        (MODEL_ATTENTION, KERNELS),
        (MODEL_ATTENTION_KIND, KINDS),
        (MESH_STRATEGY, training_state.STRATEGIES),
    ):
        if config[key] not in table:
            raise ReportError(
                f"{key}={config[key]!r} has no formula, only {', '.join(table)} have: bytescope report compiles it"
            )
    if config[OPTIMIZER_FREEZE]:
        raise ReportError(
            f"{OPTIMIZER_FREEZE}={','.join(config[OPTIMIZER_FREEZE])} has no formula: bytescope report compiles it"
        )
    model, m = model_of(config), _model_keys(config)
    expert = max(config[MESH_EXPERT], 1)
    shards = max(config[MESH_FSDP], 1) * expert * max(config[MESH_CONTEXT], 1)
    shared, copies = config[MESH_FSDP] == -1 or shards > 1, config[MESH_DATA]
    ranks = shards if shared else copies
    tensor = max(config[MESH_TENSOR], 1)
    stages = max(config.get(MESH_STAGE, 1), 1)
    layout = Layout(
        tensor,
        config[MESH_SEQUENCE_PARALLEL] and tensor > 1,
        max(ranks, 1),
        zero=training_state.STRATEGIES[config[MESH_STRATEGY]].stage if shared else 0,
        expert=expert,
        pipeline=stages,
        interleave=config[PIPELINE_VIRTUAL] if stages > 1 else 1,
        stash=_stash(config, stages, shards * max(copies, 1), model.layers) if stages > 1 else 0.0,
    )
    # What `auto` takes on a GPU: the naive kernel where dropout needs it, and for short sequences where cuDNN has none.
    short = (config[PRECISION_PRESET] == "fp32" or m["attention_softcap"]) and config[DATA_SEQ_LEN] <= 1024
    attention = KERNELS[m["attention"]] or ("naive" if model.dropout or short else "flash")
    offload = OFFLOADS[config[OFFLOAD_OPTIMIZER], config[OFFLOAD_PARAMS]]
    return Question(
        transformer_formulas.parameter_count(model),
        model,
        layout,
        config[DATA_SEQ_LEN],
        config[BATCH_MICRO],
        config[PRECISION_PRESET],
        config[OPTIMIZER_NAME],
        attention,
        config[LOSS_CHUNK] if config[LOSS_KIND] == "chunked" else None,
        m["mlp_chunk"] * config[BATCH_MICRO],
        offload,
        config[OPTIMIZER_FUSED_BACKWARD],
    )
