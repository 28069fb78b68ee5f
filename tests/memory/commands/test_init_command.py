"""bytescope report SCRIPT: the report of its step, a file with the step, or what is missing."""

import pytest

from bytescope.memory import cli
from support.json_results import read_result

SCRIPT = """
import argparse, sys
import jax, jax.numpy as jnp
import no_such_loader

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
width = parser.parse_args().width

@jax.jit
def step(w, x):
    print("traced")
    return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

w = jax.random.normal(jax.random.key(0), (16, width))
assert len(jax.devices()) == 1
for x in no_such_loader.Loader("train"):
    w = step(w, x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_missing_pieces_then_a_file_that_report_reads(folder, capsys):
    assert cli.main(["report", "train.py"]) == 1
    printed = capsys.readouterr().out
    assert "train.py:17: the argument x of the call at train.py:18 comes from next(no_such_loader.Loader())" in printed
    assert "train.py defines step: bytescope report train.py:step reports on a function that returns" in printed
    (folder / "none.py").write_text("def helper(x): ...\ndef program(width=8): ...\n")
    assert cli.main(["report", "none.py"]) == 1
    assert "none.py defines program, helper: bytescope report none.py:program" in capsys.readouterr().out
    (folder / "train.py").write_text(SCRIPT.replace("== 1", ">= 1"))  # as many devices as these tests have
    words = ["report", "train.py", "h100", "--value=train.py:17=float32[4,16]", "--save-program=program.py"]
    assert cli.main([*words, "--json=script.json", "--", "--width=32"]) == 0
    out = capsys.readouterr().out
    assert "found step (train.py:10), called at train.py:18" in out and "jit_step on h100" in out
    assert cli.main(["report", "program.py:program", "h100", "--json=program.json"]) == 0
    captured = capsys.readouterr()
    assert "jit_step on h100" in captured.out and "traced" not in captured.out
    script, program = (read_result(folder / name) for name in ("script.json", "program.json"))
    assert script["peak_bytes"] == program["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "there is no file or folder nope.py: give a path that exists"),
        (["train.py", "h1000"], "h1000"),
        (["train.py", "h100", "lr=3"], "lr=3 cannot be used with a script: write the script's own arguments after --"),
        (["train.py", "--value=int32[8]"], "names no line"),
        (["train.py", "--save-program=nowhere/p.py"], "there is no folder"),
        (["train.py", "--save-program=train.py"], "bytescope did not write it"),
    ],
)
def test_mistakes_exit_with_2(folder, capsys, words, message):
    assert cli.main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_script_that_crashes_its_process(folder, capsys):
    (folder / "train.py").write_text("import os\nprint('the last words', flush=True)\nos._exit(7)\n")
    assert cli.main(["report", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "the last words" in error and "exit code 7" in error
