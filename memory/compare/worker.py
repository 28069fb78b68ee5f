"""A worker process of a search: jobs as JSON lines on standard input, answers as JSON lines on standard output.

The pool starts it as `python -m bytescope.memory worker`, which gives it the trainer: one process per core, so that
jax and the compiler are loaded once for many programs. Standard output is kept for answers: what libraries print
goes to stderr.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.errors import message_of
from bytescope.memory.records import report_json

if TYPE_CHECKING:
    from bytescope.memory.compare.trainer import Trainer
    from bytescope.memory.records.report_record import ReportRecord

# Updates run before the clock starts, and how long it runs: at least so many updates and about so many seconds.
_WARM_UP, _LEAST, _MOST, _SECONDS = 2, 5, 50, 4.0


def main(trainer: Trainer) -> None:
    """Answers the jobs on standard input until it ends; a job that fails is answered with the error as its status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()  # before jax is imported
    for line in sys.stdin:
        try:
            answer = answer_to(json.loads(line), trainer)
        except Exception as error:  # whatever one combination runs into, the others go on
            answer = {"status": one_line(error)}
        _forget()
        try:
            answers.write(json.dumps(answer | {"rss_bytes": _resident()}) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody waits any more
            os._exit(0)


def answer_to(job: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The figures of one job, `{"config", "overrides", "target", "measure", "describe", "rates"}`: the fields of a row.

    With `describe` nothing is compiled, and the answer is that of `Trainer.describe`. Raises the trainer's errors.
    """
    from bytescope.memory.analysis import report_of
    from bytescope.memory.devices import targets
    from bytescope.memory.records.schedule_records import to_json
    from bytescope.memory.seconds import rates

    rates.use(job.get("rates"))
    target = targets.parse(job["target"])
    overrides = [tuple(pair) for pair in job["overrides"]]
    if job.get("describe"):
        return {"status": "ok", **trainer.describe(job["config"], overrides, target)}
    program = trainer.program(job["config"], overrides, target)
    began = time.perf_counter()
    compilation = program.compile_for_report(exact=True)
    seconds = time.perf_counter() - began
    report = report_of(compilation, target=target, loop=trainer.loop_overhead(program))
    settled = trainer.settled(program)
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
        "settled": settled,
        "work": dict(report.work),
        **flops_of(compilation.jaxpr, trainer.config(job["config"], overrides), settled),
        "schedule": to_json(report.schedule),
        "calls_per_update": program.calls_per_update,
        "tokens_per_update": tokens_of(program),
    }
    if job["measure"]:
        row["measured"] = measure(program, compilation.compiled)
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


def flops_of(jaxpr: Any, config: Mapping[str, Any], settled: Mapping[str, Any]) -> dict[str, float | None]:
    """FLOPs of one call of the step over all devices, as fields of a row; {} where the program was not traced.

    config: dotted key -> value; settled: how the trainer resolved it.
    """
    try:
        from bytescope.memory.cost.flops import count
        from bytescope.memory.formulas import reconcile
    except ModuleNotFoundError:
        return {}
    if jaxpr is None:
        return {}
    flops = count(jaxpr)
    model = reconcile.model_flops(config, settled, flops.model_flops)
    return {
        "recompute_flops_fraction": flops.recomputed / model if model else 0.0,
        "kernel_recompute_flops": flops.kernel_recomputed,
        "model_flops": model,
        "hardware_flops": flops.hardware_flops,
    }


def tokens_of(program: Any) -> int:
    """Tokens per optimizer update, over all devices."""
    import jax

    return jax.tree.leaves(program.batch_shapes)[0].size * program.calls_per_update


def measure(program: Any, compiled: Any) -> dict[str, float | None]:
    """Runs the executable on zeros: median seconds per update, tokens/s over all devices, and the highest peak of a
    device in bytes, None where the backend does not say."""
    import jax
    import jax.numpy as jnp

    state = program.init()
    zeros = jax.tree.map(
        lambda array: jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=array.sharding)(),
        program.batch_shapes,
    )
    tokens = tokens_of(program)
    times: list[float] = []
    for update in range(_WARM_UP + _MOST):
        began = time.perf_counter()
        for _ in range(program.calls_per_update):
            state, metrics = compiled(state, zeros)
        jax.block_until_ready((state, metrics))
        if update >= _WARM_UP:
            times.append(time.perf_counter() - began)
        if len(times) >= _LEAST and sum(times) >= _SECONDS:
            break
    median = statistics.median(times)
    stats = [device.memory_stats() or {} for device in program.mesh.local_devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return {"step_seconds": median, "tokens_per_s": tokens / median, "peak_bytes": max(peaks, default=None)}


def one_line(error: BaseException, most: int = 300) -> str:
    """An error as a row's status: one line of at most `most` characters, with its type unless a user can mend it."""
    text = message_of(error) or type(error).__name__
    return report_json.one_line(text if hasattr(error, "exit_code") else f"{type(error).__name__}: {text}", most)


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
