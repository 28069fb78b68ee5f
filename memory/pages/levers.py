"""The staircase as one HTML file that opens offline: stacked bars with the target's budget, and a table of stages.

The page is `page.levers.html` with the styles of the comparison's page. Whatever comes from a
staircase is escaped here, and reaches the page as text there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bytescope.memory.pages.frame import fill
from bytescope.memory.pages.report import label as row_name
from bytescope.memory.plan.levers import STAGES, scale_of
from bytescope.memory.plan.rows import UNITS
from bytescope.memory.records import ROWS
from bytescope.memory.units import human


def render(staircase: Mapping[str, Any], config: str = "") -> str:
    """The page of a staircase's JSON (`memory.plan.levers.to_json`), as text; `config` is the file it is about."""
    parts = {
        "HEADER": _header(staircase, config),
        "TABLE": _table(staircase["levels"]),
        "LEFT": "".join(f'<p class="best">Left out: {escape(name)}: {escape(why)}</p>'
                        for name, why in staircase["left_out"].items()),
        "ABOUT": _about(),
    }
    return fill("levers", f"{config or 'staircase'} · levers", page_data(staircase), parts, styles=("compare",))


def page_data(staircase: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `scale`: bytes of the highest bar that is drawn whole."""
    levels = staircase["levels"]
    sizes = [level["allocated_bytes"] or 0 for level in levels] or [1]
    limit = next((level["limit_bytes"] for level in levels if level["limit_bytes"]), None)
    unit = next(((name, size) for name, size in UNITS if min(sizes) >= size / 10), UNITS[-1])
    return {
        "levels": [{"title": level["title"], "flags": level["flags"], "bytes": level["allocated_bytes"] or 0,
                    "breakdown": level["breakdown"], "limit": level["limit_bytes"], "fits": level["fits"],
                    "costs": _costs(level)} for level in levels],
        "categories": [(row, row_name(row)) for row in ROWS if any(level["breakdown"].get(row) for level in levels)],
        "unit": unit, "limit": limit, "target": str(staircase["target"].get("name", "")),
        "scale": scale_of(sizes, limit),
    }


def _costs(level: Mapping[str, Any]) -> list[str]:
    """What a level costs beside its bytes, in words."""
    moved = (level["to_host_bytes"] or 0) + (level["to_device_bytes"] or 0)
    share = level["recompute_flops_fraction"]
    return [STAGES[level["stage"]].why if level["stage"] in STAGES else "",
            f"recomputed: {share:.1%} of the model's FLOPs" if share is not None else "",
            f"host memory {human(level['host_bytes'])}" if level["host_bytes"] else "",
            f"moved in one call of the step: {human(moved)}" if moved else ""]


def _header(staircase: Mapping[str, Any], config: str) -> str:
    target = staircase["target"]
    where = " · ".join(filter(None, [str(target.get("name", "")), str(target.get("kind", "")), "per device"]))
    versions = " · ".join(f"{name} {version}" for name, version in staircase["versions"].items())
    levels = {level["stage"]: level for level in staircase["levels"]}
    first, last = levels.get(staircase["first_that_fits"]), next(reversed(levels.values()), None)
    cells = "".join(f'<div class="figure"><dt>{name}</dt><dd>{human(level["allocated_bytes"])}'
                    f"<small>{escape(level['title'])}</small></dd></div>"
                    for name, level in (("first", next(iter(levels.values()), None)), ("first that fits", first),
                                        ("last", last)) if level)
    use = "".join(f'<p class="best">{words}: <span class="flags">{escape(level["all_flags"] or "as configured")}</span>'
                  "</p>" for words, level in (("First that fits", first), ("All of them", last)) if level)
    none = "" if first else '<p class="best exceeds">None of these fits.</p>'
    stopped = '<p class="best">Stopped early: some are missing.</p>' if staircase.get("interrupted") else ""
    return (f'<div class="title"><p class="eyebrow">{escape(where)}</p><h1>{escape(config or "A config")}, lever by '
            f'lever</h1><p class="versions">{escape(versions)}</p></div><dl class="figures">{cells}</dl>'
            f"{use}{none}{stopped}")


# Title, how a level's cell is written; the first three columns are words.
_COLUMNS = (
    ("stage", lambda level: escape(level["title"])),
    ("what it adds", lambda level: "<br>".join(map(escape, level["flags"].split()))
     + (f" → {escape(level['kernel'])}" if "model.attention=auto" in level["flags"] else "")),
    ("what it costs", lambda level: escape(STAGES[level["stage"]].why if level["stage"] in STAGES else "")),
    ("allocated", lambda level: human(level["allocated_bytes"])),
    ("verdict", lambda level: {True: '<span class="fits">fits</span>', False: '<span class="exceeds">exceeds</span>',
                               None: "ok"}[level["fits"]]),
    ("change", lambda level: _signed(level["change_bytes"])),
    ("peak", lambda level: human(level["peak_bytes"])),
    ("host", lambda level: human(level["host_bytes"]) if level["host_bytes"] else ""),
    ("to host", lambda level: human(level["to_host_bytes"]) if level["to_host_bytes"] else ""),
    ("to device", lambda level: human(level["to_device_bytes"]) if level["to_device_bytes"] else ""),
    ("recomputed", lambda level: _form("{:.1%}", level["recompute_flops_fraction"])),
    ("HFU/MFU", lambda level: _form("{:.3f}", level["hardware_flops"] and level["model_flops"]
                                    and level["hardware_flops"] / level["model_flops"])),
)
_WORDS = 3


def _table(levels: Sequence[Mapping[str, Any]]) -> str:
    kind = ['class="text"'] * _WORDS + ['class="num"'] * (len(_COLUMNS) - _WORDS)
    columns = [(k, title, [write(level) for level in levels]) for k, (title, write) in zip(kind, _COLUMNS)]
    columns = [(k, title, cells) for k, title, cells in columns if any(cells)]
    head = "".join(f"<th {k}>{title}</th>" for k, title, _ in columns)
    rows = "".join("<tr>" + "".join(f"<td {k}>{cells[i]}</td>" for k, _, cells in columns) + "</tr>"
                   for i in range(len(levels)))
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def _signed(size: int | None) -> str:
    return "" if size is None else ("\u2212" if size < 0 else "+") + human(abs(size))


def _form(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _about() -> str:
    notes = (
        "Each stage is the trainer's own step, compiled with everything that the stages before it set.",
        "Allocated: what the runtime takes, arguments and packed temporaries included. Peak: what is live at once.",
        "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs. HFU/MFU counts them, and what attention "
        "and loss kernels recompute in their own gradients.",
        "To host, to device: bytes that one call of the step moves over the link.",
    )
    return f"<section><h3>How to read it</h3><ul>{''.join(f'<li>{note}</li>' for note in notes)}</ul></section>"
