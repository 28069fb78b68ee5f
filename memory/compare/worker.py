"""A worker process of a search: jobs as JSON lines on standard input, answers as JSON lines on standard output.

The pool starts it as `python -m bytescope.memory worker`: one process per core, so that jax and the compiler are
loaded once for many programs. A job names its factory, which is imported once. Standard output is kept for answers:
what libraries print goes to stderr.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.compare.program_factory import ProgramFactory, load_factory
from bytescope.memory.errors import ReportError, message_of, one_line

if TYPE_CHECKING:
    from bytescope.memory.records.report_record import ReportRecord


def main() -> None:
    """Answers the jobs on standard input until it ends; a job that fails is answered with the error as its status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()  # before jax is imported
    factories: dict[str, ProgramFactory] = {}
    for line in sys.stdin:
        try:
            job = json.loads(line)
            if job["factory"] not in factories:
                factories[job["factory"]] = load_factory(job["factory"])
            answer = answer_to(job, factories[job["factory"]])
        except Exception as error:  # whatever one combination runs into, the others go on
            answer = {"status": status_of(error)}
        _forget()
        try:
            answers.write(json.dumps(answer | {"rss_bytes": _resident()}) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody waits any more
            os._exit(0)


def answer_to(job: dict[str, Any], factory: ProgramFactory) -> dict[str, Any]:
    """The figures of one job, the JSON of `worker_pool.Job.message`: the fields of a row.

    A job with a `method` compiles nothing, and the answer is the method's. Raises the factory's errors.
    """
    from bytescope.memory.analysis import report_of
    from bytescope.memory.devices import targets
    from bytescope.memory.records.schedule_records import to_json
    from bytescope.memory.seconds import rates

    rates.use(job.get("rates"))
    target = targets.parse(job["target"])
    overrides = job["overrides"]
    if job.get("method"):
        return {"status": "ok", **getattr(factory, job["method"])(overrides, target)}
    program = factory(overrides, target)
    began = time.perf_counter()
    compilation, judged = program.compile()
    seconds = time.perf_counter() - began
    report = report_of(compilation, target=judged, roles=program.roles, loop=program.loop)
    row = {
        "status": "ok",
        "peak_bytes": report.peak_bytes,
        "allocated_bytes": report.allocated_bytes,
        "temp_bytes": report.xla.temp_bytes,
        "host_bytes": report.host_bytes,
        "to_host_bytes": report.moved("to host"),
        "to_device_bytes": report.moved("to device"),
        "residual_bytes": residuals_of(report),
        "breakdown": dict(report.breakdown),
        "limit_bytes": report.limit_bytes,
        "fits": report.fits,
        "compile_seconds": seconds,
        "target": dict(report.target),
        "versions": dict(report.versions),
        "settled": dict(program.settled),
        "batch": program.batch,
        "policy": program.policy,
        "work": dict(report.work),
        **flops_of(compilation.jaxpr, program.model_flops),
        "schedule": to_json(report.schedule),
        "calls_per_update": program.calls_per_update,
        "tokens_per_update": program.tokens_per_update,
    }
    if job["measure"]:
        if program.measure is None:
            raise ReportError(f"--measure: {program.name} is not a step that can be run here")
        row["measured"] = dict(program.measure(compilation))
    return row


def residuals_of(report: ReportRecord) -> int:
    """Bytes of residuals at the highest point of the timeline that holds any: at the peak itself, which may lie in the
    update, they may all be freed."""
    steps: Counter[int] = Counter()
    for buffer in report.buffers:
        if buffer.category == "residuals" and buffer.memory == "device":
            steps[buffer.start] += buffer.bytes
            steps[buffer.end + 1] -= buffer.bytes
    held = itertools.accumulate(steps[point.index] for point in report.timeline)
    return max(((point.bytes, size) for point, size in zip(report.timeline, held) if size), default=(0, 0))[1]


def flops_of(jaxpr: Any, model_flops: Callable[[float], float]) -> dict[str, float | None]:
    """FLOPs of one call of the step over all devices, as fields of a row; {} where the program was not traced.

    model_flops: `PreparedProgram.model_flops`.
    """
    from bytescope.memory.cost.flops import count

    if jaxpr is None:
        return {}
    flops = count(jaxpr)
    model = model_flops(flops.model_flops)
    return {
        "recompute_flops_fraction": flops.recomputed / model if model else 0.0,
        "kernel_recompute_flops": flops.kernel_recomputed,
        "model_flops": model,
        "hardware_flops": flops.hardware_flops,
    }


def status_of(error: BaseException, most: int = 300) -> str:
    """An error as a row's status: one line of at most `most` characters, with its type unless a user can mend it."""
    text = message_of(error) or type(error).__name__
    return one_line(text if hasattr(error, "exit_code") else f"{type(error).__name__}: {text}", most)


def _forget() -> None:
    """Frees the last job's traces and executables."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()


def _resident() -> int:
    """Bytes of host memory that this process holds, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
