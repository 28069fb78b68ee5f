"""`jax_remat3` gives the same layers, plans, reports and losses, except for the differences in `memory/remat`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.memory.cost.named_tensors import named_tensors
from bytescope.memory.jaxprs import bodies, checkpoint_name_of, checkpoint_names_in, checkpoint_of, with_parameters
from bytescope.memory.program import callbacks
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import find_values
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.step_loss import Loss
from support.toy import run_losses, small_program

pytestmark = pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="jax without jax_remat3")
CALLS_EVERY_POLICY = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 calls only its own policies"
)
LAYERS, ROWS, WIDTH, HIDDEN = 3, 64, 16, 64
WEIGHTS = {
    "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
    "gate": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
}
ARGUMENTS = (WEIGHTS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
BOTH = pytest.mark.parametrize("flag", [False, True])
KEEPS_UP = jax.checkpoint_policies.save_only_these_names("up")


@contextlib.contextmanager
def remat3(flag):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", flag)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def layer(x, own):
    """Two named products of one shape, and no others that the backward pass reads."""
    with jax.named_scope("mlp"):
        up = checkpoint_name(x @ own["up"], "up")
        gate = checkpoint_name(x @ own["gate"], "gate")
        return x + (jnp.tanh(gate) * up) @ own["down"]


def unnamed(x, own):
    return x + jnp.tanh(x @ own["up"]) @ own["down"]


def loss_of(layer, policy=None):
    def loss(weights, x):
        def body(x, own):
            return jax.checkpoint(layer, policy=policy)(x, own), None

        return jnp.square(jax.lax.scan(body, x, weights)[0]).mean()

    return loss


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for body in bodies(equation):
            yield from equations(body)


@BOTH
@pytest.mark.quick
def test_a_checkpoint_and_its_names_are_recognized(flag):
    with remat3(flag):
        jaxpr = jax.make_jaxpr(loss_of(layer, KEEPS_UP))(*ARGUMENTS)
        found = [one for one in equations(jaxpr.jaxpr) if checkpoint_of(one)]
        assert [checkpoint_of(one).policy for one in found] == [KEEPS_UP]
        names = [checkpoint_name_of(one) for one in equations(jaxpr.jaxpr)]
        assert [name for name in names if name] == ["up", "gate"] and checkpoint_names_in(jaxpr) == {"up", "gate"}
        other = with_parameters(found[0], lambda key, value: None if key == "policy" else value)
        changed = checkpoint_of(found[0].replace(params=other))
        assert changed.policy is None and len(changed.jaxpr.eqns) == len(checkpoint_of(found[0]).jaxpr.eqns)
        assert flops.count(jaxpr).total == 3 * LAYERS * 2 * ROWS * WIDTH * HIDDEN
        gradient = jax.make_jaxpr(jax.grad(loss_of(layer, KEEPS_UP)))(*ARGUMENTS)
        assert flops.count(gradient).recomputed == LAYERS * 2 * ROWS * WIDTH * HIDDEN
        assert {tensor.name for tensor in named_tensors(gradient)} == {"up", "gate"}


@BOTH
@pytest.mark.quick
def test_callbacks_inside_a_checkpoint_are_found_and_replaced(flag):
    def printing(x, own):
        seen = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return unnamed(x + jax.lax.stop_gradient(seen), own)

    with remat3(flag):
        jaxpr = jax.make_jaxpr(loss_of(printing))(*ARGUMENTS)
        assert callbacks.count(jaxpr) == 1
        assert callbacks.count(callbacks.without_runtime(jaxpr, "tpu")) == 0


@pytest.fixture(scope="module")
def reports():
    """Flag -> policy -> the report of a step that keeps by it."""
    policies = {
        "names": jax.checkpoint_policies.save_only_these_names("up", "gate"),
        "products": jax.checkpoint_policies.dots_saveable,
    }
    reports = {}
    for flag in (False, True):
        with remat3(flag):
            reports[flag] = {
                name: memory.analyze(jax.jit(jax.grad(loss_of(layer, policy))), *ARGUMENTS, target="cpu")
                for name, policy in policies.items()
            }
    return reports


@pytest.mark.parametrize("policy", ["names", "products"])
def test_a_report_is_the_same(reports, policy):
    """This includes names and components, although jax before 0.12 gives the marks of saved values another position."""
    plain, flagged = reports[False][policy], reports[True][policy]
    assert {"up", "gate"} <= plain.residuals_by_name.keys()
    assert flagged.residuals_by_name == plain.residuals_by_name and flagged.breakdown == plain.breakdown
    assert (flagged.peak_bytes, flagged.allocated_bytes) == (plain.peak_bytes, plain.allocated_bytes)
    kept = [
        sorted((b.bytes, b.phase, b.component, b.checkpoint_name) for b in one.buffers if b.category == "residuals")
        for one in (plain, flagged)
    ]
    assert kept[0] == kept[1]


@pytest.fixture(scope="module")
def plans():
    """Flag -> the plan for a budget between nothing and everything named."""
    plans = {}
    for flag in (False, True):
        with remat3(flag):
            plans[flag] = memory.plan_remat(loss_of(layer), ARGUMENTS, "cpu", "220KiB")
    return plans


@CALLS_EVERY_POLICY
def test_a_plan_over_named_values_is_the_same(plans):
    plain, flagged = plans[False], plans[True]
    assert [(value.name, value.bytes) for value in flagged.kept] == [(value.name, value.bytes) for value in plain.kept]
    assert plain.kept and flagged.allocated_bytes == plain.allocated_bytes
    assert (flagged.recomputed_flops, flagged.model_flops) == (plain.recomputed_flops, plain.model_flops)
    assert [layer.name for layer in flagged.layers] == [layer.name for layer in plain.layers] == ["layer"]


@CALLS_EVERY_POLICY
def test_the_tables_of_the_plans_differ_in_everything_saveable_alone(plans):
    """jax 0.12 adds no marks with the flag."""
    tables = [{row.name: row for row in plans[flag].built_in} for flag in (False, True)]
    assert {name for name in tables[0] if tables[0][name] != tables[1][name]} <= {"everything_saveable"}


@BOTH
@pytest.mark.quick
def test_a_plans_policy_keeps_its_names(flag):
    """With the flag, jax before 0.12 calls no policy except its own; a RematPolicy then reports what it missed."""
    with remat3(flag):
        loss = Loss(loss_of(layer), ARGUMENTS, {})
        values = find_values(find_layers(loss.jaxpr, loss.active))
        if flag and jax.__version_info__ < (0, 12):
            assert not values.values
            return
        policy = RematPolicy(values.wanted(["up"]))
        gradient = jax.make_jaxpr(jax.grad(loss_of(layer, policy)))(*ARGUMENTS)
        assert flops.count(gradient).recomputed == LAYERS * 2 * ROWS * WIDTH * HIDDEN and not policy.missed()


@pytest.mark.exhaustive
def test_training_has_the_same_losses_and_the_same_report():
    """The policy keeps named values; others keep less with the flag (`memory/remat`)."""
    losses, reports = [], []
    for flag in (False, True):
        with remat3(flag):
            program = small_program({"model.n_layers": 2, "remat.policy": "minimal"})
            compilation = program.compile_for_report()
            losses.append(run_losses(program, 3, step=compilation.compiled))
            reports.append(report_of(compilation))
    np.testing.assert_array_equal(*losses)
    assert "context" in reports[0].residuals_by_name
    assert reports[0].residuals_by_name == reports[1].residuals_by_name
    assert reports[0].breakdown == reports[1].breakdown
