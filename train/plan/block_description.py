"""The block of a program as the search for the least recomputation sees it: its graph, and what a device keeps."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
from flax import nnx

from bytescope.memory.remat.layer_graph import LayerGraph
from bytescope.memory.remat.named_block import named_block
from bytescope.memory.remat.remat_problem import MAX_RANGES
from bytescope.model.names import NAMES
from bytescope.model.runs import BLOCKS
from bytescope.model.transformer import KEEP_ALL
from bytescope.train.parallel.axes import activation_axes
from bytescope.train.pipeline.layer_order import LAYERS, as_ordered
from bytescope.train.program.program import Program
from bytescope.train.step.loss_fn import make_loss

# Names that a kernel outside of the checkpoint keeps together with its result (`model.block.CUTS`).
AROUND_KERNEL = ("q_rot", "k_rot", "v")


def trace_gradient(program: Program) -> Any:
    """ClosedJaxpr of the gradient of one micro-batch with nothing recomputed, so that every name is in it; all layers
    in their order, whatever stages hold them."""
    loss, arguments = _loss_of_micro_batch(program)
    return jax.make_jaxpr(jax.grad(loss, has_aux=True))(*arguments)


def _loss_of_micro_batch(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss with nothing recomputed, and the shapes of its arguments, the trained parameters first."""
    whole = dataclasses.replace(program, stages=None)
    params, frozen = as_ordered((program.state.params, program.state.frozen), program.order, LAYERS)
    graph, _ = nnx.split(nnx.eval_shape(lambda: whole.transformer(nnx.Rngs(params=0), remat=KEEP_ALL)))
    loss = make_loss(
        program.loss,
        program.model,
        program.batch.seq_len,
        graph,
        program.layout,
        program.precision,
        program.batch.micro,
        program.frozen,
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), program.batch.rows))
    return loss, (params, program.eval_shapes, keys, frozen)


def describe_block(program: Program) -> LayerGraph:
    """The graph of one block of a program whose layers are scanned."""

    def shards(name: str) -> int:
        dims = program.layout.split(activation_axes(NAMES[name][0]))
        return math.prod(program.mesh.shape[axis] for dim in dims for axis in dim)

    # Of each of its layers a stage keeps what the schedule has it keep for several micro-batches at once.
    held = Fraction(1)
    if program.stages and program.schedule:
        rows = next(one for one in program.stages.stacks if one.stack == BLOCKS)
        held = Fraction(max(program.schedule.stash_slots) * rows.rows, len(rows.places))
    kept_together = {"context": AROUND_KERNEL} if program.kernel[0] == "cudnn" else {}
    loss, arguments = _loss_of_micro_batch(program)
    jaxpr = jax.make_jaxpr(loss)(*arguments)
    trained = len(jax.tree.leaves(arguments[0]))
    active = [number < trained for number in range(len(jaxpr.in_avals))]
    return named_block(jaxpr, active, lambda name: shards(name) / held, kept_together)


def most_ranges(program: Program) -> int:
    """Ranges of layers with patterns of their own that a plan may have: stages run one program."""
    return 1 if program.stages else MAX_RANGES
