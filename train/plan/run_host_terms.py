"""Predicts the host memory of a training run in the phases "initialize", "train", "evaluate" and "sample".

On a CPU the arrays and temporaries of all simulated devices of a process are host memory. On an accelerator only
offloaded arrays, batches and metrics are.
"""

from collections.abc import Iterator

from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_record import POOL, ReportRecord
from bytescope.memory.units import MIB
from bytescope.train.program.program import Program
from bytescope.train.step.optimizer.host_offload import device_bytes, device_sizes

RUN_PHASES = ("initialize", "train", "evaluate", "sample")
# Phase -> bytes that a process gains by compiling and loading the small programs of the phase on a CPU, and by what it
# keeps of earlier phases. Measured: `tests/bench/host_memory.py train`, x86-64, jax 0.10.2, November 2026.
_SMALL_PROGRAMS = {"initialize": 110 * MIB, "train": 45 * MIB, "evaluate": 75 * MIB, "sample": 120 * MIB}
# TensorBoard's writer and grain's reader, which are imported when a run begins.
_RECORDERS = 15 * MIB


def run_terms(program: Program, report: ReportRecord, devices: int) -> tuple[HostTerm, ...]:
    """Returns what one process holds in the phases of a run, in addition to the libraries and the compiled step.

    Args:
      program: the training program. Its devices may be described devices.
      report: the memory report of its step.
      devices: number of devices of one process.
    """
    return tuple(_terms(program, report, devices))


def _terms(program: Program, report: ReportRecord, devices: int) -> Iterator[HostTerm]:
    simulated = devices if report.target.get("platform") == "cpu" else 0
    measured = "measured, train/plan/run_host_terms.py"
    state, batch = device_bytes(program.state), device_bytes(program.batch_shapes)
    for phase in RUN_PHASES:
        if phase == "sample" and not program.config.train.sample_tokens:
            continue
        if simulated:
            yield HostTerm(
                phase, "training state", state * simulated, f"shapes of the state, on {simulated} CPU devices"
            )
        if report.host_bytes:
            yield HostTerm(phase, "pinned buffers of offload", report.host_bytes * devices, "host_bytes of the report")
        yield HostTerm(
            phase, "programs besides the step", _SMALL_PROGRAMS[phase], "measured, train/plan/run_host_terms.py"
        )
        if program.config.train.tensorboard and phase != "initialize":
            yield HostTerm(phase, "TensorBoard", _RECORDERS, measured)

    # One more batch than the buffer has is being read by each thread, and one is being copied to the devices.
    options = program.config.data
    readers = min(options.workers, options.prefetch)
    read = batch * devices * (program.batch.read_steps if not program.scanned else 1)
    yield HostTerm(
        "train",
        "batches in host memory",
        read * (options.prefetch + readers + 1),
        f"data.prefetch={options.prefetch}, {readers} readers, train/data/batches.py",
    )
    if simulated:
        step = report.allocated_bytes - state - batch
        waiting = batch + report.overhead(POOL)
        yield HostTerm("train", "temporaries of the step", step * simulated, "the report, less the arguments")
        yield HostTerm("train", "batches on the devices", waiting * simulated, "train/run/feed.py")
        largest = max(device_sizes(program.state.model_params), default=0)
        yield HostTerm("initialize", "temporaries of init", 2 * largest * simulated, "bits of the largest parameter")
        rows = report.breakdown
        layers = max(program.model.n_layers, 1)
        working = rows.get("workspace", 0) + rows.get("logits_loss", 0) + rows.get("residuals", 0) // layers
        yield HostTerm("evaluate", "temporaries of evaluation", working * simulated, "the step's, without gradients")
