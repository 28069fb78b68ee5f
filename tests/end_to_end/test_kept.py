"""What users have from earlier versions goes on working: names, files, pickles, run directories, `python -m`.

`tests/support/kept/` was written by the tree before the packages were laid out anew (November 2026):
`run.tar.gz`, a run directory of four updates with the text that it reads, in whose memory.json the key `unseen` was
renamed to `runtime_overheads`; `policy.pickle`, a RematPolicy.
"""

import json
import os
import pickle
import runpy
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from bytescope import memory
from bytescope.memory import cli
from support.command_line import called

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "support" / "kept"
PLUGIN = "bytescope.memory.pytest_guard"
NAMES = (
    "Buffer Collective Communication Difference Executable Finding GuardError LedgerRow LiveMemory RematPlan "
    "RematPolicy Report ReportError Table Target TimelinePoint Watched XlaStats ZeroRow analyze assert_fits compile "
    "diff live load plan_remat target targets watch"
)
# The flags of the run in run.tar.gz, but for its steps.
KEYS = {
    "model": {"n_layers": 1, "d_model": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 16},
    "data": {"seq_len": 16, "source": "text.txt"},
    "batch": {"micro": 2, "accumulation": 1},
    "train": {
        "cache_dir": "none",
        "eval_every": 0,
        "sample_tokens": 0,
        "checkpoint_every": 2,
        "keep": 1,
        "log_every": 1,
    },
}
RUN_FLAGS = [f"--config.{group}.{key}={value}" for group, keys in KEYS.items() for key, value in keys.items()]


@pytest.fixture
def run_directory(tmp_path):
    with tarfile.open(KEPT / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


@pytest.mark.quick
def test_every_public_name_is_there():
    assert set(NAMES.split()) <= set(memory.__all__)
    assert all(getattr(memory, name) is not None for name in NAMES.split())


@pytest.mark.quick
def test_a_report_of_an_earlier_version_loads_and_compares(run_directory, capsys):
    report = memory.load(run_directory / "memory.json")
    stored = json.loads((run_directory / "memory.json").read_text())
    assert (report.peak_bytes, dict(report.breakdown)) == (stored["peak_bytes"], stored["breakdown"])
    assert report.to_json() == {**report.to_json(), **{key: stored[key] for key in ("program", "target", "ledger")}}
    assert cli.main(["diff", str(run_directory / "memory.json"), str(run_directory)]) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.quick
def test_a_policy_that_was_pickled_by_an_earlier_version_loads():
    policy = pickle.loads((KEPT / "policy.pickle").read_bytes())
    assert type(policy) is memory.RematPolicy and callable(policy) and policy.lost == ""


def test_a_run_that_an_earlier_version_began_goes_on(run_directory):
    """In a process of its own, with one device as that run had."""
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    command = [
        sys.executable,
        "-m",
        "bytescope.memory",
        "train",
        "tiny",
        *RUN_FLAGS,
        "--config.train.steps=6",
        "--workdir=run",
    ]
    done = subprocess.run([*command, "--extend"], cwd=run_directory.parent, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "resumed at step 4" in done.stdout, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[4] + 0.1


@pytest.mark.quick
def test_a_page_of_a_run_of_an_earlier_version(run_directory, tmp_path):
    assert cli.main(["report", str(run_directory), f"--html={tmp_path / 'page.html'}"]) == 0
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.quick
def test_pytest_finds_the_plugin_and_can_do_without_it(tmp_path):
    assert [point.value for point in metadata.entry_points(group="pytest11") if point.name == PLUGIN] == [PLUGIN]
    (tmp_path / "test_theirs.py").write_text("def test_it(request):\n    print(request.config.pluginmanager)\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", f"no:{PLUGIN}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.quick
@pytest.mark.parametrize("name", ["report", "train"])
def test_python_m_bytescope_memory_has_commands_of_both(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bytescope.memory", *called(name, []), "--help"])
    monkeypatch.delitem(sys.modules, "bytescope.memory.__main__", raising=False)
    with pytest.raises(SystemExit) as done:
        runpy.run_module("bytescope.memory", run_name="__main__")
    assert done.value.code == 0 and capsys.readouterr().out.startswith(f"usage: bytescope {called(name, [])[0]} ")


@pytest.mark.exhaustive
def test_an_install_has_all_files(tmp_path):
    """Templates, scripts, styles, tables and py.typed, in a copy: `pip install .` leaves folders beside the sources."""
    import shutil

    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("configs", "memory", "model", "train"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"--target={target}", str(source)], check=True, capture_output=True)
    wanted = [
        path.relative_to(source)
        for name in ("configs", "memory", "model", "train")
        for path in (source / name).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".png", ".ipynb") and "__pycache__" not in path.parts
    ]
    wanted = [path for path in wanted if path.parts[:1] != ("build",) and "reference" not in path.parts]
    missing = [str(path) for path in wanted if not (target / "bytescope" / path).is_file()]
    assert not missing and any(path.name == "py.typed" for path in wanted)
    assert {".css", ".js", ".html", ".csv"} <= {path.suffix for path in wanted}
