"""Jobs compiled by worker processes: in parallel, out of a cache where they can be, through crashes and Ctrl-C.

Workers are subprocesses that speak JSON lines (`memory.compare.worker`), each fed by a thread. A worker that dies fails
the job it was at, and is replaced. Ctrl-C stops the workers; finished rows are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare import row_cache
from bytescope.memory.devices.host_memory import free_host_bytes
from bytescope.memory.devices.platform import simulate_devices
from bytescope.memory.errors import one_line

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target

# Bytes that all workers together may hold, and that one compile takes at most in the shipped configs.
CEILING = 20 * 2**30
PER_WORKER = 3 * 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to compile; `memory.compare.jobs.Jobs` makes it.

    Fields:
        factory: `ProgramFactory.reference`. overrides: what the factory gets, key -> value.
        target: as the command line names it.
        name: the job's file in the cache. label: what people see while it compiles.
        resolved: every key with its value.
        chosen: the values of a comparison's grid, for the row; {} elsewhere.
        method: a method of the factory that answers in the place of a compilation, from the overrides and the target,
            in JSON values; "" compiles.
        rates: the file of --rates, by which a worker chooses what the keys leave open; None for those of the table.
        cpu_devices: CPU devices that the worker simulates, for the mesh that a user's function makes; 0 for as many as
            the pool's environment says.
    """

    factory: str
    overrides: Mapping[str, Any]
    target: str
    name: str
    label: str
    resolved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = ""
    rates: str | None = None
    cpu_devices: int = 0

    def message(self, measure: bool) -> str:
        """The job as the line of JSON that a worker reads; `measure`: whether it runs the step too."""
        return (
            json.dumps(
                {
                    "factory": self.factory,
                    "overrides": dict(self.overrides),
                    "target": self.target,
                    "measure": measure,
                    "method": self.method,
                    "rates": self.rates,
                }
            )
            + "\n"
        )


class Worker:
    """One worker process. `cpu_devices`: as in the jobs that it can do."""

    def __init__(self, env: Mapping[str, str], cpu_devices: int = 0) -> None:
        self.cpu_devices, env = cpu_devices, dict(env)
        if cpu_devices:
            simulate_devices([f"cpu:{cpu_devices}"], env)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        # A session of its own: Ctrl-C reaches us alone, and we decide what becomes of it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bytescope.memory", "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def ask(self, message: str) -> dict[str, Any]:
        """The answer to a job's message; `{"status": why, "dead": True}` when the process ends first."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        try:
            stdin.write(message)
            stdin.flush()
            line = stdout.readline()
        except (OSError, ValueError):  # the pipe is broken or closed
            line = ""
        if line.endswith("\n"):
            return json.loads(line)
        return {"status": self._last_words(), "dead": True}

    def kill(self) -> None:
        """Ends the process at once."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """Ends the process and closes its streams."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _last_words(self) -> str:
        """Why the process ended: its signal or exit code, and the last line that it wrote to stderr."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the worker closed its output"
        if code == -signal.SIGKILL:
            return "the worker was killed: out of host memory? Give --jobs=1"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return one_line(" ".join(["the worker died", f"({how}):", *last]), 300)


# Called with the labels of the jobs under way and the number of finished ones.
Progress = Callable[[Sequence[str], int], None]


class Pool:
    """Threads that each drive a worker, and the queue of their answers. Workers wait for more jobs until `stop`.

    Args:
        count: at most so many workers; one starts with its first job. env: their environment.
        measure: whether each step is run too, in a process of its own.

    Attributes:
        answers: (job, None) when a job begins, (job, answer) when it ends.
    """

    def __init__(self, count: int, *, env: Mapping[str, str], measure: bool = False) -> None:
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._env, self._measure, self._most = env, measure, CEILING // count // 2
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._workers: set[Worker] = set()
        self.answers: queue.SimpleQueue[tuple[Job, dict[str, Any] | None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs; `answers` gets what becomes of them."""
        for job in jobs:
            self._waiting.put(job)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *about: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the workers and waits for their threads."""
        self._stopped.set()
        for _ in self._threads:
            self._waiting.put(None)
        with self._lock:
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        worker: Worker | None = None
        while not self._stopped.is_set():
            job = self._waiting.get()
            if job is None:
                break
            self.answers.put((job, None))  # begun
            try:
                if worker is not None and worker.cpu_devices != job.cpu_devices:
                    self._dismiss(worker)
                    worker = None
                worker = worker or self._hire(job.cpu_devices)
                answer = worker.ask(job.message(self._measure)) if worker else {}
            except Exception as error:  # no process could be started, or it does not speak JSON
                answer = {"status": f"no worker: {error}", "dead": True}
            if self._stopped.is_set():
                break
            self.answers.put((job, answer))
            # A measured peak is that of a process, so each job needs a fresh one. One that grew is replaced too.
            if answer.get("dead") or self._measure or answer.get("rss_bytes", 0) > self._most:
                self._dismiss(worker)
                worker = None
        self._dismiss(worker)

    def _hire(self, cpu_devices: int) -> Worker | None:
        with self._lock:
            if self._stopped.is_set():
                return None
            worker = Worker(self._env, cpu_devices)
            self._workers.add(worker)
            return worker

    def _dismiss(self, worker: Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


def run(
    jobs: Sequence[Job],
    *,
    workers: int,
    env: Mapping[str, str],
    measure: bool = False,
    cache: Path | None = None,
    progress: Progress = lambda labels, done: None,
) -> tuple[dict[str, dict[str, Any]], bool]:
    """As `ask`, in a pool of its own of at most `workers` workers, with the environment `env`."""
    with Pool(max(min(workers, len(jobs)), 1), env=env, measure=measure) as pool:
        return ask(pool, jobs, cache=cache, progress=progress)


def ask(
    pool: Pool, jobs: Sequence[Job], *, cache: Path | None = None, progress: Progress = lambda labels, done: None
) -> tuple[dict[str, dict[str, Any]], bool]:
    """Answers by `Job.name`, and whether Ctrl-C came before the last of them.

    Args:
        jobs: with different names. cache: the folder of finished rows, None for no reading and no writing.
        progress: called with the labels of the jobs under way and the number of finished ones.
    """
    answers: dict[str, dict[str, Any]] = {}
    for job in jobs:
        found = row_cache.read(cache, job.name) if cache else None
        if found:
            answers[job.name] = found
    left = [job for job in jobs if job.name not in answers]
    begun: dict[str, str] = {}
    progress((), len(answers))
    pool.submit(left)
    try:
        while len(answers) < len(jobs):
            job, answer = _next(pool)
            if answer is None:
                begun[job.name] = job.label
            else:
                begun.pop(job.name, None)
                answers[job.name] = answer
                if cache and answer.get("status") == "ok":
                    row_cache.write(cache, job.name, answer)
            progress(tuple(begun.values()), len(answers))
    except KeyboardInterrupt:
        return answers, True
    return answers, False


def _next(pool: Pool) -> tuple[Job, dict[str, Any] | None]:
    while True:
        with contextlib.suppress(queue.Empty):
            return pool.answers.get(timeout=0.5)  # a wait without end would not see Ctrl-C everywhere


def worker_count(jobs: int, asked: int | None = None) -> int:
    """How many workers for so many jobs: as many as `asked`, else one per core of this process, as far as CEILING and
    the free host memory allow."""
    if asked:
        return max(1, min(asked, jobs))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs, min(CEILING, free_host_bytes()) // PER_WORKER))


def environment(targets: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The workers' environment: `env` (this process's by default) with as many simulated CPU devices as the targets
    name, and without the accelerator where no target is `local`.

    Compiling for described devices needs no card; workers that all opened one would fight for its memory.
    """
    out = dict(os.environ if env is None else env)
    simulate_devices(targets, out)
    if "local" not in targets:
        out.setdefault("JAX_PLATFORMS", "cpu")
    return out


def environment_for(target: Target) -> dict[str, str]:
    """The environment of workers that compile for one target; for a described one they open no card of this machine."""
    found = environment([target.name])
    if target.is_described:
        found["JAX_PLATFORMS"] = "cpu"
    return found
