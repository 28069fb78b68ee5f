"""The report of a program as plain records: analysis fills them, and text, pages and commands read them.

All sizes are bytes on ONE device. The JSON of a report has these keys (schema 1):

- `schema`: the version number of this layout. It rises if a key changes its meaning or is removed.
- `versions`: package -> version for the packages that compiled the program (jax, jaxlib, plugin, python).
- `target`: the device that the program was compiled for (`name`, `platform`, memory sizes ...); {} if unknown.
- `config`: the configuration that the caller passed; {} if there is none.
- `subject`: the trainer's description of the program (`Description`): the config's name, its batch, its policy; empty
  for other programs.
- `parameters`: parameter counts over all devices: `total`, which includes frozen parameters, and `active`, the
  parameters that one token uses; {} if unknown.
- `program`: the name of the compiled module.
- `method`: how live ranges were computed (`METHODS`).
- `xla`: the compiler's own statistics (`XlaStats`); a field that the backend does not give is null.
- `compiler_options`: option of XLA -> value, for the options with which the program was compiled in addition to
  XLA_FLAGS; {} if there are none.
- `xla_budget`: the memory that XLA:GPU plans with, and what it is made of (`XlaBudget`); null fields if unknown.
- `xla_limit_bytes`: bytes of temporary values that this budget allows; null if unknown.
- `audit`: the requests of the program to jax and XLA (recompute, save, offload, donate, divide), each with what the
  compiled program does (`AuditRow`).
- `xla_recomputed`: the instructions that XLA's rematerialization pass added to compute values again
  (`RecomputedValue`).
- `scheduler_held`: the buffers that XLA's schedule keeps alive at the peak, and that an order of least memory would not
  (`HeldBuffer`).
- `peak_bytes`: the maximum number of bytes that are live at one time in device memory, as XProf counts it.
- `peak_index`: the index of the peak in `timeline`.
- `allocated_bytes`: bytes that the runtime allocates for the program: arguments, outputs without an alias, constants,
  packed temporaries.
- `runtime_overheads`: memory that the runtime takes and the compiler's report does not contain: CUDA context, NCCL
  buffers, rounding of the allocator and others (`RuntimeOverhead`; the table is in peak/runtime_overheads.py).
  `peak_bytes` and `allocated_bytes` do not include them.
- `predicted_bytes`: allocated bytes plus the runtime overheads inside the allocator's pool.
- `limit_bytes`: bytes that are available on the device; null without a target.
- `fits`: true if `predicted_bytes` are at most `limit_bytes`, and if the rest of the GPU holds what is outside of its
  pool; null without a target.
- `verdict`: the same as a word: fits, tight (above 95 % of the limit), exceeds; unknown without a target.
- `host_memory`: the host memory of a process by phase, and the memory of a node (`HostMemory`); null if unknown.
- `host_bytes`, `on_chip_bytes`: bytes in host memory and in on-chip memory; no figure above includes them.
- `breakdown`: row of `ROWS` -> bytes at the peak. The rows without fragmentation sum to `peak_bytes`, with
  fragmentation to `allocated_bytes`. Rows of arguments: params, the trained parameters; frozen, parameters that a step
  reads and never updates, such as weights under LoRA adapters; optimizer, the optimizer's state; accumulator, sums of
  gradients; cache, state without a gradient that a step passes on (KV caches, recurrent state, batch statistics); rng,
  random keys; batch, all other arguments.
- `residuals_by_name`: checkpoint name -> bytes at the peak, which sum to the residuals row. A residual without a name
  is listed in parentheses by component and operation, "(attention/exp)". The activations that a loop of blocks carries
  from one block to the next are "(blocks input)".
- `workspace_by_scope`: "phase/component" -> bytes at the peak, which sum to the workspace row.
- `unplaced_bytes`: bytes at the peak, without arguments, of buffers that have neither a source line nor a module path.
- `communication`: bytes per step by kind of collective and mesh axes, with the bytes that a formula expects
  (`Communication`).
- `collectives`: every collective of the program, with the compute that overlaps it (`Collective`).
- `transfers`: bytes per step between device and host memory, with their seconds at the rate of the host link
  (`Transfer`).
- `work`: phase -> FLOPs, bytes and messages of one call (`cost.roofline` lists the keys); {} for a program that was
  not traced.
- `roofline`: the minimum seconds of this work at the rates of the data sheet (`cost.roofline`); {} if unknown, and only
  the key `unknown` with the reason if the prediction is less, because its rates exceed the data sheet.
- `prediction`: predicted seconds of an update with their spread (`seconds.step_prediction`); {} if unknown.
- `schedule`: the operations that one device runs in a call, in order: kernels with their sizes, collectives and copies
  over the host link from start to wait, and loops. The format is a list of lists (`to_json` in
  records/schedule_records.py); [] if no schedule is known.
- `zero`: bytes per parameter compared with ZeRO's accounting (`ZeroRow`); [] without a trainer's facts.
- `ledger`, `timeline`, `buffers`: records of records/buffer_records.py.
- `findings`: problems with their remedies (`Finding`).
- `notes`: sentences about figures that are not exact.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, check_readable, one_line, type_phrase
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.buffer_records import (
    CARD,
    CATEGORIES,
    MEMORIES,
    PHASES,
    POOL,
    ROWS,
    STEP_PHASES,
    Buffer,
    LedgerRole,
    LedgerRow,
    PeakAccount,
    RowName,
    RuntimeOverhead,
    TimelinePoint,
    overhead_bytes,
)
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.parallel_records import Collective, Communication, ZeroRow
from bytescope.memory.records.report_json import is_count, is_number, parse, plain, read_item
from bytescope.memory.records.result_envelope import unwrap
from bytescope.memory.records.schedule_records import Steps
from bytescope.memory.records.schedule_records import from_json as read_schedule
from bytescope.memory.records.schedule_records import to_json as schedule_json
from bytescope.memory.records.xla_records import HeldBuffer, RecomputedValue, XlaBudget

# The records of this module, and the records of the other modules of this folder, which are re-exported.
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
    "AuditRow",
    "Buffer",
    "Description",
    "Finding",
    "HeldBuffer",
    "HostMemory",
    "JudgedProgram",
    "LedgerRole",
    "LedgerRow",
    "PeakAccount",
    "RecomputedValue",
    "ReportRecord",
    "RowName",
    "RuntimeOverhead",
    "TimelinePoint",
    "Transfer",
    "XlaBudget",
    "XlaStats",
    "load",
]

SCHEMA = 1
# File name of a step's report in its run directory.
IN_RUN = "memory.json"
# Method by which live ranges were found -> a sentence about its accuracy.
METHODS = {
    "heap_trace": "exact: the compiler's own heap trace",
    "schedule": "totals are XLA's; live ranges are derived from the scheduled HLO, the difference is a row",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem that costs the program memory or time, with its remedy.

    Fields:
        kind: the name of the kind of problem, which is also the name of the rule that found it.
        bytes: bytes of device memory that the problem wastes or affects.
        message: the problem in words.
        remedy: the remedy in words.
        flags: command-line flags of `bytescope train` that apply the remedy. If it is "", the remedy names functions of
            JAX instead.
        options: compiler options that apply the remedy, such as "xla_disable_hlo_passes=copy_fusion"; "" if there are
            none.
        tried_bytes: allocated bytes of the program that was compiled with the remedy (`--try-remedies`); None if it was
            not compiled.
        tried_seconds: predicted seconds of an update of that program; None if unknown.
        subjects: names of the arguments or of the function that the remedy changes, or of the policy that it proposes;
            () if it changes something else.
        file: path of the source file of that function; "" if unknown.
    """

    kind: str
    bytes: int
    message: str
    remedy: str
    flags: str = ""
    options: str = ""
    tried_bytes: int | None = None
    tried_seconds: float | None = None
    subjects: tuple[str, ...] = ()
    file: str = ""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes that one step copies between one device and its host in one direction and one phase.

    Fields:
        phase: phase of the step: "forward", "recompute", "backward" or "optimizer".
        direction: "to device" or "to host".
        bytes: bytes of one step.
        seconds: seconds of the copies at the target's `host_link_bytes_per_s`, even if computation hides them; 0.0 if
            the rate is unknown.
    """

    phase: str
    direction: str
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Description:
    """The trainer's description of the program of a report.

    Fields:
        name: the name of the config, such as "llama_8b".
        changes: config keys that were changed for this report, such as "batch.micro=2".
        batch: the sizes that make up the batch, in words.
        policy: the remat policy of the layers, in words.
        tokens: tokens of one update, over all devices.
        calls: number of calls of the program per update.
        model_flops: FLOPs of one call, over all devices and without recomputation; 0 if they were not counted.
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
    """The compiler's memory statistics of a program on one device. A field is None if the backend does not report it.

    Fields:
        argument_bytes: bytes of the arguments.
        output_bytes: bytes of the results.
        alias_bytes: bytes of results that reuse the memory of donated arguments.
        temp_bytes: bytes of temporary values in device memory.
        host_temp_bytes: bytes of temporary values in host memory.
        peak_bytes: the highest number of live bytes.
        generated_code_bytes: bytes of machine code.
    """

    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_temp_bytes: int | None = None
    peak_bytes: int | None = None
    generated_code_bytes: int | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes that the step allocates in addition to its arguments: temporaries, and results that do not reuse the
        memory of an argument.
        """
        return (self.temp_bytes or 0) + (self.output_bytes or 0) - (self.alias_bytes or 0)


@dataclasses.dataclass(frozen=True)
class JudgedProgram(PeakAccount):
    """The memory, the collectives and the work of a program, and the verdict on whether it fits. The rules that find
    problems read this record.

    Fields, in addition to those of `PeakAccount`:
        collectives: every collective of the program.
        work: phase -> FLOPs, bytes and messages of one call; {} for a program that was not traced.
        target: the device that the program was compiled for (name, platform, memory sizes ...); {} if unknown.
        runtime_overheads: memory that the runtime takes and the compiler's report does not contain, such as the CUDA
            context.
        limit_bytes: bytes that are available on the device; None without a target.
        fits: whether the predicted bytes are at most `limit_bytes`; None without a target.
        verdict: "fits", "tight" or "exceeds"; "unknown" without a target.
        xla: the compiler's own memory statistics.
        xla_budget: the memory that XLA:GPU plans with.
        xla_recomputed: the instructions that XLA's rematerialization pass added.
        scheduler_held: the buffers that XLA's schedule keeps alive at the peak, and that an order of least memory would
            not.
    """

    collectives: tuple[Collective, ...] = ()
    work: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    target: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime_overheads: tuple[RuntimeOverhead, ...] = ()
    limit_bytes: int | None = None
    fits: bool | None = None
    verdict: str = "unknown"
    xla: XlaStats = XlaStats()
    xla_budget: XlaBudget = dataclasses.field(default_factory=XlaBudget)
    xla_recomputed: tuple[RecomputedValue, ...] = ()
    scheduler_held: tuple[HeldBuffer, ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """The most bytes that the allocator is predicted to reserve: XLA's allocations plus the runtime's memory in
        the allocator's pool.
        """
        return self.allocated_bytes + self.overhead(POOL)

    def overhead(self, where: str) -> int:
        """Returns the bytes that the runtime takes in the allocator's pool (`POOL`) or outside of it (`CARD`)."""
        return overhead_bytes(self.runtime_overheads, where)


@dataclasses.dataclass(frozen=True)
class ReportRecord(JudgedProgram):
    """The memory report of a program. The module's docstring explains the JSON keys, which have the names of the
    fields.

    Fields, in addition to those of `JudgedProgram`:
        findings: problems with their remedies.
        host_memory: the host memory of a process by phase, and the memory of a node; None if unknown.
        audit: the requests of the program to jax and XLA, each with what the compiled program does.
        communication: bytes per step by kind of collective and mesh axes.
        zero: bytes per parameter compared with the ZeRO paper.
        transfers: bytes per step between device and host memory.
        parameters: parameter counts over all devices: `total` and `active` (used by one token); {} if unknown.
        schedule: the operations that one device runs in a call, in order.
        roofline: the minimum seconds of the work at the rates of the data sheet; {} if unknown.
        prediction: predicted seconds of an update with their spread; {} if unknown.
        subject: the trainer's description of the program.
        versions: package -> version for the packages that compiled the program.
        compiler_options: option of XLA -> value, for the options with which the program was compiled.
        config: the configuration that the caller passed.
        schema: version number of the JSON layout.
    """

    findings: tuple[Finding, ...] = ()
    host_memory: HostMemory | None = None
    audit: tuple[AuditRow, ...] = ()
    communication: tuple[Communication, ...] = ()
    zero: tuple[ZeroRow, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule: Steps = ()
    roofline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prediction: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    subject: Description = Description()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def title(self) -> str:
        """The name of the program's config, or else the compiler's name of the program."""
        return self.subject.name or self.program or "program"

    @property
    def xla_recomputes(self) -> bool:
        """Whether XLA's own rematerialization pass recomputes values, because the program exceeds XLA's limit."""
        return bool(self.xla_recomputed) or any(finding.kind == "xla_remat" for finding in self.findings)

    @property
    def beyond_xla_limit(self) -> bool:
        """Whether the program is above the memory that XLA plans with, or was until XLA recomputed values."""
        return self.xla_recomputes or (self.xla_budget.margin_bytes or 0) < 0

    def moved(self, direction: str) -> int:
        """Returns the bytes that one step copies between one device and its host. `direction`: "to device" or "to
        host".
        """
        return sum(row.bytes for row in self.transfers if row.direction == direction)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values. The order of the keys is always the same."""
        out = {}
        for key in KEYS:
            out[key] = schedule_json(self.schedule) if key == "schedule" else plain(getattr(self, key))
            if key == "host_memory" and self.host_memory is not None:
                out[key] = self.host_memory.to_json()
        out["predicted_bytes"] = self.predicted_bytes
        out["xla_limit_bytes"] = self.xla_budget.limit_bytes
        out["unplaced_bytes"] = self.unplaced_bytes
        return out

    def save(self, path: str | Path) -> None:
        """Writes the report to a JSON file. Raises OSError if the file cannot be written."""
        whole = Path(path)
        partial = whole.with_name(f".{whole.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            partial.replace(whole)  # an interrupted write leaves the former report intact
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def from_json(cls, value: Any) -> ReportRecord:
        """Returns the report that a JSON object contains: the JSON of `to_json`, or of bytescope report --json. Raises
        ReportError if the object is not a report or has another schema version.
        """
        value = unwrap(value, "report")
        if not isinstance(value, dict) or "peak_bytes" not in value:
            raise ReportError("the JSON is not a memory report: write one with bytescope report --json=FILE")
        if value.get("schema") != SCHEMA:
            raise ReportError(
                f"the report has schema {value.get('schema')!r}, but this version reads schema {SCHEMA}: "
                "write it again with bytescope report --json=FILE"
            )
        if "runtime_overheads" not in value and "unseen" in value:  # its figures would be too low
            raise ReportError(
                "the report has the key unseen, which is now runtime_overheads: write it again with bytescope report "
                "--json=FILE"
            )
        try:
            return cls(**{key: _read_field(key, value[key]) for key in KEYS if key in value})
        except (TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"the report is damaged ({one_line(error)}): write it again") from error


# The order of keys in the JSON.
KEYS = (
    "schema",
    "program",
    "method",
    "versions",
    "compiler_options",
    "target",
    "config",
    "subject",
    "parameters",
    "xla",
    "xla_budget",
    "xla_recomputed",
    "scheduler_held",
    "peak_bytes",
    "allocated_bytes",
    "limit_bytes",
    "fits",
    "verdict",
    "host_bytes",
    "host_memory",
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
    "audit",
    "notes",
    "timeline",
    "buffers",
    "schedule",
)

_ITEMS = {
    "timeline": TimelinePoint,
    "buffers": Buffer,
    "ledger": LedgerRow,
    "xla_recomputed": RecomputedValue,
    "scheduler_held": HeldBuffer,
    "findings": Finding,
    "audit": AuditRow,
    "communication": Communication,
    "collectives": Collective,
    "zero": ZeroRow,
    "transfers": Transfer,
    "runtime_overheads": RuntimeOverhead,
}
_RECORDS = {"xla": XlaStats, "xla_budget": XlaBudget, "subject": Description}
_COUNTS = ("peak_bytes", "allocated_bytes", "host_bytes", "on_chip_bytes", "peak_index", "schema")
_BYTES = ("parameters", "breakdown", "residuals_by_name", "workspace_by_scope")
_OBJECTS = (*_BYTES, "versions", "compiler_options", "target", "config", "work", "roofline", "prediction")


def load(path: str | Path) -> ReportRecord:
    """Reads a report from a JSON file, or from a run directory that contains one.

    Raises ReportError if the file is missing or damaged, or is not a report.
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
        raise ReportError(
            f"{path} is not JSON ({one_line(error)}): give a report that bytescope report --json=FILE wrote"
        ) from error


def _read_field(key: str, value: Any) -> Any:
    if key in _ITEMS:
        return tuple(read_item(_ITEMS[key], item) for item in value)
    if key in _RECORDS:
        return read_item(_RECORDS[key], value)
    if key == "host_memory":
        return None if value is None else HostMemory.from_json(value)
    if key == "schedule":
        return read_schedule(value)
    if key == "notes":
        return tuple(str(note) for note in value)
    if key in _OBJECTS and not isinstance(value, dict):
        raise TypeError(f"the value of {key} must be a JSON object, but it is {type_phrase(value)}")
    if key in _VALUES and not _VALUES[key](value):
        raise TypeError(f"the value {key}={value!r:.60} does not have the type that a report needs")
    return value


def _is_prediction(value: Mapping[str, Any]) -> bool:
    # The fields that StepPrediction.to_json writes.
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


# Key -> function that checks a JSON value. Values of _OBJECTS are known to be objects; `read_item` checks list items.
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
