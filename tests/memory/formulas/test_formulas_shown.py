"""The formulas beside the compiler, as terminals and commands show them."""

import dataclasses
import io
import re

from rich.console import Console

from bytescope.memory.__main__ import main
from bytescope.memory.compare import compare_text, worker_pool
from bytescope.memory.formulas import reconcile
from bytescope.memory.formulas.reconcile import FormulaLine
from bytescope.memory.records.report_record import ROWS, load
from bytescope.memory.view.figures import written_gap
from bytescope.train.plan.config_grid import ConfigRow as Row
from support.json_results import read_result
from support.same_process import SameProcess

MIB = 2**20


def test_gaps():
    assert FormulaLine("x", "bytes", 150, 100).gap == 50 and FormulaLine("x", "bytes", 150, 100).share == 0.5
    assert FormulaLine("x", "bytes", 150, None).gap is None and FormulaLine("x", "bytes", None, 1).share is None
    assert [written_gap(reconcile.share(a, b)) for a, b in ((0, 0), (3, 0), (75, 100), (1, None))] == [
        "+0.0 %",
        "new",
        "-25.0 %",
        "",
    ]


def printed(function, *arguments):
    console = Console(width=100, file=io.StringIO())
    function(*arguments, console)
    return console.file.getvalue()


FORMULA = reconcile.Formula(
    10.0 * MIB, 10.0 * MIB, 20.0 * MIB, 0.0, 5.0 * MIB, 0.0, 50.0 * MIB, 6e9, 8e9, ("gradients: why", "total: why")
)


def row(policy, formula=FORMULA, **overrides):
    return Row(
        {"remat.policy": policy, **overrides},
        peak_bytes=60 * MIB,
        residual_bytes=6 * MIB,
        allocated_bytes=60 * MIB,
        model_flops=6e9,
        hardware_flops=9e9,
        formula=formula and dataclasses.asdict(formula),
    )


def test_a_line_for_each_row():
    unknown = dataclasses.replace(FORMULA, residual_bytes=None, peak_bytes=None, hardware_flops=None)
    rows = [
        row("none"),
        row("dots", unknown),
        row("gone", None),
        Row({"remat.policy": "bad"}, status="no"),
        row("custom", **{"remat.save": ["q_rot", "v", "context", "attn_out"], "remat.offload": ["block_in"]}),
    ]
    text = printed(compare_text.show_row_formulas, rows)
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert lines["none"] == ["6.00", "5.00", "+20.0", "%", "60.00", "50.00", "+20.0", "%", "1.500", "1.333"]
    assert lines["dots"] == ["6.00", "no", "formula", "60.00", "no", "formula", "1.500", "-"] == lines["gone"]
    assert "bad" not in lines and "total:" in lines and "gradients:" not in lines
    assert "custom(q_rot,v,context," in lines and max(map(len, text.splitlines())) <= 100


def test_a_reports_table():
    lines = reconcile.lines(
        FORMULA,
        60 * MIB,
        dict.fromkeys(ROWS, 0) | {"params": 11 * MIB, "residuals": 6 * MIB},
        {"model_flops": 6e9, "hardware_flops": 9e9},
    )
    assert [(line.title, line.gap) for line in lines] == [
        ("parameters", MIB),
        ("gradients", -10 * MIB),
        ("optimizer state", -20 * MIB),
        ("activations kept", MIB),
        ("total (peak)", 10 * MIB),
        ("model FLOPs", 0),
        ("hardware FLOPs", 1e9),
    ]
    text = printed(compare_text.show_formulas, FORMULA, lines)
    assert re.search(r"\+1\.00 MiB +\+10\.0 %", text) and "9.000e+09" in text and "total: why" in text


SMALL = [
    "tiny",
    "--config.model.n_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.data.seq_len=16",
    "--config.batch.micro=2",
    "cpu:1",
]


def test_the_report_command(capsys, tmp_path):
    file = tmp_path / "r.json"
    assert main(["report", *SMALL, "--config.remat.policy=full", "--formulas", f"--json={file}"]) == 0
    out = capsys.readouterr().out
    assert read_result(file)["formula"]["residual_bytes"] == 8192
    assert load(file).breakdown["residuals"] == 8192, "a report as ever"
    line = next(line for line in out.splitlines() if line.startswith("activations kept"))
    assert line.split() == ["activations", "kept", "8.00", "KiB", "8.00", "KiB", "+0", "B", "+0.0", "%"]
    assert main(["report", "x.pb", "--formulas"]) == 2
    error = capsys.readouterr().err
    assert "--formulas cannot be used with x.pb, because it needs a config" in error and error.count("\n") == 1


def test_the_compare_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    out = tmp_path / "c.json"
    words = [
        "compare",
        *SMALL,
        "--remat=dots,custom(up)+offload(block_in),custom(act_fp8)",
        f"--json={out}",
        "--jobs=1",
    ]
    assert main([*words, "--formulas"]) == 0
    dots, custom, wrong = read_result(out)["rows"]
    assert dots["formula"]["residual_bytes"] is None and dots["formula"]["model_flops"] == dots["model_flops"]
    assert custom["formula"]["hardware_flops"] == custom["hardware_flops"]
    assert custom["formula"]["residual_bytes"] == 2 * (2 * 16 * 32 * 4 + 2 * 16 * 64 * 4)
    assert custom["overrides"] == {"remat.policy": "custom", "remat.save": ["up"], "remat.offload": ["block_in"]}
    assert "'act_fp8' does not occur in this program" in wrong["status"] and wrong["formula"] is None
    text = capsys.readouterr().out
    assert "no formula" in text and "custom(up)" in text
    words[words.index("--jobs=1")] = "--remat=dots"  # out of the cache
    assert main(words) == 0
    assert read_result(out)["rows"][0]["formula"] is None, "formulas are for those who ask"
