"""Counts that describe the structure of the source: sizes, fragments, names used twice, import circles, layers.

    python tests/bench/structure.py                          # this tree
    python tests/bench/structure.py ../before .              # two trees side by side, with the change
    python tests/bench/structure.py --list "import circles"  # the entries behind each count whose title contains this
    python tests/bench/structure.py --mypy --collect --start --json=structure.json
    python tests/bench/structure.py --tree                   # rewrite the generated lists in memory/ARCHITECTURE.md

Production code is every top-level package except tests. A room is a sub-package directly under a package, or a module
at the top of a package; layers and circles between folders are those of rooms. The layers are declared in the tree's
own tests/support/layers.py; a tree without this file is measured by the declaration of this tree. Imports inside
functions and for type checkers count.

--mypy, --collect and --start run the tree in this interpreter, whichever checkout is installed in it.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.import_graph import Module, SourceTree, circles, room_of

ROOT = Path(__file__).parents[2]
LAYERS = Path("tests", "support", "layers.py")
# The page with two generated lists, each between two markers.
PAGE = ROOT / "memory" / "ARCHITECTURE.md"
MARKERS = {
    name: (f"<!-- {name}: python tests/bench/structure.py --tree -->", f"<!-- end of the {name} -->")
    for name in ("layers", "tree")
}
# Title -> a number, the entries that are counted, or why there is no figure.
Figures = dict[str, int | float | list[str] | str]


def measure(tree: SourceTree) -> Figures:
    """Every figure that needs the source only."""
    return {
        **sizes(tree),
        **fragments(tree),
        **repeated_names(tree),
        **import_figures(tree),
        **config_figures(tree),
        **record_figures(tree),
        **sizes_of_tests(tree),
    }


def sizes(tree: SourceTree) -> Figures:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    total_statements, lengths, function_statements = 0, [], []
    for module in tree.modules.values():
        files[module.package] += 1
        lines[module.package] += len(module.text.splitlines())
        total_statements += statements(module.syntax)
        lengths += [node.end_lineno - node.lineno + 1 for node in functions(module)]
        function_statements += [statements(node) for node in functions(module)]
    return {
        "production files": files.total(),
        **{f"{package}/ files": files[package] for package in tree.packages},
        "production lines": lines.total(),
        **{f"{package}/ lines": lines[package] for package in tree.packages},
        "sub-packages": [name for name, module in tree.modules.items() if module.is_package and "." in name],
        "production statements": total_statements,
        "functions": len(lengths),
        "lines per function, mean": mean(lengths),
        "statements per function, mean": mean(function_statements),
    }


def mean(values: Sequence[int]) -> float:
    return round(sum(values) / max(len(values), 1), 2)


def statements(node: ast.AST) -> int:
    """Statements inside a node, docstrings excluded: the formatter changes lines, and does not change this count."""
    inside = [each for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node]
    return sum(not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)) for each in inside)


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.syntax) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def fragments(tree: SourceTree) -> Figures:
    """Small folders, and files that only one other file of their folder imports."""
    folders: dict[Path, list[str]] = defaultdict(list)
    for module in tree.modules.values():
        folders[module.path.parent] += [] if module.is_package else [module.path.name]
    small = [
        f"{folder.relative_to(tree.root)}: {', '.join(names)}" for folder, names in folders.items() if len(names) <= 2
    ]
    importers: dict[str, list[str]] = defaultdict(list)
    for name, imported in tree.imports.items():
        for other in imported:
            importers[other].append(name)
    single = []
    for name, module in tree.modules.items():
        if len(importers[name]) == 1 and not module.is_package:
            importer = tree.modules[importers[name][0]]
            if importer.path.parent == module.path.parent:
                single.append(f"{name} by {importer.name}")
    return {"folders of at most two files": small, "files with one importer, in their own folder": single}


def repeated_names(tree: SourceTree) -> Figures:
    files: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for name, module in tree.modules.items():
        files[module.path.name].append(name)
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    for usual in ("__init__.py", "__main__.py"):
        files.pop(usual, None)

    def repeated(places: Mapping[str, list[str]]) -> list[str]:
        return [f"{name}: {', '.join(modules)}" for name, modules in sorted(places.items()) if len(modules) > 1]

    return {"file names used more than once": repeated(files), "class names used more than once": repeated(classes)}


def import_figures(tree: SourceTree) -> Figures:
    rooms = tree.room_imports()
    module_circles, room_circles = circles(tree.imports), circles(rooms)
    mutual = [f"{room} - {other}" for room in rooms for other in rooms[room] if room < other and room in rooms[other]]
    declaration = tree.root / LAYERS
    layers = runpy.run_path(str(declaration if declaration.is_file() else ROOT / LAYERS))
    against, undeclared = [], set()
    for name, imported in tree.imports.items():
        for other in imported:
            allowed = layers["may_import"](name, other)
            if allowed is None:
                undeclared |= {room for room in (room_of(name), room_of(other)) if room not in layers["declared"]()}
            elif not allowed:
                against.append(f"{name} imports {other}")
    return {
        "import circles between modules": [" - ".join(component) for component in module_circles],
        "modules in import circles": sum(map(len, module_circles)),
        "import circles between folders": [" - ".join(component) for component in room_circles],
        "folders in import circles": sum(map(len, room_circles)),
        "pairs of folders that import each other": sorted(mutual),
        "imports against the layers": sorted(against),
        "folders without a layer": sorted(undeclared),
    }


def config_figures(tree: SourceTree) -> Figures:
    """Where the trainer passes a whole config on, and where memory/ spells a key of it."""
    parameters = []
    for name, module in tree.modules.items():
        for node in functions(module) if module.package == "train" else ():
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                if argument.annotation and "ConfigDict" in ast.unparse(argument.annotation):
                    parameters.append(f"{name}.{node.name}({argument.arg})")
    keys = config_keys(tree.root / "configs" / "base.py")
    spelled = []
    for name, module in tree.modules.items():
        for node in ast.walk(module.syntax) if module.package == "memory" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in keys:
                spelled.append(f"{name}:{node.lineno} {node.value}")
    return {"ConfigDict parameters in train/": parameters, "config keys spelled in memory/": spelled}


def config_keys(base: Path) -> set[str]:
    """The dotted keys of a base config, and the prefix of each group, such as `model.`."""
    if not base.is_file():
        return set()
    keys: set[str] = set()

    def collect(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                keys.add(f"{prefix}{name}.")
                collect(value, f"{prefix}{name}.")
            elif prefix:
                keys.add(f"{prefix}{name}")

    collect(runpy.run_path(str(base))["get_config"]().to_dict(), "")
    return keys


def record_figures(tree: SourceTree) -> Figures:
    """Calls that copy a dataclass with other fields, and functions in which one copy is copied again."""
    calls, chains = [], []
    for name, module in tree.modules.items():
        calls += [f"{name}:{node.lineno}" for node in ast.walk(module.syntax) if _is_replace(node)]
        for function in functions(module):
            copies = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and _is_replace(node.value)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            replaced = [_replaced(node) for node in ast.walk(function) if _is_replace(node)]
            if any(_is_replace(value) or (isinstance(value, ast.Name) and value.id in copies) for value in replaced):
                chains.append(f"{name}.{function.name}")
    return {"dataclasses.replace calls": calls, "functions that chain them": chains}


def _is_replace(node: ast.AST) -> bool:
    """Whether a node is dataclasses.replace(record, ...) or record.replace(field=...)."""
    if not isinstance(node, ast.Call) or not node.keywords:
        return False
    return _replaced(node) is not None


def _replaced(call: ast.Call) -> ast.expr | None:
    """The record that a call named `replace` copies; None for another call, such as str.replace."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "replace":
        if not call.args:
            return function.value
        of_module = isinstance(function.value, ast.Name) and function.value.id in ("dataclasses", "copy")
        return call.args[0] if of_module else None
    return call.args[0] if isinstance(function, ast.Name) and function.id == "replace" and call.args else None


def sizes_of_tests(tree: SourceTree) -> Figures:
    files = sorted((tree.root / "tests").rglob("*.py"))
    return {
        "test files": len(files),
        "test_*.py files": sum(path.name.startswith("test_") for path in files),
        "test lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
    }


# ---- figures for which the tree is run


@contextlib.contextmanager
def importable(tree: SourceTree) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder in which the tree's packages lie under the project's name, and the environment that imports them."""
    with tempfile.TemporaryDirectory(prefix="structure-") as folder:
        project = Path(folder, tree.project)
        project.mkdir()
        for package in tree.packages:
            (project / package).symlink_to(tree.root / package)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield Path(folder), {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def mypy_errors(tree: SourceTree) -> Figures:
    title = "mypy errors"
    with importable(tree) as (folder, env):
        del env["PYTHONPATH"]  # mypy refuses a path that it also finds as the current folder
        command = [sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}", "-p", tree.project]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    summary = done.stdout.strip().rpartition("\n")[2]
    if found := re.match(r"Found (\d+) errors? in (\d+) files?", summary):
        return {title: int(found[1]), "files with mypy errors": int(found[2])}
    if summary.startswith("Success"):
        return {title: 0, "files with mypy errors": 0}
    return {title: (done.stderr.strip() or summary or "no output").rpartition("\n")[2]}


def collected_tests(tree: SourceTree) -> Figures:
    with importable(tree) as (_, env):
        # As quiet as this, pytest prints a line `file: count` for each test file. -m "": tests of every mark.
        options = ["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "tests"]
        done = subprocess.run(command, cwd=tree.root, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"tests": (done.stdout + done.stderr).strip().rpartition("\n")[2] or "no output"}
    return {"tests": sum(int(count) for count in re.findall(r"^tests/\S+: (\d+)$", done.stdout, flags=re.M))}


FEW_STEPS = ("--config.train.steps=2", "--config.train.eval_sequences=8", "--config.train.sample_tokens=0")


def files_before_the_first_step(tree: SourceTree) -> Figures:
    """Runs `train tiny` up to its first call of a compiled function. Files count that are imported on the way, too."""
    title = "files executed from main to the first step"
    with importable(tree) as (folder, env):
        result = folder / "start.json"
        command = [sys.executable, __file__, "--record-start", str(result)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if not result.is_file():
            reason = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
            return {title: f"exit code {done.returncode}: {reason}"}
        recorded = json.loads(result.read_text())
    return {
        title: recorded["executed"],
        "files with a function called on the way": recorded["called"],
        "functions called on the way": recorded["functions"],
        "first call of a compiled function": recorded["at"],
    }


def record_start(result: Path) -> None:
    """Trains in this process and records what is executed from `main` to the first call of a compiled function.

    The process ends at this call.
    """
    import jax.stages

    from bytescope.train import cli

    project = str(result.parent / "bytescope") + os.sep
    call_of_compiled = jax.stages.Compiled.__call__.__code__
    executed, functions_called = set(), set()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(project):
            executed.add(code.co_filename)
            if code.co_flags & 0x1:  # CO_OPTIMIZED: a function, not the body of a module or of a class
                functions_called.add(code)
            return
        caller = frame.f_back.f_code if frame.f_back else code
        if code is call_of_compiled and caller.co_filename.startswith(project):
            called = {code.co_filename for code in functions_called}
            record = {
                "executed": sorted(path.removeprefix(project) for path in executed),
                "called": sorted(path.removeprefix(project) for path in called),
                "functions": len(functions_called),
                "at": f"{caller.co_filename.removeprefix(project)}:{caller.co_name}",
            }
            result.write_text(json.dumps(record))
            os._exit(0)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    sys.exit(cli.main(["train", "tiny", f"--workdir={result.parent / 'run'}", *FEW_STEPS]))


# ---- the generated lists of the architecture page


def folder_tree(tree: SourceTree, page: Path) -> str:
    """A nested list with a line for each folder: a link from the page, and the first sentence of its docstring."""
    lines = []
    for name, module in tree.modules.items():
        if module.is_package:
            folder = module.path.parent
            paragraph = (ast.get_docstring(module.syntax) or "").partition("\n\n")[0]
            sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraph.split()))[0].rstrip(".")
            link = os.path.relpath(folder, page.parent)
            lines.append(f"{'  ' * name.count('.')}- [{folder.name}/]({link}): {sentence}")
    return "\n".join(lines)


def layer_block(layers: Mapping[str, Any]) -> str:
    """A block with the imports of each package, and its layers from the lowest up."""
    lines = []
    for package, allowed in layers["PACKAGES"].items():
        lines.append(f"{package:<9}imports {', '.join(sorted(allowed - {package})) or 'no other package'}")
        # The room of a package's own __init__.py has the name of the package.
        names = [
            [room.partition(".")[2] or "__init__" for room in layer] for layer in layers["LAYERS"].get(package, ())
        ]
        joined = " < ".join(", ".join(layer) for layer in names)
        lines += textwrap.wrap(joined, 118, initial_indent=" " * 9, subsequent_indent=" " * 9, break_on_hyphens=False)
    return "\n".join(["```", *lines, "```"])


def architecture_page() -> str:
    """The text of the architecture page with the lists that this tree has now."""
    tree = SourceTree(ROOT)
    lists = {"layers": layer_block(runpy.run_path(str(ROOT / LAYERS))), "tree": folder_tree(tree, PAGE)}
    text = PAGE.read_text(encoding="utf-8")
    for name, (begin, end) in MARKERS.items():
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{PAGE} has no place for the {name}: put the lines {begin} and {end} into it")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{lists[name]}\n\n{end}{rest.partition(end)[2]}"
    return text


# ---- what is printed


def as_table(columns: Mapping[str, Figures]) -> str:
    """Titles and figures in aligned columns; for two trees the change in a last one."""
    titles = list(dict.fromkeys(title for figures in columns.values() for title in figures))
    rows = [["", *columns, *(["change"] if len(columns) == 2 else [])]]
    for title in titles:
        values = [_count(figures.get(title)) for figures in columns.values()]
        row = [title, *(_shown(value) for value in values)]
        if len(columns) == 2:
            numbers = all(isinstance(value, int | float) for value in values)
            row.append(f"{values[1] - values[0]:+,.10g}" if numbers else "")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)).rstrip()
        for row in rows
    )


def _count(value: Any) -> int | float | str | None:
    return len(value) if isinstance(value, list) else value


def _shown(value: int | float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}"


def as_lists(columns: Mapping[str, Figures], words: str) -> str:
    """The entries behind each count whose title contains the words."""
    lines = []
    for column, figures in columns.items():
        for title, value in figures.items():
            if words.lower() in title.lower() and isinstance(value, list):
                lines += ["", f"{column}: {title}: {len(value)}", *(f"  {entry}" for entry in value)]
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="one checkout, or two: before and after")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure with its entries there")
    parser.add_argument("--list", metavar="WORDS", help="print the entries of the counts whose title contains WORDS")
    parser.add_argument("--mypy", action="store_true", help="count mypy's errors, with this tree's pyproject.toml")
    parser.add_argument("--collect", action="store_true", help="count the tests that pytest collects")
    parser.add_argument("--start", action="store_true", help="train tiny up to its first step, and count the files")
    parser.add_argument("--tree", action="store_true", help=f"rewrite the generated lists in {PAGE.relative_to(ROOT)}")
    parser.add_argument("--record-start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if len(args.trees) > 2:
        parser.error(f"{len(args.trees)} trees: give one, or two to compare")
    for path in args.trees:
        if not (path / "pyproject.toml").is_file():
            parser.error(f"{path} has no pyproject.toml: give the root of a checkout")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.record_start:
        record_start(args.record_start)
    if args.tree:
        PAGE.write_text(architecture_page(), encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} written")
        return 0
    paths = args.trees or [ROOT]
    columns: dict[str, Figures] = {}
    for column, path in zip(("before", "after") if len(paths) == 2 else ("this tree",), paths, strict=True):
        tree = SourceTree(path)
        figures = columns[column] = measure(tree)
        if args.collect:
            figures |= collected_tests(tree)
        if args.mypy:
            figures |= mypy_errors(tree)
        if args.start:
            figures |= files_before_the_first_step(tree)
    print(as_table(columns))
    if args.list:
        print(as_lists(columns, args.list))
    if args.json:
        args.json.write_text(json.dumps(columns, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
