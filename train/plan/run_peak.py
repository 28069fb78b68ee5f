"""What a run holds on a device besides a call of the step: the loop's batches, and the run's other programs."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.memory.devices.compiler import stats_of
from bytescope.memory.devices.compiler_log import kept_back
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.train.generate.training_sample import sample_bytes
from bytescope.train.program.program import Program, init_state
from bytescope.train.step.optimizer.host_offload import chosen, device_bytes, device_sizes, turns


def loop_overhead(program: Program) -> LoopOverhead:
    """What the loop keeps on a device besides a call's arguments, in bytes, for the report.

    While the last call of an update runs, the update's other batches are still on the device and those of the next
    update are there already (train/run/feed.py); one call's batch is among its arguments. The metrics of the update
    before are not read yet.
    """
    batch = tuple(device_sizes(program.batch_shapes))
    return LoopOverhead(waiting=batch * (2 * program.calls_per_update - 1), results=1)


def peaks(program: Program) -> dict[str, int]:
    """Peak bytes of each other program of a run on one device, the state included.

    Each is compiled for the program's devices, which may be described ones: "init", in turns where some of the state
    goes to host memory; "evaluation" of one held-out micro-batch while the next is there; "sample", the text at the
    end of a run. The peak of a run is the largest of these and of its step.
    """
    state = device_bytes(program.state)
    batch = device_bytes(program.eval_shapes)
    evaluation = program.evaluate.lower(program.state.params, program.eval_shapes, program.state.frozen)
    found = {"init": max(_init(program)), "evaluation": state + 2 * batch + _own(evaluation)}
    if program.config.train.sample_tokens:
        found["sample"] = state + sample_bytes(program)
    return found


def _own(lowered: jax.stages.Lowered) -> int:
    """Temporaries and results of a program, bytes on one device."""
    with kept_back():
        stats = stats_of(lowered.compile())
    return stats.own_bytes if stats else 0


def _init(program: Program) -> Iterator[int]:
    """Bytes of each turn of `Program.init`: what earlier turns left on the device, and its own."""

    def make(seed):
        return init_state(
            program.transformer(nnx.Rngs(params=jax.random.key(seed))),
            program.parts.optimizer,
            program.parts.scaling,
            program.frozen,
        )

    # With a sharding, which names the devices: results in host memory do not.
    seed = jax.ShapeDtypeStruct((), jnp.int32, sharding=program.layout.sharding())
    leaves, made = jax.tree.leaves(program.state), 0
    for places in turns(program.state):
        yield made + _own(chosen(make, leaves, places).lower(seed))
        made += device_bytes([leaves[place] for place in places])
