"""The measurements of a bisection, the bound that they are compared with, and the file that keeps them.

The file has one JSON object per line. The first line describes the bisection: program, target, kind of change, and
sources. Each following line is one measurement. A line is written as soon as its candidate is compiled, so that an
interrupted bisection can continue.
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
    """A number in a report that can have a bound: bytes or FLOPs on one device in one call of the step, or predicted
    seconds of one optimizer update (which may consist of several calls of the step).

    Fields:
        unit: the unit in messages, "FLOP" or "s"; "" for bytes.
        read: function from a report to the number; None if the report does not have it.
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
    """A bound on the bytes, FLOPs or seconds of a program.

    Fields:
        quantity: what is bounded, a key of QUANTITIES.
        value: upper limit in bytes, FLOPs or seconds; or, if `is_percent`, a change in per cent relative to the first
            program of the bisection (the oldest version, or the unchanged program).
        is_percent: True if `value` is a percentage. With +5, a program exceeds the bound if its value is above 105 % of
            the first program's value. With -5, which finds a change that saves memory or time, a program exceeds the
            bound if its value is below 95 % of the first program's value.
    """

    quantity: str
    value: float
    is_percent: bool

    def limit(self, good: float) -> float:
        """Returns the bound in bytes, FLOPs or seconds. `good`: the value of the first program of the bisection, to
        which a percentage is relative."""
        return good * (1 + self.value / 100) if self.is_percent else self.value

    def is_exceeded(self, value: float, good: float) -> bool:
        """Returns whether a program exceeds the bound: whether its bytes, FLOPs or seconds `value` are larger than the
        bound. If the bound is a negative percentage, such as -5%, the user looks for a decrease; then returns whether
        `value` is smaller than the bound. `good`: the value of the first program of the bisection."""
        limit = self.limit(good)
        return value < limit if self.is_percent and self.value < 0 else value > limit

    def text(self, good: float) -> str:
        """Returns the bound as text, such as "1.58 GiB (+5 %)". `good`: the value of the first program of the
        bisection."""
        share = f" ({self.value:+g} %)" if self.is_percent else ""
        return QUANTITIES[self.quantity].text(self.limit(good)) + share


def parse_bound(flag: str, quantity: str, text: str) -> Bound:
    """Returns the bound that a flag such as --bytes=40GiB or --step-seconds=+5% sets.

    Args:
        flag: name of the flag without dashes, such as "bytes".
        quantity: what the flag bounds, a key of QUANTITIES.
        text: the value of the flag.

    Raises ReportError if the text is neither a positive number nor a percentage with a sign.
    """
    if match := re.fullmatch(r"([+-]\d+(\.\d+)?)%", text):
        value = float(match[1])
        if value <= -100:
            raise ReportError(
                f"--{flag}={text} is not a bound, because nothing shrinks by {-value:g} %: give more than -100%"
            )
        return Bound(quantity, value, True)
    if flag == "bytes":
        try:
            return Bound(quantity, parse_bytes(text), False)
        except ReportError as error:
            raise ReportError(
                f"--bytes={text} is not a bound: give bytes such as 40GiB, or growth such as +5% over the first program"
            ) from error
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ReportError(
            f"--{flag}={text} is not a bound: give a positive number, or growth such as +5% over the first program"
        )
    return Bound(quantity, value, False)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of compiling one program of a bisection.

    Fields:
        point: name of the program, such as "jax 0.11.0".
        status: "ok", or one line that says why the program could not be compiled.
        report: the report of the compiled program; None if it could not be compiled.
        seconds: seconds that the measurement took, including the installation of packages.
    """

    point: str
    status: str
    report: ReportRecord | None = None
    seconds: float = 0.0

    def value(self, quantity: str) -> float | None:
        """Returns the measured bytes, FLOPs or seconds; None if the program was not compiled or the report lacks the
        number. `quantity`: a key of QUANTITIES."""
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
        """Returns the Measurement that `value` describes: one parsed JSON line of the measurements file, as `to_json`
        returns it. Raises KeyError, TypeError or ReportError if a field is missing or has the wrong type."""
        report = ReportRecord.from_json(value["report"]) if value["report"] is not None else None
        return cls(str(value["point"]), str(value["status"]), report, float(value["seconds"]))


class MeasurementFile:
    """The file that keeps the measurements of one bisection, in JSON lines.

    Args:
        path: path of the file. The file and its folder are created when the first measurement is added.
        question: everything that determines the measured values, as JSON values: program, target, kind of change,
            sources. It is written to the first line of the file, so that a file of another bisection is recognized.
        fresh: if True, a file with the same question is deleted first; if False, its measurements are used.

    Raises ReportError if the file has another question, or cannot be read.
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
            raise ReportError(f"{self.path} was not written by bytescope bisect --records: {remedy}") from error
        other = [key for key in self.question if header["question"].get(key) != self.question[key]]
        if other:
            raise ReportError(
                f"{self.path} has measurements of another bisection, with a different {', '.join(other)}: {remedy}"
            )
        self._size = sum(map(len, lines))

    def find(self, point: str) -> Measurement | None:
        """Returns the stored measurement of the program with this name, such as "jax 0.11.0"; None if there is none."""
        return self._found.get(point)

    def add(self, measurement: Measurement) -> None:
        """Appends a measurement to the file. Raises ReportError if the file cannot be written."""
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
