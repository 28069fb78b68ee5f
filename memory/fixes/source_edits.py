"""Changes Python source at the positions of its syntax tree, and writes the changes as a unified diff.

Only source that is literal is changed: a tuple of argument numbers, a list of names, a decorator. A function returns no
edit if the value is computed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

DONATE = "donate_argnums"
# Names of functions that make a remat policy from checkpoint names.
_POLICY = re.compile(r"(save|offload)\w*(names|_these)\w*$")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement of text in a source file.

    Fields:
        start, end: positions of the replaced text in the file's bytes; equal if text is inserted.
        text: the new text.
    """

    start: int
    end: int
    text: str


class SourceFile:
    """A parsed source file, for which edits are made.

    Raises OSError if the file cannot be read, and ValueError if it is not UTF-8 or not Python.
    """

    def __init__(self, path: Path):
        self.path = path
        self.data = path.read_bytes()
        self.text = self.data.decode("utf-8")
        try:
            self.tree = ast.parse(self.data)
        except SyntaxError as error:
            raise ValueError(f"{path} is not Python: {error.msg} in line {error.lineno}") from error
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Returns the positions in the file's bytes at which a node begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def line_start(self, line: int) -> int:
        """Returns the position at which a line begins. Lines are counted from 1."""
        return self._starts[line - 1]

    def donate(self, function: str, numbers: Sequence[int]) -> list[Edit]:
        """Returns the edit that donates arguments of the step that a function returns: in its options, in the only call
        of jax.jit inside the function, or as new options. [] if the source has none of these forms.

        function: name of the function that returns the program. numbers: positions of the arguments, from 0.
        """
        bodies = self._functions(function)
        if not bodies:
            return []
        body = bodies[0]
        for node in ast.walk(body):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                return self._donate_in_options(node.value, numbers)
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call) and _name_of(node.func) == "jit"]
        if len(calls) != 1 or any(keyword.arg is None for keyword in calls[0].keywords):
            return []
        keyword = next((keyword for keyword in calls[0].keywords if keyword.arg == DONATE), None)
        if keyword is not None:
            return self._merge_numbers(keyword.value, numbers)
        end = self.span(calls[0])[1] - 1
        return [Edit(end, end, f", {DONATE}={_tuple_text(numbers)}")]

    def _donate_in_options(self, result: ast.Tuple, numbers: Sequence[int]) -> list[Edit]:
        if len(result.elts) == 2:
            end = self.span(result.elts[1])[1]
            return [Edit(end, end, f', {{"{DONATE}": {_tuple_text(numbers)}}}')]
        options = result.elts[2] if len(result.elts) == 3 else None
        if not isinstance(options, ast.Dict):
            return []
        for key, value in zip(options.keys, options.values):
            if isinstance(key, ast.Constant) and key.value == DONATE:
                return self._merge_numbers(value, numbers)
        start = self.span(options)[0] + 1
        return [Edit(start, start, f'"{DONATE}": {_tuple_text(numbers)}{", " if options.keys else ""}')]

    def _merge_numbers(self, node: ast.expr, numbers: Sequence[int]) -> list[Edit]:
        try:
            given = ast.literal_eval(node)
        except ValueError:
            return []
        known = given if isinstance(given, (tuple, list)) else (given,)
        if not all(isinstance(number, int) for number in known):
            return []
        return [Edit(*self.span(node), _tuple_text(sorted({*known, *numbers})))]

    def rename(self, old: str, new: str) -> list[Edit]:
        """Returns the edit that replaces a name in the only call of a names policy with this literal; [] if no call or
        several calls have it."""
        found = [
            node
            for call in self._policies()
            for node in ast.walk(call)
            if isinstance(node, ast.Constant) and node.value == old
        ]
        return [Edit(*self.span(found[0]), _quoted(self, found[0], new))] if len(found) == 1 else []

    def checkpoint(self, function: str) -> list[Edit]:
        """Returns the edit that decorates a function with jax.checkpoint; [] if the file has no such function or
        several of them, or does not import jax under its own name.

        function: the function's qualified name, such as "loss.<locals>.layer".
        """
        name = function.rsplit(".", 1)[-1]
        found = self._functions(name)
        if len(found) != 1 or not self._imports("jax"):
            return []
        first = min([found[0].lineno, *(decorator.lineno for decorator in found[0].decorator_list)])
        start = self.line_start(first)
        return [Edit(start, start, f"{' ' * found[0].col_offset}@jax.checkpoint\n")]

    def prevent_cse(self, function: str) -> list[Edit]:
        """Returns the edits that replace prevent_cse=False by True in the calls that checkpoint a function; [] if there
        are none.

        function: name of the function that is passed to jax.checkpoint.
        """
        edits = []
        for call in ast.walk(self.tree):
            if not isinstance(call, ast.Call) or not call.args or _name_of(call.args[0]) != function:
                continue
            for keyword in call.keywords:
                value = keyword.value
                if keyword.arg == "prevent_cse" and isinstance(value, ast.Constant) and value.value is False:
                    edits.append(Edit(*self.span(value), "True"))
        return edits

    def _imports(self, module: str) -> bool:
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.Import))
        return any(
            alias.asname is None and alias.name.partition(".")[0] == module for i in imports for alias in i.names
        )

    def _functions(self, name: str) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]

    def _policies(self) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _POLICY.match(_name_of(node.func)):
                yield node


def changed_text(source: SourceFile, edits: Iterable[Edit]) -> str:
    """Returns the text of a file after its edits, which must not overlap."""
    data = source.data
    for edit in sorted(edits, key=lambda edit: -edit.start):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode("utf-8")


def unified_diff(changed: Mapping[Path, str], folder: Path) -> str:
    """Returns changed files as a patch that `git apply` accepts in `folder`.

    changed: path of a file -> its new text. Files outside of the folder are named by their whole path.
    """
    parts = []
    for path, new in changed.items():
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
        old = path.read_bytes().decode("utf-8")
        lines = difflib.unified_diff(_git_lines(old), _git_lines(new), f"a/{name}", f"b/{name}")
        for line in lines:
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _git_lines(text: str) -> list[str]:
    """The lines of a text as git counts them: only a line feed ends a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _is_text(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _tuple_text(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))}{',' * (len(numbers) == 1)})"


def _quoted(source: SourceFile, node: ast.expr, new: str) -> str:
    """The new name in the quotes of the old one."""
    old = ast.get_source_segment(source.text, node) or '"'
    return f"{old[0]}{new}{old[0]}" if old[0] in "\"'" else repr(new)
