"""What can befall a training run, a row for each kind: it strikes a run of `bytescope train`, and says what went wrong.

A `Life` is one run directory from its first start to its end. A fault strikes while it runs, or damages its files
between two starts; the next fault's start, or the last one, shows that the run goes on from where it was.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.ports import free_port

# One layer in float32 and a batch of eight rows, which is the same on one, two and four devices.
CONFIG = """
from bytescope.configs import tiny
def get_config():
    config = tiny.get_config()
    config.model.update(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, max_seq_len=32)
    config.data.update(source={text!r}, seq_len=32)
    config.batch.update(micro=8, accumulation=1)
    config.precision.preset = "fp32"
    config.mesh.strategy = "zero3"
    config.train.update(steps={steps}, log_every=1, eval_every=10, eval_sequences=24, checkpoint_every=4,
                        sample_tokens=4)
    return config
"""
STEPS = 160
TIMED = ("tokens_per_s", "step_time_s", "data_wait_s", "mfu", "hfu", "memory")
PATIENCE_S = 240.0
STALL_S = 6.0
CLOSE = 1e-4  # relative, of losses and norms across meshes: sums in another order
NEVER = ("Traceback (most recent", "KeyError", "Exception ignored", "Fatal Python error", "Segmentation fault")


class Ground:
    """A folder with a config, a text to train on, and a cache of compiled programs that the runs in it share."""

    def __init__(self, folder: Path, steps: int = STEPS):
        self.folder, self.steps, self.cache = folder, steps, folder / "cache"
        text = folder / "text"
        text.mkdir(parents=True)
        words = random.Random(3).choices(("to", "be", "or", "not", "that", "is", "the", "question"), k=40_000)
        for number in range(40):
            (text / f"{number}.txt").write_text(" ".join(words[number::40]))
        (folder / "small.py").write_text(CONFIG.format(text=str(text), steps=steps))
        self.whole: dict[int, list[dict[str, Any]]] = {}
        self.start_s = 8.0  # seconds until a run has started, as seen last

    def undisturbed(self, devices: int) -> list[dict[str, Any]]:
        """The rows of a run on so many devices to which nothing happens."""
        if devices not in self.whole:
            life = Life(self, self.folder / f"whole{devices}", random.Random(0), devices)
            began = time.monotonic()
            life.finish()
            self.start_s = 0.5 * (time.monotonic() - began)
            assert not life.wrong, life.wrong[0]
            self.whole[devices] = rows(life.workdir)
            assert [row["step"] for row in self.whole[devices] if "loss" in row] == list(range(1, self.steps + 1))
        return self.whole[devices]


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Metrics without what a clock says."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]


def same(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], close: float = 0.0) -> bool:
    """Whether two runs have the same rows: exactly, or to a relative difference of `close`."""
    if not close:
        return list(found) == list(wanted)
    return len(found) == len(wanted) and all(
        one.keys() == other.keys() and all(abs(one[key] - other[key]) <= close * abs(other[key]) for key in one)
        for one, other in zip(found, wanted, strict=True))


class Start:
    """One start of the command, in one process or several; their output goes to a file each."""

    def __init__(self, life: "Life", before: Callable[[], None] | None = None):
        life.starts += 1
        self.workdir, self.logs, self.processes = life.workdir, [], []
        port = free_port()
        for index in range(life.processes):
            many = [f"--coordinator=127.0.0.1:{port}", f"--process={index}", f"--processes={life.processes}"]
            self.logs.append(life.workdir.with_name(f"{life.workdir.name}-{life.starts}-{index}.txt"))
            with open(self.logs[-1], "w") as log:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-m", "bytescope.train", *life.flags(), *(many if life.processes > 1 else [])],
                    stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=life.environment(),
                    preexec_fn=lambda: _as_from_a_terminal(before), start_new_session=True))

    def running(self) -> bool:
        """Whether all processes still run."""
        return all(process.poll() is None for process in self.processes)

    def until(self, reached: Callable[[], bool]) -> bool:
        """Waits for a moment; False if the run ended before it came."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if reached():
                return True
            if not self.running():
                return False
            time.sleep(0.002)
        return False

    def send(self, number: int, index: int = 0) -> None:
        """A signal to one of the processes, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.processes[index].send_signal(number)

    def codes(self) -> list[int | None]:
        """The exit codes, once all have ended by themselves; None for one that had to be killed."""
        deadline, found = time.monotonic() + PATIENCE_S, []
        for process in self.processes:
            try:
                found.append(process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                found.append(None)
        return found

    def text(self) -> str:
        """What all of them said."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


def _as_from_a_terminal(before: Callable[[], None] | None) -> None:
    """In the new process: a shell that runs this script in the background has made it ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if before is not None:
        before()


@dataclasses.dataclass
class Fault:
    """One fault that befell a life; `identical` once that life is over."""

    kind: str
    recovered: bool = True
    identical: bool | None = None


class Life:
    """One run directory and what befalls it; `wrong` lists what should not have been, in words.

    Args:
      devices: simulated, of one process. processes: with a device each, if more than one.
    """

    def __init__(self, ground: Ground, workdir: Path, rng: random.Random, devices: int = 1, processes: int = 1):
        self.ground, self.workdir, self.rng = ground, workdir, rng
        self.devices, self.processes, self.starts = devices, processes, 0
        self.began_with = devices * processes  # devices of the undisturbed run to compare with
        self.faults: list[Fault] = []
        self.wrong: list[str] = []
        self.over = False  # the run came to its end
        self._unproved: list[Fault] = []  # faults after which no start has trained yet
        self._doubtful = self._due = 0  # a checkpoint that may be damaged, and the newest that is not

    def suffer(self, kind: str) -> bool:
        """Lets a fault of this kind happen; False if the run came to its end before that."""
        fault, before = Fault(kind), len(self.wrong)
        self.faults.append(fault)
        struck = KINDS[kind](self)
        fault.recovered &= len(self.wrong) == before
        if struck is False:
            self.faults.remove(fault)
        self._unproved.append(fault)
        return struck is not False

    def finish(self) -> None:
        """The last start, which must come to the end of the run."""
        start = self.begin()
        self.expect(start, 0)
        self._prove(start)

    def identical(self, close: float = 0.0) -> bool:
        """Whether the curve is that of the undisturbed run; notes it in all faults."""
        try:
            found = same(rows(self.workdir), self.ground.undisturbed(self.began_with), close)
        except (OSError, ValueError, KeyError) as error:
            self.wrong.append(f"its rows cannot be read: {error}")
            found = False
        for fault in self.faults:
            fault.identical = found
        return found

    def flags(self) -> list[str]:
        """The arguments of a start."""
        ranks = self.devices * self.processes
        return [f"--config={self.ground.folder / 'small.py'}", f"--workdir={self.workdir}",
                f"--config.train.cache_dir={self.ground.cache}", f"--config.batch.micro={8 // ranks}",
                f"--config.train.stall_timeout={STALL_S}"]

    def environment(self) -> dict[str, str]:
        """The environment of a start."""
        return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices), "PJRT_NPROC": "8",
                "PYTHONUNBUFFERED": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

    def saved(self) -> list[int]:
        """Steps with a finished checkpoint."""
        folder = self.workdir / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())

    def doubt(self, step: int) -> None:
        """From now on that checkpoint may be damaged: the next start may go on from it, or from the one before."""
        self._doubtful = step

    def begin(self, before: Callable[[], None] | None = None) -> Start:
        """Starts the run, and remembers from which checkpoint it has to go on; `before` runs in the new process."""
        self._due = max((step for step in self.saved() if step != self._doubtful), default=0)
        return Start(self, before)

    def train(self, more: int, before: Callable[[], None] | None = None) -> Start | None:
        """Starts the run and returns once it has written `more` new rows; None if it ended before that."""
        start = self.begin(before)
        if start.until(lambda: self._reached(start, more)):
            self._prove(start)
            return start
        self.over = True
        self.expect(start, 0)
        self._prove(start)
        return None

    def newest(self) -> int:
        """Step of the newest row on the disk."""
        path = self.workdir / "metrics.jsonl"
        with contextlib.suppress(OSError):
            for line in reversed(path.read_text(errors="replace").splitlines()[-20:]):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return json.loads(line)["step"]
        return 0

    def expect(self, start: Start, *allowed: int | None) -> None:
        """Notes what a start that has ended did wrong: another exit code, a traceback."""
        codes, text = start.codes(), start.text()
        if not set(codes) <= set(allowed):
            self.wrong.append(f"exit codes {codes}, not {allowed}: {text[-600:]}")
        self.wrong += [f"it said {word!r}: {text[-1200:]}" for word in NEVER if word in text]

    def _reached(self, start: Start, more: int) -> bool:
        shown = SHOWN.findall(start.logs[0].read_text(errors="replace"))
        return bool(shown) and int(shown[-1]) >= self._resumed(start) + more

    def _resumed(self, start: Start) -> int:
        found = RESUMED.search(start.logs[0].read_text(errors="replace"))
        return int(found[1]) if found else 0

    def _prove(self, start: Start) -> None:
        """Notes it if a start that trained did not go on from the newest good checkpoint."""
        at, text = self._resumed(start), start.text()
        if at not in (self._due, self._doubtful) and " is finished" not in text:
            self.wrong.append(f"resumed at step {at}, not {self._due}: {text[-600:]}")
            for fault in self._unproved:
                fault.recovered = False
        if at < self._doubtful and " is damaged" not in text:
            self.wrong.append(f"checkpoint {self._doubtful} was left out without a word: {text[-600:]}")
        self._unproved, self._doubtful = [], 0


SHOWN = re.compile(r"^step +(\d+)/", re.MULTILINE)
RESUMED = re.compile(r"resumed at step (\d+)")


def _strike(life: Life, start: Start) -> None:
    """Kills one of the processes; the others end by themselves."""
    start.send(signal.SIGKILL, life.rng.randrange(life.processes))
    # jax aborts those whom the news does not reach first.
    life.expect(start, -signal.SIGKILL, *((5, -signal.SIGABRT) if life.processes > 1 else ()))


def kill_starting(life: Life) -> None:
    """SIGKILL while it imports, compiles or restores."""
    start = life.begin()
    deadline = time.monotonic() + life.rng.uniform(0.05, 1.0) * life.ground.start_s
    while time.monotonic() < deadline and "\nstep " not in start.text():
        time.sleep(0.02)
    _strike(life, start)


def kill_stepping(life: Life) -> bool:
    """SIGKILL some milliseconds after a row."""
    start = life.train(life.rng.randint(1, 9))
    if start is None:
        return False
    time.sleep(life.rng.uniform(0, 0.05))
    _strike(life, start)
    return True


def kill_evaluating(life: Life) -> bool:
    """SIGKILL after the row before an evaluation."""
    due = max(life.saved(), default=0)
    start = life.train(10 - due % 10 or 10)
    if start is None:
        return False
    time.sleep(life.rng.uniform(0, 0.03))
    _strike(life, start)
    return True


def kill_saving(life: Life) -> bool:
    """SIGKILL while a checkpoint is being written."""
    start = life.train(life.rng.randint(1, 4))
    if start is None:
        return False
    unfinished = life.workdir / "checkpoints"
    if not start.until(lambda: any(unfinished.glob("*.orbax-checkpoint-tmp"))):
        return False
    time.sleep(life.rng.uniform(0, 0.02))
    _strike(life, start)
    return True


def _stop(*names: str) -> Callable[[Life], bool]:
    """Signals at a random row, some of them to one process and some to another."""
    numbers = [signal.Signals[name] for name in names]

    def stop(life: Life) -> bool:
        start = life.train(life.rng.randint(1, 9))
        if start is None:
            return False
        for number in numbers:
            time.sleep(life.rng.uniform(0, 0.2))
            start.send(number, life.rng.randrange(life.processes))
        life.expect(start, 0, *((130,) if "SIGINT" in names[1:] else ()))
        told = any(words in start.text() for words in ("saved step ", f"{life.ground.steps}/{life.ground.steps}"))
        if 130 not in start.codes() and not told:
            life.wrong.append(f"it did not say what it saved: {start.text()[-400:]}")
        return True

    return stop


def signals_at_the_end(life: Life) -> bool:
    """Two signals from the last update on: during the last evaluation, the last save, the sample, the end."""
    due = max(life.saved(), default=0)
    start = life.train(life.ground.steps - due - life.rng.randint(0, 2))
    if start is not None:
        for number in life.rng.choice(((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT))):
            time.sleep(life.rng.uniform(0, 0.4))
            start.send(number)
        life.expect(start, 0, 130)
    return start is not None


def stopped_for_a_while(life: Life) -> bool:
    """One of the processes stands still: it is named, and the run goes on when it does."""
    start = life.train(life.rng.randint(1, 9))
    if start is None:
        return False
    index = life.rng.randrange(life.processes)
    start.send(signal.SIGSTOP, index)
    named = f"process {index} has been silent for "
    if not start.until(lambda: named in start.text()):
        life.wrong.append(f"process {index} stood still and was not named: {start.text()[-600:]}")
    start.send(signal.SIGCONT, index)
    start.send(signal.SIGTERM, index)
    life.expect(start, 0)
    return True


def second_training(life: Life) -> bool:
    """Another start in the same directory: it is refused, and the first one goes on."""
    first = life.train(2)
    if first is None:
        return False
    first.send(signal.SIGSTOP)  # so that it does not come to its end meanwhile; it holds the directory all the same
    second = Start(life)
    life.expect(second, 2)
    first.send(signal.SIGCONT)
    if f"is in use by process {first.processes[0].pid} on " not in second.text():
        life.wrong.append(f"the second training was not told of the first: {second.text()[-400:]}")
    first.send(signal.SIGTERM)
    life.expect(first, 0)
    return True


def file_limit(life: Life) -> None:
    """Every file may have so many bytes and no more, as with a quota."""
    size = life.rng.randint(40_000, 160_000)
    start = life.begin(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    life.expect(start, 0, 2)


def full_disk(life: Life) -> None:
    """A disk with little room left; there is room again for the next start."""
    disk = life.workdir.parent
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    left = life.rng.randint(0, 700_000)
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        file.write(b"\0" * max(free - left, 0))
    try:
        start = life.begin()
        life.expect(start, 0, 2)
        if start.processes[0].returncode == 2 and "No space left on device" not in start.text():
            life.wrong.append(f"a full disk was not named: {start.text()[-400:]}")
    finally:
        filler.unlink(missing_ok=True)


DAMAGES: dict[str, Callable[[random.Random, bytes], bytes | None]] = {
    "half": lambda rng, content: content[: len(content) // 2],
    "empty": lambda rng, content: b"",
    "flipped": lambda rng, content: _flipped(rng, content),
    "zeros": lambda rng, content: bytes(len(content)),
    "another": lambda rng, content: b'["something else"]',
    "gone": lambda rng, content: None,
}


def _flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def damage(rng: random.Random, path: Path) -> None:
    """Damages a file in one of the ways."""
    after = DAMAGES[rng.choice(sorted(DAMAGES))](rng, path.read_bytes())
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)


def damaged_checkpoint(life: Life) -> bool:
    """A file of the newest checkpoint."""
    if not life.saved():
        return False
    newest = life.saved()[-1]
    files = sorted(path for path in (life.workdir / "checkpoints" / str(newest)).rglob("*") if path.is_file())
    damage(life.rng, life.rng.choice(files))
    life.doubt(newest)
    return True


def damaged_rows(life: Life) -> bool:
    """The end of metrics.jsonl, behind the rows up to the newest checkpoint."""
    path = life.workdir / "metrics.jsonl"
    if not path.exists():
        return False
    good = max(life.saved(), default=0)
    lines = path.read_bytes().splitlines(keepends=True)
    late = [line for line in lines if b'"step": ' in line and int(line.split(b'"step": ')[1].split(b",")[0]) > good]
    kept = lines[: len(lines) - len(late)] if life.rng.random() < 0.5 else lines
    ends = (b'{"step": 9', b"\0" * 300, b"[]\nnull\n17\n", b'{"step": "x", "eval_loss": null}\n', b"\xff\xfe\xfd",
            b'{"step": 100000, "loss": 0.1}\n')
    path.write_bytes(b"".join(kept) + life.rng.choice(ends))
    return True


def damaged_config(life: Life) -> bool:
    """config.json of the run: refused in a line; restored, the run goes on."""
    path = life.workdir / "config.json"
    if not path.exists():
        return False
    whole = path.read_bytes()
    while path.exists() and path.read_bytes() == whole:
        path.write_bytes(life.rng.choice((b"", b"{", b"null", b"[]", b"{}", bytes(200), whole[:-200],
                                          whole.replace(b'"config"', b'"confi"'), b'{"config": 1}')))
    start = life.begin()
    life.expect(start, 2)
    if "config.json is damaged" not in start.text():
        life.wrong.append(f"a damaged config.json was not named: {start.text()[-400:]}")
    path.write_bytes(whole)
    return True


def damaged_cache(life: Life) -> bool:
    """Compiled programs of the cache."""
    entries = sorted(life.ground.cache.glob("*-cache"))
    for path in life.rng.sample(entries, min(3, len(entries))):
        with contextlib.suppress(FileNotFoundError):  # another life may have found it
            damage(life.rng, path)
    return bool(entries)


def leftovers(life: Life) -> None:
    """What a kill at the worst moment leaves: half files beside the real ones, and a lock that nobody holds."""
    folder = life.workdir / "checkpoints" / f"{life.newest() + 1}.orbax-checkpoint-tmp"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "half").write_bytes(bytes(100))
    for name in ("config.json.tmp", "metrics.jsonl.tmp", "memory.json.tmp", "run.lock"):
        (life.workdir / name).write_bytes(b'{"pid": 1, "ho')


def another_mesh(life: Life) -> None:
    """From now on the run has other devices."""
    life.devices = life.rng.choice([count for count in (1, 2, 4) if count != life.devices])


KINDS: dict[str, Callable[[Life], bool | None]] = {
    "killed while it starts": kill_starting, "killed in a step": kill_stepping,
    "killed in an evaluation": kill_evaluating, "killed in a save": kill_saving,
    "SIGTERM": _stop("SIGTERM"), "SIGINT": _stop("SIGINT"), "SIGHUP": _stop("SIGHUP"),
    "two signals": _stop("SIGTERM", "SIGINT"), "two interrupts": _stop("SIGINT", "SIGINT"),
    "two signals at the end": signals_at_the_end, "a second training": second_training,
    "no file over a limit": file_limit, "full disk": full_disk,
    "damaged checkpoint": damaged_checkpoint, "damaged metrics.jsonl": damaged_rows,
    "damaged config.json": damaged_config, "damaged compile cache": damaged_cache, "leftovers": leftovers,
    "another mesh": another_mesh,
    "one of two killed": kill_stepping, "one of two killed in a save": kill_saving,
    "one of two stopped for a while": stopped_for_a_while,
    "one of two told to stop": _stop("SIGTERM"), "two of two told to stop": _stop("SIGHUP", "SIGTERM"),
}
