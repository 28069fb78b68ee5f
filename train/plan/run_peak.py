"""Predicts the memory of a run outside the training step: batches that wait on the device, and the run's other
programs."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.memory.allocators.program_events import ProgramCall, call_of
from bytescope.memory.devices.compiler import stats_of
from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report.allocator_table import CALLS
from bytescope.train.program.program import Program, init_state
from bytescope.train.step.optimizer.host_offload import device_bytes, device_sizes, jit_leaves, leaf_groups


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
        from bytescope.train.generate.training_sample import can_generate, sample_bytes

        if can_generate(program):
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
