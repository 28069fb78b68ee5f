"""Reads a CSV file of the user's own measured runs as rows that `bytescope validate` compares with predictions.

A row of the file is a measured run. Its columns are COLUMNS and any keys of a config, such as `model.n_layers`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.devices import targets
from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.errors import ReportError, check_readable, did_you_mean, in_one_line, remedy_for
from bytescope.memory.units import parse_bytes
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.validation.measured_rows import FRAMEWORKS, MeasuredRow
from bytescope.train.program import config_files as configs

# The name of the set of the user's own runs.
OWN = "own runs"
# Column -> its meaning. Other columns are keys of a config.
COLUMNS: Mapping[str, str] = {
    "config": "config that is nearest to the program; empty for base, the default of every key",
    "target": "devices, such as cpu, h100:8 or h100:2x8 (2 hosts with 8 GPUs each)",
    "seconds": "measured seconds per update, without compile steps; empty if only bytes were measured",
    "bytes": "measured peak memory of one device, such as 61.5GiB; empty if unknown",
    "framework": f"what ran the program: {', '.join(FRAMEWORKS)} (default: jax)",
    "notes": "your text, shown with the run",
}
# The base config, which has the default of every key.
_BASE = "base"
_CPU = re.compile(r"cpu(:[1-9]\d*)?")
_EXAMPLE = {
    "config": "tiny",
    "target": "cpu",
    "seconds": "0.25",
    "bytes": "87MiB",
    "framework": "jax",
    "notes": "an example: replace this line by your runs",
    "model.n_layers": "4",
    "data.seq_len": "128",
    "batch.micro": "16",
}


def template() -> str:
    """Returns the text of a CSV file with the columns and one example row."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(_EXAMPLE), lineterminator="\n")
    writer.writeheader()
    writer.writerow(_EXAMPLE)
    return file.getvalue()


def read_csv(path: Path) -> list[MeasuredRow]:
    """Reads measured runs from a CSV file, one for each row.

    Raises:
        ReportError: the file cannot be read, a column is missing or unknown, or a value is not valid. The message names
            the line.
    """
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
        rows = []
        for cells in table:
            where = f"{path} line {table.line_num}"
            if None in cells or None in cells.values():
                raise ReportError(
                    f"{where} has not as many cells as the first line has columns ({len(columns)}): write one cell for "
                    "each column, and text with commas in quotes"
                )
            stripped = {name: text.strip() for name, text in cells.items()}
            if any(stripped.values()):
                rows.append(_read_row(path, table.line_num, stripped))
    except csv.Error as error:
        raise ReportError(f"{path} line {table.line_num} is not CSV ({error}): correct this line") from error
    if not rows:
        raise ReportError(f"{path} has no runs: add a line for each run below the names of the columns")
    return rows


def _check_columns(path: Path, columns: list[str]) -> None:
    keys = configs.load_flat(_BASE)
    hint = "bytescope validate --template=FILE writes an example"
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


def _read_row(path: Path, line: int, cells: Mapping[str, str]) -> MeasuredRow:
    where = f"{path} line {line}"
    overrides = {name: text for name, text in cells.items() if name not in COLUMNS and text}
    framework = cells.get("framework") or FRAMEWORKS[0]
    if framework not in FRAMEWORKS:
        raise ReportError(f"{where}: framework={framework} is unknown: {remedy_for(framework, FRAMEWORKS)}")
    seconds, size = cells.get("seconds", ""), cells.get("bytes", "")
    if not seconds and not size:
        raise ReportError(f"{where} has neither seconds nor bytes: give one of them, or delete the line")
    config = cells.get("config") or _BASE
    shown = [f"{key.rpartition('.')[2]}={text}" for key, text in overrides.items()]
    return own_row(
        where,
        config,
        overrides,
        cells["target"],
        id=f"{path}:{line}",
        seconds=_read_seconds(where, seconds) if seconds else None,
        size=_read_bytes(where, size) if size else None,
        setup=", ".join([*shown, *filter(None, [cells.get("notes", "")])]),
        source=f"{path.name}: line {line}",
        framework=framework,
    )


def _read_seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ReportError(f"{where}: seconds={text} is not a number above 0: give seconds per update, such as 0.52")
    return seconds


def _read_bytes(where: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{where}: bytes={text}: {error}") from error
    if not size:
        raise ReportError(f"{where}: bytes={text} must be above 0: leave the cell empty if they are unknown")
    return size


def own_row(
    where: str,
    config: str,
    overrides: Mapping[str, str],
    target: str,
    *,
    id: str,
    seconds: float | None,
    size: int | None,
    setup: str,
    source: str,
    model: str = "",
    framework: str = FRAMEWORKS[0],
    differs: str = "",
) -> MeasuredRow:
    """Returns the row of one of the user's own runs, after its config and target are checked.

    Args:
        where: the place of the run in messages, such as "runs.csv line 3".
        config, overrides, target: the program, as for `bytescope report`.
        id: distinguishes the run from the others.
        seconds: measured seconds per update, if known.
        size: measured peak bytes of one device, if known.
        setup: how the run differs from other runs.
        source: file or folder in which the figures were read, then a colon and the place.
        model: the name of the model (default: the name of the config).
        framework: what ran the program, one of FRAMEWORKS.
        differs: known differences between the run and our program.

    Raises:
        ReportError: the config, a key, a value or the target is not valid.
    """
    try:
        FACTORY.check({"config": config, **overrides})
        flat = FACTORY.resolve({"config": config, **overrides})
        devices = _count_devices(target)
    except ValueError as error:
        if not hasattr(error, "exit_code"):
            raise
        raise ReportError(f"{where}: {in_one_line(str(error)).replace('--config.', '')}") from error
    return MeasuredRow(
        set=OWN,
        id=id,
        model=model or Path(config).stem,
        chip=base_name(target),
        gpus=devices,
        overrides=overrides,
        config=config,
        target=target,
        measured_seconds=seconds,
        measured_bytes=size,
        quality="A",
        source=source,
        setup=setup,
        tensor=flat["mesh.tensor"],
        stages=flat["mesh.stage"],
        differs=differs,
        cohort=framework,
        framework=framework,
    )


def _count_devices(target: str) -> int:
    if not target:
        raise ReportError("the cell target is empty: give the devices of the run, such as cpu or h100:8")
    base = base_name(target)
    if base == "cpu":
        if not _CPU.fullmatch(target.strip().lower()):
            raise ReportError(f"target {target!r} is not valid: write cpu, or cpu:2 for two simulated devices")
        return int(target.partition(":")[2] or 1)
    if base not in CHIPS:
        names = ("cpu", *CHIPS)
        raise ReportError(
            f"unknown target {target!r}: {did_you_mean(base, names) or 'bytescope list targets lists the chips'}"
            + ("; write the name of its chip" if base == "local" else "")
        )
    return targets.parse(target).n_devices


def changed_overrides(flat: Mapping[str, Any]) -> dict[str, str]:
    """Returns the overrides with which the base config becomes the config `flat`: dotted key -> text.

    flat: a whole config, dotted key -> value, as in the config.json of a run.
    """
    overrides = {}
    for key, default in configs.load_flat(_BASE).items():
        value = tuple(flat[key]) if isinstance(flat.get(key), list) else flat.get(key, default)
        if value != default:
            overrides[key] = f"({configs.as_text(value)})" if isinstance(value, tuple) else configs.as_text(value)
    return overrides
