"""The house: which room may import which, no circles, and an install that has every room."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bytescope.train.config_fields import FIELDS, REMOVED
from support import layers
from support.import_graph import SourceTree, circles, room_of

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
TREE = SourceTree(ROOT)


def test_every_import_of_this_project_exists():
    for module in TREE.modules.values():
        for name in TREE.imported_names(module):
            assert name.split(".")[0] not in TREE.packages, f"{module.name} imports {name} outside {TREE.project}"
            if name.startswith(f"{TREE.project}."):
                assert TREE.own_name(name) in TREE.modules, f"{module.name} imports {name}, which does not exist"


def test_packages_and_layers_import_one_way():
    declared = layers.declared()
    layered = {room_of(name) for name in TREE.modules if name.split(".")[0] in layers.LAYERS}
    assert layered == declared, "tests/support/layers.py names each sub-package once"
    wrong = [
        f"{name} imports {other}"
        for name, imported in TREE.imports.items()
        for other in imported
        if not layers.may_import(name, other)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_modules_and_folders_import_without_circles():
    assert not circles({name: set(imported) for name, imported in TREE.imports.items()})
    folders: dict[str, set[str]] = {}
    for name, imported in TREE.imports.items():
        own = folder_of(name)
        folders.setdefault(own, set())
        for other in imported:
            if folder_of(other) != own and (name, other) not in layers.EXCEPTIONS:
                folders[own].add(folder_of(other))
    assert not circles(folders)


def folder_of(name: str) -> str:
    """Returns the folder of a module; a package, or a module directly under one, stands for itself."""
    parent = name.rpartition(".")[0]
    if TREE.modules[name].is_package or parent in TREE.packages:
        return name
    return parent


def test_every_room_says_what_it_is_for():
    for path in (module.path for module in TREE.modules.values() if module.is_package):
        tree = ast.parse(path.read_text())
        words = (ast.get_docstring(tree) or "").split()
        assert len(words) >= 10, f"{path.relative_to(ROOT)}: what comes in, what goes out, where to start"
        if path.parent.parent != ROOT:
            assert len(tree.body) == 1, f"{path.relative_to(ROOT)} holds more than its docstring"


def test_the_install_has_every_room():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {
        "bytescope." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in TREE.packages
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(on_disk)
    holding = {module.path.parent for module in TREE.modules.values()}
    assert all((folder / "__init__.py").exists() for folder in holding)


def test_the_library_imports_neither_jax_nor_what_draws():
    code = (
        "import sys; from bytescope import memory; memory.analyze, memory.assert_fits; "
        "print([name for name in ('jax', 'rich', 'pytest', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_front_lists_without_jax():
    code = """
import sys
from bytescope.memory.devices import platform, targets
from bytescope.memory import cli
targets.parse("h200:8").limit_bytes
platform.choose_platform()
for words in ("list configs", "list targets", "list keys", "--help", "estimate gpt:7b"):
    assert cli.main(words.split()) == 0, words
try:
    cli.main(["prepare", "--help"])
except SystemExit:
    print("jax" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("\nFalse\n")


def test_a_class_name_is_used_once():
    files: dict[str, list[str]] = {}
    for name, module in TREE.modules.items():
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in files.items() if len(modules) > 1}


def test_one_module_reads_and_sets_environment_variables():
    users = {
        name
        for name, module in TREE.modules.items()
        for node in ast.walk(module.syntax)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and ast.unparse(node.value) == "os"
    }
    beside = {"memory.compare.patched_program", "memory.compare.row_cache", "memory.compare.worker_pool"}
    assert users == {"memory.environment", "memory.view.console", *beside}


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


def test_memory_names_no_key_of_the_trainer():
    """No string in memory/ is a dotted key of configs/base.py, or the prefix of a group of them."""
    keys = {key for key in FIELDS if "." in key}
    forbidden = keys | {key.split(".")[0] + "." for key in keys}
    for name, module in TREE.modules.items():
        if name.split(".")[0] != "memory":
            continue
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in forbidden, f"{name}:{node.lineno} has {node.value!r}"


def test_keys_named_in_train_exist():
    """Every string in train/ that looks like a config key is one: a renamed key fails here."""
    known = {*FIELDS, *REMOVED, "model.safetensors"}
    groups = {key.split(".")[0] for key in FIELDS}
    for name, module in TREE.modules.items():
        if not name.startswith("train."):
            continue
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                group, _, key = node.value.partition(".")
                if group in groups and key.isidentifier():
                    assert node.value in known, f"{name}:{node.lineno} has {node.value!r}"
