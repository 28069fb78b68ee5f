"""Measurements of a bisection, the bound that they are compared with, and the file that keeps them.

The file has one JSON object per line: first the question, then one measurement per line. A line is written when its
measurement is finished, so an interrupted bisection continues with the next one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, disk_remedy
from bytescope.memory.records.report_diff import step_flops
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human, parse_bytes

SCHEMA = 1
# Buffers below this fraction of the peak are left out of the file.
_SMALL_BUFFER = 1e-4
# The keys of a report that a difference between two reports needs.
_KEYS = (
    "schema",
    "program",
    "method",
    "versions",
    "target",
    "xla_budget",
    "xla_recomputed",
    "peak_bytes",
    "allocated_bytes",
    "host_bytes",
    "limit_bytes",
    "peak_index",
    "breakdown",
    "residuals_by_name",
    "workspace_by_scope",
    "communication",
    "work",
    "prediction",
    "notes",
    "buffers",
)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A figure of a report that a bound can be set on.

    Fields:
        unit: the unit in messages, "" for bytes.
        read: function from a report to the figure, None if the report does not have it. Figures are those of one
            device in one call of the step; predicted seconds are those of an update.
    """

    unit: str
    read: Callable[[ReportRecord], float | None]

    def text(self, value: float) -> str:
        """Returns a value with its unit, such as "1.50 GiB" or "0.0123 s"."""
        return f"{value:,.4g} {self.unit}" if self.unit else human(value)


def _seconds(report: ReportRecord) -> float | None:
    return report.prediction.get("seconds")


# Flag of the command -> its quantity. `--of` selects other bytes than those allocated.
QUANTITIES: Mapping[str, Quantity] = {
    "allocated": Quantity("", lambda report: report.allocated_bytes),
    "peak": Quantity("", lambda report: report.peak_bytes),
    "predicted": Quantity("", lambda report: report.predicted_bytes),
    "host": Quantity("", lambda report: report.host_bytes),
    "flops": Quantity("FLOP", lambda report: step_flops(report) or None),
    "seconds": Quantity("s", _seconds),
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound on one quantity of a program.

    Fields:
        quantity: a key of QUANTITIES.
        value: the bound itself, or its distance from the value of the good end in per cent.
        is_percent: whether `value` is a percentage. A positive percentage is exceeded by a value above the bound, a
            negative one by a value below the bound.
    """

    quantity: str
    value: float
    is_percent: bool

    def limit(self, good: float) -> float:
        """Returns the bound for a value of the good end."""
        return good * (1 + self.value / 100) if self.is_percent else self.value

    def is_exceeded(self, value: float, good: float) -> bool:
        """Returns whether a value exceeds the bound, given the value of the good end."""
        limit = self.limit(good)
        return value < limit if self.is_percent and self.value < 0 else value > limit

    def text(self, good: float) -> str:
        """Returns the bound as text, such as "1.58 GiB (+5 %)", given the value of the good end."""
        share = f" ({self.value:+g} %)" if self.is_percent else ""
        return QUANTITIES[self.quantity].text(self.limit(good)) + share


def parse_bound(flag: str, quantity: str, text: str) -> Bound:
    """Returns the bound that a flag such as --bytes=40GiB or --step-seconds=+5% sets.

    flag: the flag's name in error messages. quantity: a key of QUANTITIES. Raises ReportError for a text that is
    neither a positive figure nor a percentage with its sign.
    """
    if match := re.fullmatch(r"([+-]\d+(\.\d+)?)%", text):
        value = float(match[1])
        if value <= -100:
            raise ReportError(f"--{flag}={text} is no bound, because nothing shrinks by {-value:g} %: give less")
        return Bound(quantity, value, True)
    if flag == "bytes":
        try:
            return Bound(quantity, parse_bytes(text), False)
        except ReportError as error:
            raise ReportError(
                f"--bytes={text} is not a bound: give bytes such as 40GiB, or growth from the good end such as +5%"
            ) from error
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ReportError(
            f"--{flag}={text} is not a bound: give a positive number, or growth from the good end such as +5%"
        )
    return Bound(quantity, value, False)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one candidate.

    Fields:
        point: the name of the candidate, such as "jax 0.11.0".
        status: "ok", or why the candidate could not be measured, in one line.
        report: the report of the compiled program, None if it could not be measured.
        seconds: duration of the measurement, including installation, in seconds.
    """

    point: str
    status: str
    report: ReportRecord | None = None
    seconds: float = 0.0

    def value(self, quantity: str) -> float | None:
        """Returns the figure of a quantity, a key of QUANTITIES; None if it is unknown."""
        return QUANTITIES[quantity].read(self.report) if self.report is not None else None

    def to_json(self) -> dict[str, Any]:
        report = self.report.to_json() if self.report is not None else None
        if report is not None and self.report is not None:
            report = {key: report[key] for key in _KEYS}
            # Only the buffers at the peak are compared.
            peak, least = self.report.peak_index, self.report.peak_bytes * _SMALL_BUFFER
            report["buffers"] = [
                row for row in report["buffers"] if row["start"] <= peak <= row["end"] and row["bytes"] >= least
            ]
        return {"point": self.point, "status": self.status, "seconds": round(self.seconds, 1), "report": report}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measurement:
        """Returns the measurement of a line. Raises KeyError, TypeError or ReportError if the line has another form."""
        report = ReportRecord.from_json(value["report"]) if value["report"] is not None else None
        return cls(str(value["point"]), str(value["status"]), report, float(value["seconds"]))


class MeasurementFile:
    """The JSON-lines file with the measurements of one question.

    Args:
        path: the file. It is created with its folder when the first measurement is added.
        question: everything that decides the figures: program, target, axis, interpreter, sources. JSON values.
        fresh: whether measurements that are in the file are ignored.

    Raises ReportError if the file has the measurements of another question, or cannot be read.
    """

    def __init__(self, path: Path, question: Mapping[str, Any], fresh: bool = False) -> None:
        self.path, self.question = path, json.loads(json.dumps(question))
        self._found: dict[str, Measurement] = {}
        self._size = 0
        if path.is_file() and not (fresh and self._is_of_question()):
            self._read()

    def _is_of_question(self) -> bool:
        # With `fresh`, the file is written anew if it is a file of this command.
        try:
            with self.path.open("rb") as file:
                if json.loads(file.readline())["question"] == self.question:
                    self.path.unlink()
                    return True
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return False

    def _read(self) -> None:
        remedy = "give another file with --records"
        try:
            data = self.path.read_bytes()
            # A last line without an end is a measurement whose writing was interrupted.
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            header = json.loads(lines[0]) if lines else {"schema": SCHEMA, "question": self.question}
            if header["schema"] != SCHEMA:
                raise ReportError(f"{self.path} was written by another version of bytescope: {remedy}")
            for line in lines[1:]:
                measurement = Measurement.from_json(json.loads(line))
                self._found[measurement.point] = measurement
        except OSError as error:
            raise ReportError(f"cannot read {self.path}: {error.strerror}; {remedy}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, ReportError):
                raise
            raise ReportError(f"{self.path} is not a file of measurements of bytescope bisect: {remedy}") from error
        other = [key for key in self.question if header["question"].get(key) != self.question[key]]
        if other:
            raise ReportError(
                f"{self.path} has measurements of another question, with a different {', '.join(other)}: {remedy}"
            )
        self._size = sum(map(len, lines))

    def find(self, point: str) -> Measurement | None:
        """Returns the finished measurement of a candidate, None if there is none."""
        return self._found.get(point)

    def add(self, measurement: Measurement) -> None:
        """Writes a finished measurement to the end of the file. Raises ReportError if the file cannot be written."""
        lines = json.dumps(measurement.to_json()) + "\n"
        if not self._size:
            lines = json.dumps({"schema": SCHEMA, "question": self.question}) + "\n" + lines
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self._size)
                file.write(lines.encode())
        except OSError as error:
            raise ReportError(
                f"cannot write {self.path}: {error.strerror}; {disk_remedy(error)}give another file with --records"
            ) from error
        self._size += len(lines.encode())
        self._found[measurement.point] = measurement
