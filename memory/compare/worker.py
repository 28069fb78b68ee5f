"""The worker process of a comparison: reads jobs as JSON lines from stdin, writes answers as JSON lines to stdout.

The pool starts workers as `python -m bytescope.memory worker`, one per core, so that jax and the compiler are loaded
once for many programs. A worker imports the factory of a job once. Stdout is reserved for answers: anything that
libraries print goes to stderr.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bytescope.memory.compare.program_factory import ProgramFactory, load_factory
from bytescope.memory.errors import ReportError, message_of, one_line
from bytescope.memory.processes import ForkedError, end_with_parent

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.records.report_record import ReportRecord


def main() -> None:
    """Runs a worker process. It reads jobs from stdin, one line of JSON each, and writes one line of JSON to stdout as
    the answer, until stdin is closed. If a job fails, the answer contains the error's description under "status"."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()  # before jax is imported
    factories: dict[str, ProgramFactory] = {}
    programs = HeldProgram()
    for line in sys.stdin:
        try:
            job = json.loads(line)
            if job["factory"] not in factories:
                factories[job["factory"]] = load_factory(job["factory"])
                choose_platform(fraction=factories[job["factory"]].memory_fraction.value)
            answer = answer_to(job, factories[job["factory"]], programs)
        except Exception as error:  # an error of one combination must not stop the others
            answer = {"status": describe_error(error)}
        except ForkedError as error:  # this process is a copy of the worker
            answers.write(json.dumps({"status": str(error), "dead": True}) + "\n")
            answers.flush()
            os.kill(error.original, signal.SIGKILL)
            os._exit(1)
        gc.collect()
        try:
            answers.write(json.dumps(answer | {"rss_bytes": _resident_bytes()}) + "\n")
            answers.flush()
        except BrokenPipeError:  # the pool has stopped waiting
            os._exit(0)


class HeldProgram:
    """The last program of a worker, with what jax has traced of it. Jobs that differ only in compiler options use it
    again, so that it is traced once."""

    def __init__(self) -> None:
        self._key, self._program = "", cast("PreparedProgram | None", None)

    def make(self, factory: ProgramFactory, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns the program of a factory: the last program if factory, overrides and target are the same, else a new
        one. Raises the factory's errors."""
        key = repr((factory.reference, sorted(overrides.items()), target))
        if self._program is None or key != self._key:
            self._key, self._program = "", None
            self.free_memory()
            self._program, self._key = factory(overrides, target), key
        return self._program

    def free_memory(self) -> None:
        """Frees the memory that jax still uses for the last program."""
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()


def answer_to(job: dict[str, Any], factory: ProgramFactory, programs: HeldProgram | None = None) -> dict[str, Any]:
    """Compiles the program of one job. Returns the fields of its comparison row.

    factory: the function that makes the program from config overrides and a target. job: field -> value of a
    `worker_pool.Job`. If the job names a `method` of the factory, this method is called instead of compiling, and its
    result is returned. programs: the program of the last job. Raises the factory's errors.
    """
    from bytescope.memory.analysis import report_of
    from bytescope.memory.devices import targets
    from bytescope.memory.records.schedule_records import to_json
    from bytescope.memory.seconds import rates

    rates.use(job.get("rates"))
    target = targets.parse(job["target"], factory.memory_fraction)
    overrides = job["overrides"]
    if job.get("method"):
        return {"status": "ok", **getattr(factory, job["method"])(overrides, target)}
    traced, options = factory.split_options(overrides, target)
    program = (programs or HeldProgram()).make(factory, traced, target)
    began = time.perf_counter()
    compilation, judged = program.compile() if options is None else program.compile(options)
    seconds = time.perf_counter() - began
    report = report_of(compilation, target=judged, roles=program.roles, loop=program.loop)
    row: dict[str, Any] = {
        "status": "ok",
        "peak_bytes": report.peak_bytes,
        "allocated_bytes": report.allocated_bytes,
        "predicted_bytes": report.predicted_bytes,
        "temp_bytes": report.xla.temp_bytes,
        "host_bytes": report.host_bytes,
        "to_host_bytes": report.moved("to host"),
        "to_device_bytes": report.moved("to device"),
        "residual_bytes": residual_bytes(report),
        "breakdown": dict(report.breakdown),
        "limit_bytes": report.limit_bytes,
        "fits": report.fits,
        "xla_recomputes": report.xla_recomputes,
        "xla_margin_bytes": report.xla_budget.margin_bytes,
        "compile_seconds": seconds,
        "target": dict(report.target),
        "versions": dict(report.versions),
        "settled": dict(program.settled),
        "batch": program.batch,
        "policy": program.policy,
        "notes": list(program.notes),
        "work": dict(report.work),
        **count_flops(compilation.jaxpr, program.model_flops),
        "schedule": to_json(report.schedule),
        "calls_per_update": program.calls_per_update,
        "tokens_per_update": program.tokens_per_update,
    }
    if job["measure"]:
        if program.measure is None:
            raise ReportError(
                f"--measure cannot run {program.name} on this machine: leave out --measure to compile only"
            )
        row["measured"] = dict(program.measure(compilation))
    return row


def residual_bytes(report: ReportRecord) -> int:
    """Returns the bytes of residuals on one device at the highest point of the memory timeline where a residual is
    live. Residuals are activations that the forward pass keeps for the backward pass. This point may differ from the
    peak, because residuals are already freed at a peak in the optimizer update."""
    steps: Counter[int] = Counter()
    for buffer in report.buffers:
        if buffer.category == "residuals" and buffer.memory == "device":
            steps[buffer.start] += buffer.bytes
            steps[buffer.end + 1] -= buffer.bytes
    residuals = itertools.accumulate(steps[point.index] for point in report.timeline)
    return max(((point.bytes, size) for point, size in zip(report.timeline, residuals) if size), default=(0, 0))[1]


def count_flops(jaxpr: Any, model_flops: Callable[[float], float]) -> dict[str, float | None]:
    """Returns the FLOPs of one call of the step over all devices, as the fields of a comparison row: `model_flops`
    (without recomputation), `hardware_flops` (with it), `recomputed_flops`, `kernel_recompute_flops` and
    `recompute_flops_fraction` (recomputed / model FLOPs). Returns {} if the program has no jaxpr.

    model_flops: a function from the FLOPs counted in the jaxpr without recomputation to the model FLOPs.
    """
    from bytescope.memory.cost.flops import count

    if jaxpr is None:
        return {}
    flops = count(jaxpr)
    model = model_flops(flops.model_flops)
    return {
        "recomputed_flops": flops.recomputed,
        "recompute_flops_fraction": flops.recomputed / model if model else 0.0,
        "kernel_recompute_flops": flops.kernel_recomputed,
        "model_flops": model,
        "hardware_flops": flops.hardware_flops,
    }


def describe_error(error: BaseException, max_length: int = 300) -> str:
    """Returns a one-line description of an error, with up to `max_length` characters. For an error that the user can
    fix, this is its message. For other errors, the error's type precedes the message."""
    text = message_of(error) or type(error).__name__
    return one_line(text if hasattr(error, "exit_code") else f"{type(error).__name__}: {text}", max_length)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
