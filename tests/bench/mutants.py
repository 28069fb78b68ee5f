"""Changes one expression of the production code at a time, and counts how many changes the tests notice.

    python tests/bench/mutants.py                             # 60 mutants; minutes to hours
    python tests/bench/mutants.py --count=12 --seed=1 --only=memory/hlo

A mutant is one changed expression: a constant (numbers, True and False), a comparison, a term dropped from a sum or
from `and` and `or`, or two neighbouring arguments of a call swapped. The four kinds take turns, because constants are
most numerous; the first N of a seed are the same for every --count. Expressions in annotations, f-strings, `raise`,
help texts and sums of texts are not drawn.

Each mutant is written to a temporary copy of the tree. There run the tests that import its module, then those of its
folder: memory/hlo/module.py has tests/memory/hlo, memory/analysis.py the files directly in tests/memory, and a folder
without tests those of the nearest folder above. The first failure ends the run. A mutant is left out of the share if
its tests need more than --limit seconds, or if the failed test fails without the mutant, too.

Outcomes are kept in --state, and are read from there by a later call: an interrupted run is continued.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "memory", "model", "train")
KINDS = ("constant", "comparison", "term", "arguments")
OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NOTICED, SURVIVED, LIMIT, UNSOUND = "noticed", "survived", "time limit", "fails anyway"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`name` has file, line, column and both expressions; `start` and `end` are byte offsets in the file."""

    name: str
    path: str
    start: int
    end: int
    after: str


def changed(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yields the kind and the changed expression of each mutant of `node` itself."""
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Compare(ops=[operator]):
            yield "comparison", ast.Compare(node.left, [OTHER_COMPARISON[type(operator)]()], node.comparators)
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not (is_text(node.left) or is_text(node.right)):
            yield "term", node.left
        case ast.BoolOp(values=values):
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield "term", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.Call(args=args) if not any(isinstance(argument, ast.Starred) for argument in args):
            for i in range(len(args) - 1):
                call = ast.Call(node.func, [*args[:i], args[i + 1], args[i], *args[i + 2 :]], node.keywords)
                if ast.dump(call) != ast.dump(node):
                    yield "arguments", call


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions below `node` that may be changed, in the order of the source."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (isinstance(node, ast.keyword) and node.arg == "help"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Raise)):
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """Returns `count` mutants of the files below `only`, or all if there are fewer."""
    found: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if "examples" in path.parts or not name.startswith(only):
            continue
        source = path.read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in expressions(ast.parse(source)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            for kind, expression in changed(node):
                after = ast.unparse(expression)
                title = f"{name}:{node.lineno}:{node.col_offset + 1}  {ast.unparse(node)} -> {after}"
                found[kind].append(Mutant(title, name, start, end, after))
    for kind in KINDS:
        random.Random(f"{seed} {kind}").shuffle(found[kind])
    turns = [found[kind][i] for i in range(count) for kind in KINDS if i < len(found[kind])]
    return turns[:count]


def tests_of(path: str) -> list[str]:
    """Returns the test files and folders of a production file: those that import its module, then its folder."""
    module = Path(path).with_suffix("")
    dotted = r"\.".join(["bytescope", *module.parts])
    parent = r"\.".join(["bytescope", *module.parts[:-1]])
    imports = re.compile(rf"^\s*(from|import) {dotted}\b|^\s*from {parent} import \(?[^)\n]*\b{module.name}\b", re.M)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [file for file in files if not {"bench", "gpu"} & set(file.relative_to(ROOT).parts)]
    importing = [file for file in files if imports.search(file.read_text())]
    folder = next(each for each in (ROOT / "tests" / module).parents if each.is_dir())
    chosen = [*importing, *(file for file in files if file.parent == folder and file not in importing)]
    return [file.relative_to(ROOT).as_posix() for file in chosen]


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
    """Runs tests in the copy `tree`. Returns the outcome and the first failed test, without its parameters."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    command = ["timeout", "--signal=KILL", f"{limit_s}", *pytest]  # ends the processes of tests, too
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'installed'}"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode in (137, -9):
        return LIMIT, ""
    if done.returncode in (0, 5):  # 5: no test was collected
        return SURVIVED, ""
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s[]+)", done.stdout, re.M)
    return NOTICED, failed[1] if failed else ""


def outcome_of(mutant: Mutant, tree: Path, limit_s: float) -> tuple[str, str]:
    """Returns the outcome of a mutant and the test that noticed it."""
    file = tree / mutant.path
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + f"({mutant.after})".encode() + source[mutant.end :])
    outcome, test = run_tests(tree, tests_of(mutant.path), limit_s)
    file.write_bytes(source)
    if test and run_tests(tree, [test], limit_s)[0] == NOTICED:
        outcome = UNSOUND
    return outcome, test


def main() -> int:
    """Prints a row per mutant, then the share that was noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="number of mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default %(default)s)")
    parser.add_argument("--only", default="", metavar="PATH", help="file or folder such as memory/hlo (default: all)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of a mutant (%(default)s)")
    parser.add_argument("--state", type=Path, default=Path("mutants.json"), help="kept outcomes (%(default)s)")
    asked = parser.parse_args()
    kept = json.loads(asked.state.read_text()) if asked.state.exists() else {}
    mutants = draw(asked.count, asked.seed, asked.only)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs"))
        for package in PACKAGES:  # imported before the packages of an installed bytescope
            link = tree / "installed/bytescope" / package
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(tree / package)
        for mutant in mutants:
            if mutant.name not in kept:
                kept[mutant.name] = outcome_of(mutant, tree, asked.limit)
                asked.state.write_text(json.dumps(kept, indent=1) + "\n")
            print(mutant.name, *kept[mutant.name], sep="  ", flush=True)
    outcomes = [kept[mutant.name][0] for mutant in mutants]
    noticed, survived = outcomes.count(NOTICED), outcomes.count(SURVIVED)
    print(f"{noticed} of {noticed + survived} noticed; {len(outcomes) - noticed - survived} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
