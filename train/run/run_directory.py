"""Reads a run directory for its page: config.json, metrics.jsonl, memory.json and profile.json.

Missing or damaged files are left out and listed in `problems`. No program or checkpoint is opened.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.profile import trace_document
from bytescope.memory.records import report_record, result
from bytescope.memory.records.host_record import HOST_PHASES, HostMemory, HostTerm
from bytescope.memory.records.result import parse, plain
from bytescope.memory.records.result_envelope import unwrap
from bytescope.memory.view.draw_page import page_cards
from bytescope.train.source import CONFIG, MEMORY, METRICS, is_run

PROFILE, PAGE = "profile.json", "index.html"


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The contents of a run directory.

    Fields:
      name: the name of the folder.
      config: the config by dotted key.
      rows: the rows of metrics.jsonl, {"step": ..., "loss": ...}, with finite numbers; nested objects have dotted
        names such as "memory.in_use_bytes".
      evaluations: the rows with a held-out loss.
      host: host memory of the run's last start by phase, in bytes of one process; None if it was not recorded.
      report: the memory report of the step, None if there is no report.
      breakdown: the content of profile.json (the traced time of each operation category), None if there is no such
        file.
      problems: one sentence for each missing or damaged file.
      files: the names of the files and folders in the directory.
    """

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: tuple[Mapping[str, float], ...] = ()
    evaluations: tuple[Mapping[str, float], ...] = ()
    host: HostMemory | None = None
    report: report_record.ReportRecord | None = None
    breakdown: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    files: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl, 0 if there is none."""
        return max((int(row["step"]) for row in (*self.rows, *self.evaluations)), default=0)

    @property
    def steps(self) -> int | None:
        """The number of steps that the run was planned for. None if it is not in the config."""
        planned = self.config.get("train.steps")
        return planned if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0 else None


def read(place: str | Path) -> RunDirectory:
    """Reads the run directory `place`. Raises ReportError if `place` is not a folder or contains no file of a run."""
    place = Path(place)
    try:
        files = frozenset(path.name for path in place.iterdir())
    except OSError as error:
        raise ReportError(f"cannot read {place}: {error.strerror}: give the --workdir of a run") from error
    if not is_run(place):
        why = (
            f"its {CONFIG} was not written by bytescope train"
            if CONFIG in files
            else f"it has none of {CONFIG}, {METRICS} and {MEMORY}"
        )
        raise ReportError(f"{place} is not a run directory ({why}): give the --workdir of bytescope train")
    problems: list[str] = []

    def part(name: str, reader: Callable[[Path], Any], missing: str) -> Any:
        if name not in files:
            problems.extend([missing] if missing else [])
            return None
        try:
            return reader(place / name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            problems.append(f"{name} is damaged or unreadable, and is left out: {one_line(error)}")
            return None

    config = part(CONFIG, _read_config, f"There is no {CONFIG}: the config is unknown.")
    metrics = part(METRICS, _read_metrics, f"There is no {METRICS}: no update was recorded yet.")
    rows, evaluations, host, damaged = ([], [], None, 0) if metrics is None else metrics
    if damaged:
        problems.append(f"{METRICS}: {damaged} damaged line{'s are' if damaged > 1 else ' is'} left out.")
    return RunDirectory(
        place.absolute().name,
        config or {},
        tuple(rows),
        tuple(evaluations),
        host,
        part(MEMORY, report_record.load, f"There is no {MEMORY}: the step was not compiled yet."),
        part(PROFILE, _read_breakdown, ""),
        tuple(problems),
        files,
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    config = value["config"]
    if not isinstance(config, dict):
        raise TypeError(f"the key config has the type {type(config).__name__} where a JSON object is expected")
    return config


def _read_metrics(path: Path) -> tuple[list[dict[str, float]], list[dict[str, float]], HostMemory | None, int]:
    """Reads metrics.jsonl. Returns (rows of updates, rows of evaluations, host memory, number of damaged lines).

    Rows are sorted by step. If a step has several rows, only its last row is returned.
    """
    trained: dict[int, dict[str, float]] = {}
    evaluated: dict[int, dict[str, float]] = {}
    host, damaged = None, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
            if isinstance(value, dict) and "host_memory" in value:
                host = _read_host_memory(value["host_memory"])
                continue
            row = _flatten_finite_numbers(value)
            step = int(row["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
            continue
        (evaluated if "eval_loss" in row else trained)[step] = row
    return [trained[step] for step in sorted(trained)], [evaluated[step] for step in sorted(evaluated)], host, damaged


def _read_host_memory(value: Any) -> HostMemory:
    terms = [HostTerm(phase, HOST_PHASES[phase], size) for phase, size in value["predicted"].items()]
    return result.read(HostMemory, {"terms": [plain(term) for term in terms], "measured": value["measured"]})


def _flatten_finite_numbers(value: Any, prefix: str = "") -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError("a line of metrics.jsonl must be a JSON object")
    numbers: dict[str, float] = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and not prefix:
            numbers |= _flatten_finite_numbers(inner, f"{name}.")
        elif isinstance(inner, int | float) and not isinstance(inner, bool) and abs(inner) < 1e300:
            numbers[prefix + name] = inner
    return numbers


def _read_breakdown(path: Path) -> Mapping[str, Any]:
    breakdown = unwrap(parse(path.read_bytes()), "trace")
    # These raise an error if the file is damaged.
    trace_document.page_data(breakdown)
    page_cards(trace_document.document(breakdown).cards)
    return breakdown
