"""A config as typed records: one dataclass for each group of keys.

`read_settings` checks every value separately, by the field of its key (`config_fields.FIELDS`). `checks.py` checks that
the values fit together.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from bytescope.model import LayerPolicies
from bytescope.model.model_config import ModelKeys
from bytescope.train.config_fields import FIELDS, MAX_INT
from bytescope.train.data.batch_algebra import BatchConfig, batch_names
from bytescope.train.parallel.axes import AXES
from bytescope.train.program.config_files import flatten
from bytescope.train.step.losses import LossConfig
from bytescope.train.step.optimizer.rules import OptimizerConfig


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


def check_values(values: Mapping[str, Any]) -> None:
    """Checks each value of a config by itself. `values`: dotted key -> value.

    Raises:
      ValueError: a value is unknown, not finite, or out of range. The message has the remedy.
    """
    for key, value in values.items():
        FIELDS[key].check(value)
    _check_vocabulary(values["model.vocab_size"], values["model.vocab_multiple"])


def _check_vocabulary(vocab_size: int, multiple: int) -> None:
    if multiple <= 0:  # reported by `ModelConfig`
        return
    max_size = MAX_INT // multiple * multiple
    if vocab_size > max_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} exceeds int32 when rounded up to a multiple of model.vocab_multiple="
            f"{multiple}: give at most {max_size}"
        )
