"""What a config comes to on some devices: mesh, kernels, batch and remat plan, chosen and checked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from bytescope.model import ModelConfig, Precision, RematPlan, Transformer
from bytescope.model.adapters import Lora, is_adapter
from bytescope.model.attention.attention_kernels import choose_kernel, platform_of
from bytescope.model.experts.expert_kernels import choose_moe_kernel
from bytescope.model.fp8.fp8_products import choose_matmul
from bytescope.model.frozen import ROUTER_BIAS, freeze, names_of
from bytescope.model.remat.policies import AUTO
from bytescope.train.data.batch_algebra import BatchAlgebra, BatchConfig, batch_names
from bytescope.train.parallel.axes import AXES, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.parallel.xla_options import compiler_options
from bytescope.train.pipeline.schedule import Schedule
from bytescope.train.pipeline.stages import Stages
from bytescope.train.program.checks import (
    adapters_of,
    check_effort,
    check_frozen,
    check_offload,
    check_sequence,
    check_tiles,
    check_unroll,
    check_values,
    remat_plan,
)
from bytescope.train.program.expert_checks import check_experts
from bytescope.train.program.pipeline_checks import check_pipeline
from bytescope.train.step.losses import LossConfig
from bytescope.train.step.optimizer.rules import OptimizerConfig
from bytescope.train.step.optimizer.trainable import check_quantized, frozen_names


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a config comes to on some devices, checked: all that a program is assembled from.

    `kernel` is the attention kernel and the reason for it, `matmul` likewise how the matrix products of the blocks are
    computed, `moe_kernel` how those of experts are ("" without experts).
    `schedule`, `stages`: of a pipeline, and where its layers lie; None without one.
    `frozen`: dotted paths of the parameters that are not trained. `lora`: the adapters, None for none.
    """

    config: ConfigDict
    layout: Layout
    model: ModelConfig
    precision: Precision
    kernel: tuple[str, str]
    matmul: tuple[str, str]
    moe_kernel: tuple[str, str]
    remat: RematPlan
    batch: BatchAlgebra
    frozen: frozenset[str]
    lora: Lora | None
    schedule: Schedule | None
    stages: Stages | None

    @property
    def loss(self) -> LossConfig:
        """The group `loss`."""
        return LossConfig(**self.config.loss)

    @property
    def optimizer(self) -> OptimizerConfig:
        """The group `optimizer`."""
        return OptimizerConfig(**self.config.optimizer)

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The names of the arrays of a batch."""
        return names_of_batch(self.config)

    @property
    def order(self) -> dict[str, tuple[int, ...]]:
        """Stack -> the layer of each of its rows, of stacks whose layers a pipeline holds in another order."""
        return self.stages.order if self.stages else {}

    def transformer(
        self, rngs: nnx.Rngs, *, place: Layout | None = None, remat: RematPlan | None = None
    ) -> Transformer:
        """The model, with another layout or remat plan where one is given."""
        model = Transformer(
            self.model,
            self.precision,
            remat=remat or self.remat,
            place=place or self.layout,
            ahead=self.config.mesh.prefetch,
            base=self.config.lora.base,
            lora=self.lora,
            pooled=self.config.loss.balance_layers == "pooled",
            order=self.order,
            rngs=rngs,
        )
        return freeze(model, self.frozen, self.precision.compute) if self.frozen else model

    def abstract(self, **changes: Any) -> Transformer:
        """The same without memory: every parameter is a shape."""
        return nnx.eval_shape(lambda: self.transformer(nnx.Rngs(params=0), **changes))


def names_of_batch(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names of the arrays of a batch of this config."""
    data = config.data
    return batch_names(examples=data.format != "text", packing=data.packing, experts=config.model.experts > 0)


def check(config: ConfigDict, devices: Sequence[jax.Device]) -> Choices:
    """What a settled config comes to on these devices: mesh, kernels, batch, and what each layer keeps.

    Raises:
      ValueError: anything in the config that cannot run there, with the value and the remedy.
    """
    check_values(config)
    if config.remat.policy == AUTO:
        raise ValueError(
            "remat.policy=auto has to be settled before a program is built: "
            "call train.planning.remat_auto.settled_program"
        )
    precision = Precision.of(config.precision)
    layout = Layout(
        make_mesh({axis: config.mesh[axis] for axis in AXES}, devices),
        STRATEGIES[config.mesh.strategy],
        config.mesh.sequence_parallel,
        reduce=precision.reduce,
        dispatch=config.mesh.dispatch,
    )
    check_sequence(config, layout)
    check_tiles(config, layout)
    check_experts(config, layout)
    matmul = choose_matmul(precision, devices[0])
    precision = dataclasses.replace(precision, matmul=matmul[0])
    model = ModelConfig.from_dict(config.model)
    if config.data.seq_len > model.max_seq_len:
        raise ValueError(
            f"data.seq_len={config.data.seq_len} is longer than model.max_seq_len="
            f"{model.max_seq_len}: shorten the sequences, or raise model.max_seq_len"
        )
    kernel = choose_kernel(
        model,
        precision,
        platform_of(devices[0]),
        config.data.seq_len,
        packed="segments" in names_of_batch(config),
        head_parts=layout.mesh.shape["tensor"],
    )
    check_effort(config, kernel[0], layout)
    moe_kernel = choose_moe_kernel(model, platform_of(devices[0]))
    model = dataclasses.replace(model, attention=kernel[0], moe_kernel=moe_kernel[0])
    batch = BatchAlgebra.of(BatchConfig(**config.batch), layout.ranks, config.data.seq_len)
    check_offload(config, layout, batch)
    remat = remat_plan(config, fp8=matmul[0] != "wide")
    check_unroll(model, remat)  # refuses ranges of layers that do not fit the model, too
    # Refuses options that this platform's compiler does not have.
    compiler_options(config.xla, config.mesh.prefetch, devices[0].platform)
    schedule, stages = check_pipeline(config, layout, model, remat, batch)
    choices = Choices(
        config,
        layout,
        model,
        precision,
        kernel,
        matmul,
        moe_kernel,
        remat,
        batch,
        frozenset(),
        adapters_of(config, layout),
        schedule,
        stages,
    )
    if choices.lora or config.optimizer.freeze or (model.experts and model.router_bias):
        choices = dataclasses.replace(choices, frozen=_frozen(choices))
    if config.lora.base != "bf16":
        check_quantized(choices.abstract(), layout, choices.frozen)
    return choices


def _frozen(choices: Choices) -> frozenset[str]:
    """Dotted paths of the parameters that are not trained. Raises ValueError for patterns that do not fit the model."""
    config = choices.config
    names = names_of(choices.abstract())
    if choices.lora:
        found = frozenset(name for name in names if not is_adapter(name))
    else:
        found = frozen_names(names, tuple(config.optimizer.freeze), choices.model.scan)
    check_frozen(config, found, choices.precision)
    return found | {name for name in names if name.endswith(ROUTER_BIAS)}
