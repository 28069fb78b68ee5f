"""Which tests of the default set exercise each subcommand, each key with a table of values, and each public name.

`python tests/bench/coverage_list.py` prints a line for each of them: how many tests, and the first of them. Tests are
read, not run: what counts is what a test function says, and the helpers and fixtures that it uses.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from bytescope import memory
from bytescope.memory import cli
from bytescope.train.config_fields import FIELDS, names_in

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# Oracles that the README's line does not install: tests that need one are skipped there.
NOT_INSTALLED = {"transformers", "peft"}
# Files whose command lines are only parsed, or refused.
ONLY_PARSED = {
    "test_mistakes.py",
    "test_readmes.py",
    "test_gpu_scripts.py",
    "test_config_records.py",
}
# Module with a function for each of these subcommands, of the same name.
COMMAND_LINES = "support.command_line"


def commands() -> list[str]:
    return [name for name, row in cli.COMMANDS.items() if not row.part_of]


def public_names() -> list[str]:
    """The names of `bytescope.memory`, and any other that a README calls on it."""
    pages = (page.read_text(encoding="utf-8") for page in ROOT.rglob("README.md") if ".venv" not in page.parts)
    named = {name for page in pages for name in re.findall(r"\bmemory\.(\w+)\(", page)}
    return sorted({*memory.__all__, *named})


def default_tests() -> Iterator[tuple[str, list[ast.AST]]]:
    """(path::test, what it says) of each test that the README's line runs."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.parent.name in ("gpu", "bench") or path.name in ONLY_PARSED:
            continue
        own = definitions(path)
        for name, node in own.items():
            if name.startswith("test_") and isinstance(node, ast.FunctionDef) and not left_out(node, own):
                yield f"{path.relative_to(ROOT)}::{name}", said(path, name)


def left_out(test: ast.FunctionDef, own: dict[str, ast.AST]) -> bool:
    """Whether the README's line leaves a test out, or skips it."""
    marks = [*test.decorator_list, *([own["pytestmark"]] if "pytestmark" in own else [])]
    text = " ".join(map(ast.unparse, marks))
    oracles = {word for names in re.findall(r"mark\.oracle\(([^)]*)\)", text) for word in re.findall(r"\w+", names)}
    direct = any(ast.unparse(mark) == "pytest.mark.exhaustive" for mark in test.decorator_list)
    return direct or bool(oracles & NOT_INSTALLED)


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Top-level name of a test module -> its definition, or the import that brings it."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {
                name.id: node for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def said(path: Path, name: str) -> list[ast.AST]:
    """The nodes of a definition and of all that it uses, in its module and in tests/support."""
    found: list[ast.AST] = []
    seen, waiting = set(), [(path, name)]
    while waiting:
        where, name = waiting.pop()
        node = definitions(where).get(name)
        if node is None or (where, name) in seen:
            continue
        seen.add((where, name))
        if isinstance(node, ast.ImportFrom):
            support = TESTS / f"{(node.module or '').replace('.', '/')}.py"
            if (node.module or "").startswith("support") and support.exists():
                waiting.append((support, name))
            found.append(node)
            continue
        own = list(walk(node))
        found += own
        for each in own:
            if isinstance(each, ast.Name):
                waiting.append((where, each.id))
            elif isinstance(each, ast.arg):
                waiting.append((where, each.arg))
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all within it but rows that are exhaustive."""
    yield node
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "exhaustive":
        return
    for child in ast.iter_child_nodes(node):
        yield from walk(child)


def commands_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Subcommands that begin a list of arguments, and those whose own `main` is imported."""
    names, found = set(commands()), set()
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant):
            found |= names & {str(node.elts[0].value)}
        elif isinstance(node, ast.ImportFrom) and node.module == COMMAND_LINES:
            found |= {one.name for one in node.names}
    return found


@cache
def choices() -> dict[str, list[str]]:
    """Key with a table of values, one of which must be set -> the values."""
    return {key: names_in(field.choices) for key, field in FIELDS.items() if field.choices and not field.optional}


def values_of(nodes: Iterable[ast.AST], group: str) -> set[tuple[str, str]]:
    """(key, value) of the keys with a table of values, wherever one of these values is given, or the table itself.

    group: keys may be named without it, as the tests of its folder do."""
    tables = {item.partition(":")[2]: key for key in choices() for item in FIELDS[key].choices if ":" in item}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    found.add((str(key.value), str(value.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"([a-z]+\.[a-z_]+)=(\w+)", node.value))
        elif isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Constant):
            found.add((node.arg.replace("__", "."), str(node.value.value)))
        elif isinstance(node, ast.Name) and node.id in tables:
            found |= {(tables[node.id], str(value)) for value in choices()[tables[node.id]]}
    found |= {(f"{group}.{key}", value) for key, value in found}
    return {(key, value) for key, value in found if value in choices().get(key, ())}


def names_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Attributes of the public module, and names that are imported from any module of it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memory":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bytescope.memory"):
            found |= {alias.name for alias in node.names}
    return found


def coverage() -> dict[str, list[str]]:
    """Subject ("command fit", "key batch.mode", "key batch.mode=scan", "name analyze") -> tests of the default set."""
    found: dict[str, list[str]] = {f"command {name}": [] for name in commands()}
    for key, table in choices().items():
        found |= {f"key {key}": [], **{f"key {key}={value}": [] for value in table}}
    found |= {f"name {name}": [] for name in public_names()}
    for test, nodes in default_tests():
        subjects = {f"command {name}" for name in commands_of(nodes)} | {f"name {name}" for name in names_of(nodes)}
        for key, value in values_of(nodes, Path(test.partition("::")[0]).parent.name):
            subjects |= {f"key {key}", f"key {key}={value}"}
        for subject in subjects & set(found):
            found[subject].append(test)
    return found


def main() -> None:
    for subject, tests in coverage().items():
        print(f"{len(tests):5}  {subject:40} {tests[0] if tests else '-'}")


if __name__ == "__main__":
    main()
