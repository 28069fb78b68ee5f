"""Predicts the memory of a run outside the training step: batches that wait on the device, the run's other programs,
and host memory in the phases "initialize", "train", "evaluate" and "sample".

If the devices are simulated on a CPU, the arrays and temporaries of all devices of a process are in host memory. With
accelerators, only offloaded arrays, batches, and what programs and libraries take are in host memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.memory.allocators.pinned_pool import devices_of_process, pinned_terms
from bytescope.memory.allocators.program_events import ProgramCall, call_of
from bytescope.memory.devices.compiler import stats_of
from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.devices.limits import processes_per_node
from bytescope.memory.devices.targets import Target, node_memory_of
from bytescope.memory.host.host_terms import program_size, shared_terms
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.records.report_record import POOL, Finding, ReportRecord
from bytescope.memory.report.allocator_table import CALLS
from bytescope.memory.units import MIB
from bytescope.train.checkpoints.checkpoint_memory import restore_findings, restore_terms, save_terms, saves_overlap
from bytescope.train.checkpoints.saved_state import shard_bytes
from bytescope.train.program.program import Program, init_state
from bytescope.train.step.optimizer.host_offload import device_bytes, device_sizes, jit_leaves, leaf_groups

RUN_PHASES = ("initialize", "train", "evaluate", "sample")
# Phase -> bytes that a process gains by compiling and loading the small programs of the phase on a CPU, and by what it
# keeps of earlier phases. Measured: `tests/bench/host_memory.py train`, x86-64, jax 0.10.2, November 2026.
_SMALL_PROGRAMS = {"initialize": 110 * MIB, "train": 45 * MIB, "evaluate": 75 * MIB, "sample": 120 * MIB}


def loop_overhead(program: Program) -> LoopOverhead:
    """Returns the arrays that the training loop keeps on a device in addition to the arguments of one call of the step.

    While the last call of an update runs, the device also holds the other batches of this update, the batches of the
    next update (train/run/feed.py), and the metrics of the previous update, which have not been read yet. The batch of
    the call itself is one of its arguments and is not counted.
    """
    batch = tuple(device_sizes(program.batch_shapes))
    return LoopOverhead(waiting=batch * (2 * program.calls_per_update - 1), results=1)


def other_programs(program: Program) -> list[ProgramCall]:
    """Compiles the programs of a run except the training step, and returns the memory of one call of each, in the order
    of the run: "init", "evaluation" and "sample".

    The programs "init" make the training state. "evaluation" evaluates one held-out micro-batch while the next one is
    on the device. "sample" generates text at the end of a run, if the config asks for it. The devices may be described
    devices without hardware. Saving a checkpoint needs no program, and no memory of the device.
    """
    batch = tuple(device_sizes(program.eval_shapes))
    evaluation = program.evaluate.lower(program.state.params, program.eval_shapes, program.state.frozen)
    out = [
        *_init_programs(program),
        ProgramCall(
            "evaluation",
            state=tuple(device_sizes((program.state.params, program.state.frozen))),
            batch=batch,
            temp=_temp_and_result_bytes(evaluation),
            waiting=batch,
        ),
    ]
    if program.config.train.sample_tokens:
        # Imported here, because it imports generation and the data pipeline, which a report does not need.
        from bytescope.train.generate.training_sample import sample_bytes

        params = tuple(device_sizes(program.state.model_params))
        out.append(ProgramCall("sample", state=params, temp=sample_bytes(program)))
    return out


def peaks(program: Program, others: Sequence[ProgramCall]) -> dict[str, int]:
    """Returns the peak bytes on one device of each program of a run except the training step: name of the program ->
    bytes. The bytes include the training state.

    others: the programs, from `other_programs`. The peak of a run is the maximum of these peaks and the peak of the
    step.
    """
    sizes: dict[str, int] = {}
    held = 0  # the part of the state that is already made
    for call in others:
        own = sum((*call.batch, *call.waiting, *call.results, call.temp))
        sizes[call.name] = max(sizes.get(call.name, 0), held + own)
        held = min(held + sum(call.results), device_bytes(program.state))
    return sizes


def run_calls(report: ReportRecord, others: Sequence[ProgramCall]) -> list[tuple[ProgramCall, int]]:
    """Returns a short run for the models of allocators: each program with its number of calls. The step runs before and
    after an evaluation.

    report: the report of the training step. others: the other programs, from `other_programs`.
    """
    step = call_of(report, "step")
    order: list[tuple[ProgramCall, int]] = []
    for call in others:
        if call.name == "evaluation":
            order += [(step, CALLS), (call, 2), (step, 1)]
        else:
            order.append((call, 1))
    return order


def _temp_and_result_bytes(lowered: jax.stages.Lowered) -> int:
    with hold_back_log():
        stats = stats_of(lowered.compile())
    return stats.own_bytes if stats else 0


def _init_programs(program: Program) -> Iterator[ProgramCall]:
    # `init` runs several programs, one after the other, if part of the training state is in host memory.

    def make(seed):
        return init_state(
            program.transformer(nnx.Rngs(params=jax.random.key(seed))),
            program.parts.optimizer,
            program.parts.scaling,
            program.frozen,
        )

    # The sharding names the devices, because results in host memory do not.
    seed = jax.ShapeDtypeStruct((), jnp.int32, sharding=program.layout.sharding())
    leaves = jax.tree.leaves(program.state)
    for indices in leaf_groups(program.state):
        results = tuple(device_sizes([leaves[index] for index in indices]))
        own = _temp_and_result_bytes(jit_leaves(make, leaves, indices).lower(seed))
        yield ProgramCall("init", results=results, temp=max(own - sum(results), 0), makes_state=True)


# ---- host memory ----


def run_terms(program: Program, report: ReportRecord, devices: int) -> Iterator[HostTerm]:
    """Yields the predicted parts (terms) of host memory that one process holds in the phases `RUN_PHASES` of a run.
    The libraries, and what tracing and compiling the step takes, are not included (`step_terms`).

    Args:
      program: the training program. Its devices need not be present.
      report: the memory report of the program's step.
      devices: number of devices of one process.
    """
    simulated = devices if report.target.get("platform") == "cpu" else 0
    measured = "measured, train/plan/run_memory.py"
    state, batch = device_bytes(program.state), device_bytes(program.batch_shapes)
    hosted = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(program.state)) - state
    for phase in RUN_PHASES:
        if phase == "sample" and not program.config.train.sample_tokens:
            continue
        if simulated:
            yield HostTerm(
                phase, "training state", state * simulated, f"shapes of the state, on {simulated} CPU devices"
            )
        if hosted and phase != "train":
            yield HostTerm(phase, "offloaded state", hosted * devices, f"shapes of the state, of {devices} devices")
        yield HostTerm(phase, "programs besides the step", _SMALL_PROGRAMS[phase], measured)

    offloaded = pinned_terms(report, True, processes_per_node())
    if report.host_bytes and not offloaded:  # not a GPU
        offloaded = (HostTerm("train", "offloaded arrays", report.host_bytes * devices, "host_bytes of the report"),)
    yield from offloaded

    # One more batch than the buffer has is being read by each thread, and one is being copied to the devices.
    options = program.config.data
    readers = min(options.workers, options.prefetch)
    read = batch * devices * (program.batch.accumulation if not program.scanned else 1)
    yield HostTerm(
        "train",
        "batches in host memory",
        read * (options.prefetch + readers + 1),
        f"data.prefetch={options.prefetch}, {readers} readers, train/data/batches.py",
    )
    if not simulated:
        return
    step = report.allocated_bytes - state - batch
    waiting = batch + report.overhead(POOL)
    yield HostTerm("train", "temporaries of the step", step * simulated, "bytes of the report, minus the arguments")
    yield HostTerm("train", "batches on the devices", waiting * simulated, "train/run/feed.py")
    if not program.config.init.folder:
        # XLA:CPU keeps the random bits of all parameters at once: jax draws two words for each, and half are freed.
        random = device_bytes(program.state.model_params) * 3 // 2
        yield HostTerm("initialize", "random bits of all parameters", random * simulated, "temporaries of init")
    rows = report.breakdown
    layers = max(program.model.n_layers, 1)
    working = rows["workspace"] + rows["logits_loss"] + rows["residuals"] // layers
    yield HostTerm(
        "evaluate", "temporaries of evaluation", working * simulated, "temporaries of the step, without gradients"
    )


def run_host_memory(program: Program, report: ReportRecord, target: Target, jaxpr: Any) -> HostMemory:
    """Predicts the host memory of one process of `bytescope train` on a target, in all phases of a run. The processes
    of a node (`processes_per_node()`) share the node's devices equally.

    Args:
      program: the training program.
      report: the memory report of the program's step.
      target: the devices, which need not be present.
      jaxpr: the ClosedJaxpr of the step. The memory of the compiler is predicted from the number of its equations.
    """
    processes = processes_per_node()
    devices = devices_of_process(target.to_json(), processes)
    total = max(program.mesh.size // devices, 1)
    config = program.config.train
    overlaps = saves_overlap(config.steps, config.checkpoint_every, None)
    terms = (
        *step_terms(target.platform, jaxpr, (*RUN_PHASES, "restore", "save")),
        *run_terms(program, report, devices),
        *restore_terms(program.state, target.platform, total),
        *save_terms(program.state, target.platform, total, overlaps),
    )
    if not program.config.train.sample_tokens:
        terms = tuple(term for term in terms if term.phase != "sample")
    node, source = node_memory_of(target)
    return HostMemory(terms, processes, node or None, source)


def checkpoint_findings(program: Program, target: Target) -> tuple[Finding, ...]:
    """Returns a finding if restoring a checkpoint of the program takes far more host memory on a node of the target
    than the arrays on the node need, because several processes per node read the same arrays; otherwise (). The
    checkpoint is assumed to be saved with the program's mesh."""
    processes = processes_per_node()
    total = max(program.mesh.size // devices_of_process(target.to_json(), processes), 1)
    return restore_findings(program.state, total, processes)


def step_terms(platform: str, jaxpr: Any, later: Sequence[str] = ()) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of host memory that the imported libraries, tracing and compiling take in one
    process of a run, in the phases "start", "trace", "compile" and "analyze", and in the phases `later`. In the later
    phases, the process still holds the libraries and the memory that tracing and compiling have not freed.

    platform: the platform that the step is compiled for, such as "cuda" or "cpu". jaxpr: the ClosedJaxpr of the step.
    """
    return shared_terms(program_size(jaxpr), platform, later, gpu_present=platform != "cpu")
