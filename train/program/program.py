"""Config and devices in; out the step that will run, its abstract arguments and the initializer.

The loop runs `Program.step`; reports analyse `Program.lower()`. They are the same program.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bytescope.memory.devices.compiler import Compilation, check_sizes, compile_lowered
from bytescope.memory.devices.compiler_log import kept_back
from bytescope.model import Transformer
from bytescope.model.frozen import dotted, names_of, parted
from bytescope.model.names import NAMES
from bytescope.model.transformer import contracted, logical_axes, wide
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.parallel.layout import Layout, match_parameters
from bytescope.train.parallel.xla_options import Options, compiler_options, for_pallas, xla_remat_pass
from bytescope.train.program.checks import check_fused, check_partwise, check_traced
from bytescope.train.program.choices import Choices, check
from bytescope.train.program.pipeline_checks import check_collectives
from bytescope.train.program.pipelined_step import make_pipeline, notes_on
from bytescope.train.step.fused_backward import FusedBackward
from bytescope.train.step.loss_fn import make_cross_entropy, make_loss
from bytescope.train.step.modes import ACCUMULATION, eval_step, fused_step
from bytescope.train.step.optimizer.host_offload import hosted_state, in_turns
from bytescope.train.step.optimizer.loss_scale import Scaling
from bytescope.train.step.optimizer.partwise import make_partwise
from bytescope.train.step.optimizer.rules import make_optimizer, make_schedule, scale_by_batch
from bytescope.train.step.optimizer.trainable import stored_frozen
from bytescope.train.step.parts import StepParts
from bytescope.train.step.state import TrainState, zero_tally
from bytescope.train.step.step_weights import Weights


@dataclasses.dataclass(frozen=True)
class Program(Choices):
    """A training program, described: nothing is allocated until `init` runs.

    `state` and `batch_shapes` are trees of ShapeDtypeStruct with shardings.
    """

    parts: StepParts
    state: TrainState
    graph: nnx.GraphDef
    decided: str = ""  # the plan that `remat.policy=auto` chose, in a line; "" without it

    @property
    def mesh(self) -> Mesh:
        """The devices by axis."""
        return self.layout.mesh

    @property
    def scanned(self) -> bool:
        """Whether one call of the step takes the global batch of an update, [A, B, L]."""
        return self.config.batch.mode == "scan"

    @property
    def calls_per_update(self) -> int:
        """Calls of the step per optimizer update; with a schedule of the accumulation, the most."""
        return 1 if self.scanned else self.batch.accumulation

    @cached_property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One call's batch: int32 [B, L], or [A, B, L] with in-step accumulation; names as `batch_names` has them."""
        shape: tuple[int, ...] = (self.batch.rows, self.batch.seq_len)
        axes: tuple[str | None, ...] = ("batch", "length")
        if self.scanned:
            shape, axes = (self.batch.accumulation, *shape), (None, *axes)
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.sharding(axes))
        return dict.fromkeys(self.batch_names, array)

    @cached_property
    def eval_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One held-out micro-batch: int32 [B, L]."""
        array = jax.ShapeDtypeStruct(
            (self.batch.rows, self.batch.seq_len), jnp.int32, sharding=self.layout.sharding(("batch", "length"))
        )
        return dict.fromkeys(self.batch_names, array)

    @cached_property
    def step(self) -> Any:
        """The jitted step (state, batch) -> (state, metrics); the state is donated."""
        # A function of its own: reports show the names of its arguments, `state` and `batch`.
        parts = self.parts
        body = fused_step if parts.fused else ACCUMULATION[self.config.batch.mode][0]

        def step(state: TrainState, batch: dict[str, jax.Array]):
            return body(parts, state, batch)

        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, None))

    @cached_property
    def evaluate(self) -> Any:
        """The jitted (params, batch [B, L], frozen) -> Tally."""
        return jax.jit(partial(eval_step, self.parts))

    @property
    def _shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def lower(self) -> jax.stages.Lowered:
        """The step that will run, lowered for the mesh's devices, which may be described ones."""
        with xla_remat_pass(self.config.remat.xla_pass), self._for_kernels():
            return self.step.lower(self.state, self.batch_shapes)

    def _for_kernels(self) -> contextlib.AbstractContextManager:
        """A context for the program's Pallas kernels, if it has any."""
        needed = self.matmul[0] == "fp8_native" or self.moe_kernel[0] == "grouped"
        return for_pallas(self.mesh) if needed else contextlib.nullcontext()

    @property
    def compiler_options(self) -> Options:
        """The compiler's options."""
        return compiler_options(self.config.xla, self.config.mesh.prefetch, self.mesh.devices.flat[0].platform)

    def compile(self) -> jax.stages.Compiled:
        """The step that will run, compiled."""
        lowered = self.lower()
        with xla_remat_pass(self.config.remat.xla_pass), kept_back():
            return lowered.compile(compiler_options=self.compiler_options)  # type: ignore[arg-type]  # integers, too

    def compile_for_report(self, *, exact: bool = False) -> Compilation:
        """The same executable with its buffers as the compiler assigned them, for `memory.analyze.report_of`.

        exact: compile again what the persistent cache has, since a cached executable keeps no heap trace.

        Raises:
          ValueError: an offload policy moves nothing, or some stages would wait forever in a collective.
          ReportError: an array is too large for XLA.
        """
        with xla_remat_pass(self.config.remat.xla_pass), self._for_kernels():
            traced = self.step.trace(self.state, self.batch_shapes)
            check_sizes(traced.jaxpr)
            compilation = compile_lowered(traced.lower(), exact=exact, options=self.compiler_options)
        self._check_offload(compilation)
        notes = (*compilation.notes, *notes_on(self, self.state))
        compilation = dataclasses.replace(compilation, jaxpr=traced.jaxpr, notes=notes)
        if self.schedule:
            check_collectives(compilation, self.mesh)
        return compilation

    def _check_offload(self, compilation: Compilation) -> None:
        """Raises ValueError for an offload policy that moves nothing; on a CPU, whose memory is the host's, it may."""
        segments = self.remat.segments(self.model.n_layers)
        asked = [segment.name for segment in segments if segment.policy.offloads]
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        if asked and not on_cpu and compilation.stats and not compilation.stats.host_temp_bytes:
            raise ValueError(
                f"remat.policy={asked[0]} moves nothing to host memory here: offload other names, of "
                f"{', '.join(NAMES)}, or use full"
            )

    def init(self) -> TrainState:
        """The initial state, created on the devices in its shardings; its values are the same on every mesh."""
        return in_turns(self._init, self.state)(self.config.seed)

    def _init(self, seed: jax.Array) -> TrainState:
        return init_state(
            self.transformer(nnx.Rngs(params=jax.random.key(seed))),
            self.parts.optimizer,
            self.parts.scaling,
            self.frozen,
        )

    def init_around(self, params: Any) -> TrainState:
        """The initial state with these parameters, which are in their shardings already; nothing is copied.

        With adapters they are the frozen ones, and the adapters are those of `init`.
        """
        if self.lora:

            def own(seed: jax.Array) -> TrainState:
                return dataclasses.replace(self._init(seed), frozen=None)

            made = in_turns(own, dataclasses.replace(self.state, frozen=None))(self.config.seed)
            return dataclasses.replace(made, frozen=params)

        def rest() -> TrainState:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.state.params)
            made = state_around(zeros, self.parts.optimizer, self.parts.scaling, routed=self.parts.routed)
            return dataclasses.replace(made, params=None, frozen=None)

        trained, frozen = parted(params, self.frozen)
        made = in_turns(rest, dataclasses.replace(self.state, params=None, frozen=None))()
        return dataclasses.replace(made, params=trained, frozen=frozen)

    def init_frozen(self) -> Any:
        """The frozen parameters of `init` alone; None where all parameters are trained."""
        if not self.frozen:
            return None

        def init(seed: jax.Array) -> Any:
            model = self.transformer(nnx.Rngs(params=jax.random.key(seed)))
            return parted(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.frozen)[1]

        return in_turns(init, self.state.frozen)(self.config.seed)


def init_state(
    transformer: Transformer, optimizer: Any, scaling: Scaling | None = None, frozen: Collection[str] = ()
) -> TrainState:
    """The state before the first step.

    `scaling`: the rule of the loss scale, if there is one; `frozen`: dotted paths of parameters that are not trained.
    """
    trained, rest = parted(nnx.to_pure_dict(nnx.state(transformer, nnx.Param)), frozen)
    return state_around(trained, optimizer, scaling, rest, routed=transformer.config.routed)


def state_around(
    params: Any,
    optimizer: Any,
    scaling: Scaling | None = None,
    frozen: Any = None,
    routed: tuple[int, int] | None = None,
) -> TrainState:
    """The state before the first step with these trained and frozen parameters; the optimizer's own depends on the
    shapes of the former alone. `routed`: layers with experts and experts of each."""
    loss_scale = None if scaling is None else scaling.init()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), zero_tally(routed), loss_scale, frozen)


def describe_state(
    transformer: Transformer,
    layout: Layout,
    optimizer: Any,
    scaling: Scaling | None = None,
    frozen: Collection[str] = (),
) -> TrainState:
    """The state as a tree of ShapeDtypeStruct with shardings, from an abstract transformer.

    Raises:
      ValueError: a parameter that does not divide over the mesh.
    """
    state = jax.eval_shape(lambda: init_state(transformer, optimizer, scaling, frozen))
    params = state.model_params
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731

    def place(path, shape_axes, matrix, leaf):
        layout.check("/".join(str(key.key) for key in path), leaf.shape, shape_axes)
        return stored_frozen(layout, shape_axes, matrix) if dotted(path) in frozen else layout.stored(shape_axes)

    shardings = jax.tree_util.tree_map_with_path(
        place, logical_axes(transformer), contracted(transformer), params, is_leaf=is_axes
    )
    everywhere = match_parameters(state, params, shardings, layout.sharding())
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, everywhere
    )


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Program:
    """The program of a settled config over `devices` (default: all of this process's backend), described only.

    It checks the config, then assembles. `train.plan.remat_auto.settled_program` settles one with
    `remat.policy=auto` first.

    Raises:
      ValueError: anything in the config that cannot run there, with the value and the remedy.
    """
    return assemble(check(config, jax.devices() if devices is None else list(devices)))


def assemble(choices: Choices) -> Program:
    """The program of checked choices: its parts, and its state as shapes with shardings.

    Raises:
      ValueError: what only the traced model shows: a parameter that does not divide over the mesh, a checkpoint name
        that is never traced, an update layer by layer that something else rules out.
    """
    config, layout, precision, batch = choices.config, choices.layout, choices.precision, choices.batch
    abstract = choices.abstract()
    graph, _ = nnx.split(abstract)
    schedule = scale_by_batch(make_schedule(choices.optimizer, config.train.steps), choices.optimizer, batch)
    every = _micro_steps(config, batch)
    optimizer = make_optimizer(
        choices.optimizer,
        schedule,
        vocabulary=config.model.vocab_size,
        multisteps=every,
        accumulator=precision.accumulator,
    )
    of_loss = choices.loss, choices.model, config.data.seq_len
    loss = make_loss(*of_loss, graph, layout, precision, batch.micro, choices.frozen)
    scaling = None
    if precision.loss_scale == "dynamic":
        scaling = Scaling(
            config.precision.loss_scale_init, config.precision.loss_scale_growth_every, batch.rows * batch.seq_len
        )
    state = hosted_state(
        describe_state(abstract, layout, optimizer, scaling, choices.frozen),
        hosts_params=config.offload.params,
        hosts_optimizer=config.offload.optimizer,
    )
    check_traced(choices.remat, loss, state, batch, choices.batch_names)
    axes, products, unquantized = (
        parted(tree, choices.frozen)[0] for tree in (logical_axes(abstract), contracted(abstract), wide(abstract))
    )
    weights = Weights(layout, axes, products, unquantized, precision)
    partwise = None
    if check_partwise(config, precision):
        assert isinstance(every, int)  # an update by parts has no schedule of the accumulation
        partwise = make_partwise(
            choices.optimizer,
            schedule,
            precision,
            every,
            state,
            vocabulary=config.model.vocab_size,
            stacked=config.model.scan,
        )
    fused, local_loss, pipeline, evaluated = None, None, None, loss
    if choices.schedule:
        pipeline, evaluated = make_pipeline(choices, graph, weights)
    elif config.optimizer.fused_backward:
        check_fused(config, choices.remat, batch, state.params)
        assert partwise is not None
        cross_entropy = make_cross_entropy(*of_loss, layout, precision, batch.micro, choices.frozen)
        fused = FusedBackward(graph, cross_entropy, weights, partwise, abstract.drops)
    elif reduces_once(config, layout, batch):
        local_graph, _ = nnx.split(choices.abstract(place=layout.local))
        local_loss = make_loss(*of_loss, local_graph, layout.local, precision, batch.micro, choices.frozen)
    parts = StepParts(
        evaluated,
        optimizer,
        schedule,
        config.seed,
        weights,
        local_loss=local_loss,
        scaling=scaling,
        partwise=partwise,
        fused=fused,
        routed=choices.model.routed,
        bias_rate=_bias_rate(choices),
        pipeline=pipeline,
    )
    return Program(**vars(choices), parts=parts, state=state, graph=graph)


def _bias_rate(choices: Choices) -> float:
    """By how much an update moves the routers' biases; 0 where there are none, or their routers are frozen."""
    trains = any(name.endswith("w_router") and name not in choices.frozen for name in names_of(choices.abstract()))
    return choices.config.optimizer.router_bias_rate if choices.model.router_bias and trains else 0.0


def _micro_steps(config: ConfigDict, batch: BatchAlgebra) -> int | Callable[[jax.Array], jax.Array]:
    """Calls of the optimizer for one update: 1, or with optax.MultiSteps the accumulation, a function of the update
    where it follows a schedule."""
    wrapped = ACCUMULATION[config.batch.mode][1]
    if not wrapped:
        return 1
    return batch.traced_at if batch.schedule and batch.accumulation > 1 else batch.accumulation


def reduces_once(config: ConfigDict, layout: Layout, batch: BatchAlgebra) -> bool:
    """Whether every rank sums its own gradients, and they are reduced once, at the end of a call of the step.

    Under zero1 that sends half the bytes of an all-reduce. Under ddp a single micro-batch is better reduced layer by
    layer, while the backward pass goes on. It is not done inside a ring of devices, nor with experts, whose rows go to
    other ranks in every micro-step.
    """
    if not layout.strategy.reduce_once or layout.ranks == 1 or layout.context > 1 or config.model.experts:
        return False
    single = config.batch.mode == "multisteps" or batch.accumulation == 1
    return layout.strategy.stored or not single
