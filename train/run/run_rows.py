"""Reads run directories of `bytescope train` as measured runs, which `bytescope validate` compares with predictions.

The seconds of a run are the median of its metrics rows, without the time in which the devices waited for data. The
first two updates, which also start threads and allocate buffers, are left out. So are rows with another number of
tokens per update than the last row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.plan.validation import own_runs
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.run import run_directory
from bytescope.train.source import is_run

# Updates at the start of a run that are not steady yet, and the minimum number of rows after them.
_FIRST_UPDATES, _MIN_ROWS = 2, 3
# A run waits for data if this takes at least this fraction of its time.
_WAITING = 0.05
# Keys that do not change the compiled program. A run without them has the same program as other runs.
_NOT_IN_PROGRAM = ("train.", "data.source", "data.eval_source", "data.workers", "data.prefetch", "seed")
_IN_PROGRAM = ("train.deterministic",)


def read_runs(text: str) -> list[MeasuredRow]:
    """Reads the measured runs of --runs or --from-runs.

    text: CSV files (`own_runs.read_csv`), run directories, and folders that contain run directories, separated by
        commas.

    Raises:
        ReportError: a file or folder has no runs, or a run is not valid.
    """
    rows: list[MeasuredRow] = []
    for name in text.split(","):
        path = Path(name.strip()).expanduser()
        if not name.strip():
            raise ReportError("the name of a file or folder of runs is empty: give a CSV file or run directories")
        if path.is_dir():
            for place in _find_run_directories(path):
                rows.append(read_run(place))
        else:
            rows += own_runs.read_csv(path)
    ids = [row.id for row in rows]
    twice = next((row for row in rows if ids.count(row.id) > 1), None)
    if twice:
        raise ReportError(f"{twice.id} is given twice: give each run once")
    return rows


def _find_run_directories(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    found = sorted(place for place in path.iterdir() if place.is_dir() and is_run(place))
    if not found:
        raise ReportError(f"{path} contains no run of bytescope train: give a --workdir, or a folder of them")
    return found


def read_run(place: Path) -> MeasuredRow:
    """Reads a run directory as a measured run: its config, devices, seconds per update and peak bytes of one device.

    Raises:
        ReportError: a file that is needed is missing or damaged, or the run has too few updates.
    """
    run = run_directory.read(place)
    if not run.config or run.report is None or not run.report.target:
        problem = next((text for text in run.problems if text.startswith(("There is no", "config", "memory"))), "")
        raise ReportError(
            f"{place} has no config or no memory report ({problem.rstrip('.')}): train it again with bytescope train"
        )
    seconds, waiting = _read_seconds(place, run.rows)
    peaks = [int(row["memory.peak_bytes"]) for row in run.rows if row.get("memory.peak_bytes")]
    overrides = {}
    for key, text in own_runs.changed_overrides(run.config).items():
        if key in _IN_PROGRAM or not key.startswith(_NOT_IN_PROGRAM):
            overrides[key] = text
    subject = run.report.subject
    changes = [text for text in subject.changes if not text.startswith(_NOT_IN_PROGRAM)]
    return own_runs.own_row(
        str(place),
        "base",
        overrides,
        _name_target(place, run.report),
        id=str(place.resolve()),
        seconds=seconds,
        size=max(peaks, default=None),
        setup=", ".join([run.name, *changes]),
        source=f"{place.name}: metrics.jsonl",
        model=Path(subject.name).stem if subject.name else run.name,
        differs=f"the devices waited for data in {waiting:.0%} of the time" if waiting >= _WAITING else "",
    )


def _read_seconds(place: Path, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Returns (median seconds per update without waiting for data, fraction of the time in which devices waited)."""
    timed = [row for row in rows if row.get("step_time_s")]
    steady = []
    last_step = 0.0
    for row in timed:
        if last_step >= _FIRST_UPDATES and row.get("batch_tokens") == timed[-1].get("batch_tokens"):
            steady.append(row)
        last_step = row["step"]
    if len(steady) < _MIN_ROWS:
        raise ReportError(
            f"{place} has {len(steady)} measured rows after its first {_FIRST_UPDATES} updates, but {_MIN_ROWS} are "
            "needed: train it longer, or with a smaller train.log_every"
        )
    working = statistics.median(row["step_time_s"] - row.get("data_wait_s", 0.0) for row in steady)
    return working, 1 - working / statistics.median(row["step_time_s"] for row in steady)


def _name_target(place: Path, report: ReportRecord) -> str:
    """Returns the name of the devices of a run, such as "cpu:2" or "h100:2x8". A run names its own devices `local`."""
    target: Mapping[str, Any] = report.target
    devices, per_host = target.get("n_devices", 1), target.get("devices_per_host", 1)
    if target.get("platform") == "cpu":
        return f"cpu:{devices}" if devices > 1 else "cpu"
    chip = next((chip.name for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    if chip is None:
        raise ReportError(
            f"{place} ran on {target.get('kind')}, which is not in bytescope targets: its seconds cannot be predicted"
        )
    if devices <= per_host:
        return f"{chip}:{devices}"
    return f"{chip}:{devices // per_host}x{per_host}"
