"""Reads the user's own measured runs, from CSV files and from run directories of `bytescope train`.

A row of a CSV file is a run. Its columns are COLUMNS and any keys of a config, such as `model.n_layers`. No row can run
a Python file.

The seconds of a run directory are the median of its metrics rows, without the time in which the devices waited for
data. The first two updates, which also start threads and allocate buffers, are left out. So are rows with another
number of tokens per update than the last row.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.devices import targets
from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.errors import ReportError, check_readable, did_you_mean, in_one_line
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import parse_bytes
from bytescope.train.config_fields import FIELDS
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.program import config_files as configs
from bytescope.train.run import run_directory
from bytescope.train.source import WEIGHTS, is_run, shipped

# Column -> its meaning. Other columns are keys of a config.
COLUMNS: Mapping[str, str] = {
    "config": "config that is nearest to the program: a shipped config, a run directory or hf:FOLDER; empty for base, "
    "the default of every key",
    "target": "devices, such as cpu, h100:8 or h100:2x8 (2 hosts with 8 GPUs each)",
    "seconds": "measured seconds per update, without compile steps; empty if only bytes were measured",
    "bytes": "measured peak memory of one device, such as 61.5GiB; empty if unknown",
    "notes": "your text, shown with the run",
}
# The base config, which has the default of every key.
_BASE = "base"
_CPU = re.compile(r"cpu(:[1-9]\d*)?")
# Updates at the start of a run that are not steady yet, and the minimum number of rows after them.
_FIRST_UPDATES, _MIN_ROWS = 2, 3


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One of the user's own runs, with the config that is nearest to its program.

    Attributes:
        id: where the run was read: "FILE:LINE", or the path of a run directory.
        model: the name of the model.
        setup: how the run differs from others.
        config, overrides, target: the program, as for `bytescope report`; overrides: dotted key -> text.
        chip: the name of the target's chip, or cpu.
        seconds: measured seconds per update; None if unknown.
        peak_bytes: measured peak bytes of one device; None if unknown.
    """

    id: str
    model: str
    setup: str
    config: str
    overrides: Mapping[str, str]
    target: str
    chip: str
    seconds: float | None
    peak_bytes: int | None


def read_runs(text: str) -> list[MeasuredRun]:
    """Reads the measured runs of --runs.

    text: CSV files, run directories, and folders that contain run directories, separated by commas.

    Raises:
        ReportError: a file or folder has no runs, or a run is not valid.
    """
    runs: list[MeasuredRun] = []
    for name in text.split(","):
        path = Path(name.strip()).expanduser()
        if not name.strip():
            raise ReportError("the name of a file or folder of runs is empty: give a CSV file or run directories")
        if not path.is_dir():
            runs += _read_csv(path)
            continue
        places = [path] if is_run(path) else sorted(each for each in path.iterdir() if each.is_dir() and is_run(each))
        if not places:
            raise ReportError(f"{path} contains no run of bytescope train: give a --workdir, or a folder of them")
        runs += [_read_run_directory(place) for place in places]
    ids = [run.id for run in runs]
    for run in runs:
        if ids.count(run.id) > 1:
            raise ReportError(f"{run.id} is given twice: give each run once")
    return runs


# ---- CSV files


def _read_csv(path: Path) -> list[MeasuredRun]:
    try:
        check_readable(path)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}: give a CSV file or run directories") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not a CSV file in UTF-8: write it again as text") from error
    try:
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        columns = [name.strip() for name in table.fieldnames or ()]
        _check_columns(path, columns)
        table.fieldnames = columns
        runs = []
        for cells in table:
            where = f"{path} line {table.line_num}"
            if None in cells or None in cells.values():
                raise ReportError(
                    f"{where} has not as many cells as the first line has columns ({len(columns)}): write one cell for "
                    "each column, and text with commas in quotes"
                )
            stripped = {name: text.strip() for name, text in cells.items()}
            if any(stripped.values()):
                runs.append(_read_row(where, f"{path}:{table.line_num}", stripped))
    except csv.Error as error:
        raise ReportError(f"{path} line {table.line_num} is not CSV ({error}): correct this line") from error
    if not runs:
        raise ReportError(f"{path} has no runs: add a line for each run below the names of the columns")
    return runs


def _check_columns(path: Path, columns: list[str]) -> None:
    keys = configs.load_flat(_BASE)
    hint = f"the columns are {', '.join(COLUMNS)} and config keys such as model.n_layers"
    for name in columns:
        if name not in COLUMNS and name not in keys:
            raise ReportError(
                f"{path}: {in_one_line(name)!r:.60} is neither a column nor a config key: "
                f"{did_you_mean(name, (*COLUMNS, *keys)) or hint}"
            )
        if columns.count(name) > 1:
            raise ReportError(f"{path} has the column {name} {columns.count(name)} times: leave one of them")
    if "target" not in columns or not {"seconds", "bytes"} & set(columns):
        missing = "target" if "target" not in columns else "seconds or bytes"
        raise ReportError(f"{path} has no column {missing}: add it; {hint}")


def _read_row(where: str, id: str, cells: Mapping[str, str]) -> MeasuredRun:
    keys = {name: text for name, text in cells.items() if name not in COLUMNS and text}
    seconds = _read_figure(where, cells, "seconds", float)
    size = _read_figure(where, cells, "bytes", parse_bytes)
    if seconds is None and size is None:
        raise ReportError(f"{where} has neither seconds nor bytes: give one of them, or delete the line")
    name = cells.get("config") or _BASE
    config, overrides = _find_config(where, name)
    setup = [f"{key.rpartition('.')[2]}={text}" for key, text in keys.items()]
    run = MeasuredRun(
        id,
        Path(name).stem,
        ", ".join([*setup, *filter(None, [cells.get("notes", "")])]),
        config,
        {**overrides, **keys},
        cells["target"],
        base_name(cells["target"]),
        seconds,
        None if size is None else int(size),
    )
    _check_program(where, run)
    return run


def _find_config(where: str, name: str) -> tuple[str, dict[str, str]]:
    """Returns the config of a row and its overrides. A path of a Python file is refused, because a table of runs must
    not execute code."""
    names = [_BASE, *(path.stem for path in shipped())]
    if name in names or name.startswith(WEIGHTS):
        return name, {}
    if is_run(name):
        config = run_directory.read(Path(name).expanduser()).config
        if config:
            return _BASE, _program_overrides(config)
    raise ReportError(
        f"{where}: config={in_one_line(name)} is neither a shipped config, a run directory nor hf:FOLDER, and a file "
        f"of runs executes no Python file: {did_you_mean(name, names) or 'leave it empty, with a column for each key'}"
    )


def _read_figure(where: str, cells: Mapping[str, str], column: str, parse: Callable[[str], float]) -> float | None:
    text = cells.get(column)
    if not text:
        return None
    try:
        figure = parse(text)
    except ValueError:
        figure = math.nan
    if not 0 < figure < math.inf:
        raise ReportError(f"{where}: {column}={text} is not valid: give {COLUMNS[column]}")
    return figure


def _check_program(where: str, run: MeasuredRun) -> None:
    try:
        FACTORY.check({CONFIG: run.config, **run.overrides})
        _check_target(run.target, run.chip)
    except ValueError as error:
        if not hasattr(error, "exit_code"):
            raise
        raise ReportError(f"{where}: {in_one_line(str(error)).replace('--config.', '')}") from error


def _check_target(target: str, chip: str) -> None:
    if chip in ("", "local"):
        raise ReportError(f"target {target!r} names no chip: give the devices of the run, such as cpu or h100:8")
    if chip != "cpu":
        targets.parse(target)
    elif not _CPU.fullmatch(target.strip().lower()):
        raise ReportError(f"target {target!r} is not valid: write cpu, or cpu:2 for two simulated devices")


# ---- run directories


def _read_run_directory(place: Path) -> MeasuredRun:
    run = run_directory.read(place)
    if not run.config or run.report is None or not run.report.target:
        problem = next((text for text in run.problems if text.startswith(("There is no", "config", "memory"))), "")
        raise ReportError(
            f"{place} has no config or no memory report ({problem.rstrip('.')}): train it again with bytescope train"
        )
    subject = run.report.subject
    peaks = [int(row["memory.peak_bytes"]) for row in run.rows if row.get("memory.peak_bytes")]
    target = _name_target(place, run.report)
    measured = MeasuredRun(
        str(place.resolve()),
        Path(subject.name).stem if subject.name else run.name,
        ", ".join([run.name, *(text for text in subject.changes if _is_compiled(text.partition("=")[0]))]),
        _BASE,
        _program_overrides(run.config),
        target,
        base_name(target),
        _median_seconds(place, run.rows),
        max(peaks, default=None),
    )
    _check_program(str(place), measured)
    return measured


def _program_overrides(flat: Mapping[str, Any]) -> dict[str, str]:
    """Returns the overrides of the base config that give the program of the config `flat` (dotted key -> value)."""
    overrides = {}
    for key, default in configs.load_flat(_BASE).items():
        value = tuple(flat[key]) if isinstance(flat.get(key), list) else flat.get(key, default)
        if value != default and _is_compiled(key):
            overrides[key] = f"({configs.as_text(value)})" if isinstance(value, tuple) else configs.as_text(value)
    return overrides


def _is_compiled(key: str) -> bool:
    return key not in FIELDS or FIELDS[key].compiled


def _median_seconds(place: Path, rows: Sequence[Mapping[str, float]]) -> float:
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
    return statistics.median(row["step_time_s"] - row.get("data_wait_s", 0.0) for row in steady)


def _name_target(place: Path, report: ReportRecord) -> str:
    """Returns the name of the devices of a run, such as "cpu:2" or "h100:2x8". A run names its own devices `local`."""
    target: Mapping[str, Any] = report.target
    devices, per_host = target.get("n_devices", 1), target.get("devices_per_host", 1)
    if target.get("platform") == "cpu":
        return f"cpu:{devices}" if devices > 1 else "cpu"
    chip = next((chip.name for chip in CHIPS.values() if chip.kind == target.get("kind")), None)
    if chip is None:
        raise ReportError(
            f"{place} ran on {target.get('kind')}, which bytescope list targets does not have: its "
            "seconds cannot be predicted"
        )
    return f"{chip}:{devices}" if devices <= per_host else f"{chip}:{devices // per_host}x{per_host}"
