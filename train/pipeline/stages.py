"""The layers of each pipeline stage, and the rows of the stacked parameters that hold them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bytescope.model import ModelConfig
from bytescope.model.runs import BLOCKS, DENSE, layers_of
from bytescope.train.pipeline.schedule import Schedule, divide_layers


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
