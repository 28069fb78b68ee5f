"""A fit as one HTML file that opens offline: what to run, a picture of the walk, and a table of all that was tried.

The page is `page.fit.html` with the styles of the comparison's page. Whatever comes from a fit is escaped here, and
reaches the page as text there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bytescope.memory.pages.frame import fill
from bytescope.memory.pages.report import label as row_name
from bytescope.memory.records import ROWS
from bytescope.memory.text.fit import STAGES
from bytescope.memory.text.fit import seconds as duration
from bytescope.memory.units import human


def render(out: Mapping[str, Any], config: str) -> str:
    """The page of a fit's JSON (`memory.plan.fit`), as text; `config` is the file it is about."""
    parts = {
        "HEADER": _header(out, config),
        "ANSWER": _answer(out, config),
        "WALK": _walk(out),
        "ABOUT": _about(out),
    }
    return fill("fit", f"{config} · fit", page_data(out), parts, styles=("compare",))


def page_data(out: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values: a point for each variant that could be compiled.

    `number`: its row in the table, from 1; `chosen`: whether it is the choice, or the tightest where nothing fits.
    """
    points = [{"number": number, "stage": step["stage"], "what": step["what"], "bytes": step["allocated_bytes"],
               "host": step["host_bytes"] or 0, "seconds": step["predicted_step_seconds"],
               "recomputed": step["recompute_flops_fraction"], "fits": step["fits"], "verdict": step["verdict"],
               "chosen": _is_chosen(out, step)}
              for number, step in enumerate(out["walk"], 1)
              if step["allocated_bytes"] is not None and step["predicted_step_seconds"] is not None]
    used = [point["stage"] for point in points]
    return {"points": points, "budget": out["budget_bytes"], "choice": "choice" if out["best"] else "tightest",
            "stages": [(stage, why) for stage, why in STAGES.items() if stage in used]}


def _is_chosen(out: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    keys = out["best"]["overrides"] if out["best"] else (out["certificate"] or {}).get("keys")
    return step["keys"] == keys


# ---- the answer -----------------------------------------------------------------------------------------------

def _header(out: Mapping[str, Any], config: str) -> str:
    target, best = out["target"], out["best"]
    where = " · ".join(filter(None, [str(target.get("name", "")), str(target.get("kind", "")), "per device"]))
    versions = " · ".join(f"{name} {version}" for name, version in out["versions"].items())
    kind, words = ("fits", "✓ fits") if best else ("exceeds", "✕ does not fit") if out["certificate"] else (
        "unknown", "? nothing was found")
    cells = "".join(f'<div class="figure"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>'
                    for name, value, note in _figures(out) if value)
    stopped = (f'<p class="best tight">Stopped early: {escape(out["stopped"])}. '
               f"{'This is the best so far.' if best else 'Something may fit yet.'}</p>" if out["stopped"] else "")
    return (f'<div class="title"><p class="eyebrow">{escape(where)}</p><h1>{escape(config or "A config")} within '
            f'{human(out["budget_bytes"])}</h1><p class="versions">{escape(versions)}</p></div>'
            f'<div class="verdict {kind}">{words}</div><dl class="figures">{cells}</dl>{stopped}')


def _figures(out: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, figure, note) of what stands on top; those without a figure are left out."""
    spent = ("spent", f"{out['seconds']:,.0f} s", f"{out['programs']} programs compiled, {len(out['walk'])} tried")
    if certificate := out["certificate"]:
        return [("missing", human(certificate[key]) if certificate[key] else "", where)
                for key, where in (("missing_bytes", "on the device"), ("host_missing_bytes", "on the host"))] + [spent]
    if not out["best"]:
        return [spent]
    best, tokens = out["best"], out["batch_tokens"]
    predicted, measured, share = (best["predicted_step_seconds"], best["measured"] or {},
                                  best["recompute_flops_fraction"])
    return [
        ("allocated", human(best["allocated_bytes"]), f"of {human(out['budget_bytes'])}"),
        ("on the host", human(best["host_bytes"]) if best["host_bytes"] else "", "of one device"),
        ("predicted", duration(predicted), f"an update of {tokens:,} tokens"),
        ("tokens/s", f"{tokens / predicted:,.0f}" if predicted else "", "predicted, over all devices"),
        ("measured", duration(measured.get("step_seconds")),
         f"{measured.get('tokens_per_s', 0):,.0f} tokens/s on this machine"),
        ("recomputed", "" if share is None else f"{share:.1%}", "of the model's FLOPs"),
        spent,
    ]


def _answer(out: Mapping[str, Any], config: str) -> str:
    """The command to run and what its bytes are; where nothing fits, what tells more of the tightest variant."""
    found = out["best"] or out["certificate"]
    if not found:
        return ('<section class="card"><div class="head"><h2>Nothing was found</h2></div>'
                '<p class="empty">No variant was compiled: the walk says why.</p></section>')
    title, command = ("Run it", "train") if out["best"] else ("Does not fit: the tightest variant", "report")
    target = "" if out["best"] else f"--target={out['target'].get('name', '')}"
    words = " ".join(filter(None, (f"bytescope {command} --config={config}", target, found["flags"])))
    box = f'<pre id="run">{escape(words)}</pre><button id="copy" type="button">copy</button>'
    return (f'<section class="card"><div class="head"><h2>{title}</h2><p>{escape(found["what"])}</p></div>'
            f'<div class="run">{box}</div>{_bytes(out, found)}</section>')


def _bytes(out: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The bytes against the budget as one bar, below it every row of them."""
    rows = [(row, found["breakdown"].get(row, 0)) for row in ROWS]
    budget, total = out["budget_bytes"], max(found["allocated_bytes"], 1)
    scale = max(budget, total)
    bar = "".join(f'<i class="c-{row}" style="width:{100 * size / scale:.4f}%" title="{row_name(row)}: '
                  f'{human(size)}"></i>' for row, size in rows if size > 0)
    legend = "".join(f'<li><i class="c-{row}"></i><span>{row_name(row)}</span><b>{human(size)}</b>'
                     f"<small>{100 * size / total:.1f} %</small></li>" for row, size in rows if size > 0)
    over = total - budget
    room = f"{human(over)} too much" if over > 0 else f"{human(-over)} left"
    line = (f'<i class="limit" style="left:{100 * budget / scale:.3f}%"></i>' if over > 0 else "")
    return (f'<div class="against"><div class="bar">{bar}</div>{line}</div>'
            f'<p class="room {"exceeds" if over > 0 else "fits"}">{human(total)} of {human(budget)}, {room}'
            f'{_host(out, found)}</p><ul class="legend">{legend}</ul>')


def _host(out: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if not found["host_bytes"]:
        return ""
    most = f" of {human(out['host_budget_bytes'])}" if out["host_budget_bytes"] else ""
    return f"; {human(found['host_bytes'])}{most} on the host"


# ---- the walk -------------------------------------------------------------------------------------------------

# Title, how a step's cell is written.
_COLUMNS = (
    ("stage", lambda step: escape(step["stage"])),
    ("what", lambda step: escape(step["what"])),
    ("allocated", lambda step: _known(step["allocated_bytes"])),
    ("host", lambda step: _known(step["host_bytes"] or None)),
    ("predicted", lambda step: duration(step["predicted_step_seconds"])),
    ("recomputed", lambda step: "" if step["recompute_flops_fraction"] is None
     else f"{step['recompute_flops_fraction']:.1%}"),
    ("verdict", lambda step: f'<span class="{_kind(step)}">{escape(step["verdict"])}</span>'),
)
_WORDS = ("stage", "what", "verdict")


def _known(size: int | None) -> str:
    return "" if size is None else human(size)


def _kind(step: Mapping[str, Any]) -> str:
    return "fits" if step["fits"] else "tight" if step["allocated_bytes"] is None else "exceeds"


def _walk(out: Mapping[str, Any]) -> str:
    """The table's head and rows; a row has its keys one hover away."""
    walk = out["walk"]
    kinds = ['class="text"' if title in _WORDS else 'class="num"' for title, _ in _COLUMNS]
    columns = [(kind, title, [write(step) for step in walk]) for kind, (title, write) in zip(kinds, _COLUMNS)]
    columns = [column for column in columns if any(column[2])]
    head = '<th class="num">#</th>' + "".join(f"<th {kind}>{title}</th>" for kind, title, _ in columns)
    rows = "".join(_row(out, step, [f"<td {kind}>{cells[i]}</td>" for kind, _, cells in columns], i + 1)
                   for i, step in enumerate(walk))
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def _row(out: Mapping[str, Any], step: Mapping[str, Any], cells: Sequence[str], number: int) -> str:
    keys = " ".join(f"{key}={text}" for key, text in step["keys"].items())
    chosen = ' class="winner"' if out["best"] and _is_chosen(out, step) else ""
    return f'<tr{chosen} title="{escape(keys)}"><td class="num">{number}</td>{"".join(cells)}</tr>'


def _about(out: Mapping[str, Any]) -> str:
    notes = (
        "Every variant is the trainer's own step, compiled for the target.",
        "Allocated: what the runtime takes on one device, arguments and packed temporaries included.",
        "Predicted: seconds of one update by a roofline of the target. They order variants, they promise no time.",
        "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
        "Meshes are judged with everything recomputed: a mesh is gone on with if nothing recomputed could be faster.",
    )
    used = {step["stage"] for step in out["walk"]}
    stages = "".join(f"<div><dt>{stage}</dt><dd>{why}</dd></div>" for stage, why in STAGES.items() if stage in used)
    lines = "".join(f"<li>{note}</li>" for note in notes)
    return (f"<section><h3>How to read it</h3><ul>{lines}</ul></section>"
            f"<section><h3>Stages of the walk</h3><dl>{stages}</dl></section>")
