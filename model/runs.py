"""Runs of layers: consecutive ones of one kind under one remat policy, and where their parameters are stacked."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.experts.expert_layer import Load
from bytescope.model.model_config import ModelConfig
from bytescope.model.remat.policies import Segment

# The stack of all layers, or of those that have experts; and of dense layers where others have experts.
BLOCKS, DENSE = "blocks", "dense_blocks"


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Layers [start, stop) of `segment`, of one kind.

    stack: BLOCKS or DENSE, the stack of parameters that they are part of where layers are scanned; first: the place of
    the first of them in it.
    """

    segment: Segment
    stack: str
    first: int

    @property
    def size(self) -> int:
        """Layers."""
        return self.segment.stop - self.segment.start

    @property
    def offset(self) -> int:
        """The number of a layer, less this, is its place in the stack."""
        return self.segment.start - self.first


def stack_of(config: ModelConfig, layer: int) -> str:
    """The stack that a layer is part of."""
    return BLOCKS if not config.experts or config.has_experts(layer) else DENSE


def layers_of(config: ModelConfig, stack: str) -> list[int]:
    """The numbers of the layers of a stack, in order."""
    return [layer for layer in range(config.n_layers) if stack_of(config, layer) == stack]


def runs_of(config: ModelConfig, segments: Sequence[Segment]) -> list[LayerRun]:
    """The runs of all layers, in order; `segments`: ranges of layers with their policies, which cover all layers."""
    runs: list[LayerRun] = []
    done = {BLOCKS: 0, DENSE: 0}
    for segment in segments:
        start = segment.start
        for layer in range(segment.start, segment.stop):
            stack = stack_of(config, layer)
            if layer + 1 == segment.stop or stack_of(config, layer + 1) != stack:
                part = dataclasses.replace(segment, start=start, stop=layer + 1)
                runs.append(LayerRun(part, stack, done[stack]))
                done[stack] += runs[-1].size
                start = layer + 1
    return runs


def stacked(loads: Sequence[Load | None]) -> Load | None:
    """The loads of several runs as one with a leading axis of layers; None without experts."""
    found = [load for load in loads if load is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found) if found else None


@jax.custom_vjp
def of_stack(layer: jax.Array, leaf: jax.Array, whole_N: jax.Array) -> jax.Array:
    """`leaf`, read out of the stack of all layers; the gradient goes to `leaf`.

    The compiler copies the part of a stack that a loop walks through: all parameters once more. A loop that reads the
    whole stack at an offset copies nothing, and `leaf`, which nothing reads then, is removed.
    """
    del leaf
    return jax.lax.dynamic_index_in_dim(whole_N, layer, keepdims=False)


of_stack.defvjp(
    lambda layer, leaf, whole_N: (of_stack(layer, leaf, whole_N), None), lambda _, gradient: (None, gradient, None)
)


def split_layers(state_N: nnx.State, sizes: list[int]) -> list[nnx.State]:
    """The stacked state split along its layers; the gradient of a split is one concatenation, not a sum of paddings."""
    if len(sizes) == 1:
        return [state_N]
    leaves, tree = jax.tree.flatten(state_N)
    pieces = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, piece) for piece in zip(*pieces)]
