"""The tables of a trace on the page of a run add up to an update."""

from bytescope.memory.profile import trace_document
from bytescope.memory.view.document import Rows
from bytescope.memory.view.draw_page import page_cards
from bytescope.memory.view.table_model import PAGE


def make_breakdown(name="mlp", host="wait_for_data", phase="forward", operations=6):
    """The JSON of a breakdown of two updates on two devices; cells and idle add up to the whole."""
    cells = [(phase, name, 0.5), ("backward", name, 0.25), ("backward", "attention", 0.125)]
    rows = [
        {
            "name": f"{name}.{n}",
            "phase": phase,
            "component": name,
            "path": f"blocks/{name}",
            "opcode": "fusion",
            "seconds": 0.25 / (n + 1),
            "count": 4 * n,
        }
        for n in range(operations)
    ]
    return {
        "program": name,
        "steps": [3, 4],
        "devices": 2,
        "calls_per_update": 1,
        "total": 1.0,
        "without_pauses": 0.75,
        "busy": 0.875,
        "idle": 0.125,
        "hidden": {"collectives": 0.5},
        "instructions": rows,
        "cells": [{"phase": phase, "component": part, "seconds": seconds} for phase, part, seconds in cells],
        "host": [{"name": host, "seconds": 0.5, "device_idle_seconds": 0.0625, "count": 2}],
        "predicted_seconds": 0.25,
        "predicted_seconds_low": 0.2,
        "predicted_seconds_high": 0.3,
    }


def test_the_tables_add_up_to_an_update():
    found = make_breakdown(operations=trace_document.LIMITS[PAGE] + 7)
    data = trace_document.page_data(found)
    assert sum(data["sums"]) + data["idle"] == data["total"] == 1.0
    assert trace_document.where_text(found) == "mlp · updates 3-4 · mean of 2 devices · s per update"
    figures = {figure.name: (figure.value, figure.note) for figure in trace_document.figures(found)}
    assert figures["one update"] == ("750 ms", "and 250 ms of evaluation and checkpoint")
    assert figures["device busy"][0] == "87.5 %" and figures["waiting for data"][0] == "6.2 %"
    assert figures["predicted"] == ("250 ms", "200 ms to 300 ms; measured 3 x that")
    cards = page_cards(trace_document.document(found).cards)
    device, host, operations = (
        [[cell.text for cell in row.cells] for row in part.table.lines]
        for card in cards
        for kind, part in card.parts
        if kind == "rows"
    )
    assert ["busy", "0.500", "0.375", "0.875", "87.5"] in device
    assert host == [["wait for data", "0.500", "50.0", "0.062", "2"]]
    assert len(operations) == trace_document.LIMITS[PAGE]
    assert operations[1] == ["mlp.1", "0.125", "12.5", "1", "forward", "mlp", "blocks/mlp"]


def test_the_terminal_sums_small_components():
    found = make_breakdown()
    cells = [*found["cells"], *({"phase": "forward", "component": f"small {n}", "seconds": 4e-4} for n in range(2))]
    page, terminal = (
        [row["component"] for row in part.view.rows]
        for part in trace_document.document(found | {"cells": cells}).cards[0].parts
        if isinstance(part, Rows)
    )
    assert page == ["mlp", "attention", "small 0", "small 1", "busy", "idle", "whole update"]
    assert terminal == ["mlp", "attention", "smaller", "busy", "idle", "whole update"]


def test_a_trace_without_annotations_or_steps_has_tables():
    found = make_breakdown() | {"host": [], "steps": [], "cells": [], "instructions": [], "predicted_seconds": None}
    found |= dict.fromkeys(("total", "without_pauses", "busy", "idle"), 0.0)
    assert [figure.value for figure in trace_document.figures(found)] == ["0 us", "-", "-"]
    assert "the whole trace as one update" in trace_document.where_text(found)
    assert len(page_cards(trace_document.document(found).cards)) == 2
