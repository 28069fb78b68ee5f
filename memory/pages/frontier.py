"""A front as one HTML file that opens offline: cost against bytes as a stepped line, and what runs each of its points.

The page is `page.front.html` with the styles of the comparison's page. Whatever comes from a front is escaped here, and
reaches the page as text there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bytescope.memory.pages.frame import fill
from bytescope.memory.plan.frontier import COSTS
from bytescope.memory.plan.rows import UNITS
from bytescope.memory.units import human


def render(found: Mapping[str, Any], config: str = "") -> str:
    """The page of a front's JSON (`memory.plan.frontier.to_json`), as text; `config` is the file it is about."""
    parts = {"HEADER": _header(found, config), "TABLE": _table(_POINTS, _once(found["points"])),
             "FIXED": _table(_FIXED, found["fixed"]), "ABOUT": _about(found)}
    return fill("frontier", f"{config or 'front'} · front", page_data(found), parts, styles=("compare",))


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `points` and `fixed` have x in bytes and y in what is least;
    `limit`: bytes of the target."""
    field, title = COSTS[found["cost"]]
    known = [point for point in (*found["points"], *found["fixed"]) if point[field] is not None]
    sizes = [point["allocated_bytes"] or 0 for point in known] or [1]
    return {
        "points": [{"x": point["allocated_bytes"], "y": point[field], "budget": point["budget_bytes"],
                    "name": point["plan"], "notes": [*_notes(point), *point["flags"].split()]}
                   for point in found["points"] if point[field] is not None],
        "fixed": [{"x": policy["allocated_bytes"], "y": policy[field], "name": policy["policy"],
                   "notes": _notes(policy)} for policy in found["fixed"] if policy[field] is not None],
        "title": title, "share": found["cost"] == "flops", "target": str(found["target"].get("name", "")),
        "limit": found["target"].get("limit_bytes"),
        "unit": next(((name, size) for name, size in UNITS if max(sizes) >= size), UNITS[-1]),
    }


def _notes(point: Mapping[str, Any]) -> list[str]:
    return [text for text in (
        f"allocated {human(point['allocated_bytes'])}",
        f"predicted step {_seconds(point)}" if _seconds(point) else "",
        f"recomputed {_share(point)} of the model's FLOPs" if _share(point) else "",
        f"in host memory {human(point['host_bytes'])}" if point["host_bytes"] else "") if text]


def _header(found: Mapping[str, Any], config: str) -> str:
    target, points = found["target"], found["points"]
    where = " · ".join(filter(None, [str(target.get("name", "")), str(target.get("kind", "")), "per device"]))
    versions = " · ".join(f"{name} {version}" for name, version in found["versions"].items())
    figures = [("points", str(len(points)), f"{found['programs']} programs compiled")]
    figures += [(name, f"{share:.1%}", "than the best fixed policy, on average")
                for name, share in (("fewer FLOPs recomputed", found["less"]["flops"]),
                                    ("less predicted time", found["less"]["seconds"])) if share is not None]
    cells = "".join(f'<div class="figure"><dt>{name}</dt><dd>{escape(value)}<small>{note}</small></dd></div>'
                    for name, value, note in figures)
    stopped = '<p class="best">Stopped early: some points are missing.</p>' if found["interrupted"] else ""
    return (f'<div class="title"><p class="eyebrow">{escape(where)}</p><h1>{escape(config or "A config")}, from '
            f'<em>full</em> to <em>none</em></h1><p class="versions">{escape(versions)}</p></div>'
            f'<dl class="figures">{cells}</dl>{stopped}')


def _seconds(point: Mapping[str, Any]) -> str:
    seconds = point["predicted_step_seconds"]
    return "" if seconds is None else f"{seconds:#.4g} s"


def _share(point: Mapping[str, Any]) -> str:
    share = point["recompute_flops_fraction"]
    return "" if share is None else f"{share:.2%}"


def _verdict(point: Mapping[str, Any]) -> str:
    return {True: '<span class="fits">fits</span>', False: '<span class="exceeds">exceeds</span>',
            None: "ok"}[point["fits"]]


def _best(point: Mapping[str, Any]) -> str:
    policy = point["fixed"]
    return escape(": ".join((policy["policy"], ", ".join(filter(None, (_seconds(policy), _share(policy)))))) if policy
                  else "")


# Title, how a point's cell is written, its class.
_POINTS = (
    ("budget", lambda point: human(point["budget_bytes"]), "num"),
    ("plan", lambda point: escape(point["plan"]).replace(", ", ",<br>"), "text"),
    ("allocated", lambda point: human(point["allocated_bytes"]), "num"),
    ("host", lambda point: human(point["host_bytes"]) if point["host_bytes"] else "", "num"),
    ("predicted step", _seconds, "num"),
    ("recomputed", _share, "num"),
    ("best fixed policy", _best, "text"),
    ("verdict", _verdict, "num"),
    ("programs", lambda point: str(point["programs"]), "num"),
    ("what runs it", lambda point: f'<code>{escape(point["flags"]) or "as above"}</code>', "text flag"),
)
_FIXED = (
    ("policy for all layers", lambda policy: escape(policy["policy"]), "text"),
    ("allocated", lambda policy: human(policy["allocated_bytes"]), "num"),
    ("host", lambda policy: human(policy["host_bytes"]) if policy["host_bytes"] else "", "num"),
    ("predicted step", _seconds, "num"),
    ("recomputed", _share, "num"),
)


def _table(columns: Sequence[tuple[str, Any, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [(title, [write(row) for row in rows], kind) for title, write, kind in columns]
    shown = [(title, cells, kind) for title, cells, kind in shown if any(cells)]
    head = "".join(f'<th class="{kind}">{title}</th>' for title, _, kind in shown)
    body = "".join("<tr>" + "".join(f'<td class="{kind}">{cells[i]}</td>' for _, cells, kind in shown) + "</tr>"
                   for i in range(len(rows)))
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _once(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points, the flags of a plan at the first of its budgets alone."""
    before = [None, *(point["plan"] for point in points)]
    return [{**point, "flags": "" if point["plan"] == last else point["flags"]} for point, last in zip(points, before)]


def _about(found: Mapping[str, Any]) -> str:
    notes = (
        "Each point is the plan of least cost that fits its budget: which blocks keep which named tensors, solved "
        "exactly over the block's graph and settled by the compiler. Every figure is of a compiled program.",
        "Allocated: what the runtime takes, arguments and packed temporaries included.",
        "Predicted step: seconds of an update by the roofline of the target's data sheet. It ranks plans of one target "
        "and promises no time.",
        "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
        "Policies for all layers are candidates too: no point costs more than the best of them that fits its budget.",
    )
    return f"<section><h3>How to read it</h3><ul>{''.join(f'<li>{note}</li>' for note in notes)}</ul></section>"
