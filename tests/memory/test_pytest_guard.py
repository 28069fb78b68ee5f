"""The fixtures that other people's tests get: found by pytest, light, silent, and telling where a test fails."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

PLUGIN = "bytescope.memory.pytest_guard"
ROOT = Path(__file__).parents[2]
TESTS = """
from bytescope import memory
from bytescope.memory import Report

def report(size):
    return Report(size, size, {"params": size}, program="jit_step", target={"name": "h200"})

def test_fits(assert_fits):
    assert isinstance(assert_fits(report(1024), budget="1GiB"), Report)
    assert assert_fits(report(1024), "1KiB").peak_bytes == 1024

def test_too_much(assert_fits):
    assert_fits(report(1024), "1023B")

def test_wrong(memory_report, monkeypatch):
    monkeypatch.setattr(memory, "analyze", lambda step, *args, target: report(step(*args)))
    assert memory_report(lambda a, b: a + b, 1000, 24, target="h200").peak_bytes == 1023

def test_mistake(assert_fits):
    assert_fits(len, target="h900")
"""


def run(folder, *words, conftest=""):
    """pytest in a folder of somebody's, as it is started there: (exit code, what it printed)."""
    (folder / "test_theirs.py").write_text(TESTS)
    (folder / "conftest.py").write_text(conftest)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environ)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_failed_test_shows_the_report(tmp_path):
    """With the plugin named by conftest.py as well, as older READMEs said, and found by its entry point or not."""
    code, out = run(tmp_path, conftest=f'pytest_plugins = ["{PLUGIN}"]')
    assert code == 1 and "3 failed, 1 passed" in out, out
    for name in ("test_too_much", "test_wrong"):
        failure = out[out.index(f"_ {name} _") :].partition("short test summary")[0]
        assert "Captured memory call" in failure and "jit_step on h200" in failure and "at the peak" in failure, out
    assert "GuardError" in out and "more than 1023 B" in out
    assert "memory/report/guard.py" not in out.partition("short test summary")[0], (
        "the traceback ends in the user's test"
    )
    assert "unknown target 'h900': did you mean h200" in out and "targets.py" not in out, out
    assert out.count("Captured memory call") == 2, "a test that passes shows nothing"


def test_the_plugin_is_found_by_pytest_and_has_its_modules_name():
    """Else pytest would refuse to load it twice, by its entry point and by `pytest_plugins`."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert declared == {PLUGIN: PLUGIN}


def test_loading_it_brings_nothing_along():
    """It is loaded in every run of pytest of whoever has installed the package."""
    code = (
        f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; "
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('_')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    brought = {name.split("'")[1] for name in found.split(",")}
    assert {"bytescope.memory", PLUGIN} <= brought
    assert {name for name in brought if name.startswith("bytescope")} == {"bytescope", "bytescope.memory", PLUGIN}
    assert not {"jax", "numpy", "rich", "scipy", "jinja2"} & brought


def test_it_has_no_hooks():
    from bytescope.memory import pytest_guard

    assert not [name for name in vars(pytest_guard) if name.startswith("pytest_")]
