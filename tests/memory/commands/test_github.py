"""What a workflow of GitHub shows: annotations that its parser takes, at lines of the repository, and a summary."""

import dataclasses
import re

import pytest

from bytescope.memory import cli
from bytescope.memory.commands import github
from bytescope.memory.errors import ReportError
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_record import ROWS, Buffer, Finding, ReportRecord
from bytescope.memory.units import MIB

pytestmark = pytest.mark.quick

# A workflow command as GitHub's runner reads it: the end of the line ends it, "::" ends its properties.
COMMAND = re.compile(r"::(error|warning|notice) (?P<properties>[^\n]*?)::(?P<message>[^\n]*)")


def report_of(size, *, target="h100:8", jax="0.10.2", **fields):
    buffers = (
        Buffer(
            "fusion.1",
            size,
            (size // 4,),
            "float32",
            "residuals",
            "backward",
            module="Decoder/mlp",
            op_name="jit(step)/Decoder/mlp/dot",
            source="/srv/repo/model/mlp.py:40",
            at_peak=True,
        ),
        Buffer("w", MIB, (4,), "float32", "params", "argument", at_peak=True),
    )
    rows = {**dict.fromkeys(ROWS, 0), "residuals": size, "params": MIB}
    return ReportRecord(
        size + MIB,
        size + MIB,
        rows,
        buffers=buffers,
        program="jit_step",
        target={"name": target},
        versions={"jax": jax, "jaxlib": jax},
        **fields,
    )


def parsed(line):
    found = COMMAND.fullmatch(line)
    assert found, line
    given = dict(pair.split("=", 1) for pair in found["properties"].split(","))
    assert set(given) <= {"file", "line", "title"}
    return found[1], given, found["message"]


def test_growth_is_an_error_at_the_line_that_grew_most(monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", "/srv/repo")
    before, after = report_of(4 * MIB), report_of(8 * MIB, target="h200", jax="0.12.0")
    changes = report_diff.diff(before, after)
    lines = github.difference_annotations(before, after, changes, report_diff.grew_above(changes, 2.0), 2.0)
    found = [parsed(line) for line in lines]
    assert [kind for kind, _, _ in found] == ["error", "error", "warning", "warning", "warning"]
    _, given, message = found[0]
    assert (given["file"], given["line"]) == ("model/mlp.py", "40")
    assert message == "peak_bytes grew by +80.0 %25, 5.00 MiB to 9.00 MiB, above 2 %25"
    assert "h100:8 and h200" in found[2][2] and "jax, 0.10.2 and 0.12.0" in found[3][2]
    assert found[4][1]["file"] == "model/mlp.py" and "residuals/backward/Decoder/mlp/dot" in found[4][2]
    assert github.difference_annotations(before, before, report_diff.diff(before, before), (), 0.0) == []
    shrunk = report_diff.diff(after, before)
    assert all("grew" not in line for line in github.difference_annotations(after, before, shrunk, (), 0.0))


def test_a_report_tells_its_verdict_and_findings():
    finding = Finding("not_donated", MIB, "1 MiB of state is not donated", "donate argument 0")
    report = report_of(8 * MIB, limit_bytes=MIB, fits=False, verdict="exceeds", findings=(finding,))
    error, warning = map(parsed, github.report_annotations(report))
    assert error[0] == "error" and error[1]["line"] == "40" and "8.00 MiB too much" in error[2]
    assert warning == ("warning", {"title": "not donated"}, "1 MiB of state is not donated: donate argument 0")
    assert github.report_annotations(dataclasses.replace(report, fits=True, findings=())) == []


def test_what_a_name_holds_ends_no_command_and_no_cell():
    hostile = "a,b:c%d\r\n::error::x|y<b>`"
    kind, given, message = parsed(github.annotation("warning", hostile, hostile, f"{hostile}:3"))
    assert kind == "warning" and given["title"] == "a%2Cb%3Ac%25d  %3A%3Aerror%3A%3Ax|y<b>`".replace("  ", " ")
    assert given["line"] == "3" and "%25d" in message and "\n" not in message
    text = github.summary_of_report(dataclasses.replace(report_of(MIB), program=hostile))
    assert all(line.count("|") - line.count("\\|") in (0, 4) for line in text.splitlines()), text
    assert "<b>" not in text and "`" not in text


def test_the_command_prints_them_and_adds_to_the_summary(tmp_path, monkeypatch, capsys):
    report_of(4 * MIB).save(tmp_path / "a.json")
    report_of(8 * MIB, target="h200").save(tmp_path / "b.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("before\n")
    assert cli.main(["diff", "a.json", "b.json", "--fail-above=2", "--github"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("warning: Compiled for different targets, h100:8 and h200")
    assert sum(line.startswith("::") for line in out.splitlines()) == 4
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("before\n### Device memory: jit_step on h200\n\n> **Warning:** Compiled for different")
    assert "| **peak** | 5.00 MiB | 9.00 MiB | +4.00 MiB | +80.0 |" in summary
    assert "|  | a.json | b.json | change | % |\n| --- | ---: | ---: | ---: | ---: |" in summary
    assert cli.main(["diff", "a.json", "b.json"]) == 0
    out = capsys.readouterr().out
    assert "::" not in out and "different targets" in out and (tmp_path / "summary.md").read_text() == summary
    assert cli.main(["diff", "a.json", "a.json"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_a_summary_that_cannot_be_written():
    with pytest.raises(ReportError, match=r"cannot write /no/such/folder/x: .*; set \$GITHUB_STEP_SUMMARY"):
        github.add_summary("x", {"GITHUB_STEP_SUMMARY": "/no/such/folder/x"})
    github.add_summary("x", {})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, []),
        ({"target": "h200"}, ["targets, h100:8 and h200"]),
        ({"jax": "0.12.0"}, ["jax, 0.10.2 and 0.12.0"]),
        ({"versions": {"jax": "0.10.2", "jaxlib": "0.10.3"}}, ["jaxlib, 0.10.2 and 0.10.3"]),
        ({"method": "schedule"}, ["derived from the schedule"]),
        ({"target": "", "jax": "1"}, ["no target", "jax, 0.10.2"]),
    ],
)
def test_what_makes_two_reports_hard_to_compare(fields, words):
    versions = {"versions": fields.pop("versions")} if "versions" in fields else {}
    found = report_diff.warnings(report_of(MIB), dataclasses.replace(report_of(MIB, **fields), **versions))
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found)), found
