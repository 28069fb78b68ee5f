"""Renders a run directory as one HTML file that opens offline: curves of loss, speed and memory, report, trace,
config.

Static content is prepared for `templates/run.html`. `static/run.js` draws the curves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from bytescope.memory.files import write_whole
from bytescope.memory.profile import trace_document
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.report import host_view
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.units import column_unit, human
from bytescope.memory.view import prediction_text as times_text
from bytescope.memory.view.draw_page import page_cards
from bytescope.memory.view.elements import (
    HeaderFigure,
    Section,
    figure,
    parts,
    program_facts,
    subject,
    versions,
)
from bytescope.memory.view.frame import page
from bytescope.train.run.run_directory import PAGE, RunDirectory, read

# Maximum number of points of a curve, and of findings. A longer curve keeps the minimum
# and the maximum of each stretch.
MAX_POINTS, MAX_FINDINGS = 1200, 4
# Curve -> the column of a row that it shows.
CURVES = {
    "loss": "loss",
    "norm": "grad_norm",
    "rate": "lr",
    "tokens": "tokens_per_s",
    "in_use": "memory.in_use_bytes",
    "peak": "memory.peak_bytes",
    "predicted": "memory.predicted_bytes",
}
REPORT = "memory.html"  # the page of the report of the step
HOST_NOTE = (
    "Bytes of one process in the memory of the computer, by phase of the last start. If there are several processes, "
    "each value is that of the process with the most."
)


def write(workdir: Path, out: Path | None = None) -> None:
    """Writes the HTML page of a run directory to `out`, by default index.html in the directory.

    Raises:
      ReportError: the folder is not a run directory.
      OSError: the page cannot be written.
    """
    out = out or workdir / PAGE
    run = read(workdir)
    write_whole(out, render(run, os.path.relpath(workdir.absolute(), out.absolute().parent)))


def render(run: RunDirectory, folder: str = ".") -> str:
    """Returns the HTML page of a run as text.

    Args:
      folder: path of the run directory relative to the page, for links.
    """
    report, trace = run.report, run.breakdown
    prefix = "" if folder == "." else f"{folder}/"
    return page(
        "run",
        f"{run.name} · run",
        page_data(run),
        heading=run.name,
        figures=_figures(run),
        where=subject(report) if report else "no report",
        facts=program_facts(report) if report else [],
        versions=versions(report.versions) if report else "",
        state=_run_status(run),
        problems=run.problems,
        links=[(quote(f"{prefix}{REPORT}"), "the full report of the step")] if REPORT in run.files else [],
        report=report,
        memory=parts(report.breakdown, report.allocated_bytes) if report else [],
        memory_figures=_memory(report) if report else [],
        findings=_findings(run),
        host=page_cards([host_view.card(run.host, HOST_NOTE)]),
        trace=page_cards(trace_document.document(trace).cards) if trace else [],
        config=_config_sections(run.config),
        has_rows=bool(run.rows or run.evaluations),
    )


def page_data(run: RunDirectory) -> dict[str, Any]:
    """Returns the data that the page's script draws, as JSON values: curves of the metrics, the memory limit, the
    and the traced time. A curve is (steps, values). Memory is in bytes, losses are in nats per
    token."""
    curves = {}
    for name, field in CURVES.items():
        curves[name] = curve([(row["step"], row[field]) for row in run.rows if field in row])
    curves["held_out"] = curve([(row["step"], row["eval_loss"]) for row in run.evaluations])
    bytes_shown = [value for name in ("in_use", "peak", "predicted") for value in curves[name][1]]
    return {
        "name": run.name,
        "curves": curves,
        "limit": _memory_limit_bytes(run),
        "shared": run.report is not None and _on_cpu(run.report),
        "unit": column_unit(max([*bytes_shown, 1]), 1.0),
        "trace": run.breakdown and trace_document.page_data(run.breakdown),
    }


def curve(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Reduces a curve, a list of (step, value), to about `max_points` points. Returns (steps, values).

    A longer curve is divided into equal parts. The result contains its first and last point, and the minimum and the
    maximum of each part.
    """
    if len(points) > max_points:
        size, kept = len(points), {0, len(points) - 1}
        for k in range(max_points // 2):
            stretch = range(k * size // (max_points // 2), (k + 1) * size // (max_points // 2))
            kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        points = [points[i] for i in sorted(kept)]
    return [step for step, _ in points], [value for _, value in points]


def predicted_bytes(run: RunDirectory) -> float | None:
    """Returns the predicted bytes in use per device, from the last row of metrics that has the number. If no row has
    it, returns the number in the report; None without a report."""
    recorded = [row["memory.predicted_bytes"] for row in run.rows if "memory.predicted_bytes" in row]
    if recorded:
        return recorded[-1]
    return run.report.predicted_bytes if run.report else None


def _on_cpu(report: ReportRecord) -> bool:
    return report.target.get("platform") == "cpu"


def _memory_limit_bytes(run: RunDirectory) -> float | None:
    recorded = [row["memory.limit_bytes"] for row in run.rows if "memory.limit_bytes" in row]
    if recorded:
        return recorded[-1]
    return run.report.limit_bytes if run.report else None


# ---- the header -----------------------------------------------------------------------------------------------


def _run_status(run: RunDirectory) -> dict[str, str]:
    if not run.step:
        return {"kind": "unknown", "words": "no update recorded"}
    if run.steps and run.step >= run.steps and run.evaluations and run.evaluations[-1]["step"] >= run.steps:
        return {"kind": "fits", "words": "✓ finished"}
    return {"kind": "tight", "words": f"at step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")}


def _figures(run: RunDirectory) -> list[HeaderFigure]:
    figures = [HeaderFigure("steps", f"{run.step:,}", f"of {run.steps:,}" if run.steps else "")]
    if run.evaluations:
        last, best = run.evaluations[-1], min(run.evaluations, key=lambda row: row["eval_loss"])
        worse = last["eval_loss"] > best["eval_loss"]
        note = f"best {best['eval_loss']:.4f} at step {int(best['step']):,}" if worse else "the best of the run"
        figures.append(HeaderFigure("held-out loss", f"{last['eval_loss']:.4f}", note))
    losses = [row for row in run.rows if "loss" in row]
    if losses:
        figures.append(HeaderFigure("train loss", f"{losses[-1]['loss']:.4f}", f"at step {int(losses[-1]['step']):,}"))
    speeds = [row["tokens_per_s"] for row in run.rows if "tokens_per_s" in row]
    if speeds:
        times = [row["step_time_s"] for row in run.rows if "step_time_s" in row]
        note = f"{trace_document.written(median(times))} per update, medians" if times else "median"
        figures.append(HeaderFigure("tokens/s", f"{median(speeds):,.0f}", note))
        prediction = StepPrediction.stated(run.report) if run.report else None
        if prediction:
            figures.append(
                HeaderFigure(
                    "predicted update",
                    times_text.predicted_time(prediction),
                    f"{times_text.interval(prediction)}; rates: {prediction.rates}",
                )
            )
    peaks = [row["memory.peak_bytes"] for row in run.rows if "memory.peak_bytes" in row]
    if peaks:
        owner = "of all CPU devices of the process" if run.report and _on_cpu(run.report) else "of a device"
        predicted = predicted_bytes(run)
        note = f"; predicted {human(predicted)}" if predicted is not None else ""
        figures.append(HeaderFigure("measured memory", human(max(peaks)), owner + note, f"{max(peaks):,.0f} bytes"))
    return figures + _router_figures(run)


def _router_figures(run: RunDirectory) -> list[HeaderFigure]:
    routed = [row for row in run.rows if "load_max" in row]
    if not routed:
        return []
    last = routed[-1]
    idle, dropped = int(last.get("idle_experts", 0)), last.get("dropped_share", 0.0)
    return [
        HeaderFigure(
            "busiest expert",
            f"{last['load_max']:.2f} x the mean",
            f"at step {int(last['step']):,}; "
            f"{f'{idle:,}' if idle else 'none'} idle, {f'{dropped:.2%} of the rows' if dropped else 'no row'} "
            "dropped",
        )
    ]


def _findings(run: RunDirectory) -> list[Finding]:
    findings = run.report.findings if run.report else []
    return sorted(findings, key=lambda finding: -finding.bytes)[:MAX_FINDINGS]


def _memory(report: ReportRecord) -> list[HeaderFigure]:
    return [
        figure("peak live", report.peak_bytes),
        figure("allocated", report.allocated_bytes),
        figure("predicted", report.predicted_bytes),
        figure("limit", report.limit_bytes),
    ]


# ---- config ---------------------------------------------------------------------------------------------------


def _config_sections(config: Mapping[str, Any]) -> list[Section]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in config.items():
        group, _, name = str(key).rpartition(".")
        groups.setdefault(group, []).append((name, _format_value(value)))
    return [Section(group or "run", entries) for group, entries in sorted(groups.items())]


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"
