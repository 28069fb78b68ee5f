"""bytescope report --audit: a donated array that no result can reuse is named, for a program and for a config."""

import dataclasses

import pytest

from bytescope.memory import cli
from bytescope.memory.records.audit_record import HONORED_BY, OTHER_OUTCOMES, STEPS, UNKNOWN, AuditRow
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report import audit_view, report_page
from support.json_results import read_result

STEP = """
import jax, jax.numpy as jnp

def program(size=512):
    ARRAY = jax.ShapeDtypeStruct((size, size), jnp.float32)
    def step(state, batch):
        return {"w": state["w"] + batch, "m": state["m"].astype(jnp.bfloat16)}
    return step, ({"w": ARRAY, "m": ARRAY}, ARRAY), {"donate_argnums": 0}
"""


def test_a_donation_that_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEP)
    words = ["report", "--audit", "steps.py:program", "cpu", "--json=audit.json", "--html=audit.html"]
    assert cli.main(words) == 0 and cli.main([*words, "--strict"]) == 1
    text = capsys.readouterr().out
    assert "1 of 2 requests honored" in text and "another\n  donated array" in text
    result = read_result(tmp_path / "audit.json")
    assert (result["honored"], result["not_honored"], result["unknown"]) == (1, 1, 0)
    assert {row["undone_by"] for row in result["requests"]} == {"", "lowering"} <= {"", *STEPS}
    assert {row["done"] for row in result["requests"]} <= {UNKNOWN, *HONORED_BY.values(), *OTHER_OUTCOMES}
    assert [(row["done"], row["bytes"], row["honored"]) for row in result["requests"]] == [
        ("copied", 2**20, False),
        ("reused", 2**20, True),
    ]
    assert "Requests to jax and XLA" in (tmp_path / "audit.html").read_text()
    assert cli.main(["report", "steps.py:program", "cpu"]) == 0
    assert "not done as asked (1 of 2 requests honored)" in capsys.readouterr().out


def test_a_config_and_its_remedies(tmp_path, capsys):
    assert cli.main(["report", "--audit", "tiny", "cpu", "--strict", f"--json={tmp_path / 'a.json'}"]) == 0
    rows = read_result(tmp_path / "a.json")["requests"]
    assert {row["done"] for row in rows if row["kind"] == "donation"} == {"reused"}
    assert "requests honored" in capsys.readouterr().out


@pytest.mark.quick
def test_the_view_of_unknown_and_failed_requests():
    rows = (
        AuditRow("name", "attn_out", "/w/model.py:7", "save", "ignored", 0, message="no value has this name"),
        AuditRow("checkpoint", "block", "/w/model.py:9", "recompute", "recomputed", 2**30, 10**12, count=12),
        AuditRow("donation", "state", done="reused", bytes=2**20),
    )
    assert [row.honored for row in rows] == [False, True, None]
    assert audit_view.summary(rows) == "12 of 13 requests honored, 1 unknown"
    assert audit_view.sentences(rows) == ["name attn_out at model.py:7: no value has this name"]
    report = ReportRecord(2**30, 2**30, {}, program="jit_step", audit=rows)
    assert ReportRecord.from_json(report.to_json()).audit == rows
    assert "1.00e+12" in report_page.render(report) and "no value has this name" in report_page.render(report)
    assert audit_view.render_failures(rows[1:]) is None
    assert "Requests to jax" not in report_page.render(dataclasses.replace(report, audit=()))
