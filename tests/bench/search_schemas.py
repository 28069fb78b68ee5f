"""The keys of the JSON of the searches: levers, front and fit. `reference.py` writes the JSON Schemas from them.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.records.result import Absent

Values = dict[str, Any]
record = dataclasses.dataclass(frozen=True, kw_only=True)


@record
class CompiledKeys:
    config: str
    given: str
    target: Values
    versions: dict[str, str]


@record
class LevelKeys(Row):
    stage: str
    title: str
    why: str
    kernel: str
    flags: str
    all_flags: str
    change_bytes: int | None


@record
class LeversResult(CompiledKeys):
    levels: list[LevelKeys]
    left_out: dict[str, str]
    first_that_fits: str | None
    interrupted: bool


@record
class FixedKeys:
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


@record
class PointKeys(Row):
    budget_bytes: int
    plan: str
    flags: str
    programs: int
    fixed: FixedKeys | None


@record
class FrontResult(CompiledKeys):
    points: list[PointKeys]
    best: PointKeys | None
    fixed: list[FixedKeys]
    cost: str
    offload: bool
    less: dict[str, float | None]
    programs: int
    compiled: int
    missing: int
    interrupted: bool


@record
class FitBestKeys(Row):
    flags: str
    what: str


@record
class StepKeys:
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


@record
class CertificateKeys:
    keys: Values
    flags: str
    what: str
    allocated_bytes: int
    missing_bytes: int
    host_bytes: int
    host_missing_bytes: int
    breakdown: dict[str, int]


@record
class MeshKeys:
    layout: str
    least_seconds: float | None
    slower: float | None
    what: str
    allocated_bytes: int | None
    predicted_seconds: float | None
    fits: bool
    verdict: str


@record
class FitResult(CompiledKeys):
    best: FitBestKeys | None
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


@record
class FitProgramRow:
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


@record
class KeptValueKeys:
    label: str
    name: str
    type: str
    count: int
    bytes: int
    where: str


@record
class FitProgramBest(FitProgramRow):
    policy: str
    policy_name: str
    kept: list[KeptValueKeys]
    code: list[str]
    breakdown: dict[str, int]
    flags: str | Absent


@record
class FitProgramCertificate(FitProgramRow):
    missing_bytes: int
    breakdown: dict[str, int]


@record
class LayerKeys:
    name: str
    where: str
    times: int
    how: str


@record
class FitProgramResult:
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
