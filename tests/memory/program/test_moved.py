"""Programs traced on this machine and lowered for GPUs that are not here, where jax's own types name its devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bytescope import memory

pytestmark = pytest.mark.oracle("cuda")


def test_literals_inside_of_a_shard_map_move_with_it(devices):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i", None), out_specs=P("i", None))
    def step(x):
        total = jax.lax.pcast(jnp.zeros(x.shape, x.dtype), "i", to="varying")
        for _ in range(2):
            x = jax.lax.ppermute(x, "i", [(n, (n + 1) % 8) for n in range(8)])
            total = total + 2 * x
        return total

    report = memory.analyze(step, jax.ShapeDtypeStruct((64, 128), jnp.float32), target="h100:8")
    assert report.breakdown["batch"] == 64 * 128 * 4 // 8


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_kernel_of_pallas_is_for_the_target():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def step(x):
        return pl.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=triton.CompilerParams()
        )(x)

    report = memory.analyze(step, jax.ShapeDtypeStruct((64, 128), jnp.float32), target="h200")
    assert report.peak_bytes == 2 * 64 * 128 * 4
