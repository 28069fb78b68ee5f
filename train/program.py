"""The hinge: config and devices in; the step that will run, its abstract arguments and initializer out.

The loop runs `Program.step`; reports analyse `Program.lower()`. They are the same program.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bytescope.memory.devices.compiler import Compilation, compile_lowered
from bytescope.model import ModelConfig, Precision, RematPlan, Transformer
from bytescope.model.attention.kernels import choose_kernel
from bytescope.model.fp8.products import choose_matmul
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import AUTO
from bytescope.model.transformer import KEEP_ALL, contracted, logical_axes
from bytescope.train.batch import BatchAlgebra
from bytescope.train.checks import (
    check_effort,
    check_fused,
    check_offload,
    check_sequence,
    check_tiles,
    check_traced,
    check_unroll,
    check_values,
)
from bytescope.train.loss_fn import make_cross_entropy, make_loss
from bytescope.train.optimizer.fused_backward import FusedBackward
from bytescope.train.optimizer.host_offload import hosted_state, in_turns
from bytescope.train.optimizer.loss_scale import Scaling
from bytescope.train.optimizer.partwise import make_partwise
from bytescope.train.optimizer.rules import make_optimizer, make_schedule, scale_by_batch
from bytescope.train.parallel.axes import AXES, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout, match_parameters
from bytescope.train.parallel.xla_options import Options, compiler_options, xla_remat_pass
from bytescope.train.step import ACCUMULATION, StepParts, TrainState, Weights, eval_step, fused_step, zero_tally


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, described: nothing is allocated until `init` runs.

    `state` and `batch_shapes` are trees of ShapeDtypeStruct with shardings. `kernel` is the attention
    kernel with the reason for it, `matmul` likewise how the products of the blocks are done.
    """

    config: ConfigDict
    layout: Layout
    model: ModelConfig
    precision: Precision
    kernel: tuple[str, str]
    matmul: tuple[str, str]
    remat: RematPlan
    batch: BatchAlgebra
    parts: StepParts
    state: TrainState
    transformer: Callable[[nnx.Rngs], Transformer]
    graph: nnx.GraphDef
    decided: str = ""  # what `remat.policy=auto` came to, and why

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def scanned(self) -> bool:
        """Whether one call of the step takes the whole global batch [A, B, L]."""
        return self.config.batch.mode == "scan"

    @property
    def calls_per_update(self) -> int:
        """Calls of the step for one optimizer update, with a schedule the most."""
        return 1 if self.scanned else self.batch.accumulation

    @cached_property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One call's batch: int32 [B, L], or [A, B, L] with in-step accumulation."""
        shape, axes = (self.batch.rows, self.batch.seq_len), ("batch", "length")
        if self.scanned:
            shape, axes = (self.batch.accumulation, *shape), (None, *axes)
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.sharding(axes))
        return {"inputs": array, "targets": array}

    @cached_property
    def eval_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One held-out micro-batch: int32 [B, L]."""
        array = jax.ShapeDtypeStruct((self.batch.rows, self.batch.seq_len), jnp.int32,
                                     sharding=self.layout.sharding(("batch", "length")))
        return {"inputs": array, "targets": array}

    @cached_property
    def step(self) -> Any:
        """The jitted step (state, batch) -> (state, metrics); the state is donated."""
        # A function of its own, so that its arguments carry the names `state` and `batch` into reports.
        parts = self.parts
        body = fused_step if parts.fused else ACCUMULATION[self.config.batch.mode][0]

        def step(state: TrainState, batch: dict[str, jax.Array]):
            return body(parts, state, batch)

        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, None))

    @cached_property
    def evaluate(self) -> Any:
        """The jitted (params, batch) -> Tally."""
        return jax.jit(partial(eval_step, self.parts))

    @property
    def _shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def lower(self) -> jax.stages.Lowered:
        """The step that will run, lowered for the mesh's devices, present or described."""
        with xla_remat_pass(self.config.remat.xla_pass), self._for_kernels():
            return self.step.lower(self.state, self.batch_shapes)

    def _for_kernels(self) -> contextlib.AbstractContextManager:
        """Tells Pallas which GPU the fp8 kernels are for: from jax 0.11 on it asks, and knows of no described one."""
        if self.matmul[0] != "fp8_native":
            return contextlib.nullcontext()
        kind = self.mesh.abstract_mesh.abstract_device
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind))

    @property
    def compiler_options(self) -> Options:
        """What the compiler is told besides the program."""
        return compiler_options(self.config, self.mesh.devices.flat[0].platform)

    def compile(self) -> jax.stages.Compiled:
        """The step that will run, compiled."""
        lowered = self.lower()
        with xla_remat_pass(self.config.remat.xla_pass):
            return lowered.compile(compiler_options=self.compiler_options)

    def compile_for_report(self, *, exact: bool = False) -> Compilation:
        """The same executable with what the compiler left of its buffers, for `memory.analyze.report_of`.

        With `exact`, one out of the persistent cache is compiled anew: a cached one keeps no heap trace.
        """
        with xla_remat_pass(self.config.remat.xla_pass), self._for_kernels():
            traced = self.step.trace(self.state, self.batch_shapes)
            compilation = compile_lowered(traced.lower(), exact=exact, options=self.compiler_options)
        self._check_offload(compilation)
        return dataclasses.replace(compilation, jaxpr=traced.jaxpr)

    def _check_offload(self, compilation: Compilation) -> None:
        """Raises ValueError for an offload that moves no byte; on the CPU, which has no other memory, it may."""
        segments = self.remat.segments(self.model.n_layers)
        asked = [segment.name for segment in segments if segment.policy.offloads]
        if asked and self.mesh.devices.flat[0].platform != "cpu" and not compilation.stats.host_temp_bytes:
            raise ValueError(f"remat.policy={asked[0]} moves nothing to host memory here: keep other names, one of "
                             f"{', '.join(NAMES)}, or use full")

    def trace_gradient(self) -> Any:
        """ClosedJaxpr of the gradient of one micro-batch with nothing recomputed: every name is in it."""
        graph, _ = nnx.split(nnx.eval_shape(lambda: self.transformer(nnx.Rngs(params=0), remat=KEEP_ALL)))
        loss = make_loss(self.config, graph, self.layout, self.precision, self.batch.micro)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.batch.rows))
        return jax.make_jaxpr(jax.grad(loss))(self.state.params, self.eval_shapes, keys)

    def init(self) -> TrainState:
        """Fresh state, made in place on the devices; the same values on every mesh."""
        def init(seed: jax.Array) -> TrainState:
            return init_state(self.transformer(nnx.Rngs(params=jax.random.key(seed))), self.parts.optimizer,
                              self.parts.scaling)

        return in_turns(init, self.state)(self.config.seed)


def init_state(transformer: Transformer, optimizer: Any, scaling: Scaling | None = None) -> TrainState:
    """The state before the first step."""
    params = nnx.to_pure_dict(nnx.state(transformer, nnx.Param))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), zero_tally(),
                      scaling and scaling.init())


def describe_state(transformer: Transformer, layout: Layout, optimizer: Any,
                   scaling: Scaling | None = None) -> TrainState:
    """Abstract state with shardings, from an abstract transformer.

    Raises:
      ValueError: a parameter that does not divide over the mesh.
    """
    state = jax.eval_shape(lambda: init_state(transformer, optimizer, scaling))
    axes = logical_axes(transformer)
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731

    def place(path, shape_axes, leaf):
        layout.check("/".join(str(key.key) for key in path), leaf.shape, shape_axes)
        return layout.stored(shape_axes)

    shardings = jax.tree_util.tree_map_with_path(place, axes, state.params, is_leaf=is_axes)
    everywhere = match_parameters(state, state.params, shardings, layout.sharding())
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                        state, everywhere)


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Program:
    """The program of a settled config over `devices` (default: all of this process's backend), described only.

    It checks the config, then assembles. `train.planning.remat_auto.settled_program` settles one with
    `remat.policy=auto` first.

    Raises:
      ValueError: anything in the config that cannot run there, with the value and the remedy.
    """
    check_values(config)
    if config.remat.policy == AUTO:
        raise ValueError("remat.policy=auto has to be settled before a program is built: "
                         "call train.planning.remat_auto.settled_program")
    devices = jax.devices() if devices is None else list(devices)
    precision = Precision.of(config.precision)
    layout = Layout(make_mesh({axis: config.mesh[axis] for axis in AXES}, devices),
                    STRATEGIES[config.mesh.strategy], config.mesh.sequence_parallel, reduce=precision.reduce)
    check_sequence(config, layout)
    check_tiles(config, layout)
    matmul = choose_matmul(precision, devices[0])
    precision = dataclasses.replace(precision, matmul=matmul[0])
    asked = ModelConfig.from_dict(config.model)
    if config.data.seq_len > asked.max_seq_len:
        raise ValueError(f"data.seq_len={config.data.seq_len} is longer than model.max_seq_len="
                         f"{asked.max_seq_len}: shorten the sequences or raise the positions")
    kernel = choose_kernel(asked, precision, devices[0].platform, config.data.seq_len)
    check_effort(config, kernel[0], layout)
    model = dataclasses.replace(asked, attention=kernel[0])
    batch = BatchAlgebra.of(config.batch, layout.ranks, config.data.seq_len)
    check_offload(config, layout, batch)
    remat = RematPlan(config.remat.policy, tuple(config.remat.save), tuple(config.remat.offload),
                      tuple(config.remat.layers), config.remat.granularity, fp8=matmul[0] != "wide")
    check_unroll(model, remat)  # ranges that do not fit the model fail here too, options of another compiler next
    compiler_options(config, devices[0].platform)
    transformer = partial(_transformer, model, precision, remat=remat, place=layout, ahead=config.mesh.prefetch)
    abstract = nnx.eval_shape(lambda: transformer(nnx.Rngs(params=0)))
    graph, _ = nnx.split(abstract)
    schedule = scale_by_batch(make_schedule(config.optimizer, config.train.steps), config.optimizer, batch)
    wrapped = ACCUMULATION[config.batch.mode][1]
    every = batch.traced_at if batch.schedule and batch.accumulation > 1 else batch.accumulation
    optimizer = make_optimizer(config.optimizer, schedule, multisteps=every if wrapped else 1,
                               accumulator=precision.accumulator)
    loss = make_loss(config, graph, layout, precision, batch.micro)
    scaling = Scaling.of(config.precision, batch.rows * batch.seq_len) if precision.loss_scale == "dynamic" else None
    state = hosted_state(describe_state(abstract, layout, optimizer, scaling), config.offload)
    check_traced(remat, loss, state.params, batch)
    partwise = make_partwise(config, schedule, precision, every if wrapped else 1, state)
    parts = StepParts(loss, optimizer, schedule, config.seed,
                      Weights(layout, logical_axes(abstract), contracted(abstract), precision), scaling=scaling,
                      partwise=partwise)
    if config.optimizer.fused_backward:
        check_fused(config, remat, batch)
        cross_entropy = make_cross_entropy(config, layout, precision, batch.micro)
        parts = dataclasses.replace(
            parts, fused=FusedBackward(graph, cross_entropy, parts.weights, partwise, model.dropout > 0))
    elif reduces_once(config, layout, kernel[0], batch):
        local = layout.local
        alone = nnx.split(nnx.eval_shape(lambda: transformer(nnx.Rngs(params=0), place=local)))[0]
        parts = dataclasses.replace(parts, local_loss=make_loss(config, alone, local, precision, batch.micro))
    return Program(config, layout, model, precision, kernel, matmul, remat, batch, parts, state, transformer, graph)


def reduces_once(config: ConfigDict, layout: Layout, kernel: str, batch: BatchAlgebra) -> bool:
    """Whether gradients stay on their rank, whole, until a call of the step has all of them.

    Under zero1 that saves half of what an all-reduce sends. Under ddp a lone micro-batch is better reduced layer by
    layer, while the backward pass goes on. Not inside a ring of devices, nor for cuDNN's kernel divided over tensor.
    """
    divided = layout.context > 1 or (kernel == "cudnn" and layout.mesh.shape["tensor"] > 1)
    alone = config.batch.mode == "multisteps" or batch.accumulation == 1
    return (layout.strategy.reduce_once and layout.ranks > 1 and not divided
            and (layout.strategy.stored or not alone))


def _transformer(model: ModelConfig, precision: Precision, rngs: nnx.Rngs, *, remat: RematPlan, place: Layout,
                 ahead: int) -> Transformer:
    return Transformer(model, precision, remat=remat, place=place, ahead=ahead, rngs=rngs)
