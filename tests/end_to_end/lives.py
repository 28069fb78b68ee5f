"""Lives of training runs: a run directory from its first start to its last, each start watched from outside.

A fault (end_to_end/faults.py) strikes while a start runs, or damages its files between two starts; the next start shows
that the run goes on from where it was, the last one that its curve is that of a run to which nothing happened.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.devices.platform import THREADS_VARIABLE
from support.models import weights
from support.ports import free_port

# Runs before the command, in its process: a shell that runs this script in the background has made it ignore Ctrl-C.
# A program of its own, since the process of the tests has threads and is not to be forked.
BEFORE = """
import os, resource, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
if size := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
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
# Adapters over a quantized base, learned from packed chats: keys beside hf:FOLDER.
ADAPTERS = {
    "lora.rank": 4,
    "lora.base": "nf4",
    "lora.dropout": 0.1,
    "data.format": "chat",
    "data.seq_len": 64,
    "batch.accumulation": 1,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 4,
    "train.log_every": 1,
    "train.eval_every": 10,
    "train.eval_sequences": 16,
    "train.checkpoint_every": 4,
    "train.sample_tokens": 4,
}
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
}
WORDS = ("to", "be", "or", "not", "that", "is", "the", "question")
STEPS = 160
TIMED = ("tokens_per_s", "step_time_s", "data_wait_s", "mfu", "hfu", "memory", "host_memory")
PATIENCE_S = 240.0
STALL_S = 6.0
CLOSE = 1e-4  # relative, of losses and norms across meshes: sums in another order
NEVER = ("Traceback (most recent", "KeyError", "Exception ignored", "Fatal Python error", "Segmentation fault")


class Ground:
    """A folder with a config, what it trains on, and a cache of compiled programs that the runs in it share.

    Args:
      adapters: train adapters of a quantized model on chats, on one device, instead of all parameters on text.
    """

    def __init__(self, folder: Path, steps: int = STEPS, adapters: bool = False):
        self.folder, self.steps, self.cache = folder, steps, folder / "cache"
        folder.mkdir(parents=True)
        self.flags = self._adapters() if adapters else self._all_parameters()
        self.whole: dict[int, list[dict[str, Any]]] = {}
        self.start_s = 8.0  # seconds until a run has started, as seen last

    def _all_parameters(self) -> list[str]:
        text = self.folder / "text"
        text.mkdir()
        words = random.Random(3).choices(WORDS, k=40_000)
        for number in range(40):
            (text / f"{number}.txt").write_text(" ".join(words[number::40]))
        (self.folder / "small.py").write_text(CONFIG.format(text=str(text), steps=self.steps))
        return [str(self.folder / "small.py")]

    def _adapters(self) -> list[str]:
        rng, source = random.Random(3), self.folder / "chats.jsonl"
        talks = [
            [
                {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))}
                for role in ("user", "assistant")
            ]
            for _ in range(800)
        ]
        source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))
        keys = {**ADAPTERS, "data.source": source, "train.steps": self.steps}
        return [
            f"hf:{weights.llama(self.folder / 'base', **BASE)}",
            *(f"--config.{key}={value}" for key, value in keys.items()),
        ]

    def undisturbed(self, devices: int) -> list[dict[str, Any]]:
        """The rows of a run on so many devices to which nothing happens."""
        if devices not in self.whole:
            life = Life(self, self.folder / f"whole{devices}" / "run", random.Random(0), devices)
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
        for one, other in zip(found, wanted, strict=True)
    )


class Start:
    """One start of the command, in one process or several; their output goes to a file each."""

    def __init__(self, life: "Life", file_limit: int = 0):
        life.starts += 1
        self.workdir, self.logs, self.processes = life.workdir, [], []
        self.port = free_port()
        for index in range(life.processes):
            many = [f"--coordinator=127.0.0.1:{self.port}", f"--process={index}", f"--processes={life.processes}"]
            # Not beside the run: that disk may be full.
            self.logs.append(life.ground.folder / f"{life.workdir.parent.name}-{life.starts}-{index}.txt")
            with open(self.logs[-1], "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-c",
                            BEFORE,
                            str(file_limit),
                            "-m",
                            "bytescope.memory",
                            "train",
                            *life.flags(),
                            *(many if life.processes > 1 else []),
                        ],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=life.environment(),
                        start_new_session=True,
                    )
                )

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

    def suffer(self, kind: str, strike: Callable[["Life"], bool | None]) -> bool:
        """Lets a fault of this kind happen; False if the run came to its end before that."""
        fault, before = Fault(kind), len(self.wrong)
        self.faults.append(fault)
        struck = strike(self)
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
        return [
            *self.ground.flags,
            f"--workdir={self.workdir}",
            f"--config.train.cache_dir={self.ground.cache}",
            f"--config.batch.micro={8 // ranks}",
            f"--config.train.stall_timeout={STALL_S}",
        ]

    def environment(self) -> dict[str, str]:
        """The environment of a start; threads are its own choice."""
        mine = {key: value for key, value in os.environ.items() if key != THREADS_VARIABLE}
        return {
            **mine,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": mine.get("XLA_FLAGS", "--xla_backend_optimization_level=0"),
        }

    def saved(self) -> list[int]:
        """Steps with a finished checkpoint."""
        folder = self.workdir / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())

    def doubt(self, step: int) -> None:
        """From now on that checkpoint may be damaged: the next start may go on from it, or from the one before."""
        self._doubtful = step

    def begin(self, file_limit: int = 0) -> Start:
        """Starts the run, and remembers from which checkpoint it has to go on; `file_limit`: the most bytes that a file
        of it may have, 0 for any number."""
        saved = self.saved()
        if self._doubtful not in saved:  # a start that was killed has set it aside
            self._doubtful = 0
        self._due = max((step for step in saved if step != self._doubtful), default=0)
        return Start(self, file_limit)

    def train(self, more: int) -> Start | None:
        """Starts the run and returns once it has written `more` new rows; None if it ended before that."""
        start = self.begin()
        struck = start.until(lambda: self.reached(start, more))
        self.proceed(start, struck)
        return start if struck else None

    def proceed(self, start: Start, struck: bool) -> None:
        """Notes what a start that trains, or came to its end before it was `struck`, did wrong until now."""
        if not struck:
            self.over = True
            self.expect(start, 0)
        self._prove(start)

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

    def reached(self, start: Start, more: int) -> bool:
        """Whether a start has printed so many rows."""
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
