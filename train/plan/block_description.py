"""A program as the search for the least recomputation sees it: the graph of a block, and the policies to choose."""

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
from bytescope.memory.remat.remat_search import FULL, NONE
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import POLICIES
from bytescope.model.runs import BLOCKS
from bytescope.model.transformer import KEEP_ALL
from bytescope.train.parallel.axes import activation_axes
from bytescope.train.pipeline.layer_order import LAYERS, describe_reordered
from bytescope.train.program.program import Program
from bytescope.train.step.loss_fn import make_loss

# Names that a kernel outside of the checkpoint keeps together with its result (`model.block.CUTS`).
AROUND_KERNEL = ("q_rot", "k_rot", "v")


def trace_gradient(program: Program) -> Any:
    """Returns the ClosedJaxpr of the gradient of one micro-batch with nothing recomputed, so that it has every name.

    The layers are in their order, whatever stages hold them.
    """
    loss, arguments = _loss_of_micro_batch(program)
    return jax.make_jaxpr(jax.grad(loss, has_aux=True))(*arguments)


def _loss_of_micro_batch(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the loss with nothing recomputed, and the shapes of its arguments, the trained parameters first."""
    whole = dataclasses.replace(program, stages=None)
    params, frozen = describe_reordered((program.state.params, program.state.frozen), program.order, LAYERS)
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
    """Returns the graph of one block of a program whose layers are scanned."""
    # A stage keeps the tensors of several micro-batches at once for each of its layers, by its schedule.
    micro_batches = Fraction(1)
    if program.stages and program.schedule:
        rows = next(stack for stack in program.stages.stacks if stack.stack == BLOCKS)
        micro_batches = Fraction(max(program.schedule.stash_slots) * rows.rows, len(rows.places))

    def shards(name: str) -> Fraction:
        """Devices over which a named tensor is split, divided by the copies that a device keeps."""
        count = 1
        for axes in program.layout.split(activation_axes(NAMES[name][0])):
            count *= math.prod(program.mesh.shape[axis] for axis in axes)
        return count / micro_batches

    loss, arguments = _loss_of_micro_batch(program)
    jaxpr = jax.make_jaxpr(loss)(*arguments)
    trained = len(jax.tree.leaves(arguments[0]))
    active = [number < trained for number in range(len(jaxpr.in_avals))]
    kept_together = {"context": AROUND_KERNEL} if program.kernel[0] == "cudnn" else {}
    return named_block(jaxpr, active, shards, kept_together)


def most_ranges(program: Program) -> int:
    """Returns the maximum number of ranges of layers with different patterns: 1 with stages, which run one program."""
    return 1 if program.stages else MAX_RANGES


def fixed_policies(moving: bool = False) -> dict[str, tuple[str, ...] | None]:
    """Returns policy -> the names that it keeps, without `full` and `none`; None if only the compiler knows.

    moving: policies that move tensors to host memory, instead of those that do not.
    """
    policies: dict[str, tuple[str, ...] | None] = {}
    for name, row in POLICIES.items():
        if row and row.offloads == moving and name not in (FULL, NONE):
            policies[name] = None if moving else row.names or None
    return policies
