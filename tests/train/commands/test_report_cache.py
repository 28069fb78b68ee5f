"""A finished report is read from the cache, but only for the same program, versions, sources and settings."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory import cli
from bytescope.memory.devices import compiler

pytestmark = pytest.mark.oracle("cuda")
COMMAND = ["report", "tiny", "h100", "--config.remat.policy=dots"]


class Compiled(Exception):
    """Raised instead of a compile."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache folder with the report, beside the report's text and JSON. It is compiled once."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.chdir(folder)
        assert cli.main([*COMMAND, "--json=cold.json"]) == 0
    return folder, text.getvalue()


@pytest.fixture
def cached(filled, monkeypatch, tmp_path):
    """Sets a copy of the cache folder, and raises `Compiled` instead of compiling. Returns the text of the report."""
    shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise Compiled

    monkeypatch.setattr("bytescope.train.program.program.compile_lowered", refuse)
    return filled[1]


def test_a_report_from_the_cache_is_the_same(cached, capsys, tmp_path):
    assert cli.main([*COMMAND, "--json=warm.json", "--html=warm.html"]) == 0
    assert capsys.readouterr().out.replace("warm.json, warm.html", "cold.json") == cached
    cold, warm = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cold", "warm"))
    for each in (cold, warm):
        del each["result"]["command_memory"]  # of the process
    assert warm["result"] == cold["result"]
    assert (tmp_path / "warm.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flags",
    [
        ["--config.remat.policy=full"],
        ["--config.seed=5"],
        ["--xla=xla_gpu_memory_limit_slop_factor=80"],
        ["--host-memory=64GiB"],
        ["--processes-per-node=1"],
        ["--formulas"],
        ["--run"],
    ],
)
def test_another_program_or_setting_is_another_report(cached, flags):
    with pytest.raises(Compiled):
        cli.main([*COMMAND, *flags])


def test_another_target_is_another_report(cached):
    for target in ("h200", "h100@0.9"):
        with pytest.raises(Compiled):
            cli.main(["report", "tiny", target, *COMMAND[3:]])


def test_other_versions_make_another_report(cached, monkeypatch):
    found = compiler.versions()
    monkeypatch.setattr(compiler, "versions", lambda: {**found, "jaxlib": "99.0"})
    with pytest.raises(Compiled):
        cli.main(COMMAND)


def test_other_variables_make_another_report(cached, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(Compiled):
        cli.main(COMMAND)


@pytest.mark.parametrize(
    "module", ["model/block.py", "memory/findings/finding_rules.py", "train/plan/report_remedies.py"]
)
def test_other_sources_make_another_report(cached, monkeypatch, module):
    real, changed = Path.read_bytes, Path(cli.__file__).parents[1] / module
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path) + (b"#" if path == changed else b""))
    with pytest.raises(Compiled):
        cli.main(COMMAND)


def test_a_damaged_report_is_compiled_again(cached, tmp_path):
    [file] = (tmp_path / "bytescope" / "compare").glob("*-report.json")
    file.write_text(file.read_text().replace("peak_bytes", "peek_bytes", 1))
    with pytest.raises(Compiled):
        cli.main(COMMAND)


@pytest.mark.parametrize("command", ["report tiny h100 --config.remat.policy=dots", "compare tiny h100 --remat=full"])
def test_a_command_whose_answers_are_cached_does_not_import_jax(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main = f"from bytescope.memory import cli; assert cli.main({command.split()!r}) == 0"
    run = f"import sys; {main}; print('jax' in sys.modules)"
    answers = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
        answers.append(done.stdout.splitlines()[-1])
    assert answers[1] == "False"
