"""The report that users hold: text at a prompt and in a notebook, and a record in every other respect."""

import copy
import dataclasses
import json
import pickle
import re

import pytest
from rich.cells import cell_len

from bytescope import memory
from bytescope.memory.commands import github
from bytescope.memory.records import report_record
from bytescope.memory.report import report_page, report_text
from bytescope.memory.units import human
from bytescope.memory.view.console import plain_text
from support.browser import HOSTILE, Page
from support.rows import make_report
from support.screen import seen, terminal

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def record():
    return make_report()


@pytest.fixture(scope="module")
def report(record):
    return memory.Report.of(record)


def with_names(record, name):
    """The record with a name in every place where a program may put one."""
    buffers = tuple(
        dataclasses.replace(b, name=name, module=name, source=name, op_name=name, dtype=name, checkpoint_name=name)
        for b in record.buffers
    )
    return memory.Report.of(
        dataclasses.replace(
            record,
            buffers=buffers,
            program=name,
            target={"name": name, "kind": f"{name}2"},
            versions={"jax": name},
            subject=report_record.Description(name, (name,), name, name),
            notes=(name,) * 50,
            findings=tuple(report_record.Finding(name, 1, name, name) for _ in range(50)),
        )
    )


# ---- a record --------------------------------------------------------------------------------------------


def test_it_is_its_record(record, report):
    assert report == record and record == report
    assert memory.Report.of(report) is report
    for field in dataclasses.fields(report_record.ReportRecord):
        assert getattr(report, field.name) is getattr(record, field.name)
    assert report.predicted_bytes == record.predicted_bytes and report.to_json() == record.to_json()
    assert report != dataclasses.replace(record, peak_bytes=1) and report != 7


def test_a_breakdown_has_every_row_and_no_other():
    breakdown = report_record.ReportRecord(3, 4, {"params": 3, "fragmentation": 1}).breakdown
    assert tuple(breakdown) == report_record.ROWS and sum(breakdown.values()) == 4
    with pytest.raises(ValueError, match="the breakdown has the unknown row 'rngg': choose from params, "):
        report_record.ReportRecord(3, 3, {"rngg": 3})


def test_it_stays_a_report(report):
    for same in (
        pickle.loads(pickle.dumps(report)),
        copy.deepcopy(report),
        dataclasses.replace(report),
        memory.Report.from_json(json.loads(json.dumps(report.to_json()))),
    ):
        assert type(same) is memory.Report
        assert same.peak_bytes == report.peak_bytes and same.timeline == report.timeline
    assert pickle.loads(pickle.dumps(report)) == report


def test_assert_fits_gives_the_report_in_either_case(record):
    assert type(memory.assert_fits(record, "1TiB")) is memory.Report
    with pytest.raises(memory.GuardError) as caught:
        memory.assert_fits(record, "1KiB")
    assert type(caught.value.report) is memory.Report and caught.value.report.verdict == "exceeds"


def test_every_verdict_says_which_share_of_the_gpus_memory_its_limit_is(record):
    gpu = {"name": "h100:8", "platform": "cuda", "limit_bytes": record.limit_bytes, "memory_fraction": 0.92}
    report = memory.Report.of(dataclasses.replace(record, target=gpu))
    share = "92 % of the GPU"
    for text in (repr(report), report._repr_html_(), report_page.render(report), github.summary_of_report(report)):
        assert share in text
    assert report.to_json()["target"]["memory_fraction"] == 0.92
    larger = dataclasses.replace(report, allocated_bytes=2 * record.limit_bytes)
    with pytest.raises(memory.GuardError, match=rf"more than .*, {share}'s memory: "):
        memory.assert_fits(larger)
    with pytest.raises(memory.GuardError) as caught:
        memory.assert_fits(larger, "1MiB")
    assert share not in str(caught.value), "a size that the test chose"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "assert_fits",
            {"size": "1GiB"},
            "assert_fits() got the unknown option size: did you mean budget? Else give",
        ),
        ("assert_fits", {"limit": "1GiB"}, "assert_fits() got the unknown option limit: did you mean budget?"),
        ("assert_fits", {"tagret": "h100"}, "assert_fits() got the unknown option tagret: did you mean target?"),
        ("watch", {"limit": "1GiB"}, "watch() got the unknown option limit: did you mean budget?"),
        ("analyze", {"targets": "h100"}, "analyze() got the unknown option targets: did you mean target?"),
        ("analyze", {"donate_argnum": 0}, "did you mean donate_argnums"),
        ("analyze", {"xyz": 0}, "analyze() got the unknown option xyz: give only options of jax.jit, in_shardings"),
    ],
)
def test_a_misspelt_option_is_named_with_its_function(report, function, options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(memory, function)(report, **options)


def test_save_and_load(report, tmp_path):
    report.save(tmp_path / "memory.json")
    for path in (tmp_path / "memory.json", str(tmp_path)):  # a run directory has one of this name
        found = memory.load(path)
        assert type(found) is memory.Report and found.to_json() == report.to_json()
    with pytest.raises(memory.ReportError, match=r"cannot write .*nowhere/report.json: No such file"):
        report.save(tmp_path / "nowhere" / "report.json")
    with pytest.raises(memory.ReportError, match=r"cannot write .*nowhere/report.html: No such file"):
        report.to_html(tmp_path / "nowhere" / "report.html")
    with pytest.raises(memory.ReportError, match="cannot read"):
        memory.load(tmp_path / "other.json")


def test_to_html_is_the_page_of_the_command(record, report, tmp_path):
    report.to_html(str(tmp_path / "report.html"))
    report.save(tmp_path / "saved.html")
    for name in ("report.html", "saved.html"):
        assert (tmp_path / name).read_text(encoding="utf-8") == report_page.render(record)


# ---- at a prompt -----------------------------------------------------------------------------------------


def test_repr_says_what_it_is_of_and_what_it_holds(report):
    text = repr(report)
    assert "jit_train_step on h200:8 (NVIDIA H200)" in text and "FITS" in text and ".table()" in text
    for row, size in report.breakdown.items():
        assert (f"{human(size)} " in text) == (size > 0), row
    for size in (report.peak_bytes, report.allocated_bytes, report.limit_bytes):
        assert human(size) in text
    words = " ".join(text.split())
    for finding in report.findings:
        assert " ".join(finding.remedy.split()) in words and finding.flags in text
    assert "\x1b" not in text and str(report) == text


@pytest.mark.parametrize("name", ["x" * 900, "\u0301" * 900, "漢" * 900, HOSTILE, "\x1b[2J\n\n" * 99])
def test_repr_is_as_wide_as_the_terminal_whatever_the_program(record, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = repr(with_names(record, name))
    assert "\x1b" not in text and max(map(cell_len, text.splitlines())) <= 60


def test_repr_of_an_empty_report():
    assert "peak 0 B" in repr(memory.Report(0, 0, {}))


@pytest.mark.parametrize("width", [80, 132])
def test_show_prints_the_whole_report_as_wide_as_the_terminal(report, monkeypatch, width):
    with terminal(monkeypatch, width) as written:
        report.show()
    lines = seen(written[0].replace("\r\n", "\n").replace("\n", "\r\n"), width)
    assert any(line.startswith("largest at the peak") for line in lines)
    assert "bytes per parameter" in "\n".join(lines) and max(map(len, lines)) > min(width, 100) - 12


# ---- in a notebook ---------------------------------------------------------------------------------------


def test_a_notebook_shows_the_whole_report(report):
    text = "".join(Page(report._repr_html_()).words)
    for line in plain_text(report_text.render(report), 100).splitlines():
        assert line in text


def test_names_are_escaped_in_a_notebook():
    big = with_names(make_report(points=1500, buffers=600), HOSTILE)
    for text in (big._repr_html_(), big.table(500)._repr_html_(), big.diff(make_report(seed=1))._repr_html_()):
        assert set(Page(text).tags) <= {"pre", "span"} and "<b>x" not in text
    assert HOSTILE.replace("\u2028", "\ufffd") in "".join(Page(big._repr_html_()).words)
