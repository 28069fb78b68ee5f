"""The record of all choices that a program is assembled from: a config applied to some devices."""

import dataclasses
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from bytescope.model import LayerPolicies, ModelConfig, Precision, Transformer
from bytescope.model.adapters import Lora
from bytescope.model.frozen import freeze
from bytescope.model.placement import Placement
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.parallel.layout import Layout
from bytescope.train.pipeline.schedule import Schedule
from bytescope.train.pipeline.stages import Stages
from bytescope.train.program.program_settings import Settings
from bytescope.train.step.losses import LossConfig
from bytescope.train.step.optimizer.rules import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Choices:
    """The settings of a training program on given devices, after all checks (the result of `checks.check`).

    Fields:
      settings: the config's values, as typed records.
      layout: the shardings over the mesh.
      model, precision: as in `settings`, with the kernels that the devices run.
      kernel: (attention kernel, reason).
      matmul: (how weight matmuls of the blocks are computed, reason).
      moe_kernel: (how expert matmuls are computed, reason); ("", "") without experts.
      remat: the remat policy (tensors to save for the backward pass) of every layer.
      batch: the numbers of sequences, micro-batches and tokens of an update.
      frozen: dotted paths of the parameters that are not trained.
      lora: the sizes of the LoRA adapters, None without adapters.
      schedule, stages: the pipeline's schedule and the layers of its stages, None without a pipeline.
    """

    settings: Settings
    layout: Layout
    model: ModelConfig
    precision: Precision
    kernel: tuple[str, str]
    matmul: tuple[str, str]
    moe_kernel: tuple[str, str]
    remat: LayerPolicies
    batch: BatchAlgebra
    frozen: frozenset[str]
    lora: Lora | None
    schedule: Schedule | None
    stages: Stages | None

    @property
    def config(self) -> ConfigDict:
        """The whole config from which the choices were made."""
        return self.settings.config

    @property
    def loss(self) -> LossConfig:
        """The config keys `loss.*`: kind of cross-entropy, chunk size, and coefficients of the experts' auxiliary
        losses."""
        return self.settings.loss

    @property
    def optimizer(self) -> OptimizerConfig:
        """The config keys `optimizer.*`, such as name, learning rate and clipping."""
        return self.settings.optimizer

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The names of the int32 arrays in a batch: "inputs" and "targets", and for some data "segments" or "mask"."""
        return self.settings.batch_names

    @property
    def order(self) -> dict[str, tuple[int, ...]]:
        """The order in which a pipeline stores the layers: name of a stack of layers -> for each of its rows the index
        of the layer, -1 for an unused row. Stacks in the model's own order are left out."""
        return self.stages.order if self.stages else {}

    def transformer(
        self, rngs: nnx.Rngs, *, place: Placement | None = None, remat: LayerPolicies | None = None
    ) -> Transformer:
        """Returns the model with these choices.

        Args:
          rngs: initializes the parameters.
          place, remat: replace the layout and the remat policies if they are given.
        """
        model = Transformer(
            self.model,
            self.precision,
            remat=remat or self.remat,
            place=place or self.layout,
            ahead=self.settings.mesh.prefetch,
            base=self.settings.lora.base,
            lora=self.lora,
            pooled=self.settings.loss.balance_layers == "pooled",
            order=self.order,
            rngs=rngs,
        )
        return freeze(model, self.frozen, self.precision.compute) if self.frozen else model

    def abstract(self, **changes: Any) -> Transformer:
        """Returns the model with a shape in place of each parameter, without allocating memory. `changes`: keyword
        arguments of `transformer`."""
        return nnx.eval_shape(lambda: self.transformer(nnx.Rngs(params=0), **changes))
