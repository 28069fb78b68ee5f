"""What the scripts here share: rows, each run in a process of its own, kept as they come, resumed."""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PINNED = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "CUDA_ROOT")
PINNED_FLAG = "--xla_backend_optimization_level=0"
GIB = 2**30
# A prediction is right within this; see `verdict`.
TOLERANCE = 0.02
_LONGEST = 200  # of a failure's message


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A config with keys changed, and how many updates to run; its name is what a table calls it."""

    name: str
    config: str
    keys: Mapping[str, str]
    steps: int = 2
    others: bool = False

    def asked(self, target: str, compile_only: bool) -> dict[str, Any]:
        """The request to child.py."""
        return {
            "config": self.config,
            "keys": dict(self.keys),
            "target": target,
            "others": self.others,
            "steps": 0 if compile_only else self.steps,
        }


def environment() -> dict[str, str]:
    """Of a process that takes the card: the tests' conftest pins this one to simulated CPU devices."""
    env = {key: value for key, value in os.environ.items() if key not in PINNED}
    env["XLA_FLAGS"] = env.get("XLA_FLAGS", "").replace(PINNED_FLAG, "").strip()
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))}


def run_code(code: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
    """Runs code in a fresh process that takes the card."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=timeout,
    )


def answer_of(asked: Mapping[str, Any], timeout: float, **files: str) -> dict[str, Any]:
    """What child.py answers; {"failed": one line} for one that ends otherwise, or not in time.

    files: gate, a file that several children lock, so that none runs its steps while another compiles or runs (their
    pools then grow as needed); keep and trace as in child.py. "" or nothing for none.
    """
    script = str(Path(__file__).with_name("child.py"))
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if files.get("gate") else {}
    try:
        done = subprocess.run(
            [sys.executable, script, json.dumps({**asked, **files})],
            cwd=ROOT,
            env=environment() | shared,
            text=True,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return {"failed": f"no end after {timeout:.0f} s; {said[-1] if said else 'no update done'}"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": _failure(done.stderr, done.returncode)}
    return json.loads(lines[-1])


def _failure(stderr: str, code: int) -> str:
    """The error of a traceback in one line; the last one printed may be a library's footnote."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = (
        [line for line in lines if "RESOURCE_EXHAUSTED" in line]
        or [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
        or lines[-1:]
        or ["no message"]
    )
    return f"exit code {code}: {told[-1][:_LONGEST]}"


class Store:
    """Rows and their answers as JSON lines; a row that is there under the same request and versions is not run again.

    Failures are run again. Raises ValueError for a file with something else in it.
    """

    def __init__(self, path: Path | None, stamp: Mapping[str, str]):
        self.path, self.stamp, self.done = path, dict(stamp), {}
        if path and path.exists():
            try:
                found = [json.loads(line) for line in path.read_text().splitlines()]
                self.done = {
                    self._key(line["asked"], line["stamp"]): line["answer"]
                    for line in found
                    if "failed" not in line["answer"]
                }
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} holds no rows of this script: give another --out") from error

    @staticmethod
    def _key(asked: Mapping[str, Any], stamp: Mapping[str, str]) -> str:
        return json.dumps([asked, stamp], sort_keys=True)

    def get(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a request that is there already."""
        return self.done.get(self._key(asked, self.stamp))

    def add(self, name: str, asked: Mapping[str, Any], answer: dict[str, Any]) -> None:
        """Keeps an answer, on disk too."""
        self.done[self._key(asked, self.stamp)] = answer
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = {"name": name, "asked": asked, "stamp": self.stamp, "answer": answer}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def work(
    rows: Iterable[Row],
    options: argparse.Namespace,
    store: Store,
    show: Callable[[Row, dict], str],
    stop: Callable[[dict], bool] = lambda answer: False,
) -> list[tuple[Row, dict[str, Any]]]:
    """Rows with their answers, each shown as it comes; ends early when `stop` says so of one, or by Ctrl-C.

    With `options.jobs` above 1 so many rows are compiled at once, and run their steps one after the other when all are
    compiled. A row that failed beside others is run again alone.
    """
    out = []
    try:
        for row, answer in _answers(rows, options, store):
            out.append((row, answer))
            print(show(row, answer), flush=True)
            if stop(answer):
                break
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on after {len(out)} rows", flush=True)
    return out


def _answers(rows: Iterable[Row], options: argparse.Namespace, store: Store) -> Iterator[tuple[Row, dict[str, Any]]]:
    rows = iter(rows)
    while wave := list(itertools.islice(rows, options.jobs)):
        missing = [row for row in wave if _stored(row, options, store) is None]
        if len(missing) > 1:
            with tempfile.NamedTemporaryFile() as gate, ThreadPoolExecutor(len(missing)) as pool:
                work_on = partial(_answer, options=options, gate=gate.name)
                for row, answer in zip(missing, pool.map(work_on, missing)):
                    if "failed" not in answer:
                        store.add(row.name, row.asked(options.target, options.compile_only), answer)
        for row in wave:
            answer = _stored(row, options, store)
            if answer is None:
                answer = _answer(row, options)
                store.add(row.name, row.asked(options.target, options.compile_only), answer)
            yield row, answer


def _stored(row: Row, options: argparse.Namespace, store: Store) -> dict[str, Any] | None:
    return store.get(row.asked(options.target, options.compile_only))


def _answer(row: Row, options: argparse.Namespace, gate: str = "") -> dict[str, Any]:
    name, files = row.name.replace(" ", "_").replace("/", "-"), {"gate": gate}
    for kind, folder, suffix in (("keep", options.keep, ".json"), ("trace", options.trace, "")):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            files[kind] = str(folder.resolve() / f"{name}{suffix}")
    return answer_of(row.asked(options.target, options.compile_only), options.timeout, **files)


def reason(answer: Mapping[str, Any]) -> str:
    """Why a row has no measurement, "" for one that has or needs none."""
    for key, text in (("failed", "FAILED: {}"), ("cannot", "cannot run here: {}"), ("skipped", "{}")):
        if key in answer:
            return text.format(answer[key])
    return ""


def error_of(answer: Mapping[str, Any]) -> float | None:
    """(predicted - measured) / measured of an allocator's peak; None for what none was measured of."""
    if not answer.get("measured") or answer.get("source") != "allocator":
        return None
    return (answer["predicted"] - answer["measured"]) / answer["measured"]


def verdict(answer: Mapping[str, Any]) -> str:
    """The row's verdict: right or WRONG by TOLERANCE, "tuning" where the compiler's own trials held more than the
    program does, "" where nothing can be judged."""
    error = error_of(answer)
    if error is None:
        return ""
    if abs(error) <= TOLERANCE:
        return "right"
    return "tuning" if (answer.get("before") or 0) >= answer["measured"] else "WRONG"


def options_of(doc: str, out: str) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--target",
        default="local",
        metavar="T",
        help="local, or with --compile-only a described card such as h200 (default %(default)s)",
    )
    made.add_argument("--compile-only", action="store_true", help="predict every row, run none")
    made.add_argument(
        "--out",
        type=Path,
        default=Path(out),
        metavar="FILE",
        help="JSON lines, a row each; what is there is not run again (default %(default)s)",
    )
    made.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="compile N rows at once; their steps run one after the other (default %(default)s)",
    )
    made.add_argument("--keep", type=Path, metavar="DIR", help="write the report of every row's step there, as JSON")
    made.add_argument("--trace", type=Path, metavar="DIR", help="profile two more updates of every row into a folder")
    made.add_argument("--timeout", type=float, default=900, metavar="S", help="for one row (default %(default)s)")
    return made


def check(flags: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with one line for a described target that is to run, or a target that does not exist."""
    from bytescope.memory.devices import targets
    from bytescope.memory.errors import ReportError

    try:
        if options.target != "local" and targets.parse(options.target).is_described and not options.compile_only:
            flags.error(f"--target={options.target} is not here to run on: add --compile-only")
    except ReportError as error:
        flags.error(str(error))


def stamp() -> dict[str, str]:
    """Versions that decide a program's memory."""
    from bytescope.memory.devices.compiler import versions

    return {name: version for name, version in versions().items() if name != "python"}


def gib(size: float | None, digits: int = 2) -> str:
    """Bytes as GiB for a table, "" for what is not known."""
    return "" if size is None else f"{size / GIB:.{digits}f}"


def line_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells of a line of a table: the first to the left, the others to the right, the last as it is."""
    first, *middle, last = cells
    parts = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(middle, widths[1:])), last]
    return "  ".join(parts).rstrip()
