"""Saves what every command prints and writes, and compares two saved folders: the proof that a change changes nothing.

    python tests/bench/outputs.py save DIR [--bytescope=PATH] [--inputs=OTHER/inputs] [--only=...] [--jobs=N]
    python tests/bench/outputs.py compare BEFORE AFTER [--only=GROUP[/CASE],...] [--all]

`save` runs the cases of outputs_cases.py with the executable PATH (default: the one beside this Python) and writes for
each case DIR/GROUP/CASE/: exit code, stdout, stderr, every JSON file, and of every HTML page the data in its script
elements, its visible text, and the page itself. Commands are started only through the executable, and
outputs_library.py through the executable's own Python, so the tree may be laid out in any way. DIR/inputs/ has what can
only be measured (a profiler trace with its run directory); `--inputs` reuses that of an earlier save, which makes the
output of `trace` and `page` equal to the digit.

`--only` takes groups and GROUP/CASE; a case that reads what an earlier case of its group wrote needs the whole group.
Each group has caches of its own, which are empty at its start: a program from a shared compilation cache would have
the scopes and source lines of the tree that compiled it, and would hide a change of them.

`compare` masks times, dates, measured values, absolute paths, line numbers, versions and process ids (the tables below)
and prints every other difference with case, file, and JSON path or diff lines. It exits with 1 if there is any. A
difference that outputs_expected.md lists is printed as "expected: reason" and does not fail.
"""

import argparse
import concurrent.futures
import dataclasses
import difflib
import fnmatch
import hashlib
import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ONE_DEVICE = Path(__file__).parent
EXPECTED = ONE_DEVICE / "outputs_expected.md"
COLUMNS = 100
TIMEOUT_SECONDS = 1800
# Variables of the caller that could change what a command does.
DROPPED_VARIABLES = re.compile(r"(JAX|XLA|TF|CUDA|NVIDIA|BYTESCOPE|PYTHON|GITHUB|SLURM|OMPI)_?.*|COLUMNS|LINES")
# Files that are not saved: their names are random, or they have measured values in a binary format.
NOT_SAVED = ("*/checkpoints/*", "*/events/*", "*/profile/plugins/*", "*.lock", "cache/*", "*/__pycache__/*")
SHOWN_PER_FILE = 12


# ---- save


def save(args: argparse.Namespace) -> int:
    import outputs_cases

    groups = {}
    for name, cases in outputs_cases.GROUPS.items():
        if selected := [case for case in cases if is_selected(f"{name}/{case.name}", args.only)]:
            groups[name] = selected
    if not groups:
        print(f"error: --only={args.only}: choose of {','.join(outputs_cases.GROUPS)}, or GROUP/CASE", file=sys.stderr)
        return 2
    folder, executable = Path(args.dir).resolve(), Path(args.bytescope).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # A random name of constant length, so that absolute paths wrap at the same place in both folders.
    temporary = Path(tempfile.mkdtemp(prefix="outputs-"))
    try:
        paths = installed_paths(executable) | {"<tmp>": str(temporary)}
        if outputs_cases.NEEDS_INPUTS in groups:
            record_inputs(Group("inputs", temporary / "inputs", folder, executable, paths), args.inputs)
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            running = []
            for name, cases in groups.items():
                if cases == outputs_cases.GROUPS[name]:
                    shutil.rmtree(folder / name, ignore_errors=True)
                group = Group(name, temporary / name, folder, executable, paths)
                running.append(pool.submit(run_group, group, cases))
            for each in running:
                each.result()
        print(f"saved {len(groups)} groups to {args.dir} in {time.monotonic() - started:.0f} s")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return 0


def is_selected(case: str, only: str) -> bool:
    """Returns whether a case, by GROUP/NAME, is in a list of groups and cases; an empty list has all."""
    return not only or case in only.split(",") or case.split("/")[0] in only.split(",")


def python_of(executable: Path) -> str:
    """Returns the interpreter that a console script names in its first line."""
    first_line = executable.read_text(encoding="utf-8").splitlines()[0]
    return first_line.removeprefix("#!").strip()


def installed_paths(executable: Path) -> dict[str, str]:
    """Returns the paths that `compare` masks, by their masks: of site-packages, the environment, and the tree."""
    code = (
        "import os.path, sys, sysconfig, bytescope.memory as m; "
        "print(sysconfig.get_path('purelib'), sys.prefix, os.path.dirname(os.path.dirname(m.__file__)), sep='\\n')"
    )
    run = subprocess.run([python_of(executable), "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("<site>", "<venv>", "<tree>"), run.stdout.splitlines(), strict=True))


@dataclasses.dataclass
class Group:
    """Cases that run one after the other in one working directory.

    Attributes:
        work: the working directory; the cases' files are written there.
        saved: the folder of `save`.
        paths: what `compare` masks: mask -> path.
    """

    name: str
    work: Path
    saved: Path
    executable: Path
    paths: dict[str, str]

    def environment(self, case: Any, columns: int) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not DROPPED_VARIABLES.fullmatch(key)}
        for variable, name in (("XDG_CACHE_HOME", "xdg"), ("HOME", "home"), ("TMPDIR", "tmp")):
            path = self.work / "cache" / name
            path.mkdir(parents=True, exist_ok=True)
            environment[variable] = str(path)
        return environment | {"COLUMNS": str(columns), "TZ": "UTC", "LC_ALL": "C.UTF-8"} | dict(case.env)

    def command(self, case: Any) -> list[str]:
        if case.argv[0] == "python":  # a function of outputs_library.py
            return [python_of(self.executable), str(ONE_DEVICE / "outputs_library.py"), *case.argv[1:]]
        return [str(self.executable), *case.argv[1:]]

    def run(self, case: Any, columns: int) -> tuple[int | str, str, str]:
        """Returns exit code, stdout and stderr; the exit code is "timeout" after TIMEOUT_SECONDS."""
        try:
            done = subprocess.run(
                self.command(case),
                cwd=self.work,
                env=self.environment(case, columns),
                input=case.stdin.encode(),
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "timeout", "", ""
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def run_group(group: Group, cases: Any) -> None:
    import outputs_cases

    needs_inputs = group.name == outputs_cases.NEEDS_INPUTS
    outputs_cases.write_input_files(group.work, group.saved / "inputs" if needs_inputs else None)
    for case in cases:
        if not case.needs_package or has_package(group.executable, case.needs_package):
            run_case(group, case)


def has_package(executable: Path, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python_of(executable), "-c", code], check=False).returncode == 0


def run_case(group: Group, case: Any) -> None:
    """Runs a case at each of its widths and saves what it printed and wrote."""
    target = group.saved / group.name / case.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "paths.json").write_text(json.dumps(group.paths, indent=1))
    (target / "command.txt").write_text(" ".join(case.argv) + "\n")
    before = file_states(group.work)
    started = time.monotonic()
    for columns in (case.columns or COLUMNS, *case.widths):
        code, stdout, stderr = group.run(case, columns)
        suffix = f".{columns}" if columns in case.widths else ""
        (target / f"exit{suffix}.txt").write_text(f"{code}\n")
        (target / f"stdout{suffix}.txt").write_text(stdout)
        (target / f"stderr{suffix}.txt").write_text(stderr)
    written = sorted(path for path, state in file_states(group.work).items() if before.get(path) != state)
    save_files(group.work, written, target)
    say(f"{group.name}/{case.name}: exit {code}, {time.monotonic() - started:.1f} s")


_printing = threading.Lock()


def say(line: str) -> None:
    with _printing:
        print(line, flush=True)


def file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns relative path -> (time of modification, size) of the files that are saved."""
    states = {}
    for path in folder.rglob("*"):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and not any(fnmatch.fnmatch(f"/{relative}", f"*{pattern}") for pattern in NOT_SAVED):
            status = path.stat()
            states[relative] = (status.st_mtime_ns, status.st_size)
    return states


def save_files(work: Path, written: list[str], target: Path) -> None:
    """Saves files by kind: JSON and text whole, pages as data and text, all others as a digest."""
    if not written:
        return
    digests = []
    for relative in written:
        path, saved = work / relative, target / "files" / relative
        saved.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".json", ".jsonl", ".txt", ".md", ".jinja", ".toml", ".csv"):
            shutil.copyfile(path, saved)
        elif path.suffix == ".html":
            page = Page.read(path.read_text(encoding="utf-8"))
            saved.with_name(f"{path.name}.data.json").write_text(json.dumps(page.data, indent=1))
            saved.with_name(f"{path.name}.text.txt").write_text("\n".join(page.lines) + "\n")
            whole = target / "pages" / relative
            whole.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, whole)
        else:
            is_stable = path.suffix in (".safetensors", ".bin", ".npy")
            digests.append(f"{relative} {hashlib.sha256(path.read_bytes()).hexdigest()[:16] if is_stable else ''}")
    (target / "written.txt").write_text("".join(f"{relative}\n" for relative in written))
    if digests:
        (target / "digests.txt").write_text("".join(f"{line.strip()}\n" for line in digests))


class Page(html.parser.HTMLParser):
    """The JSON in the script elements of a page, and its text without tags; texts of attributes stand in brackets.

    A row of a table is a line, as is any other element that is not part of a line.
    """

    SHOWN_ATTRIBUTES = ("href", "title", "aria-label", "alt", "placeholder", "value")
    INLINE = (
        *("a", "abbr", "b", "button", "code", "em", "i", "input", "kbd", "label", "mark", "option", "small", "span"),
        *("strong", "sub", "sup", "dt", "dd", "th", "td"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, Any] = {}
        self.lines: list[str] = []
        self.line: list[str] = []
        self.hidden: str | None = None  # the open script or style element
        self.data_id = ""

    @classmethod
    def read(cls, text: str) -> "Page":
        page = cls()
        page.feed(text)
        page.close()
        page.end_line()
        return page

    def end_line(self) -> None:
        if self.line:
            self.lines.append(" ".join(self.line))
            self.line = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag not in self.INLINE:
            self.end_line()
        if tag in ("script", "style"):
            self.hidden, self.data_id = tag, ""
            if attributes.get("type") == "application/json":
                self.data_id = attributes.get("id") or str(len(self.data))
        for name in self.SHOWN_ATTRIBUTES:
            if attributes.get(name):
                self.line.append(f"[{tag} {name}: {' '.join(str(attributes[name]).split())}]")

    def handle_endtag(self, tag: str) -> None:
        if tag == self.hidden:
            self.hidden = None
        if tag not in self.INLINE:
            self.end_line()

    def handle_data(self, data: str) -> None:
        if self.hidden and self.data_id:
            self.data[self.data_id] = json.loads(data)
        elif not self.hidden and data.strip():
            self.line.append(" ".join(data.split()))


def record_inputs(group: Group, given: str) -> None:
    """Puts the measured inputs into DIR/inputs: those of another save, or of a short profiled run."""
    import outputs_cases

    inputs = group.saved / "inputs"
    if given and Path(given).resolve() != inputs:
        shutil.rmtree(inputs, ignore_errors=True)
        shutil.copytree(given, inputs)
    if inputs.exists():
        return
    outputs_cases.write_input_files(group.work, None)
    for case in outputs_cases.INPUTS:
        code, stdout, stderr = group.run(case, COLUMNS)
        say(f"inputs/{case.name}: exit {code}")
        if code:
            raise SystemExit(f"{stdout}\n{stderr}")
    for name in outputs_cases.INPUT_FOLDERS:
        shutil.copytree(group.work / name, inputs / name, ignore=shutil.ignore_patterns("checkpoints", "events"))


# ---- masks: what differs between two runs of the same tree

MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
# Pattern -> replacement, in this order, in every line of text and every string of JSON.
TEXT_MASKS = [
    (r"\d{4}[-_]\d\d[-_]\d\d[T _]\d\d[:_]\d\d([:_]\d\d)?(\.\d+)?( UTC|Z|[+-]\d\d:\d\d)?", "<time>"),
    (rf"\b\d{{1,2}} ({MONTHS})[a-z]* \d{{4}}( \d\d:\d\d(:\d\d)?)?", "<time>"),
    (r"\b20\d\d-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?", "<date>"),
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"(?<![\w.])/(?:tmp|home|root|usr|var|opt|work)/[^\s\"'<>,;:)]*", "<path>"),
    (r"(\.py|\.jinja):\d+(?=\D|$)", r"\1:<line>"),
    (r"\bline \d+", "line <line>"),
    (r"\b((?:jax|jaxlib|flax|optax|bytescope|Python|python|numpy|libtpu|orbax|cuDNN|cudnn) )\d+(\.\d+)+\S*",
     r"\1<version>"),
    (r"\b(process|pid) \d{2,}", r"\1 <pid>"),
    (r"0x[0-9a-f]{6,}", "<address>"),
]  # fmt: skip
# (cases, pattern, replacement): measured values in the text of certain cases. An empty line is left out. The programs
# of CPU cases take megabytes, so a figure in GiB is the free memory of this host.
ON_CPU = "training/* cpu/* plans/compare programs/rnn programs/folder library/compile library/watch"
_ROOM = r"\d[\d.]* [KMGT]iB"
MEASURED_TEXT = [
    ("training/*", r"\d[\d,.]* tok/s( +data wait \d+ %)?( +mem [\d.]+/[\d.]+ GiB)?", "<speed>"),
    (ON_CPU, rf"of {_ROOM} \([\d.]+ ?%\), {_ROOM} free", "of <free>"),
    (ON_CPU, rf"\bof {_ROOM} \([\d.]+ ?%\)", "of <limit>"),
    (ON_CPU, r"\b\d[\d.]+ GiB", "<limit>"),
    (ON_CPU, r"[\d.]+ ?% of the limit", "<share> of the limit"),
    (ON_CPU, r"\b\d{1,3}(,\d{3}){3,} bytes", "<limit> bytes"),
    ("training/*", r"\d+:\d\d:\d\d left", "<left>"),
    ("training/*", r"in \d+:\d\d:\d\d, [\d,.]+ tokens/s", "in <time>"),
    ("training/*", r"the process grew by .*", "<process>"),
    ("training/*", r"^the devices spent \d+ % of the time waiting for data.*", ""),
    ("training/*", r"^update \d+ took .*", ""),
    ("training/*", r"compiled +in [\d.]+ s", "compiled <seconds>"),
    ("training/*", r"^tokens/s [\d,]+ [\d.]+ m?s per update, medians", "<speed>"),
    ("library/*", r"\w+/outputs_library\.py", "outputs_library.py"),
    ("library/pytest_fixtures", r"(passed|failed) in [\d.]+s( \([\d:]+\))?", r"\1 in <seconds>"),
    ("library/watch", r"\bin use [\d.]+ MiB(.* peak.*?) [\d.]+ MiB", r"in use <process>\1 <process>"),
    ("training/page_two", r"^((run|fsdp) \d \S+ \S+ )[\d,]+ [\d.]+ MiB", r"\1<speed> <process>"),
    ("training/*", r"^measured memory .* of the process; predicted .*", "<process>"),
    ("plans/compare*", r"(\s\d\.\d{3}\s+)\d+\.\d(?=\s|$)", r"\1<seconds>"),
    ("plans/compare*", r"comp s", "comp s"),  # the heading of that column
    ("plans/fit*", r"^ *\d+\.\d s  ", "<elapsed> "),
    ("plans/fit*", r"compiled, [\d.]+ s", "compiled, <seconds>"),
    ("plans/fit*", r"^search took [\d.]+ s", "search took <seconds>"),
]  # fmt: skip
# (cases, file, JSON path): measured values in JSON; the path is a regular expression.
MEASURED_JSON = [
    ("*", "*", r".*\.versions\.\w[\w-]*"),
    ("*", "*", r".*\.compile_seconds"),
    ("plans/fit*", "*fit*.json", r"\$\.seconds"),
    ("plans/fit*", "*nothing.json", r"\$\.seconds"),
    (ON_CPU, "*", r".*\.(limit|limits\[\d+\]|limit_bytes|device_memory_bytes|host_memory_bytes)"),
    ("training/*", "*metrics.jsonl", r".*\.(tokens_per_s|step_time_s|data_wait_s|mfu|hfu)"),
    ("library/watch", "*", r".*\.(peak_)?bytes_in_use"),
    ("training/*", "*metrics.jsonl", r".*\.memory\.\w+"),
    ("training/*", "*.html.data.json", r"\$\.data\.curves\.(in_use|peak|predicted|tokens)\[.*"),
]


def masked_text(text: str, case: str, paths: dict[str, str]) -> str:
    """Returns the text with masks. Lines with a mask have single spaces: a mask is not as long as what it replaces."""
    lines = []
    for line in text.splitlines():
        masked = mask_line(line, case, paths)
        if masked is not None:
            lines.append(masked.rstrip())
    return "\n".join(lines)


def is_one_of(case: str, cases: str) -> bool:
    return any(fnmatch.fnmatch(case, pattern) for pattern in cases.split())


def mask_line(line: str, case: str, paths: dict[str, str]) -> str | None:
    """Returns the line with masks, None if nothing is left of it."""
    masked, replaced = line, 0
    for name, path in paths.items():
        masked, count = masked.replace(path, name), masked.count(path)
        replaced += count
    case_masks = [(pattern, mask) for cases, pattern, mask in MEASURED_TEXT if is_one_of(case, cases)]
    for pattern, mask in (*TEXT_MASKS, *case_masks):
        masked, count = re.subn(pattern, mask, masked)
        replaced += count
    return (" ".join(masked.split()) or None) if replaced else line


def masked_json(value: Any, case: str, file: str, paths: dict[str, str]) -> Any:
    rules = [
        re.compile(pattern)
        for cases, files, pattern in MEASURED_JSON
        if is_one_of(case, cases) and fnmatch.fnmatch(file, files)
    ]
    masks: dict[str, str] = {}  # text -> masked text: most strings of a report stand in it many times

    def masked(value: Any, at: str) -> Any:
        if value is not None and any(rule.fullmatch(at) for rule in rules):
            return "<measured>"
        if isinstance(value, dict):
            return {key: masked(each, f"{at}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [masked(each, f"{at}[{i}]") for i, each in enumerate(value)]
        if isinstance(value, str):
            if value not in masks:
                masks[value] = masked_text(value, case, paths)
            return masks[value]
        return value

    return masked(value, "$")


# ---- compare


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference at one place of one file.

    Attributes:
        place: the JSON path, or "line N" of the file before.
        shown: the values or the lines, before and after.
    """

    case: str
    file: str
    place: str
    shown: str


@dataclasses.dataclass(frozen=True)
class Expected:
    """A row of outputs_expected.md: differences whose case, file and text match are expected."""

    case: str
    file: str
    pattern: str
    reason: str

    def matches(self, difference: Difference) -> bool:
        text = f"{difference.place} {difference.shown}"
        return (
            fnmatch.fnmatch(difference.case, self.case)
            and fnmatch.fnmatch(difference.file, self.file)
            and re.search(self.pattern, text) is not None
        )


def read_expected(path: Path) -> list[Expected]:
    """Reads the rows `| case | file | pattern | reason |` of the table; a `|` inside a cell is written `\\|`."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        cells = [cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] != "case" and not set(cells[0]) <= set("-: "):
            rows.append(Expected(*cells))
    return rows


def compare(args: argparse.Namespace) -> int:
    before, after = Path(args.before), Path(args.after)
    for folder in (before, after):
        if not saved_cases(folder):
            print(f"error: {folder} has no saved case: run outputs.py save {folder}", file=sys.stderr)
            return 2
    expected_rows = read_expected(EXPECTED if args.expected is None else Path(args.expected))
    expected: dict[str, int] = {}
    failed: list[Difference] = []
    for difference in differences(before, after, args.only):
        row = next((row for row in expected_rows if row.matches(difference)), None)
        if row is None:
            failed.append(difference)
        else:
            expected[row.reason] = expected.get(row.reason, 0) + 1
    for (case, file), group in itertools.groupby(failed, key=lambda each: (each.case, each.file)):
        here = list(group)
        print(f"{case} {file}")
        for difference in here if args.all else here[:SHOWN_PER_FILE]:
            print(f"  {difference.place}: {difference.shown}")
        if len(here) > SHOWN_PER_FILE and not args.all:
            print(f"  ... {len(here) - SHOWN_PER_FILE} more (--all)")
    for reason, count in expected.items():
        print(f"expected: {reason} ({count} times)")
    cases = len({each.case for each in failed})
    print(f"{len(failed)} differences in {cases} cases" if failed else "no difference")
    return 1 if failed else 0


def differences(before: Path, after: Path, only: str) -> Iterator[Difference]:
    """Yields the differences of two saved folders that masks do not cover, case by case."""
    for case in sorted(saved_cases(before) | saved_cases(after)):
        if not is_selected(case, only):
            continue
        missing = [not (folder / case / "exit.txt").is_file() for folder in (before, after)]
        if any(missing):
            yield Difference(case, "all files", "case", "only after" if missing[0] else "only before")
            continue
        paths = [read_paths(folder / case) for folder in (before, after)]
        files = [saved_files(folder / case) for folder in (before, after)]
        for file in sorted(files[0].keys() | files[1].keys()):
            if file not in files[1]:
                yield Difference(case, file, "file", "only before")
            elif file not in files[0]:
                yield Difference(case, file, "file", "only after")
            else:
                yield from file_differences(case, file, files[0][file], files[1][file], paths)


def read_paths(case: Path) -> dict[str, str]:
    file = case / "paths.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def saved_cases(folder: Path) -> set[str]:
    return {path.parent.relative_to(folder).as_posix() for path in folder.glob("*/*/exit.txt")}


def saved_files(case: Path) -> dict[str, Path]:
    """Returns relative path -> path of what is compared; whole pages are kept for reading only."""
    pages = case / "pages"
    found = {}
    for path in case.rglob("*"):
        if path.is_file() and pages not in path.parents and path.name != "paths.json":
            found[path.relative_to(case).as_posix()] = path
    return found


def file_differences(case: str, file: str, before: Path, after: Path, paths: list[Any]) -> Iterator[Difference]:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (before, after)]
    if texts[0] == texts[1]:
        return
    values = [parsed(file, text) for text in texts]
    if None in values:
        lines = [masked_text(text, case, where).split("\n") for text, where in zip(texts, paths, strict=True)]
        for place, shown in line_differences(*lines):
            yield Difference(case, file, place, shown)
    else:
        masked = [masked_json(value, case, file, where) for value, where in zip(values, paths, strict=True)]
        for place, shown in json_differences(*masked):
            yield Difference(case, file, place, shown)


def parsed(file: str, text: str) -> Any:
    """Returns the value of a JSON file, the list of rows of JSON lines, or None for text."""
    try:
        if file.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines()]
        if file.endswith(".json"):
            return with_strings(json.loads(text))
    except ValueError:
        pass
    return None


def with_strings(value: Any) -> Any:
    """Returns a report page's data with the strings that its columns of buffers index.

    Two lines of a source file that become one would move all later indices.
    """
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, dict) or not {"strings", "buffers"} <= data.keys():
        return value
    strings, columns = data["strings"], dict(data["buffers"])
    for name in ("what", "name", "type", "category", "phase", "op", "source", "checkpoint"):
        if name in columns:
            columns[name] = [strings[i] for i in columns[name]]
    others = {key: each for key, each in data.items() if key != "strings"}
    return value | {"data": others | {"buffers": columns}}


def line_differences(before: list[str], after: list[str]) -> Iterator[tuple[str, str]]:
    """Yields "line N" and the lines of each difference; the same words with masks at another line break are equal."""
    for tag, i, j, k, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        words = [" ".join(lines).split() for lines in (before[i:j], after[k:end])]
        is_rewrapped = words[0] == words[1] and any(re.fullmatch(r".*<\w+>.*", word) for word in words[0])
        if tag != "equal" and not is_rewrapped:
            lines = [f"\n    -{line}" for line in before[i:j]] + [f"\n    +{line}" for line in after[k:end]]
            yield f"line {i + 1}", "".join(lines)


def json_differences(before: Any, after: Any, at: str = "$") -> Iterator[tuple[str, str]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in after:
                yield f"{at}.{key}", f"{short(before[key])} -> missing"
            elif key not in before:
                yield f"{at}.{key}", f"missing -> {short(after[key])}"
            else:
                yield from json_differences(before[key], after[key], f"{at}.{key}")
        shared = [[key for key in each if key in before and key in after] for each in (before, after)]
        if shared[0] != shared[1]:
            yield at, f"order of keys: {short(shared[0])} -> {short(shared[1])}"
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield at, f"{len(before)} -> {len(after)} items"
        for i, pair in enumerate(zip(before, after, strict=False)):
            yield from json_differences(*pair, f"{at}[{i}]")
    elif type(before) is not type(after) or before != after:
        yield at, f"{short(before)} -> {short(after)}"


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    saving = commands.add_parser("save", help="run the cases and save what they print and write")
    saving.add_argument("dir")
    saving.add_argument("--bytescope", default=str(Path(sys.executable).parent / "bytescope"), metavar="PATH")
    saving.add_argument("--inputs", default="", metavar="DIR", help="measured inputs of an earlier save")
    saving.add_argument("--only", default="", metavar="GROUP[/CASE],...")
    saving.add_argument("--jobs", type=int, default=2, metavar="N", help="groups that run at a time (default 2)")
    saving.set_defaults(run=save)
    comparing = commands.add_parser("compare", help="print what differs; exit with 1 if anything does")
    comparing.add_argument("before")
    comparing.add_argument("after")
    comparing.add_argument("--only", default="", metavar="GROUP[/CASE],...")
    comparing.add_argument("--all", action="store_true", help=f"print more than {SHOWN_PER_FILE} differences of a file")
    comparing.add_argument("--expected", metavar="FILE", help="table of expected differences (outputs_expected.md)")
    comparing.set_defaults(run=compare)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
