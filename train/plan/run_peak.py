"""Predicts the memory of a run outside the training step: batches that wait on the device, and the run's other
programs."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.memory.devices.compiler import stats_of
from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.train.generate.training_sample import sample_bytes
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


def peaks(program: Program) -> dict[str, int]:
    """Returns the peak bytes on one device of each program of a run except the training step: name of the program ->
    bytes.

    The bytes include the training state. The program "init" makes the state. "evaluation" evaluates one held-out
    micro-batch while the next one is on the device. "sample" generates text at the end of a run, if the config asks for
    it. The devices may be described devices without hardware. The peak of a run is the maximum of these peaks and the
    peak of the step.
    """
    state = device_bytes(program.state)
    batch = device_bytes(program.eval_shapes)
    evaluation = program.evaluate.lower(program.state.params, program.eval_shapes, program.state.frozen)
    sizes = {
        "init": max(_bytes_per_init_program(program)),
        "evaluation": state + 2 * batch + _temp_and_result_bytes(evaluation),
    }
    if program.config.train.sample_tokens:
        sizes["sample"] = state + sample_bytes(program)
    return sizes


def _temp_and_result_bytes(lowered: jax.stages.Lowered) -> int:
    with hold_back_log():
        stats = stats_of(lowered.compile())
    return stats.own_bytes if stats else 0


def _bytes_per_init_program(program: Program) -> Iterator[int]:
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
    leaves, earlier_bytes = jax.tree.leaves(program.state), 0
    for indices in leaf_groups(program.state):
        yield earlier_bytes + _temp_and_result_bytes(jit_leaves(make, leaves, indices).lower(seed))
        earlier_bytes += device_bytes([leaves[index] for index in indices])
