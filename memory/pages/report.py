"""A report as one HTML file that opens offline: timeline, treemap, buffers, ledger, findings.

Tables that do not move are written here, everything that reacts is drawn by the script from `memory.pages.report_data`.
Whatever comes from a report is escaped: the names of buffers are other people's text.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bytescope.memory.pages.communication import communication, table, transfers
from bytescope.memory.pages.frame import fill
from bytescope.memory.pages.report_data import page_data
from bytescope.memory.records import METHODS, ROWS, Report
from bytescope.memory.text.report import beyond, roofline
from bytescope.memory.units import human

VERDICTS = {
    "fits": ("✓", "fits"),
    "tight": ("▲", "tight: over 95 % of the limit"),
    "exceeds": ("✕", "exceeds the limit"),
    "unknown": ("?", "no limit known"),
}

# How many names a bar list shows before it folds the rest into one line.
MAX_BARS = 30


def render(report: Report) -> str:
    """The page of a report, as text. It holds plotly.js (about 5 MB) and asks the network for nothing.

    Raises ReportError never: a report with empty lists gives a page with empty sections.
    """
    parts = {
        "HEADER": _header(report),
        "COMPOSITION": _composition(report),
        "FINDINGS": _findings(report),
        "LEDGER": _ledger(report) + _zero(report),
        "COMMUNICATION": communication(report),
        "TRANSFERS": transfers(report),
        "RESIDUALS": _bars(report.residuals_by_name, "residuals", "no residuals at the peak", "(no name)"),
        "WORKSPACE": _bars(report.workspace_by_scope, "workspace", "no workspace at the peak", "(no scope)"),
        "ABOUT": _about(report),
    }
    return fill("report", f"{report.program or 'program'} · memory", page_data(report), parts)


def _bytes(count: int | None) -> str:
    """A size with the exact count one hover away."""
    exact = "" if count is None else f' title="{count:,} bytes"'
    return f"<span{exact}>{human(count)}</span>"


def _header(report: Report) -> str:
    mark, words = VERDICTS.get(report.verdict, VERDICTS["unknown"])
    target = report.target.get("name", "no target")
    kind = str(report.target.get("kind", ""))
    where = f"{target} · {kind}" if kind and kind != target else str(target)
    versions = " · ".join(f"{name} {version}" for name, version in report.versions.items())
    free = "" if report.limit_bytes is None else (
        f"<small>{human(abs(report.limit_bytes - report.allocated_bytes))} "
        f"{'free' if report.limit_bytes >= report.allocated_bytes else 'too much'}</small>")
    figures = (
        ("peak live", report.peak_bytes, "<small>most alive at once</small>"),
        ("allocated", report.allocated_bytes, "<small>what the runtime takes</small>"),
        ("limit", report.limit_bytes, free),
    )
    cells = "".join(f'<div class="figure"><dt>{name}</dt><dd>{_bytes(value)}{note}</dd></div>'
                    for name, value, note in figures)
    apart = [f"{human(value)} {name}" for name, value in
             (("on the host", report.host_bytes), ("on chip", report.on_chip_bytes)) if value]
    aside = f'<p class="apart">Apart from these: {" · ".join(apart)}</p>' if apart else ""
    aside += "".join(f'<p class="apart">{escape(line)}</p>' for line in (beyond(report), roofline(report)) if line)
    return (f'<div class="title"><p class="eyebrow">{escape(where)} · per device</p>'
            f"<h1>{escape(report.program or 'program')}</h1>"
            f'<p class="versions">{escape(versions)}</p></div>'
            f'<div class="verdict {escape(report.verdict)}"><b aria-hidden="true">{mark}</b> {words}</div>'
            f'<dl class="figures">{cells}</dl>{aside}')


def _composition(report: Report) -> str:
    """The allocated bytes as one bar, below it their share of the limit, and a legend of every row in use."""
    total = max(report.allocated_bytes, 1)
    rows = [(row, report.breakdown.get(row, 0)) for row in ROWS]
    bar = "".join(f'<i class="c-{row}" style="width:{100 * size / total:.4f}%" '
                  f'title="{label(row)}: {human(size)}"></i>' for row, size in rows if size > 0)
    legend = "".join(
        f'<li><i class="c-{row}"></i><span>{label(row)}</span><b>{_bytes(size)}</b>'
        f"<small>{100 * size / total:.1f} %</small></li>" for row, size in rows if size > 0)
    gauge = ""
    if report.limit_bytes:
        share = 100 * report.allocated_bytes / report.limit_bytes
        fill = f'<i><i style="width:{min(share, 100):.3f}%"></i></i>'
        gauge = (f'<div class="gauge {escape(report.verdict)}">{fill}'
                 f"<span>{share:.1f} % of the limit</span></div>")
    return f'<div class="bar">{bar}</div>{gauge}<ul class="legend">{legend}</ul>'


def label(row: str) -> str:
    """A row's name for people."""
    return {"logits_loss": "logits and loss"}.get(row, row)


def _findings(report: Report) -> str:
    if not report.findings:
        return '<p class="empty">Nothing an expert would point at.</p>'
    items = "".join(
        f"<li><header><b>{escape(f.kind.replace('_', ' '))}</b><span>{_bytes(f.bytes)}</span></header>"
        f"<p>{escape(f.message)}</p><p class=\"remedy\">{escape(f.remedy)}</p></li>"
        for f in sorted(report.findings, key=lambda f: -f.bytes))
    return f'<ul class="findings">{items}</ul>'


def _ledger(report: Report) -> str:
    if not report.ledger:
        return '<p class="empty">No state was recognised in the arguments.</p>'
    rows = [(row.role, row.dtype, f"{row.elements:,}", _bytes(row.bytes), f"{row.bytes_per_param:.3g}")
            for row in report.ledger]
    body = "".join(
        f'<tr class="{"total" if role == "total" else ""}"><th scope="row">{escape(role)}</th>'
        f"<td>{escape(dtype)}</td><td>{count}</td><td>{size}</td><td>{each}</td></tr>"
        for role, dtype, count, size, each in rows)
    head = "".join(f'<th scope="col">{name}</th>'
                   for name in ("state", "dtype", "values", "bytes", "bytes / parameter"))
    return f'<table class="ledger"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _zero(report: Report) -> str:
    """ZeRO's bytes per parameter beside what is held, with the reasons."""
    if not report.zero:
        return ""
    rows = [((escape(row.role), f"{row.classic:.3g}", f"{row.held:.3g}", escape(row.reason)), row.role == "total")
            for row in report.zero]
    return "<h3>Beside ZeRO, bytes per parameter</h3>" + table(("state", "ZeRO", "held", "why"), rows, "zero")


def _bars(sizes: Mapping[str, int], row: str, empty: str, unnamed: str) -> str:
    """Name, bar and size of each entry, largest first."""
    entries = sorted(((name, size) for name, size in sizes.items() if size), key=lambda e: -e[1])
    if not entries:
        return f'<p class="empty">{empty}</p>'
    folded = entries[MAX_BARS:]
    if folded:
        entries = [*entries[:MAX_BARS], (f"{len(folded)} more", sum(size for _, size in folded))]
    top = max(size for _, size in entries)
    lines = "".join(
        f'<li><span title="{escape(name)}">{escape(name.rstrip("/") or unnamed)}</span>'
        f'<i><i class="c-{row}" style="width:{100 * size / top:.2f}%"></i></i><b>{_bytes(size)}</b></li>'
        for name, size in entries)
    return f'<ul class="bars">{lines}</ul>'


def _about(report: Report) -> str:
    xla = {name.removesuffix("_bytes").replace("_", " "): human(value)
           for name, value in vars(report.xla).items()}
    target = {name: _figure(name, value) for name, value in flatten(report.target)
              if not name.startswith("sources.")}
    sections = (
        ("XLA's own statistics", xla.items()),
        ("Target", target.items()),
        ("Versions", report.versions.items()),
        ("Configuration", flatten(report.config)),
    )
    notes = [METHODS.get(report.method, report.method), *report.notes]
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    measured = f"<section><h3>How it was measured</h3><ul>{lines}</ul></section>"
    return "".join(map(_definitions, sections)) + measured


def _definitions(section: tuple[str, Iterable[tuple[str, Any]]]) -> str:
    title, entries = section
    lines = "".join(f"<div><dt>{escape(str(name))}</dt><dd>{escape(_value(value))}</dd></div>"
                    for name, value in entries)
    return f"<section><h3>{title}</h3><dl>{lines or '<p class=empty>nothing recorded</p>'}</dl></section>"


def _figure(name: str, value: Any) -> Any:
    """A target's figure with its unit, which its name tells."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if "_bytes_per_s" in name:
        return f"{value / 1e9:,.4g} GB/s"
    if name.startswith("peak_flops."):
        return f"{value / 1e12:,.4g} TFLOP/s"
    return human(value) if name.endswith("_bytes") else value


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as dotted names: {"a": {"b": 1}} -> [("a.b", 1)]; lists as one line of text."""
    if isinstance(value, Mapping):
        return [entry for key, inner in value.items()
                for entry in flatten(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [(prefix, ", ".join(map(str, value)))]
    return [(prefix, value)]
