"""The changes that a bisection can search: versions of jax, commits, XLA flags, config keys, and lines of a file.

There are two kinds of `Axis`. A sequence (versions of jax, commits) is ordered from old to new, and one of them is used
at a time. A set (flags, keys, lines) consists of changes that can be applied to the program in any combination. A
"state" is a frozenset of indices: the index of the chosen version, or the indices of the applied changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.bisect import environments
from bytescope.memory.bisect.measuring import Candidate, Place
from bytescope.memory.devices.xla_flags import flags_text, parse_flags
from bytescope.memory.errors import ReportError, one_line

State = frozenset[int]
# A candidate with more changes than this is named by the number of its changes and a digest, not by listing them.
_NAMED_CHANGES = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that is bisected.

    Fields:
        factory: the function that makes the program: `module:function` or `file.py:function`, or the import path of a
            ProgramFactory object.
        overrides: config key -> value, the same for all candidates.
        with_flags: function that adds XLA flags to overrides: (overrides, flag -> value) -> overrides.
        needs_trainer: True for bytescope's own configs, which need the packages of the extra `train`.
    """

    factory: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    with_flags: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda overrides, flags: {
        **overrides,
        **flags,
    }
    needs_trainer: bool = False


class Axis:
    """The changes of one kind that a bisection searches, such as versions of jax. (Not an axis of an array or a mesh.)

    Attributes:
        name: the command-line flag of this kind without its dashes, such as "jax" or "xla-flags".
        changes: names of the versions from old to new, or names of the changes that can be combined.
        is_sequence: True for versions and commits, of which one is used at a time; False for changes that can be
            combined.
    """

    def __init__(
        self, name: str, changes: Sequence[str], is_sequence: bool, make: Callable[[State, str], Candidate]
    ) -> None:
        self.name, self.changes, self.is_sequence, self._make = name, tuple(changes), is_sequence, make
        self._states: dict[str, State] = {}

    @property
    def good(self) -> State:
        """The state of the first program of the bisection, which must be within the bound. For versions and commits,
        this is {0}, the index of the oldest one; for flags, keys and lines, the empty set (no change is applied)."""
        return frozenset([0]) if self.is_sequence else frozenset()

    @property
    def bad(self) -> State:
        """The state of the last program of the bisection, which must exceed the bound. For versions and commits, this
        is the index of the newest one; for flags, keys and lines, the indices of all changes."""
        return frozenset([len(self.changes) - 1]) if self.is_sequence else frozenset(range(len(self.changes)))

    def point(self, state: State) -> str:
        """Returns the name of a program, such as "jax 0.11.0", "width=64 + layers=2" or "no change". Different states
        have different names. `state`: the index of the program's version or commit in `changes`, or the indices of the
        changes that are applied to the program."""
        names = [self.changes[index] for index in sorted(state)]
        if self.is_sequence:
            return names[0]
        if not names:
            return "no change"
        if state == self.bad and len(names) > _NAMED_CHANGES:
            return f"all {len(names)} changes"
        if len(names) > _NAMED_CHANGES:
            digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:6]
            return f"{len(names)} changes, {digest}"
        return " + ".join(names)

    def points(self) -> tuple[str, ...]:
        """Returns the names of all versions or commits, from old to new. Only valid if `is_sequence` is True."""
        return self.changes

    def states(self) -> Mapping[str, State]:
        """Returns a dict: name of a program -> its state, for each program that the method `candidate` has returned so
        far. A state is the index of the program's version or commit in `changes`, or the indices of the changes that
        are applied to the program."""
        return self._states

    def candidate(self, state: State) -> Candidate:
        """Returns one program of the bisection as a Candidate, which says how to compile it; nothing is installed or
        compiled yet. `state`: the index of the program's version or commit in `changes`, or the indices of the changes
        that are applied to the program."""
        point = self.point(state)
        self._states[point] = state
        return self._make(state, point)


# ---- versions of jax


def jax_axis(
    program: Program,
    interpreter: str,
    versions: Sequence[str],
    platform: str,
    is_old_gpu: bool,
    more: Sequence[str],
) -> Axis:
    """Returns the Axis of a bisection over versions of jax. Each version is installed in its own virtual environment
    when the bisection first compiles the program with it.

    Args:
        program: the program to bisect.
        interpreter: path of the Python interpreter of the environments.
        versions: versions of jax, from old to new.
        platform: "cpu", "cuda", "rocm" or "tpu".
        is_old_gpu: True if CUDA 13 no longer supports the GPU, so that jax's plugin for CUDA 12 must be installed.
        more: pip requirements of the program, such as "flax==0.12.1".

    Raises ReportError if a version is older than bytescope supports and the program is not a function that needs only
    jax.
    """
    is_standalone = any(environments.parse_version(each) < environments.SUPPORTED_FROM for each in versions)
    oldest = ".".join(map(str, environments.SUPPORTED_FROM))
    if is_standalone and (program.needs_trainer or "bytescope." in program.factory):
        raise ReportError(
            f"with jax {versions[0]}, only a function that needs no other package than jax can be bisected: give "
            f"--program=MODULE:FUNCTION, or versions of jax from {oldest} on"
        )

    def prepare(version: str) -> Place:
        jax = environments.jax_requirement(version, platform, is_old_gpu)
        own = [] if is_standalone else environments.own_requirements(program.needs_trainer)
        python = environments.make_environment(interpreter, version, jax, [*own, *more])
        return Place(str(python), is_standalone=is_standalone)

    def make(state: State, point: str) -> Candidate:
        (index,) = state
        version = versions[index]
        return Candidate(point, program.factory, program.overrides, lambda: prepare(version), "installing")

    return Axis("jax", [f"jax {version}" for version in versions], True, make)


# ---- commits


@contextlib.contextmanager
def git_axis(program: Program, text: str, folder: Path) -> Iterator[Axis]:
    """Context manager that gives the Axis of a bisection over commits: GOOD and all commits after it up to BAD, along
    the first parents. The commits are checked out in one temporary worktree, which is removed at exit. The user's
    files, branch and index are not touched.

    Args:
        program: the program to bisect.
        text: the range "GOOD..BAD" of two commits, tags or branches; "GOOD.." ends at HEAD.
        folder: a folder in the repository.

    Raises ReportError if the folder is in no git repository, if a commit does not exist, or if GOOD is no ancestor of
    BAD.
    """
    good, dots, bad = text.partition("..")
    if not good or not dots:
        raise ReportError(f"--git={text} is not a range of commits: write GOOD..BAD, such as v1.0..HEAD")
    root = Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    ends = [_git(root, "rev-parse", "--verify", f"{name}^{{commit}}") for name in (good, bad or "HEAD")]
    commits = [ends[0], *_git(root, "rev-list", "--reverse", "--first-parent", f"{ends[0]}..{ends[1]}").split()]
    if len(commits) < 2 or _git(root, "merge-base", *ends) != ends[0]:
        raise ReportError(f"--git={text}: {good} is not an ancestor of {bad or 'HEAD'}: give the older commit first")
    names = [_git(root, "log", "-1", "--format=%h %s", commit) for commit in commits]
    where, _, function = program.factory.rpartition(":")
    if where.endswith(".py") and os.path.isabs(where):
        where = os.path.relpath(where, os.getcwd())
    with tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True) as temporary:
        tree = Path(temporary).resolve() / root.name
        here = tree / os.path.relpath(Path.cwd().resolve(), root)
        # Folders of the repository that are on sys.path, for example by an editable installation.
        paths = [Path(path).resolve() for path in sys.path if path]
        inside = [tree / path.relative_to(root) for path in paths if path.is_relative_to(root)]
        paths = [here, tree / "src", *inside]

        def checkout(commit: str) -> Place:
            if not tree.exists():
                _git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            _git(tree, "checkout", "--detach", "--force", "--quiet", commit)
            _git(tree, "clean", "-fdxq")
            return Place(
                folder=here if here.is_dir() else tree,
                paths=tuple(dict.fromkeys(paths)),
                state=commit,
                moved=(root, tree),
            )

        def make(state: State, point: str) -> Candidate:
            (index,) = state
            factory = f"{where}:{function}"
            return Candidate(
                point, factory, program.overrides, lambda: checkout(commits[index]), "checking out and compiling"
            )

        try:
            yield Axis("git", names, True, make)
        finally:
            if tree.exists():
                _git(root, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ReportError(f"git cannot be started ({error.strerror}): install git") from error
    if done.returncode:
        reason = one_line((done.stderr.strip().splitlines() or ["no message"])[-1], 200)
        raise ReportError(f"git {arguments[0]} failed ({reason}): check the repository and the commits in --git")
    return done.stdout.strip()


# ---- flags, keys and lines


def flags_axis(program: Program, text: str) -> Axis:
    """Returns the Axis of a bisection over XLA flags: each flag is one change, and any combination can be set.

    Args:
        program: the program to bisect.
        text: the path of a file with one FLAG=VALUE per line, or a list FLAG=VALUE,FLAG=VALUE.

    Raises ReportError if the file cannot be read, if a word is not a flag with a value, or if there is no flag.
    """
    if "=" in text:
        words = text.replace(",", " ").split()
    else:
        words = [word for line in _read_lines(Path(text), "--xla-flags") for word in line.partition("#")[0].split()]
    flags = parse_flags(words, "--xla-flags: ")
    if not flags:
        raise ReportError(
            f"--xla-flags={text} has no flags: give FLAG=VALUE,FLAG=VALUE, or a file with one FLAG=VALUE per line"
        )
    names = list(flags)

    def make(state: State, point: str) -> Candidate:
        chosen = {names[index]: flags[names[index]] for index in sorted(state)}
        return Candidate(point, program.factory, program.with_flags(program.overrides, chosen))

    return Axis("xla-flags", [flags_text({name: flags[name]}) for name in names], False, make)


def keys_axis(program: Program, keys: Mapping[str, Any], show: Callable[[Any], str] = str) -> Axis:
    """Returns the Axis of a bisection over config keys: each key with its new value is one change, and any combination
    can be set.

    Args:
        program: the program to bisect.
        keys: config key -> its new value.
        show: function that returns a value as text, for the names of the changes.
    """
    names = list(keys)

    def make(state: State, point: str) -> Candidate:
        chosen = {names[index]: keys[names[index]] for index in sorted(state)}
        return Candidate(point, program.factory, {**program.overrides, **chosen})

    return Axis("keys", [f"{name}={show(keys[name])}" for name in names], False, make)


def parse_keys(texts: Sequence[str]) -> dict[str, str]:
    """Parses texts of the form KEY=VALUE,KEY=VALUE into a dict: key -> value as text. A comma in parentheses belongs to
    the value.

    Raises ReportError if a part is not of the form KEY=VALUE.
    """
    from bytescope.memory.compare.grids import split_values

    keys: dict[str, str] = {}
    for text in texts:
        for part in split_values(text):
            key, equals, value = part.partition("=")
            if not key or not equals:
                raise ReportError(f"--keys={text}: {part!r} is not a key with its value: write KEY=VALUE,KEY=VALUE")
            keys[key.strip().removeprefix("--").removeprefix("config.")] = value.strip()
    return keys


def split_files(text: str) -> tuple[str, str]:
    """Splits A..B, the value of --diff, into the names of two files. Names that contain "..", such as ../a.py, are
    recognized by the files that exist.

    Raises ReportError if the text does not name two files.
    """
    positions = [index for index in range(1, len(text) - 2) if text[index : index + 2] == ".."]
    pairs = [(text[:index], text[index + 2 :]) for index in positions]
    if not pairs:
        raise ReportError(f"--diff={text} does not name two files: write --diff=BEFORE.py..AFTER.py")
    return next((pair for pair in pairs if all(map(os.path.exists, pair))), pairs[0])


@contextlib.contextmanager
def diff_axis(first: Path, second: Path, make_program: Callable[[str], Program]) -> Iterator[Axis]:
    """Context manager that gives the Axis of a bisection over the lines in which two files differ: each difference is
    one change. To apply some of the changes, a copy of the first file with these lines of the second file is written to
    a temporary folder, which is removed at exit.

    Args:
        first: the file that is within the bound.
        second: the file that exceeds the bound.
        make_program: function from the path of a file to the program in the file.

    Raises ReportError if a file cannot be read, or if the files are equal.
    """
    before, after = (_read_lines(path, "--diff") for path in (first, second))
    edits = _split_edits(before, after)
    if not edits:
        raise ReportError(f"--diff={first}..{second}: the two files are equal: give two different files")
    with tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True) as temporary:
        folders = tuple(dict.fromkeys(path.resolve().parent for path in (first, second)))

        def make(state: State, point: str) -> Candidate:
            text = "".join(_apply_edits(before, [edits[index] for index in sorted(state)]))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            path = Path(temporary) / digest / first.name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            program = make_program(str(path))
            return Candidate(point, program.factory, program.overrides, lambda: Place(paths=folders))

        yield Axis("diff", [edit.name(second.name) for edit in edits], False, make)


@dataclasses.dataclass(frozen=True)
class Edit:
    """One difference between two files.

    Fields:
        start, end: the lines [start, end) of the first file are replaced, counted from 0. For an insertion, start is
            equal to end.
        lines: the lines of the second file that replace the lines of the first file; () if lines are deleted.
        line: line number in the second file at which `lines` begin, counted from 1.
    """

    start: int
    end: int
    lines: tuple[str, ...]
    line: int

    def name(self, file: str) -> str:
        """Returns the difference as text: the name of the file, the line number, and the first new line, cut to 60
        characters."""
        words = self.lines[0].strip() if self.lines else "(lines removed)"
        more = f" (+{len(self.lines) - 1} lines)" if len(self.lines) > 1 else ""
        return f"{file}:{self.line}: {words[:60]}{more}"


def _split_edits(before: Sequence[str], after: Sequence[str]) -> list[Edit]:
    """Returns the differences between two files, given as lists of lines. If a block of lines is replaced by equally
    many lines, each line is a difference of its own."""
    edits = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if b - a == d - c:
            edits += [Edit(a + i, a + i + 1, (after[c + i],), c + i + 1) for i in range(b - a)]
        else:
            edits.append(Edit(a, b, tuple(after[c:d]), c + 1))
    return edits


def _apply_edits(before: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    out, done = [], 0
    for edit in edits:
        out += [*before[done : edit.start], *edit.lines]
        done = edit.end
    return [*out, *before[done:]]


def _read_lines(path: Path, flag: str) -> list[str]:
    try:
        return path.expanduser().read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise ReportError(f"{flag}: cannot read {path}: {error.strerror}; give a text file") from error
    except ValueError as error:
        raise ReportError(f"{flag}: {path} is not text: give a text file") from error
