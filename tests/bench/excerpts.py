"""Writes everything in the pages that comes from the code: quoted output, pictures, line numbers, reference pages.

    python tests/bench/excerpts.py                       # run the commands, rewrite what is stale
    python tests/bench/excerpts.py --check               # write nothing; exit with 1 and show what is stale
    python tests/bench/excerpts.py --only='report llama_8b h100:8'   # only the excerpts of this command
    python tests/bench/excerpts.py --only='train ' --measure         # measure the figures of these excerpts again

The reference pages are those of reference.py, the lists of ARCHITECTURE.md those of structure.py, the pictures those of
picture.py. --only leaves them out, unless it names the command of the pictures.

An excerpt is a fenced block below a comment, which a rendered page does not show. Its first line is the command; the
other lines are optional:

    <!-- output: bytescope report llama_8b h100:8
    lines: llama_8b..limit, ..., at the peak..collectives
    varies: [0-9.]+ s
    check: bytescope report tiny cpu -->

- `lines` selects lines of the output in their order, by how they begin: one line, or all from A to B as A..B. `...`
  stands for lines that are left out, and an empty item for an empty line. Without it the whole output is quoted.
- `varies` is a pattern for what another run prints differently, for example measured seconds.
- `check` is a shorter command that prints the same words with other figures. The excerpt then has measured figures, and
  only its words are compared.
- `slow` (alone on its line) marks a command of minutes, which runs only if --only names it.

Lines of the block that begin with `$ ` stay as they are; a test compares them with the command. Commands find the
program of README.md as `step.py`. The command `python NAME` runs a function of PROGRAMS in this file. All figures are
those of the jax version that README.md quotes; with another version only words are compared.

A reference to a source line in the text, `block.py:106` for example, needs a comment with code of that line right after
it: `block.py:106`<!-- line: return mlp(x) -->. The number is rewritten if the line has moved.

The tests are in tests/end_to_end/test_quoted_output.py. They run the report of README.md by default, and all other
commands that are not slow with `-m exhaustive`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import picture
import reference
import structure
from outputs import DROPPED_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md"]
for top in ("memory", "model", "train"):
    PAGES += sorted([*(ROOT / top).rglob("README.md"), *(ROOT / top / "guides").glob("*.md")])
# The report that the pictures show, and what it writes besides its text.
PICTURED = picture.COMMAND
# The program of README.md, which does not fit, and what a report on it prints after the change that README.md shows.
FRONT_PROGRAM = ROOT / "memory" / "examples" / "step.py"
BEFORE, AFTER = "bytescope report step.py:program h100", "python changed_step"
BLOCK = re.compile(r"^<!-- output: (?P<head>.*?) -->\n```\w*\n(?P<body>.*?)^```$", re.M | re.S)
REFERENCE = re.compile(r"(?P<name>[\w/]+\.py):(?P<number>\d+)(?P<close>[^\s<]*)\s?(?:<!-- line: (?P<code>.*?) -->)?")
UNITS = {"B", "KiB", "MiB", "GiB", "GB", "s", "ms", "us", "tok"}
# Files of the reader or of other projects, whose lines are not checked.
FOREIGN = ("step.py", "train.py", "nanodo/train.py")
VERSION = re.compile(r"\b(jax|jaxlib) \d[\w.]*")


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A quoted output of a page. `body` is the text between the fences."""

    page: Path
    command: str
    body: str
    lines: str = ""
    varies: str = ""
    check: str = ""
    slow: bool = False

    @property
    def prompt(self) -> str:
        """The lines of the command at the top of the block."""
        return re.match(r"(?:\$ (?:.*\\\n)*.*\n)?", self.body)[0]

    @property
    def quoted(self) -> list[str]:
        return self.body[len(self.prompt) :].splitlines()

    @property
    def checked_command(self) -> str:
        """The command whose output the excerpt is compared with."""
        return self.check or self.command

    def select(self, output: str) -> list[str]:
        """Returns the lines of an output that the excerpt quotes. Raises ValueError if a line is missing."""
        printed = [line.rstrip() for line in output.strip("\n").splitlines()]
        if not self.lines:
            return printed
        chosen, at = [], 0
        for item in map(str.strip, self.lines.split(",")):
            if item in ("", "..."):
                chosen.append(item)
                continue
            first, _, last = item.partition("..")
            start = find_line(printed, first, at)
            end = find_line(printed, last or first, start)
            chosen += printed[start : end + 1]
            at = end + 1
        return chosen

    def differences(self, output: str, versions_matter: bool = False) -> list[str]:
        """Returns the diff from the excerpt to the output of its `checked_command`; an empty list if it is current.

        versions_matter: an excerpt with other versions of jax in its text is not current.
        """
        name = self.page.relative_to(ROOT).as_posix()
        if self.check or not (versions_matter or is_quoted_version()):
            missing = sorted(set(words(self.quoted)) - set(words(output.splitlines())))
            return [f"{name}: {self.checked_command} does not print {', '.join(missing)}"] if missing else []
        try:
            current = self.select(output)
        except ValueError as error:
            return [f"{name}: {self.command}: {error}"]
        if [self.masked(line, versions_matter) for line in self.quoted] == [
            self.masked(line, versions_matter) for line in current
        ]:
            return []
        return list(difflib.unified_diff(self.quoted, current, name, self.command, lineterm=""))

    def masked(self, line: str, versions_matter: bool) -> str:
        """Returns a line without what may differ; if something in the output varies, also without alignment."""
        line = line if versions_matter else VERSION.sub(r"\1 #", line)
        return " ".join(re.sub(self.varies, "#", line).split()) if self.varies else line


def find_line(lines: Sequence[str], beginning: str, start: int) -> int:
    """Returns the index of the first line from `start` on that begins so, whatever its blanks."""
    for index in range(start, len(lines)):
        if " ".join(lines[index].split()).startswith(beginning):
            return index
    raise ValueError(f"no line begins with {beginning!r}")


def words(lines: Sequence[str]) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z_]+", " ".join(lines)) if word not in UNITS]


def read_excerpts(page: Path, text: str) -> list[Excerpt]:
    """Returns the excerpts of a page. Raises ValueError for an unknown line of a comment."""
    excerpts = []
    for match in BLOCK.finditer(text):
        command, *rest = match["head"].splitlines()
        options: dict[str, str | bool] = {}
        for line in rest:
            key, _, value = line.partition(":")
            if key not in ("lines", "varies", "check", "slow"):
                raise ValueError(f"{page}: {line}: use lines, varies, check or slow")
            options[key] = value.strip() or key == "slow"
        excerpts.append(Excerpt(page, command.strip(), match["body"], **options))  # type: ignore[arg-type]
    return excerpts


def all_excerpts() -> list[Excerpt]:
    return [excerpt for page in PAGES for excerpt in read_excerpts(page, page.read_text(encoding="utf-8"))]


@functools.cache
def is_quoted_version() -> bool:
    """Returns whether the installed jax is the version that README.md quotes: then figures are the same to the byte."""
    return f"jax {metadata.version('jax')} " in (ROOT / "README.md").read_text(encoding="utf-8")


# ---- running commands


class Outputs(Mapping[str, str]):
    """Command -> what it prints, stdout and then stderr. A command runs once, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.printed: dict[str, str] = {}

    def folder_of(self, command: str) -> Path:
        return self.folder / hashlib.sha256(command.encode()).hexdigest()[:8]

    def __getitem__(self, command: str) -> str:
        if command not in self.printed:
            self.printed[command] = self.run(command)
        return self.printed[command]

    def __iter__(self) -> Iterator[str]:
        return iter(self.printed)

    def __len__(self) -> int:
        return len(self.printed)

    def run(self, command: str) -> str:
        program, *arguments = shlex.split(command)
        folder = self.folder_of(command)
        folder.mkdir()
        write_chats(folder / "talks.jsonl")
        shutil.copy(FRONT_PROGRAM, folder)
        if program == "python":
            argv = [sys.executable, __file__, f"--program={arguments[0]}"]
        else:
            argv = [sys.executable, "-c", "from bytescope.memory import cli; raise SystemExit(cli.main())", *arguments]
            if command == PICTURED:
                argv += [f"--json={picture.JSON}", f"--html={picture.HTML}"]
        environment = {name: value for name, value in os.environ.items() if not DROPPED_VARIABLES.fullmatch(name)}
        if "CUDA_ROOT" in os.environ:  # the tests put an assembler there that is faster
            environment["CUDA_ROOT"] = os.environ["CUDA_ROOT"]
        environment |= {"COLUMNS": "100", "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(self.folder / "cache")}
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 3):  # 3: the program does not fit, which an excerpt may show
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout + done.stderr


def write_chats(path: Path) -> None:
    """Writes the file of chats that commands of the excerpts read."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(200):
            question, answer = f"What is {number} times {number + 1}?", f"{number * (number + 1)}."
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


# ---- what is not the output of a command


def changed_step() -> None:
    """The report on the program of README.md after the change in the diff of README.md."""
    from bytescope.memory import cli

    Path("step.py").write_text(apply_front_diff(FRONT_PROGRAM.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(cli.main(shlex.split(BEFORE)[1:]))


def apply_front_diff(source: str) -> str:
    """Returns a source after the change in the diff of README.md, which only adds lines. Raises ValueError if the
    source does not have the diff's other lines exactly once."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    if source.count(old) != 1:
        raise ValueError(f"{source.count(old)} places have the lines of the diff in README.md")
    return source.replace(old, "\n".join(line[1:] for line in lines))


def out_of_memory() -> None:
    """The explanation of `memory.watch` when a toy step exceeds its budget."""
    import jax
    import jax.numpy as jnp
    import optax

    from bytescope import memory

    optimizer = optax.adamw(1e-3)

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch) ** 2)

    def step(state: tuple, batch: jax.Array) -> tuple:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {"up": jnp.ones((256, 1024)), "down": jnp.ones((1024, 256))}
    state, batch = (params, optimizer.init(params)), jnp.ones((2048, 256))
    other_array = jnp.ones((384, 512))
    watched = memory.watch(jax.jit(step), budget="16MiB")
    try:
        watched(state, batch)
    except jax.errors.JaxRuntimeError:
        other_array.delete()
        return
    raise AssertionError("the step fits")


def refusal() -> None:
    """The error of a run that does not fit into a host with 24.5 GiB, but does after one change."""
    from bytescope.memory import cli
    from bytescope.memory.devices import limits
    from bytescope.train.plan import advice, refusal

    limits.free_host_bytes = refusal.free_host_bytes = lambda: int(24.5 * 2**30)
    advice.MAX_SECONDS = math.inf  # a busy machine compiles the same variants
    sys.exit(cli.main(["train", "llama_1b", "--workdir=run"]))


def header_of_qlora() -> None:
    """The header of a run with the config llama_8b_qlora."""
    from bytescope.memory.devices import targets
    from bytescope.memory.view.console import make_console
    from bytescope.train.program.config_files import load
    from bytescope.train.program.program import build
    from bytescope.train.run.startup import show_program

    show_program(make_console(), build(load("llama_8b_qlora"), targets.parse("h100").devices()), "")


PROGRAMS = {program.__name__: program for program in (changed_step, out_of_memory, refusal, header_of_qlora)}


# ---- references to lines of source files


def stale_references(page: Path, text: str) -> list[str]:
    """Returns what is wrong with the references of a page to lines of source files, a sentence each."""
    mistakes = []
    for match in REFERENCE.finditer(without_blocks(text)):
        reference = f"{page.relative_to(ROOT)}: {match['name']}:{match['number']}"
        if match["name"] in FOREIGN:
            continue
        if not match["code"]:
            mistakes.append(f"{reference}: add <!-- line: CODE --> with code of that line")
            continue
        lines = source_of(page, match["name"]).read_text(encoding="utf-8").splitlines()
        number = nearest_line(lines, match["code"], int(match["number"]))
        if number != int(match["number"]):
            mistakes.append(f"{reference}: `{match['code']}` is in line {number}" + " (none)" * (number == 0))
    return mistakes


def renumbered(page: Path, text: str) -> str:
    """Returns a page's text with the current numbers of the source lines that it refers to."""

    def replace(match: re.Match[str]) -> str:
        if not match["code"]:
            return match[0]
        lines = source_of(page, match["name"]).read_text(encoding="utf-8").splitlines()
        number = nearest_line(lines, match["code"], int(match["number"]))
        old, new = match["number"], str(number or match["number"])
        return match[0].replace(f":{old}", f":{new}", 1).replace(f"#L{old}", f"#L{new}")

    return REFERENCE.sub(replace, text)


def without_blocks(text: str) -> str:
    """Returns a page without its excerpts, whose references the commands printed."""
    return BLOCK.sub("", text)


@functools.cache
def source_of(page: Path, name: str) -> Path:
    """Returns the source file of a reference: relative to the page or the root, or the only one with this name."""
    for path in (page.parent / name, ROOT / name):
        if path.is_file():
            return path
    tops = ("configs", "memory", "model", "tests", "train")
    matches = [path for top in tops for path in (ROOT / top).rglob(Path(name).name) if path.as_posix().endswith(name)]
    if len(matches) != 1:
        raise ValueError(f"{page}: {name}: {len(matches)} files have this name; write more of its path")
    return matches[0]


def nearest_line(lines: Sequence[str], code: str, number: int) -> int:
    """Returns the number of the line with this code that is closest to line `number`; 0 if no line has it."""
    numbers = [index for index, line in enumerate(lines, start=1) if code in line]
    return min(numbers, key=lambda each: abs(each - number), default=0)


# ---- the command


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything is stale")
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands that contain TEXT, slow ones too")
    parser.add_argument("--measure", action="store_true", help="rewrite excerpts with measured figures too")
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.program:
        PROGRAMS[args.program]()
        return 0
    stale = False if args.only else update_lists(args.check)
    with tempfile.TemporaryDirectory(prefix="excerpts-") as folder:
        outputs = Outputs(Path(folder))
        for excerpt in all_excerpts():
            if args.only in excerpt.command if args.only else not excerpt.slow:
                stale |= update(excerpt, outputs, args.check, args.measure)
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            if mistakes := stale_references(page, text):
                stale = True
                print("\n".join(mistakes))
                if not args.check:
                    page.write_text(renumbered(page, text), encoding="utf-8")
        if not args.only or args.only in PICTURED:
            outputs[PICTURED]
            pictured = outputs.folder_of(PICTURED)
            for path in picture.stale_pictures(pictured):
                stale = True
                print(f"{path.relative_to(ROOT)} shows other figures than the report")
                if not args.check:
                    picture.draw(path, pictured)
    return 1 if args.check and stale else 0


def update_lists(check: bool) -> bool:
    """Writes, unless `check`, the reference pages and the lists of ARCHITECTURE.md. Returns whether one was stale."""
    stale = False
    for path, write in {**reference.PAGES, structure.PAGE: structure.architecture_page}.items():
        text = write()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale = True
            print(f"{path.relative_to(ROOT)} is not what the code says")
            if not check:
                path.write_text(text, encoding="utf-8")
    return stale


def update(excerpt: Excerpt, outputs: Outputs, check: bool, measure: bool) -> bool:
    """Prints how an excerpt differs from its output and, unless `check`, rewrites it. Returns whether it was stale.

    measure: an excerpt with measured figures counts as stale.
    """
    if measure and excerpt.check:
        differences = [f"{excerpt.page.relative_to(ROOT)}: {excerpt.command} is measured again"]
    else:
        differences = excerpt.differences(outputs[excerpt.checked_command], versions_matter=not check)
    if not differences:
        return False
    print("\n".join(differences), flush=True)
    if not check:
        try:
            lines = excerpt.select(outputs[excerpt.command])
        except ValueError as error:
            print(f"{excerpt.command}: {error}; change `lines` in {excerpt.page.relative_to(ROOT)}", flush=True)
            return True
        text = excerpt.page.read_text(encoding="utf-8")
        body = "".join([excerpt.prompt, *(f"{line}\n" for line in lines)])
        excerpt.page.write_text(text.replace(f"\n{excerpt.body}```", f"\n{body}```", 1), encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
