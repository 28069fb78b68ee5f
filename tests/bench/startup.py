"""From the command to the first step, cold and warm, and to the memory report.

    python tests/bench/startup.py
    python tests/bench/startup.py --config=tiny --target=h200 --assert

Each round starts `bytescope train` twice in processes of its own, with an empty cache of compiled programs and with
the one that the first has filled, and `bytescope report` once for this machine and once for --target. Measured
from the start of the process to the row of the first update (of a run of one update, without evaluation), and to the
end of the report. --assert: the warm start takes at most 0.3x of the cold one, it and the report at most 6 s each;
the checks take the least of the rounds, since seconds on a busy machine only grow.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interleave import ROOT, Check, Samples, Turn, finish, parse_config, parser, take_turns, versions

WARM, SECONDS = 0.3, 6.0
ONE_STEP = {
    "train.steps": 1,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 8,
    "train.sample_tokens": 0,
}


def first_step(config: str, rest: list[str], workdir: Path, cache: Path) -> float:
    """Seconds from the start of a training process to its first row of metrics."""
    keys = {**ONE_STEP, "train.cache_dir": cache}
    command = [
        sys.executable,
        "-m",
        "bytescope.memory",
        "train",
        config,
        *rest,
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        lines, seconds = [], None
        for line in process.stdout:
            lines.append(line)
            if seconds is None and line.startswith("step ") and "loss" in line:
                seconds = time.perf_counter() - began
    if process.returncode or seconds is None:
        raise SystemExit(f"{' '.join(command)}\n{''.join(lines)}ended with exit code {process.returncode}")
    return seconds


def report(config: str, rest: list[str], target: str) -> float:
    """Seconds of a whole `bytescope report`."""
    command = [sys.executable, "-m", "bytescope.memory", "report", config, target, *rest]
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def sides_of(config: str, rest: list[str], target: str, folder: Path) -> dict[str, Turn]:
    """What is timed, in the order of a round: the warm start finds the cache of the cold one before it."""
    runs = iter(range(10**6))
    newest: list[Path] = []

    def cold() -> float:
        newest[:] = [folder / f"cache{next(runs)}"]
        return first_step(config, rest, folder / f"run{next(runs)}", newest[0])

    def warm() -> float:
        return first_step(config, rest, folder / f"run{next(runs)}", newest[0])

    timed = {
        "train, cold": cold,
        "train, warm": warm,
        "report, local": lambda: report(config, rest, "local"),
        f"report, {target}": lambda: report(config, rest, target),
    }
    return {name: lambda steps, once=once: [once() for _ in range(steps)] for name, once in timed.items()}


def least(samples: Samples) -> float:
    return min(seconds for turn in samples.rounds for seconds in turn)


def main() -> int:
    flags = parser(__doc__, rounds=3, steps=1, config="tiny")
    flags.add_argument("--target", default="h200", help="of the second report (default %(default)s)")
    flags.add_argument(
        "--assert", dest="check", action="store_true", help=f"exit 1 above {WARM}x of cold or {SECONDS:g} s"
    )
    asked, _, rest = parse_config(flags)
    with tempfile.TemporaryDirectory(prefix="bytescope-startup-") as folder:
        samples = take_turns(sides_of(asked.config, rest, asked.target, Path(folder)), asked.rounds, asked.steps)
    limit = SECONDS if asked.check else None
    warm = samples["train, warm"]
    checks = [
        Check("warm start by cold", least(warm) / least(samples["train, cold"]), WARM if asked.check else None),
        Check("warm start to the first step, s", least(warm), limit),
        *(Check(f"{name}, s", least(taken), limit) for name, taken in samples.items() if "report" in name),
    ]
    rows = [
        {
            "command": name,
            "median s": f"{taken.median:.2f}",
            "least s": f"{least(taken):.2f}",
            "spread": f"{100 * taken.spread:.0f} %",
            "to cold": str(taken.over(samples["train, cold"])),
        }
        for name, taken in samples.items()
    ]
    return finish(
        f"start of {asked.config}",
        rows,
        checks,
        {"versions": versions(), "sides": {name: taken.to_json() for name, taken in samples.items()}},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
