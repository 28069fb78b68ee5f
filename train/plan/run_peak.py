"""Memory of a run outside the step: the batches that the loop keeps on a device, and the run's other programs."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.memory.devices.compiler import stats_of
from bytescope.memory.devices.compiler_log import kept_back
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.train.generate.training_sample import sample_bytes
from bytescope.train.program.program import Program, init_state
from bytescope.train.step.optimizer.host_offload import device_bytes, device_sizes, jit_leaves, leaf_groups


def loop_overhead(program: Program) -> LoopOverhead:
    """Returns the bytes that the loop keeps on a device in addition to a call's arguments, for the report.

    While the last call of an update runs, the update's other batches are still on the device, and the next update's
    batches are there already (train/run/feed.py). The call's own batch is among its arguments. The metrics of the
    previous update have not been read yet.
    """
    batch = tuple(device_sizes(program.batch_shapes))
    return LoopOverhead(waiting=batch * (2 * program.calls_per_update - 1), results=1)


def peaks(program: Program) -> dict[str, int]:
    """Returns the peak bytes of each other program of a run on one device, including the state.

    Each is compiled for the program's devices, which may be described ones. "init": in turns if some of the state goes
    to host memory. "evaluation": of one held-out micro-batch while the next is on the device. "sample": the text at
    the end of a run. The peak of a run is the maximum of these and of its step.
    """
    state = device_bytes(program.state)
    batch = device_bytes(program.eval_shapes)
    evaluation = program.evaluate.lower(program.state.params, program.eval_shapes, program.state.frozen)
    sizes = {"init": max(_turns_of_init(program)), "evaluation": state + 2 * batch + _own_bytes(evaluation)}
    if program.config.train.sample_tokens:
        sizes["sample"] = state + sample_bytes(program)
    return sizes


def _own_bytes(lowered: jax.stages.Lowered) -> int:
    """Returns the bytes of a program's temporaries and results on one device."""
    with kept_back():
        stats = stats_of(lowered.compile())
    return stats.own_bytes if stats else 0


def _turns_of_init(program: Program) -> Iterator[int]:
    """Yields the bytes of each turn of `Program.init`: its own, and the results of earlier turns on the device."""

    def make(seed):
        return init_state(
            program.transformer(nnx.Rngs(params=jax.random.key(seed))),
            program.parts.optimizer,
            program.parts.scaling,
            program.frozen,
        )

    # The sharding names the devices, because results in host memory do not.
    seed = jax.ShapeDtypeStruct((), jnp.int32, sharding=program.layout.sharding())
    leaves, made = jax.tree.leaves(program.state), 0
    for places in leaf_groups(program.state):
        yield made + _own_bytes(jit_leaves(make, leaves, places).lower(seed))
        made += device_bytes([leaves[place] for place in places])
