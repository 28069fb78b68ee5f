"""Scales and clipped ranges: errors are those of the text, and no choice is worse than plain rounding."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

from bytescope.model.quantized import groups
from bytescope.train.quantize import scale_search
from bytescope.train.quantize.folds import fold_in, folds_of, shared
from bytescope.train.weights.leaves import parameters_of
from support.exhaustive import exhaustive
from support.models.generating import random_model

GROUP = 32
FAMILIES = {
    "many heads": {"model.n_heads": 4, "model.n_kv_heads": 2},
    "gemma2": {
        "model.norm": "rmsnorm_offset",
        "model.mlp": "geglu",
        "model.post_norms": True,
        "model.attention_softcap": 5.0,
        "model.logits_softcap": 3.0,
    },
    "qwen3": {"model.qk_norm": True},
    "no gate": {"model.mlp": "gelu", "model.qkv_bias": True},
}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    x_TI = rng.standard_normal((300, 64)).astype(np.float32) * np.exp(rng.standard_normal(64)).astype(np.float32)
    return x_TI, x_TI.T @ x_TI / len(x_TI), rng.standard_normal((64, 40)).astype(np.float32)


def error(x_TI, w_IO, replaced_IO):
    """The mean over tokens, computed from the outputs themselves."""
    return np.square(x_TI @ (np.asarray(replaced_IO) - w_IO)).sum() / len(x_TI)


def rounded(w_IO):
    return np.asarray(groups.decode(*groups.encode(jnp.asarray(w_IO), GROUP)))


def test_the_best_power_has_the_least_error_of_the_outputs(problem):
    x_TI, gram_II, w_IO = problem
    magnitudes_I = np.abs(x_TI).mean(0)
    scale_I, power, errors = scale_search.search_scale(gram_II, magnitudes_I, (w_IO,), GROUP)
    direct = []
    for number in range(scale_search.POWERS):
        each = np.asarray(scale_search.scale_of(magnitudes_I, number / scale_search.POWERS))[:, None]
        direct.append(error(x_TI, w_IO, rounded(w_IO * each) / each))
    np.testing.assert_allclose(errors, direct, rtol=1e-3)
    assert float(power) == pytest.approx(np.argmin(direct) / scale_search.POWERS) and float(power) > 0
    assert min(direct) < 0.9 * direct[0]
    assert float(scale_I.max() * scale_I.min()) == pytest.approx(1, rel=1e-4)


def test_clipping_helps_each_group_and_the_error_is_told(problem):
    x_TI, gram_II, w_IO = problem
    scale_I = np.ones(64, np.float32)
    whole = np.square(x_TI @ w_IO).sum() / len(x_TI)
    plain, told_plain = scale_search.quantize(gram_II, scale_I, w_IO, GROUP, False)
    clipped, told = scale_search.quantize(gram_II, scale_I, w_IO, GROUP, True)
    assert float(told_plain) == pytest.approx(error(x_TI, w_IO, groups.decode(*plain)) / whole, rel=1e-3)
    assert float(told) == pytest.approx(error(x_TI, w_IO, groups.decode(*clipped)) / whole, rel=1e-3)
    assert float(told_plain) == pytest.approx(float(scale_search.share_of(gram_II, w_IO, rounded(w_IO))), rel=1e-5)
    for group in range(2):  # by itself no group is worse off
        own = slice(GROUP * group, GROUP * group + GROUP)
        mine, theirs = (
            np.square(x_TI[:, own] @ (np.asarray(groups.decode(*found)) - w_IO)[own]).sum(0)
            for found in (clipped, plain)
        )
        assert (mine <= theirs * 1.001).all() and (mine < 0.99 * theirs).any()


def test_the_error_of_scaled_weights_is_that_of_scaled_inputs(problem):
    x_TI, gram_II, w_IO = problem
    scale_I = np.exp(np.random.default_rng(5).standard_normal(64)).astype(np.float32)
    scaled_IO = w_IO * scale_I[:, None]
    whole = np.square(x_TI @ w_IO).sum() / len(x_TI)
    for clip in (False, True):
        found, told = scale_search.quantize(gram_II, scale_I, scaled_IO, GROUP, clip)
        direct = error(x_TI / scale_I, scaled_IO, groups.decode(*found)) / whole
        assert float(told) == pytest.approx(direct, rel=1e-3)


@pytest.mark.parametrize("name", ["many heads", *exhaustive(*(name for name in FAMILIES if name != "many heads"))])
def test_scaled_but_not_rounded_the_model_is_the_same(name):
    model, params = random_model(FAMILIES[name])
    rng, layers = np.random.default_rng(3), []
    tokens = rng.integers(0, 64, (2, 24)).astype(np.int32)
    found = dict(params, blocks={})
    for layer in range(2):
        own = {
            path.split(".", 2)[2]: np.asarray(leaf(params, path))
            for path in parameters_of(model.config)
            if path.startswith(f"blocks.{layer}.")
        }
        scaled = dict(own)
        for fold in folds_of(model.config):
            if fold.before:
                size = own[fold.weights[0]].size // own[fold.weights[0]].reshape(-1, _outputs(own, fold)).shape[1]
                scale_I = shared(fold, model.config, np.exp(rng.standard_normal(size)).astype(np.float32))
                scaled, taken = fold_in(fold, model.config, scaled, np.asarray(scale_I))
                np.testing.assert_allclose(taken, scale_I, rtol=1e-2)  # a norm's vector is rounded
        layers.append([path for path in own if not np.array_equal(own[path], scaled[path])])
        found["blocks"][layer] = unflatten_dict(scaled, sep=".")
    run = nnx.jit(lambda params: nnx.merge(model.graph, params)(tokens))
    np.testing.assert_allclose(run(found), run(params), atol=1e-5 * float(jnp.abs(run(params)).max()))
    assert len(layers[0]) >= (9 if name != "no gate" else 7)  # norms and all weights that take part


def _outputs(own, fold):
    w = own[fold.weights[0]]
    return w.shape[-1] if fold.name == "attention out" else int(np.prod(w.shape[1:]))


def leaf(params, path):
    for key in path.split("."):
        params = (
            params[int(key)]
            if isinstance(params, (list, tuple)) or (key.isdigit() and int(key) in params)
            else params[key]
        )
    return params
