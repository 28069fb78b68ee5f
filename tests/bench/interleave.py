"""What the benchmarks share: things timed in turn, medians, ratios by pairs, one table and one JSON each.

Cores that others use too drift by tens of per cent within a minute, so nothing is timed after
anything else has finished: A B A B in one run. A ratio is the median over the rounds of the quotient
within a round, so that a slow minute falls on both sides of it.

This module needs the standard library and numpy alone (rich where a table is shown): children import
it under interpreters that may have nothing else.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
# A turn: makes that many steps, returns the seconds of each.
Turn = Callable[[int], list[float]]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median over the rounds of one side's median seconds by another's, with the lowest and the highest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of one side's steps, by round."""

    rounds: list[list[float]]

    @property
    def median(self) -> float:
        return statistics.median(s for turn in self.rounds for s in turn)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, _, high = np.quantile([s for turn in self.rounds for s in turn], (0.25, 0.5, 0.75))
        return float(high - low) / self.median

    def over(self, other: "Samples") -> Ratio:
        """These seconds by the other side's, round by round."""
        pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(self.rounds, other.rounds)]
        return Ratio(statistics.median(pairs), min(pairs), max(pairs))

    def to_json(self) -> dict[str, Any]:
        return {"median_s": self.median, "spread": self.spread, "rounds_s": self.rounds}


def take_turns(sides: Mapping[str, Turn], rounds: int, steps: int) -> dict[str, Samples]:
    """`rounds` rounds in which every side makes `steps` steps, one side after the other."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, turn in sides.items():
            seconds[name].append(turn(steps))
        if sys.stderr.isatty():
            print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr)
    return {name: Samples(turns) for name, turns in seconds.items()}


def timed(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int, *, each: bool) -> list[float]:
    """Seconds of `steps` calls of `step`, whose result `wait` waits for.

    With `each` every step is waited for and timed alone. Without, as a GPU wants it, the host runs
    ahead: one wait at the end, and the mean is returned as the only sample.
    """
    if each:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            wait(step())
            seconds.append(time.perf_counter() - began)
        return seconds
    began, result = time.perf_counter(), None
    for _ in range(steps):
        result = step()
    wait(result)
    return [(time.perf_counter() - began) / steps]


def random_tokens(rows: int, length: int, vocab: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Endless int32 [rows, length + 1] batches, the same for every side."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)


def peak_resident() -> int:
    """Most resident bytes of this process so far.

    VmHWM where there is /proc: ru_maxrss lives on through exec, so that a child's begins at what its
    parent held.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Lets `peak_resident` start again from what is resident now. Linux only; elsewhere nothing happens."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class Child:
    """A benchmark's other process: answers one JSON line a turn and sleeps in between.

    `ready` is its first line, printed once it has compiled, warmed up and can be timed; `last` the newest.
    """

    def __init__(self, interpreter: str, script: str, arguments: Sequence[str], env: Mapping[str, str] = {}):
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._name = script
        self._process = subprocess.Popen(
            [interpreter, str(Path(__file__).with_name(script)), *arguments],
            text=True,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env, "PYTHONPATH": path},
        )
        self.ready = self.last = self._answer()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):  # anything else is a library talking
                return json.loads(line)
        raise SystemExit(f"{self._name} ended with exit code {self._process.wait()}; its words are above")

    def __call__(self, steps: int) -> list[float]:
        self.last = self._ask({"steps": steps})
        return self.last["seconds"]

    def profile(self) -> dict[str, float]:
        """Seconds of one step by kind of instruction. Only for children that pass a profile to `serve`."""
        return self._ask({"profile": True})

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve(
    ready: Mapping[str, Any],
    turn: Callable[[int], Mapping[str, Any]],
    profile: Callable[[], Mapping[str, float]] | None = None,
) -> None:
    """The child's end: prints `ready`, then one line `turn(steps)` for every line it is asked, or `profile()` where a
    line asks for a profile."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(profile() if profile and asked.get("profile") else turn(asked["steps"])), flush=True)


def versions() -> dict[str, str]:
    """What this process runs on."""
    found = {
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else str(os.cpu_count()),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parser(doc: str, *, rounds: int, steps: int, config: str | None = None) -> argparse.ArgumentParser:
    """The options every benchmark has, and `--config` where there is a default one; the help is `doc`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="turns of every side (default %(default)s)")
    made.add_argument("--steps", type=int, default=steps, help="steps of a turn (default %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    if config:
        made.add_argument("--config", default=config, help="and --config.KEY=VALUE (default %(default)s)")
    return made


def parse_config(flags: argparse.ArgumentParser) -> tuple[argparse.Namespace, Any, list[str]]:
    """(options, config, overrides as given), read as by `bytescope train`; a mistake is one line."""
    from bytescope.train.commands.config_arguments import split_overrides
    from bytescope.train.program.config_files import load
    from bytescope.train.user_errors import UserError

    asked, rest = flags.parse_known_args()
    try:
        unknown, overrides = split_overrides(rest)
        if unknown:
            flags.error(f"unknown: {' '.join(unknown)}")
        return asked, load(asked.config, overrides), rest
    except UserError as error:
        flags.error(str(error))


@dataclasses.dataclass(frozen=True)
class Check:
    """A figure the user asked to be held: at most `limit`, or not asked (None)."""

    name: str
    value: float
    limit: float | None

    @property
    def held(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        if self.limit is None:
            return f"{self.name}: {self.value:.3g}"
        verdict = "held" if self.held else "EXCEEDED"
        return f"{self.name}: {self.value:.3g}, at most {self.limit:g} asked: {verdict}"


def finish(
    title: str,
    rows: Sequence[Mapping[str, str]],
    checks: Sequence[Check],
    figures: Mapping[str, Any],
    target: Path | None,
) -> int:
    """Shows the table and the checks, writes the JSON; the exit code: 1 when a check was exceeded."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for check in checks:
        console.print(str(check), style=None if check.held else "bold red", highlight=False)
    if hasattr(os, "getloadavg"):
        console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", highlight=False)
    if target:
        document = {
            "title": title,
            "rows": list(rows),
            "platform": platform.platform(),
            "checks": [dataclasses.asdict(check) for check in checks],
            **figures,
        }
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(check.held for check in checks) else 1


def mib(count: float | None) -> str:
    """Bytes as MiB, for tables; a dash for what is not known."""
    return "-" if count is None else f"{count / 2**20:,.0f}"
