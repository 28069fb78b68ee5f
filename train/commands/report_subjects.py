"""Recognizes the subjects of `bytescope report` that are not compiled as they stand: runs, saved reports, traces and
training scripts."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from bytescope.memory.profile.xplane import SUFFIX
from bytescope.train.source import ConfigPath, find_source, is_run
from bytescope.train.user_errors import UserError


def ability_of_subject(word: str) -> str:
    """Returns the row of COMMANDS that reports on the subject `word`: "saved" for a run directory or a saved report,
    "trace" for a profiler trace, "init-program" for a training script; "" for a config and everything else.

    A `.py` file is not run: it is a config if it defines `get_config`, else a script. Names of shipped configs come
    before folders.
    """
    path = Path(os.path.expanduser(word))
    is_file = os.path.isfile(path)  # False for a name that is too long for the file system
    if path.suffix == ".py" and is_file:
        return "" if _defines(path, "get_config") else "init-program"
    if word.endswith(SUFFIX):
        return "trace"
    if path.suffix == ".json" and is_file:
        return "saved"
    if not os.path.isdir(path) or _is_config(word):
        return ""
    if is_run(path):
        return "saved"
    return "trace" if any(path.rglob(f"*{SUFFIX}")) else ""


def _is_config(word: str) -> bool:
    try:
        find_source(word, ConfigPath)
    except UserError:
        return False
    return True


def _defines(path: Path, name: str) -> bool:
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):  # the error of the config loader names the line
        return True
    return any(name in _names_bound_by(statement) for statement in statements)


def _names_bound_by(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Assign(targets=targets):
            return [ast.unparse(target) for target in targets]
    return []
