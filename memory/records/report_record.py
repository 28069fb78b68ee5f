"""The report of a program as plain records: analysis fills them, and text, pages and commands read them.

All sizes are bytes on ONE device. The JSON of a report (schema 1) has the fields of `ReportRecord`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from bytescope.memory.errors import ReportError, check_readable, one_line
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
from bytescope.memory.records.result import Check, Count, JsonForm, is_number, parse, plain, read
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


def _is_prediction(value: Mapping[str, Any]) -> bool:
    # The fields that StepPrediction.to_json writes.
    amounts = [value.get(key) for key in ("seconds", "seconds_low", "seconds_high")]
    amounts += [value[key] for key in ("tokens_per_s", "mfu") if value.get(key) is not None]
    parts = [value.get(key) for key in ("by_phase", "by_term")]
    return not value or (
        all(is_number(amount) and amount > 0 for amount in amounts)
        and all(
            isinstance(part, dict) and all(is_number(taken) and taken >= 0 for taken in part.values()) for part in parts
        )
        and all(isinstance(value.get(key), str) for key in ("bound_by", "rates"))
    )


def _is_roofline(value: Mapping[str, Any]) -> bool:
    # The fields that the roofline's Prediction.to_json writes, or the reason why there is none.
    parts = [value.get(key, {}) for key in ("by_phase", "by_term")]
    return all(isinstance(part, dict) and all(map(is_number, part.values())) for part in parts)


def _is_target(value: Mapping[str, Any]) -> bool:
    return all(isinstance(value.get(key, ""), str) for key in ("name", "kind", "platform"))


@dataclasses.dataclass(frozen=True)
class JudgedProgram(PeakAccount):
    """The memory, the collectives and the work of a program, and the verdict on whether it fits. The rules that find
    problems read this record.

    Fields, in addition to those of `PeakAccount`:
        collectives: every collective of the program, with the compute that overlaps it (`Collective`).
        work: phase -> FLOPs, bytes and messages of one call (`cost.roofline` lists the keys); {} for a program that was
            not traced.
        target: the device that the program was compiled for (`name`, `platform`, memory sizes ...); {} if unknown.
        runtime_overheads: memory that the runtime takes and the compiler's report does not contain: CUDA context, NCCL
            buffers, rounding of the allocator and others (`RuntimeOverhead`; the table is in
            peak/runtime_overheads.py). `peak_bytes` and `allocated_bytes` do not include them.
        limit_bytes: bytes that are available on the device; None without a target.
        fits: true if `predicted_bytes` are at most `limit_bytes`, and if the rest of the GPU holds what is outside of
            its pool; None without a target.
        verdict: the same as a word: fits, tight (above 95 % of the limit), exceeds; unknown without a target.
        xla: the compiler's own statistics (`XlaStats`); a field that the backend does not give is None.
        xla_budget: the memory that XLA:GPU plans with, and what it is made of (`XlaBudget`); its fields are None if
            unknown.
        xla_recomputed: the instructions that XLA's rematerialization pass added to compute values again
            (`RecomputedValue`).
        scheduler_held: the buffers that XLA's schedule keeps alive at the peak, and that an order of least memory would
            not (`HeldBuffer`).
    """

    collectives: tuple[Collective, ...] = ()
    work: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    target: Annotated[Mapping[str, Any], Check(_is_target)] = dataclasses.field(default_factory=dict)
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
    """The memory report of a program.

    Fields, in addition to those of `JudgedProgram`:
        findings: problems with their remedies (`Finding`).
        host_memory: the host memory of a process by phase, and the memory of a node (`HostMemory`); None if unknown.
        audit: the requests of the program to jax and XLA (recompute, save, offload, donate, divide), each with what the
            compiled program does (`AuditRow`).
        communication: bytes per step by kind of collective and mesh axes, with the bytes that a formula expects
            (`Communication`).
        zero: bytes per parameter compared with ZeRO's accounting (`ZeroRow`); () without a trainer's facts.
        transfers: bytes per step between device and host memory, with their seconds at the rate of the host link
            (`Transfer`).
        parameters: parameter counts over all devices: `total`, which includes frozen parameters, and `active`, the
            parameters that one token uses; {} if unknown.
        schedule: the operations that one device runs in a call, in order: kernels with their sizes, collectives and
            copies over the host link from start to wait, and loops. The JSON is a list of lists (`to_json` in
            records/schedule_records.py); () if no schedule is known.
        roofline: the minimum seconds of this work at the rates of the data sheet (`cost.roofline`); {} if unknown, and
            only the key `unknown` with the reason if the prediction is less, because its rates exceed the data sheet.
        prediction: predicted seconds of an update with their spread (`seconds.step_prediction`); {} if unknown.
        subject: the trainer's description of the program (`Description`): the config's name, its batch, its policy;
            empty for other programs.
        versions: package -> version for the packages that compiled the program (jax, jaxlib, plugin, python).
        compiler_options: option of XLA -> value, for the options with which the program was compiled in addition to
            XLA_FLAGS; {} if there are none.
        config: the configuration that the caller passed; {} if there is none.
        schema: the version number of this layout. It rises if a key changes its meaning or is removed.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("predicted_bytes", "xla_limit_bytes", "unplaced_bytes")

    findings: tuple[Finding, ...] = ()
    host_memory: HostMemory | None = None
    audit: tuple[AuditRow, ...] = ()
    communication: tuple[Communication, ...] = ()
    zero: tuple[ZeroRow, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule: Annotated[Steps, JsonForm(list[Any], schedule_json, read_schedule)] = ()
    roofline: Annotated[Mapping[str, Any], Check(_is_roofline)] = dataclasses.field(default_factory=dict)
    prediction: Annotated[Mapping[str, Any], Check(_is_prediction)] = dataclasses.field(default_factory=dict)
    subject: Description = Description()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schema: Count = SCHEMA

    @property
    def xla_limit_bytes(self) -> int | None:
        """Bytes of temporary values that XLA's memory budget allows; None if unknown."""
        return self.xla_budget.limit_bytes

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
        return plain(self)

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
            return read(cls, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"the report is damaged ({one_line(error)}): write it again") from error


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
