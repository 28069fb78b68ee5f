"""Interpreters and environments for versions of jax: the choice, the cache, and a bisection with recorded figures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory.bisect import environments
from bytescope.memory.bisect.environments import Interpreter
from bytescope.memory.compare import row_cache
from bytescope.memory.errors import ReportError
from bytescope.train import cli
from support.json_results import read_result

RECORDED = Path(__file__).parent / "recorded"
# The versions that pip had for Python 3.12 when the figures were recorded.
VERSIONS = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
STEP = """
import jax, jax.numpy as jnp

def program(width=64):
    shapes = jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((8, width), jnp.float32)
    return lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), shapes, {"donate_argnums": 0}
"""


@pytest.fixture
def interpreters(monkeypatch):
    """Python 3.11 with versions of jax up to 0.10.2, and 3.12 with newer ones. Nothing is installed."""
    known = {"python3.11": ("0.9.0", "0.10.1", "0.10.2"), "python3.12": VERSIONS}
    monkeypatch.setattr(environments, "installed_interpreters", lambda: iter(known))
    monkeypatch.setattr(environments, "read_interpreter", lambda path: Interpreter(path, known[path]))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "path", "versions"),
    [
        ("0.10.2..0.11.1", "python3.12", VERSIONS[:3]),
        ("0.9.0..0.10.2", "python3.11", ("0.9.0", "0.10.1", "0.10.2")),
        ("0.11.2..", "python3.12", VERSIONS[3:]),
        ("0.12.0,0.10.2", "python3.12", ("0.12.0", "0.10.2")),
    ],
)
def test_the_first_interpreter_that_supports_all_versions_is_chosen(interpreters, text, path, versions):
    chosen, found = environments.choose_versions(text, None)
    assert (chosen.path, found) == (path, versions)


@pytest.mark.quick
def test_versions_that_no_interpreter_supports_are_an_error(interpreters):
    with pytest.raises(ReportError, match=r"python3.11 does not support jax 0.12.0; install a Python interpreter"):
        environments.choose_versions("0.9.0..0.12.0", None)


@pytest.mark.quick
def test_requirements():
    assert environments.jax_requirement("0.11.0", "cuda") == ["jax[cuda13]==0.11.0"]
    assert environments.jax_requirement("0.6.2", "cuda") == ["jax[cuda12]==0.6.2"]
    assert environments.jax_requirement("0.11.0", "cuda", is_old_gpu=True) == ["jax[cuda12]==0.11.0"]
    light, trainer = environments.own_requirements(False), environments.own_requirements(True)
    assert any(each.startswith("rich") for each in light) and not any(each.startswith("jax") for each in trainer)
    assert any(each.startswith("flax") for each in trainer) and not any(each.startswith("flax") for each in light)


@pytest.mark.quick
def test_an_environment_begins_as_a_copy_of_its_sibling_and_is_made_once(tmp_path, monkeypatch):
    """A failed installation leaves nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = []

    def run(command, what):
        commands.append(what)
        if "venv" in command:
            python = Path(command[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()
        if "jax==0.11.1" in command:
            raise ReportError("pip failed")

    monkeypatch.setattr(environments, "_run", run)
    made = [
        environments.make_environment("python3", version, [f"jax=={version}"], ["rich"])
        for version in ("0.10.2", "0.11.0", "0.10.2")
    ]
    assert made[0] == made[2] and [path.parts[-3] for path in made[:2]] == ["jax-0.10.2", "jax-0.11.0"]
    assert commands == ["python3 -m venv", "pip install jax==0.10.2", "pip install jax==0.11.0"]
    assert made[0].samefile(made[1])
    with pytest.raises(ReportError, match="pip failed"):
        environments.make_environment("python3", "0.11.1", ["jax==0.11.1"], ["rich"])
    assert len(list(made[0].parents[2].iterdir())) == 2
    assert environments.make_environment("python3", "0.10.2", ["jax==0.10.2"], []) != made[0]


@pytest.mark.quick
def test_an_interpreter_without_pip_is_an_error(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(ReportError, match=r"cannot list the versions of jax \(No module named pip\)"):
        environments.read_interpreter(str(script))


# ---- recorded measurements


@pytest.mark.quick
@pytest.mark.parametrize("name", ["rnn", "rnn_growth", "seq2seq", "gpt"])
def test_recorded_versions_are_bisected_again_without_compiling(name, tmp_path, monkeypatch, interpreters):
    """The figures were measured with Python 3.12, an environment per version and a described H100."""
    from bytescope.memory.bisect.measuring import Measuring

    monkeypatch.setattr(Measuring, "_ask", lambda *_: pytest.fail("a program was compiled"))
    monkeypatch.setattr(environments, "make_environment", lambda *_: pytest.fail("an environment was made"))
    expected = json.loads((RECORDED / "expected.json").read_text())[name]
    path = RECORDED / expected["records"]
    header, *lines = path.read_text().splitlines()
    question = json.loads(header)["question"]
    # The measurements are of the program as it was; only this digest changes with the program's file.
    monkeypatch.setattr(row_cache, "digest_files", lambda files: question["sources"])
    shutil.copy(path, tmp_path / path.name)
    words = [f"--program={question['program']}", question["target"], f"--jax={expected['jax']}", expected["bound"]]
    words += [f"--install={package}" for package in question["packages"]]
    words += [f"--records={tmp_path / path.name}", f"--json={tmp_path / 'out.json'}"]
    assert cli.main(["bisect", *words]) == 0
    result = read_result(tmp_path / "out.json")
    # The search begins between the recorded versions, so that all of them are read.
    recorded = {json.loads(line)["point"] for line in lines}
    measured = [row["point"] for row in result["measured"]]
    assert len(measured) >= 3 and set(measured) == recorded & set(result["candidates"])
    assert result["change"] == expected["change"]
    rows = [row for row in result["difference"]["changes"] if row["kind"] == "buffer"]
    largest = max(rows, key=lambda row: abs(row["growth"]))
    assert [largest["name"], largest["growth"]] == expected["largest"]


# ---- real environments


@pytest.mark.exhaustive
def test_two_versions_of_jax_are_installed_and_measured(tmp_path, monkeypatch, capsys):
    """Both are installed for this interpreter; the second run finds them in the cache and measures nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bisected_step.py").write_text(STEP)
    versions = environments.read_interpreter(sys.executable).versions
    first = versions.index("0.10.2")
    pair = versions[first:][:2] if len(versions) > first + 1 else ("0.10.1", "0.10.2")
    words = ["bisect", "--program=bisected_step.py:program", "cpu", f"--jax={','.join(pair)}", "--json=out.json"]
    assert cli.main([*words, f"--python={sys.executable}", "--bytes=1TiB"]) == 1
    result = read_result("out.json")
    assert [row["point"] for row in result["measured"]] == [f"jax {version}" for version in pair]
    assert all(row["status"] == "ok" and row["value"] > 16000 for row in result["measured"])
    assert cli.main([*words, f"--python={sys.executable}", "--bytes=20000B", "--all"]) in (0, 1)
    assert capsys.readouterr().out.count("recorded") == 2


@pytest.mark.exhaustive
def test_an_old_version_is_dumped_by_the_standalone_script(tmp_path):
    """The script imports only jax, so it also runs with this version; its dump is read by report --hlo."""
    from bytescope.memory.bisect import standalone_dump

    (tmp_path / "step.py").write_text(STEP)
    command = [sys.executable, "-I", standalone_dump.__file__, "step.py:program", "out", "--keys", '{"width": "32"}']
    subprocess.run(command, cwd=tmp_path, check=True)
    assert "dot_general" in (tmp_path / "out" / "jaxpr.txt").read_text()
    assert cli.main(["report", f"--hlo={tmp_path / 'out' / 'dump'}", "cpu", f"--json={tmp_path / 'a.json'}"]) == 0
    report = read_result(tmp_path / "a.json")
    assert report["allocated_bytes"] >= 2 * 32 * 32 * 4 and report["peak_bytes"] <= report["allocated_bytes"]
