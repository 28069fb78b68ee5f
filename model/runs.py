"""Runs of consecutive layers with the same structure and remat policy, and the stacks that hold their parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.experts.expert_layer import Load
from bytescope.model.model_config import ModelConfig
from bytescope.model.remat.policies import Segment

# Names of the stacks. BLOCKS: all layers, or the layers with experts. DENSE: the dense layers of a model with experts.
BLOCKS, DENSE = "blocks", "dense_blocks"


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers with the same remat policy that are all dense or all with experts.

    Fields:
      segment: the range of layers and their policy.
      stack: name of the parameter stack that contains these layers if layers are scanned, BLOCKS or DENSE.
      first: the index of the first of these layers in the stack.
    """

    segment: Segment
    stack: str
    first: int

    @property
    def size(self) -> int:
        return self.segment.stop - self.segment.start

    @property
    def offset(self) -> int:
        """A layer's index in the model minus the layer's index in the parameter stack `stack`."""
        return self.segment.start - self.first


def stack_of(config: ModelConfig, layer: int) -> str:
    """Returns the name of the parameter stack that contains layer `layer` (from 0): DENSE for a dense layer of a model
    with experts, else BLOCKS."""
    return BLOCKS if not config.experts or config.has_experts(layer) else DENSE


def layers_of(config: ModelConfig, stack: str) -> list[int]:
    """Returns the model indices (from 0) of the layers in the parameter stack `stack`, BLOCKS or DENSE, in order."""
    return [layer for layer in range(config.n_layers) if stack_of(config, layer) == stack]


def runs_of(config: ModelConfig, segments: Sequence[Segment]) -> list[LayerRun]:
    """Returns the runs of all layers, in order: consecutive layers with the same policy that are all dense or all with
    experts.

    `segments`: ranges of layers with their remat policies, which cover all layers.
    """
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


def stack_loads(loads: Sequence[Load | None]) -> Load | None:
    """Concatenates the router statistics of several runs of layers along the layer axis. Returns None if no run has
    experts."""
    present = [load for load in loads if load is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *present) if present else None


@jax.custom_vjp
def read_from_stack(layer: jax.Array, leaf: jax.Array, whole_N: jax.Array) -> jax.Array:
    """Returns `whole_N[layer]`, the parameter of one layer, read from the stack of all layers.

    A loop over part of a stack makes the compiler copy that part, which can double the memory of the parameters.
    Reading the whole stack at an index copies nothing.

    `leaf`: the same parameter, as the loop over part of the stack passes it. Its value is not read, and the compiler
    removes it, but it gets the gradient.
    """
    return jax.lax.dynamic_index_in_dim(whole_N, layer, keepdims=False)


read_from_stack.defvjp(
    lambda layer, leaf, whole_N: (read_from_stack(layer, leaf, whole_N), None),
    lambda _, gradient: (None, gradient, None),
)


def split_layers(state_N: nnx.State, sizes: list[int]) -> list[nnx.State]:
    """Splits the parameters of stacked layers along the layer axis into consecutive parts of `sizes` layers. The
    gradient of the split is one concatenation, not a sum of padded arrays."""
    if len(sizes) == 1:
        return [state_N]
    leaves, tree = jax.tree.flatten(state_N)
    pieces = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, piece) for piece in zip(*pieces)]
