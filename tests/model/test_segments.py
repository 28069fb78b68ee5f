"""Packed rows: an example is computed as if it were alone, by every kernel, and no token sees another example."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from bytescope.configs import base
from bytescope.model import PRECISIONS, ModelConfig, Transformer
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.attention.ring import ring_attention
from bytescope.model.placement import ONE_DEVICE, Ring
from bytescope.model.segments import positions_in_segments
from bytescope.model.zigzag import zigzag, zigzag_positions
from support.exhaustive import exhaustive

H, G, K, L = 4, 2, 8, 40
# Examples of two rows, padding behind them: one ends in the middle of every block, one is a single token.
LENGTHS = [(13, 1, 19), (21, 19)]


def ids(lengths=LENGTHS, length=L) -> np.ndarray:
    rows = [np.repeat(np.r_[1 : len(row) + 1, 0], [*row, length - sum(row)]) for row in lengths]
    return np.stack(rows).astype(np.int32)


def spans(lengths=LENGTHS):
    """(row, first position, end) of each example."""
    for row, sizes in enumerate(lengths):
        ends = np.cumsum(sizes)
        yield from ((row, end - size, end) for size, end in zip(sizes, ends))


def model_config(**changes) -> ModelConfig:
    values = base.get_config().model.to_dict()
    small = {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": H,
        "n_kv_heads": G,
        "d_head": K,
        "d_ff": 48,
        "vocab_size": 64,
        "vocab_multiple": 1,
        "max_seq_len": L,
        "attention_chunk": 7,
        "attention": "naive",
    }
    return ModelConfig.from_dict({**values, **small, **changes})


def arguments():
    """Queries, keys, values and a weight of the result that is 0 on padding."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, (2, L, heads, K)) for key, heads in zip(keys, (H, G, G, H)))
    return q, k, v, weight * (ids() > 0)[:, :, None, None]


def kernel(name, chunk=7):
    return partial(KERNELS[name].run, config=model_config(attention_chunk=chunk), key_B=None, place=ONE_DEVICE)


def in_ring(devices, chunk, context, **others):
    names = [*others, "context"]
    mesh = Mesh(
        np.array(devices[: context * int(np.prod(list(others.values())))]).reshape(*others.values(), context), names
    )
    ring = Ring(mesh, "context", tuple(set(names) & {"data"}), tuple(set(names) & {"tensor"}))

    def run(q, k, v, segments):
        q, k, v = (zigzag(x, ring.size) for x in (q, k, v))
        context = ring_attention(q, k, v, segments, ring=ring, chunk=chunk)
        return context[:, jnp.argsort(zigzag_positions(context.shape[1], ring.size))]

    return run


@partial(jax.jit, static_argnums=0)
def value_and_gradients(attend, q, k, v, weight, *segments):
    value, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
    return value, *pull(weight)


@pytest.fixture(scope="module")
def alone():
    """Context and gradients, each example of `arguments` by itself."""
    given = arguments()
    found = [np.zeros(x.shape, np.float32) for x in (given[3], *given[:3])]
    for row, start, end in spans():
        own = value_and_gradients(kernel("naive"), *(x[row : row + 1, start:end] for x in given))
        for whole, part in zip(found, own):
            whole[row, start:end] = part[0]
    return found


FIRST = (("chunked", 7), ("chunked", 512), {"context": 2, "chunk": 3})


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(attend, marks=() if attend in FIRST else pytest.mark.exhaustive)
        for attend in (
            ("naive",),
            ("chunked", 7),
            ("chunked", 8),
            ("chunked", 512),
            {"context": 4},
            {"context": 2, "chunk": 3},
            {"data": 2, "tensor": 2, "context": 2},
        )
    ],
    ids=str,
)
def test_kernels_compute_each_example_as_if_it_were_alone(devices, alone, attend):
    run = in_ring(devices, attend.pop("chunk", 4), **attend) if isinstance(attend, dict) else kernel(*attend)
    found = value_and_gradients(run, *arguments(), ids())
    assert all(np.isfinite(x).all() for x in found)
    real = (ids() > 0)[:, :, None, None]
    for one, other in zip(found, alone):
        np.testing.assert_allclose(one * real, other, rtol=1e-5, atol=2e-6)
    for gradient in found[1:]:
        assert not np.any(gradient * ~real)  # exactly none of padding


@pytest.mark.quick
def test_positions_begin_anew_with_every_example():
    expected = np.concatenate([np.arange(13), [0], np.arange(19), np.arange(7)]), np.r_[0:21, 0:19]
    found = positions_in_segments(jnp.asarray(ids()))
    np.testing.assert_array_equal(found, np.stack(expected))
    assert found.dtype == jnp.int32


def small(**changes) -> Transformer:
    return Transformer(model_config(**changes), PRECISIONS["fp32"], rngs=nnx.Rngs(params=0))


def tokens(seed=1):
    return np.random.default_rng(seed).integers(0, 64, (2, L)).astype(np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rope", "rope_local_theta": 10.0, "global_every": 2},
        *exhaustive({"position": "learned", "scan": False}),
    ],
    ids=str,
)
def test_logits_are_those_of_each_example_alone(changes):
    model, tokens_BL = small(**changes), tokens()
    packed = jax.jit(lambda: model.logits(model.hidden(tokens_BL, None, jnp.asarray(ids())), jnp.float32))()
    # Each in a row of its own; what fills that up is behind it.
    alone = jax.jit(model)(np.stack([np.resize(tokens_BL[row, start:end], L) for row, start, end in spans()]))
    for (row, start, end), logits in zip(spans(), alone):
        np.testing.assert_allclose(packed[row, start:end], logits[: end - start], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("attention", ["naive", "chunked"])
def test_one_example_a_row_is_a_row_without_segments(attention):
    model = small(attention=attention)
    packed, plain = (
        jax.jit(lambda segments: model.hidden(tokens(), None, segments))(segments)
        for segments in (np.ones((2, L), np.int32), None)
    )
    np.testing.assert_array_equal(packed, plain)
