"""Runs jobs in worker processes in parallel, reads finished jobs from a cache, and survives crashes and Ctrl-C.

Workers are subprocesses that exchange JSON lines (`memory.compare.worker`); a thread serves each worker. If a worker
dies, its current job fails and the worker is replaced. Ctrl-C stops the workers; finished rows are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare import row_cache
from bytescope.memory.compare.search_limits import CTRL_C, Limits, Stopped
from bytescope.memory.devices.platform import simulate_devices
from bytescope.memory.errors import one_line
from bytescope.memory.host.node_memory import free_host_bytes

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target

# Maximum host bytes of all workers together, and of one compile in the shipped configs.
CEILING = 20 * 2**30
PER_WORKER = 3 * 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """A program that a worker process compiles.

    Fields:
        factory: where to import the function that makes the program, such as `module:function`.
        overrides: config key -> value, passed to the factory.
        target: name of the devices to compile for, such as "h100:8".
        name: the name of the job's file in the cache.
        label: the text shown while the job compiles.
        resolved: every config key with its value, including the defaults.
        chosen: config key -> this job's value, for the keys that a comparison varies; {} outside comparisons.
        method: name of a factory method that the worker calls with the overrides and the target instead of compiling;
            its result is JSON values. "" compiles.
        rates: path of a file with measured compute and transfer rates, which the worker uses to choose settings that
            the config leaves open; None for the built-in table.
        cpu_devices: number of CPU devices that the worker simulates for the mesh of a user's function. 0 means the
            number in the pool's environment.
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
        """Returns the line of JSON that is sent to a worker process for this job. measure: whether the worker also runs
        the step."""
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
    """A worker process, which answers one job at a time.

    cpu_devices: the number of CPU devices that the process simulates. Only jobs with the same number are sent to it.
    python: the interpreter that runs the process. folder: its current folder (default: that of this process).
    """

    def __init__(
        self,
        env: Mapping[str, str],
        cpu_devices: int = 0,
        python: str | Path = sys.executable,
        folder: Path | None = None,
    ) -> None:
        self.cpu_devices, env = cpu_devices, dict(env)
        if cpu_devices:
            simulate_devices([f"cpu:{cpu_devices}"], env)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        # The worker has its own session, so that Ctrl-C reaches only this process, which then stops the workers.
        self._process = subprocess.Popen(
            [python, "-m", "bytescope.memory", "worker"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def ask(self, message: str) -> dict[str, Any]:
        """Sends a job's message to the process and returns its answer, which contains the fields of a comparison row.
        If the process ends before it answers, returns `{"status": reason, "dead": True}`."""
        stdin = self._process.stdin
        assert stdin is not None  # it is a pipe
        try:
            stdin.write(message)
            stdin.flush()
            line = self._read_line()
        except (OSError, ValueError):  # the pipe is broken or closed
            line = b""
        if line:
            return json.loads(line)
        return {"status": self._describe_end(), "dead": True}

    def _read_line(self) -> bytes:
        """Returns a line of the process's output, b"" if the process ends without one. Children of the user's code may
        hold the pipe open after that."""
        assert self._process.stdout is not None  # it is a pipe
        output = self._process.stdout.fileno()
        poll, data, has_ended = select.poll(), b"", False
        poll.register(output, select.POLLIN)
        while b"\n" not in data:
            if poll.poll(0 if has_ended else 500):
                part = os.read(output, 1 << 16)
                data += part
                if not part:
                    return b""
            elif has_ended:
                return b""
            else:
                has_ended = self._process.poll() is not None
        return data.partition(b"\n")[0]

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the children of the user's code

    def close(self) -> None:
        """Kills the worker process, waits for it, and closes its streams."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the worker closed its output"
        if code == -signal.SIGKILL:
            return "the worker was killed, probably for lack of host memory: give --jobs=1"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == 0 or (code > 0 and not last):
            last = ["the program ended the process; remove its call of os._exit, or raise an error there"]
        return one_line(" ".join(["the worker died", f"({how}):", *last]), 300)


# Called with the labels of the running jobs and the number of finished jobs.
Progress = Callable[[Sequence[str], int], None]


class Pool:
    """A pool of worker processes, each served by a thread. Workers stay alive and wait for jobs until `stop` is
    called.

    Args:
        count: maximum number of workers. A worker starts when it gets its first job.
        env: environment variables of the workers.
        measure: whether each step is also run. Each job then gets a new process.

    Attributes:
        count: maximum number of workers.
        answers: a queue that receives (job, None) when a job begins, and (job, answer) when it ends.
    """

    def __init__(self, count: int, *, env: Mapping[str, str], measure: bool = False) -> None:
        self.count = count
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._env, self._measure, self._max_rss = env, measure, CEILING // count // 2
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._workers: set[Worker] = set()
        self.answers: queue.SimpleQueue[tuple[Job, dict[str, Any] | None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs to the pool. Their answers arrive in the queue `answers`."""
        for job in jobs:
            self._waiting.put(job)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *about: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the worker processes and waits until the threads that serve them end."""
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
            except Exception as error:  # no process could be started, or its answer is not JSON
                answer = {"status": f"no worker: {error}", "dead": True}
            if self._stopped.is_set():
                break
            self.answers.put((job, answer))
            # A measured peak is the peak of the whole process, so each measured job needs a new process. A worker
            # whose memory grew is replaced too.
            if answer.get("dead") or self._measure or answer.get("rss_bytes", 0) > self._max_rss:
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
    """Runs jobs in a new pool of workers, which ends with the last job. Returns (`Job.name` -> answer, whether Ctrl-C
    interrupted the run).

    Args:
        workers: maximum number of worker processes. env: their environment variables.
        measure: whether each step is also run.
        cache: the folder of cached answers; None disables reading and writing.
        progress: called with the labels of the running jobs and the number of finished jobs.
    """
    with Pool(max(min(workers, len(jobs)), 1), env=env, measure=measure) as pool:
        runner = JobRunner(pool, cache, progress)
        try:
            runner.ask(jobs)
        except Stopped:
            return runner.answers, True
        return runner.answers, False


class JobRunner:
    """Runs jobs in a pool of workers, each job once.

    Args:
        pool: the workers.
        cache: the folder of cached answers; None disables reading and writing.
        progress: called with the labels of the running jobs and the number of jobs that are finished since the start.
        limits: the limits on compiles and seconds; None for no limits. Cached answers and jobs with a `method` are no
            compiles.

    Attributes:
        answers: `Job.name` -> answer, for the finished jobs.
    """

    def __init__(
        self,
        pool: Pool,
        cache: Path | None = None,
        progress: Progress = lambda labels, done: None,
        limits: Limits | None = None,
    ) -> None:
        self._pool, self._cache, self._progress, self._limits = pool, cache, progress, limits or Limits()
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Returns the answers of jobs. Raises Stopped at a limit or after Ctrl-C; `answers` then has the finished
        jobs."""
        new: dict[str, Job] = {}
        for job in jobs:
            if job.name in self.answers:
                continue
            cached = row_cache.read(self._cache, job.name) if self._cache else None
            if cached:
                self.answers[job.name] = cached
            else:
                new[job.name] = job
        self._progress((), len(self.answers))
        if new:
            self._run(list(new.values()))
        return [self.answers[job.name] for job in jobs]

    def _run(self, jobs: Sequence[Job]) -> None:
        self._limits.check()
        allowed = jobs[: int(min(self._limits.max_compiles - self._limits.compiles, len(jobs)))]
        left, begun = {job.name for job in allowed}, dict[str, str]()
        self._pool.submit(allowed)
        try:
            while left:
                job, answer = _next(self._pool)
                if answer is None:
                    begun[job.name] = job.label
                else:
                    begun.pop(job.name, None)
                    left.discard(job.name)
                    self.answers[job.name] = answer
                    self._limits.compiles += not job.method
                    if self._cache and answer.get("status") == "ok":
                        row_cache.write(self._cache, job.name, answer)
                self._progress(tuple(begun.values()), len(self.answers))
        except KeyboardInterrupt:
            raise Stopped(CTRL_C) from None
        if len(allowed) < len(jobs):
            raise self._limits.too_many()


def _next(pool: Pool) -> tuple[Job, dict[str, Any] | None]:
    while True:
        with contextlib.suppress(queue.Empty):
            return pool.answers.get(timeout=0.5)  # on some systems Ctrl-C does not interrupt a wait without timeout


def worker_count(jobs: int, asked: int | None = None) -> int:
    """Returns the number of worker processes for `jobs` jobs: `asked` if given, otherwise one per CPU core of this
    process, but at most one per job. Without `asked`, it is limited so that all workers together need no more than 20
    GiB and no more than the free host memory."""
    if asked:
        return max(1, min(asked, jobs))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs, min(CEILING, free_host_bytes()) // PER_WORKER))


def environment(targets: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables for worker processes that compile for the targets with these names.

    They set the number of simulated CPU devices, and hide this machine's accelerator unless a target is `local`.
    Compiling for other devices needs no accelerator, and several workers would compete for its memory.

    env: the variables to start from (default: the variables of this process).
    """
    out = dict(os.environ if env is None else env)
    simulate_devices(targets, out)
    if "local" not in targets:
        out.setdefault("JAX_PLATFORMS", "cpu")
    return out


def environment_for(target: Target) -> dict[str, str]:
    """Returns the environment variables for workers that compile for one target. Unless the target is this machine,
    the workers do not open this machine's accelerator."""
    variables = environment([target.name])
    if target.is_described:
        variables["JAX_PLATFORMS"] = "cpu"
    return variables
