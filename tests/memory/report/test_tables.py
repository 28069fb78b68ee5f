"""Tables that users hold: the largest buffers, targets, live memory, differences."""

import dataclasses
import json
import re

import jax
import pytest

from bytescope import memory
from bytescope.memory.devices import live as live_memory
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.records.report_record import Buffer, Finding, XlaBudget
from bytescope.memory.report import buffer_tables
from bytescope.memory.watching import device_tables
from support.browser import Page
from support.rows import MIB, make_report

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def report():
    return memory.Report.of(make_report())


# ---- the largest buffers ---------------------------------------------------------------------------------


def test_the_ten_largest_are_plain_data(report):
    table, alive = report.table(), report.alive_at(report.peak_index)
    assert isinstance(table, memory.Table) and len(table) == 10 and len(report.table(3)) == 3
    assert json.loads(json.dumps(table.rows))[0]["shape"] == [64, 4096]
    arguments, made = table[:2]
    assert arguments["what"] == "params['w*']" and arguments["times"] == 4 and arguments["row"] == "params"
    assert arguments["bytes"] == 64 * MIB and arguments["dtype"] == "bf16"
    assert made["what"] == "blocks/attention · softmax" and re.fullmatch(r"model/block.py:\d+", made["line"])
    every = report.table(10**6)
    assert sum(row["times"] for row in every) == len(alive)
    assert [row["bytes"] for row in every] == sorted((row["bytes"] for row in every), reverse=True)
    assert sum(row["times"] * row["bytes"] for row in every) == report.peak_bytes


def test_layers_that_differ_in_their_number_alone_are_one_row():
    def layer(number, name, **more):
        where = {"module": f"layers_{number}/mlp", "op_name": "jit(f)/tanh", "source": "f.py:3", **more}
        return Buffer(f"{name}.{number}", 8, (2,), "float32", "residuals", "forward", at_peak=True, **where)

    found = [
        *(layer(number, "fusion") for number in range(6)),
        layer(7, "fusion", source="f.py:4"),
        *(Buffer(f"p['b_2']['layers_{at}']", 4, category="params", phase="argument") for at in range(3)),
    ]
    rows = memory.Report(70, 70, {"residuals": 58, "params": 12}, buffers=tuple(found)).table().rows
    assert [(row["what"], row["times"]) for row in rows] == [
        ("layers_*/mlp · tanh", 6),
        ("layers_7/mlp · tanh", 1),
        ("p['b_2']['layers_*']", 3),
    ]


def test_the_table_prints_within_80_columns_and_shows_itself(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = report.table()
    lines = repr(table).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].split() == ["largest", "at", "the", "peak", "bytes", "type", "row"]
    for row in table:
        assert row["type"] in repr(table)  # a shape is never cut
    words = " ".join(Page(table._repr_html_()).words)
    for row in table:
        assert row["what"] in words and row["line"] in words
    assert "13 of " in words and "4 x" in words


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "ten"])
def test_a_wrong_number_of_rows(report, n):
    with pytest.raises(memory.ReportError, match=f"n={re.escape(repr(n))}"):
        report.table(n)


def test_a_table_without_rows():
    table = memory.Report(0, 0, {}).table()
    assert len(table) == 0 and "no rows" in repr(table) and "no rows" in table._repr_html_()


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("bfloat16", "bf16[2,3]"),
        ("float32", "f32[2,3]"),
        ("int8", "i8[2,3]"),
        ("uint8", "u8[2,3]"),
        ("bool", "bool[2,3]"),
        ("float8_e4m3fn", "f8_e4m3fn[2,3]"),
        ("complex64", "c64[2,3]"),
        ("bf16", "bf16[2,3]"),
        ("", ""),
    ],
)
def test_types_are_short(dtype, said):
    assert buffer_tables.array_type(Buffer("b", 1, (2, 3), dtype)) == said


def test_lines_can_be_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert buffer_tables.line(f"{tmp_path}/model/block.py:7") == "model/block.py:7"
    assert buffer_tables.line("/far/away/package/block.py:7") == "package/block.py:7"
    assert buffer_tables.line("block.py:7") == "block.py:7" and buffer_tables.line("") == ""
    assert buffer_tables.line("/tmp/ipykernel_12/3456.py:7") == "cell:7"


# ---- devices ---------------------------------------------------------------------------------------------


def test_targets_are_a_table_and_the_command_prints_the_same():
    table = memory.targets()
    rows = {row["target"]: row for row in table}
    assert set(rows) == {"local", "cpu:8", *CHIPS}
    assert rows["h200"]["device_memory_bytes"] == CHIPS["h200"].device_memory_bytes
    assert rows["h100"]["bf16_flops"] == 989.4e12 and rows["t4"]["bf16_flops"] is None
    assert "no bf16 units" in rows["t4"]["note"] and "139.8" in repr(table) and "no bf16" in table._repr_html_()
    table = device_tables.targets()
    headings, cells = [column.title for column in table.columns], table.cells()
    assert headings == ["target", "device", "GiB", "TB/s", "bf16 TFLOP/s", "note"]
    assert ["h200", "NVIDIA H200", "139.8", "4.80", "989", ""] in cells


def test_a_target_has_a_mesh(devices):
    target = memory.target("cpu:8")
    mesh = target.mesh(data=2, model=4)
    assert isinstance(target, memory.Target) and dict(mesh.shape) == {"data": 2, "model": 4}
    assert list(mesh.devices.flat) == devices
    with pytest.raises(memory.ReportError, match="3 devices does not fit cpu:8"):
        target.mesh(data=3)
    with pytest.raises(memory.ReportError, match="did you mean h200"):
        memory.target("h2000")
    with pytest.raises(memory.ReportError, match="target 8 is not a name"):
        memory.target(8)


def test_live_memory_of_the_simulated_devices_is_one_row(devices):
    table = memory.live()
    (row,) = table
    assert row["device"] == "cpu, 8 simulated" and row["in_use_bytes"] > 50 * MIB and row["sharing"] == 8
    assert "cpu, 8 simulated" in repr(table) and len(repr(table)) < 500
    assert "largest free block" not in table._repr_html_()  # nobody tells it


def test_live_memory_of_cards_is_a_row_each(monkeypatch):
    cards = [
        live_memory.LiveMemory("NVIDIA H200", "allocator", 1, at * MIB, 9 * MIB, 99 * MIB, fragmentation=0.25)
        for at in range(2)
    ]
    samples = iter((*cards, None))
    monkeypatch.setattr(live_memory, "sample", lambda device: next(samples))
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:3])
    table = memory.live()
    assert [row["device"] for row in table] == ["0 NVIDIA H200", "1 NVIDIA H200"] and not table.note
    assert table[1]["in_use_bytes"] == MIB and "25.0%" in repr(table)


# ---- differences -----------------------------------------------------------------------------------------


def test_a_difference_of_reports_and_of_files(report, tmp_path):
    other = memory.Report.of(make_report(seed=1))
    report.save(tmp_path / "a.json")
    for found in (
        report.diff(other),
        memory.diff(report, other),
        memory.diff(tmp_path / "a.json", other),
        memory.diff(str(tmp_path / "a.json"), dataclasses.replace(other)),
    ):
        assert isinstance(found, memory.Difference) and found.changes == memory.diff(report, other).changes
    first = found.rows[0]
    assert first["name"] == "peak_bytes" and first["growth"] == other.peak_bytes - report.peak_bytes
    assert found.grew_above(1e9) == () and not report.diff(report).rows[0]["growth"]
    with pytest.raises(memory.ReportError, match="a dict is not a report"):
        memory.diff({}, report)
    with pytest.raises(memory.ReportError, match="cannot read"):
        report.diff(tmp_path / "b.json")


def test_a_difference_prints_and_shows_itself(report, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    found = report.diff(make_report(seed=1))
    text = repr(found)
    assert len(text) < 3000 and max(map(len, text.splitlines())) <= 80 and "total peak_bytes" in text
    words = " ".join(Page(found._repr_html_()).words)
    assert "buffers that changed most" in words and "allocated" in words
    found.show()
    assert len(capsys.readouterr().out) > len(text)  # all that the command prints


def test_programs_on_both_sides_of_xlas_limit_are_hard_to_compare(report):
    """XLA's own recomputation in one of them only is part of their difference."""
    finding = Finding("xla_remat", 1, "XLA's rematerialization pass recomputes 9 values", "", "")
    beyond = dataclasses.replace(report, findings=(*report.findings, finding))
    (warning,) = report.diff(beyond).warnings
    assert "in the second program only" in warning and "warning: XLA's remat" in repr(report.diff(beyond))
    (warning,) = beyond.diff(report).warnings
    assert "in the first program only" in warning
    assert not beyond.diff(beyond).warnings
    above, below = (
        dataclasses.replace(report, xla_budget=XlaBudget(margin_bytes=margin, need_bytes=9)) for margin in (-1, 1)
    )
    (warning,) = below.diff(above).warnings
    assert "Only the second program is above XLA's memory limit" in warning
    assert not above.diff(above).warnings and not below.diff(below).warnings


def test_a_growth_from_next_to_nothing_is_no_long_number():
    before, after = (memory.Report(size, size, {"outputs": size}) for size in (16, 2**40))
    assert ">999" in repr(before.diff(after)) and "&gt;999" in before.diff(after)._repr_html_()
