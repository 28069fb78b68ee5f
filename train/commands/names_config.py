"""bytescope report --names of a config: lists the checkpoint names that a remat policy may save, offload or
recompute."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescope.memory.commands.json_output import TRACED, write_json
from bytescope.memory.cost.named_tensors import NamedTensor, excess_warnings, named_tensors
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import ColumnView, TableView

if TYPE_CHECKING:
    from bytescope.train.program.program import Program


def run(args: argparse.Namespace) -> int:
    """Prints the tensors that the model names with jax's `checkpoint_name`, by which a remat policy selects them, and
    writes the file of --json. Returns the exit code.

    The program is traced, but not compiled.
    """
    from bytescope.train.plan.block_description import trace_gradient
    from bytescope.train.plan.config_factory import build_program

    subject = args.subject
    subject.start(args.target)
    target = subject.devices(args.target)
    program = build_program(subject.name, subject.overrides, target)
    tensors = named_tensors(trace_gradient(program))
    rows = [row(tensor, *sharding_of(program, tensor.name)) for tensor in tensors]
    draw_terminal.show(document(rows, excess_warnings(tensors)))
    write_json(args, NamedTensors(rows), target=target.to_json(), caveats=(TRACED,))
    return 0


def sharding_of(program: Program, name: str) -> tuple[str, int]:
    """Returns the sharding of a tensor as text, and the number of its shards. The text "B data" means: dimension B
    (batch) is sharded over the mesh axis data.

    `name`: the name that the model gives the tensor with `checkpoint_name`.
    """
    from bytescope.model.names import NAMES
    from bytescope.train.parallel.axes import activation_axes

    letters = NAMES[name][0]
    dims = program.layout.split(activation_axes(letters))
    text = ", ".join(f"{letter} {' x '.join(dim)}" for letter, dim in zip(letters, dims) if dim)
    return text or "replicated", math.prod(program.mesh.shape[axis] for dim in dims for axis in dim)


@dataclasses.dataclass(frozen=True)
class NamedTensorRow:
    """A tensor that the model names with `checkpoint_name`. Bytes and FLOPs are of one device.

    Fields:
        name: the argument of `checkpoint_name`.
        shape, dtype: shape and dtype of the global tensor.
        itemsize: bytes per element in this dtype.
        copies: number of tensors with this name, such as one per layer.
        flops: matrix-product FLOPs of recomputing all copies.
        read_as: a smaller dtype to which all readers convert the tensor; "" if there is none.
        read_itemsize: bytes per element of the dtype `read_as`; 0 if there is none.
        autodiff: whether differentiation without a remat policy keeps the tensor for the backward pass.
        sharding: the sharding as text, such as "B data".
        bytes_per_layer: bytes of one copy.
        bytes: bytes of all copies.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    copies: int
    flops: int
    read_as: str
    read_itemsize: int
    autodiff: bool
    sharding: str
    bytes_per_layer: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """The result of bytescope report --names for a config.

    Fields:
        names: the named tensors in order of computation.
    """

    names: Sequence[NamedTensorRow]


def row(tensor: NamedTensor, sharding: str, shards: int) -> NamedTensorRow:
    """Returns the row of a tensor: its global shape, and its bytes and recomputation FLOPs on one device.

    Args:
      tensor: a tensor that the model names with `checkpoint_name`.
      sharding: the sharding as text, such as "B data".
      shards: number of shards of the tensor.
    """
    own = {**vars(tensor), "flops": tensor.flops * tensor.copies // shards}
    return NamedTensorRow(
        **own, sharding=sharding, bytes_per_layer=tensor.bytes_each // shards, bytes=tensor.bytes // shards
    )


COLUMNS = (
    ColumnView("name", "name", min_width=16),
    ColumnView("tensor", "tensor", "text", read=lambda row: f"{row.dtype}{list(row.shape)}".replace(" ", "")),
    ColumnView("sharding", "sharding", read=lambda row: row.sharding.replace("'", "")),
    ColumnView("copies", "layers", "number"),
    ColumnView("bytes_per_layer", "per layer", "bytes"),
    ColumnView("bytes", "total", "bytes"),
    ColumnView("flops", "GFLOP", "number", read=lambda row: f"{row.flops / 1e9:,.1f}"),
)


def document(rows: Sequence[NamedTensorRow], warnings: Sequence[str] = ()) -> ResultDocument:
    """Returns the table of the named tensors, and warnings. `rows`: results of `row`."""
    title = "named tensors in order of computation, with the bytes and the GFLOP of recomputation on one device"
    lines = [Paragraph(line, "tight") for line in warnings]
    return ResultDocument([Card("", [Paragraph(title, "strong"), Rows(TableView(COLUMNS, rows)), *lines])])
