"""Random bits that the backward pass draws again: the same bits for keys, other bits without a key, and other bits if
XLA for TPUs divides a draw differently (jax#21046, for which jax#21049 proposes an error).

The last case needs a TPU compiler, so a module that it compiled is recorded here as text. On simulated CPU devices the
bits of no key implementation depend on the sharding with jax 0.10.2 and 0.12: tests/bench/redrawn_mask.py shows the
wrong gradient with jax 0.4.38.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.audit.randomness import randomness
from bytescope.memory.hlo.buffers import read_module
from bytescope.memory.peak.buffer_placement import PlacedProgram
from support.bench_scripts import bench_script

WIDTH, ROWS = 64, 32
SPECS = (
    jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((2,), jnp.uint32),
)


def keyed(seed, shape):
    return jax.random.bernoulli(seed, 0.5, shape)


def keyless(seed, shape):
    return jax.lax.rng_uniform(0.0, 1.0, shape) < 0.5


def make_step(draw, differentiate=jax.value_and_grad):
    def layer(x, w, seed):
        h = jnp.tanh(x @ w)
        return jnp.where(draw(seed, h.shape), h, 0)

    def step(w, x, seed):
        def loss(w):
            y = x
            for _ in range(2):
                y = jax.checkpoint(layer)(y, w, seed)
            return (y**2).sum()

        return differentiate(loss)(w)

    return step


def random_rows(step, *specs):
    return [row for row in memory.analyze(step, *(specs or SPECS), target="cpu").audit if row.kind == "random"]


def test_a_mask_drawn_with_a_key_is_repeated():
    (row,) = random_rows(make_step(keyed))
    assert (row.asked, row.done, row.honored, row.message, row.count) == ("repeat", "repeated", True, "", 2)
    assert row.subject == "random_bits of key<fry>"
    assert row.bytes == 4 * ROWS * WIDTH  # the uint32 bits
    line = keyed.__code__.co_firstlineno + 1
    assert row.source == f"test_randomness.py:{line}"


def test_a_mask_drawn_without_a_key_is_redrawn():
    (row,) = random_rows(make_step(keyless))
    assert (row.asked, row.done, row.honored, row.undone_by) == ("repeat", "redrawn", False, "runtime")
    assert row.bytes == 4 * ROWS * WIDTH and row.count == 2
    assert "use jax.random.uniform with a key" in row.message


def test_the_gradient_of_a_redrawn_mask_is_wrong():
    """The rows of `w` whose products the forward pass kept are those with a gradient, unless the mask changes."""

    def agrees(draw):
        def loss(h):
            kept = jax.checkpoint(lambda h: jnp.where(draw(jnp.zeros(2, jnp.uint32), h.shape), h**2, 0))(h)
            return kept.sum(), kept

        (_, kept), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.ones(256))
        return np.array_equal(kept != 0, gradient != 0)

    assert agrees(keyed)
    assert not agrees(keyless)


def test_a_mask_that_only_the_recomputation_draws_is_no_request():
    """Without the loss among its results, the step draws each mask of the last layer once."""

    def step(h):
        return jax.grad(lambda h: jax.checkpoint(lambda h: jnp.where(keyless(None, h.shape), h**2, 0))(h).sum())(h)

    assert random_rows(step, SPECS[1]) == []


def test_keys_on_a_mesh_are_repeated():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(8), ("x",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p) for s, p in zip(SPECS, (whole, rows, whole))]
    report = memory.analyze(make_step(keyed), *specs, target="cpu:8")
    (row,) = [row for row in report.audit if row.kind == "random"]
    assert (row.done, row.bytes) == ("repeated", 4 * ROWS // 8 * WIDTH)


# The draws of a program for v5e:2x4, compiled with xla_tpu_spmd_rng_bit_generator_unsafe by libtpu 0.0.42:
# jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0) under jax.checkpoint, with an rbg key, and with weights and
# batch sharded over all devices.
TPU_MODULE = """
HloModule jit_loss, num_partitions=8

ENTRY %main (state: u64[2]) -> (u32[32,1024], u32[AGAIN]) {
  %state = u64[2]{0} parameter(0)
  %first = (u64[2]{0}, u32[32,1024]{1,0}) rng-bit-generator(%state), algorithm=rng_default, metadata={
    op_name="jit(loss)/jvp(jit(_bernoulli))/jit(_uniform)" source_file="/home/me/model.py" source_line=7}
  %again = (u64[2]{0}, u32[AGAIN]{1,0}) rng-bit-generator(%state), algorithm=rng_default, metadata={
    op_name="jit(loss)/transpose(jvp(jvp()))/checkpoint/rematted_computation/jit(_bernoulli)/jit(_uniform)"
    source_file="/home/me/model.py" source_line=7}
  %a = u32[32,1024]{1,0} get-tuple-element(%first), index=1
  %b = u32[AGAIN]{1,0} get-tuple-element(%again), index=1
  ROOT %result = (u32[32,1024]{1,0}, u32[AGAIN]{1,0}) tuple(%a, %b)
}
"""


@pytest.mark.parametrize("again", ["256,128", "32,1024"])
def test_a_draw_that_the_partitioner_divides_differently(again):
    hlo = pytest.importorskip("jaxlib._hlo")
    text = TPU_MODULE.replace("AGAIN", again)
    module = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    program = read_module(module)
    program.module.devices = 8  # from the device assignment, which the text does not have
    rows = list(randomness(None, PlacedProgram(program)))
    if again == "32,1024":
        assert rows == []
        return
    (row,) = rows
    assert (row.asked, row.done, row.undone_by, row.honored) == ("unknown", "redrawn", "partitioner", None)
    assert (row.source, row.bytes) == ("model.py:7", 4 * 32 * 1024)
    assert "of shape 32 x 1024 in the forward pass and of shape 256 x 128 in the recomputation" in row.message


@pytest.mark.parametrize("constrained", [False, True])
def test_bits_of_threefry_keys_do_not_depend_on_the_sharding(constrained):
    """The program whose gradient was wrong with jax 0.4.38 is right, so the audit reports no threefry key."""
    before = jax.config.jax_threefry_partitionable
    jax.config.update("jax_threefry_partitionable", False)
    try:
        loss, gradient = bench_script("redrawn_mask").compare(constrained)
    finally:
        jax.config.update("jax_threefry_partitionable", before)
    assert loss < 1e-6 and gradient < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("unsafe", [True, False])
def test_a_program_for_a_described_tpu(unsafe):
    pytest.importorskip("libtpu")
    target = memory.target("v5e:2x4")
    mesh = Mesh(np.array(target.devices()).reshape(8), ("x",))
    specs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((512, 1024), jnp.float32, P("x")),
            ((1024, 512), jnp.float32, P("x")),
            ((256, 512), jnp.float32, P("x")),
            ((4,), jnp.uint32, P()),
        )
    ]
    options = {"xla_tpu_spmd_rng_bit_generator_unsafe": True} if unsafe else {}
    step = bench_script("redrawn_mask").tpu_step
    report = memory.analyze(step, *specs, target=target, compiler_options=options)
    (row,) = [row for row in report.audit if row.kind == "random"]
    assert (row.honored, row.subject) == (not unsafe, "random_bits of key<rbg>")
    assert row.bytes == 4 * (32 if unsafe else 256) * 1024
