"""The answers of `bytescope mcp`: the JSON results of commands, shortened for an agent, with their caveats.

A key of an answer has the name and the meaning of the key in the command's JSON. An answer leaves out figures that are
null and rows of 0 bytes. Its key `caveats` says what the figures do not prove.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.analysis import pool_notes
from bytescope.memory.devices import limits
from bytescope.memory.records.report_record import CARD, METHODS, POOL, ReportRecord
from bytescope.memory.report.buffer_tables import largest_table
from bytescope.memory.units import human

# Maximum number of buffers, names, variants or rows in a list of an answer.
MAX_LISTED = 12
REPORT_KEYS = (
    "program",
    "verdict",
    "predicted_bytes",
    "limit_bytes",
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
# Keys of `bytescope explain --json` that repeat the text of other keys or the log.
EXPLAIN_LEFT_OUT = ("form", "failure", "figures", "words", "messages", "savings")


def report_answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `report` for the JSON of `bytescope report`: the verdict, the bytes (on one
    device), the breakdown, the findings with their remedies, the largest buffers with their source lines, and the notes: a pool
    fraction with which the program would fit, and figures that are not exact."""
    report = ReportRecord.from_json(result)
    buffers = [_pick(row, BUFFER_KEYS) for row in largest_table(report, MAX_LISTED).rows]
    return {
        "target": report.target.get("name", ""),
        **_pick(result, REPORT_KEYS),
        "breakdown": _largest(report.breakdown),
        "residuals_by_name": dict([*_largest(report.residuals_by_name).items()][:MAX_LISTED]),
        "findings": [_filled(finding) for finding in result["findings"]],
        "largest_buffers": buffers,
        "notes": [*pool_notes(report), *report.notes],
        "prediction": _pick(report.prediction, PREDICTION_KEYS),
        "versions": _pick(report.versions, ("jax", "jaxlib")),
        "caveats": report_caveats(report),
    }


def report_caveats(report: ReportRecord) -> list[str]:
    """Returns what the figures of a report do not prove, as sentences: that the program was compiled and not run, what
    its limit is, and which parts are estimates."""
    target = report.target
    caveats = _common_caveats(target, report.limit_bytes)
    if report.method != "heap_trace":
        caveats.append(f"Live ranges: {METHODS.get(report.method, report.method)}.")
    for where, words in ((POOL, "in predicted_bytes"), (CARD, "outside of the pool, not in predicted_bytes")):
        rows = [row for row in report.runtime_overheads if row.where == where and row.bytes]
        if rows:
            listed = ", ".join(f"{row.name} {human(row.bytes)}" for row in rows)
            caveats.append(f"Estimated, because no compiler reports them, and {words}: {listed}.")
    if report.prediction:
        caveats.append(_seconds_caveat(report.prediction.get("rates", "")))
    return caveats


def compare_answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `compare` for the JSON of `bytescope compare`: the bytes on one device and the
    predicted seconds of each row, and the flags of the best rows."""
    rows = [_row(row) for row in result["rows"]]
    best = [_pick(row, ("task", "flags")) for row in result["best_of_each"]]
    kept = {key: result[key] for key in ("unchanged", "left_out", "interrupted") if result.get(key)}
    caveats = _common_caveats(result["target"], _one_limit(result["rows"]))
    caveats += [_seconds_caveat(rates) for rates in dict.fromkeys(row["rates"] for row in result["rows"]) if rates]
    return {
        "target": result["target"].get("name", ""),
        "rows": rows,
        "best_of_each": best,
        **kept,
        "caveats": [*caveats, "allocated_bytes are the compiler's; the tool report adds the runtime's overheads."],
    }


def fit_answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `fit` for the JSON of `bytescope fit`: the best configuration with its flags, or,
    if nothing fits, the variant nearest to the budget with its missing bytes; and the variants that were tried."""
    best, nearest = result.get("best"), result.get("certificate")
    walk: Sequence[Mapping[str, Any]] = result.get("walk", ())
    tried = sorted(walk, key=lambda row: (not row["fits"], row["predicted_seconds"] or 0.0))
    kept = ("config", "given", "budget_bytes", "batch_tokens", "ties", "programs", "stopped")
    caveats = _common_caveats(result["target"], result.get("budget_bytes"))
    if result.get("rates"):
        caveats.append(_seconds_caveat(result["rates"]))
    return {
        "target": result["target"].get("name", ""),
        "verdict": "fits" if best else "exceeds",
        **_pick(result, kept),
        "best": _row(best) if best else None,
        "nearest": {**_filled(nearest), "breakdown": _largest(nearest["breakdown"])} if nearest else None,
        "tried": [_pick(row, VARIANT_KEYS) for row in tried[:MAX_LISTED]],
        "caveats": caveats,
    }


def explain_answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of the tool `explain` for the JSON of `bytescope explain`: the cause, the figures in the
    message in bytes, the largest buffers that it lists, and the remedies, the cheapest first."""
    answer = _filled({key: value for key, value in result.items() if key not in EXPLAIN_LEFT_OUT})
    if "culprits" in answer:
        answer["culprits"] = [_filled(culprit) for culprit in answer["culprits"][:MAX_LISTED]]
    if "remedies" in answer:
        answer["remedies"] = [_filled(remedy) for remedy in answer["remedies"]]
    compared = "The log is compared with the report of a program that was compiled, not run."
    alone = "Only the log was read: no program was compiled, and the cause is what such a message usually means."
    return {**answer, "recognized": result["recognized"], "caveats": [compared if result.get("match") else alone]}


def _common_caveats(target: Mapping[str, Any], limit: int | None) -> list[str]:
    name = target.get("name") or "an unknown target"
    caveats = [f"Compiled by XLA for {name} and not run: no memory and no time was measured on a device."]
    if limit is None:
        return caveats
    share = limits.limit_share(target, limit)
    if share:
        caveats.append(f"The limit {human(limit)} is {share}; another pool fraction gives another limit.")
    elif target.get("platform") == "cpu":
        caveats.append(f"The limit {human(limit)} is free memory of this host, which changes with its load.")
    elif limit != target.get("limit_bytes"):
        caveats.append(f"The limit {human(limit)} is the budget that was asked for.")
    else:
        reserved = target.get("reserved_bytes") or 0
        caveats.append(f"The limit {human(limit)} is the device's memory without {human(reserved)} for the runtime.")
    return caveats


def _seconds_caveat(rates: str) -> str:
    return f"Seconds are predictions between a low and a high value; their rates: {rates}."


def _one_limit(rows: Sequence[Mapping[str, Any]]) -> int | None:
    # The limit of a CPU differs from row to row; the first one stands for all.
    return next((row["limit_bytes"] for row in rows if row["limit_bytes"]), None)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**_pick(row, ROW_KEYS), "breakdown": _largest(row.get("breakdown"))}


def _pick(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return _filled({key: values[key] for key in keys if key in values})


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "", [], {}, ())}


def _largest(sizes: Mapping[str, int] | None) -> dict[str, int]:
    return {name: size for name, size in sorted((sizes or {}).items(), key=lambda item: -item[1]) if size}
