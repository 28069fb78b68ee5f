"""Readers against hand-made, damaged and random bytes: a record or a one-line error, nothing else."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytescope import memory
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo import wire
from bytescope.memory.records.report_record import (
    Buffer,
    Collective,
    Communication,
    Finding,
    LedgerRow,
    ReportRecord,
    TimelinePoint,
    XlaStats,
    ZeroRow,
    load,
)
from support import programs
from support.formats import field

pytestmark = pytest.mark.quick

FUZZ = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def proto():
    """The HloProto of a small scan."""
    return compile_lowered(programs.scan()).proto


def test_wire_reads_every_kind_of_field():
    data = field(1, 300) + field(2, b"abc") + b"\x1d\x01\x00\x00\x00" + b"\x21" + b"\x02" + b"\x00" * 7
    assert list(wire.fields(data, (0, len(data)))) == [(1, 300), (2, (5, 8)), (3, 1), (4, 2)]
    assert wire.text(data, (5, 8)) == "abc"
    assert wire.numbers(b"\x01\xac\x02", (0, 3)) == [1, 300]
    assert wire.signed(2**64 - 1) == -1


def test_buffers_and_trace_by_hand():
    instruction = field(1, "add.1") + field(2, "add") + field(35, 7)
    module = field(1, "m") + field(6, 1) + field(3, field(1, "main") + field(2, instruction) + field(5, 1))
    buffer = field(1, 3) + field(2, 64) + field(3, field(4, 7) + field(3, b"\x01")) + field(4, 5)
    allocation = field(1, 9) + field(2, 128) + field(5, 1) + field(9, field(1, 3) + field(2, 8) + field(3, 64))
    trace = field(3, 9) + field(1, field(2, 3) + field(3, "main") + field(4, "add.1"))
    program = hlo_buffers.read(field(1, module) + field(3, field(1, buffer) + field(3, allocation) + field(4, trace)))
    assert program.module.instructions[7].name == "add.1"
    found = program.buffers[3]
    assert (found.size, found.instruction, found.index, found.color) == (64, 7, (1,), 5)
    assert program.allocations[0].indefinite and program.allocations[0].assigned == [(3, 8, 64)]
    assert program.traces[0].events == [(hlo_buffers.ALLOC, 3, ("main", "add.1"), 0)]


def test_a_negative_size_is_refused():
    module = field(3, field(2, field(35, 1)))
    with pytest.raises(ReportError, match="-1 bytes"):
        hlo_buffers.read(field(1, module) + field(3, field(1, field(2, 2**64 - 1))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"not a proto at all",
        b"{}",
        b"\x7fELF\x02\x01\x01",
        b"PK\x03\x04",
        b"\x0a\x00",
        b"\x1f\x8b\x08",
        json.dumps({"hlo_module": {}}).encode(),
    ],
)
def test_foreign_bytes_are_one_line(data):
    with pytest.raises(ReportError) as caught:
        memory.analyze(data)
    assert "\n" not in str(caught.value) and "after_optimizations.hlo.pb" in str(caught.value)


def cut(proto, draw):
    return proto[: draw(st.integers(0, len(proto)))]


def damaged(proto, draw):
    out = bytearray(proto)
    for _ in range(draw(st.integers(1, 12))):
        out[draw(st.integers(0, len(out) - 1))] = draw(st.integers(0, 255))
    return bytes(out)


def damaged_module(proto, draw):
    """The module of a proto without its buffers, damaged."""
    start, end = next(value for number, value in wire.fields(proto, (0, len(proto))) if number == 1)
    return field(1, damaged(proto[start:end], draw))


@pytest.mark.parametrize("damage", [cut, damaged, damaged_module, lambda proto, draw: draw(st.binary(max_size=300))])
@FUZZ
@given(data=st.data())
def test_damaged_bytes_are_a_report_or_one_line(proto, damage, data):
    try:
        report = memory.analyze(damage(proto, data.draw))
    except ReportError as error:
        assert "\n" not in str(error)
        return
    assert sum(report.breakdown.values()) == report.allocated_bytes
    json.dumps(report.to_json())


def sample():
    return ReportRecord(
        peak_bytes=10,
        allocated_bytes=12,
        breakdown={"params": 10, "fragmentation": 2},
        timeline=(TimelinePoint(0, 10, "forward", "add"),),
        ledger=(LedgerRow("params", "float32", 2, 8, 4.0),),
        buffers=(Buffer("add", 10, shape=(2, 5), dtype="int8", category="params", at_peak=True),),
        findings=(Finding("full_logits", 1, "message", "remedy"),),
        collectives=(Collective("all-gather", "all-gather", ("fsdp", "data"), 8, "int8", 3, 16, 14),),
        communication=(Communication("all-gather", ("fsdp",), 8, 3, 48, 42, 0, 40, "parameters"),),
        zero=(ZeroRow("params", 2.0, 4.0, "float32"),),
        xla=XlaStats(temp_bytes=3),
        notes=("note",),
        target={"name": "h200"},
        versions={"jax": "1"},
        config={"model": {"d": 1}},
    )


def test_json_goes_there_and_back(tmp_path):
    report = sample()
    report.save(tmp_path / "report.json")
    read = load(tmp_path / "report.json")
    assert read.to_json() == report.to_json()
    assert read.buffers == report.buffers and read.xla == report.xla
    assert set(read.to_json()) >= {
        "schema",
        "versions",
        "target",
        "config",
        "xla",
        "peak_bytes",
        "allocated_bytes",
        "limit_bytes",
        "fits",
        "verdict",
        "host_bytes",
        "breakdown",
        "residuals_by_name",
        "ledger",
        "timeline",
        "buffers",
        "findings",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        "{",
        "{}",
        '{"schema": 1}',
        '{"peak_bytes": 1}',
        '{"schema": 99, "peak_bytes": 1}',
        '{"schema": 1, "peak_bytes": "x", "allocated_bytes": 1, "breakdown": {}}',
        '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": []}',
        '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": {"rngg": 1}}',
        '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": {}, "buffers": [1]}',
        '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": {}, "buffers": [{"name": 1}]}',
        '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": {}, "timeline": 5}',
        "[" * 100_000,
    ],
)
def test_foreign_json_is_one_line(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError) as caught:
        load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_json_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "binary.json"):
        with pytest.raises(ReportError):
            load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(key=st.sampled_from(sorted(sample().to_json())), value=JSON)
def test_reports_with_a_wrong_value(key, value):
    damaged = {**sample().to_json(), key: value}
    try:
        report = ReportRecord.from_json(damaged)
    except ReportError as error:
        assert "\n" not in str(error)
    else:
        json.dumps(report.to_json())
