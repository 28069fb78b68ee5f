"""The production modules of a tree and what they import of each other, read from the source without importing it."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Module:
    """One file; `name` is its dotted name without the project, such as memory.hlo.module."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


class SourceTree:
    """The production packages of a checkout: its top-level folders with an __init__.py, except tests. Programs in a
    folder named examples are not modules of a package: they import other projects."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.packages = sorted(
            path.parent.name for path in self.root.glob("*/__init__.py") if path.parent.name != "tests"
        )
        self.project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["name"]

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """Name -> module, in the order of the names."""
        modules = {}
        for package in self.packages:
            for path in sorted((self.root / package).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                if "examples" in parts[:-1]:
                    continue
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                modules[name] = Module(name, path)
        return modules

    @cached_property
    def imports(self) -> Mapping[str, frozenset[str]]:
        """Module -> modules of the tree that it imports, inside functions and for type checkers too."""
        return {name: self._imported(module) for name, module in self.modules.items()}

    def _imported(self, module: Module) -> frozenset[str]:
        names = self.imported_names(module)
        return frozenset(filter(None, map(self.own_name, names))) & self.modules.keys() - {module.name}

    def imported_names(self, module: Module) -> Iterable[str]:
        """The full name of every module that a module imports, of this tree or not."""
        waiting: list[ast.AST] = [module.syntax]
        while waiting:
            node = waiting.pop()
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    parents = f"{self.project}.{module.name}".split(".")
                    kept = len(parents) - node.level + module.is_package
                    source = ".".join([*parents[:kept], *filter(None, [source])])
                # `from package import name` imports the submodule of that name if there is one, else the package.
                for alias in node.names:
                    submodule = f"{source}.{alias.name}"
                    yield submodule if self.own_name(submodule) in self.modules else source

    def own_name(self, name: str) -> str:
        """The name without the project, "" for a module of another project."""
        return name.removeprefix(f"{self.project}.") if name.startswith(f"{self.project}.") else ""


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted, in the order of their first nodes."""
    reachable: dict[str, set[str]] = {}
    for start in edges:
        reachable[start], waiting = set(), [start]
        while waiting:
            for node in edges[waiting.pop()]:
                if node not in reachable[start]:
                    reachable[start].add(node)
                    waiting.append(node)
    components = []
    for start in sorted(edges):
        component = sorted(node for node in reachable[start] if start in reachable[node])
        if len(component) > 1 and component[0] == start:
            components.append(component)
    return components
