"""The report as plain records: what every reader fills and every renderer reads.

All sizes are bytes on ONE device. The JSON of a report has these keys (schema 1):

- `schema`: the number of this layout. It rises when a key changes its meaning or goes away.
- `versions`: name -> version of what compiled the program (jax, jaxlib, plugin, python).
- `target`: what the program was compiled for (`name`, `platform`, memory sizes ...); {} when nobody said.
- `config`: the configuration the caller passed; {} when there is none.
- `subject`: what a trainer says of it (`Subject`): the config's name, its batch, its policy; empty for other programs.
- `parameters`: parameter counts over all devices: `total`, frozen ones included, and `active`, those that one token
  uses; {} if they are not known.
- `program`: the name of the compiled module; `method`: how lifetimes were computed (`METHODS`).
- `xla`: the compiler's own statistics (`XlaStats`); a field that the backend does not give is null.
- `peak_bytes`: the maximum of bytes live at one time in device memory, as XProf counts it; `peak_index`: the index of
  that point in `timeline`.
- `allocated_bytes`: bytes that the runtime allocates: arguments, outputs without an alias, constants, packed
  temporaries.
- `runtime_overheads`: memory that the runtime takes and the compiler's report does not contain: CUDA context, NCCL
  buffers, rounding of the allocator and others (`RuntimeOverhead`; the table is in peak/runtime_overheads.py).
  `peak_bytes` and `allocated_bytes` do not include them. `predicted_bytes`: allocated bytes plus the runtime overheads
  inside the allocator's pool. `unseen`: the same list under the key of version 0.1; this version still writes it, the
  next version will not.
- `limit_bytes`: bytes available on the device; `fits`: whether `predicted_bytes` are within it; `verdict`: the same as
  a word. Without a target they are null, null and "unknown".
- `host_bytes`, `on_chip_bytes`: bytes in host memory and in on-chip memory; no figure above includes them.
- `breakdown`: row of `ROWS` -> bytes at the peak. All rows without fragmentation sum to `peak_bytes`, with it to
  `allocated_bytes`. Rows of arguments: params, trained parameters; frozen, parameters that a step reads and never
  updates, such as weights under LoRA adapters; optimizer, the optimizer's state; accumulator, sums of gradients; cache,
  state without a gradient that a step passes on (KV caches, recurrent state, batch statistics); rng, random keys;
  batch, all other arguments.
- `residuals_by_name`: checkpoint name -> bytes at the peak; a residual without a name is listed in
  parentheses by component and operation, "(attention/exp)", and what a loop of blocks carries from one to the
  next as "(blocks input)"; sums to the residuals row.
- `workspace_by_scope`: "phase/component" -> bytes at the peak; sums to the workspace row.
- `unplaced_bytes`: bytes at the peak, arguments excluded, with neither a source line nor a module path.
- `communication`: bytes per step by kind of collective and mesh axes, with the bytes that a formula expects
  (`Communication`); `collectives`: every collective of the program, with the compute that overlaps it (`Collective`).
- `transfers`: bytes per step between device and host memory, and their seconds at the host link (`Transfer`).
- `work`: phase -> FLOPs, bytes and messages of one call (`cost.roofline` lists the keys); {} for a program that was
  not traced. `roofline`: the least seconds of this work at the data sheet's rates (`cost.roofline`); {} if unknown.
- `prediction`: predicted seconds of an update with their spread (`seconds.step_prediction`); {} if unknown.
- `schedule`: what one device runs in a call, in order: kernels with their sizes, collectives and copies over the host
  link from start to wait, loops (records/schedule_records.py; lists, `to_json` there); [] if no schedule is known.
- `zero`: bytes per parameter compared with ZeRO's accounting (`ZeroRow`); [] without a trainer's facts.
- `ledger`, `timeline`, `buffers` (records/buffer_records.py), `findings`: records; `notes`: sentences on what is not
  exact.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, check_readable, one_line
from bytescope.memory.records.buffer_records import (
    CARD,
    CATEGORIES,
    MEMORIES,
    PHASES,
    POOL,
    ROWS,
    STEP_PHASES,
    Buffer,
    LedgerRow,
    PeakAccount,
    RuntimeOverhead,
    TimelinePoint,
    overhead_bytes,
)
from bytescope.memory.records.parallel_records import Collective, Communication, ZeroRow
from bytescope.memory.records.report_json import is_count, is_number, parse, plain, read_item
from bytescope.memory.records.schedule_records import Steps
from bytescope.memory.records.schedule_records import from_json as read_schedule
from bytescope.memory.records.schedule_records import to_json as schedule_json

# The report's records, and those of the other modules of records, which are re-exported here.
__all__ = [
    "CARD",
    "CATEGORIES",
    "IN_RUN",
    "KEYS",
    "MEMORIES",
    "METHODS",
    "PHASES",
    "POOL",
    "ROWS",
    "SCHEMA",
    "STEP_PHASES",
    "VERDICTS",
    "Buffer",
    "Finding",
    "JudgedProgram",
    "LedgerRow",
    "PeakAccount",
    "ReportRecord",
    "RuntimeOverhead",
    "Subject",
    "TimelinePoint",
    "Transfer",
    "XlaStats",
    "load",
]

SCHEMA = 1
# What a run directory calls the report of its step.
IN_RUN = "memory.json"
# How lifetimes were found -> what that says of them.
METHODS = {
    "heap_trace": "exact: the compiler's own heap trace",
    "schedule": "totals are XLA's; lifetimes derived from the scheduled HLO, the difference is a row",
}
VERDICTS = ("fits", "tight", "exceeds", "unknown")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem that an expert would point at: the bytes that it concerns, the message, and the remedy in words.

    `flags`: the remedy as flags of the trainer's command line, to copy; "" if there are none. Then the remedy names
    functions of JAX.
    """

    kind: str
    bytes: int
    message: str
    remedy: str
    flags: str = ""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes that one step moves over a device's host link in one direction ("to device", "to host") in one phase.

    `seconds`: at the target's `host_link_bytes_per_s`, 0.0 if that is unknown; whether compute overlaps the transfer
    is not considered.
    """

    phase: str
    direction: str
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Subject:
    """The trainer's description of the program that a report is about.

    Fields:
        name: of the config, "llama_8b"; changes: keys that were changed for this report, "batch.micro=2".
        batch: how the batch is made up, in words; policy: what the layers recompute, in words.
        tokens: of one update, over all devices; calls: of the program per update.
        model_flops: of one call, over all devices and without recomputation; 0 if they were not counted.
    """

    name: str = ""
    changes: tuple[str, ...] = ()
    batch: str = ""
    policy: str = ""
    tokens: int = 0
    calls: int = 1
    model_flops: int = 0


@dataclasses.dataclass(frozen=True)
class XlaStats:
    """The compiler's statistics of main memory; a field is None if the backend does not give it."""

    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_temp_bytes: int | None = None
    peak_bytes: int | None = None
    generated_code_bytes: int | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of temporaries, and of results that alias no argument."""
        return (self.temp_bytes or 0) + (self.output_bytes or 0) - (self.alias_bytes or 0)


@dataclasses.dataclass(frozen=True)
class JudgedProgram(PeakAccount):
    """A program's account with its traffic, its work and the verdict on its bytes. The rules of findings read it.

    Fields are JSON keys explained above.
    """

    collectives: tuple[Collective, ...] = ()
    work: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    target: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime_overheads: tuple[RuntimeOverhead, ...] = ()
    limit_bytes: int | None = None
    fits: bool | None = None
    verdict: str = "unknown"

    @property
    def predicted_bytes(self) -> int:
        """Maximum bytes that the allocator will count: allocated bytes and the overheads in its pool."""
        return self.allocated_bytes + self.overhead(POOL)

    @property
    def unseen(self) -> tuple[RuntimeOverhead, ...]:
        """The name of `runtime_overheads` in version 0.1. Reading it emits a DeprecationWarning."""
        warnings.warn("report.unseen is now report.runtime_overheads", DeprecationWarning, stacklevel=2)
        return self.runtime_overheads

    def overhead(self, where: str) -> int:
        """Returns the sum of the runtime overheads in the allocator's pool (`POOL`) or outside of it (`CARD`), in
        bytes."""
        return overhead_bytes(self.runtime_overheads, where)


@dataclasses.dataclass(frozen=True)
class ReportRecord(JudgedProgram):
    """What every byte of a program's peak is. Its fields are the JSON keys explained above."""

    findings: tuple[Finding, ...] = ()
    communication: tuple[Communication, ...] = ()
    zero: tuple[ZeroRow, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule: Steps = ()
    roofline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prediction: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    xla: XlaStats = XlaStats()
    subject: Subject = Subject()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA
    # Predicted seconds from the start of the step to each point of `timeline`, then to its end; () if unknown. They are
    # not in the JSON, so a report that was loaded has none, and two reports are compared without them.
    point_seconds: tuple[float, ...] = dataclasses.field(default=(), compare=False)

    @property
    def title(self) -> str:
        """The name of the program's config, else the compiler's name of the program."""
        return self.subject.name or self.program or "program"

    def moved(self, direction: str) -> int:
        """Bytes that one step moves over a device's host link, "to device" or "to host"."""
        return sum(row.bytes for row in self.transfers if row.direction == direction)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values, keys in a stable order."""
        out = {}
        for key in KEYS:
            out[key] = schedule_json(self.schedule) if key == "schedule" else plain(getattr(self, key))
            if key == "runtime_overheads":
                out["unseen"] = out[key]  # the key of version 0.1
        out["predicted_bytes"] = self.predicted_bytes
        out["unplaced_bytes"] = self.unplaced_bytes
        out["breakdown"] = {row: int(self.breakdown.get(row, 0)) for row in ROWS}
        return out

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to a file. Raises OSError if it cannot be written."""
        whole = Path(path)
        partial = whole.with_name(f".{whole.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            partial.replace(whole)  # a full disk never leaves half a report in the place of a good one
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def from_json(cls, value: Any) -> ReportRecord:
        """Returns the report of a JSON object. Raises ReportError if it is not a report, or has another schema."""
        if not isinstance(value, dict) or "peak_bytes" not in value:
            raise ReportError("not a memory report: write one with bytescope report --json=FILE")
        if value.get("schema") != SCHEMA:
            raise ReportError(
                f"a report of schema {value.get('schema')!r}, this version reads {SCHEMA}: "
                "write it again with bytescope report --json=FILE"
            )
        if "runtime_overheads" not in value and "unseen" in value:  # written by version 0.1
            value = {**value, "runtime_overheads": value["unseen"]}
        try:
            return cls(**{key: _read(key, value[key]) for key in KEYS if key in value})
        except (TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"a damaged memory report ({one_line(error)}): write it again") from error


# The order of keys in the JSON.
KEYS = (
    "schema",
    "program",
    "method",
    "versions",
    "target",
    "config",
    "subject",
    "parameters",
    "xla",
    "peak_bytes",
    "allocated_bytes",
    "limit_bytes",
    "fits",
    "verdict",
    "host_bytes",
    "on_chip_bytes",
    "peak_index",
    "breakdown",
    "residuals_by_name",
    "workspace_by_scope",
    "ledger",
    "zero",
    "communication",
    "collectives",
    "transfers",
    "runtime_overheads",
    "work",
    "roofline",
    "prediction",
    "findings",
    "notes",
    "timeline",
    "buffers",
    "schedule",
)

_ITEMS = {
    "timeline": TimelinePoint,
    "buffers": Buffer,
    "ledger": LedgerRow,
    "findings": Finding,
    "communication": Communication,
    "collectives": Collective,
    "zero": ZeroRow,
    "transfers": Transfer,
    "runtime_overheads": RuntimeOverhead,
}
_RECORDS = {"xla": XlaStats, "subject": Subject}
_COUNTS = ("peak_bytes", "allocated_bytes", "host_bytes", "on_chip_bytes", "peak_index", "schema")
_BYTES = ("parameters", "breakdown", "residuals_by_name", "workspace_by_scope")
_OBJECTS = (*_BYTES, "versions", "target", "config", "work", "roofline", "prediction")


def load(path: str | Path) -> ReportRecord:
    """Reads the JSON of a report, or of the report in a run directory.

    Raises ReportError for a missing, damaged or foreign file.
    """
    path = Path(path)
    if os.path.isfile(path / IN_RUN):
        path = path / IN_RUN
    try:
        check_readable(path)
        return ReportRecord.from_json(parse(path.read_bytes()))
    except OSError as error:
        raise ReportError(
            f"cannot read {path}: {error.strerror}; give a report that bytescope report --json=FILE wrote"
        ) from error
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error
    except ValueError as error:
        raise ReportError(f"{path}: not JSON ({one_line(error)})") from error


def _read(key: str, value: Any) -> Any:
    """Returns the record's value of a JSON key. Raises TypeError or ValueError for a value of another type."""
    if key in _ITEMS:
        return tuple(read_item(_ITEMS[key], item) for item in value)
    if key in _RECORDS:
        return read_item(_RECORDS[key], value)
    if key == "schedule":
        return read_schedule(value)
    if key == "notes":
        return tuple(str(note) for note in value)
    if key in _OBJECTS and not isinstance(value, dict):
        raise TypeError(f"{key} is {type(value).__name__}, not an object")
    if key in _VALUES and not _VALUES[key](value):
        raise TypeError(f"{key} is {value!r:.60}")
    return value


def _is_prediction(value: Mapping[str, Any]) -> bool:
    """Whether an object is what `seconds.step_prediction.StepPrediction.to_json` writes."""
    amounts = [value.get(key) for key in ("seconds", "seconds_low", "seconds_high")]
    amounts += [value[key] for key in ("tokens_per_s", "mfu") if value.get(key) is not None]
    parts = [value.get(key) for key in ("by_phase", "by_term")]
    return (
        all(is_number(amount) and amount > 0 for amount in amounts)
        and all(
            isinstance(part, dict) and all(is_number(taken) and taken >= 0 for taken in part.values()) for part in parts
        )
        and all(isinstance(value.get(key), str) for key in ("bound_by", "rates"))
    )


# Key -> whether a JSON value is valid for it; values of _OBJECTS are objects, items of lists are checked by field.
_VALUES = {
    **dict.fromkeys(_COUNTS, lambda value: is_count(value) and value >= 0),
    **dict.fromkeys(_BYTES, lambda value: all(map(is_count, value.values()))),
    **dict.fromkeys(("program", "method", "verdict"), lambda value: isinstance(value, str)),
    "prediction": lambda value: not value or _is_prediction(value),
    "versions": lambda value: all(isinstance(version, str) for version in value.values()),
    "target": lambda value: all(isinstance(value.get(key, ""), str) for key in ("name", "kind", "platform")),
    "limit_bytes": lambda value: value is None or is_count(value),
    "fits": lambda value: value in (True, False, None),
}
