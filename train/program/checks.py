"""What a config may contain: values of tables, least values, and what has to fit together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.remat.remat_problem import COSTS
from bytescope.memory.units import parse_bytes
from bytescope.model import ModelConfig, Precision, RematPlan
from bytescope.model.adapters import TARGETS, Lora
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.attention.kinds import KINDS
from bytescope.model.experts.exchange import DISPATCHES
from bytescope.model.experts.expert_kernels import MOE_KERNELS
from bytescope.model.experts.routers import ROUTERS
from bytescope.model.layers import MLPS, POSITIONS
from bytescope.model.names import NAMES, TILED, names_in
from bytescope.model.norm import NORMS
from bytescope.model.precision import PRECISIONS, ROLES
from bytescope.model.quantized.quantized_formats import BASES
from bytescope.model.remat.policies import AUTO, GRANULARITIES, ON_HOST, POLICIES
from bytescope.train.data import settings
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.data.tokenizer import ByteTokenizer
from bytescope.train.parallel.axes import SHARDS, STRATEGIES
from bytescope.train.parallel.layout import Layout
from bytescope.train.program.config_files import flatten
from bytescope.train.step.losses import LOSSES
from bytescope.train.step.modes import ACCUMULATION
from bytescope.train.step.optimizer.host_offload import has_host_memory
from bytescope.train.step.optimizer.loss_scale import GREATEST
from bytescope.train.step.optimizer.rules import CLIPS, OPTIMIZERS, SCALINGS
from bytescope.train.step.routing import BALANCE_LAYERS

if TYPE_CHECKING:  # the module imports grain
    from bytescope.train.data.batches import Data

# Every key that names a row of a table: a typo fails here, with the valid names.
CHOICES: Mapping[str, Collection[str]] = {
    "model.norm": NORMS,
    "model.mlp": MLPS,
    "model.position": POSITIONS,
    "loss.kind": LOSSES,
    "loss.balance_layers": BALANCE_LAYERS,
    "batch.mode": ACCUMULATION,
    "optimizer.name": OPTIMIZERS,
    "optimizer.batch_scaling": SCALINGS,
    "optimizer.clip": CLIPS,
    "remat.cost": COSTS,
    "mesh.strategy": STRATEGIES,
    "mesh.dispatch": DISPATCHES,
    **{f"data.{key}": table for key, table in settings.CHOICES.items()},
}

# The same for what tables of the model name; those of tuples name several, and those of roles may be left empty.
OF_THE_MODEL = {
    "precision.preset": PRECISIONS,
    **{f"precision.{role}": table for role, table in ROLES.items()},
    "model.attention": ("auto", *KERNELS),
    "model.attention_kind": KINDS,
    "model.router": ROUTERS,
    "model.moe_kernel": MOE_KERNELS,
    "remat.policy": (*POLICIES, AUTO),
    "remat.granularity": GRANULARITIES,
    "remat.save": NAMES,
    "remat.offload": NAMES,
    "lora.base": BASES,
}
MAY_BE_EMPTY = tuple(f"precision.{role}" for role in ROLES)

# key -> least value. Sizes of the model, batch and mesh have checks of their own.
LEAST = {
    "seed": 0,
    "train.steps": 1,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 0,
    "train.checkpoint_every": 0,
    "train.sample_tokens": 0,
    "train.sample_temperature": 0.0,
    "train.stall_timeout": 0.0,
    "data.skip_bad": 0,
    "model.norm_eps": 0.0,
    "model.attention_scale": 0.0,
    "model.attention_softcap": 0.0,
    "model.logits_softcap": 0.0,
    "model.rope_local_theta": 0.0,
    "model.global_every": 0,
    "optimizer.learning_rate": 0.0,
    "optimizer.warmup_steps": 0,
    "optimizer.end_fraction": 0.0,
    "optimizer.eps": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "loss.chunk": 1,
    "loss.balance": 0.0,
    "loss.router_z": 0.0,
    "optimizer.router_bias_rate": 0.0,
    "model.router_scale": 0.0,
    "mesh.prefetch": 0,
    "batch.tokens": 0,
    "optimizer.base_batch_tokens": 0,
    "lora.rank": 0,
    "precision.loss_scale_init": 2.0**-14,
    "precision.loss_scale_growth_every": 1,
}


# Keys whose values lie above 0, and those of rates of decay: from 0 to below 1.
POSITIVE = ("model.init_std", "model.embed_scale", "model.rope_theta")
DECAYS = ("optimizer.b1", "optimizer.b2", "optimizer.momentum")
# What may hold paths, whose bytes need not be UTF-8.
PATHS = ("data.", "init.", "train.cache_dir")
_LONE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes that are not
# Whole numbers are int32 on a device, or count what no run has more of; tokens per update may be more. Others are
# float32 there.
LARGEST, LARGEST_TOKENS = 2**31 - 1, 2**63 - 1
TOKENS = ("batch.tokens", "optimizer.base_batch_tokens")
LARGEST_FLOAT = float(jnp.finfo(jnp.float32).max)
# Maximum number of passes over the data without a warning: repeated tokens lose most of their value within about 16
# passes (Muennighoff et al. 2023, arXiv 2305.16264).
MANY_PASSES = 16


def _value(config: ConfigDict, key: str) -> Any:
    """The value of the dotted `key`."""
    *groups, name = key.split(".")
    for group in groups:
        config = config[group]
    return config[name]


def check_values(config: ConfigDict) -> None:
    """Raises ValueError for a value that is not in its table, not a finite number, or outside the range of its key."""
    for key, value in flatten(config).items():
        if isinstance(value, str) and not key.startswith(PATHS) and _LONE.search(value):
            raise ValueError(f"{key}={value!r} is not UTF-8: give text in that encoding")
        if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:  # nor nan
            raise ValueError(f"{key}={value}: give a finite number of float32")
        largest = LARGEST_TOKENS if key in TOKENS else LARGEST
        if isinstance(value, int) and abs(value) > largest:
            raise ValueError(f"{key}={value}: give at most {largest}")
    for key, least in LEAST.items():
        if (value := _value(config, key)) < least:
            raise ValueError(f"{key}={value}: give {least} or more")
    vocab, multiple = config.model.vocab_size, config.model.vocab_multiple
    if multiple > 0 and vocab > (max_vocab := LARGEST // multiple * multiple):
        raise ValueError(
            f"model.vocab_size={vocab} is too large, rounded up to a multiple of model.vocab_multiple="
            f"{multiple}: give at most {max_vocab}"
        )
    for key in POSITIVE:
        if (value := _value(config, key)) <= 0:
            raise ValueError(f"{key}={value}: give a number above 0")
    for key in DECAYS:
        if not 0 <= (value := _value(config, key)) < 1:
            raise ValueError(f"{key}={value}: give a number from 0 to below 1, such as 0.9")
    for key, table in CHOICES.items():
        if (value := _value(config, key)) not in table:
            raise ValueError(f"{key}={value!r}: {remedy_for(value, table)}")
    _check_names(config)
    if (scale := config.precision.loss_scale_init) > GREATEST:
        raise ValueError(f"precision.loss_scale_init={scale}: give at most {GREATEST:g}")
    if config.remat.budget:
        try:
            parse_bytes(config.remat.budget)
        except ReportError as error:
            raise ValueError(f"remat.budget: {error}") from error


def _check_names(config: ConfigDict) -> None:
    """Raises ValueError for a name that no table of the model has; the model says so too, without the nearest."""
    for key, table in OF_THE_MODEL.items():
        value = _value(config, key)
        if (key in MAY_BE_EMPTY and not value) or (key == "remat.policy" and "+" in value):  # the names of tensors
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if name not in table:
                raise ValueError(f"{key}={name!r}: {remedy_for(str(name), table)}")
    for text in config.remat.layers:  # 0-8:none, or 0-8:q_rot+v+block_in@host
        for name in str(text).partition(":")[2].split("+"):
            if name.removesuffix(ON_HOST) not in (*NAMES, *POLICIES, ""):
                raise ValueError(f"remat.layers={text!r}: {remedy_for(name, (*POLICIES, *NAMES))}")


def check_without_devices(config: ConfigDict) -> None:
    """Raises ValueError for what no device could run: values outside their tables and ranges, policies that do not
    exist. It starts no device; sizes that have to fit each other, or a mesh, are left to `choices.check`."""
    check_values(config)
    if config.remat.policy != AUTO:
        remat_plan(config, fp8=False)


def remat_plan(config: ConfigDict, fp8: bool) -> RematPlan:
    """The plan of `config.remat`; fp8: whether the products of the blocks are. Raises ValueError as it does."""
    remat = config.remat
    return RematPlan(
        remat.policy,
        tuple(remat.save),
        tuple(remat.offload),
        tuple(remat.layers),
        remat.granularity,
        fp8=fp8,
        experts=config.model.experts > 0,
    )


def doubtful(config: ConfigDict, platform: str) -> list[str]:
    """Returns a warning line for each setting that is allowed but probably not meant on devices of `platform`."""
    lines, optimizer, steps = [], config.optimizer, config.train.steps
    if optimizer.warmup_steps > steps:
        lines.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} of train.steps={steps}: the learning rate never "
            f"comes to {optimizer.learning_rate:g}; lower one or raise the other"
        )
    if not optimizer.learning_rate:
        lines.append("optimizer.learning_rate=0: no parameter will change")
    if platform == "cpu":
        lines += [
            f"offload.{name}=true on a CPU, whose memory is the host's: this frees nothing; set it false"
            for name in ("optimizer", "params")
            if config.offload[name]
        ]
    return lines


def doubtful_data(config: ConfigDict, data: Data, read: int) -> list[str]:
    """Returns a warning line for each setting that is allowed but probably not meant for this data.

    read: number of sequences that all updates of the run read.
    """
    lines, steps, vocabulary = [], config.train.steps, config.model.vocab_size
    passes = read / len(data.train)
    if passes > MANY_PASSES:
        lines.append(
            f"train.steps={steps} reads each sequence {passes:,.0f} times, and after {MANY_PASSES} passes a "
            f"model only memorizes the data: set train.steps={max(int(steps * MANY_PASSES / passes), 1)}, or "
            "give more data"
        )
    if data.tokenizer.name == ByteTokenizer.name and vocabulary != data.vocab_size:
        lines.append(
            f"data.tokenizer=bytes makes {data.vocab_size} different tokens, and model.vocab_size="
            f"{vocabulary}: set data.tokenizer to the model's tokenizer.json, or model.vocab_size="
            f"{data.vocab_size}"
        )
    return lines


def check_sequence(config: ConfigDict, layout: Layout) -> None:
    """Raises ValueError where the sequence is not divisible by the number of devices that share it, or by their chunks,
    and for what ring attention does not have."""
    context, tensor = layout.context, layout.mesh.shape["tensor"]
    if context > 1 and config.model.dropout:
        raise ValueError(
            f"model.dropout={config.model.dropout} with mesh.context={context}: ring attention has no "
            "dropout; set model.dropout=0 or mesh.context=1"
        )
    if context > 1 and config.model.attention not in ("auto", "chunked"):
        raise ValueError(
            f"model.attention={config.model.attention} with mesh.context={context}: ring attention "
            "runs the chunked kernel only; set model.attention=auto"
        )
    if context > 1 and config.model.attention_kind != "gqa":
        raise ValueError(
            f"model.attention_kind={config.model.attention_kind} with mesh.context={context}: ring "
            "attention has keys and values of one width; set mesh.context=1"
        )
    parts, shown = 1, []
    if context > 1:
        parts = 2 * context
        shown.append(f"2 x mesh.context {context}")
    if config.mesh.sequence_parallel:
        parts = math.lcm(parts, context * tensor)
        shown.append(f"tensor {tensor}")
    if config.data.seq_len % parts:
        raise ValueError(
            f"data.seq_len={config.data.seq_len} is not divisible by {' and '.join(shown)}: make it a "
            f"multiple of {parts}, or change the mesh"
        )


def check_tiles(config: ConfigDict, layout: Layout) -> None:
    """Raises ValueError where `model.mlp_chunk` does not divide a device's positions, or recomputes a tensor that
    `custom` wants to keep."""
    chunk, here = config.model.mlp_chunk, config.data.seq_len // layout.stream_parts
    if not chunk:
        return
    if chunk < here and here % chunk:
        near = max(size for size in range(1, chunk) if here % size == 0)
        raise ValueError(
            f"model.mlp_chunk={chunk} does not divide the {here} positions that a device has of "
            f"data.seq_len={config.data.seq_len}: {near} does"
        )
    if hidden := sorted({*config.remat.save, *config.remat.offload}.intersection(TILED)):
        raise ValueError(
            f"checkpoint name {hidden[0]!r} is never kept with model.mlp_chunk={chunk}, which recomputes "
            "the MLP: leave it out, or set model.mlp_chunk=0"
        )


def check_unroll(model: ModelConfig, remat: RematPlan) -> None:
    """Raises ValueError where `model.unroll` layers do not divide a range of layers that is looped over."""
    for segment in remat.segments(model.n_layers):
        count = (segment.stop - segment.start) // segment.groups
        if model.unroll < count and count % model.unroll:
            near = max(size for size in range(1, model.unroll) if count % size == 0)
            raise ValueError(
                f"model.unroll={model.unroll} does not divide the {count} layers of a loop "
                f"(remat.policy={segment.name}): {near} does; {count} unrolls them all"
            )


def check_effort(config: ConfigDict, kernel: str, layout: Layout) -> None:
    """Raises ValueError for an effort level at which XLA's compiler (0.10 to 0.12) would abort the process."""
    level = config.xla.optimization_level
    if level not in ("", "O0") and kernel == "chunked" and layout.mesh.size > 1:
        raise ValueError(
            f"xla.optimization_level={level}: XLA aborts on chunked attention over several devices at "
            "this level; set model.attention=cudnn or naive, or leave the level empty"
        )


def check_offload(config: ConfigDict, layout: Layout, batch: BatchAlgebra) -> None:
    """Raises ValueError for state in host memory where there is no such memory, or where it cannot be streamed."""
    asked = next((f"offload.{name}=true" for name in ("params", "optimizer") if config.offload[name]), "")
    if asked and not has_host_memory(layout.mesh.devices.flat[0]):
        raise ValueError(f"{asked}: {layout.mesh.devices.flat[0].device_kind} has no pinned host memory; set it false")
    if not config.offload.params:
        return
    if batch.accumulation > 1:
        raise ValueError(
            f"{asked} with {batch.accumulation} micro-steps per update (batch.accumulation): gradients of "
            "parameters in host memory go there too, and nothing can sum them there; raise batch.micro, "
            "with a remat policy, or set offload.params=false"
        )
    if layout.strategy.stored and not layout.strategy.by_layer:
        raise ValueError(
            f"{asked} with mesh.strategy={config.mesh.strategy}: that strategy copies all parameters to "
            "the device at once; choose zero3 or ddp, or set offload.params=false"
        )


# The keys, with their values, that need the update layer by layer.
PARTWISE = (
    ("optimizer.fused_backward", True),
    ("offload.optimizer", True),
    ("offload.params", True),
    ("optimizer.clip", "layer"),
)


def check_partwise(config: ConfigDict, precision: Precision) -> str:
    """The first row of PARTWISE that the config asks for, as key=value; "" if there is none.

    Raises:
      ValueError: there is one, and something else needs the update of all layers together.
    """
    found = [(key, value) for key, value in PARTWISE if _value(config, key) == value]
    if not found:
        return ""
    key, value = found[0]
    asked = f"{key}={str(value).lower()}"
    if precision.loss_scale == "dynamic":
        raise ValueError(
            f"{asked} with precision.preset={config.precision.preset}: an overflow in one layer would "
            "have to undo the update of all layers; choose bf16, which needs no loss scale"
        )
    if config.batch.accumulation_schedule:
        raise ValueError(
            f"{asked} with batch.accumulation_schedule: an update layer by layer takes one number of "
            "micro-batches; set batch.accumulation"
        )
    return asked


def check_fused(config: ConfigDict, remat: RematPlan, batch: BatchAlgebra, trained: Collection[str]) -> None:
    """Raises ValueError for what an update inside the backward pass cannot be combined with.

    trained: the top of the tree of trained parameters.
    """
    asked = "optimizer.fused_backward=true"
    if config.model.experts:
        raise ValueError(
            f"{asked} with model.experts={config.model.experts}: their auxiliary losses are known only "
            "after all layers; set optimizer.fused_backward=false"
        )
    if "blocks" not in trained:
        raise ValueError(
            f"{asked} with all blocks frozen (optimizer.freeze): no layer has an update; set "
            "optimizer.fused_backward=false"
        )
    if batch.accumulation > 1:
        raise ValueError(
            f"{asked} with {batch.accumulation} micro-steps per update (batch.accumulation): a layer is "
            "updated before the next micro-batch is read; raise batch.micro instead"
        )
    if config.optimizer.clip_norm and config.optimizer.clip == "global":
        raise ValueError(
            f"{asked} with optimizer.clip_norm={config.optimizer.clip_norm}: the norm of all gradients is "
            "known only after all layers are updated; set optimizer.clip=layer, or optimizer.clip_norm=0"
        )
    if not config.model.scan:
        raise ValueError(
            f"{asked} with model.scan=false: the update is part of the loop over layers; set model.scan=true"
        )
    for segment in remat.segments(config.model.n_layers):
        if segment.groups > 1:
            raise ValueError(
                f"{asked} with remat.policy={segment.name}: groups of layers are recomputed together; "
                "choose full, or another policy without groups"
            )


def check_traced(
    remat: RematPlan, loss: Callable[..., Any], state: Any, batch: BatchAlgebra, names: Sequence[str]
) -> None:
    """Raises ValueError for a checkpoint name that the config gives and the program lacks: JAX would ignore it.

    `loss`: (params, batch, dropout_key_B, frozen) -> scalar; `state`: the abstract TrainState; `names`: of the arrays
    of a batch.
    """
    asked = remat.asked
    if not asked:
        return
    array = jax.ShapeDtypeStruct((batch.rows, batch.seq_len), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch.rows))
    # Some names exist only where a custom gradient keeps them, so the gradient is traced.
    traced = jax.make_jaxpr(jax.grad(loss, has_aux=True))(state.params, dict.fromkeys(names, array), keys, state.frozen)
    made = names_in(traced.jaxpr)
    if missing := asked - made:
        raise ValueError(
            f"checkpoint name {min(missing)!r} does not occur in this program: choose from {', '.join(sorted(made))}"
        )


def adapters_of(config: ConfigDict, layout: Layout) -> Lora | None:
    """The adapters of the group `lora`, None for a rank of 0.

    Raises:
      ValueError: a value that no adapter can have, or what cannot be combined with adapters.
    """
    group = config.lora
    if not group.rank:
        return None
    asked = f"lora.rank={group.rank}"
    if config.model.attention_kind != "gqa":
        raise ValueError(
            f"{asked} with model.attention_kind={config.model.attention_kind}: adapters are beside the "
            "matrices of gqa; set lora.rank=0"
        )
    shards = math.prod(layout.mesh.shape[axis] for axis in SHARDS)
    lora = Lora(group.rank, group.alpha, tuple(group.targets), group.dropout, shared=group.rank % shards == 0)
    if config.optimizer.freeze:
        raise ValueError(
            f"optimizer.freeze={','.join(config.optimizer.freeze)} with {asked}, which freezes everything "
            "but the adapters: leave it empty"
        )
    if not MLPS[config.model.mlp][0] and set(lora.targets) == {"gate"}:
        raise ValueError(
            f"lora.targets=gate with model.mlp={config.model.mlp}, which has no gate: choose others of "
            f"{', '.join(TARGETS)}"
        )
    dense = config.model.shared_experts or ModelConfig.from_dict(config.model).expert_layers < config.model.n_layers
    if not dense and set(lora.targets) <= {"gate", "up", "down"}:
        raise ValueError(
            f"lora.targets={','.join(lora.targets)} of a model whose every MLP is a mixture: routed "
            "experts have no adapters; choose some of q, k, v, o"
        )
    for key, what in (("model.mlp_chunk", config.model.mlp_chunk), ("mesh.context", config.mesh.context - 1)):
        if lora.dropout and what > 0:
            raise ValueError(
                f"lora.dropout={lora.dropout} with {key}: its masks are drawn for whole sequences on one "
                f"device; set lora.dropout=0, or leave {key} at its default"
            )
    return lora


def check_frozen(config: ConfigDict, frozen: Collection[str], precision: Precision) -> None:
    """Raises ValueError for what cannot be combined with the parameters `frozen`, dotted paths."""
    if not frozen:
        return
    patterns = ",".join(config.optimizer.freeze)
    why = f"lora.rank={config.lora.rank}" if config.lora.rank else f"optimizer.freeze={patterns}"
    if config.offload.params:
        raise ValueError(
            f"offload.params=true with {why}: frozen parameters stay on the device, and those that are "
            "trained are few; set offload.params=false"
        )
    products = sorted(name for name in frozen if fnmatchcase(name, "blocks.*.w_*"))
    if precision.matmul != "wide" and products:
        raise ValueError(
            f"precision.preset=fp8 with {why}: products in fp8 compute the gradient of every weight, that "
            f"of {products[0]} too; choose precision.preset=bf16"
        )
