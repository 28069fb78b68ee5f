"""bytescope explain: exit codes, standard input and output, and the written files."""

import io
import json
import random
import sys

import pytest

from bytescope.train.cli import main
from support import memory_messages as written

pytestmark = pytest.mark.quick


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "job.log"
    path.write_text(written.training_log(written.gpu_buffers(random.Random(1)).text))
    return path


def test_a_log_is_explained(log, tmp_path, capsys):
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    assert main(["explain", str(log), f"--json={files[0]}", f"--html={files[1]}"]) == 0
    printed = capsys.readouterr().out
    sample = written.gpu_buffers(random.Random(1))
    assert "out of memory, line 101 of the log" in printed and "what to do, the cheapest first" in printed
    found = json.loads(files[0].read_text())
    assert found["requested_bytes"] == sample.requested and found["kind"] == "gpu_buffers"
    assert found["culprits"][0]["shape"] == sample.shape and found["remedies"][0]["words"]
    assert sample.shape in files[1].read_text()


def test_standard_input_and_output(log, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert main(["explain", "-", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out)["recognized"] is True


def test_nothing_recognized_is_exit_code_1(tmp_path, capsys):
    (tmp_path / "log").write_text("step 1 loss 2.0\n")
    assert main(["explain", str(tmp_path / "log")]) == 1
    assert "No message about memory was recognized." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing.log", "."])
def test_a_log_that_cannot_be_read(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", name]) == 2
    error = capsys.readouterr().err
    assert f"cannot read {name}" in error and error.count("\n") == 1
