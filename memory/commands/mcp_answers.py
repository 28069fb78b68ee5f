"""The answers of `bytescope mcp`: the JSON results of commands, shortened for an agent, with their caveats.

A key of an answer has the name and the meaning of the key in the command's JSON. An answer leaves out figures that are
null and rows of 0 bytes. Its key `caveats` says where the figures are from, what the limit is, and what is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.analysis import pool_notes
from bytescope.memory.records.report_record import CARD, METHODS, POOL, ReportRecord
from bytescope.memory.report.buffer_tables import largest_table
from bytescope.memory.units import human

# Maximum number of buffers, names, variants or rows in a list of an answer.
MAX_LISTED = 12
# Smaller buffers are not listed: share of the peak, 0 to 1.
MIN_SHARE = 0.01
REPORT_KEYS = (
    "program",
    "verdict",
    "predicted_bytes",
    "allocated_bytes",
    "peak_bytes",
    "host_bytes",
)
BUFFER_KEYS = ("what", "times", "bytes", "type", "row", "phase", "source")
PREDICTION_KEYS = ("seconds", "seconds_low", "seconds_high", "tokens_per_s", "mfu")
ROW_KEYS = (
    "overrides",
    "change",
    "effect",
    "status",
    "fits",
    "allocated_bytes",
    "limit_bytes",
    "peak_bytes",
    "residual_bytes",
    "host_bytes",
    "recompute_flops_fraction",
    "predicted_seconds",
    "predicted_seconds_low",
    "predicted_seconds_high",
    "predicted_tokens_per_s",
    "predicted_mfu",
    "batch",
    "policy",
    "policy_name",
    "code",
    "kept",
    "pareto",
    "flags",
    "what",
)
VARIANT_KEYS = ("what", "allocated_bytes", "predicted_seconds", "recompute_flops_fraction", "fits", "verdict")
ESTIMATED = {
    POOL: "Part of predicted_bytes (estimated, because no compiler reports them)",
    CARD: "Outside of the pool and not in predicted_bytes (estimated, because no compiler reports them)",
}
# Keys of `bytescope explain --json` that repeat the text of other keys or the log.
EXPLAIN_LEFT_OUT = ("form", "failure", "figures", "words", "messages", "savings")


def report_answer(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `report`: the verdict, the bytes (on one device), the breakdown, the findings with
    their remedies, the largest buffers with their source lines, and the notes, such as a pool fraction with which the
    program would fit.

    envelope: the JSON of `bytescope report` (`ResultEnvelope.to_json`).
    """
    result = envelope["result"]
    report = ReportRecord.from_json(result)
    rows = largest_table(report, MAX_LISTED).rows
    estimated = []
    for where, words in ESTIMATED.items():
        items = [row for row in report.runtime_overheads if row.where == where and row.bytes]
        if items:
            estimated.append(f"{words}: {', '.join(f'{row.name} {human(row.bytes)}' for row in items)}.")
    derived = [] if report.method == "heap_trace" else [f"Live ranges: {METHODS.get(report.method, report.method)}."]
    return {
        **_head(envelope),
        **_pick(result, REPORT_KEYS),
        "breakdown": _largest(report.breakdown),
        "residuals_by_name": dict([*_largest(report.residuals_by_name).items()][:MAX_LISTED]),
        "findings": [_filled(finding) for finding in result["findings"]],
        "largest_buffers": [_pick(row, BUFFER_KEYS) for row in rows if row["bytes"] >= MIN_SHARE * report.peak_bytes],
        "notes": pool_notes(report),
        "prediction": _pick(report.prediction, PREDICTION_KEYS),
        "caveats": [*envelope["caveats"], *estimated, *derived],
    }


def compare_answer(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `compare`: the bytes on one device and the predicted seconds of each row, and the
    flags of the best rows.

    envelope: the JSON of `bytescope compare`.
    """
    result = envelope["result"]
    kept = {key: result[key] for key in ("unchanged", "left_out", "interrupted") if result.get(key)}
    return {
        **_head(envelope),
        "rows": [_row(row) for row in result["rows"]],
        "best_of_each": [_pick(row, ("task", "flags")) for row in result["best_of_each"]],
        **kept,
        "caveats": [*envelope["caveats"], "allocated_bytes lack the runtime's overheads, which the tool report adds."],
    }


def fit_answer(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `fit`: the best configuration with its flags, or, if nothing fits, the variant
    nearest to the budget with its missing bytes; and the variants that were tried.

    envelope: the JSON of `bytescope fit`.
    """
    result = envelope["result"]
    best, nearest = result.get("best"), result.get("certificate")
    walk: Sequence[Mapping[str, Any]] = result.get("walk", ())
    tried = sorted(walk, key=lambda row: (not row["fits"], row["predicted_seconds"] or 0.0))
    return {
        **_head(envelope),
        "verdict": "fits" if best else "exceeds",
        **_pick(result, ("config", "given", "budget_bytes", "batch_tokens", "ties", "programs", "stopped")),
        "best": _row(best) if best else None,
        "nearest": {**_filled(nearest), "breakdown": _largest(nearest["breakdown"])} if nearest else None,
        "tried": [_pick(row, VARIANT_KEYS) for row in tried[:MAX_LISTED]],
        "caveats": envelope["caveats"],
    }


def explain_answer(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `explain`: the cause, the requested, available and total bytes, and at most
    `MAX_LISTED` each of the largest buffers in the message and of the remedies, cheapest first. Keys in
    `EXPLAIN_LEFT_OUT` are left out.

    envelope: the JSON of `bytescope explain`.
    """
    result = envelope["result"]
    answer = _filled({key: value for key, value in result.items() if key not in EXPLAIN_LEFT_OUT})
    for key in ("culprits", "remedies"):
        if key in answer:
            answer[key] = [_filled(row) for row in answer[key][:MAX_LISTED]]
    compared = "The log is compared with the report of a program that was compiled, not run."
    alone = "No program was compiled: the cause is what such a message usually means."
    caveats = [*envelope["caveats"], compared if result.get("match") else alone]
    return {**answer, "recognized": result["recognized"], "caveats": caveats}


def _head(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys with which every answer begins: the target's name, the limit in bytes and the versions of the
    packages. envelope: the JSON of a command."""
    head = {"target": (envelope["target"] or {}).get("name", "")}
    if envelope["limit"]:
        head["limit_bytes"] = envelope["limit"]["bytes"]
    return {**head, "versions": _pick(envelope["versions"], ("bytescope", "jax", "jaxlib"))}


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**_pick(row, ROW_KEYS), "breakdown": _largest(row.get("breakdown"))}


def _pick(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return _filled({key: values[key] for key in keys if key in values})


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "", [], {}, ())}


def _largest(sizes: Mapping[Any, int] | None) -> dict[str, int]:
    return {name: size for name, size in sorted((sizes or {}).items(), key=lambda item: -item[1]) if size}
