"""The table of subjects: recognizes what the first word of a command names, and opens it.

A `.py` file is never run to recognize it: its syntax tree decides. A prefix such as `script:` names the kind.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.compare.grids import as_text
from bytescope.memory.errors import ReportError
from bytescope.memory.profile.xplane import SUFFIX
from bytescope.memory.records import report_record
from bytescope.memory.subjects.subject import Subject
from bytescope.train.source import (
    ASSUMED,
    INDEX,
    MAX_JSON_BYTES,
    SINGLE,
    WEIGHTS,
    ConfigPath,
    WeightsPath,
    find_source,
    is_run,
)
from bytescope.train.user_errors import UserError

DUMP_ENDS = (".pb", ".pb.gz", ".hlo.txt")  # .xplane.pb is a trace
_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*(\.[^\W\d]\w*)*", re.DOTALL)


class SubjectKind(NamedTuple):
    """A row of KINDS.

    Attributes:
        opened_by: module and class, a subclass of Subject. The module is imported when a word names this kind.
        is_file: whether a file is of this kind, from its path. The first row that matches counts.
        is_word: whether a word that names no file is of this kind. The first row that matches counts.
        is_folder: whether a folder contains this kind, from its path. A folder of two kinds is a mistake.
        is_prefix: whether `KIND:` before a path names the kind. The other kinds have a form of their own.
    """

    opened_by: str
    is_file: Callable[[Path], object] = lambda path: False
    is_word: Callable[[str], bool] = lambda word: False
    is_folder: Callable[[Path], object] = lambda path: False
    is_prefix: bool = True


def recognize(word: str) -> tuple[str, str]:
    """Returns (the key of KINDS of what a word names, the name without a prefix). A word that names nothing known is a
    config, whose loader reports the mistake. A folder of weights is the config `hf:FOLDER`.

    Raises UserError if a folder contains several kinds of subjects, or none.
    """
    kind, _, name = word.partition(":")
    if name and _is_prefix(kind):
        return _plain(kind, name)
    path = Path(os.path.expanduser(word))
    if os.path.isfile(path):  # False for a name that is too long for the file system
        return next(kind for kind, row in KINDS.items() if row.is_file(path)), word
    if kind := next((kind for kind, row in KINDS.items() if row.is_word(word)), ""):
        return kind, word
    if not word or not os.path.isdir(path) or _is_source(word, ConfigPath):
        return "config", word
    return _in_folder(path, word)


def open_subject(word: str, keys: Sequence[tuple[str, Any]] = (), xla: Sequence[str] = ()) -> Subject:
    """Returns the subject that a word names.

    Args:
        word: the word of the command line.
        keys: (key, value) for the keys that are set. Values that are not for a function become text.
        xla: options of XLA to compile with, as FLAG=VALUE.

    Raises UserError if a folder contains several kinds of subjects, or none.
    """
    kind, name = recognize(word)
    if kind != "function":
        keys = [(key, value if isinstance(value, str) else as_text(value)) for key, value in keys]
    return class_of(kind)(name, tuple(keys), tuple(xla))


def class_of(kind: str) -> type[Subject]:
    """Returns the class of a key of KINDS."""
    module, _, name = KINDS[kind].opened_by.rpartition(".")
    opened: type[Subject] = getattr(importlib.import_module(module), name)
    return opened


def refusal(word: str, subject: Subject, called: str, needs: str) -> ReportError:
    """Returns the error of a command that does not take a subject of this kind.

    Args:
        word: the word of the command line.
        subject: what it names.
        called: the command as the user calls it, such as "compare --levers".
        needs: what the command needs of its subject, one of `Subject.has`.

    Raises UserError if the word names nothing.
    """
    if called == "report":
        return ReportError(f"{word} is a {subject.kind}: write it as the first word, bytescope report {word}")
    if subject.kind == "script" and needs != "config":
        return ReportError(
            f"{word} is a script: write its step with bytescope report {word} --save-program=step.py, and give "
            "step.py:program"
        )
    if subject.kind == "run" and called == "train":
        return ReportError(f"{word} is a run directory: continue the run with bytescope train --workdir={word}")
    if subject.kind == "config":
        find_source(subject.name, ConfigPath)  # the error for a name of nothing
    taken = _TAKEN.get(needs, "a config or MODULE:FUNCTION")
    shown = "" if subject.kind == "function" else f"; bytescope report {word} reports on it"
    return ReportError(f"{word} is {subject.is_a}: bytescope {called} takes {taken}{shown}")


def is_function(word: str) -> bool:
    """Returns whether a word has the form `file.py:name` or `module:function`."""
    own = is_adapted(word) or _is_prefix(word.partition(":")[0]) or word.startswith((WEIGHTS, ASSUMED))
    return not own and _FUNCTION.fullmatch(word) is not None


def _is_prefix(kind: str) -> bool:
    return kind in KINDS and KINDS[kind].is_prefix


def _plain(kind: str, name: str) -> tuple[str, str]:
    return ("config", f"{WEIGHTS}{name}") if kind == "weights" else (kind, name)


def _in_folder(path: Path, word: str) -> tuple[str, str]:
    kinds = [kind for kind, row in KINDS.items() if row.is_folder(path)]
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
    return _plain(kinds[0], str(_reports_in(path)[0]) if kinds == ["report"] else word)


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


# What a command needs of its subject -> the subjects that it takes, for an error message.
_TAKEN = {"config": "a config", "trace": "a trace, or a report with --trace=DIR"}
# SubjectKind -> what opens it and what is of this kind. A new kind of subject is a class and a row here.
KINDS: Mapping[str, SubjectKind] = {
    "trainer": SubjectKind(
        "bytescope.memory.subjects.trainer_subject.TrainerSubject", is_word=is_adapted, is_prefix=False
    ),
    "function": SubjectKind(
        "bytescope.memory.subjects.function_subject.FunctionSubject", is_word=is_function, is_prefix=False
    ),
    "script": SubjectKind(
        "bytescope.memory.subjects.saved_subject.ScriptSubject",
        is_file=lambda path: path.suffix == ".py" and not _defines(path, "get_config"),
    ),
    "run": SubjectKind("bytescope.memory.subjects.saved_subject.RunSubject", is_folder=is_run),
    "weights": SubjectKind("bytescope.train.plan.config_subject.ConfigSubject", is_folder=_has_weights),
    "report": SubjectKind(
        "bytescope.memory.subjects.saved_subject.ReportSubject",
        is_file=lambda path: path.suffix == ".json",
        is_word=lambda word: word.endswith(".json"),
        is_folder=_reports_in,
    ),
    "trace": SubjectKind(
        "bytescope.memory.subjects.saved_subject.TraceSubject",
        is_file=lambda path: path.name.endswith(SUFFIX),
        is_word=lambda word: word.endswith(SUFFIX),
        is_folder=_has_trace,
    ),
    "dump": SubjectKind(
        "bytescope.memory.subjects.dump_subject.DumpSubject",
        is_file=lambda path: path.name.endswith(DUMP_ENDS),
        is_word=lambda word: word.endswith(DUMP_ENDS),
        is_folder=lambda path: any(path.glob("*after_optimizations*")),
    ),
    "config": SubjectKind("bytescope.train.plan.config_subject.ConfigSubject", is_file=lambda path: True),
}
