"""An hour of faults: runs of `bytescope train` are killed, stopped, damaged and starved of room, and must lose nothing.

    python tests/end_to_end/hour_of_faults.py --minutes=60 --seed=1

Each life is one run directory with some faults from its first start to its last; at the end its rows are those of a run
to which nothing happened: exactly where the mesh stayed, to a relative 1e-4 where it changed. Life N of seed S is the
same faults again: `--life=N`. Prints a line a life, and a table by kind of fault; exits with 1 if anything was lost.
"""

import argparse
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from end_to_end.faults import KINDS
from end_to_end.lives import CLOSE, Fault, Ground, Life

BETWEEN = ["damaged checkpoint", "damaged metrics.jsonl", "damaged compile cache", "leftovers"]
STRIKES = [
    "killed while it starts",
    "killed in a step",
    "killed in an evaluation",
    "killed in a save",
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "two signals",
    "two interrupts",
]
# Sort of life -> its strikes, each with a start of its own; what happens between starts comes on top.
SORTS = {
    "one device": [*STRIKES, "damaged config.json", "a second training", "no file over a limit"],
    "full disks": ["full disk", "killed in a save", "full disk", "killed in a step", "full disk"],
    "two processes": [
        "one of two killed",
        "one of two killed in a save",
        "one of two told to stop",
        "two of two told to stop",
        "one of two stopped for a while",
        "strangers at the port",
    ],
    "other meshes": STRIKES,
    "adapters": STRIKES,
}
ORDER = ("one device", "other meshes", "adapters", "two processes", "one device", "full disks")
STRIKES_A_LIFE = 8
DISK_BYTES = 24 << 20


def plan(sort: str, rng: random.Random) -> list[str]:
    """The faults of a life, in order."""
    faults = []
    pool = rng.sample(SORTS[sort], len(SORTS[sort])) * 3
    for strike in pool[:STRIKES_A_LIFE]:
        faults.append(strike)
        if rng.random() < 0.5:
            faults.append(rng.choice(BETWEEN))
        if sort == "other meshes" and rng.random() < 0.6:
            faults.append("another mesh")
    if sort in ("one device", "other meshes", "adapters"):
        faults.append("two signals at the end")
    return faults


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A folder that is a disk of its own while the context lasts; False where no disk may be mounted."""
    folder.mkdir(parents=True)
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "faults", str(folder)],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def live(grounds: Mapping[str, Ground], number: int, seed: int) -> tuple[str, Life]:
    """One life, from its first start to its last, on the ground of its sort, if it has one of its own, or on "any"."""
    rng, sort = random.Random(f"{seed} {number}"), ORDER[number % len(ORDER)]
    ground = grounds.get(sort, grounds["any"])
    place = ground.folder / f"life{number}"
    with small_disk(place) as mounted:
        if sort == "full disks" and not mounted:
            sort = "one device"
        devices, processes = {"two processes": (1, 2), "other meshes": (2, 1)}.get(sort, (1, 1))
        life = Life(ground, place / "run", rng, devices, processes)
        for kind in plan(sort, rng):
            if life.wrong or life.over:
                break
            life.suffer(kind, KINDS[kind])
        if not life.wrong:
            life.finish()
        if not life.wrong and not life.identical(CLOSE if sort == "other meshes" else 0.0):
            life.wrong.append("its curve is another one")
        if life.wrong:
            shutil.copytree(place, ground.folder / f"wrong{number}", dirs_exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    if not life.wrong:
        for log in ground.folder.glob(f"{place.name}-*.txt"):
            log.unlink()
    return sort, life


def table(faults: Sequence[Fault]) -> list[str]:
    """Tried, recovered and identical, by kind of fault."""
    tried = Counter(fault.kind for fault in faults)
    recovered = Counter(fault.kind for fault in faults if fault.recovered)
    identical = Counter(fault.kind for fault in faults if fault.identical)
    rows = [(kind, tried[kind], recovered[kind], identical[kind]) for kind in sorted(tried)]
    rows.append(("all", tried.total(), recovered.total(), identical.total()))
    return [
        "| fault | tried | recovered | identical |",
        "|---|---|---|---|",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]


def versions() -> str:
    """What ran, and when."""
    found = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "orbax-checkpoint")]
    return f"{time.strftime('%Y-%m-%d')}; {', '.join(found)}, Python {platform.python_version()}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="no life begins after so many minutes (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="lives at a time (2)")
    parser.add_argument("--life", type=int, help="this one alone")
    parser.add_argument("--folder", type=Path, help="where to work; it stays (default: a temporary one)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs lives until the time is over; returns 1 if a fault was not recovered from, or changed a curve."""
    args = parse(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    place, began = folder / f"{time.time():.0f}", time.monotonic()
    grounds = {"any": Ground(place / "any"), "adapters": Ground(place / "adapters", adapters=True)}
    print(f"{versions()}; seed {args.seed}; {place}", flush=True)
    for name, devices in (("any", 1), ("any", 2), ("adapters", 1)):
        grounds[name].undisturbed(devices)
    faults: list[Fault] = []
    wrong = 0
    numbers = iter([args.life] if args.life is not None else range(10**6))
    with ThreadPoolExecutor(args.workers) as pool:
        pending = {
            pool.submit(live, grounds, number, args.seed): number
            for number in (next(numbers, None) for _ in range(args.workers))
            if number is not None
        }
        while pending:
            done = next(as_completed(pending))
            number, (sort, life) = pending.pop(done), done.result()
            faults += life.faults
            wrong += bool(life.wrong)
            print(
                f"{(time.monotonic() - began) / 60:5.1f} min  life {number:>3}, {sort}: {len(life.faults)} faults in "
                f"{life.starts} starts; {len(faults)} so far, {wrong} lives wrong",
                flush=True,
            )
            print(f"           {', '.join(fault.kind for fault in life.faults)}", flush=True)
            for text in life.wrong:
                print(f"  WRONG: {text}", flush=True)
            if time.monotonic() - began < 60 * args.minutes and (number := next(numbers, None)) is not None:
                pending[pool.submit(live, grounds, number, args.seed)] = number
    print("\n".join(["", *table(faults)]), flush=True)
    if wrong or args.folder:
        print(f"kept in {place}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
