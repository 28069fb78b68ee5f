"""The workspace of cuDNN's attention that a compile without a GPU lacks: its bytes as an H100 has them."""

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.devices import compiler, targets
from bytescope.memory.peak import runtime_overheads
from support.described import described

# (sequences, query heads, key heads, tokens, features of a head) -> bytes of the result that XLA added on an H100 with
# jax 0.11.2 and cuDNN 9.19 (tests/gpu/measured).
MEASURED = {
    (16, 12, 12, 1024, 64): 51_118_336,
    (16, 16, 16, 1024, 64): 68_157_696,
    (16, 25, 25, 1024, 64): 106_496_256,
    (2, 32, 8, 8192, 64): 270_532_864,
    (1, 32, 8, 4096, 128): 134_742_272,
    (1, 32, 8, 8192, 128): 269_484_288,
    (1, 32, 4, 4096, 128): 134_742_272,
}


def attend(q_BTNH, k_BSKH, v_BSKH):
    y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")
    return y_BTNH.astype(jnp.float32).sum()


def arguments(shape, place):
    batch, heads, key_heads, tokens, width = shape
    return tuple(
        jax.ShapeDtypeStruct((batch, tokens, count, width), jnp.bfloat16, sharding=place)
        for count in (heads, key_heads, key_heads)
    )


@pytest.fixture(scope="module")
def sizes():
    """The computed bytes of the backward call of each shape, from one program with all of them."""
    place = jax.sharding.SingleDeviceSharding(described("h100")[0])
    step = jax.jit(lambda inputs: [jax.grad(attend, argnums=(0, 1, 2))(*qkv) for qkv in inputs])
    compilation = compiler.compile_lowered(step.lower([arguments(shape, place) for shape in MEASURED]))
    module = compilation.program.module
    calls = [each for each in module.of_opcode("custom-call") if each.call.lacks_workspace]
    return sorted(runtime_overheads.workspace_bytes(module, call) for call in calls)


def test_the_bytes_are_those_of_an_h100(sizes):
    assert sizes == sorted(MEASURED.values())


def test_the_workspace_is_part_of_the_prediction_where_it_raises_the_peak():
    shape = (2, 32, 8, 8192, 64)
    described("h100")
    gradient = jax.grad(attend, argnums=(0, 1, 2))
    report = memory.analyze(gradient, *arguments(shape, None), target="h100")
    rows = {row.name: row.bytes for row in report.runtime_overheads}
    # The call is the peak of a program of nothing else.
    assert rows["cuDNN attention workspace"] == MEASURED[shape]
    assert report.predicted_bytes >= report.allocated_bytes + MEASURED[shape]


def test_a_forward_call_needs_none():
    described("h100")
    report = memory.analyze(attend, *arguments((2, 32, 8, 8192, 64), None), target="h100")
    assert "cuDNN attention workspace" not in {row.name for row in report.runtime_overheads}
    assert targets.parse("h100").is_described
