"""Findings on the devices and shardings of a step's state before and after a call."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory

KINDS = ("on_one_device", "state_resharded")


def step(state, rows):
    gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(state["w"])
    mean = 0.9 * state["mean"] + gradient
    return {"w": state["w"] - 0.1 * mean, "mean": mean}


@pytest.fixture(scope="module")
def sharded(devices):
    """A sharding of the first dimension over all devices."""
    return NamedSharding(jax.sharding.Mesh(devices, ("data",)), P("data", None))


@pytest.fixture(scope="module")
def placed(sharded):
    """(weights of 16 MiB, a batch of rows), both sharded."""
    return jax.device_put(jnp.ones((2048, 2048)), sharded), jax.device_put(jnp.ones((8, 2048)), sharded)


def findings(state, rows, donate=(0,), **options):
    report = memory.analyze(step, state, rows, donate_argnums=donate, **options)
    return {found.kind: found for found in report.findings if found.kind in KINDS}


def test_state_in_its_sharding_has_no_finding(placed, sharded):
    w, rows = placed
    state = {"w": w, "mean": jnp.zeros_like(w)}
    assert findings(state, rows, out_shardings={"w": sharded, "mean": sharded}) == {}


def test_an_accumulator_that_was_created_on_the_first_device(placed, sharded):
    w, rows = placed
    out = {"w": sharded, "mean": sharded}
    found = findings({"w": w, "mean": jnp.zeros((2048, 2048))}, rows, (), out_shardings=out)["on_one_device"]
    # XLA shards the argument like its result, so the first device holds 16 MiB less the shard of 2 MiB in excess.
    assert "state['mean']" in found.message and found.bytes == 14 * 2**20
    assert "out_shardings" in found.remedy


def test_arrays_that_only_give_shapes_for_a_described_target_have_no_finding():
    state = {"w": jnp.ones((2048, 2048)), "mean": jnp.zeros((2048, 2048))}
    assert "on_one_device" not in findings(state, jnp.ones((8, 2048)), target="cpu:8")


def test_state_that_comes_back_replicated(placed, sharded):
    w, rows = placed
    whole = NamedSharding(sharded.mesh, P())
    state = {"w": w, "mean": jnp.zeros_like(w)}
    found = findings(state, rows, (), out_shardings={"w": whole, "mean": sharded})["state_resharded"]
    assert found.bytes == 14 * 2**20
    assert "state['w']: P('data', None) in, P(None, None) out" in found.message
    assert "compiles the step again" in found.message


def test_a_watched_step_is_judged_by_the_arrays_of_its_first_call(placed, sharded):
    w, rows = placed
    out = {"w": sharded, "mean": sharded}
    watched = memory.watch(jax.jit(step, out_shardings=out), tell=lambda line: None)
    watched({"w": w, "mean": jnp.zeros((2048, 2048))}, rows)
    assert "on_one_device" in {found.kind for found in watched.report.findings}
