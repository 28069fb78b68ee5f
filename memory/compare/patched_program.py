"""Runs a module, such as a command of bytescope, on a program with changed source text that is not written to disk.

The module runs in a child process, because a process that has imported a module keeps the module's old code.

    python -m bytescope.memory.compare.patched_program CHANGED.json bytescope.memory report steps.py:program h100:8
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord

# Exit codes of `bytescope report` after which its JSON was written: done, and does not fit.
_REPORTED = (0, 3)


def report_with(words: Sequence[str], changed: Mapping[Path, str]) -> ReportRecord:
    """Runs `bytescope report` in a child process, for a program whose source files are changed only in memory. Returns
    the report of the changed program.

    Args:
        words: command-line arguments of `bytescope report` that name the program and the target, such as
            ["steps.py:program", "h100:8"].
        changed: path of a source file -> the text that is imported instead of it; {} compiles the program unchanged.

    Raises ReportError with a one-line message if the changed program cannot be imported, traced or compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        run_changed("bytescope.memory", ["report", *words, f"--json={out}"], changed, out)
        return ReportRecord.from_json(json.loads(out.read_text()))


def run_changed(
    module: str, words: Sequence[str], changed: Mapping[Path, str], out: Path, env: Mapping[str, str] = {}
) -> None:
    """Runs a module in a child process in which source files are changed only in memory.

    Args:
        module: name of the module, which runs as with `python -m`.
        words: its command-line arguments.
        changed: path of a source file -> the text that is imported instead of it.
        out: the file that the module writes.
        env: environment variables that are set in addition.

    Raises ReportError with the last line of stderr if the module fails or does not write the file.
    """
    files = out.with_name("changed.json")
    files.write_text(json.dumps({os.path.realpath(path): text for path, text in changed.items()}))
    child = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(files), module, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    if child.returncode not in _REPORTED or not out.is_file():
        errors = child.stderr.strip().splitlines() or [f"the run ended with exit code {child.returncode}"]
        raise ReportError(errors[-1].removeprefix("error: "))


def use_changed_files(changed: Mapping[str, str]) -> None:
    """Makes all later imports in this process use changed source text. `changed`: real path of a source file -> the
    text that is imported instead of the file."""
    get_code = importlib.machinery.SourceFileLoader.get_code

    def get_changed_code(loader: Any, name: str) -> Any:
        path = loader.get_filename(name)
        text = changed.get(os.path.realpath(path))
        return get_code(loader, name) if text is None else loader.source_to_code(text.encode(), path)

    setattr(importlib.machinery.SourceFileLoader, "get_code", get_changed_code)  # noqa: B010  # its type is not writable


def main() -> None:
    """Runs a module with some source files replaced. `sys.argv[1]` is a JSON file that maps the real path of a source
    file to the text that is imported instead of it. The remaining arguments are the module and its arguments."""
    file, module, *words = sys.argv[1:]
    use_changed_files(json.loads(Path(file).read_text()))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
