"""tests/bench/explain.py counts right and wrong figures, and lists each wrong one."""

from types import SimpleNamespace

import pytest

from support.bench_scripts import bench_script

pytestmark = pytest.mark.quick

INDEX = """id,kind,requested_bytes,limit_bytes,total_bytes,cause
001,gpu_buffers,100,,200,"pool full, of other arrays"
003,plain,300,,,not in the folder
107,newer,,500,600,arguments alone
900,plain,7,,,not in the table
"""


def test_figures_failures_and_missing_files(tmp_path, capsys):
    scorer = bench_script("explain")
    (tmp_path / "index.csv").write_text(INDEX)
    for row in ("001", "107", "900"):
        (tmp_path / f"{row}.txt").write_text(row)
    messages, missing = scorer.read_corpus(tmp_path)
    assert missing == ["003"]
    answers = {
        "001": ("gpu_buffers", 100, 150, 200, "device_full"),
        "107": ("remat_warning", None, 500, 600, "weights_and_state"),
        "900": ("plain", None, None, None, "unknown"),
    }

    def explain(text):
        kind, requested, limit, total, cause = answers[text]
        return SimpleNamespace(
            kind=kind, requested_bytes=requested, limit_bytes=limit, total_bytes=total, cause_kind=cause
        )

    odd = [message for message in messages if message.odd]
    assert not scorer.report_half("odd", odd, explain, with_bars=True)
    printed = capsys.readouterr().out
    assert "limit_bytes       1 of 2     50.0 %   bar 98 %   MISSED" in printed
    assert printed.count("MISSED") == 1 and "001  limit_bytes      expected None, found 150" in printed
    even = [message for message in messages if not message.odd]
    assert not scorer.report_half("even", even, explain, with_bars=True)
    printed = capsys.readouterr().out
    assert "1 not in the table" in printed and "900  requested_bytes  expected 7, found None" in printed


def test_each_exception_of_a_cut_is_listed(tmp_path, capsys):
    scorer = bench_script("explain")
    message = scorer.Message("001", "abc", {})

    def explain(text):
        if text == "bc":
            raise ValueError(text)
        return SimpleNamespace(to_json=dict)

    assert not scorer.report_exceptions("cuts", scorer.cuts([message], 1), explain)
    printed = capsys.readouterr().out
    assert "cuts: 1 exceptions in 8 texts" in printed and "001[1:]: ValueError('bc')" in printed


def test_an_id_has_one_cause_kind():
    scorer = bench_script("explain")
    assert len(scorer.CAUSE_KINDS) == sum(len(rows.split()) for rows in scorer.CAUSE_IDS.values())
