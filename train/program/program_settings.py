"""A config as typed records: one dataclass for each group of keys.

`read_settings` checks every value separately. `checks.py` checks that the values fit together.
"""

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict

from bytescope.model import LayerPolicies
from bytescope.model.model_config import ModelKeys
from bytescope.train.data.batch_algebra import BatchConfig, batch_names
from bytescope.train.parallel.axes import AXES
from bytescope.train.program.config_files import flatten
from bytescope.train.program.valid_values import check_values
from bytescope.train.step.losses import LossConfig
from bytescope.train.step.optimizer.rules import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters: the config keys `lora.*`. configs/base.py explains each key."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float
    base: str


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of parameters, computation and gradients, and the loss scale: the config keys `precision.*`.
    configs/base.py explains each key."""

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
    """Activations to save, recompute or move to host memory: the config keys `remat.*`. configs/base.py explains each
    key."""

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
    """Placement of optimizer state and parameters in host memory: the config keys `offload.*`. configs/base.py explains
    each key."""

    optimizer: bool
    params: bool


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The device mesh and the sharding strategy: the config keys `mesh.*`. configs/base.py explains each key."""

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
    """The schedule of pipeline parallelism: the config keys `pipeline.*`. configs/base.py explains each key."""

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
      batch_names: names of the arrays of a batch.
      The other fields are the groups of the same names.
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
          ValueError: a policy, name or range does not exist.
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
