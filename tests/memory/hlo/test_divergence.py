"""Collectives in hand-made loops and branches that half of the devices skip."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.hlo import divergence
from bytescope.memory.hlo import mesh as hlo_mesh

pytestmark = pytest.mark.quick


def over_stages(x):
    """A sum in which the stages wait for each other."""
    return jax.lax.psum(x, "stage")


def over_ranks(x):
    """A sum within a stage."""
    return jax.lax.psum(x, "rank")


def permute(x):
    """A permute within a stage."""
    return jax.lax.ppermute(x, "rank", [(0, 1), (1, 0)])


def halved(collective, _, x):
    """One turn of a loop."""
    return 0.5 * collective(x)


# The name of a loop or branch -> how often it runs, from (stage, argument that differs by stage, argument that does
# not), and the collective inside it.
LOOPS = {
    "stages_in_a_stage": (lambda stage, own, same: jnp.where(stage == 0, own[0], 0), over_stages),
    "stages_by_an_argument": (lambda stage, own, same: own[0], over_stages),
    "stages_by_a_table": (lambda stage, own, same: jnp.asarray([3, 0])[stage], over_stages),
    "stages_everywhere": (lambda stage, own, same: same, over_stages),
    "stages_by_a_sum": (lambda stage, own, same: jax.lax.psum(own[0], "stage"), over_stages),
    "ranks_in_a_stage": (lambda stage, own, same: jnp.where(stage == 0, own[0], 0), over_ranks),
    "permute_in_a_stage": (lambda stage, own, same: jnp.where(stage == 0, own[0], 0), permute),
    "permute_everywhere": (lambda stage, own, same: same, permute),
}


@pytest.fixture(scope="module")
def compiled(devices):
    """One program with all of LOOPS, and a branch, over 2 stages of 2 ranks."""
    mesh = jax.make_mesh((2, 2), ("stage", "rank"), devices=devices[:4])

    def step(own, same, x):
        stage = jax.lax.axis_index("stage")
        for name, (turns, collective) in LOOPS.items():
            with jax.named_scope(name):
                x = jax.lax.fori_loop(0, turns(stage, own, same), partial(halved, collective), x)
        with jax.named_scope("stages_in_a_branch"):
            return jax.lax.cond(stage == 0, partial(halved, over_stages, 0), lambda x: x, x)

    spec = P("stage", "rank")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("stage"), P(), spec), out_specs=spec, check_vma=False)
    own, same, x = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
        for shape, dtype, spec in (((2,), jnp.int32, P("stage")), ((), jnp.int32, P()), ((4, 4), jnp.float32, spec))
    )
    return compile_lowered(jax.jit(mapped).lower(own, same, x))


def skipped(compilation, platform, processes):
    """The names of loops and branches that some devices skip, -> the number of devices that wait in one."""
    module = compilation.program.module
    axes, layouts = hlo_mesh.read_layouts(compilation.compiled)
    collectives = divergence.skipped_collectives(module, axes, hlo_mesh.match(module, layouts), platform, processes)
    names = {each.op_name.split("/while/")[0].split("/cond/")[0].rpartition("/")[2]: each for each in collectives}
    return {name: len(each.waits) for name, each in names.items()}


STAGES = dict.fromkeys(("stages_in_a_stage", "stages_by_an_argument", "stages_by_a_table", "stages_in_a_branch"), 2)


@pytest.mark.parametrize(
    ("platform", "processes", "permutes"),
    [
        ("cpu", (0, 0, 0, 0), {"permute_in_a_stage": 4}),
        ("cpu", (0, 0, 1, 1), {"permute_in_a_stage": 4}),
        ("cuda", (0, 0, 0, 0), {"permute_in_a_stage": 4}),
        ("cuda", (0, 0, 1, 1), {}),
        ("cuda", (0, 1, 2, 3), {}),
    ],
    ids=str,
)
def test_a_collective_that_half_of_its_devices_skip_is_found(compiled, platform, processes, permutes):
    """Sums wait for their group; a permute on the CPU for all devices, on GPUs for its pairs and its process."""
    assert skipped(compiled, platform, processes) == STAGES | permutes
