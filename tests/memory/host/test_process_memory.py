"""The phases of this process, the record of host memory, and its views."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from bytescope.memory.host import host_ledger, process_memory
from bytescope.memory.host.process_memory import host_phase, phase_peaks
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.result import plain, read
from bytescope.memory.report import host_view, report_page, report_text

pytestmark = pytest.mark.quick

MIB, GIB = 2**20, 2**30
HOST = HostMemory(
    (
        HostTerm("compile", "Python, jax and libraries", 300 * MIB, "measured"),
        HostTerm("compile", "XLA's compiler", 900 * MIB, "per equation"),
        HostTerm("train", "Python, jax and libraries", 300 * MIB, "measured"),
        HostTerm("train", "a batch", 1 * MIB, "2 x its bytes"),
    ),
    8,
    16 * GIB,
    "--host-memory",
    {"compile": 1100 * MIB},
)


@pytest.fixture
def recorder(monkeypatch):
    process_memory._reset()  # the maximum of earlier tests
    monkeypatch.setattr(process_memory, "_RECORDER", process_memory._Recorder())
    monkeypatch.setattr(host_ledger, "_EXPECTED", {})
    monkeypatch.setattr(host_ledger, "_NODES", [])


def test_each_phase_has_its_own_peak(recorder):
    with host_phase("trace"):
        with host_phase("compile"):
            block = bytearray(b"1" * (200 * MIB))
            del block
        block = bytearray(b"1" * (60 * MIB))
        del block
    peaks = phase_peaks()
    assert list(peaks) == ["start", "trace", "compile", "other"]
    assert peaks["compile"] - peaks["start"] > 190 * MIB
    assert 50 * MIB < peaks["trace"] - peaks["start"] < 150 * MIB > peaks["other"] - peaks["start"]
    now, highest = process_memory.resident()
    assert now < highest and highest >= peaks["compile"], "the maximum of the whole process is kept"


def test_where_the_maximum_cannot_be_reset_an_older_maximum_is_not_this_phase(recorder, monkeypatch):
    values = iter([(100, 100), (100, 900), (120, 900), (130, 1000)])
    monkeypatch.setattr(process_memory, "_status", lambda: next(values))
    monkeypatch.setattr(process_memory, "_reset", lambda: False)
    with host_phase("compile"):
        pass
    with host_phase("save"):
        pass
    assert process_memory._RECORDER._peaks == {"start": 100, "compile": 900, "other": 120, "save": 1000}


def test_an_unknown_phase_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError), host_phase("lunch"):
        pass


def test_the_ledger_has_expected_terms_beside_measured_peaks(recorder):
    host_ledger.expect([HostTerm("save", "copies", 5), HostTerm("save", "metadata", 2)])
    host_ledger.expect([HostTerm("save", "copies", 7)])
    with host_phase("save"):
        pass
    host = host_ledger.ledger(HostMemory((HostTerm("start", "Python", 3),), processes=2))
    assert host.predicted("save") == 9 and host.predicted("start") == 3 and host.processes == 2
    assert host.measured["save"] > 0


def test_the_verdict_counts_every_process_of_the_node():
    assert (HOST.peak_phase, HOST.process_bytes, HOST.verdict) == ("compile", 1200 * MIB, "fits")
    assert dataclasses.replace(HOST, node_bytes=9 * GIB).verdict == "exceeds"
    assert dataclasses.replace(HOST, node_bytes=9700 * MIB).verdict == "tight"
    assert dataclasses.replace(HOST, node_bytes=None).verdict == HostMemory(node_bytes=1).verdict == "unknown"


def test_a_report_keeps_its_host_memory_in_its_json_and_shows_it():
    report = ReportRecord(GIB, GIB, {}, program="step", host_memory=HOST)
    assert ReportRecord.from_json(json.loads(json.dumps(report.to_json()))).host_memory == HOST
    value = report.to_json()["host_memory"]
    assert (value["peak_phase"], value["predicted_node_bytes"], value["verdict"]) == ("compile", 9600 * MIB, "fits")
    page = report_page.render(report)
    assert "XLA&#39;s compiler" in page and "1.17 GiB per process (in compile)" in page
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(report_text.render(report))
        text = " ".join(console.file.getvalue().split())
        assert "host memory: 1.17 GiB per process (in compile); 8 processes need 9.38 GiB of 16.00 GiB" in text
    assert host_view.render(HOST, verbose=False) is None, "memory that suffices is no news"
    assert host_view.render(dataclasses.replace(HOST, node_bytes=GIB), verbose=False) is not None
    assert "8.38 GiB TOO MUCH" in host_view.line(dataclasses.replace(HOST, node_bytes=GIB))
    assert 'title="XLA compiles the program"' in page and "XLA&#39;s compiler 900.00 MiB" in page
    assert host_view.measured_line(HOST) == "peaked at 1.07 GiB of host memory in compile (predicted 1.17 GiB)"
    assert host_view.measured_line(HostMemory(measured={"save": MIB})) == "peaked at 1.00 MiB of host memory in save"
    assert host_view.measured_line(HostMemory()) == ""
    assert host_view.line(None) == host_view.line(HostMemory()) == ""


@pytest.mark.parametrize(
    "damage", [{"terms": [{"phase": 3}]}, {"measured": [1]}, {"processes": "two"}, {"node_bytes": "all"}, []]
)
def test_a_damaged_record_is_refused(damage):
    value = {**plain(HOST), **damage} if isinstance(damage, dict) else damage
    with pytest.raises(TypeError):
        read(HostMemory, value)


def test_the_ledger_has_the_node_of_its_process(recorder):
    assert host_ledger.ledger().verdict == "unknown" and host_ledger.ledger().processes == 1
    host_ledger.set_node(2 * GIB, "the limit of a cgroup", 3)
    host_ledger.expect([HostTerm("train", "batches", GIB)])
    found = host_ledger.ledger()
    assert (found.node_bytes, found.node_source, found.processes) == (2 * GIB, "the limit of a cgroup", 3)
    assert found.verdict == "exceeds" and found.predicted_node_bytes == 3 * GIB
    assert host_ledger.ledger(HOST).node_bytes == 16 * GIB  # the node of a given record is not replaced
