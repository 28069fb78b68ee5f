"""Recognizes what the first word of a command names: a config, a function, an HLO dump, a script, a run, a saved report
or a trace.

A `.py` file is never run to recognize it: its syntax tree decides. A prefix such as `script:` names the kind.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.errors import ReportError
from bytescope.memory.profile.xplane import SUFFIX
from bytescope.memory.records import report_record
from bytescope.train.source import (
    INDEX,
    MAX_JSON_BYTES,
    MEMORY,
    SINGLE,
    WEIGHTS,
    ConfigPath,
    WeightsPath,
    find_source,
    is_run,
)
from bytescope.train.user_errors import UserError

PREFIXES = ("config", "script", "dump", "run", "weights", "report", "trace")
# The rows of COMMANDS that report on a kind of subject.
ABILITIES = {"run": "saved", "report": "saved", "trace": "trace", "script": "init-program"}
# Kind of subject -> its field in parsed arguments.
_PLACES = {"config": "config", "function": "program", "dump": "hlo", "report": "report"}
DUMP_ENDS = (".pb", ".pb.gz", ".hlo.txt")  # .xplane.pb is a trace
_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*(\.[^\W\d]\w*)*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a word names.

    Attributes:
        kind: "config", "function", "dump", "script", "run", "report" or "trace".
        name: the path or name without a prefix. A folder of weights is the config `hf:FOLDER`.
    """

    kind: str
    name: str


def recognize(word: str) -> Subject:
    """Returns what a word names. A word that names nothing known is a config, whose loader reports the mistake.

    Raises UserError if a folder contains several kinds of subjects, or none.
    """
    kind, _, name = word.partition(":")
    if name and kind in PREFIXES:
        return Subject("config", f"{WEIGHTS}{name}") if kind == "weights" else Subject(kind, name)
    path = Path(os.path.expanduser(word))
    if os.path.isfile(path):  # False for a name that is too long for the file system
        return Subject(_kind_of_file(path), word)
    if is_function(word):
        return Subject("function", word)
    if word.endswith(SUFFIX):
        return Subject("trace", word)
    if word.endswith(DUMP_ENDS):
        return Subject("dump", word)
    if not word or not os.path.isdir(path) or _is_source(word, ConfigPath):
        return Subject("config", word)
    return _in_folder(path, word)


def is_function(word: str) -> bool:
    """Returns whether a word has the form `file.py:name` or `module:function`."""
    own = word.startswith(WEIGHTS) or is_adapted(word) or word.partition(":")[0] in (*PREFIXES, "gpt")
    return not own and _FUNCTION.fullmatch(word) is not None


def settle(args: argparse.Namespace, called: str) -> None:
    """Moves the first word of a command line, `args.config`, to `args.program`, `args.hlo` or `args.report` if it
    names a function, a dump or a saved report, and removes its prefix.

    called: the command as the user calls it, such as "compare --levers".

    Raises ReportError if the command does not take a subject of this kind.
    """
    word = vars(args).get("config")
    if word is None:
        return
    subject = recognize(word)
    if subject.kind == "run" and "report" in args:
        subject = Subject("report", os.path.join(subject.name, MEMORY))
    place = _PLACES.get(subject.kind)
    if place is None or place not in args:
        raise ReportError(_not_taken(word, subject, called, "program" in args))
    args.config = None
    setattr(args, place, Path(os.path.expanduser(subject.name)) if place in ("hlo", "report") else subject.name)


def _not_taken(word: str, subject: Subject, called: str, takes_function: bool) -> str:
    takes = "a config or MODULE:FUNCTION" if takes_function else "a config"
    if called == "report":
        return f"{word} is a {subject.kind}: write it as the first word, bytescope report {word}"
    if subject.kind == "script" and takes_function:
        return (
            f"{word} is a script: write its step with bytescope report {word} --save-program=step.py, and give "
            "step.py:program"
        )
    what = {"dump": "an HLO dump, which is compiled already", "report": "a saved report"}.get(
        subject.kind, f"a {subject.kind}"
    )
    if subject.kind == "run" and called == "train":
        return f"{word} is a run directory: continue the run with bytescope train --workdir={word}"
    shown = "" if subject.kind == "function" else f"; bytescope report {word} reports on it"
    return f"{word} is {what}: bytescope {called} takes {takes}{shown}"


def _kind_of_file(path: Path) -> str:
    if path.suffix == ".py":
        return "config" if _defines(path, "get_config") else "script"
    if path.name.endswith(SUFFIX):
        return "trace"
    if path.name.endswith(DUMP_ENDS):
        return "dump"
    return "report" if path.suffix == ".json" else "config"


def _in_folder(path: Path, word: str) -> Subject:
    kinds = [kind for kind, is_kind in _FOLDERS.items() if is_kind(path)]
    if len(kinds) > 1:
        raise UserError(
            f"{word} contains {' and '.join(f'a {kind}' if kind != 'weights' else kind for kind in kinds)}: write "
            f"{' or '.join(f'{kind}:{word}' for kind in kinds)}"
        )
    if not kinds:
        raise UserError(
            f"{word} is a folder without a run, weights, a saved report, a trace or an XLA dump: give one of these, a "
            "config, or a file"
        )
    if kinds == ["weights"]:
        return Subject("config", f"{WEIGHTS}{word}")
    return Subject(kinds[0], str(_reports_in(path)[0]) if kinds == ["report"] else word)


def _has_trace(path: Path) -> bool:
    return not is_run(path) and any(path.rglob(f"*{SUFFIX}"))  # the trace of a run is part of the run


def _has_weights(path: Path) -> bool:
    has_tensors = any(os.path.isfile(path / name) for name in (SINGLE, INDEX))
    return has_tensors or _is_source(str(path), WeightsPath)


def _reports_in(path: Path) -> list[Path]:
    if is_run(path):
        return []
    files = [file for file in sorted(path.glob("*.json")) if file.is_file() and file.stat().st_size <= MAX_JSON_BYTES]
    return files if len(files) == 1 and _is_report(files[0]) else []


def _is_report(file: Path) -> bool:
    try:
        report_record.load(file)
    except (ReportError, OSError):
        return False
    return True


_FOLDERS: Mapping[str, Callable[[Path], object]] = {
    "run": is_run,
    "weights": _has_weights,
    "report": _reports_in,
    "trace": _has_trace,
    "dump": lambda path: any(path.glob("*after_optimizations*")),
}


def _is_source(word: str, kind: type[ConfigPath] | type[WeightsPath]) -> bool:
    try:
        find_source(word, kind)
    except UserError:
        return False
    return True


def _defines(path: Path, name: str) -> bool:
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):  # the error of the config loader names the line
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
