"""Translates a config into the facts that `bytescope.memory` needs: `ModelFacts` for reports and formulas, and a
`Question` for `bytescope estimate`.

Input: the flat config (dotted key -> value), and the values that the trainer chose for keys such as `auto`.

The tables map each name of a precision, optimizer, strategy and kernel in the config to its row in the formulas of
memory/formulas. `mixed`, `mixed_fp32_grads`, `pure_bf16` and `sgd` exist only for `bytescope estimate`. To add an
optimizer or a precision to the formulas, add a row with its source to a table of this module. A test compares the rows
with the arrays of the trainer's programs. The command line lists these names, so this module imports no jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import adapter_formulas, transformer_formulas
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import BATCH_ROLES, ModelFacts, Pipeline, RematSegment
from bytescope.memory.formulas.model_shape import Adapters, ExpertShape, Latent, ModelShape, StepLayout
from bytescope.memory.formulas.training_state import ADAM, MIXED, OptimizerBytes, PrecisionBytes
from bytescope.train.pipeline.schedule import Schedule, held_share, idle_fraction, make_schedule

# Axis of the mesh -> the role of its devices in a step. The order is the order in which devices are assigned to axes.
ROLES = {
    "stage": "stage",
    "data": "replica",
    "fsdp": "state",
    "expert": "expert",
    "context": "sequence",
    "tensor": "tensor",
}
# Axes of the mesh along which devices read different sequences.
BATCH_AXES = tuple(axis for axis, role in ROLES.items() if role in BATCH_ROLES)
# The capacity factor that model.moe_kernel=capacity uses if model.capacity_factor is 0.
CAPACITY = 1.25
# (offload.optimizer, offload.params) -> name of the row in the formulas (`training_state.OFFLOAD`).
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "params", (True, True): "both"}
# The pipeline schedule whose stages all store equally many activations, and its number of chunks of layers per stage.
EVEN_SCHEDULE, EVEN_CHUNKS = "v", 2

# ---- tables of names ------------------------------------------------------------------------------------------------

_SUMMED = MIXED._replace(
    name="mixed_fp32_grads", summary="mixed, plus a float32 copy of the gradients", gradients=MIXED.gradients + 4
)
# Float32 copies of the gradients raise the 16 bytes per parameter to 20, as in Megatron-style runs. Other gradient
# accumulators have no formula.
PRECISIONS: Mapping[str, PrecisionBytes] = {
    row.name: row
    for row in (
        PrecisionBytes("fp32", "everything float32", 4, 4, 0, 4, 4),
        PrecisionBytes("bf16", "float32 parameters and gradients, 16-bit compute", 4, 4, 0, 4, 2),
        MIXED,
        _SUMMED,
        PrecisionBytes("pure_bf16", "everything 16-bit", 2, 2, 0, 2, 2),
        PrecisionBytes(
            "bf16_params", "16-bit parameters and gradients, no master copy, float32 moments", 2, 2, 0, 4, 2
        ),
        PrecisionBytes("fp16", "float32 parameters and gradients, 16-bit compute, loss scaling", 4, 4, 0, 4, 2),
        # One float32 scale for 128 elements of an activation (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).
        PrecisionBytes("fp8", "bf16 with 8-bit operands of matmuls", 4, 4, 0, 4, 2, 1 + 4 / 128),
        MIXED._replace(name="bf16_grads"),
        _SUMMED._replace(name="fp32_grads"),
    )
}

OPTIMIZERS: Mapping[str, OptimizerBytes] = {
    row.name: row
    for row in (
        OptimizerBytes("sgd", "no state", 0),
        OptimizerBytes("momentum", "one velocity", 1),
        ADAM,
        OptimizerBytes("adamw_bf16", "two moments, the first in bfloat16", 2, (2 + 4) / 2),
        # 128 moments share a float32 scale (64 in heads of 64). Norms and biases, stored in float32, are not counted.
        OptimizerBytes("adamw_8bit", "two 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861)", 2, 1 + 4 / 128),
        # The row and column sums of each matrix are not counted: a few thousandths of its elements.
        OptimizerBytes("adafactor", "factored second moment (Shazeer & Stern 2018, arXiv 1804.04235)", 0),
        OptimizerBytes("adagrad", "one sum of squares (Duchi et al. 2011)", 1),
        OptimizerBytes("rmsprop", "one second moment (Tieleman & Hinton 2012)", 1),
        OptimizerBytes("lion", "one moment (Chen et al. 2023, arXiv 2302.06675)", 1),
        # Embedding tables, norms and biases use AdamW. Its second moment is not counted.
        OptimizerBytes("muon", "one momentum (Jordan et al. 2024)", 1),
    )
}

# mesh.strategy -> ZeRO stage.
ZERO_STAGES: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}

# model.attention -> kernel of the formulas. "flash" stores no attention scores. "" depends on the device.
KERNELS: Mapping[str, str] = {"naive": "naive", "chunked": "flash", "cudnn": "flash", "auto": ""}
# Values of model.attention_kind that the formulas cover.
ATTENTION_KINDS = ("gqa", "mla")
# Values of model.mlp that have a gate, and therefore three matrices.
GATED = ("swiglu", "geglu")

# precision.preset -> bytes per element of a gradient in collectives, if they differ from those of the compute dtype.
# Collectives have a formula only for the presets in GATHERED.
SENT_GRADIENTS: Mapping[str, int] = {"bf16_grads": 2, "fp32_grads": 4}
GATHERED = ("bf16", "fp16", "fp32", "bf16_grads", "fp32_grads", "bf16_params")

# Remat policies whose saved tensors follow from shapes: policies that save tensors by name, and policies that save the
# outputs of matmuls with weights, on the device or in host memory. The other policies have no formula.
NAMED_POLICIES = ("full", "selective", "minimal", "sqrt", "offload", "custom")
PRODUCT_POLICIES = ("dots_no_batch", "offload_dots")
# Remat policies that checkpoint groups of layers in addition to the layers.
NESTED_POLICIES = ("sqrt",)

# ---- facts and question ---------------------------------------------------------------------------------------------


def model_facts(
    flat: Mapping[str, Any], settled: Mapping[str, Any] | None = None, *, platform: str = "", devices: int = 0
) -> ModelFacts:
    """Returns the facts about the training step of a config that reports and formulas need, such as the model's shape,
    sharding and precision.

    Args:
        flat: the config, dotted key -> value.
        settled: values that replace the config's: the kernel, the mesh and the `segments` that `config_factory.settle`
            returns. None keeps the values of the config.
        platform: the platform of the target: "cpu" or "gpu"; "" if unknown.
        devices: total number of devices, which gives the size of a mesh axis that is -1 and not in `settled`. 0 means
            unknown; the axis then counts as 1.
    """
    config = {**flat, **(settled or {})}
    mesh = mesh_of(config, devices)
    ranks = math.prod(mesh[axis] for axis in BATCH_AXES)
    preset, model, stages = config["precision.preset"], model_of(config), mesh["stage"]
    other_dtypes = any(config.get(f"precision.{role}") for role in ("param", "compute", "reduce", "cast"))
    # With adapters or frozen parameters, only some parameters have gradients to reduce.
    changed = other_dtypes or bool(config.get("lora.rank") or config.get("optimizer.freeze"))
    steps = accumulation(config, ranks)
    schedule = None
    if stages > 1:
        schedule = make_schedule(config["pipeline.schedule"], stages, steps, config["pipeline.virtual"])
    segments = _remat_segments(config)
    why = _why_no_formula(config)
    return ModelFacts(
        question=None if why else _make_question(config, mesh, schedule),
        no_formula=why,
        mesh=mesh,
        roles=ROLES,
        micro_steps=steps,
        accumulates_inside=config["batch.mode"] == "scan",
        segments=segments,
        policy=_segment_of_default_policy(config, segments),
        kernel_outside=config["model.attention"] == "cudnn",
        halves=config["remat.granularity"] == "parts",
        skips_masked=config["model.attention"] == "chunked",
        sent_parameter=PRECISIONS[preset].activation if preset in GATHERED and not changed else 0,
        sent_gradient=SENT_GRADIENTS.get(preset, 0),
        exchange=_expert_collective(config, platform) if model.experts else "",
        expert_rows=config["model.moe_kernel"] != "dense",
        pipeline=_pipeline(schedule, model.layers) if schedule else None,
        compute=config["precision.compute"] or {"fp32": "float32", "fp16": "float16"}.get(preset, "bfloat16"),
        asked_of_host=_host_offload_keys(config),
    )


def question_of(flat: Mapping[str, Any], devices: int = 0) -> Question:
    """Returns the input of the memory calculator (model, batch, sharding, precision) for a config.

    `mesh.strategy` becomes a ZeRO stage over the ranks of the mesh axes `fsdp`, `expert` and `context`. The calculator
    does not model that the axis `context` shards each sequence.

    flat: the config, dotted key -> value. devices: total number of devices, which gives the size of a mesh axis that
    is -1; 0 means unknown, and the axis then counts as 1 device.

    Raises:
        ReportError: the formulas do not cover the config.
    """
    why = _why_no_formula(flat)
    if why:
        raise ReportError(why)
    mesh, schedule = mesh_of(flat, devices), None
    if mesh["stage"] > 1:
        ranks = mesh["fsdp"] * mesh["expert"] * mesh["context"] * mesh["data"]
        steps = accumulation(flat, ranks)
        schedule = make_schedule(flat["pipeline.schedule"], mesh["stage"], steps, flat["pipeline.virtual"])
    return _make_question(flat, mesh, schedule)


def mesh_of(config: Mapping[str, Any], devices: int = 0) -> dict[str, int]:
    """Returns the number of devices along each mesh axis. `config`: dotted key -> value. `devices`: total number of
    devices.

    An axis of -1 gets the devices that the other axes leave, or 1 if `devices` is 0 (unknown).
    """
    sizes = {axis: int(config.get(f"mesh.{axis}", 1)) for axis in ROLES}  # reports of older versions lack some axes
    known = math.prod(max(size, 1) for size in sizes.values())
    rest = max(devices // known, 1)
    return {axis: size if size > 0 else rest for axis, size in sizes.items()}


def accumulation(config: Mapping[str, Any], ranks: int) -> int:
    """Returns the number of micro-batches that each of `ranks` data-parallel ranks processes per update. `config`:
    dotted key -> value."""
    tokens = config.get("batch.tokens", 0)
    if tokens:
        return max(tokens // (config["batch.micro"] * config["data.seq_len"] * ranks), 1)
    return config.get("batch.accumulation", 1)


# ---- the model ------------------------------------------------------------------------------------------------------


def model_of(config: Mapping[str, Any]) -> ModelShape:
    """Returns the sizes of a config's model, such as its layers and width. `config`: dotted key -> value."""
    m, latent, adapters = _model_keys(config), None, None
    if m["attention_kind"] == "mla":
        latent = Latent(m["mla_q_rank"], m["mla_kv_rank"], m["mla_d_rope"], m["mla_d_value"])
    if config["lora.rank"]:
        adapters = Adapters(config["lora.rank"], tuple(config["lora.targets"]), config["lora.base"])
    return ModelShape(
        m["n_layers"],
        m["d_model"],
        m["n_heads"],
        m["n_heads"] if latent else m["n_kv_heads"],
        m["d_head"],
        m["d_ff"],
        -(-m["vocab_size"] // m["vocab_multiple"]) * m["vocab_multiple"],
        gated=m["mlp"] in GATED,
        dropout=m["dropout"] > 0,
        tied=m["tie_embeddings"],
        qk_norm=m["qk_norm"],
        post_norms=m["post_norms"],
        adapters=adapters,
        experts=experts_of(config),
        latent=latent,
    )


def experts_of(config: Mapping[str, Any]) -> ExpertShape | None:
    """Returns the sizes of a model's experts, such as their number and width; None if every MLP is dense. `config`:
    dotted key -> value."""
    m = _model_keys(config)
    if not m["experts"]:
        return None
    slots = m["moe_kernel"] == "capacity"
    return ExpertShape(
        m["experts"],
        m["experts_per_token"],
        m["d_expert"] or m["d_ff"],
        m["shared_experts"],
        m["dense_layers"],
        m["moe_every"],
        m["capacity_factor"] or CAPACITY * slots,
        slots,
        m["moe_kernel"] != "ragged",
    )


def _model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("model."): value for key, value in config.items() if key.startswith("model.")}


# ---- the question ---------------------------------------------------------------------------------------------------


def _why_no_formula(config: Mapping[str, Any]) -> str:
    for key, table in (
        ("precision.preset", PRECISIONS),
        ("optimizer.name", OPTIMIZERS),
        ("model.attention", KERNELS),
        ("model.attention_kind", ATTENTION_KINDS),
        ("mesh.strategy", ZERO_STAGES),
        ("lora.base", adapter_formulas.BASES),
    ):
        if config[key] not in table:
            known = ", ".join(table)
            return f"{key}={config[key]!r} has no formula; formulas exist for {known}: use bytescope report instead"
    frozen = config["optimizer.freeze"]
    if frozen:
        return f"optimizer.freeze={','.join(frozen)} has no formula: use bytescope report instead"
    return ""


def _make_question(config: Mapping[str, Any], mesh: Mapping[str, int], schedule: Schedule | None) -> Question:
    """Returns the input of the memory calculator (model, batch, sharding, precision) for a config.

    Args:
        config: dotted key -> value.
        mesh: mesh axis -> number of devices.
        schedule: the pipeline schedule; None for a mesh without pipeline stages.
    """
    model, m = model_of(config), _model_keys(config)
    shards = mesh["fsdp"] * mesh["expert"] * mesh["context"]
    shared = config["mesh.fsdp"] == -1 or shards > 1
    stages = mesh["stage"]
    kernel = KERNELS[m["attention"]]
    layout = StepLayout(
        mesh["tensor"],
        config["mesh.sequence_parallel"] and mesh["tensor"] > 1,
        shards if shared else mesh["data"],
        zero=ZERO_STAGES[config["mesh.strategy"]] if shared else 0,
        expert=mesh["expert"],
        pipeline=stages,
        interleave=config["pipeline.virtual"] if stages > 1 else 1,
        stash=float(held_share(schedule, model.layers)) if schedule else 0.0,
    )
    # On a GPU `auto` chooses the naive kernel with dropout, and for short sequences if cuDNN has no kernel for them.
    short = (config["precision.preset"] == "fp32" or m["attention_softcap"]) and config["data.seq_len"] <= 1024
    return Question(
        transformer_formulas.parameter_count(model),
        model,
        layout,
        config["data.seq_len"],
        config["batch.micro"],
        PRECISIONS[config["precision.preset"]],
        OPTIMIZERS[config["optimizer.name"]],
        kernel or ("naive" if model.dropout or short else "flash"),
        config["loss.chunk"] if config["loss.kind"] == "chunked" else None,
        m["mlp_chunk"] * config["batch.micro"],
        OFFLOADS[config["offload.optimizer"], config["offload.params"]],
        config["optimizer.fused_backward"],
    )


# ---- remat, experts and stages --------------------------------------------------------------------------------------


def segment(
    policy: str, layers: int, groups: int = 1, save: Sequence[str] = (), offload: Sequence[str] = ()
) -> RematSegment:
    """Describes a range of layers under one remat policy for the formulas of `bytescope.memory`.

    Args:
        policy: a value of `remat.policy`.
        layers: number of layers in the range.
        groups: number of groups of layers, for a nested policy, which saves the input of each group.
        save: names of the tensors that are saved on the device.
        offload: names of the tensors that are moved to host memory.
    """
    if policy in PRODUCT_POLICIES:
        from bytescope.model.remat.policies import EXPERT_PRODUCTS, PRODUCTS

        products = (*PRODUCTS, *EXPERT_PRODUCTS, "router_logits")
        save, offload = (save, (*offload, *products)) if policy == "offload_dots" else ((*save, *products), offload)
    return RematSegment(
        layers,
        policy,
        everything=policy == "none",
        save=frozenset(save),
        offload=frozenset(offload),
        known=policy in NAMED_POLICIES + PRODUCT_POLICIES,
        groups=groups if policy in NESTED_POLICIES else 0,
    )


def named_segment(policy: str, layers: int) -> RematSegment:
    """Describes a range of layers under a remat policy for the memory formulas, with the tensor names that the policy
    saves and offloads.

    Not for the policies `auto` and `custom`, which have no tensor names of their own.
    """
    from bytescope.model.remat.policies import POLICIES

    row = POLICIES.get(policy)
    if row is None:
        return segment(policy, layers)
    return segment(policy, layers, 1, [name for name in row.names if name not in row.moved], row.moved)


def _remat_segments(config: Mapping[str, Any]) -> tuple[RematSegment, ...]:
    if "segments" in config:
        parts = config["segments"]
        return tuple(segment(p["policy"], p["layers"], p["groups"], p["save"], p["offload"]) for p in parts)
    if config["remat.policy"] == "auto":
        return ()
    from bytescope.model.remat.policies import POLICIES, LayerPolicies

    save, offload, ranges = (tuple(config[f"remat.{key}"]) for key in ("save", "offload", "layers"))
    segments = []
    for part in LayerPolicies(config["remat.policy"], save, offload, ranges).segments(config["model.n_layers"]):
        policy, row = part.name if part.name in POLICIES else "custom", part.policy
        saved = [name for name in row.names if name not in row.moved]
        segments.append(segment(policy, part.stop - part.start, part.groups, saved, row.moved))
    return tuple(segments)


def _segment_of_default_policy(config: Mapping[str, Any], segments: Sequence[RematSegment]) -> RematSegment:
    # remat.policy applies to all layers outside the ranges of remat.layers.
    policy, layers = config["remat.policy"], config["model.n_layers"]
    if policy == "custom":
        return segment(policy, layers, 1, config["remat.save"], config["remat.offload"])
    if len(segments) == 1 and segments[0].policy == policy:
        return segments[0]
    return named_segment(policy, layers)


def _expert_collective(config: Mapping[str, Any], platform: str) -> str:
    # A CPU emulates ragged_all_to_all.
    asked, on_cpu = config["mesh.dispatch"], platform == "cpu"
    if asked == "auto" and config["model.moe_kernel"] == "capacity":
        return "all_to_all"
    if asked == "auto":
        return "allgather" if on_cpu else "ragged_all_to_all"
    return "" if on_cpu and asked == "ragged_all_to_all" else asked


def _pipeline(schedule: Schedule, layers: int) -> Pipeline:
    v_share, v_bubble = None, 0.0
    if schedule.name != EVEN_SCHEDULE:
        try:
            even = make_schedule(EVEN_SCHEDULE, schedule.stages, schedule.micro_batches, EVEN_CHUNKS)
            v_share = held_share(even, layers) / held_share(schedule, layers)
            v_bubble = idle_fraction(even)
        except ReportError:  # there are too few layers for two chunks per stage
            v_share = None
    return Pipeline(schedule.ticks, schedule.bends, schedule.stash_slots, idle_fraction(schedule), v_share, v_bubble)


def _host_offload_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [key for key in ("offload.optimizer", "offload.params") if config.get(key) is True]
    words: list[Any] = []
    for key, value in config.items():
        if key.startswith("remat."):
            words += value if isinstance(value, list | tuple) else [value]
    if any(isinstance(word, str) and "offload" in word for word in words):
        keys.append("the policy")
    return tuple(keys)
