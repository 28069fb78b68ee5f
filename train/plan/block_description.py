"""Describes a program for the remat search, which looks for the least recomputation that fits: the graph of operations
in one block, and the remat policies to try.
"""

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
from bytescope.train.pipeline.stages import LAYERS, describe_reordered
from bytescope.train.program.program import Program
from bytescope.train.step.losses import make_loss

# If the attention kernel runs outside `jax.checkpoint` (`model.block.CUTS`), these inputs are saved with its result.
AROUND_KERNEL = ("q_rot", "k_rot", "v")


def trace_gradient(program: Program) -> Any:
    """Returns the ClosedJaxpr of the gradient of one micro-batch, traced without recomputation, so that it contains
    every named tensor.

    Its layers are in the order of the model, even if the program splits them into pipeline stages.
    """
    loss, arguments = _loss_of_micro_batch(program)
    return jax.make_jaxpr(jax.grad(loss, has_aux=True))(*arguments)


def _loss_of_micro_batch(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the loss function of one micro-batch without recomputation, and its arguments as ShapeDtypeStructs.

    The first argument is the trained parameters.
    """
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
    """Returns the graph of operations and named tensors in one transformer block, with the bytes of each tensor on one
    device.

    program: a training program that loops over its layers with `jax.lax.scan` (`model.scan=True`).
    """
    # A pipeline stage stores the tensors of several micro-batches at once for each of its layers.
    micro_batches = Fraction(1)
    if program.stages and program.schedule:
        rows = next(stack for stack in program.stages.stacks if stack.stack == BLOCKS)
        micro_batches = Fraction(max(program.schedule.stash_slots) * rows.rows, len(rows.places))

    def shards(name: str) -> Fraction:
        # A tensor's bytes in one whole micro-batch, divided by its bytes on one device. With stages, a device stores
        # several micro-batches.
        count = 1
        for axes in program.layout.split(activation_axes(NAMES[name][0])):
            count *= math.prod(program.mesh.shape[axis] for axis in axes)
        return count / micro_batches

    loss, arguments = _loss_of_micro_batch(program)
    jaxpr = jax.make_jaxpr(loss)(*arguments)
    trained = len(jax.tree.leaves(arguments[0]))
    active = [index < trained for index in range(len(jaxpr.in_avals))]
    kept_together = {"context": AROUND_KERNEL} if program.kernel[0] == "cudnn" else {}
    return named_block(jaxpr, active, shards, kept_together)


def max_ranges(program: Program) -> int:
    """Returns the maximum number of ranges of layers that may have different remat policies.

    The maximum is 1 for a program with pipeline stages, because all stages run the same program.
    """
    return 1 if program.stages else MAX_RANGES


def fixed_policies(moving: bool = False) -> dict[str, tuple[str, ...] | None]:
    """Returns the named remat policies that the remat search tries on all layers: policy -> names of the tensors that
    it saves. The policies `full` and `none` are left out.

    The names are None if only the compiler knows which tensors the policy saves.

    moving: True for the policies that move tensors to host memory, False for the other policies.
    """
    policies: dict[str, tuple[str, ...] | None] = {}
    for name, row in POLICIES.items():
        if row and row.offloads == moving and name not in (FULL, NONE):
            policies[name] = None if moving else row.names or None
    return policies
