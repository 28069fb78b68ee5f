"""A training step with its abstract arguments, compiler options and initializer (`Program`), built from a config and
devices.

The training loop runs `Program.step`, and memory reports analyze `Program.lower()`, which is the same program.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bytescope.memory.devices.compiler import Compilation, check_sizes, compile_lowered
from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.devices.xla_flags import refusal
from bytescope.memory.host.process_memory import host_phase
from bytescope.model import Transformer
from bytescope.model.frozen import dotted, names_of, split_parameters
from bytescope.model.transformer import always_float32, contracted, logical_axes
from bytescope.train.parallel.layout import Layout, match_parameters
from bytescope.train.parallel.xla_options import Options, compiler_options, for_pallas, xla_remat_pass
from bytescope.train.pipeline.forward import PipelineForward
from bytescope.train.pipeline.gradients import PipelineGradients
from bytescope.train.pipeline.schedule import full_ticks, held_share, idle_fraction
from bytescope.train.pipeline.stage_units import stack_units
from bytescope.train.program.checks import check
from bytescope.train.program.choices import Choices
from bytescope.train.program.program_settings import read_settings
from bytescope.train.program.step_checks import check_compiled, check_traced
from bytescope.train.step.fused_backward import FusedBackward
from bytescope.train.step.losses import make_cross_entropy, make_loss, token_masks
from bytescope.train.step.optimizer.host_offload import compute_in_groups, hosted_state
from bytescope.train.step.optimizer.loss_scale import Scaling
from bytescope.train.step.optimizer.partwise import make_partwise
from bytescope.train.step.optimizer.rules import make_optimizer, make_schedule
from bytescope.train.step.optimizer.trainable import stored_frozen
from bytescope.train.step.state import TrainState, zero_tally
from bytescope.train.step.step_weights import Weights
from bytescope.train.step.train_step import ACCUMULATION, Loss, StepParts, eval_step, fused_step


@dataclasses.dataclass(frozen=True)
class Program(Choices):
    """A training program that can be compiled and run. It allocates no device memory until `init` is called.

    Fields:
      parts: the functions of the training step, such as loss and optimizer, and its settings.
      state: the training state, a tree of ShapeDtypeStruct with shardings.
      graph: the flax graph definition of the model.
      decided: a line of text about the remat policy that `remat.policy=auto` chose; "" for other policies.
    """

    parts: StepParts
    state: TrainState
    graph: nnx.GraphDef
    decided: str = ""

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def scanned(self) -> bool:
        """True if one call of the step processes all A micro-batches of an update, in arrays [A, B, L] (B sequences of
        L tokens); False if it processes one micro-batch [B, L]."""
        return self.settings.batch.mode == "scan"

    @property
    def calls_per_update(self) -> int:
        """Number of calls of the step per optimizer update."""
        return 1 if self.scanned else self.batch.accumulation

    @cached_property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the batch for one call of the step: name -> int32 [B, L] (sequences, tokens), or [A, B, L] if a
        call processes all A micro-batches of an update."""
        shape: tuple[int, ...] = (self.batch.rows, self.batch.seq_len)
        axes: tuple[str | None, ...] = ("batch", "length")
        if self.scanned:
            shape, axes = (self.batch.accumulation, *shape), (None, *axes)
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.sharding(axes))
        return dict.fromkeys(self.batch_names, array)

    @cached_property
    def eval_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the arrays of one held-out micro-batch: name -> int32 [B, L] (sequences, tokens)."""
        array = jax.ShapeDtypeStruct(
            (self.batch.rows, self.batch.seq_len), jnp.int32, sharding=self.layout.sharding(("batch", "length"))
        )
        return dict.fromkeys(self.batch_names, array)

    @cached_property
    def step(self) -> Any:
        """The jitted training step (state, batch) -> (state, metrics). The buffers of `state` are donated."""
        # A separate function, because reports show the names of its arguments, `state` and `batch`.
        parts = self.parts
        body = fused_step if parts.fused else ACCUMULATION[self.settings.batch.mode][0]

        def step(state: TrainState, batch: dict[str, jax.Array]):
            return body(parts, state, batch)

        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    @cached_property
    def evaluate(self) -> Any:
        """The jitted evaluation (trained parameters, batch [B, L], frozen parameters) -> Tally, which is the sum of the
        losses in nats and the number of target tokens."""
        return jax.jit(partial(eval_step, self.parts))

    def lower(self) -> jax.stages.Lowered:
        """Lowers the training step for the devices of the mesh, which may be described devices that are not
        present."""
        with xla_remat_pass(self.settings.remat.xla_pass), self._pallas_context():
            return self.step.lower(self.state, self.batch_shapes)

    def _pallas_context(self) -> contextlib.AbstractContextManager:
        # Without it Pallas cannot lower kernels for described devices that are not present.
        needed = self.matmul[0] == "fp8_native" or self.moe_kernel[0] == "grouped"
        return for_pallas(self.mesh) if needed else contextlib.nullcontext()

    @property
    def compiler_options(self) -> Options:
        """The XLA options with which the program is compiled, name -> value."""
        platform = self.mesh.devices.flat[0].platform
        return compiler_options(
            self.settings.xla, self.settings.mesh.prefetch, platform, xla_pass=self.settings.remat.xla_pass
        )

    def compile(self) -> jax.stages.Compiled:
        """Compiles the training step with the compiler options of the program, and returns the executable."""
        lowered = self.lower()
        with xla_remat_pass(self.settings.remat.xla_pass), hold_back_log():
            try:
                return lowered.compile(compiler_options=self.compiler_options)  # type: ignore[arg-type]  # integers, too
            except Exception as error:  # XLA raises several types
                raise (refusal(error) or error) from error

    def compile_for_report(
        self, *, exact: bool = False, pool_bytes: int | None = None, options: Options | None = None
    ) -> Compilation:
        """Compiles the training step. Returns it with the compiler's buffer assignment, for a memory report.

        Args:
          exact: True to compile even if the persistent cache has the program. Programs from the cache have no heap
            trace, which gives exact buffer lifetimes.
          pool_bytes: bytes that jax's memory pool has on the GPU, so that XLA schedules for a GPU that is not present
            as for a present one; None for XLA's default.
          options: XLA options to compile with instead of the program's `compiler_options`.

        Raises:
          ValueError: an offload policy moves nothing, or some pipeline stages would wait forever in a collective.
          ReportError: an array is too large for XLA.
        """
        with xla_remat_pass(self.settings.remat.xla_pass), self._pallas_context():
            with host_phase("trace"):
                traced = self.step.trace(self.state, self.batch_shapes)
                check_sizes(traced.jaxpr)
                lowered = traced.lower()
            compilation = compile_lowered(
                lowered,
                exact=exact,
                options=self.compiler_options if options is None else options,
                device_memory_bytes=pool_bytes,
                jaxpr=traced.jaxpr,
            )
        check_compiled(self, compilation)
        return dataclasses.replace(compilation, notes=(*compilation.notes, *pipeline_notes(self, self.state)))

    def init(self) -> TrainState:
        """Creates the initial training state on the devices, sharded. Its values are the same on every mesh."""
        return compute_in_groups(self._init, self.state)(self.settings.seed)

    def _init(self, seed: jax.Array) -> TrainState:
        return init_state(
            self.transformer(nnx.Rngs(params=jax.random.key(seed))),
            self.parts.optimizer,
            self.parts.scaling,
            self.frozen,
        )

    def init_around(self, params: Any) -> TrainState:
        """Returns the initial training state with the given parameters, such as loaded weights, instead of random ones.
        The arrays are used without a copy, so they must already have the program's shardings.

        Without adapters `params` are all parameters of the model. With adapters they are the frozen base parameters,
        and the adapters are initialized as in `init`.
        """
        if self.lora:

            def own(seed: jax.Array) -> TrainState:
                return dataclasses.replace(self._init(seed), frozen=None)

            fresh = compute_in_groups(own, dataclasses.replace(self.state, frozen=None))(self.settings.seed)
            return dataclasses.replace(fresh, frozen=params)

        def rest() -> TrainState:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.state.params)
            fresh = state_around(zeros, self.parts.optimizer, self.parts.scaling, routed=self.parts.routed)
            return dataclasses.replace(fresh, params=None, frozen=None)

        trained, frozen = split_parameters(params, self.frozen)
        fresh = compute_in_groups(rest, dataclasses.replace(self.state, params=None, frozen=None))()
        return dataclasses.replace(fresh, params=trained, frozen=frozen)

    def init_frozen(self) -> Any:
        """Creates only the frozen parameters of the initial state. Returns None if all parameters are trained."""
        if not self.frozen:
            return None

        def init(seed: jax.Array) -> Any:
            model = self.transformer(nnx.Rngs(params=jax.random.key(seed)))
            return split_parameters(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.frozen)[1]

        return compute_in_groups(init, self.state.frozen)(self.settings.seed)


def init_state(
    transformer: Transformer, optimizer: Any, scaling: Scaling | None = None, frozen: Collection[str] = ()
) -> TrainState:
    """Returns the training state (parameters, optimizer state, counters) before the first step.

    Args:
      transformer: the model with its initial parameters.
      optimizer: the optimizer of `make_optimizer`.
      scaling: the rule of dynamic loss scaling, None without loss scaling.
      frozen: dotted paths of parameters that are not trained.
    """
    trained, rest = split_parameters(nnx.to_pure_dict(nnx.state(transformer, nnx.Param)), frozen)
    return state_around(trained, optimizer, scaling, rest, routed=transformer.config.routed)


def state_around(
    params: Any,
    optimizer: Any,
    scaling: Scaling | None = None,
    frozen: Any = None,
    routed: tuple[int, int] | None = None,
) -> TrainState:
    """Returns the training state before the first step, for given parameters.

    Args:
      params: the trained parameters. Only their shapes matter for the optimizer state.
      optimizer: the optimizer of `make_optimizer`.
      scaling: the rule of dynamic loss scaling, None without loss scaling.
      frozen: the parameters that are not trained, None if all are trained.
      routed: (number of layers with experts, experts in each), None without experts.
    """
    loss_scale = None if scaling is None else scaling.init()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), zero_tally(routed), loss_scale, frozen)


def describe_state(
    transformer: Transformer,
    layout: Layout,
    optimizer: Any,
    scaling: Scaling | None = None,
    frozen: Collection[str] = (),
) -> TrainState:
    """Returns the training state as a tree of ShapeDtypeStruct with shardings.

    Args:
      transformer: the model with shapes in place of parameters.
      layout: the shardings over the mesh.
      optimizer: the optimizer of `make_optimizer`.
      scaling: the rule of dynamic loss scaling, None without loss scaling.
      frozen: dotted paths of parameters that are not trained.

    Raises:
      ValueError: a parameter is not divisible over the mesh.
    """
    state = jax.eval_shape(lambda: init_state(transformer, optimizer, scaling, frozen))
    params = state.model_params

    def place(path, shape_axes, matrix, leaf):
        layout.check("/".join(str(key.key) for key in path), leaf.shape, shape_axes)
        return stored_frozen(layout, shape_axes, matrix) if dotted(path) in frozen else layout.stored(shape_axes)

    shardings = jax.tree_util.tree_map_with_path(
        place,
        logical_axes(transformer),
        contracted(transformer),
        params,
        is_leaf=lambda node: isinstance(node, tuple),  # logical axes
    )
    everywhere = match_parameters(state, params, shardings, layout.sharding())
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, everywhere
    )


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Program:
    """Builds the training program of a config. `devices`: by default all devices of this process's backend.

    A config with `remat.policy=auto` must be built with `train.plan.remat_auto.settled_program` instead.

    Raises:
      ValueError: a setting cannot be used on the devices. The message names the setting and the remedy.
    """
    return assemble(check(read_settings(config), jax.devices() if devices is None else list(devices)))


def assemble(choices: Choices, decided: str = "") -> Program:
    """Builds the training program from checked settings (the result of `checks.check`).

    Args:
      decided: a line of text about the remat policy that `remat.policy=auto` chose.

    Raises:
      ValueError: the traced model cannot run: a parameter is not divisible over the mesh, a tensor name of the remat
        policy does not occur, or an optimizer update layer by layer conflicts with another setting.
    """
    settings, layout, precision = choices.settings, choices.layout, choices.precision
    abstract = choices.abstract()
    graph, _ = nnx.split(abstract)
    schedule = make_schedule(settings.optimizer, settings.steps)
    micro_steps = choices.batch.accumulation if ACCUMULATION[settings.batch.mode][1] else 1
    optimizer = make_optimizer(
        settings.optimizer,
        schedule,
        vocabulary=choices.model.vocab_size,
        multisteps=micro_steps,
        accumulator=precision.accumulator,
    )
    loss, scaling = _make_loss(choices, graph, layout), None
    if precision.loss_scale == "dynamic":
        keys, batch = settings.precision, choices.batch
        scaling = Scaling(keys.loss_scale_init, keys.loss_scale_growth_every, batch.rows * batch.seq_len)
    state = hosted_state(
        describe_state(abstract, layout, optimizer, scaling, choices.frozen),
        hosts_params=settings.offload.params,
        hosts_optimizer=settings.offload.optimizer,
    )
    check_traced(choices, loss, state)
    axes, products, in_float32 = (
        split_parameters(tree, choices.frozen)[0]
        for tree in (logical_axes(abstract), contracted(abstract), always_float32(abstract))
    )
    weights = Weights(layout, axes, products, in_float32, precision)
    partwise = fused = None
    if settings.layerwise_key:
        partwise = make_partwise(
            settings.optimizer,
            schedule,
            precision,
            micro_steps,
            state,
            vocabulary=choices.model.vocab_size,
            stacked=choices.model.scan,
        )
    pipeline = None
    if choices.schedule:
        pipeline, loss = _make_pipeline_and_eval_loss(choices, graph, weights, abstract.has_dropout)
    elif settings.optimizer.fused_backward:
        assert partwise is not None  # optimizer.fused_backward needs a layerwise update
        fused = FusedBackward(graph, _make_cross_entropy(choices), weights, partwise, abstract.has_dropout)
    # A router bias moves only if its router is trained.
    routers = any(name.endswith("w_router") and name not in choices.frozen for name in names_of(abstract))
    parts = StepParts(
        loss,
        optimizer,
        schedule,
        settings.seed,
        weights,
        local_loss=_make_local_loss(choices),
        scaling=scaling,
        partwise=partwise,
        fused=fused,
        routed=choices.model.routed,
        bias_rate=settings.optimizer.router_bias_rate if choices.model.router_bias and routers else 0.0,
        pipeline=pipeline,
    )
    return Program(**vars(choices), parts=parts, state=state, graph=graph, decided=decided)


def _make_cross_entropy(choices: Choices) -> Callable[..., jax.Array]:
    return make_cross_entropy(
        choices.loss,
        choices.model,
        choices.batch.seq_len,
        choices.layout,
        choices.precision,
        choices.batch.micro,
        choices.frozen,
    )


def _make_loss(choices: Choices, graph: nnx.GraphDef, layout: Layout) -> Loss:
    return make_loss(
        choices.loss,
        choices.model,
        choices.batch.seq_len,
        graph,
        layout,
        choices.precision,
        choices.batch.micro,
        choices.frozen,
    )


def _make_local_loss(choices: Choices) -> Loss | None:
    """Returns the loss function that each data-parallel rank computes for its own sequences, for steps that reduce
    gradients once at their end. Returns None for other steps.

    One reduction at the end of the step sends fewer bytes than one per micro-batch. It is not used in three cases:
    under ddp with a single micro-batch, where the reduction can overlap with the backward pass; with ring attention;
    and with experts, whose tokens go to other ranks.
    """
    settings, layout = choices.settings, choices.layout
    if choices.schedule or settings.optimizer.fused_backward:
        return None
    if not layout.strategy.reduce_once or layout.ranks == 1 or layout.context > 1 or choices.model.experts:
        return None
    single = settings.batch.mode == "multisteps" or choices.batch.accumulation == 1
    if single and not layout.strategy.stored:
        return None
    graph, _ = nnx.split(choices.abstract(place=layout.local))
    return _make_loss(choices, graph, layout.local)


def _make_pipeline_and_eval_loss(
    choices: Choices, graph: nnx.GraphDef, weights: Weights, dropout: bool
) -> tuple[PipelineGradients, Loss]:
    precision, schedule, stages, routed = choices.precision, choices.schedule, choices.stages, choices.model.routed
    assert schedule is not None and stages is not None
    staged = choices.layout.staged
    inside = dataclasses.replace(weights, layout=staged)
    units = tuple(stack_units(choices.abstract(place=staged), stages.stacks, inside, schedule))
    cross_entropy = _make_cross_entropy(choices)
    coefficients = (0.0, 0.0)
    if routed:
        coefficients = choices.loss.balance / routed[0], choices.loss.router_z / routed[0]
    masks = partial(token_masks, experts=choices.model.experts > 0, layout=choices.layout)
    gradients = PipelineGradients(
        graph,
        cross_entropy,
        schedule,
        units,
        weights,
        precision.accumulator,
        dropout,
        coefficients,
        choices.model.experts,
        bool(routed) and choices.loss.balance_layers == "pooled",
        masks,
    )
    return gradients, PipelineForward(graph, schedule, units).loss(cross_entropy, masks)


def pipeline_notes(choices: Choices, state: TrainState) -> tuple[str, ...]:
    """Returns sentences for the memory report of a step with pipeline stages. Returns () without a pipeline.

    The sentences state the idle fraction and the stored activations of the schedule, how seconds and sent bytes are
    counted, and how many parameters are in rows without a layer.
    """
    schedule, stages = choices.schedule, choices.stages
    if schedule is None or stages is None:
        return ()
    share = float(held_share(schedule, choices.model.n_layers))
    notes = [
        f"{schedule.stages} stages, {schedule.name}: each stage is idle {100 * idle_fraction(schedule):.1f} % of the "
        f"time and stores {share:.3g} times the activations that all layers save for one micro-batch; it needs "
        f"{', '.join(map(str, schedule.stash_slots))} of the {max(schedule.stash_slots)} slots that every stage "
        "allocates for them",
        f"seconds count the {schedule.ticks} ticks as {full_ticks(schedule)} full ticks; sent bytes count all ticks as "
        "full, idle stages included; the timeline between the first and the last tick shows one tick",
    ]
    padding = 0  # parameters in rows that hold no layer
    for rows in stages.stacks:
        for leaf in jax.tree.leaves(state.model_params[rows.stack]):
            padding += math.prod(leaf.shape) * rows.order.count(-1) // len(rows.order)
    if padding:
        notes.append(
            f"{padding:,} of the parameters are unused rows, because every stage allocates as many layers of each kind "
            "as the fullest stage"
        )
    return tuple(notes)
