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
class StepKeys:
    stage: str
    what: str
    keys: Values
    allocated_bytes: int | None
    host_bytes: int | None
    recomputed_flops: float | None
    recompute_flops_fraction: float | None
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    predicted_tokens_per_s: float | None
    fits: bool
    verdict: str


@record
class FitBestConfigKeys(Row):
    stage: str
    what: str
    keys: Values
    recomputed_flops: float | None
    verdict: str
    flags: str


@record
class KeptValueKeys:
    label: str
    name: str
    type: str
    count: int
    bytes: int
    where: str


@record
class FitBestPolicyKeys(StepKeys):
    flags: str
    breakdown: dict[str, int]
    policy: str
    policy_name: str
    kept: list[KeptValueKeys]
    code: list[str]


@record
class CertificateKeys(StepKeys):
    flags: str
    breakdown: dict[str, int]
    missing_bytes: int
    host_missing_bytes: int


@record
class LayerKeys:
    name: str
    where: str
    times: int
    how: str


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
class FitResult:
    program: str
    best: FitBestConfigKeys | FitBestPolicyKeys | None
    walk: list[StepKeys]
    certificate: CertificateKeys | None
    ties: list[str]
    budget_bytes: int
    host_budget_bytes: int | None
    target: Values
    versions: dict[str, str]
    programs: int
    seconds: float
    stopped: str
    rates: str
    layers: list[LayerKeys] | Absent
    config: str | Absent
    given: str | Absent
    batch_tokens: int | Absent
    reach: list[Values] | Absent
    layouts: list[MeshKeys] | Absent
