"""A config as typed records: one dataclass for each group of keys.

`read_settings` checks every value separately, by tables of names and ranges of numbers. `checks.py` checks that the
values fit together.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.remat.remat_problem import COSTS
from bytescope.memory.units import MAX_COUNT, parse_bytes
from bytescope.model import LayerPolicies
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.block import KINDS
from bytescope.model.experts.exchange import DISPATCHES
from bytescope.model.experts.expert_kernels import MOE_KERNELS
from bytescope.model.experts.routers import ROUTERS
from bytescope.model.layers import MLPS, POSITIONS
from bytescope.model.model_config import ModelKeys
from bytescope.model.names import NAMES
from bytescope.model.norm import NORMS
from bytescope.model.precision import PRECISIONS, ROLES
from bytescope.model.quantized.quantized_formats import BASES
from bytescope.model.remat.policies import AUTO, GRANULARITIES, ON_HOST, POLICIES
from bytescope.train.data import settings as data_settings
from bytescope.train.data.batch_algebra import BatchConfig, batch_names
from bytescope.train.parallel.axes import AXES, STRATEGIES
from bytescope.train.program.config_files import flatten
from bytescope.train.step.losses import LOSSES, LossConfig
from bytescope.train.step.optimizer.loss_scale import MAX_SCALE
from bytescope.train.step.optimizer.rules import CLIPS, OPTIMIZERS, OptimizerConfig
from bytescope.train.step.routing import BALANCE_LAYERS
from bytescope.train.step.train_step import ACCUMULATION


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The config keys `lora.*`: LoRA adapters.

    Fields:
      rank: rank of the adapters, 0 for no adapters.
      alpha: the output of an adapter is multiplied by alpha / rank.
      targets: matrices of the blocks that have an adapter, such as "q" and "up".
      dropout: dropout rate on the input of adapters.
      base: storage format of the blocks' frozen weights: "bf16", "nf4" or "int8".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float
    base: str


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The config keys `precision.*`: dtypes, given by name, and the loss scale. An empty dtype is the dtype of the
    preset.

    Fields:
      preset: name of a row of default dtypes, such as "bf16".
      param: dtype of the parameters between steps.
      compute: dtype of matrix products and activations.
      reduce: dtype of gradients before the update, in which devices sum them; "as_made" for the dtype in which they
        were computed.
      accumulator: dtype of the sum of the micro-batches' gradients.
      norm: dtype inside norms.
      logits: dtype in which logits are stored.
      rounding: "nearest" or "stochastic" rounding of updated parameters to bfloat16.
      cast: "layer" to cast parameters to `compute` as each layer reads them, "step" to cast all once per step and keep
        the copy.
      loss_scale: "none" or "dynamic".
      loss_scale_init: initial loss scale.
      loss_scale_growth_every: number of updates without overflow after which the loss scale doubles.
    """

    preset: str
    param: str
    compute: str
    reduce: str
    accumulator: str
    norm: str
    logits: str
    rounding: str
    cast: str
    loss_scale: str
    loss_scale_init: float
    loss_scale_growth_every: int


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """The config keys `remat.*`: which activations are saved, recomputed or moved to host memory.

    Fields:
      policy: name of the remat policy. "auto" searches for the policy with the least recomputation within `budget`.
      budget: for "auto", the maximum bytes that the step allocates per device, such as "72GiB"; "" for the device's
        limit.
      cost: what "auto" minimizes: "time" (predicted) or "flops" (recomputed).
      auto_offload: True if "auto" may move activations to pinned host memory.
      save: for "custom", checkpoint names of activations to save.
      offload: for "custom", checkpoint names of activations to save in pinned host memory.
      layers: ranges of layers with another policy, such as "0-8:none".
      granularity: "block" for one checkpoint per block, "parts" for one around attention and one around the MLP.
      xla_pass: True to enable XLA's own rematerialization pass.
    """

    policy: str
    budget: str
    cost: str
    auto_offload: bool
    save: tuple[str, ...]
    offload: tuple[str, ...]
    layers: tuple[str, ...]
    granularity: str
    xla_pass: bool


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """The config keys `offload.*`.

    Fields:
      optimizer: True to keep the moments of the optimizer in host memory.
      params: True to keep the master parameters in host memory.
    """

    optimizer: bool
    params: bool


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The config keys `mesh.*`: the device mesh and the sharding strategy.

    Fields:
      strategy: "ddp", "zero1", "zero2" or "zero3".
      stage: number of pipeline stages, each with a range of layers.
      data: number of replicas of the sharded state.
      fsdp: number of devices over which optimizer state, gradients and parameters are sharded.
      expert: number of devices over which experts are sharded.
      context: number of devices over which a sequence is sharded (ring attention).
      tensor: number of devices over which heads, MLP width and vocabulary are sharded.
      sequence_parallel: True to also shard norms and the residual stream along the sequence, over the tensor axis.
      dispatch: how token rows reach the devices of their experts, such as "all_to_all" or "allgather".
      prefetch: number of layers whose parameters GPUs gather in advance.
    """

    strategy: str
    stage: int
    data: int
    fsdp: int
    expert: int
    context: int
    tensor: int
    sequence_parallel: bool
    dispatch: str
    prefetch: int

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> number of devices along it; -1 for all remaining devices."""
        return {axis: getattr(self, axis) for axis in AXES}


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The config keys `pipeline.*`: the schedule of pipeline parallelism.

    Fields:
      schedule: "1f1b", "interleaved" or "v".
      virtual: number of chunks of layers per pipeline stage.
    """

    schedule: str
    virtual: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config values that determine the training program. Each value is valid by itself; combinations are not
    checked yet.

    Fields:
      config: the whole config.
      seed: random seed.
      steps: number of optimizer updates.
      seq_len: tokens per sequence.
      batch_names: names of the arrays of a batch, such as "inputs" and "targets".
      model, lora, loss, precision, remat, batch, optimizer, offload, mesh, pipeline: the values of the config group
        with this name, such as `config.lora`.
      xla: key of the config group `xla` -> its value, an option of the XLA compiler.
    """

    config: ConfigDict
    seed: int
    steps: int
    seq_len: int
    batch_names: tuple[str, ...]
    model: ModelKeys
    lora: LoraConfig
    loss: LossConfig
    precision: PrecisionConfig
    remat: RematConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    offload: OffloadConfig
    mesh: MeshConfig
    pipeline: PipelineConfig
    xla: Mapping[str, str]

    @property
    def layerwise_key(self) -> str:
        """The first setting, such as "offload.params=true", that requires the optimizer to update one layer at a time;
        "" if there is none."""
        asked = {
            "optimizer.fused_backward=true": self.optimizer.fused_backward,
            "offload.optimizer=true": self.offload.optimizer,
            "offload.params=true": self.offload.params,
            "optimizer.clip=layer": self.optimizer.clip == "layer",
        }
        return next((key for key, is_asked in asked.items() if is_asked), "")

    def layer_policies(self, *, fp8: bool) -> LayerPolicies:
        """Returns the remat policy of each layer. `fp8`: True if the weight matmuls of the blocks are computed in fp8.

        Raises:
          ValueError: the config has an unknown policy or checkpoint name, or an invalid range of layers.
        """
        remat = self.remat
        return LayerPolicies(
            remat.policy,
            remat.save,
            remat.offload,
            remat.layers,
            remat.granularity,
            fp8=fp8,
            experts=self.model.experts > 0,
        )


def read_settings(config: ConfigDict) -> Settings:
    """Reads the settings from a config and checks each value by itself.

    Raises:
      ValueError: a value is unknown, not finite, or out of range.
    """
    check_values(flatten(config))
    data = config.data
    return Settings(
        config=config,
        seed=config.seed,
        steps=config.train.steps,
        seq_len=data.seq_len,
        batch_names=batch_names(examples=data.format != "text", packing=data.packing, experts=config.model.experts > 0),
        model=ModelKeys(**config.model),
        lora=LoraConfig(**config.lora),
        loss=LossConfig(**config.loss),
        precision=PrecisionConfig(**config.precision),
        remat=RematConfig(**config.remat),
        batch=BatchConfig(**config.batch),
        optimizer=OptimizerConfig(**config.optimizer),
        offload=OffloadConfig(**config.offload),
        mesh=MeshConfig(**config.mesh),
        pipeline=PipelineConfig(**config.pipeline),
        xla=dict(config.xla),
    )


# ---- valid values ----

# Keys whose values are row names of a table: a typo is reported with the valid names.
CHOICES: Mapping[str, Collection[str]] = {
    "model.norm": NORMS,
    "model.mlp": MLPS,
    "model.position": POSITIONS,
    "loss.kind": LOSSES,
    "loss.balance_layers": BALANCE_LAYERS,
    "batch.mode": ACCUMULATION,
    "optimizer.name": OPTIMIZERS,
    "optimizer.clip": CLIPS,
    "remat.cost": COSTS,
    "mesh.strategy": STRATEGIES,
    "mesh.dispatch": DISPATCHES,
    **{f"data.{key}": table for key, table in data_settings.CHOICES.items()},
}

# The same for the tables in model/. A key with a tuple as value names several rows. A role may be empty.
OF_THE_MODEL: Mapping[str, Collection[str]] = {
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

# Key -> minimum value. Sizes of the model, batch and mesh are checked where they are used.
MIN_VALUES: Mapping[str, float] = {
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
    "lora.rank": 0,
    "precision.loss_scale_init": 2.0**-14,
    "precision.loss_scale_growth_every": 1,
}
# Keys whose values must be above 0, and decay rates, which must be at least 0 and below 1.
POSITIVE = ("model.init_std", "model.embed_scale", "model.rope_theta")
DECAYS = ("optimizer.b1", "optimizer.b2", "optimizer.momentum")
# Keys, or prefixes of keys, whose values may be paths: their bytes need not be UTF-8.
PATHS = ("data.", "init.", "train.cache_dir")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python decodes bytes that are not UTF-8 to these
# Integers must fit int32, because they are int32 on a device or count things of which no run has more. Tokens per
# update may be larger. What the host keeps a record, a thread or a batch for is limited further, to what it can keep.
# Other numbers must fit float32.
MAX_INT = 2**31 - 1
MAX_VALUES: Mapping[str, int] = {
    "batch.tokens": MAX_COUNT,
    "model.n_layers": 2**16,
    "data.prefetch": 2**16,
    "data.workers": 2**12,
}
MAX_FLOAT = float(jnp.finfo(jnp.float32).max)


def check_values(values: Mapping[str, Any]) -> None:
    """Checks each value of a config by itself. `values`: dotted key -> value.

    Raises:
      ValueError: a value is unknown, not finite, or out of range. The message has the remedy.
    """
    for key, value in values.items():
        _check_text_or_number(key, value)
    for key, minimum in MIN_VALUES.items():
        if values[key] < minimum:
            raise ValueError(f"{key}={values[key]} is too small: give {minimum} or more")
    _check_vocabulary(values["model.vocab_size"], values["model.vocab_multiple"])
    for key in POSITIVE:
        if values[key] <= 0:
            raise ValueError(f"{key}={values[key]} is not positive: give a number above 0")
    for key in DECAYS:
        if not 0 <= values[key] < 1:
            raise ValueError(f"{key}={values[key]} is out of range: give a number from 0 to below 1, such as 0.9")
    for key, table in CHOICES.items():
        if values[key] not in table:
            raise ValueError(f"{key}={values[key]!r}: {remedy_for(values[key], table)}")
    _check_names_exist(values)
    if values["precision.loss_scale_init"] > MAX_SCALE:
        raise ValueError(
            f"precision.loss_scale_init={values['precision.loss_scale_init']} is too large: give at most {MAX_SCALE:g}"
        )
    if values["remat.budget"]:
        try:
            parse_bytes(values["remat.budget"])
        except ReportError as error:
            raise ValueError(f"remat.budget: {error}") from error


def _check_text_or_number(key: str, value: Any) -> None:
    if isinstance(value, str) and not key.startswith(PATHS) and _LONE_SURROGATE.search(value):
        raise ValueError(f"{key}={value!r} is not valid UTF-8: write this value in UTF-8")
    if isinstance(value, float) and (math.isnan(value) or abs(value) > MAX_FLOAT):
        raise ValueError(f"{key}={value} is not finite in float32: give a finite number that float32 can represent")
    max_int = MAX_VALUES.get(key, MAX_INT)
    if isinstance(value, int) and abs(value) > max_int:
        raise ValueError(f"{key}={value} is too large: give at most {max_int}")


def _check_vocabulary(vocab_size: int, multiple: int) -> None:
    if multiple <= 0:  # reported by `ModelConfig`
        return
    max_size = MAX_INT // multiple * multiple
    if vocab_size > max_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} exceeds int32 when rounded up to a multiple of model.vocab_multiple="
            f"{multiple}: give at most {max_size}"
        )


def _check_names_exist(values: Mapping[str, Any]) -> None:
    for key, table in OF_THE_MODEL.items():
        value = values[key]
        if key in MAY_BE_EMPTY and not value:
            continue
        if key == "remat.policy" and "+" in value:  # names of tensors
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if name not in table:
                raise ValueError(f"{key}={name!r}: {remedy_for(str(name), table)}")
    for text in values["remat.layers"]:  # 0-8:none, or 0-8:q_rot+v+block_in@host
        for name in str(text).partition(":")[2].split("+"):
            if name.removesuffix(ON_HOST) not in (*NAMES, *POLICIES, ""):
                raise ValueError(f"remat.layers={text!r}: {remedy_for(name, (*POLICIES, *NAMES))}")
