"""mypy resolves the package by its installed name, and nothing switches it off. `.ci/mypy` checks the whole package."""

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from mypy import api

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "memory", "model", "train")
CALLS_HUMAN = """\
from bytescope.memory import units

def wrong() -> int:
    return units.human(3)

def right() -> str:
    return units.human(3)
"""


def production_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_mypy_knows_the_types_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / "bytescope/memory"
    package.mkdir(parents=True)
    for name in ("units.py", "errors.py"):  # without memory/__init__.py, which imports jax
        shutil.copy(ROOT / "memory" / name, package / name)
    (tmp_path / "caller.py").write_text(CALLS_HUMAN)
    monkeypatch.chdir(tmp_path)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    output, errors, status = api.run([*options, "-m", "caller"])
    assert not errors
    assert status == 1
    assert 'caller.py:4: error: Incompatible return value type (got "str", expected "int")' in output
    assert "Found 1 error in 1 file" in output


def test_the_settings_exempt_only_third_party_packages():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    sections = [settings, *settings["overrides"]]
    for section in sections:
        assert not {"exclude", "ignore_errors", "follow_imports", "disable_error_code", "files"} & section.keys()
    assert "ignore_missing_imports" not in settings
    for section in settings["overrides"]:
        modules = [section["module"]] if isinstance(section["module"], str) else section["module"]
        if section.get("ignore_missing_imports"):
            assert not [module for module in modules if module.startswith(("bytescope", "*"))]


def test_production_code_ignores_only_named_errors():
    for path in production_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "type: ignore" in line or "mypy:" in line:
                reason = re.search(r"# type: ignore\[[a-z-]+(, ?[a-z-]+)*\]  # \S", line)
                assert reason, f"{path.relative_to(ROOT)}:{number}: name the error code and the reason"


def test_no_name_of_production_code_is_another_name_of_any():
    for path in production_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert ast.unparse(node.value) not in ("Any", "typing.Any"), f"{place}: an alias of Any hides it"
