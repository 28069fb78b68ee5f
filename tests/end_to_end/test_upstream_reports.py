"""The reports of tests/bench/upstream: their patches apply to the installed MaxText, and their scripts start."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.oracles import MAXTEXT_PYTHON

FOLDER = Path(__file__).parents[1] / "bench" / "upstream"
REPORTS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
# Copies the installed MaxText with each patch and compiles the files that it changes.
SCRIPT = """
import pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import measure_maxtext
for report in sys.argv[2:]:
    patch = measure_maxtext.patch_of(report)
    with tempfile.TemporaryDirectory() as folder:
        measure_maxtext.copy_patched(patch, pathlib.Path(folder))
        for line in patch.splitlines():
            if line.startswith("+++ b/") and line.endswith(".py"):
                compile(pathlib.Path(folder, line[6:]).read_text(), line, "exec")
"""


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import measure_maxtext

    return measure_maxtext


def ids(path):
    return path.stem


@pytest.mark.quick
def test_there_are_four_reports():
    assert len(REPORTS) == 4 and all(path.with_suffix(".py").is_file() for path in REPORTS)


@pytest.mark.quick
@pytest.mark.parametrize("report", REPORTS, ids=ids)
def test_hunks_have_the_lines_that_they_announce(measure, report):
    patch = measure.patch_of(report)
    assert re.findall(r"^--- a/(.*)$", patch, flags=re.M) == re.findall(r"^\+\+\+ b/(.*)$", patch, flags=re.M)
    without_names = re.sub(r"^(---|\+\+\+) .*\n", "", patch, flags=re.M)
    hunks = re.split(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@.*\n", without_names, flags=re.M)
    assert len(hunks) > 1 and not hunks[0]
    for old, new, body in zip(hunks[1::3], hunks[2::3], hunks[3::3]):
        lines = [line[:1] for line in body.splitlines()]
        assert (int(old), int(new)) == (len(lines) - lines.count("+"), len(lines) - lines.count("-"))


@pytest.mark.quick
def test_a_finding_that_no_longer_holds_is_exit_code_1(measure, capsys):
    assert measure.check({"one": True}) == 0
    assert measure.check({"one": True, "two": False}) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "DOES NOT HOLD: two"


@pytest.mark.quick
def test_keys_of_a_few_layers_and_of_the_model(measure):
    assert measure.keys_of(2)[-1] == "base_num_decoder_layers=2"
    assert not any("layers" in key or "override" in key for key in measure.keys_of(0))


@pytest.mark.parametrize("report", REPORTS, ids=ids)
def test_the_script_describes_itself_and_refuses_a_wrong_key(report):
    script = report.with_suffix(".py")
    helped = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert not helped.returncode and ast.get_docstring(ast.parse(script.read_text())).splitlines()[0] in helped.stdout
    refused = subprocess.run([sys.executable, script, "--layers=four"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--layers" in refused.stderr


@pytest.mark.oracle("maxtext")
def test_the_patches_apply_to_maxtext():
    done = subprocess.run([MAXTEXT_PYTHON, "-c", SCRIPT, FOLDER, *REPORTS], capture_output=True, text=True)
    assert not done.returncode, done.stderr
