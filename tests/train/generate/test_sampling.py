"""Sampling: filters as transformers has them, and draws that follow the distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.train.generate.request import Request
from bytescope.train.generate.steps import Draws, choose, filtered
from support.models.generating import random_engine, together

SETTINGS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.8, 20, 0.9)]


def draws(rows, seed=0, setting=SETTINGS[0]):
    temperature, top_k, top_p = setting
    return Draws(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.arange(seed, seed + rows, dtype=jnp.uint32),
    )


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_filters_are_those_of_transformers(setting):
    import torch
    from transformers.generation import logits_process as theirs

    temperature, top_k, top_p = setting
    logits = np.random.default_rng(0).normal(0, 3, (6, 50)).astype(np.float32)
    if top_p == 1:  # of equal ones at the limit of top-p the order decides
        logits = logits.round()
    found = torch.tensor(logits) / temperature
    used = [theirs.TopKLogitsWarper(top_k)] if top_k else []
    used += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in used:
        found = warper(None, found)
    ours = jax.nn.softmax(filtered(jnp.asarray(logits), draws(6, setting=setting)), axis=-1)
    np.testing.assert_allclose(ours, torch.softmax(found, -1).numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_distribution(setting):
    """Chi-square of 20,000 draws, 200 places of each of 100 seeds, below its 99.9 % quantile; tokens that are expected
    less than five times count together."""
    from scipy.special import chdtri

    logits = np.random.default_rng(1).normal(0, 2, 30).astype(np.float32)
    count = 20_000
    rows = jnp.tile(jnp.asarray(logits)[None], (count, 1))
    number = jnp.arange(count)
    how = dataclasses.replace(draws(count, setting=setting), seed_B=(number // 200).astype(jnp.uint32))
    drawn = np.asarray(jax.jit(lambda rows, how: choose(rows, how, number % 200, True))(rows, how))
    temperature, top_k, top_p = setting  # a direct computation, token by token
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / temperature
    kept = scaled[: top_k or None]
    probs = np.exp(kept - kept[0]) / np.exp(kept - kept[0]).sum()
    kept = kept[np.cumsum(probs) - probs < top_p] if top_p < 1 else kept
    probs = np.exp(kept - kept[0]) / np.exp(kept - kept[0]).sum()
    expected = count * probs / probs.sum()
    seen = np.array([np.sum(drawn == token) for token in order[: len(probs)]])
    assert seen.sum() == count  # nothing that a filter leaves out
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum() or [])
    seen = np.append(seen[~rare], seen[rare].sum() if rare.any() else [])
    if len(expected) > 1:
        assert np.sum((seen - expected) ** 2 / expected) < chdtri(len(expected) - 1, 0.001)


def test_a_seed_draws_the_same_whatever_is_beside_it():
    asked = [Request((1, 2, 3), 10, temperature=1.0, seed=5)] * 2 + [Request((9, 8), 10, temperature=1.0, seed=5)]
    engine = random_engine()
    first, second, other = together(engine, asked)
    assert first == second != other
    assert together(random_engine(), [Request((1, 2, 3), 10, temperature=1.0, seed=6)])[0] != first
