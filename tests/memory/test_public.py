"""The names of `bytescope.memory`: what importing it costs, what each of them is, and that they stay what they are."""

import ast
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bytescope import memory
from bytescope.memory.records import report_record
from bytescope.memory.records.verdicts import TIGHT_PERCENT

pytestmark = pytest.mark.quick

# All that importing the package may import: itself, and what Python has loaded by then or nearly.
OURS = {"bytescope", "bytescope.memory"}


def in_python(code):
    """What a fresh Python prints, as JSON."""
    command = [sys.executable, "-c", f"import json, sys; {code}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_importing_the_package_imports_nothing_else():
    before, after = in_python(
        "before = list(sys.modules); import importlib, typing; between = list(sys.modules); "
        "import bytescope.memory; print(json.dumps([between, list(sys.modules)]))"
    )
    assert {name for name in set(after) - set(before) if not name.startswith("__")} == OURS


def test_importing_the_package_takes_little_longer_than_python_itself():
    def seconds(code):
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert seconds("import bytescope.memory") < 4 * seconds("pass")


def test_every_public_name_is_what_type_checkers_are_told():
    tree = ast.parse(Path(memory.__file__).read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {alias.name: node.module.removeprefix("bytescope.memory.") for node in told.body for alias in node.names}
    assert found == memory._HOMES
    assert [node.name for node in told.orelse] == ["__getattr__"]  # hidden from them, so that a misspelt name is found
    assert sorted(found) == memory.__all__
    for name in memory.__all__:
        assert getattr(memory, name).__doc__, name
        assert getattr(memory, name).__module__ == f"bytescope.memory.{found[name]}"
    assert set(memory.__all__) <= set(dir(memory)) and "__doc__" in dir(memory)


def test_an_unknown_name_is_an_attribute_error_that_knows_the_names():
    with pytest.raises(AttributeError, match="'bytescope.memory' has no attribute 'analyse'") as caught:
        memory.analyse  # noqa: B018
    assert caught.value.name == "analyse" and "analyze" in dir(caught.value.obj)


def test_no_module_has_the_name_of_a_public_function():
    """Importing a submodule sets it as an attribute of the package, where it would hide the function."""
    folder = Path(memory.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules & set(memory.__all__) == set()


def test_the_public_functions_say_what_they_take():
    for function in (memory.analyze, memory.assert_fits):
        assert "Args:" in function.__doc__ and "Raises" in function.__doc__


@pytest.mark.parametrize(
    "page", ["README.md", "guides/read_the_report.md", "reference/report_json.md", "skills/out-of-memory/SKILL.md"]
)
def test_documents_state_from_which_share_a_verdict_is_tight(page):
    text = (Path(memory.__file__).parent / page).read_text(encoding="utf-8")
    assert f"above {TIGHT_PERCENT}" in text


def test_what_pickled_a_report_finds_it_again():
    """A pickle names the class by its module; the lazy package has to lead there in a fresh process."""
    report = memory.Report(90, 100, {"params": 90, "fragmentation": 10})
    text = pickle.dumps(report).hex()
    assert in_python(
        f"import pickle; found = pickle.loads(bytes.fromhex('{text}')); "
        "print(json.dumps([found.peak_bytes, type(found).__name__]))"
    ) == [90, "Report"]


def test_records_are_the_ones_of_the_record():
    assert issubclass(memory.Report, report_record.ReportRecord) and memory.Buffer is report_record.Buffer
