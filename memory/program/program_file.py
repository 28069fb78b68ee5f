"""The text of the file that `bytescope report SCRIPT --save-program` writes for a captured training step."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bytescope.memory.program.script_capture import CapturedStep

# The first line of a written file, by which the command recognizes it.
MARK = '"""A training step for bytescope report, written by bytescope report --save-program.'
_WIDTH = 110


def file_text(
    captured: CapturedStep,
    script: str,
    argv: Sequence[str],
    *,
    out: Path,
    target: str,
    step: str | None,
    without: Sequence[str],
    auto_axes: bool,
) -> str:
    """Returns the text of a Python file whose function `program` returns the captured step.

    Args:
        captured: the step of the script.
        script, argv, step, without, auto_axes: the arguments of `captured_step`. The script's path is relative to the
            working folder.
        out: the file that the text is written to.
        target: the devices for which the script ran, for the comments.
    """
    folder = os.path.relpath(Path.cwd(), out.resolve().parent)
    where = "Path(__file__).parent" if folder == "." else f"Path(__file__).parent / {_quoted(folder)}"
    options = "".join(
        f", {name}={name.upper()}"
        for name, given in (("values", captured.values), ("without", without), ("step", step))
        if given
    )
    options += ", auto_axes=True" if auto_axes else ""
    lines = [
        MARK,
        "",
        f"    bytescope report {out.name}:program {target}",
        "",
        "Each call runs the script up to its first training step, so the file stays valid when the script changes.",
        '"""',
        "",
        "from pathlib import Path",
        "",
        "from bytescope import memory",
        "",
        f"FOLDER = {where}  # the script runs in this folder",
        f"SCRIPT = {_quoted(script)}",
        f"ARGV = {_listed(argv)}",
    ]
    if step:
        lines.append(f"STEP = {_quoted(step)}")
    if without:
        lines.append(f"WITHOUT = {_listed(without)}  # installed packages that are replaced")
    if captured.values:
        lines += ["# Values that were given: line of the script -> shape or number.", "VALUES = {"]
        lines += [
            f"    {_quoted(f'{place.file}:{place.source}')}: {_quoted(value)},"
            for place, value in captured.values.items()
        ]
        lines.append("}")
    lines += ["", *_comment(f"The step: {captured.defined}, called at {captured.called}, run for {target}.")]
    if not captured.updates:
        lines += _comment(
            "The function returns gradients and no updated parameters. The update is another program or is not jitted; "
            "the report has the bytes of this function only."
        )
    lines += _assumption_lines(captured)
    lines += [
        "",
        "",
        "def program():",
        f'    """Returns the training step of {script}, traced with its arguments."""',
        f"    return memory.captured_step(SCRIPT, ARGV, folder=FOLDER{options})",
    ]
    return "\n".join(lines) + "\n"


def _assumption_lines(captured: CapturedStep) -> list[str]:
    assumed = [f"{place}: {what}" for place, what in captured.assumptions]
    assumed += [f"{place}: {package} has a stand-in" for package, place in captured.packages.items()]
    lines = ["#", "# Assumed, because the script ran without its data and without values:"] if assumed else []
    for text in assumed:
        lines += textwrap.wrap(text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _quoted(text: str) -> str:
    quoted = repr(text)
    return quoted if '"' in text else f'"{quoted[1:-1]}"'


def _listed(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"
