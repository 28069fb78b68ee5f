"""Rules of matrices against optax, a matrix at a time; where eps stands in those of the table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bytescope.train.program.config_files import load
from bytescope.train.step.optimizer import param_matrices
from bytescope.train.step.optimizer.rules import OPTIMIZERS
from support.exhaustive import exhaustive


def steps_of(transform, params, grads):
    state, out = transform.init(params), []
    for grad in grads:
        update, state = transform.update(grad, state, params)
        out.append(update)
    return out


def test_adafactor_is_optax_on_each_layer():
    rng = np.random.default_rng(2)
    grads = [
        {"w_up": rng.standard_normal((3, 8, 12)).astype(np.float32), "scale": np.float32(rng.standard_normal(8))}
        for _ in range(3)
    ]
    ours = steps_of(param_matrices.adafactor(), grads[0], grads)
    plain = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0))
    for layer in range(3):
        theirs = steps_of(plain, grads[0]["w_up"][layer], [grad["w_up"][layer] for grad in grads])
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one["w_up"][layer], other, rtol=1e-5)
    theirs = steps_of(plain, grads[0]["scale"], [grad["scale"] for grad in grads])
    np.testing.assert_allclose(ours[-1]["scale"], theirs[-1], rtol=1e-5)


def test_adafactor_clips_a_bias_of_several_heads_as_one_vector():
    """And the bias of each layer apart: a stack of two, of which the heads' sizes differ by a hundred."""
    rng = np.random.default_rng(4)
    sizes = np.array([1e-2, 1.0, 1e-1], np.float32)[None, :, None]
    grads = [
        {"b_q": (rng.standard_normal((2, 3, 4)) * sizes * (10 if step else 1)).astype(np.float32)} for step in range(2)
    ]
    ours = steps_of(param_matrices.adafactor(), grads[0], grads)[-1]["b_q"]
    plain = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0))
    for layer in range(2):
        flat = [grad["b_q"][layer].reshape(-1) for grad in grads]
        np.testing.assert_allclose(ours[layer].reshape(-1), steps_of(plain, flat[0], flat)[-1], rtol=1e-5)
    assert np.sqrt(np.mean(np.square(ours), (1, 2))) == pytest.approx([1.0, 1.0], rel=1e-4)


@pytest.mark.parametrize(("name", "axis"), [("w_token", 0), ("w_head", 1)])
def test_adafactor_does_not_count_the_padding_of_a_table(name, axis):
    """The update of a padded table, without its padding, is that of the table; a larger gradient is clipped."""
    rng = np.random.default_rng(5)
    tables = [rng.standard_normal((5, 5)).astype(np.float32) * scale for scale in (1.0, 30.0)]
    padding = [(0, 0), (0, 0)]
    padding[axis] = (0, 11)
    padded = [{name: np.pad(table, padding)} for table in tables]
    ours = steps_of(param_matrices.adafactor(5), padded[0], padded)[-1][name]
    plain = steps_of(param_matrices.adafactor(), {name: tables[0]}, [{name: table} for table in tables])[-1][name]
    assert float(np.sqrt(np.mean(np.square(plain)))) == pytest.approx(1.0)  # clipped
    np.testing.assert_allclose(ours[:5, :5], plain, rtol=1e-5)
    assert not ours[5:].any() and not ours[:, 5:].any()


def test_muon_is_optax_on_each_matrix():
    """The first update, where the momentum is the gradient in both; and its singular values lie about 1."""
    rng = np.random.default_rng(3)
    w_q, w_o = rng.standard_normal((2, 16, 4, 8)), rng.standard_normal((2, 4, 8, 16))
    grads = {"w_q": jnp.float32(w_q), "w_o": jnp.float32(w_o)}
    (ours,) = steps_of(param_matrices.scale_by_muon(0.95), grads, [grads])
    numbers = {
        "w_q": optax.contrib.MuonDimensionNumbers((1,), (2, 3)),
        "w_o": optax.contrib.MuonDimensionNumbers((1, 2), (3,)),
    }
    (theirs,) = steps_of(optax.contrib.scale_by_muon(weight_dimension_numbers=numbers), grads, [grads])
    for name in grads:
        np.testing.assert_allclose(ours[name], 0.2 * 32**0.5 * theirs[name], rtol=1e-4, atol=1e-5)
    values = np.linalg.svd(np.asarray(ours["w_q"]).reshape(2, 16, 32), compute_uv=False) / (0.2 * 32**0.5)
    assert values.min() > 0.6 and values.max() < 1.3


# A number at the border of two 8-bit codes may take either, and an update is then a few thousandths off.
@pytest.mark.parametrize(("name", "off"), [("adamw_8bit", 2e-2), ("muon", 1e-5), *exhaustive(("adafactor", 1e-5))])
def test_experts_are_updated_each_on_its_own(name, off):
    """Three experts of two layers, whose gradients' sizes differ by a hundred, against a matrix at a time."""
    rng = np.random.default_rng(6)
    sizes = np.float32([[1e-2, 1.0, 1e-1], [1.0, 1e-1, 1e-2]])[..., None, None]
    grads = [jnp.asarray(rng.standard_normal((2, 3, 64, 96)), jnp.float32) * sizes for _ in range(3)]
    rule = OPTIMIZERS[name](load("tiny", []).optimizer, None)

    def updates(grads, path):
        trees = [{"blocks": {path: {"w_up": grad}}} for grad in grads]
        return [tree["blocks"][path]["w_up"] for tree in steps_of(rule, trees[0], trees)]

    ours = updates(grads, "experts")
    for layer, expert in np.ndindex(2, 3):
        theirs = updates([grad[layer, expert] for grad in grads], "mlp")
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one[layer, expert], other, rtol=1e-4, atol=off * float(jnp.abs(other).max()))


@pytest.mark.parametrize("name", ["muon", *exhaustive("adafactor")])
def test_an_update_gathers_no_experts(name, devices):
    """Two layers of eight experts over four devices; layers may be gathered one at a time, experts never."""
    mesh = jax.make_mesh((4,), ("expert",), devices=devices[:4], axis_types=(jax.sharding.AxisType.Auto,))
    shared, everywhere = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in ((None, "expert"), ()))
    rule = OPTIMIZERS[name](load("tiny", []).optimizer, None)
    weights = jax.ShapeDtypeStruct((2, 8, 64, 96), jnp.float32)
    tree = {"blocks": {"experts": {"w_up": weights}}}
    state = jax.eval_shape(rule.init, tree)
    placed = jax.tree.map(lambda leaf: shared if leaf.shape == weights.shape else everywhere, (tree, state))
    update = jax.jit(rule.update, in_shardings=(*placed, placed[0]), out_shardings=placed)
    text = update.lower(tree, state, tree).compile().as_text()
    assert not re.search(r"f32\[[\d,]*64,96\][^=]* all-gather\(", text)


# ---- eps -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("name", ["rmsprop", "adagrad", "adamw"])
def test_eps_stands_beside_the_root(name, size):
    """As in PyTorch: inside it 1e-8 is a floor of 1e-4, the size of clipped gradients of a 124M model."""
    config = load("tiny", []).optimizer
    rule, gradient = OPTIMIZERS[name](config, None), {"w": jnp.full((2,), size)}
    state, moved = rule.init(gradient), 0.0
    for _ in range(50):
        direction, state = rule.update(gradient, state, gradient)
        moved += float(direction["w"][0])
    steps = np.arange(1, 51)
    means = {"rmsprop": 1 - config.b2**steps, "adagrad": steps, "adamw": np.ones(50)}[name]
    assert moved == pytest.approx(np.sum(size / (size * np.sqrt(means) + config.eps)), rel=1e-4)


@pytest.mark.quick
def test_adagrad_leaves_alone_what_never_had_a_gradient():
    rule = OPTIMIZERS["adagrad"](load("tiny", [("optimizer.eps", "0.0")]).optimizer, None)
    zeros = {"w": jnp.zeros((2,))}
    assert float(jnp.abs(rule.update(zeros, rule.init(zeros))[0]["w"]).max()) == 0.0
