"""Runs the example notebooks, and writes their outputs into them.

    python tests/bench/examples.py                           # all notebooks of memory/examples
    python tests/bench/examples.py why_out_of_memory         # one of them

Needs the `test` extra; no GPU. Run it when a notebook, or a figure in its outputs, changes. A test
(tests/end_to_end/test_examples.py) runs the notebooks and compares the byte figures with the committed outputs.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "memory" / "examples"
_BYTES = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)? (?:[KMGT]iB|B|bytes)\b")
_JAXLIB = re.compile(r"^jaxlib (\S+)$", re.M)
# Settings of the caller that would change what a notebook prints, or how its programs are compiled.
_DROPPED = ("COLUMNS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"notebooks to run (default: {', '.join(names)})")
    for name in parser.parse_args(argv).names or names:
        path, began = FOLDER / f"{name}.ipynb", time.monotonic()
        nbformat.write(execute(read(path)), path)
        print(f"wrote {path.name} in {time.monotonic() - began:.0f} s, {path.stat().st_size / 1000:.0f} kB")
    return 0


def read(path: Path) -> Any:
    """Returns a notebook as nbformat reads it."""
    return nbformat.read(path, as_version=4)


def execute(notebook: Any) -> Any:
    """Runs the cells of a notebook in a new kernel and returns a copy with their outputs.

    Raises nbclient's CellExecutionError if a cell fails.
    """
    executed = copy.deepcopy(notebook)
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    environment |= {"JAX_PLATFORMS": "cpu", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    NotebookClient(executed, timeout=600, record_timing=False).execute(env=environment)
    executed.metadata.language_info = {"name": "python"}  # the version of Python is not part of the example
    return executed


def jaxlib_of(notebook: Any) -> str | None:
    """Returns the version of jaxlib that the outputs name, None if they name none."""
    found = _JAXLIB.search("\n".join("\n".join(_texts(cell)) for cell in notebook.cells))
    return found[1] if found else None


def differences(committed: Any, executed: Any) -> list[str]:
    """Returns the byte figures that differ between the outputs of two runs of a notebook, a line for each cell."""
    lines = []
    for number, (before, after) in enumerate(zip(committed.cells, executed.cells, strict=True), 1):
        figures, current = byte_figures(before), byte_figures(after)
        if figures != current:
            lines.append(f"cell {number}: {', '.join(figures)} is now {', '.join(current)}")
    return lines


def byte_figures(cell: Mapping[str, Any]) -> list[str]:
    """Returns the byte figures in the outputs of a cell, in their order: "12.34 GiB", "1,234 bytes"."""
    return [figure for text in _texts(cell) for figure in _BYTES.findall(text)]


def _texts(cell: Mapping[str, Any]) -> list[str]:
    texts = []
    for output in cell.get("outputs", ()):
        if "text" in output:
            texts.append(output["text"])
        data = output.get("data", {})
        texts += [data[kind] for kind in sorted(data) if kind.startswith("text/")]
    return texts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
