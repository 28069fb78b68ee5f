"""The house: which room may import which, no circles, and an install that has every room."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from bytescope import memory

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "memory", "model", "train")
# Rooms of memory/ from the lowest floor up; rooms of one floor may not import each other.
FLOORS = (
    ("memory.errors", "memory.units", "memory.config_keys", "memory.files", "memory.jaxprs"),
    ("memory.records",),
    ("memory.pipeline",),
    ("memory.hlo", "memory.formulas"),
    ("memory.devices",),
    ("memory.program",),
    ("memory.peak",),
    ("memory.cost",),
    ("memory.seconds",),
    ("memory.remat", "memory.findings"),
    ("memory.analysis",),
    ("memory.view",),
    ("memory.report",),
    ("memory.watching", "memory.profile"),
    ("memory.compare",),
    ("memory",),
    ("memory.pytest_guard",),
    ("memory.commands",),
    ("memory.__main__",),
)
# Of the lowest floor, modules that may import these of their own floor.
BELOW = {"memory.units": {"memory.errors"}}
# What the packages may import of each other; memory's __main__ alone reaches the trainer's adapter.
ALLOWED = {"configs": {"configs"}, "model": {"model"}, "memory": {"memory"}, "train": set(PACKAGES)}


@cache
def modules() -> dict[str, Path]:
    """Dotted name without `bytescope.` -> file."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Modules of ours that a module imports anywhere in it, those for type checkers alone left out."""
    tree = ast.parse(modules()[name].read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {full if full.removeprefix("bytescope.") in modules() else node.module for full in whole}
    if name == "memory":  # its names are fetched at their first use
        found |= {f"bytescope.memory.{home}" for home in memory._HOMES.values()}
    ours = {module.removeprefix("bytescope.") for module in found if module.startswith("bytescope.")}
    assert ours <= set(modules()), f"{name} imports {ours - set(modules())}, which does not exist"
    assert not {module for module in found if module.split(".")[0] in PACKAGES}, f"{name} imports outside bytescope"
    return frozenset(ours - {name})


def room(name: str) -> str:
    """The room of a module of memory/: its folder, or the module itself at the top."""
    return ".".join(name.split(".")[:2])


def test_packages_import_one_way():
    for name in modules():
        for other in imports(name):
            if (name, other) == ("memory.__main__", "train.plan.adapter"):
                continue
            package = name.split(".")[0]
            assert other.split(".")[0] in ALLOWED[package], f"{name} imports {other}"


def test_rooms_of_memory_import_the_floors_below():
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    assert {room(name) for name in modules() if name.startswith("memory")} == set(floor)
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        if name.startswith("memory")
        for other in imports(name)
        if other.startswith("memory")
        and room(other) != room(name)
        and floor[room(other)] >= floor[room(name)]
        and other not in BELOW.get(name, ())
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circles():
    done, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(imports(name)):
                visit(other)
            done.add(path.pop())

    for name in sorted(modules()):
        visit(name)
    assert done == set(modules())


def test_every_room_says_what_it_is_for():
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")):
        tree = ast.parse(path.read_text())
        words = (ast.get_docstring(tree) or "").split()
        assert len(words) >= 10, f"{path.relative_to(ROOT)}: what comes in, what goes out, where to start"
        if path.parent.parent != ROOT:
            assert len(tree.body) == 1, f"{path.relative_to(ROOT)} holds more than its docstring"


def test_the_install_has_every_room():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {
        "bytescope." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(on_disk)
    holding = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in holding)


def test_the_library_imports_neither_jax_nor_what_draws():
    code = (
        "import sys; from bytescope import memory; memory.analyze, memory.assert_fits; "
        "print([name for name in ('jax', 'rich', 'pytest', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_front_lists_without_jax():
    code = (
        "import sys; from bytescope.train import cli; cli.main(['configs']); cli.main(['targets']); "
        "cli.main(['keys']); cli.main(['--help']); print('jax' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("\nFalse\n")


def test_no_test_imports_a_test():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            assert not any(part.startswith("test_") for name in names for part in name.split(".")), path


def test_config_keys_stand_in_one_module_of_memory():
    """And each of them is a key of configs/base.py: a renamed key fails here."""
    from bytescope.configs import base
    from bytescope.memory import config_keys
    from bytescope.train.program.config_files import flatten

    keys = set(flatten(base.get_config()))
    named = {name: value for name, value in vars(config_keys).items() if name.isupper()}
    groups = {key.split(".")[0] + "." for key in keys if "." in key}
    assert {value for value in named.values() if not value.endswith(".")} <= keys
    assert {value for value in named.values() if value.endswith(".")} <= groups
    for name, path in modules().items():
        if name.startswith("memory") and name != "memory.config_keys":
            literals = [
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and node.value in keys | groups
            ]
            assert not literals, f"{name} has {literals}: memory/config_keys.py names them"
