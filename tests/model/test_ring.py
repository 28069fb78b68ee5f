"""Ring attention: equal to a softmax on one device, balanced, no work above the diagonal, no gathered keys."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from bytescope.memory.cost import flops
from bytescope.model.attention.chunked import chunked_attention
from bytescope.model.attention.ring import Ring, ring_attention
from bytescope.model.zigzag import zigzag, zigzag_positions
from support.described import described
from support.exhaustive import exhaustive

H, G, K = 4, 2, 8


def ring_of(devices, data=1, tensor=1, context=1) -> Ring:
    mesh = Mesh(
        np.array(devices[: data * tensor * context]).reshape(data, tensor, context), ("data", "tensor", "context")
    )
    return Ring(mesh, "context", ("data",), ("tensor",))


def inputs(length, batch=2):
    """Queries, keys, values and a weight for the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (batch, length, heads, K)) for key, heads in zip(keys, (H, G, G, H))]


def softmax_attention(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("blhk,bshk->bhls", q, k) / np.sqrt(q.shape[-1])
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhls,bshk->blhk", jax.nn.softmax(jnp.where(allowed[None, None], scores, -jnp.inf), -1), v)


def in_order(ring, chunk, q, k, v):
    """Ring attention of arguments in the order of the sequence."""
    q, k, v = (zigzag(x, ring.size) for x in (q, k, v))
    context = ring_attention(q, k, v, ring=ring, chunk=chunk)
    return context[:, jnp.argsort(zigzag_positions(context.shape[1], ring.size))]


@partial(jax.jit, static_argnums=0)
def value_and_gradients(attend, q, k, v, weight):
    value, pull = jax.vjp(attend, q, k, v)
    return value, *pull(weight)


def loss(ring, chunk=4, **checkpoint):
    """A scalar of (q, k, v); with arguments of `jax.checkpoint`, of a checkpointed attention."""
    attend = partial(ring_attention, ring=ring, chunk=chunk)
    attend = jax.checkpoint(attend, **checkpoint) if checkpoint else attend
    return lambda q, k, v: (attend(q, k, v) ** 2).sum()


def hops(jaxpr) -> int:
    """Messages that each device sends in one call, loops counted with their length."""
    found = 0
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns"))
        inside = sum(hops(value) for value in inner if hasattr(value, "eqns"))
        found += inside * equation.params.get("length", 1) + (equation.primitive.name == "ppermute")
    return found


def hops_of(function, *arguments) -> int:
    return hops(jax.jit(function).trace(*arguments).jaxpr)


@pytest.mark.parametrize(
    ("mesh", "length", "chunk"),
    [
        ({"context": 4}, 40, 3),  # 5 positions a chunk, in blocks of 3 and 2
        ({"tensor": 2, "context": 4}, 32, 2),
        *exhaustive(
            ({"context": 2}, 32, 4),
            ({"context": 1}, 40, 64),  # blocks never longer than a chunk
            ({"context": 8}, 32, 1),
            ({"data": 2, "tensor": 2, "context": 2}, 32, 4),
        ),
    ],
)
def test_values_and_gradients_equal_a_softmax_on_one_device(devices, mesh, length, chunk):
    arguments = inputs(length)
    found = value_and_gradients(partial(in_order, ring_of(devices, **mesh), chunk), *arguments)
    wanted = value_and_gradients(softmax_attention, *arguments)
    for one, other in zip(found, wanted):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_axes_the_ring_does_not_name_hold_copies(devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("fsdp", "context"))
    arguments = inputs(32, batch=1)
    found = value_and_gradients(partial(in_order, Ring(mesh, "context", (), ()), 4), *arguments)
    for one, other in zip(found, value_and_gradients(softmax_attention, *arguments)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_bf16_is_summed_in_float32(devices):
    """No worse than one device in the same blocks: what travels is not rounded on the way."""
    arguments = [x.astype(jnp.bfloat16) for x in inputs(64)]
    exact = value_and_gradients(softmax_attention, *(x.astype(jnp.float32) for x in arguments))
    one_device = value_and_gradients(lambda q, k, v: chunked_attention(q, k, v, None, 4), *arguments)
    ring = value_and_gradients(partial(in_order, ring_of(devices, context=8), 4), *arguments)
    for true, single, divided in zip(exact, one_device, ring):
        error, allowed = (np.abs(np.asarray(x, np.float32) - true).mean() for x in (divided, single))
        assert divided.dtype == jnp.bfloat16 and error < 1.05 * allowed


@pytest.mark.parametrize("ranks", [3, 8, *exhaustive(1, 2)])
def test_zigzag_pairs_an_early_chunk_with_a_late_one(ranks):
    length, n = 6 * ranks, 3
    order = np.concatenate(
        [np.r_[r * n : (r + 1) * n, (2 * ranks - 1 - r) * n : (2 * ranks - r) * n] for r in range(ranks)]
    )
    x = jnp.arange(5 * length * 2).reshape(5, length, 2)
    np.testing.assert_array_equal(zigzag(x, ranks), x[:, order])
    np.testing.assert_array_equal(zigzag(x.T, ranks, axis=1), x.T[:, order])
    np.testing.assert_array_equal(zigzag_positions(length, ranks), order)
    assert zigzag_positions(length, ranks).dtype == jnp.int32


def test_positions_are_no_constant_of_the_program():
    lowered = jax.jit(lambda: zigzag_positions(4096, 8)).lower()
    assert "stablehlo.iota" in lowered.as_text() and len(lowered.as_text()) < 8000


@pytest.mark.parametrize("context", [2, *exhaustive(8)])
def test_flops_are_those_of_the_lower_triangle(devices, context):
    """Each rank forms m (2m+1) + (C-1) 2m^2 pairs of blocks; together N (N+1) / 2 for N = 2mC, as on one device."""
    batch, length, chunk = 2, 64, 2
    arguments = inputs(length, batch)[:3]
    ring, m = ring_of(devices, context=context), length // (2 * context) // chunk
    forward = flops.count(jax.jit(partial(ring_attention, ring=ring, chunk=chunk)).trace(*arguments).jaxpr)
    both = flops.count(jax.jit(jax.grad(loss(ring, chunk), (0, 1, 2))).trace(*arguments).jaxpr)
    one_device = flops.count(
        jax.jit(jax.grad(lambda q, k, v: (chunked_attention(q, k, v, None, chunk) ** 2).sum(), (0, 1, 2)))
        .trace(*arguments)
        .jaxpr
    )

    pairs = context * (m * (2 * m + 1) + (context - 1) * 2 * m * m)
    blocks = length // chunk
    assert pairs == blocks * (blocks + 1) // 2
    product = 2 * batch * H * K * chunk * chunk
    # Row sums of dP * P are one product of vectors a row.
    rows = 2 * batch * length * H * K
    assert forward.total == 2 * product * pairs
    assert both.total == 7 * product * pairs + rows == one_device.total
    assert both.kernel_recomputed == product * pairs and both.recomputed == 0


@pytest.mark.parametrize("context", [4, *exhaustive(8)])
def test_nothing_travels_without_need(devices, context):
    """Keys and values make C-1 hops a pass, their gradients C: back to where they belong."""
    ring, arguments = ring_of(devices, context=context), inputs(64)[:3]
    assert hops_of(loss(ring), *arguments) == context - 1
    assert hops_of(jax.grad(loss(ring), (0, 1, 2)), *arguments) == 2 * (context - 1) + context


def test_the_program_is_as_long_for_eight_ranks_as_for_four(devices):
    four, eight = (
        len(str(jax.make_jaxpr(jax.grad(loss(ring_of(devices, context=context))))(*inputs(64)[:3])))
        for context in (4, 8)
    )
    assert eight < 1.1 * four


KEEP = jax.checkpoint_policies.save_only_these_names


@pytest.mark.parametrize(
    ("policy", "rings", "products"),
    [
        (KEEP("context", "lse"), 0, 0),
        (KEEP("context"), 1, 0.5),  # for the denominators; the products of values are not needed
        (jax.checkpoint_policies.nothing_saveable, 1, 1),
    ],
)
def test_kept_context_and_lse_spare_the_second_forward_ring(devices, policy, rings, products):
    ring, arguments = ring_of(devices, context=4), inputs(32)[:3]
    plain, checkpointed = jax.grad(loss(ring), (0, 1, 2)), jax.grad(loss(ring, policy=policy), (0, 1, 2))
    assert hops_of(checkpointed, *arguments) - hops_of(plain, *arguments) == rings * hops_of(loss(ring), *arguments)
    once, again = (flops.count(jax.jit(function).trace(*arguments).jaxpr) for function in (loss(ring), checkpointed))
    assert again.recomputed == pytest.approx(products * once.total)


@pytest.mark.parametrize("policy", [KEEP("context", "lse"), *exhaustive(jax.checkpoint_policies.nothing_saveable)])
def test_under_a_checkpointed_scan_over_layers(devices, policy):
    ring, (q, k, v, _) = ring_of(devices, data=2, context=4), inputs(32)
    layers = jax.random.normal(jax.random.key(1), (3, K, K))

    def total(attend, order, layers):
        def layer(x, w):
            return x + attend(x @ w, order(k), order(v)), None

        checkpointed = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return (jax.lax.scan(checkpointed, order(q), layers)[0] ** 2).sum()

    divided = partial(total, partial(ring_attention, ring=ring, chunk=4), partial(zigzag, ranks=ring.size))
    whole = partial(total, softmax_attention, lambda x: x)
    found, wanted = (jax.jit(jax.value_and_grad(function))(layers) for function in (divided, whole))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_keys_travel_and_are_never_gathered(devices):
    ring = ring_of(devices, context=8)
    sharding = jax.sharding.NamedSharding(ring.mesh, ring.activation)
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs(64)[:3]]
    text = jax.jit(jax.grad(loss(ring), (0, 1, 2))).lower(*arguments).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text and "all-to-all" not in text


def test_memory_of_a_device_falls_with_the_ranks(devices):
    def temp(context):
        ring = ring_of(devices, context=context)
        sharding = jax.sharding.NamedSharding(ring.mesh, ring.activation)
        arguments = [
            jax.ShapeDtypeStruct((1, 8192, *x.shape[2:]), x.dtype, sharding=sharding) for x in inputs(16, 1)[:3]
        ]
        compiled = jax.jit(jax.grad(loss(ring, 64), (0, 1, 2))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(8) < 0.3 * temp(2)
    scores = 4 * H * (8192 // 16) ** 2  # one pair of chunks
    assert temp(8) < scores


@pytest.mark.exhaustive
def test_hops_hide_behind_products_on_a_gpu():
    """Attention of an 8B model, 131072 positions over eight: what a device holds, what runs while a message flies."""
    ring = Ring(Mesh(np.array(described("h200:8")), ("context",)), "context", (), ())
    sharding = jax.sharding.NamedSharding(ring.mesh, ring.activation)
    arguments = [jax.ShapeDtypeStruct((1, 131072, heads, 128), jnp.bfloat16, sharding=sharding) for heads in (32, 8, 8)]
    compiled = jax.jit(jax.grad(loss(ring, 512), (0, 1, 2))).lower(*arguments).compile()

    queries, keys = 16384 * 32 * 128 * 2, 2 * 16384 * 8 * 128 * 2  # bytes in bfloat16, of a device
    scores = 32 * 512 * 512 * 4
    # Queries and the context's gradient by heads, dq in float32; keys here and on their way; their sums in float32
    # leaving, arriving and of the first pair (half); scores and their gradient, each in both dtypes.
    held = 2 * queries + 2 * queries + 2 * keys + 2 * (2 + 0.5) * keys + 3 * scores
    memory = compiled.memory_analysis()
    # Buffers of the result serve before it is written.
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 1.1 * held

    loops = [text for text in compiled.as_text().split("\n\n") if "ENTRY" not in text and "-permute" in text]
    flights = [
        flight
        for text in loops
        for flight in re.findall(r"= [^\n]*collective-permute-start\(.*?collective-permute-done\(", text, re.S)
    ]
    assert len(flights) == 3 and sum(text.count(" collective-permute(") for text in loops) == 0
    assert all(" while(" in flight for flight in flights)


@pytest.mark.parametrize(
    ("length", "batch", "mesh", "message"),
    [
        (36, 2, {"context": 4}, "data.seq_len=36 cannot be split into 2 x mesh.context = 8 chunks: make it a multiple"),
        (32, 3, {"data": 2, "context": 4}, "batch=3 is not divisible by mesh.data=2: make it a multiple of 2"),
        (32, 2, {"tensor": 4, "context": 2}, "model.n_kv_heads=2 is not divisible by mesh.tensor=4"),
    ],
)
def test_what_does_not_divide_is_refused(devices, length, batch, mesh, message):
    ring = ring_of(devices, **mesh)
    with pytest.raises(ValueError, match=message):
        ring_attention(*inputs(length, batch)[:3], ring=ring, chunk=4)
    if length % (2 * ring.size):
        with pytest.raises(ValueError, match=message):
            zigzag_positions(length, ring.size)
