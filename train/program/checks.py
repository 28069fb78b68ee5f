"""Checks that the settings of a config fit together, and derives from them what a program needs: mesh, kernels, batch
sizes, remat policies, frozen parameters.

`check` runs every check once, in a fixed order, so that a config with several mistakes always fails with the same
error. Single values are checked earlier, by `program_settings.read_settings`. Problems that are visible only in the
traced or compiled step are checked later, in `step_checks.py`.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import jax

from bytescope.model import LayerPolicies, ModelConfig, Precision
from bytescope.model.adapters import TARGETS, Lora, is_adapter
from bytescope.model.attention.attention_kernels import choose_kernel, platform_of
from bytescope.model.experts.expert_kernels import choose_moe_kernel
from bytescope.model.fp8 import choose_matmul
from bytescope.model.frozen import ROUTER_BIAS, names_of
from bytescope.model.layers import MLPS
from bytescope.model.names import TILED
from bytescope.model.remat.policies import AUTO
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.parallel.axes import SHARDS, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.parallel.xla_options import compiler_options
from bytescope.train.pipeline.schedule import Schedule, make_schedule
from bytescope.train.pipeline.stages import Stages
from bytescope.train.program.choices import Choices
from bytescope.train.program.program_settings import Settings
from bytescope.train.step.optimizer.host_offload import has_host_memory
from bytescope.train.step.optimizer.trainable import check_quantized, frozen_names


def check(settings: Settings, devices: Sequence[jax.Device]) -> Choices:
    """Checks the settings of a config against the devices and against each other. Returns the choices that follow from
    the settings: mesh, kernels, batch sizes, remat policies and frozen parameters.

    Raises:
      ValueError: a setting cannot be used on these devices. The message names the setting and the remedy.
    """
    if settings.remat.policy == AUTO:
        raise ValueError(
            "remat.policy=auto must be resolved before a program is built: call train.plan.remat_auto.settled_program"
        )
    asked_precision = Precision.from_config(vars(settings.precision))
    mesh = settings.mesh
    layout = Layout(
        make_mesh(mesh.sizes, devices),
        STRATEGIES[mesh.strategy],
        mesh.sequence_parallel,
        reduce=asked_precision.reduce,
        dispatch=mesh.dispatch,
    )
    _check_ring_and_length(settings, layout)
    _check_mlp_chunk(settings, layout)
    _check_experts(settings, layout)
    matmul = choose_matmul(asked_precision, devices[0])
    precision = dataclasses.replace(asked_precision, matmul=matmul[0])
    model, kernel, moe_kernel = _choose_kernels(settings, precision, layout)
    batch = BatchAlgebra.from_config(settings.batch, layout.ranks, settings.seq_len)
    _check_offload(settings, layout, batch)
    remat = settings.layer_policies(fp8=matmul[0] != "wide")
    _check_unroll(model, remat)
    compiler_options(settings.xla, mesh.prefetch, devices[0].platform)  # raises ValueError for options without a GPU
    schedule, stages = _choose_stages(settings, layout, model, remat, batch)
    all_trained = Choices(
        settings=settings,
        layout=layout,
        model=model,
        precision=precision,
        kernel=kernel,
        matmul=matmul,
        moe_kernel=moe_kernel,
        remat=remat,
        batch=batch,
        frozen=frozenset(),
        lora=_choose_adapters(settings, layout, model),
        schedule=schedule,
        stages=stages,
    )
    choices = dataclasses.replace(all_trained, frozen=_choose_frozen_paths(all_trained))
    if settings.lora.base != "bf16":
        check_quantized(choices.abstract(), layout, choices.frozen)
    return choices


def check_optimization_level(level: str, kernel: str, n_devices: int) -> None:
    """Raises ValueError for an optimization level, "O0" to "O3" or "" for XLA's default, at which XLA's compiler (0.10
    to 0.12) aborts the process.

    kernel: the attention kernel. n_devices: number of devices of the mesh.
    """
    if level not in ("", "O0") and kernel == "chunked" and n_devices > 1:
        raise ValueError(
            f"xla.optimization_level={level} cannot be used here: at this level XLA aborts when it compiles chunked "
            "attention for several devices; set model.attention=cudnn or naive, or leave xla.optimization_level empty"
        )


def check_without_devices(settings: Settings) -> None:
    """Raises ValueError if the config names a remat policy, tensor or layer range that does not exist.

    The check needs no devices, so a command can report this mistake before it looks for devices.
    """
    if settings.remat.policy != AUTO:
        settings.layer_policies(fp8=False)


def _check_ring_and_length(settings: Settings, layout: Layout) -> None:
    model, context, tensor = settings.model, layout.context, layout.mesh.shape["tensor"]
    if context > 1 and model.dropout:
        raise ValueError(
            f"model.dropout={model.dropout} cannot be combined with mesh.context={context}: ring attention has no "
            "dropout; set model.dropout=0 or mesh.context=1"
        )
    if context > 1 and model.attention not in ("auto", "chunked"):
        raise ValueError(
            f"model.attention={model.attention} cannot be combined with mesh.context={context}: ring attention "
            "supports only the chunked kernel; set model.attention=auto"
        )
    if context > 1 and model.attention_kind != "gqa":
        raise ValueError(
            f"model.attention_kind={model.attention_kind} cannot be combined with mesh.context={context}: ring "
            "attention needs keys and values of the same width; set mesh.context=1"
        )
    parts, divisors = 1, []
    if context > 1:
        parts = 2 * context
        divisors.append(f"2 x mesh.context {context}")
    if settings.mesh.sequence_parallel:
        parts = math.lcm(parts, context * tensor)
        divisors.append(f"mesh.tensor {tensor}")
    if settings.seq_len % parts:
        raise ValueError(
            f"data.seq_len={settings.seq_len} is not divisible by {' and '.join(divisors)}: make it a "
            f"multiple of {parts}, or change the mesh"
        )


def _check_mlp_chunk(settings: Settings, layout: Layout) -> None:
    chunk, positions = settings.model.mlp_chunk, settings.seq_len // layout.stream_parts
    if not chunk:
        return
    if chunk < positions and positions % chunk:
        near = max(size for size in range(1, chunk) if positions % size == 0)
        raise ValueError(
            f"model.mlp_chunk={chunk} does not divide the {positions} positions per device of "
            f"data.seq_len={settings.seq_len}: use {near}, which does"
        )
    hidden = {*settings.remat.save, *settings.remat.offload}.intersection(TILED)
    if hidden:
        raise ValueError(
            f"checkpoint name {min(hidden)!r} cannot be saved with model.mlp_chunk={chunk}, which recomputes the MLP: "
            "remove the name from remat.save and remat.offload, or set model.mlp_chunk=0"
        )


def _check_experts(settings: Settings, layout: Layout) -> None:
    model, parts, dispatch = settings.model, layout.mesh.shape["expert"], settings.mesh.dispatch
    asked = f"model.experts={model.experts}"
    if not model.experts:
        if parts > 1:
            raise ValueError(
                f"mesh.expert={parts} cannot be combined with model.experts=0: there are no experts to shard; set "
                "mesh.expert=1, and use mesh.fsdp for these devices"
            )
        return
    if model.experts % parts:
        near = math.gcd(model.experts, parts)
        raise ValueError(
            f"{asked} is not divisible by mesh.expert={parts}, but every device holds the same number of experts; set "
            f"mesh.expert={near}, and use mesh.fsdp for the other devices"
        )
    slots = model.moe_kernel == "capacity"
    if parts > 1 and dispatch != "auto" and slots != (dispatch == "all_to_all"):
        remedy = "mesh.dispatch=all_to_all" if slots else "model.moe_kernel=capacity"
        raise ValueError(
            f"mesh.dispatch={dispatch} cannot be combined with model.moe_kernel={model.moe_kernel}: the kernel "
            "capacity works only with mesh.dispatch=all_to_all, and the other kernels do not support all_to_all; set "
            f"{remedy}, or mesh.dispatch=auto"
        )
    if settings.precision.preset == "fp8":
        raise ValueError(
            f"precision.preset=fp8 cannot be combined with {asked}: expert matmuls cannot run in fp8; choose "
            "precision.preset=bf16"
        )
    if settings.lora.base != "bf16":
        raise ValueError(
            f"lora.base={settings.lora.base} cannot be combined with {asked}: expert weights have no quantized "
            "format; set lora.base=bf16"
        )


def _choose_kernels(
    settings: Settings, precision: Precision, layout: Layout
) -> tuple[ModelConfig, tuple[str, str], tuple[str, str]]:
    """Chooses the attention and expert kernels if the settings leave the choice. Returns (model config with the
    kernels, (attention kernel, reason), (expert kernel, reason))."""
    model, platform = ModelConfig.from_dict(vars(settings.model)), platform_of(layout.mesh.devices.flat[0])
    if settings.seq_len > model.max_seq_len:
        raise ValueError(
            f"data.seq_len={settings.seq_len} is longer than model.max_seq_len="
            f"{model.max_seq_len}: shorten the sequences, or raise model.max_seq_len"
        )
    kernel = choose_kernel(
        model,
        precision,
        platform,
        settings.seq_len,
        packed="segments" in settings.batch_names,
        head_parts=layout.mesh.shape["tensor"],
    )
    check_optimization_level(settings.xla["optimization_level"], kernel[0], layout.mesh.size)
    moe_kernel = choose_moe_kernel(model, platform)
    return dataclasses.replace(model, attention=kernel[0], moe_kernel=moe_kernel[0]), kernel, moe_kernel


def _check_offload(settings: Settings, layout: Layout, batch: BatchAlgebra) -> None:
    device = layout.mesh.devices.flat[0]
    asked = "offload.params=true" if settings.offload.params else "offload.optimizer=true"
    if (settings.offload.params or settings.offload.optimizer) and not has_host_memory(device):
        raise ValueError(
            f"{asked} needs pinned host memory, which {device.device_kind} does not have: set the key to false"
        )
    if not settings.offload.params:
        return
    if batch.accumulation > 1:
        raise ValueError(
            f"{asked} cannot be combined with {batch.accumulation} micro-steps per update (batch.accumulation): "
            "gradients of parameters in host memory are moved to host memory too, and cannot be summed there; raise "
            "batch.micro instead (a remat policy makes room for it), or set offload.params=false"
        )
    if layout.strategy.stored and not layout.strategy.by_layer:
        raise ValueError(
            f"{asked} cannot be combined with mesh.strategy={settings.mesh.strategy}: this strategy copies all "
            "parameters to the device at once; choose zero3 or ddp, or set offload.params=false"
        )


def _check_unroll(model: ModelConfig, remat: LayerPolicies) -> None:
    for segment in remat.segments(model.n_layers):
        count = (segment.stop - segment.start) // segment.groups
        if model.unroll < count and count % model.unroll:
            near = max(size for size in range(1, model.unroll) if count % size == 0)
            raise ValueError(
                f"model.unroll={model.unroll} does not divide the {count} layers of a loop "
                f"(remat.policy={segment.name}): use {near}, which does, or {count} to unroll all of them"
            )


def _choose_stages(
    settings: Settings, layout: Layout, model: ModelConfig, remat: LayerPolicies, batch: BatchAlgebra
) -> tuple[Schedule, Stages] | tuple[None, None]:
    stages, tensor, virtual = layout.mesh.shape["stage"], layout.mesh.shape["tensor"], settings.pipeline.virtual
    asked = f"mesh.stage={stages}"
    if stages == 1:
        if virtual > 1:
            raise ValueError(
                f"pipeline.virtual={virtual} cannot be combined with mesh.stage=1: there is only one stage; raise "
                "mesh.stage, or set pipeline.virtual=1"
            )
        return None, None
    for is_asked, key, why in _settings_refused_with_stages(settings, model, remat):
        if is_asked:
            raise ValueError(f"{asked} cannot be combined with {key}: {why}")
    schedule = make_schedule(settings.pipeline.schedule, stages, batch.accumulation, virtual)
    if model.padded_vocab % (stages * tensor):
        raise ValueError(
            f"{asked} cannot divide the {model.padded_vocab} rows of the token embedding evenly over the stages: set "
            f"model.vocab_multiple={stages * tensor}"
        )
    return schedule, Stages.divide(model, schedule)


def _settings_refused_with_stages(
    settings: Settings, model: ModelConfig, remat: LayerPolicies
) -> tuple[tuple[bool, str, str], ...]:
    """Returns the settings that a pipeline does not support, as rows (True if the config has the setting, "key=value",
    reason and remedy)."""
    segments, mesh = remat.segments(model.n_layers), settings.mesh
    return (
        (
            settings.batch.mode != "scan",
            f"batch.mode={settings.batch.mode}",
            "the micro-batches of one step must pass through the stages; set batch.mode=scan",
        ),
        (not model.scan, "model.scan=false", "stages hold stacked layers; set model.scan=true"),
        (
            model.experts > 0 and model.moe_every > 1,
            f"model.moe_every={model.moe_every}",
            "a pipeline stage runs its dense layers before its layers with experts; set model.moe_every=1",
        ),
        (
            len(segments) > 1,
            f"remat.layers={','.join(settings.remat.layers)}",
            "all stages run the same program; set one remat.policy for all layers",
        ),
        (
            any(segment.groups > 1 for segment in segments),
            f"remat.policy={settings.remat.policy}",
            "a pipeline stage saves the input of every block, not of groups of blocks; set remat.policy=full",
        ),
        (
            any(segment.policy.offloads for segment in segments),
            f"remat.policy={settings.remat.policy}",
            "a pipeline keeps the saved block inputs in device memory; set remat.policy=full",
        ),
        (
            settings.optimizer.fused_backward,
            "optimizer.fused_backward=true",
            "gradients are sums over micro-batches; set optimizer.fused_backward=false",
        ),
        (
            settings.offload.params,
            "offload.params=true",
            "stages read their layers once per micro-batch; set offload.params=false",
        ),
        (
            mesh.context > 1,
            f"mesh.context={mesh.context}",
            "ring attention waits for all devices, but stages compute different layers; set mesh.context=1",
        ),
    )


def _choose_adapters(settings: Settings, layout: Layout, model: ModelConfig) -> Lora | None:
    keys = settings.lora
    if not keys.rank:
        return None
    asked = f"lora.rank={keys.rank}"
    if model.attention_kind != "gqa":
        raise ValueError(
            f"{asked} cannot be combined with model.attention_kind={model.attention_kind}: adapters are available "
            "only for the matrices of gqa; set lora.rank=0"
        )
    shards = math.prod(layout.mesh.shape[axis] for axis in SHARDS)
    lora = Lora(keys.rank, keys.alpha, keys.targets, keys.dropout, shared=keys.rank % shards == 0)
    if settings.optimizer.freeze:
        raise ValueError(
            f"optimizer.freeze={','.join(settings.optimizer.freeze)} cannot be combined with {asked}, which already "
            "freezes everything but the adapters: leave optimizer.freeze empty"
        )
    if not MLPS[model.mlp][0] and set(lora.targets) == {"gate"}:
        raise ValueError(
            f"lora.targets=gate cannot be combined with model.mlp={model.mlp}, which has no gate: choose from "
            f"{', '.join(TARGETS)}"
        )
    dense = model.shared_experts or model.expert_layers < model.n_layers
    if not dense and set(lora.targets) <= {"gate", "up", "down"}:
        raise ValueError(
            f"lora.targets={','.join(lora.targets)} cannot be combined with a model in which every MLP is a mixture "
            "of experts: routed experts have no adapters; choose some of q, k, v, o"
        )
    for key, is_asked in (("model.mlp_chunk", model.mlp_chunk > 0), ("mesh.context", settings.mesh.context > 1)):
        if lora.dropout and is_asked:
            raise ValueError(
                f"lora.dropout={lora.dropout} cannot be combined with {key}: dropout masks are generated for whole "
                f"sequences on one device; set lora.dropout=0, or leave {key} at its default"
            )
    return lora


def _choose_frozen_paths(choices: Choices) -> frozenset[str]:
    model, patterns = choices.model, choices.settings.optimizer.freeze
    biases = model.experts > 0 and model.router_bias
    if not choices.lora and not patterns and not biases:
        return frozenset()
    names = names_of(choices.abstract())
    if choices.lora:
        frozen = frozenset(name for name in names if not is_adapter(name))
    else:
        frozen = frozen_names(names, patterns, model.scan)
    _check_frozen(choices.settings, frozen, choices.precision)
    return frozen | {name for name in names if name.endswith(ROUTER_BIAS)}


def _check_frozen(settings: Settings, frozen: Collection[str], precision: Precision) -> None:
    if not frozen:
        return
    why = f"optimizer.freeze={','.join(settings.optimizer.freeze)}"
    if settings.lora.rank:
        why = f"lora.rank={settings.lora.rank}"
    if settings.offload.params:
        raise ValueError(
            f"offload.params=true cannot be combined with {why}: frozen parameters stay on the device, and there are "
            "few trained parameters to offload; set offload.params=false"
        )
    products = sorted(name for name in frozen if fnmatchcase(name, "blocks.*.w_*"))
    if precision.matmul != "wide" and products:
        raise ValueError(
            f"precision.preset=fp8 cannot be combined with {why}: fp8 matmuls compute the gradient of every weight, "
            f"also of the frozen {products[0]}; choose precision.preset=bf16"
        )
