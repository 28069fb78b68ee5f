"""Reads a run directory for its page: config.json, metrics.jsonl, memory.json and profile.json.

Whatever is missing or damaged is left out and listed in `problems`. No program or checkpoint is opened.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.records import report_record
from bytescope.train.source import CONFIG, MEMORY, METRICS, is_run

PROFILE, PAGE = "profile.json", "index.html"
# What a breakdown must have for its page, with the types: memory.profile.breakdown.Breakdown.to_json writes it.
_BREAKDOWN = {
    "program": str,
    "steps": list,
    "devices": int,
    "total": float,
    "without_pauses": float,
    "busy": float,
    "idle": float,
    "cells": list,
    "host": list,
    "instructions": list,
}
_ITEMS = {
    "cells": {"phase": str, "component": str, "seconds": float},
    "host": {"name": str, "seconds": float, "device_idle_seconds": float, "count": int},
    "instructions": {
        "name": str,
        "phase": str,
        "component": str,
        "path": str,
        "opcode": str,
        "seconds": float,
        "count": int,
    },
}


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """One run.

    Fields:
        name: of the folder. config: by dotted key. rows: of metrics.jsonl, {"step": ..., "loss": ...}, numbers finite,
            nested objects as "memory.in_use_bytes"; evaluations: those with a held-out loss.
        report: of the step; breakdown: the JSON of profile.json; None where there is none.
        problems: what is missing or damaged, a sentence each. files: names of what lies in the folder.
    """

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: tuple[Mapping[str, float], ...] = ()
    evaluations: tuple[Mapping[str, float], ...] = ()
    report: report_record.ReportRecord | None = None
    breakdown: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    files: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """The last step that a row tells of."""
        return max((int(row["step"]) for row in (*self.rows, *self.evaluations)), default=0)

    @property
    def steps(self) -> int | None:
        """The steps that the run was planned for; None where its config does not tell."""
        planned = self.config.get("train.steps")
        return planned if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0 else None


def read(place: str | Path) -> RunDirectory:
    """The run of a folder. Raises ReportError for what is not a folder, or holds no file of a run."""
    place = Path(place)
    try:
        files = frozenset(path.name for path in place.iterdir())
    except OSError as error:
        raise ReportError(f"cannot read {place}: {error.strerror}: give the --workdir of a run") from error
    if not is_run(place):
        why = f"its {CONFIG} is not one of a run" if CONFIG in files else f"none of {CONFIG}, {METRICS} and {MEMORY}"
        raise ReportError(f"{place} holds no run: {why}; {_newest(place)}")
    problems: list[str] = []

    def part(name: str, reader: Callable[[Path], Any], missing: str) -> Any:
        if name not in files:
            problems.extend([missing] if missing else [])
            return None
        try:
            return reader(place / name)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            problems.append(f"{name} is damaged or cannot be read, and left out: {one_line(error)}")
            return None

    config = part(CONFIG, _config, f"There is no {CONFIG}: the config is not known.")
    metrics = part(METRICS, _rows, f"There is no {METRICS}: no update was recorded yet.")
    rows, evaluations, damaged = ([], [], 0) if metrics is None else metrics
    if damaged:
        problems.append(f"{METRICS}: {damaged} damaged line{'s are' if damaged > 1 else ' is'} left out.")
    return RunDirectory(
        place.absolute().name,
        config or {},
        tuple(rows),
        tuple(evaluations),
        part(MEMORY, report_record.load, f"There is no {MEMORY}: the step was not compiled yet."),
        part(PROFILE, _breakdown, ""),
        tuple(problems),
        files,
    )


def _newest(place: Path) -> str:
    """Which folder to give instead of one that holds no run itself."""
    runs = [path.parent for path in place.glob(f"*/{CONFIG}") if is_run(path.parent)]
    if not runs:
        return "give the --workdir of bytescope train"
    newest = max(runs, key=lambda path: (path / CONFIG).stat().st_mtime)
    return f"it holds {len(runs)} run{'s' if len(runs) > 1 else ''}, the newest is {newest}"


def _config(path: Path) -> Mapping[str, Any]:
    """The keys of config.json. Raises TypeError for another shape."""
    value = json.loads(path.read_text(encoding="utf-8"))
    config = value["config"]
    if not isinstance(config, dict):
        raise TypeError(f"config is {type(config).__name__}, not an object")
    return config


def _rows(path: Path) -> tuple[list[dict[str, float]], list[dict[str, float]], int]:
    """(rows of updates, rows of evaluations, damaged lines), in the order of their steps; of a step that stands there
    twice the last."""
    trained: dict[int, dict[str, float]] = {}
    evaluated: dict[int, dict[str, float]] = {}
    damaged = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = _numbers(json.loads(line))
            step = int(row["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
            continue
        (evaluated if "eval_loss" in row else trained)[step] = row
    return [trained[step] for step in sorted(trained)], [evaluated[step] for step in sorted(evaluated)], damaged


def _numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """The finite numbers of an object, nested ones by dotted name. Raises TypeError for what is not an object."""
    if not isinstance(value, dict):
        raise TypeError("not an object")
    found: dict[str, float] = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and not prefix:
            found |= _numbers(inner, f"{name}.")
        elif isinstance(inner, int | float) and not isinstance(inner, bool) and abs(inner) < 1e300:
            found[prefix + name] = inner
    return found


def _breakdown(path: Path) -> Mapping[str, Any]:
    """The JSON of profile.json, its shape checked. Raises TypeError or KeyError for another."""
    found = json.loads(path.read_text(encoding="utf-8"))
    _check(found, _BREAKDOWN)
    for name, fields in _ITEMS.items():
        for item in found[name]:
            _check(item, fields)
    for step in found["steps"]:
        _check({"step": step}, {"step": int})
    for key in ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high", "at_least_seconds"):
        if found.get(key) is not None:
            _check(found, {key: float})
    if found["devices"] < 1:
        raise TypeError(f"devices is {found['devices']}")
    return found


def _check(value: Any, fields: Mapping[str, type]) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} is not an object")
    for name, kind in fields.items():
        one = value[name]
        allowed = (int, float) if kind is float else kind
        if not isinstance(one, allowed) or isinstance(one, bool):
            raise TypeError(f"{name} is {type(one).__name__}")
        if isinstance(one, int | float) and not 0 <= one < 1e15:  # nor nan
            raise TypeError(f"{name} is {one}")
