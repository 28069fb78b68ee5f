"""Sharding constraints that are tried where the partitioner gathers an array in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope.memory.compare import constraint_trials
from bytescope.memory.compare.constraint_trials import try_constraints
from support.described import described

TARGET = "h100:8"


def transposed(size, devices):
    """The program of openxla/xla#15207, in a function of a gradient, with the specs of a mesh of 4 x 2 devices."""
    mesh = jax.sharding.Mesh(np.reshape(devices, (4, 2)), ("x", "y"))
    before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def f(a, b):
        d = a * b  # here
        return jnp.sin(with_sharding_constraint(d, after))

    return jax.jit(f), [jax.ShapeDtypeStruct((size,) * 3, jnp.float32, sharding=before)] * 2


@pytest.fixture(scope="module")
def trials():
    seen = []
    found = try_constraints(
        *transposed(256, described(TARGET)),
        target=TARGET,
        max_trials=5,
        progress=lambda number, count, words: seen.append((number, count, words)),
    )
    assert [number for number, _, _ in seen] == [1, 2, 3, 4, 5] and all(count == 5 for _, count, _ in seen)
    return found


def test_the_best_constraint_moves_one_axis(trials):
    best, whole = trials[0], 256**3 * 4
    assert best.improves and best.rows_before == 1 and best.rows_after == 0
    assert best.wire_before == whole * 7 // 8 and best.wire_after < best.wire_before / 2
    assert best.allocated_before - best.allocated_after > whole / 2
    assert best.seconds_after < best.seconds_before
    assert best.source.startswith(f"{__file__}:") and best.array == "the result of mul, float32[256,256,256]"
    assert best.code.endswith(f"NamedSharding(mesh, {best.spec}))")


def test_trials_are_sorted_and_one_that_changes_nothing_is_no_improvement(trials):
    assert [trial.allocated_after for trial in trials] == sorted(trial.allocated_after for trial in trials)
    own = next(trial for trial in trials if trial.spec == "P('y', None, 'x')")
    assert not own.improves and own.rows_after == 1 and own.allocated_after == own.allocated_before


def test_the_gradient_of_a_constrained_array_is_constrained(devices):
    step, args = transposed(16, devices)

    traced = jax.jit(jax.grad(lambda a, b: step(a, b).sum())).trace(*args)
    (line,) = {
        constraint_trials.line_of(equation)
        for equation, backward in constraint_trials._equations(traced.jaxpr)
        if equation.primitive.name == "mul" and not backward and equation.outvars[0].aval.shape == (16, 16, 16)
    }
    site = constraint_trials._Site(line, "mul", False, 0, (16, 16, 16), "float32")
    changed = constraint_trials._changed(traced, site, (("x",), (), ()), args[0].sharding.mesh)
    made = [
        backward
        for equation, backward in constraint_trials._equations(changed.jaxpr)
        if equation.primitive.name == "sharding_constraint" and equation.params["sharding"].spec == P("x", None, None)
    ]
    assert made == [False, True]


def test_a_step_that_gathers_nothing_has_no_trials():
    mesh = jax.sharding.Mesh(np.asarray(described(TARGET)), ("x",))
    rows = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    assert try_constraints(jnp.sin, [rows], target=TARGET) == ()
