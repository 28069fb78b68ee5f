"""Opens a subject by its name, as the first word of a command names it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from bytescope.memory.subjects.subject import Subject


def load_subjects() -> ModuleType:
    """Returns the module with the table of subjects. It belongs to the trainer, and is imported by its name."""
    return importlib.import_module("bytescope.train.commands.subjects")


def subject(name: str, *, xla: Sequence[str] = (), **keys: Any) -> Subject:
    """Returns what a name stands for, ready to be compiled for any target. Nothing is compiled yet.

        memory.subject("llama_8b", **{"batch.micro": 4}).analyze("h100:8")
        memory.subject("train.py:program", width=512).analyze("h100")

    Args:
        name: a config, FILE.py:FUNCTION or MODULE:FUNCTION, an XLA dump, maxtext:NAME, a run directory or a saved
            report, as the first word of `bytescope report`.
        xla: options of XLA to compile with, as FLAG=VALUE.
        keys: values of the subject's keys: dotted keys of a config, parameters of a function.

    Raises ReportError if a folder contains several kinds of subjects, or none. Other mistakes are reported when the
    subject is used.
    """
    opened: Subject = load_subjects().open_subject(name, tuple(keys.items()), xla)
    return opened
