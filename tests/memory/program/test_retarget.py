"""A step that was traced here and is compiled for a target is the program that it is there, to the byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.devices import targets
from bytescope.memory.program import retarget
from support.described import described

spec = jax.ShapeDtypeStruct
LAYERS, ROWS, WIDTH = 3, 16, 64


def step(mesh):
    """(step, its arguments) with a scan, a gradient, a sharding constraint, a shard_map and an inner jit on a mesh of
    2 x 4; one argument lies in host memory, one is a random key."""

    def place(shape, *axes, **kind):
        sharding = NamedSharding(mesh, P(*axes), **kind)
        if kind and sharding.memory_kind is None:  # jax drops the kind if the mesh has described devices
            sharding = NamedSharding(mesh.abstract_mesh, P(*axes), **kind)
        return spec(shape, jnp.float32, sharding=sharding)

    def mean(x):
        return jax.lax.pmean(x, "data")

    def loss(weights, x, key):
        def layer(x, w):
            x = jnp.tanh(x @ w)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model"))), None

        x, _ = jax.lax.scan(layer, x, weights)
        x = jax.shard_map(mean, mesh=mesh, in_specs=P("data", "model"), out_specs=P(None, "model"))(x)
        return (jax.jit(jnp.tanh)(x) * jax.random.normal(key, x.shape)).sum()

    def update(weights, held, x, key):
        moments = 0.9 * jax.device_put(held, jax.memory.Space.Device) + jax.grad(loss)(weights, x, key)
        return weights - moments, jax.device_put(moments, jax.memory.Space.Host)

    stacked = (LAYERS, WIDTH, WIDTH)
    return update, (
        place(stacked, None, None, "model"),
        place(stacked, None, None, "model", memory_kind="pinned_host"),
        place((ROWS, WIDTH), "data"),
        jax.eval_shape(lambda: jax.random.key(0)),
    )


def figures(report):
    """All that a report says of bytes, and the names of its arguments."""
    buffers = sorted((b.bytes, b.category, b.phase, b.memory, b.shape, b.start, b.end) for b in report.buffers)
    return (
        report.peak_bytes,
        report.allocated_bytes,
        report.host_bytes,
        report.breakdown,
        buffers,
        sorted(b.name for b in report.buffers if b.phase == "argument"),
        report.xla,
    )


@pytest.fixture(scope="module")
def native():
    """The report of the step that was traced for described devices."""
    mesh = Mesh(np.array(described("h200:8")).reshape(2, 4), ("data", "model"))
    update, arguments = step(mesh)
    return memory.analyze(update, *arguments, donate_argnums=0)


def test_the_bytes_are_those_of_the_target(devices, native):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    update, arguments = step(mesh)
    report = memory.analyze(update, *arguments, donate_argnums=0, target="h200:8")
    assert figures(report) == figures(native)
    assert native.target["name"] == report.target["name"] == "h200:8"
    assert native.host_bytes >= 4 * LAYERS * WIDTH * WIDTH // 4 and {c.kind for c in native.collectives}
    assert {t.direction for t in report.transfers} == {"to host", "to device"}  # an argument in host memory is fetched
    assert {b.name for b in native.buffers if b.phase == "argument"} == {"weights", "held", "x", "key"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_that_jax_takes_from_its_context(devices, kind):
    """Set, abstract, or in the arguments: it is the same program over the target's devices."""
    described("h200:8")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    plain, place = spec((64, 32), jnp.float32), NamedSharding(mesh, P("data"))

    def double(x, w):
        return (x * 2) @ w

    def pinned(x, w):
        x = (
            jax.sharding.reshard(x, P("data"))
            if kind == AxisType.Explicit
            else jax.lax.with_sharding_constraint(x, P("data"))
        )
        return double(x, w)

    abstract = AbstractMesh((8,), ("data",), axis_types=(kind,))
    square = spec((32, 32), jnp.float32)
    with jax.set_mesh(mesh):
        found = [
            memory.analyze(pinned, plain, square, target="h200:8"),
            memory.analyze(double, plain, square, target="h200:8", in_shardings=(P("data"), P())),
        ]
    for own in (place, NamedSharding(abstract, P("data"))):
        found.append(
            memory.analyze(
                double,
                spec((64, 32), jnp.float32, sharding=own),
                square,
                target="h200:8",
                out_shardings=NamedSharding(mesh, P("data")),
            )
        )
    assert [report.breakdown["outputs"] for report in found] == [64 * 32 * 4 // 8] * 4
    assert {report.target["n_devices"] for report in found} == {8}


@pytest.mark.quick
def test_a_mesh_of_another_size_is_refused(devices):
    mesh = Mesh(np.array(devices[:4]), ("data",))
    for own in (mesh, AbstractMesh((4,), ("data",))):
        x = spec((64, 32), jnp.float32, sharding=NamedSharding(own, P("data")))
        with pytest.raises(memory.ReportError, match=r"a mesh of 4 devices \(data 4\) does not fit cpu:8, which has 8"):
            retarget.lowered_for(jax.jit(jnp.tanh).trace(x), targets.parse("cpu:8"))


def test_the_devices_of_the_arguments_are_the_target():
    [device] = described("h200")
    x = spec((8, 8), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    report = memory.analyze(jnp.tanh, x)
    assert (report.target["name"], report.target["is_described"], report.verdict) == ("h200", True, "fits")
    assert (
        targets.from_devices(described("h200:2")).name == "h200:2"
        and targets.from_devices(described("h100:2x8")).name == "h100:2x8"
    )


@pytest.mark.quick
@pytest.mark.parametrize("target", [8, object(), ["h200"]])
def test_what_is_no_target(target):
    with pytest.raises(memory.ReportError, match="give a name such as"):
        memory.analyze(jnp.tanh, spec((8,), jnp.float32), target=target)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_for_other_devices_is_refused(compiled):
    described("h200")
    stage = jax.jit(jnp.tanh).lower(spec((8,), jnp.float32))
    with pytest.raises(memory.ReportError) as refused:
        memory.analyze(stage.compile() if compiled else stage, target="h200")
    told = str(refused.value)
    assert "compiled for cpu" in told if compiled else "lowered for cpu" in told
    assert 'memory.analyze(step, *arguments, target="h200")' in told and ".trace(*arguments)" in told


@pytest.mark.oracle("cuda")
def test_literals_inside_of_a_shard_map_move_with_it(devices):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i", None), out_specs=P("i", None))
    def step(x):
        total = jax.lax.pcast(jnp.zeros(x.shape, x.dtype), "i", to="varying")
        for _ in range(2):
            x = jax.lax.ppermute(x, "i", [(n, (n + 1) % 8) for n in range(8)])
            total = total + 2 * x
        return total

    report = memory.analyze(step, spec((64, 128), jnp.float32), target="h100:8")
    assert report.breakdown["batch"] == 64 * 128 * 4 // 8


@pytest.mark.oracle("cuda")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_kernel_of_pallas_is_for_the_target():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def step(x):
        return pl.pallas_call(double, out_shape=spec(x.shape, x.dtype), compiler_params=triton.CompilerParams())(x)

    report = memory.analyze(step, spec((64, 128), jnp.float32), target="h200")
    assert report.peak_bytes == 2 * 64 * 128 * 4


def test_arguments_stay_in_host_memory_on_a_target(devices):
    """An argument is in host memory if its sharding or `in_shardings` says so, also if no other argument names devices
    and if the result does not reuse its memory. A named argument may be donated."""
    mesh = Mesh(np.array(devices[:1]), ("data",))
    on_host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    single = jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    array, size = spec((64, 64), jnp.float32), 4 * 64 * 64

    def read(held, x):
        return jax.device_put(held, jax.memory.Space.Device) @ x

    def memory_of(step, *arguments, **named):
        report = memory.analyze(step.trace(*arguments, **named), target="h200")
        return {b.name: b.memory for b in report.buffers if b.phase == "argument"}, report

    for sharding in (on_host, single):
        found, report = memory_of(jax.jit(read), spec(array.shape, array.dtype, sharding=sharding), array)
        assert found == {"held": "host", "x": "device"}
        assert [(t.direction, t.bytes) for t in report.transfers] == [("to device", size)]
    found, _ = memory_of(jax.jit(read, in_shardings=(on_host, NamedSharding(mesh, P()))), array, array)
    assert found == {"held": "host", "x": "device"}
    fetch = jax.jit(lambda held: 2 * jax.device_put(held, NamedSharding(mesh, P(), memory_kind="device")))
    assert memory_of(fetch, spec(array.shape, array.dtype, sharding=on_host))[0] == {"held": "host"}

    step = jax.jit(lambda *, state, x: state + x, donate_argnames="state")
    assert memory_of(step, state=array, x=array)[1].xla.alias_bytes == size
