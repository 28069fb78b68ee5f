"""The keys of the JSON that each command writes with --json: `reference.py` writes the JSON Schemas from them.

`RESULTS` has the annotation of the result of each command. Bytes are those of one device, unless a key says otherwise.
Keys that a record of `bytescope.memory` declares are taken from it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, Union

from bytescope.memory.commands.names_program import SavableValues
from bytescope.memory.commands.report_command import ReportResult
from bytescope.memory.commands.trace_command import TraceResult
from bytescope.memory.compare.compare_rows import CompareResult, Row
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.records.audit_record import AuditResult
from bytescope.memory.records.report_diff import DiffResult
from bytescope.memory.records.result import json_keys, schema
from bytescope.memory.records.result_envelope import ENVELOPE_SCHEMA, ResultEnvelope
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.train.commands.names_config import NamedTensors
from bytescope.train.generate.budget import GenerationReport
from bytescope.train.quantize.quantize_result import QuantizationResult
from bytescope.train.run.run_correction import RunCorrection

Values = dict[str, Any]


# ---- compare, levers, front, fit


class CompiledKeys(TypedDict):
    config: str
    given: str
    target: Values
    versions: dict[str, str]


class LevelKeys(TypedDict):
    stage: str
    title: str
    why: str
    kernel: str
    flags: str
    all_flags: str
    change_bytes: int | None


class LeversResult(CompiledKeys):
    levels: list[Annotated[LevelKeys, Row]]
    left_out: dict[str, str]
    first_that_fits: str | None
    interrupted: bool


class FixedKeys(TypedDict):
    policy: str
    flags: str
    allocated_bytes: int | None
    host_bytes: int | None
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    predicted_tokens_per_s: float | None
    predicted_mfu: float | None
    recompute_flops_fraction: float | None


class PointKeys(TypedDict):
    budget_bytes: int
    plan: str
    flags: str
    programs: int
    fixed: FixedKeys | None


class FrontResult(CompiledKeys):
    points: list[Annotated[PointKeys, Row]]
    best: Annotated[PointKeys, Row] | None
    fixed: list[FixedKeys]
    cost: str
    offload: bool
    less: dict[str, float | None]
    programs: int
    compiled: int
    missing: int
    interrupted: bool


class FitBestKeys(TypedDict):
    flags: str
    what: str


class StepKeys(TypedDict):
    stage: str
    what: str
    keys: Values
    allocated_bytes: int | None
    host_bytes: int | None
    recompute_flops_fraction: float | None
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    fits: bool
    verdict: str


class CertificateKeys(TypedDict):
    keys: Values
    flags: str
    what: str
    allocated_bytes: int
    missing_bytes: int
    host_bytes: int
    host_missing_bytes: int
    breakdown: dict[str, int]


class MeshKeys(TypedDict):
    layout: str
    least_seconds: float | None
    slower: float | None
    what: str
    allocated_bytes: int | None
    predicted_seconds: float | None
    fits: bool
    verdict: str


class FitResult(CompiledKeys):
    best: Annotated[FitBestKeys, Row] | None
    walk: list[StepKeys]
    certificate: CertificateKeys | None
    budget_bytes: int
    host_budget_bytes: int | None
    batch_tokens: int
    ties: list[str]
    rates: str
    programs: int
    seconds: float
    stopped: str
    reach: list[Values]
    layouts: list[MeshKeys]


class FitProgramRow(TypedDict):
    stage: str
    what: str
    keys: dict[str, str]
    allocated_bytes: int | None
    host_bytes: int | None
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    predicted_tokens_per_s: float | None
    recomputed_flops: int | None
    recompute_flops_fraction: float | None
    fits: bool
    verdict: str


class KeptValueKeys(TypedDict):
    label: str
    name: str
    type: str
    count: int
    bytes: int
    where: str


class FitProgramBest(FitProgramRow):
    policy: str
    policy_name: str
    kept: list[KeptValueKeys]
    code: list[str]
    breakdown: dict[str, int]
    flags: NotRequired[str]


class FitProgramCertificate(FitProgramRow):
    missing_bytes: int
    breakdown: dict[str, int]


class LayerKeys(TypedDict):
    name: str
    where: str
    times: int
    how: str


class FitProgramResult(TypedDict):
    """The result of `bytescope fit MODULE:FUNCTION`, and of `bytescope fit` for a program of another trainer, such as
    `maxtext:llama2-7b`."""

    program: str
    best: FitProgramBest | None
    walk: list[FitProgramRow]
    certificate: FitProgramCertificate | None
    layers: list[LayerKeys]
    budget_bytes: int
    target: Values
    versions: dict[str, str]
    programs: int
    seconds: float
    stopped: str
    rates: str


# ---- estimate, calibrate, quantize, score


class PolicyKeys(TypedDict):
    params: float
    gradients: float
    optimizer: float
    kept: float
    recomputed: float
    outside: float
    activations: float
    host: float
    total: float
    hardware_flops: float
    frozen: NotRequired[float]


class EstimateResult(TypedDict):
    question: Values
    parameters: dict[str, float]
    model_flops: float
    policies: dict[str, PolicyKeys]
    per_parameter: dict[str, float]
    notes: list[str]


class RatesKeys(TypedDict):
    format: int
    runs: NotRequired[RunCorrection]


class PerplexityKeys(TypedDict):
    perplexity: dict[str, float]


class ScoredText(TypedDict):
    row: int
    tokens: list[int]
    logprobs: list[float]
    perplexity: float


class ScoreResult(TypedDict):
    texts: list[ScoredText]


# ---- lists


class ConfigRow(TypedDict):
    config: str
    purpose: str


class KeyRow(TypedDict):
    key: str
    default: str
    meaning: str


class PolicyRow(TypedDict):
    policy: str
    keeps: str


class TargetRow(TypedDict):
    target: str
    device: str
    platform: str
    device_memory_bytes: int | None
    hbm_bytes_per_s: float | None
    bf16_flops: float | None
    peak_flops: dict[str, float]
    note: str


class ConfigsResult(TypedDict):
    configs: list[ConfigRow]


class KeysResult(TypedDict):
    keys: list[KeyRow]


class PoliciesResult(TypedDict):
    policies: list[PolicyRow]


class TargetsResult(TypedDict):
    targets: list[TargetRow]


class BudgetEntry(TypedDict):
    """The check of one program: the program or config with its overrides, its limit, verdict and report."""

    program: NotRequired[str]
    config: NotRequired[str]
    keys: Values
    target: str
    limit: str
    verdict: str
    error: str
    report: Values | None


class CheckResult(TypedDict):
    schema: int
    budgets: dict[str, BudgetEntry]


# Command -> the annotation of its result.
RESULTS: Mapping[str, Any] = {
    "report": ReportResult | GenerationReport,
    "explain": ExplanationRecord,
    "diff": DiffResult,
    "audit": AuditResult,
    "check": CheckResult,
    "names": NamedTensors | SavableValues,
    "trace": TraceResult,
    "compare": CompareResult,
    "levers": LeversResult,
    "front": FrontResult,
    "fit": FitResult | FitProgramResult,
    "estimate": EstimateResult,
    "calibrate": Annotated[RatesKeys, DeviceRates],
    "quantize": Annotated[PerplexityKeys, QuantizationResult],
    "score": ScoreResult,
    "configs": ConfigsResult,
    "keys": KeysResult,
    "policies": PoliciesResult,
    "targets": TargetsResult,
}
COMMANDS_WITH_JSON = tuple(RESULTS)


def json_schema(command: str) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of the JSON that a command writes with --json."""
    envelope = schema(ResultEnvelope)
    result = schema_of(RESULTS[command])
    envelope["properties"] |= {
        "schema": {"const": ENVELOPE_SCHEMA},
        "command": {"const": command},
        "result": result,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"bytescope {command} --json",
        **envelope,
    }


def schema_of(hint: Any) -> dict[str, Any]:
    """Returns the JSON Schema of a result that is declared as TypedDicts."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is NotRequired:
        return schema_of(args[0])
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in args]}
    if origin in (list, dict, Mapping):
        inner = schema_of(args[-1])
        return (
            {"type": "array", "items": inner} if origin is list else {"type": "object", "additionalProperties": inner}
        )
    if origin is not Annotated and not typing.is_typeddict(hint):
        return schema(hint)
    hints: dict[str, Any] = {}
    for record in (*args[1:], args[0]) if args else (hint,):
        own = dataclasses.is_dataclass(record)
        hints |= json_keys(record) if own else typing.get_type_hints(record, include_extras=True)
    return {
        "type": "object",
        "properties": {name: schema_of(each) for name, each in hints.items()},
        "required": [name for name, each in hints.items() if typing.get_origin(each) is not NotRequired],
        "additionalProperties": False,
    }
