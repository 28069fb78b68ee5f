"""A failure is compared with the report of a program: the step, another program, or something else than its size."""

import dataclasses
import json
import random
import re

import pytest

from bytescope import memory
from bytescope.memory.cli import main
from bytescope.memory.records.report_record import Buffer, ReportRecord, XlaStats
from bytescope.memory.units import GIB
from support import memory_messages as written

pytestmark = pytest.mark.quick

STEP = ReportRecord(
    peak_bytes=50 * GIB,
    allocated_bytes=52 * GIB,
    breakdown={},
    program="jit_train_step",
    limit_bytes=60 * GIB,
    fits=True,
    xla=XlaStats(argument_bytes=8 * GIB, output_bytes=8 * GIB, alias_bytes=6 * GIB, temp_bytes=40 * GIB),
)


def request(count):
    return f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {count} bytes.\n"


def listed(op_name, shape="f32[8,1024,4096]"):
    return (
        f"{request(99 * GIB)}BufferAssignment OOM Debugging.\nPeak buffers:\n\tBuffer 1:\n\t\tSize: "
        f"128.00MiB\n\t\tOperator: "
        f'op_name="{op_name}"\n\t\tXLA Label: fusion\n\t\tShape: {shape}\n\t\t==========================\n'
    )


@pytest.mark.parametrize(
    "text, change, subject, words",
    [
        (request(40 * GIB + 1000), {}, "step", "is the temporary memory of the program"),
        (request(20 * GIB), {}, "other_arrays", "The report predicts 52.00 GiB of 60.00 GiB"),
        (request(45 * GIB), {}, "unknown", "larger than the whole temporary memory of the program, 40.00 GiB"),
        (request(20 * GIB), {"fits": False}, "step", "The report predicts that this program does not fit."),
        (
            listed("jit(train_step)/jvp(Net)/mlp/dot_general"),
            {},
            "step",
            "The listed buffers belong to a program of this name.",
        ),
        (listed("jit(init_params)/normal"), {}, "other_program", "init_params"),
        (listed("jit(convolve)/Net/mlp/dot_general"), {}, "other_program", "convolve"),
        (written.bfc_dump(random.Random(1)).text, {}, "fragmentation", "the memory was fragmented"),
        (written.driver(random.Random(1)).text, {}, "outside_pool", "left outside the pool"),
        (written.pinned_host(random.Random(1)).text, {}, "host_memory", "too little host memory"),
    ],
)
def test_what_failed(text, change, subject, words):
    found = memory.explain(text, dataclasses.replace(STEP, **change))
    assert found.match.subject == subject and words in found.match.sentence
    assert "compared with the report" in str(found) and words in " ".join(str(found).split())
    assert words in found.to_html() and json.dumps(found.to_json())


def test_the_same_buffer_in_both_has_the_reports_source_line():
    buffer = Buffer(
        "fusion.1", 2**27, (8, 1024, 4096), "float32", "residuals", "forward", source="net.py:7", at_peak=True
    )
    report = dataclasses.replace(STEP, program="jit_f", buffers=(buffer, dataclasses.replace(buffer, source="")))
    found = memory.explain(listed("jit(g)/jvp(Net)/mlp/dot_general"), report)
    assert found.match.subject == "step" and "1 of the 1 shape in the log" in found.match.sentence
    assert found.culprits[
        0
    ].source == "net.py:7" and "2 x float32[8,1024,4096] at the program's peak: residuals" in str(found)
    assert memory.explain(listed("jit(g)/mlp/dot_general")).culprits[0].source == ""


def test_a_warning_of_rematerialization_is_completed_with_the_arguments():
    sample = written.remat(random.Random(1))
    found = memory.explain(sample.text, STEP)
    need = (sample.total + 2 * GIB) / GIB
    assert re.search(rf"the program needs {need:.2f} GiB", found.match.sentence)


def test_reports_of_the_command_line(tmp_path, capsys):
    log, report = tmp_path / "job.log", tmp_path / "memory.json"
    log.write_text(request(40 * GIB))
    report.write_text(json.dumps(STEP.to_json()))
    assert main(["explain", str(log), str(report)]) == 0
    assert "is the temporary memory of the program" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(log), str(report), "h100"]) == 2
    assert "h100 cannot be used with a saved report, which has a target: leave it out" in capsys.readouterr().err
    assert main(["explain", str(log), f"--report={report}"]) == 2
    assert "bytescope explain has no --report: give the subject after the log" in capsys.readouterr().err
    assert main(["explain", str(log), "--config.model.n_layers=2"]) == 2
    assert "needs a config" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_config_of_the_command_line(tmp_path, capsys):
    (tmp_path / "job.log").write_text(request(40 * GIB))
    assert main(["explain", str(tmp_path / "job.log"), "tiny", "cpu:1"]) == 0
    assert "tiny: The log does not show" in " ".join(capsys.readouterr().out.split())
