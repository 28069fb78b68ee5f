"""The layers of each pipeline stage, and the rows of the stacked parameters that hold them.

An order maps a stack's name to the layer index of each of its rows, -1 for an unused row. A stack that is not in the
order has its layers in model order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bytescope.model import ModelConfig
from bytescope.model.runs import BLOCKS, DENSE, layers_of
from bytescope.train.pipeline.schedule import Schedule, divide_layers
from bytescope.train.step.optimizer.host_offload import fetch

Order = Mapping[str, Sequence[int]]
LAYERS: Order = {}  # the model order in all stacks
BY_DEFAULT = (None, "device", "unpinned_host")  # memory kinds that programs write to; pinned host memory is not one


@dataclasses.dataclass(frozen=True)
class StackRows:
    """The order in which a stack of layers is stored if it is sharded over pipeline stages: stage by stage, and within
    a stage chunk by chunk.

    A stack is the parameters of layers with equal structure, [rows, ...] with one layer per row. A chunk is a group of
    consecutive layers that a stage runs without interruption.

    Fields:
      stack: the name of the stack.
      order: for each row of the stack the index of its layer, -1 for an unused row. Stages with fewer layers have
        unused rows.
      rows: number of rows of a chunk.
      first, count: int32 [stages, chunks], the index of the first layer of a chunk and its number of layers.
    """

    stack: str
    order: tuple[int, ...]
    rows: int
    first: np.ndarray
    count: np.ndarray

    @property
    def places(self) -> tuple[int, ...]:
        """For each layer of the stack, in layer order, the index of its row."""
        return tuple(sorted((row for row, layer in enumerate(self.order) if layer >= 0), key=self.order.__getitem__))

    @property
    def numbers(self) -> tuple[int, ...]:
        """For each row of the stack, the index of its layer within the stack. For an unused row the value is the
        number of layers."""
        layers = sorted(layer for layer in self.order if layer >= 0)
        return tuple(layers.index(layer) if layer >= 0 else len(layers) for layer in self.order)

    @property
    def identity(self) -> bool:
        """True if every row has a layer and the layers are in model order."""
        return -1 not in self.order and list(self.order) == sorted(self.order)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The division of a model's layers among the stages of a pipeline.

    Fields:
      stacks: for each stack of layers with equal structure, the layer in each of its rows. The stacks are in the order
        in which a stage runs them.
    """

    stacks: tuple[StackRows, ...]

    @property
    def order(self) -> dict[str, tuple[int, ...]]:
        """The layers in the order in which the stages store them: name of a stack of layers -> the layer index of each
        of its rows, -1 for an unused row. Stacks whose rows are in model order are left out."""
        return {rows.stack: rows.order for rows in self.stacks if not rows.identity}

    @classmethod
    def divide(cls, model: ModelConfig, schedule: Schedule) -> "Stages":
        """Divides the model's layers as evenly as possible into the virtual stages (chunks) of a schedule. Each chunk
        gets consecutive layers."""
        sizes = divide_layers(model.n_layers, schedule.virtual_stages)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        stacks = []
        for name in (DENSE, BLOCKS):
            layers = layers_of(model, name)
            if layers:
                stacks.append(_rows(name, layers, starts, schedule.placement))
        return cls(tuple(stacks))


def _rows(stack: str, layers: Sequence[int], starts: np.ndarray, placement: Sequence[Sequence[int]]) -> StackRows:
    shape = len(placement), len(placement[0])
    first, count = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    chunks: list[list[int]] = []  # the layers of each chunk, stage by stage
    for stage, virtual_stages in enumerate(placement):
        for chunk, k in enumerate(virtual_stages):
            own = [layer for layer in layers if starts[k] <= layer < starts[k + 1]]
            chunks.append(own)
            first[stage, chunk] = own[0] if own else 0
            count[stage, chunk] = len(own)
    rows = int(count.max())
    order: list[int] = []
    for own in chunks:
        order += [*own, *[-1] * (rows - len(own))]
    return StackRows(stack, tuple(order), rows, first, count)


def describe_reordered(abstract: Any, order: Order, wanted: Order) -> Any:
    """Returns the shapes and shardings that the tree `abstract` has after `reorder`, which changes the order of stacked
    layers.

    Args:
      abstract: the tree before, with leaves that have a shape, dtype and sharding.
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows, -1 for an
        unused row.
    """

    def one(have: np.ndarray, want: np.ndarray, leaf: Any) -> Any:
        shape, sharding = (len(want), *leaf.shape[1:]), leaf.sharding
        if (
            isinstance(sharding, NamedSharding) and shape[0] % sharding.mesh.shape["stage"]
        ):  # then all rows on every stage
            sharding = NamedSharding(
                sharding.mesh, PartitionSpec(None, *sharding.spec[1:]), memory_kind=sharding.memory_kind
            )
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return _map_stacks(abstract, order, wanted, one)


def reorder(tree: Any, order: Order, wanted: Order, abstract: Any | None = None) -> Any:
    """Reorders the stacked layers of a tree. Rows without a layer are 0.

    Args:
      tree: the arrays, [rows, ...] in a stack of layers.
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows, -1 for an
        unused row.
      abstract: shapes and shardings of the result. If it is given, each input array is deleted once it is replaced. If
        it is None, arrays may be NumPy arrays.
    """
    shardings = iter(()) if abstract is None else iter([leaf.sharding for leaf in jax.tree.leaves(abstract)])

    def one(have: np.ndarray, want: np.ndarray, leaf: Any) -> Any:
        places = np.array([np.argmax(have == layer) if layer >= 0 else len(have) for layer in want])
        sharding = next(shardings, None)
        if sharding is None:
            return np.take(np.concatenate([leaf, np.zeros_like(leaf[:1])]), places, axis=0)
        written = sharding if sharding.memory_kind in BY_DEFAULT else sharding.with_memory_kind("device")
        taken = jax.jit(partial(_take, places=places), out_shardings=written)(leaf)
        out = jax.block_until_ready(taken if written is sharding else jax.device_put(taken, sharding))
        leaf.delete()  # so that at most one leaf exists twice
        return out

    def kept(leaf: Any) -> Any:
        next(shardings, None)
        return leaf

    return _map_stacks(tree, order, wanted, one, kept)


def _take(leaf: jax.Array, places: np.ndarray) -> jax.Array:
    return jnp.take(fetch(leaf), jnp.asarray(places), axis=0, mode="fill", fill_value=0)


def _map_stacks(
    tree: Any, order: Order, wanted: Order, function: Callable[..., Any], kept: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Applies a function to each leaf of a stack of layers whose rows must be reordered.

    Args:
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows.
      function: (row indices before, row indices after, leaf) -> new leaf.
      kept: applied to every other leaf.
    """
    moved = {}
    for stack in {*order, *wanted}:
        layers = sorted(layer for layer in (order.get(stack) or wanted[stack]) if layer >= 0)
        both = tuple(np.array(each.get(stack) or layers) for each in (order, wanted))
        if both[0].tolist() != both[1].tolist():
            moved[stack] = both

    def one(path: tuple, leaf: Any) -> Any:
        stack = next((key.key for key in path if getattr(key, "key", None) in moved), None)
        return kept(leaf) if stack is None or not leaf.ndim else function(*moved[stack], leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
