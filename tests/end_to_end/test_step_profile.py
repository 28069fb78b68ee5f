"""The trace of a step that tests/bench/cpu_peers.py --profile shows, on small programs."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def step_profile(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    sys.modules.pop("step_profile", None)
    import step_profile

    return step_profile


def test_a_product_and_a_transpose_are_told_apart(step_profile):
    matrix = jnp.ones((1024, 1024))
    product = jax.jit(lambda a: a @ a)
    transpose = jax.jit(lambda a: a.T.copy())
    for function in (product, transpose):
        jax.block_until_ready(function(matrix))
    products = step_profile.seconds_by_kind(lambda: product(matrix))
    copies = step_profile.seconds_by_kind(lambda: transpose(matrix))
    assert max(products, key=products.get) == "products, reductions"
    assert set(copies) == {"copies, transposes"}


def test_a_loop_is_counted_once(step_profile, monkeypatch):
    def loop(carry):
        return jax.lax.scan(lambda each, _: (jnp.sin(each), each.sum()), carry, length=20)

    compiled = jax.jit(loop)
    argument = jnp.ones(200_000)
    jax.block_until_ready(compiled(argument))
    names = []
    monkeypatch.setattr(step_profile, "kind_of", lambda name: names.append(name) or "all")
    step_profile.seconds_by_kind(lambda: compiled(argument))
    assert names and not any(name.startswith("while") for name in names)
    monkeypatch.setattr(step_profile, "_CONTAINERS", re.compile("nothing is a container"))
    step_profile.seconds_by_kind(lambda: compiled(argument))
    assert any(name.startswith("while") for name in names)


def test_a_trace_without_instructions_is_refused(step_profile):
    with pytest.raises(RuntimeError, match="no instruction"):
        step_profile.seconds_by_kind(lambda: None)
