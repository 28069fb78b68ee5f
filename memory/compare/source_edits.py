"""Changes Python source text at the positions of its syntax tree. No file is written.

Only literal values are changed: a tuple of argument numbers, a list of checkpoint names, a keyword argument. If the
program computes the value, no edit is returned. In addition, a decorator `@jax.checkpoint` can be added.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

DONATE = "donate_argnums"
# Names of functions that make a remat policy from checkpoint names.
_POLICY = re.compile(r"(save|offload)\w*(names|_these)\w*$")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement of text in a source file.

    Fields:
        start, end: the bytes [start, end) of the file are replaced. For an insertion, start is equal to end.
        text: the new text.
    """

    start: int
    end: int
    text: str


class SourceFile:
    """A parsed Python file, with methods that return edits of the file. No method changes the file on disk.

    Raises OSError if the file cannot be read, and ValueError if it is not UTF-8 or not valid Python.
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
        """Returns the byte offsets in the file at which a syntax node begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def donate(self, function: str, numbers: Sequence[int]) -> list[Edit]:
        """Returns the edit that donates arguments of a step, as a list of one Edit. The step is returned by a user's
        function, as (step, arguments), (step, arguments, options) or jax.jit(step). The edit writes `donate_argnums`
        into the dict of options, or into the only call of jax.jit in the function; arguments that are donated already
        stay donated. Returns [] if the source of the function has none of these forms.

        Args:
            function: name of the user's function that returns the step.
            numbers: positions of the arguments in a call of the step, starting at 0.
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
        """Returns the edit that replaces the checkpoint name `old` by `new` in a call that makes a remat policy, such
        as save_only_these_names("old") or save_and_offload_only_these_names(names_which_can_be_offloaded=["old"], ...),
        as a list of one Edit. Returns [] unless the string literal occurs exactly once in such calls of the file, and
        if the call contains `new` already: jax refuses a name that is both saved and offloaded."""
        found = [
            (call, node)
            for call in self._policies()
            for node in ast.walk(call)
            if isinstance(node, ast.Constant) and node.value == old
        ]
        if len(found) != 1:
            return []
        call, node = found[0]
        if any(isinstance(other, ast.Constant) and other.value == new for other in ast.walk(call)):
            return []
        return [Edit(*self.span(node), _quoted(self, node, new))]

    def save_on_device(self, name: str) -> list[Edit]:
        """Returns the edits that move a checkpoint name from the names that a remat policy offloads to the names that
        it saves: the lists `names_which_can_be_offloaded` and `names_which_can_be_saved` in the only call of
        save_and_offload_only_these_names that offloads the name. Returns [] if no call or several calls offload the
        name, or if one of the two lists is not a literal."""
        found = []
        for call in self._policies():
            lists = {keyword.arg: keyword.value for keyword in call.keywords}
            saved, offloaded = lists.get("names_which_can_be_saved"), lists.get("names_which_can_be_offloaded")
            texts = [_literal_texts(node) for node in (saved, offloaded)]
            if saved is not None and offloaded is not None and None not in texts and name in (texts[1] or ()):
                found.append(
                    (saved, offloaded, [*(texts[0] or ()), name], [each for each in texts[1] or () if each != name])
                )
        if len(found) != 1:
            return []
        saved, offloaded, kept, moved = found[0]
        return [
            Edit(*self.span(node), f"[{', '.join(json.dumps(text, ensure_ascii=False) for text in texts)}]")
            for node, texts in ((saved, kept), (offloaded, moved))
        ]

    def checkpoint(self, function: str) -> list[Edit]:
        """Returns the edit that adds the decorator @jax.checkpoint to a function, as a list of one Edit. Returns [] if
        the file has no function of this name or several of them, or if the file has no `import jax`.

        function: the function's qualified name, such as "loss.<locals>.layer".
        """
        name = function.rsplit(".", 1)[-1]
        found = self._functions(name)
        if len(found) != 1 or not self._imports("jax"):
            return []
        first = min([found[0].lineno, *(decorator.lineno for decorator in found[0].decorator_list)])
        start = self._starts[first - 1]
        return [Edit(start, start, f"{' ' * found[0].col_offset}@jax.checkpoint\n")]

    def prevent_cse(self, function: str) -> list[Edit]:
        """Returns the edits that replace prevent_cse=False by prevent_cse=True in each call whose first argument is the
        function, such as jax.checkpoint(function, prevent_cse=False); [] if there is no such call.

        function: name of the checkpointed function.
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

    def policy(self, name: str) -> list[Edit]:
        """Returns the edit that gives the only call of jax.checkpoint (or jax.remat) in the file another remat policy,
        as a list of one Edit. The edit adds the argument `policy` to the call, or replaces the argument if it is a
        policy of `jax.checkpoint_policies`. Returns [] if the file has no such call or several, if the call has another
        kind of policy, or if the file has no `import jax`.

        name: name of the new policy in `jax.checkpoint_policies`, such as "dots_saveable".
        """
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("checkpoint", "remat")
            and _name_of(node.func.value) == "jax"
            and node.args
        ]
        if len(calls) != 1 or not self._imports("jax") or any(keyword.arg is None for keyword in calls[0].keywords):
            return []
        policy = f"jax.checkpoint_policies.{name}"
        given = next((keyword.value for keyword in calls[0].keywords if keyword.arg == "policy"), None)
        if given is None:
            end = self.span(calls[0])[1] - 1
            return [Edit(end, end, f", policy={policy}")]
        if not isinstance(given, ast.Attribute) or _name_of(given.value) != "checkpoint_policies":
            return []
        return [Edit(*self.span(given), policy)]

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
    """Returns the text of a file after applying edits, which must not overlap. The file on disk is not changed."""
    data = source.data
    for edit in sorted(edits, key=lambda edit: -edit.start):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode("utf-8")


def _literal_texts(node: ast.expr | None) -> list[str] | None:
    """Returns the strings of a list, tuple or set of string literals; None for another expression."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None
    texts = [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return texts if len(texts) == len(node.elts) else None


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _tuple_text(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))}{',' * (len(numbers) == 1)})"


def _quoted(source: SourceFile, node: ast.expr, new: str) -> str:
    old = ast.get_source_segment(source.text, node) or '"'
    return f"{old[0]}{new}{old[0]}" if old[0] in "\"'" else repr(new)
