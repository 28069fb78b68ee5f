"""A fit as one HTML file that opens offline: what to run, a picture of the search, and a table of all that was tried.

The answer and the table are prepared here for `templates/fit.html`; the picture is drawn by `static/fit.js`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from bytescope.memory.compare.compare_text import as_fast
from bytescope.memory.units import column_unit, human
from bytescope.memory.view.elements import (
    Cell,
    HeaderFigure,
    PageTable,
    Section,
    command,
    count,
    facts,
    figure,
    limit_notes,
    parts,
    percent,
    predicted,
    predictions,
    rates_notes,
    seconds,
    spread,
    table,
    title,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.train.plan.fit.fit_text import AT_LEAST, STAGES, slower

NOTES = (
    "Every variant is the trainer's own step, compiled for the target.",
    "Allocated: what the runtime takes on one device, arguments and packed temporaries included.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
    "Meshes are compared with everything recomputed; the search goes on with those that could be faster than the best "
    "so far if nothing were recomputed.",
)


def render(out: Mapping[str, Any]) -> str:
    """The page of a fit's JSON (`train.plan.fit.fit_result`), as text."""
    config, target = out["config"], out["target"]
    return page(
        "fit",
        title(config, target, f"fit within {human(out['budget_bytes'])}"),
        page_data(out),
        heading=f"{config or 'A config'} within {human(out['budget_bytes'])}",
        where=where(target),
        facts=facts([_subject(out)], out["given"]),
        versions=versions(out["versions"]),
        verdict=_verdict(out),
        figures=_figures(out),
        stopped=out["stopped"],
        answer=_answer(out),
        walk=_walk(out),
        layouts=_layouts(out),
        at_least=AT_LEAST,
        reach=_reach(out),
        notes=_notes(out),
        stages=_stages(out),
    )


def _notes(out: Mapping[str, Any]) -> list[str]:
    ties = as_fast(out["ties"])
    return [
        *limit_notes(out["target"], out["budget_bytes"]),
        *NOTES,
        *rates_notes([out]),
        *([f"{ties[:1].upper()}{ties[1:]}."] if ties else []),
    ]


def _subject(out: Mapping[str, Any]) -> dict[str, Any]:
    """Batch and policy of the choice; where nothing fits, the batch that was asked for."""
    best = out["best"] or {}
    return {"batch": best.get("batch") or f"{out['batch_tokens']:,} tokens per update", "policy": best.get("policy")}


def page_data(out: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values: a point for each variant that could be compiled.

    `number`: its row in the table, from 1; `chosen`: whether it is the choice, or the tightest where nothing fits.
    `unit`: (name, bytes) of the axis, gibibytes but for programs that have none.
    """
    points = [
        {
            "number": number,
            "stage": step["stage"],
            "what": step["what"],
            "bytes": step["allocated_bytes"],
            "host": step["host_bytes"] or 0,
            "seconds": step["predicted_seconds"],
            "spread": spread(step),
            "recomputed": step["recompute_flops_fraction"],
            "fits": step["fits"],
            "verdict": step["verdict"],
            "chosen": _is_chosen(out, step),
        }
        for number, step in enumerate(out["walk"], 1)
        if step["allocated_bytes"] is not None and step["predicted_seconds"] is not None
    ]
    used = [point["stage"] for point in points]
    most = max([out["budget_bytes"], *(point["bytes"] for point in points)])
    return {
        "points": points,
        "budget": out["budget_bytes"],
        "choice": "choice" if out["best"] else "tightest",
        "unit": column_unit(most, 0.5),
        "stages": [stage for stage in STAGES if stage in used],
    }


def _is_chosen(out: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    keys = out["best"]["overrides"] if out["best"] else (out["certificate"] or {}).get("keys")
    return step["keys"] == keys


# ---- the answer -----------------------------------------------------------------------------------------------


def _verdict(out: Mapping[str, Any]) -> dict[str, str]:
    if out["best"]:
        return {"kind": "fits", "words": "✓ fits"}
    if out["certificate"]:
        return {"kind": "exceeds", "words": "✕ does not fit"}
    return {"kind": "unknown", "words": "? nothing was found"}


def _figures(out: Mapping[str, Any]) -> list[HeaderFigure]:
    """What stands on top; figures that are not known are left out."""
    if out["best"]:
        found = _figures_of_best(out, out["best"])
    elif out["certificate"]:
        missing = out["certificate"]
        found = [
            figure("missing", missing[key], place) if missing[key] else HeaderFigure("missing", "")
            for key, place in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))
        ]
    else:
        found = []
    search = HeaderFigure(
        "search took", f"{out['seconds']:,.0f} s", f"{out['programs']} programs compiled, {len(out['walk'])} tried"
    )
    return [one for one in [*found, search] if one.value]


def _figures_of_best(out: Mapping[str, Any], best: Mapping[str, Any]) -> list[HeaderFigure]:
    measured = best["measured"] or {}
    return [
        figure("allocated", best["allocated_bytes"], f"of {human(out['budget_bytes'])}"),
        figure("on the host", best["host_bytes"], "per device")
        if best["host_bytes"]
        else HeaderFigure("on the host", ""),
        HeaderFigure(
            "step, measured",
            seconds(measured.get("step_seconds")),
            f"{count(measured.get('tokens_per_s', 0))} tokens/s on this machine",
        ),
        *predictions({**best, "predicted_tokens_per_s": _speed(out, best["predicted_seconds"])}),
        HeaderFigure("recomputed", percent(best["recompute_flops_fraction"]), "of the model's FLOPs"),
    ]


def _speed(out: Mapping[str, Any], step: float | None) -> float | None:
    """Tokens per second of a predicted step, over all devices."""
    return out["batch_tokens"] / step if step else None


def _answer(out: Mapping[str, Any]) -> dict[str, Any] | None:
    """The command to run and what its bytes are; where nothing fits, what tells more of the tightest variant.

    `limit`: where on the bar the budget ends, in percent, None where all is within it.
    """
    found = out["best"] or out["certificate"]
    if not found:
        return None
    budget, total = out["budget_bytes"], max(found["allocated_bytes"], 1)
    scale, over = max(budget, total), total > budget
    room = f"{human(abs(total - budget))} {'too much' if over else 'left'}"
    return {
        "title": "Run it" if out["best"] else "Does not fit: the tightest variant",
        "what": found["what"],
        "command": command(out["config"], out["target"], found["flags"], fits=bool(out["best"])),
        "parts": parts(found["breakdown"], total, scale),
        "over": over,
        "limit": 100 * budget / scale if over else None,
        "room": f"{human(total)} of {human(budget)}, {room}{_host(out, found)}",
    }


def _host(out: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if not found["host_bytes"]:
        return ""
    most = f" of {human(out['host_budget_bytes'])}" if out["host_budget_bytes"] else ""
    return f"; {human(found['host_bytes'])}{most} on the host"


# ---- the search -----------------------------------------------------------------------------------------------


def _walk(out: Mapping[str, Any]) -> PageTable:
    """A row for each step, with the command that makes it; the choice stands out."""

    def run(step: Mapping[str, Any]) -> Cell | str:
        if step["allocated_bytes"] is None:
            return ""
        keys = shlex.join(f"--config.{key}={text}" for key, text in step["keys"].items())
        return Cell("copy", command=command(out["config"], out["target"], out["given"], keys, fits=step["fits"]))

    columns = (
        ("#", "num", lambda item: str(item[0])),
        ("stage", "text", lambda item: item[1]["stage"]),
        ("what", "text what", lambda item: item[1]["what"]),
        ("allocated", "num", lambda item: _known(item[1]["allocated_bytes"])),
        ("host", "num", lambda item: _known(item[1]["host_bytes"] or None)),
        ("step, predicted", "num", lambda item: predicted(item[1])),
        ("tokens/s, predicted", "num", lambda item: count(_speed(out, item[1]["predicted_seconds"]))),
        ("recomputed", "num", lambda item: percent(item[1]["recompute_flops_fraction"])),
        ("verdict", "text", lambda item: Cell(item[1]["verdict"], kind=_kind(item[1]))),
        ("command", "text command", lambda item: run(item[1])),
    )
    return table(
        columns,
        list(enumerate(out["walk"], 1)),
        kind=lambda item: "winner" if out["best"] and _is_chosen(out, item[1]) else "",
        title=lambda item: " ".join(f"{key}={text}" for key, text in item[1]["keys"].items()),
    )


def _reach(out: Mapping[str, Any]) -> PageTable | None:
    """What each rank of adapters reaches, with the command of each; None for a fit without adapters."""
    columns = (
        ("rank", "num", lambda row: str(row["rank"])),
        ("tokens of a sequence", "num", lambda row: count(row["length"])),
        ("sequences at once", "num", lambda row: str(row["micro"])),
        ("frozen weights in", "text", lambda row: row["base"]),
        ("recomputed", "text", lambda row: row["policy"]),
        ("allocated", "num", lambda row: _known(row["allocated_bytes"])),
        ("host", "num", lambda row: _known(row["host_bytes"] or None)),
        ("step, predicted", "num", lambda row: seconds(row["predicted_seconds"])),
        ("tokens/s, predicted", "num", lambda row: count(row["tokens_per_s"])),
        ("verdict", "text", lambda row: Cell(row["verdict"], kind=_kind(row))),
        (
            "command",
            "text command",
            lambda row: Cell("copy", command=command(out["config"], out["target"], row["flags"], fits=row["fits"])),
        ),
    )
    return table(columns, out["reach"]) if out.get("reach") else None


def _layouts(out: Mapping[str, Any]) -> PageTable | None:
    """Each mesh beside the choice; None where one was tried, or nothing fits."""
    columns = (
        ("mesh", "text", lambda row: row["layout"]),
        ("its best variant", "text what", lambda row: row["what"].removeprefix(f"{row['layout']}, ")),
        ("allocated", "num", lambda row: _known(row["allocated_bytes"])),
        ("step, predicted", "num", lambda row: seconds(row["predicted_seconds"])),
        ("slower by", "num", slower),
        ("verdict", "text", lambda row: Cell(row["verdict"], kind=_kind(row))),
    )
    rows = out.get("layouts") or ()
    return table(columns, rows) if out["best"] and len(rows) > 1 else None


def _known(size: int | None) -> str:
    return "" if size is None else human(size)


def _kind(step: Mapping[str, Any]) -> str:
    if step["fits"]:
        return "fits"
    return "tight" if step["allocated_bytes"] is None else "exceeds"


def _stages(out: Mapping[str, Any]) -> Section:
    used = {step["stage"] for step in out["walk"]}
    return Section("Stages of the search", [(stage, why) for stage, why in STAGES.items() if stage in used])
