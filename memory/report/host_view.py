"""Shows the host memory of a program: one line, and a table by phase for the terminal and for pages."""

from __future__ import annotations

import dataclasses

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.host_record import HOST_PHASES, HostMemory
from bytescope.memory.units import human
from bytescope.memory.view.document import Card, Rows
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import Prose

VERDICT_STYLE = {"fits": "", "tight": "yellow", "exceeds": "bold red", "unknown": ""}
# Terms of a phase below this share of the phase are summed up in the terminal's table.
_SMALL = 0.05


@dataclasses.dataclass(frozen=True)
class HostRow:
    """A row of a table of host memory by phase.

    Fields:
        phase: the phase, a key of `HOST_PHASES`.
        predicted, measured: bytes of host memory of one process in the phase; None if unknown.
        holds: text with the largest predicted parts (terms) of the phase, such as "XLA's compiler 120.0 MiB".
    """

    phase: str
    predicted: int | None
    measured: int | None
    holds: str


def phase_rows(host: HostMemory) -> list[HostRow]:
    """Returns one row per phase: predicted and measured bytes of one process, and the largest predicted parts (terms)
    of the phase."""
    return [
        HostRow(phase, host.predicted(phase), host.measured.get(phase), _holds(host, phase)) for phase in host.phases()
    ]


def _holds(host: HostMemory, phase: str) -> str:
    terms, total = host.terms_of(phase), host.predicted(phase) or 0
    shown = [term for term in terms if term.bytes >= _SMALL * total]
    rest = total - sum(term.bytes for term in shown)
    parts = [f"{term.name} {human(term.bytes)}" for term in shown]
    return ", ".join([*parts, f"other {human(rest)}"] if rest else parts)


COLUMNS = (
    ColumnView("phase", "phase", "name", short="host memory", hover=lambda row: HOST_PHASES.get(row.phase, "")),
    ColumnView("predicted", "predicted", "bytes"),
    ColumnView("measured", "measured", "bytes"),
    ColumnView("holds", "holds", "words", css="why"),
)


def line(host: HostMemory | None) -> str:
    """Returns the predicted host memory as one line of text, such as "1.21 GiB per process (in compile); 8 processes
    need 9.68 GiB of 2.00 TiB (--host-memory)". Returns "" if no host memory is predicted."""
    if host is None or not host.terms:
        return ""
    text = f"{human(host.process_bytes)} per process (in {host.peak_phase})"
    if host.processes > 1:
        text += f"; {host.processes} processes need {human(host.predicted_node_bytes)}"
    if host.node_bytes:
        text += f" of {human(host.node_bytes)} ({host.node_source})"
    if host.verdict == "exceeds" and host.node_bytes:
        text += f", {human(host.predicted_node_bytes - host.node_bytes)} TOO MUCH"
    return text


def measured_line(host: HostMemory) -> str:
    """Returns the measured peak of a process in one line, beside the prediction for the same phase, such as "peaked at
    661.00 MiB of host memory in compile (predicted 676.00 MiB)". Returns "" if nothing was measured."""
    if not host.measured:
        return ""
    phase = max(host.measured, key=lambda name: host.measured[name])
    predicted = host.predicted(phase)
    text = f"peaked at {human(host.measured[phase])} of host memory in {phase}"
    return f"{text} (predicted {human(predicted)})" if predicted else text


def render(host: HostMemory | None, verbose: bool = True) -> RenderableType | None:
    """Returns the host memory for the terminal: one line (see `line`), and below it, if `verbose`, a table with one row
    per phase. Returns None if no phase has predicted or measured bytes, or if `verbose` is False and the verdict is
    "fits" or "unknown"."""
    rows = phase_rows(host) if host else []
    if host is None or not rows or (not verbose and host.verdict in ("fits", "unknown")):
        return None
    parts: list[RenderableType] = []
    if text := line(host):
        parts.append(Prose(f"host memory: {text}", VERDICT_STYLE[host.verdict]))
    if verbose:
        parts += [Text(), terminal_table(TableView(COLUMNS, rows))]
    return Group(*parts)


def card(host: HostMemory | None, note: str) -> Card:
    """Returns the card of a page with the table of phases, without rows if no phase has predicted or measured bytes."""
    view = TableView(COLUMNS, phase_rows(host) if host else [])
    return Card("Host memory", [Rows(view, css="traffic")], note, id="host")
