"""Programs that call back into Python are compiled for devices that are not here, with the buffers of the calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.program import callbacks
from support.described import described

spec = jax.ShapeDtypeStruct
ROWS, WIDTH = 16, 64


def step(mesh=None):
    """A step with every kind of callback: plain, in a scan, in a branch, and by hand over a mesh."""

    def as_is(x):
        return np.asarray(x)

    def layer(x, _):
        jax.debug.callback(as_is, x)
        x = jax.pure_callback(as_is, spec(x.shape, x.dtype), jnp.tanh(x))
        return x, io_callback(as_is, spec((), jnp.float32), x.sum())

    def told(x):
        jax.debug.print("{}", x.sum())
        return x

    def body(x, key):
        jax.debug.print("{} {}", x.sum(), key, ordered=mesh is None)
        x, sums = jax.lax.scan(layer, x, length=3)
        x = jax.lax.cond(sums.sum() > 0, told, lambda x: 2 * x, x)
        if mesh is not None:
            x = jax.shard_map(told, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)
        return x @ x.T

    return body, spec((ROWS, WIDTH), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize("name", ["h200", "h200:2"])
def test_callbacks_of_a_described_gpu(name):
    devices = described(name)
    mesh = Mesh(np.array(devices), ("data",)) if len(devices) > 1 else None
    body, x, key = step(mesh)
    if mesh is not None:
        x = spec(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
    report = memory.analyze(body, x, key, target=name)
    count = 5 + (mesh is not None)
    assert [note for note in report.notes if "callback" in note] == [callbacks.note(count)]
    assert sum(report.breakdown.values()) == report.allocated_bytes
    if mesh is None:  # the result of the call is a buffer of its own, which nothing is fused into
        assert any("callback" in b.op_name and b.bytes == ROWS * WIDTH * 4 for b in report.buffers)


@pytest.mark.quick
@pytest.mark.parametrize(("platform", "left"), [("cuda", 5), ("tpu", 0)])
def test_no_callback_and_none_of_their_effects_are_left(platform, left):
    body, x, key = step()
    closed = jax.make_jaxpr(body)(x, key)
    assert callbacks.count(closed) == 5
    rewritten = callbacks.without_runtime(closed, platform)
    assert callbacks.count(rewritten) == 0 and rewritten.out_avals == closed.out_avals
    assert str(rewritten).count("python_callback[") == left
    assert {type(effect).__name__ for effect in rewritten.effects} == {"FfiEffect"}  # no tokens, and nothing left out
    without = jax.make_jaxpr(jnp.tanh)(x)
    assert callbacks.without_runtime(without, platform) is without


@pytest.mark.quick
def test_a_value_that_stands_in_waits_for_the_operands():
    closed = jax.make_jaxpr(lambda x: jax.pure_callback(np.asarray, spec((3,), jnp.float32), x * 2))(jnp.ones(4))
    rewritten = callbacks.without_runtime(closed, "tpu")
    assert "optimization_barrier" in str(rewritten)
    [found] = jax.jit(jax.extend.core.jaxpr_as_fun(rewritten))(jnp.ones(4))
    assert found.tolist() == [0, 0, 0]
