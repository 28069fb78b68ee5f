"""The tables of a trace on the page of a run add up to an update."""

from bytescope.memory.profile import trace_tables


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
    found = make_breakdown(operations=trace_tables.MAX_OPERATIONS + 7)
    data = trace_tables.page_data(found)
    assert sum(data["sums"]) + data["idle"] == data["total"] == 1.0
    assert trace_tables.where_text(found) == "mlp · updates 3-4 · mean of 2 devices"
    figures = {figure.name: (figure.value, figure.note) for figure in trace_tables.figures(found)}
    assert figures["one update"] == ("750 ms", "and 250 ms of evaluation and checkpoint")
    assert figures["device busy"][0] == "87.5 %" and figures["waiting for data"][0] == "6.2 %"
    assert figures["predicted"] == ("250 ms", "200 ms to 300 ms; measured 3 x that")
    rows = [[cell.text for cell in row.cells] for row in trace_tables.cells(found).lines]
    assert ["busy", "0.500", "0.375", "0.875", "87.5"] in rows
    operations = [[cell.text for cell in row.cells] for row in trace_tables.operations(found).lines]
    assert len(operations) == trace_tables.MAX_OPERATIONS
    assert operations[1] == ["mlp.1", "forward", "mlp", "blocks/mlp", "1", "0.125", "12.5"]


def test_a_trace_without_annotations_or_steps_has_tables():
    found = make_breakdown() | {"host": [], "steps": [], "cells": [], "instructions": [], "predicted_seconds": None}
    found |= dict.fromkeys(("total", "without_pauses", "busy", "idle"), 0.0)
    assert [figure.value for figure in trace_tables.figures(found)] == ["0 µs", "-", "-"]
    assert "the whole trace as one update" in trace_tables.where_text(found)
