"""bytescope report --names: lists the values of a user's loss function that remat policies can save.

`train.commands.names_command` lists the named tensors of a config's model.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bytescope.memory.commands.arguments import show_written
from bytescope.memory.commands.json_output import TRACED, write_json
from bytescope.memory.errors import ReportError
from bytescope.memory.program import user_program
from bytescope.memory.remat.recognition import Value
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import ColumnView, TableView


@dataclasses.dataclass(frozen=True)
class SavableValue:
    """A value that a layer can keep for the backward pass.

    Fields:
        name: the checkpoint name, "" for none.
        label: the text that identifies the value in a plan.
        type: the type in one layer, such as "bfloat16[8,1024,4096]".
        copies: number of these values in all layers.
        bytes: bytes of all copies on one device.
        where: "file:line" of the equation.
    """

    name: str
    label: str
    type: str
    copies: int
    bytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class SavableValues:
    """The result of bytescope report --names for a function.

    Fields:
        values: the values that remat policies can save.
    """

    values: Sequence[SavableValue]


def run(args: argparse.Namespace) -> int:
    """Prints the values that the layers of the loss can keep for the backward pass, and writes the file of --json.
    Returns the exit code.

    The loss is traced, but not compiled.

    Raises ReportError if the program is not a loss function, or has no layers.
    """
    from bytescope.memory.compare.program_factory import FunctionFactory
    from bytescope.memory.remat.layer_discovery import find_layers
    from bytescope.memory.remat.layer_values import find_values
    from bytescope.memory.remat.step_loss import Loss

    subject = args.subject
    subject.start(args.target)
    factory = FunctionFactory(user_program.load_function(subject.name))
    program = factory.call(dict(subject.keys), args.target)
    remedy = "return (loss, (params, batch)), where the loss is not yet differentiated"
    if not program.args:
        raise ReportError(f"{subject.name} returns a traced program: {remedy}")
    with user_program.one_line_errors(subject.name):  # tracing runs the user's code
        try:
            loss = Loss(program.program, program.args, program.options.get("kwargs") or {})
        except ReportError as error:
            raise ReportError(f"{subject.name}: {error}; {remedy}") from None
    values = find_values(find_layers(loss.jaxpr, loss.active), loss.shards).values.values()
    draw_terminal.show(document(list(values)))
    rows = [
        SavableValue(value.name, value.label, value.type, value.count, value.bytes, value.where) for value in values
    ]
    write_json(args, SavableValues(rows), caveats=(TRACED,))
    show_written(args.json)
    return 0


COLUMNS = (
    ColumnView("name", "name", min_width=16, read=lambda value: value.name or "-"),
    ColumnView("type", "value", "text"),
    ColumnView("count", "copies", "number"),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("line", "line", read=lambda value: Path(value.where).name if value.where else ""),
)


def document(values: Sequence[Value]) -> ResultDocument:
    """Returns one row per value: its checkpoint name, type, number of copies, bytes on one device, and source line."""
    unnamed = (
        "The policy of memory.plan_remat can also save values without a name. For your own policy, name them with "
        "jax.ad_checkpoint.checkpoint_name."
    )
    parts = [
        Paragraph("values that a remat policy can save, with the bytes of all copies on one device", "strong"),
        Rows(TableView(COLUMNS, values)),
        Paragraph("" if all(value.name for value in values) else unnamed, "dim"),
    ]
    return ResultDocument([Card("", parts)])
