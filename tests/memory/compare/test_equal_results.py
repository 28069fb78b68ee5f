"""Results of two versions of a program at small sizes: equal up to rounding, different, or not comparable."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.memory.compare.equal_results import (
    SmallRun,
    compare_results,
    compare_with_remat_off,
    run_small,
    run_version,
)
from bytescope.memory.compare.prepared_program import prepare
from bytescope.memory.compare.program_factory import load_factory
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.program.user_program import UserProgram

SOURCE = '''
import jax, jax.numpy as jnp, optax

def program(layers=12, width=1024):
    """A step with dropout, weight decay and an unused argument."""
    optimizer = optax.adamw(1e-3)

    def layer(x, w):
        h = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), jnp.tanh(x @ w), 0)
        return x + h, None

    def step(params, opt_state, tokens, unused):
        def loss(params):
            x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
            return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    spec = jax.ShapeDtypeStruct
    params = {"embed": spec((50, width), jnp.float32), "layers": spec((layers, width, width), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    return step, (params, state, spec((4, 8), jnp.int32), spec((3,), jnp.float32)), {"donate_argnums": (0, 1)}
'''
SMALL = {"layers": "2", "width": "16"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "decayed_step.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def unchanged(file):
    return run_small(load_factory(f"{file}:program")(SMALL, targets.parse("cpu:1")))


def run(step, *specs):
    return run_small(prepare(UserProgram("step", step, specs), targets.parse("cpu:1")))


def test_a_changed_policy_gives_equal_results(file, unchanged):
    """The changed file runs in a process of its own, and is not written."""
    text = SOURCE.replace("(layer)", "(layer, policy=jax.checkpoint_policies.dots_saveable)")
    equality = compare_results(unchanged, run_version(f"{file}:program", SMALL, {file: text}))
    assert equality.outcome == "equal" and equality.difference < 1e-6
    assert equality.sentence.startswith("all 8 results are equal up to rounding")
    assert file.read_text() == SOURCE


def test_a_change_of_the_gradient_differs(file, unchanged, tmp_path):
    """A gradient of the layers that is 5 % too small is in the moments of the layers, and in nothing before."""
    text = SOURCE.replace("return x + h, None", "return x + 0.95 * h + 0.05 * jax.lax.stop_gradient(h), None")
    changed = tmp_path / "changed_step.py"
    changed.write_text(text)
    after = run_small(load_factory(f"{changed}:program")(SMALL, targets.parse("cpu:1")))
    equality = compare_results(unchanged, after)
    assert equality.outcome == "differs" and 0.01 < equality.difference < 0.2
    assert equality.path.startswith("[1][0].") and equality.path in equality.sentence
    assert np.isclose(unchanged.values["[2]"], after.values["[2]"], rtol=1e-6)  # the loss is equal


def test_arguments_without_sign_are_tried_for_results_that_are_not_finite():
    array = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    result = run(lambda a, b: jnp.sqrt(a) + b, array, array)
    assert result.repeats and all(np.isfinite(value).all() for value in result.values.values())


def test_a_program_that_does_not_repeat_is_not_checked():
    """jax.lax.rng_uniform has no key."""
    spec = jax.ShapeDtypeStruct((256,), jnp.float32)
    keyless = run(lambda x: x * jax.lax.rng_uniform(0.0, 1.0, x.shape), spec)
    equality = compare_results(keyless, keyless)
    assert equality.outcome == "not checked" and "different results on each run" in equality.sentence


def test_results_that_are_only_noise():
    """A sum that is zero without rounding hides no real difference."""
    spec = jax.ShapeDtypeStruct
    step = run(lambda x: {"mean": x.mean(), "zero": (x - x.mean()).sum()}, spec((64, 8), jnp.float32))
    changed = {"['mean']": step.values["['mean']"] * (1 + 1e-6), "['zero']": -step.values["['zero']"]}
    equality = compare_results(step, dataclasses.replace(step, values=changed))
    assert (equality.outcome, equality.path) == ("equal", "['mean']") and equality.difference < 1e-5


def test_nnx_remat_computes_the_same():
    """flax#4626 reports wrong results of nnx.remat. flax 0.12.8 computes the same with and without it: the loss and all
    gradients of the step, with dropout, are equal, also if models of both kinds exist."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(jnp.tanh(self.linear(x)))

    class RematBlock(Block):
        __call__ = nnx.remat(Block.__call__, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)

    def make(block):
        model = nnx.eval_shape(lambda: block(nnx.Rngs(params=0, dropout=1)))
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def step(params, rest, x):
            def loss(model):
                return (model(model(x)) ** 2).mean()

            return nnx.value_and_grad(loss)(nnx.merge(graph, params, rest))

        return UserProgram("step", step, (params, rest, jax.ShapeDtypeStruct((4, 16), jnp.float32)))

    with_remat, without = (prepare(make(block), targets.parse("cpu:1")) for block in (RematBlock, Block))
    before = run_small(without)
    assert len(before.values) == 3
    equality = compare_results(before, run_small(with_remat))
    assert equality.outcome == "equal" and equality.difference < 1e-6


def test_remat_off_finds_a_region_with_another_derivative():
    """A checkpointed function whose derivative depends on whether it is recomputed: its custom gradient counts its
    calls while jax traces."""
    spec = jax.ShapeDtypeStruct((64,), jnp.float32)

    def program(layer):
        def step(x):
            return jax.value_and_grad(lambda x: jax.checkpoint(layer)(x).sum())(x)

        return lambda: prepare(UserProgram("step", step, (spec,)), targets.parse("cpu:1"))

    assert compare_with_remat_off(program(jnp.sin)).outcome == "equal"
    traces = []

    def unstable(x):
        traces.append(x)
        return jnp.sin(x) * len(traces)

    assert compare_with_remat_off(program(unstable)).outcome == "differs"


def test_rounding_and_other_differences():
    values = {"loss": np.float64(2.0), "['w']": np.arange(4.0), "['n']": np.array(3)}
    first = SmallRun(values, {"loss": 0.0, "['w']": 1e-3}, 2**-23)

    def outcome(changes, **facts):
        return compare_results(first, dataclasses.replace(first, values={**values, **changes}, **facts)).outcome

    assert outcome({}) == "equal"
    assert outcome({"['w']": values["['w']"] + 1e-3}) == "equal"  # within the measured rounding
    assert outcome({"['w']": values["['w']"] + 1e-2}) == "differs"
    assert outcome({"loss": np.float64(2.0002)}) == "equal"
    assert outcome({"loss": np.float64(2.01)}) == "differs"
    assert outcome({"loss": np.float64(2.01)}, epsilon=2**-7) == "equal"  # bfloat16
    assert outcome({"loss": np.float64(2.03)}, epsilon=2**-7) == "differs"
    assert outcome({"loss": np.float64("nan")}) == "differs"
    assert outcome({"['n']": np.array(4)}) == "differs"
    assert outcome({"['w']": np.arange(5.0)}) == "not checked"
    assert outcome({}, repeats=False) == "not checked"


def test_a_failing_version_is_one_line(file):
    with pytest.raises(ReportError, match="did you mean layers"):
        run_version(f"{file}:program", {"layer": "2"})
